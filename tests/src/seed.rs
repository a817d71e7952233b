//! Randomness that repeats.

/// splitmix64: small, and good enough to draw schedules from.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The sequence that starts at `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// A test's seed: prints itself when the test panics.
#[derive(Debug)]
pub struct Seed(u64);

impl Seed {
    /// `default`, or `NVME_TEST_SEED` where it is set.
    ///
    /// # Panics
    /// When the variable is not a number.
    pub fn new(default: u64) -> Self {
        let given = std::env::var("NVME_TEST_SEED").ok();
        Self(given.map_or(default, |text| {
            text.parse().expect("NVME_TEST_SEED is a number")
        }))
    }

    /// The number.
    pub fn get(&self) -> u64 {
        self.0
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("repeat with NVME_TEST_SEED={}", self.0);
        }
    }
}
