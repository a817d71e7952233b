//! Block floating point in four int8 limbs, operands of `mma.s8`: the numbers of a unit share a power of two,
//! and each is an integer of four digits of 8 bits. The tensor cores multiply such digits with 8-bit weights
//! without rounding.
//!
//! A number is rounded towards zero to a multiple of 2^-30 of the power of two above the largest number of
//! its unit.

use core::ops::Range;

/// Digits of a number.
pub const DIGITS: u32 = 4;
/// Bits of the numbers without the sign: with digits from -128 to 127 no digit overflows.
const BITS: u32 = 30;
/// Exponents, as stored in `f32`, for which both the power and its inverse exist.
const EXPONENTS: Range<u32> = 40..255;

/// The factors between the numbers of a unit and integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UnitPowers {
    /// Factor from a number to an integer.
    pub up: f32,
    /// Factor from an integer to a number: NaN if one of the unit's numbers is not finite.
    pub down: f32,
}

impl UnitPowers {
    /// Returns the factors of a unit whose largest number has the bits `largest`, without its sign. `less`,
    /// below 9, is the number of powers of two by which `down` is reduced.
    ///
    /// A unit of very small numbers gets the factors of the smallest exponent, so that both stay finite and
    /// normal; a unit with an infinity or a NaN gets NaN, which reaches every product with it.
    #[inline(always)]
    pub fn of(largest: u32, less: u32) -> Self {
        let exponent = largest >> 23;
        if exponent >= EXPONENTS.end {
            return Self {
                up: 0.0,
                down: f32::NAN,
            };
        }
        let exponent = if exponent < EXPONENTS.start {
            EXPONENTS.start
        } else {
            exponent
        };
        // The unit's numbers are below 2^(exponent - 126).
        Self {
            // Both factors are powers of two, built from their exponent fields, so that multiplying by them
            // is exact.
            up: f32::from_bits((127 + 126 + BITS - exponent) << 23),
            down: f32::from_bits((exponent + 127 - 126 - BITS - less) << 23),
        }
    }

    /// Returns the digits of `number`, a byte each, the least significant first.
    #[inline(always)]
    pub fn digits(self, number: f32) -> u32 {
        const CARRY: u32 = 0x0080_8080;
        let integer = (number * self.up) as i32 as u32;
        // Digits are signed: a digit of 128 or more becomes negative and carries one into the next digit.
        // Adding 128 to the lower three bytes makes exactly those carries, and the XOR then subtracts 128
        // from each of them again.
        integer.wrapping_add(CARRY) ^ CARRY
    }
}

/// Transposes four words: word `k` of the result has byte `k` of each of them, the first one's lowest. It
/// collects the same digit of four numbers.
#[inline(always)]
pub fn transposed([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    const EVEN: u32 = 0x00FF_00FF;
    const LOWER: u32 = 0xFFFF;
    let even = |a: u32, b: u32| a & EVEN | (b & EVEN) << 8;
    let odd = |a: u32, b: u32| a >> 8 & EVEN | b & !EVEN;
    let (even, odd) = ([even(a, b), even(c, d)], [odd(a, b), odd(c, d)]);
    let low = |[ab, cd]: [u32; 2]| ab & LOWER | cd << 16;
    let high = |[ab, cd]: [u32; 2]| ab >> 16 | cd & !LOWER;
    [low(even), low(odd), high(even), high(odd)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the digits of `number` stand for.
    fn number_of(powers: UnitPowers, digits: u32) -> f64 {
        let digits: [u8; DIGITS as usize] = digits.to_le_bytes();
        let digits = digits.map(|digit| f64::from(digit as i8));
        let sum = (0..).zip(digits).map(|(at, digit)| digit * 256f64.powi(at));
        sum.sum::<f64>() * f64::from(powers.down)
    }

    fn largest(numbers: &[f32]) -> u32 {
        let sizes = numbers.iter().map(|number| number.abs().to_bits());
        sizes.max().unwrap_or(0)
    }

    #[test]
    fn digits_are_the_number_within_a_part_of_the_largest() {
        for scale in [1e-20f32, 1e-3, 1.0, 3e4, 1.7e38] {
            for numbers in [
                [1.0f32, -1.0, 0.999_999_94, -0.5],
                [1.999_999_9, -1.999_999_9, 1e-6, -1e-9],
                [0.0, -0.0, 0.333_333_34, 1.5],
            ] {
                let numbers = numbers.map(|number| number * scale);
                let size = largest(&numbers);
                for less in [0, 4] {
                    let powers = UnitPowers::of(size, less);
                    for number in numbers {
                        let found = number_of(powers, powers.digits(number)) * f64::from(1 << less);
                        let allowed = f64::from(f32::from_bits(size)) * 2f64.powi(-29);
                        let off = (found - f64::from(number)).abs();
                        assert!(off <= allowed, "{number} {found}");
                    }
                }
            }
        }
    }

    #[test]
    fn digits_of_four_numbers_come_to_lie_side_by_side() {
        let of = |number: u8| u32::from_le_bytes([0, 1, 2, 3].map(|digit| number * 16 + digit));
        let words = transposed([1, 2, 3, 4].map(of)).map(u32::to_le_bytes);
        for (digit, word) in (0..).zip(words) {
            assert_eq!(word, [1, 2, 3, 4].map(|number: u8| number * 16 + digit));
        }
    }

    #[test]
    fn units_of_zeros_and_of_the_least_numbers_are_small() {
        for least in [0.0, f32::from_bits(1), 1e-40, 1e-30] {
            let powers = UnitPowers::of(largest(&[least]), 4);
            assert!(powers.up.is_finite() && powers.down > 0.0);
            let off = number_of(powers, powers.digits(least)) * 16.0 - f64::from(least);
            assert!(off.abs() < 1e-33, "{least} {off}");
        }
    }

    #[test]
    fn units_with_a_number_that_is_not_finite_are_nan() {
        for number in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let powers = UnitPowers::of(largest(&[number, 1.0]), 0);
            assert!(powers.down.is_nan());
            assert!(number_of(powers, powers.digits(1.0)).is_nan());
        }
    }
}
