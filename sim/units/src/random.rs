//! SplitMix64, a generator of random numbers from a seed: the same seed gives the same numbers on
//! every machine, so a failing test can be repeated. Not for secrets.

/// A small, fast generator of seeded random numbers. Not for secrets.
#[derive(Clone, Debug)]
pub struct SplitMix(u64);

impl SplitMix {
    /// Makes a generator whose numbers depend on `seed` alone.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 random bits.
    #[inline]
    pub const fn next_word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Returns a random number below `bound`, which is not 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_word()) * u128::from(bound)) >> 64) as u64
    }

    /// Fills `bytes` with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// Returns a hash of one word. Different words have different hashes.
#[inline]
pub const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::SplitMix;

    /// The first numbers of the published implementation for the seed 1234567.
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut random = SplitMix::new(1_234_567);
        assert_eq!(random.next_word(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_word(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn every_length_is_filled_and_no_bound_reached() {
        let mut random = SplitMix::new(1);
        let mut bytes = [0; 13];
        random.fill(&mut bytes);
        assert_ne!(bytes[8..], [0; 5]);
        assert!((0..100).all(|_| random.below(3) < 3));
    }
}
