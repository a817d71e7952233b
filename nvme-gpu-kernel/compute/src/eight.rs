//! Eight consecutive elements of a quantisation block, a quarter of it, decoded from 32-bit words.

#[cfg(all(target_arch = "nvptx64", not(feature = "gemm")))]
use crate::arch::chosen_bytes;
#[cfg(target_arch = "nvptx64")]
use crate::arch::{byte_number, funnel, of_half};
#[cfg(not(target_arch = "nvptx64"))]
use host::{byte_number, chosen_bytes, funnel, of_half};
use nvme_formats::StoredFormat;

/// 2^23 plus the bias of a signed byte: 8-bit numbers are the low mantissa bits of such a float.
const OF_BYTES: f32 = 8_388_736.0;
/// 2^23 plus the bias of Q4_0's 4-bit numbers.
const OF_Q4_0: f32 = 8_388_616.0;
const OF_Q4_1: f32 = 8_388_608.0;

/// Converts the four bytes of `word` to numbers below 256, minus the bias `less`, which includes 2^23.
#[inline(always)]
fn bytes(word: u32, less: f32) -> [f32; 4] {
    [
        byte_number::<0x7540>(word) - less,
        byte_number::<0x7541>(word) - less,
        byte_number::<0x7542>(word) - less,
        byte_number::<0x7543>(word) - less,
    ]
}

/// Converts four numbers of Q8_0.
#[inline(always)]
fn of_8_bits(word: u32) -> [f32; 4] {
    bytes(word ^ 0x8080_8080, OF_BYTES)
}

/// Converts the lower halves of four bytes, minus the bias `less`: [`OF_Q4_0`] or [`OF_Q4_1`].
#[inline(always)]
fn of_4_bits(word: u32, less: f32) -> [f32; 4] {
    bytes(word & 0x0F0F_0F0F, less)
}

/// Converts E2M1 numbers in the lower halves of four bytes to twice their values.
#[cfg(any(test, feature = "lanes", not(feature = "gemm")))]
#[inline(always)]
fn of_e2m1(word: u32) -> [f32; 4] {
    // The magnitudes 0 to 7, doubled, are bytes of two words; selectors are four neighbouring numbers of 4 bits.
    let sizes = word & 0x0707_0707;
    let pairs = (sizes | sizes >> 4) & 0x00FF_00FF;
    let numbers = bytes(
        chosen_bytes(0x0302_0100, 0x0C08_0604, pairs | pairs >> 8),
        OF_Q4_1,
    );
    let sign = |number: f32, shift: u32| f32::from_bits(number.to_bits() | word << shift & 1 << 31);
    [
        sign(numbers[0], 28),
        sign(numbers[1], 20),
        sign(numbers[2], 12),
        sign(numbers[3], 4),
    ]
}

/// Returns half of the power of two that a byte of E8M0 is, 2^(e - 127).
#[cfg(any(test, feature = "lanes", not(feature = "gemm")))]
#[inline(always)]
pub fn half_power(exponent: u32) -> f32 {
    // 2^-128 and 2^-127 are subnormal.
    f32::from_bits(match exponent {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        _ => (exponent - 1) << 23,
    })
}

#[cfg(any(test, feature = "lanes", not(feature = "gemm")))]
#[inline(always)]
pub fn sum(values: [f32; 4], x: [f32; 4]) -> f32 {
    values[0] * x[0] + values[1] * x[1] + (values[2] * x[2] + values[3] * x[3])
}

/// Loads `N` words from byte `byte` on, an even number. `word` loads words at multiples of 4, up to 4 bytes
/// past the end.
#[inline(always)]
pub fn words<const N: usize>(byte: u32, word: impl Fn(u32) -> u32) -> [u32; N] {
    let mut at = byte & !3;
    let mut low = word(at);
    [(); N].map(|()| {
        at += 4;
        let high = word(at);
        let whole = funnel(low, high, byte % 4 * 8);
        low = high;
        whole
    })
}

/// Eight stored elements of a quantisation block.
#[derive(Clone, Copy)]
pub struct EightElements {
    pub scale: f32,
    /// Value added to each product, for formats that have one (the minimum of Q4_1).
    pub least: Option<f32>,
    pub numbers: [[f32; 4]; 2],
}

impl EightElements {
    /// Decodes elements 8 * `quarter` to 8 * `quarter` + 7 of the block that begins at byte `byte`, an even
    /// number, of a format that [has scales of units](StoredFormat::has_unit_scales).
    ///
    /// `half` loads 16 bits at an even byte, `word` 32 bits at a multiple of 4: from up to 2 bytes before the
    /// block to 4 bytes past it.
    #[inline(always)]
    pub fn of(
        stored: StoredFormat,
        (byte, quarter): (u32, u32),
        half: impl Fn(u32) -> u16,
        word: impl Fn(u32) -> u32,
    ) -> Self {
        let has_least = matches!(stored, StoredFormat::Q4_1);
        let begin = if has_least { byte + 4 } else { byte + 2 };
        let numbers = if matches!(stored, StoredFormat::Q8_0) {
            words(begin + quarter * 8, word).map(of_8_bits)
        } else {
            // The upper halves of the bytes are elements 16 to 31 of the block.
            let less = if has_least { OF_Q4_1 } else { OF_Q4_0 };
            let shift = quarter / 2 * 4;
            words(begin + quarter % 2 * 8, word).map(|word| of_4_bits(word >> shift, less))
        };
        Self {
            scale: of_half(half(byte)),
            least: has_least.then(|| of_half(half(byte + 2))),
            numbers,
        }
    }

    /// Decodes elements 8 * `quarter` to 8 * `quarter` + 7 of the block of MXFP4 that begins at byte `byte`, which may
    /// be odd; `half` and `word` as for [`of`](Self::of).
    #[cfg(any(test, feature = "lanes", not(feature = "gemm")))]
    #[inline(always)]
    pub fn of_mxfp4(
        (byte, quarter): (u32, u32),
        half: impl Fn(u32) -> u16,
        word: impl Fn(u32) -> u32,
    ) -> Self {
        let shift = quarter / 2 * 4;
        Self {
            // Half of it, because the numbers are doubled.
            scale: half_power(u32::from(half(byte & !1) >> (byte % 2 * 8)) & 0xFF),
            least: None,
            numbers: words(byte + 1 + quarter % 2 * 8, word).map(|word| of_e2m1(word >> shift)),
        }
    }

    /// Returns the elements, bit for bit those of [`StoredFormat::element`].
    #[cfg(any(test, feature = "gemm"))]
    #[inline(always)]
    pub fn values(self) -> [[f32; 4]; 2] {
        self.numbers.map(|numbers| {
            numbers.map(|number| match self.least {
                Some(least) => self.scale * number + least,
                None => self.scale * number,
            })
        })
    }

    /// Returns the sum of their products with `x`.
    #[cfg(any(test, feature = "lanes", not(feature = "gemm")))]
    #[inline(always)]
    pub fn dot(self, x: [[f32; 4]; 2]) -> f32 {
        let product = self.scale * (sum(self.numbers[0], x[0]) + sum(self.numbers[1], x[1]));
        let ones = [1.0; 4];
        match self.least {
            Some(least) => product + least * (sum(ones, x[0]) + sum(ones, x[1])),
            None => product,
        }
    }
}

/// Replacements for GPU instructions on the host.
#[cfg(not(target_arch = "nvptx64"))]
pub mod host {
    pub use nvme_formats::f32_of_f16 as of_half;

    pub fn byte_number<const SELECT: u32>(word: u32) -> f32 {
        f32::from_bits(0x4B00_0000 | word >> (SELECT % 4 * 8) & 0xFF)
    }

    pub fn chosen_bytes(low: u32, high: u32, selector: u32) -> u32 {
        let all = (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
        u32::from_le_bytes([0, 4, 8, 12].map(|at| {
            let byte = all[(selector >> at & 7) as usize];
            let is_sign = selector >> at & 8 != 0;
            if is_sign {
                (byte as i8 >> 7) as u8
            } else {
                byte
            }
        }))
    }

    pub fn funnel(low: u32, high: u32, shift: u32) -> u32 {
        ((u64::from(high) << 32 | u64::from(low)) >> shift) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::{EightElements, words};
    use nvme_formats::{BlockFormat, StoredFormat};

    const UNITS: u32 = 9;

    /// Units of any bits, at every even byte of a word: `check` gets functions of the halves and words of the bytes.
    fn with_units(check: impl Fn(StoredFormat, u32, &dyn Fn(u32) -> u16, &dyn Fn(u32) -> u32)) {
        let mut seed = 7u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        };
        for stored in [StoredFormat::Q4_0, StoredFormat::Q4_1, StoredFormat::Q8_0] {
            assert!(stored.has_unit_scales());
            for begin in [0, 2, 4, 6] {
                let bytes: Vec<u8> = (0..400).map(|_| random()).collect();
                let of = |at: u32| bytes[at as usize];
                let half = |at: u32| u16::from_le_bytes([0, 1].map(|i| of(at + i)));
                let word = |at: u32| {
                    assert!(at.is_multiple_of(4));
                    u32::from_le_bytes([0, 1, 2, 3].map(|i| of(at + i)))
                };
                check(stored, begin, &half, &word);
            }
        }
    }

    #[test]
    fn values_are_those_of_elements() {
        with_units(|stored, begin, half, word| {
            let (_, bytes) = stored.block();
            for (unit, quarter) in (0..UNITS).flat_map(|unit| (0..4).map(move |at| (unit, at))) {
                let eight = EightElements::of(stored, (begin + unit * bytes, quarter), half, word);
                for (i, found) in (quarter * 8..).zip(eight.values().as_flattened()) {
                    let expected = stored.element(unit, i, |k| half(begin + 2 * k));
                    let same = found.to_bits() == expected.to_bits();
                    let place = format!("{stored:?} {begin} {unit} {i}: {found} {expected}");
                    assert!(same || found.is_nan() && expected.is_nan(), "{place}");
                }
            }
        });
    }

    #[test]
    fn blocks_of_mxfp4_begin_at_any_byte() {
        let bytes: Vec<u8> = (0..200u32)
            .map(|at| (at * 97 + at * at % 23) as u8)
            .collect();
        for (begin, scale) in [(0, 0), (1, 1), (2, 127), (3, 200), (21, 254)] {
            let mut bytes = bytes.clone();
            bytes[begin as usize] = scale;
            let of = |at: u32| bytes[at as usize];
            let half = |at: u32| {
                assert!(at.is_multiple_of(2));
                u16::from_le_bytes([0, 1].map(|i| of(at + i)))
            };
            let word = |at: u32| {
                assert!(at.is_multiple_of(4));
                u32::from_le_bytes([0, 1, 2, 3].map(|i| of(at + i)))
            };
            for quarter in 0..4 {
                let eight = EightElements::of_mxfp4((begin, quarter), half, word);
                for (i, found) in (quarter * 8..).zip(eight.values().as_flattened()) {
                    let expected = BlockFormat::Mxfp4.value(i, |at| of(begin + at));
                    assert_eq!(*found, expected, "{begin} {i}");
                }
            }
        }
    }

    #[test]
    fn dots_add_up_to_units() {
        with_units(|stored, begin, half, word| {
            let (_, bytes) = stored.block();
            let x = |i: u32| (i * 7 % 32) as f32 / 32.0 - 0.5;
            for unit in 0..UNITS {
                let of_unit = |k: u32| half(begin + 2 * k);
                let dot = |quarter: u32| {
                    let four = |first: u32| [0, 1, 2, 3].map(|i| x(first + i));
                    let eight =
                        EightElements::of(stored, (begin + unit * bytes, quarter), half, word);
                    eight.dot([four(quarter * 8), four(quarter * 8 + 4)])
                };
                let found: f32 = (0..4).map(dot).sum();
                let expected = stored.dot(unit, of_unit, x);
                let mut sizes = 0.0;
                stored.each(unit, of_unit, |i, value| sizes += (value * x(i)).abs());
                let near = (found - expected).abs() <= 1e-5 * sizes;
                let place = format!("{stored:?} {begin} {unit}: {found} {expected}");
                assert!(near || !expected.is_finite(), "{place}");
            }
        });
    }

    #[test]
    fn words_begin_at_even_bytes() {
        let word = |at: u32| u32::from_le_bytes([0, 1, 2, 3].map(|i| (at + i) as u8));
        assert_eq!(words(4, word), [0x0706_0504, 0x0B0A_0908]);
        assert_eq!(words(6, word), [0x0908_0706, 0x0D0C_0B0A, 0x1110_0F0E]);
    }
}
