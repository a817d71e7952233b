//! Random numbers of the tests: drawn from a seed that a failing test prints.

use nvme_units::SplitMix;

/// The random numbers from which schedules are drawn.
#[derive(Clone, Debug)]
pub struct Rng(SplitMix);

impl Rng {
    /// Returns the sequence that starts at `seed`.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix::new(seed))
    }

    /// Returns the next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0.next_word()
    }

    /// Returns a number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill(bytes);
    }
}

/// A test's seed: prints itself when the test panics.
#[derive(Debug)]
pub struct Seed(u64);

impl Seed {
    /// Starts from `default`, or from `NVME_TEST_SEED` if that is set.
    ///
    /// # Panics
    /// When the variable is not a number.
    pub fn new(default: u64) -> Self {
        let given = std::env::var("NVME_TEST_SEED").ok();
        Self(given.map_or(default, |text| {
            text.parse().expect("NVME_TEST_SEED is a number")
        }))
    }

    /// Returns the number.
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
