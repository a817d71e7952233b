//! Primes above a bound. Deterministic: Miller and Rabin's test with the bases that decide every 64-bit number.

/// Bases for which no composite number below 2^64 passes (Sorenson and Webster, "Strong pseudoprimes to twelve prime
/// bases", 2015).
const BASES: [u64; 12] = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37];

/// Returns the smallest prime above `bound`, or none that fits into 63 bits.
pub fn next_above(bound: u64) -> Option<u64> {
    (bound.checked_add(1)?..=i64::MAX as u64).find(|&number| is_prime(number))
}

fn is_prime(number: u64) -> bool {
    if number < 2 {
        return false;
    }
    if let Some(base) = BASES.into_iter().find(|base| number.is_multiple_of(*base)) {
        return number == base;
    }
    let twos = (number - 1).trailing_zeros();
    let odd = (number - 1) >> twos;
    BASES.into_iter().all(|base| {
        let mut power = power(base, odd, number);
        if power == 1 || power == number - 1 {
            return true;
        }
        (1..twos).any(|_| {
            power = product(power, power, number);
            power == number - 1
        })
    })
}

fn product(one: u64, other: u64, modulus: u64) -> u64 {
    (u128::from(one) * u128::from(other) % u128::from(modulus)) as u64
}

fn power(base: u64, mut exponent: u64, modulus: u64) -> u64 {
    let (mut square, mut result) = (base % modulus, 1);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = product(result, square, modulus);
        }
        square = product(square, square, modulus);
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn primes_are_those_of_trial_division() {
        for number in (0..4000).chain(16_000_000..16_000_200) {
            let divides = (2..number)
                .take_while(|d| d * d <= number)
                .any(|d| number % d == 0);
            assert_eq!(is_prime(number), number >= 2 && !divides, "{number}");
        }
        // Strong pseudoprimes to the first bases, and the largest prime of 63 bits.
        for composite in [
            2047,
            1_373_653,
            25_326_001,
            3_215_031_751,
            3_825_123_056_546_413_051,
        ] {
            assert!(!is_prime(composite), "{composite}");
        }
        assert!(is_prime((1 << 63) - 25));
        assert_eq!(next_above((1 << 63) - 25), None);
    }
}
