//! The random numbers of numpy's `default_rng(seed).integers(0, bound)`, from which a model takes its multipliers.
//!
//! Sources: numpy's documentation of `SeedSequence` and `PCG64`; M. O'Neill, "PCG: A Family of Simple Fast
//! Space-Efficient Statistically Good Algorithms" (XSL RR 128/64); D. Lemire, "Fast Random Integer Generation in an
//! Interval", 2019. numpy promises that bit generators keep their streams; the constants of the published models and
//! numbers of numpy 2 are in the tests.

const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;

/// A generator with numpy's algorithm.
pub struct NumpyRandom {
    state: u128,
    increment: u128,
}

impl NumpyRandom {
    /// Returns `numpy.random.default_rng(seed)`.
    pub fn new(seed: u64) -> Self {
        let words = seed_words(seed);
        let pair = |at: usize| u128::from(words[at]) << 64 | u128::from(words[at + 1]);
        let mut made = Self {
            state: 0,
            increment: pair(2) << 1 | 1,
        };
        made.step();
        made.state = made.state.wrapping_add(pair(0));
        made.step();
        made
    }

    fn step(&mut self) {
        self.state = self
            .state
            .wrapping_mul(MULTIPLIER)
            .wrapping_add(self.increment);
    }

    fn next(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// Returns a number of `0..bound`, for a bound above 2^32: below, numpy draws 32-bit numbers.
    pub fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 1 << 32);
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let wide = u128::from(self.next()) * u128::from(bound);
            if wide as u64 >= threshold {
                return (wide >> 64) as u64;
            }
        }
    }
}

/// Returns `SeedSequence(seed).generate_state(4, uint64)`.
fn seed_words(seed: u64) -> [u64; 4] {
    let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
    let mut constant = 0x43B0_D7E5_u32;
    let mut hashed = |value: u32| {
        let value = value ^ constant;
        constant = constant.wrapping_mul(0x931E_8875);
        let value = value.wrapping_mul(constant);
        value ^ value >> 16
    };
    let mut pool = entropy.map(&mut hashed);
    for from in 0..4 {
        for to in (0..4).filter(|to| *to != from) {
            let mixed = pool[to]
                .wrapping_mul(0xCA01_F9DD)
                .wrapping_sub(hashed(pool[from]).wrapping_mul(0x4973_F715));
            pool[to] = mixed ^ mixed >> 16;
        }
    }
    let mut constant = 0x8B51_F9DD_u32;
    let mut word = |at: usize| {
        let value = pool[at % 4] ^ constant;
        constant = constant.wrapping_mul(0x58F3_8DED);
        let value = value.wrapping_mul(constant);
        u64::from(value ^ value >> 16)
    };
    std::array::from_fn(|at| word(2 * at) | word(2 * at + 1) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_numpy() {
        // numpy 2: default_rng(seed).integers(0, bound, 3, dtype=int64).
        let cases: [(u64, u64, [u64; 3]); 5] = [
            (
                10007,
                46540287046930,
                [38316746812075, 2419982180278, 17980164066949],
            ),
            (
                140098,
                46540287046930,
                [33859022862322, 25755873114645, 15460955565406],
            ),
            (0, 1099511627776, [700346781657, 296633628802, 45050865998]),
            (
                9223372036854788153,
                9223372036854775807,
                [4558064500419378957, 5312821537732070764, 393798851670990056],
            ),
            (7, 8589934593, [5369529172, 7707007866, 6663089343]),
        ];
        for (seed, bound, numbers) in cases {
            let mut random = NumpyRandom::new(seed);
            assert_eq!([0; 3].map(|_: u64| random.below(bound)), numbers, "{seed}");
        }
    }
}
