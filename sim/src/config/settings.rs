//! The settings of a controller and of its namespaces, with the range of each value.
//! [`Config::default`] is a common drive; a test changes the fields that it needs.

use crate::config::fault::FaultPlan;
use crate::medium::latency::LatencyProfile;
use crate::medium::store::{BlockStore, MemoryStore};
use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;

/// Settings of one namespace.
pub struct NamespaceConfig {
    /// Block size: 512 or 4096.
    pub block_bytes: u32,
    /// Metadata bytes per block, in a separate buffer (MPTR); 0 for none. Kept in memory only.
    pub metadata_bytes: u16,
    /// Store of its blocks.
    pub store: Box<dyn BlockStore + Send + Sync>,
    /// True if writes are rejected.
    pub read_only: bool,
    /// Optimal I/O boundary (NOIOB) in blocks; 0 for none.
    pub noiob: u16,
}

impl NamespaceConfig {
    /// Makes a writable namespace without metadata.
    pub fn new(block_bytes: u32, store: Box<dyn BlockStore + Send + Sync>) -> Self {
        Self {
            block_bytes,
            metadata_bytes: 0,
            store,
            read_only: false,
            noiob: 0,
        }
    }
}

/// Settings of a controller. Values outside the ranges below are an error of
/// [`Controller::new`](crate::Controller::new).
pub struct Config {
    /// Namespaces 1, 2, ... in order, at most 256.
    pub namespaces: Vec<NamespaceConfig>,
    /// I/O queue pairs, 1 to 4,095.
    pub max_queues: u16,
    /// Largest queue in entries (CAP.MQES), 2 to 65,536.
    pub mqes: u32,
    /// MDTS: a command moves at most 2^MDTS pages of CAP.MPSMIN; 0 is no limit.
    pub mdts: u8,
    /// CAP.DSTRD: doorbells are 4 << DSTRD bytes apart, 0 to 10.
    pub dstrd: u8,
    /// CAP.MPSMIN, 0 (4 KiB) to 4 (64 KiB).
    pub mpsmin: u8,
    /// CAP.MPSMAX, MPSMIN to 4.
    pub mpsmax: u8,
    /// True if queues must be physically contiguous (CAP.CQR).
    pub cqr: bool,
    /// True if there is a volatile write cache.
    pub write_cache: bool,
    /// Size of each namespace's write cache, in bytes.
    pub cache_bytes: usize,
    /// True if I/O commands may use SGLs.
    pub sgl: bool,
    /// True if NVM subsystem reset is supported.
    pub nssr: bool,
    /// Serial number, at most 20 ASCII characters.
    pub serial: String,
    /// Model number, at most 40 ASCII characters.
    pub model: String,
    /// Preferred host memory buffer in units of 4 KiB; 0 for none.
    pub hmpre: u32,
    /// Minimum host memory buffer in units of 4 KiB.
    pub hmmin: u32,
    /// Time that commands take.
    pub profile: LatencyProfile,
    /// Faults to inject.
    pub faults: FaultPlan,
    /// Abort commands outstanding at the same time, 1 to 256.
    pub abort_limit: u16,
    /// Asynchronous event requests outstanding at the same time, 1 to 256.
    pub aer_limit: u16,
    /// Virtual nanoseconds from a change of CC.EN to that of CSTS.RDY.
    pub ready_delay_ns: u64,
    /// Virtual nanoseconds that a shutdown takes.
    pub shutdown_delay_ns: u64,
    /// Virtual nanoseconds of one pass of a sanitize operation over all namespaces; 0 for the speed
    /// of the stores.
    pub sanitize_ns: u64,
    /// Number of interrupt vectors.
    pub vectors: u16,
    /// Number of threads that a [`Runner`](crate::Runner) should have, 1 to 64.
    pub threads: usize,
    /// Image files that were created for this configuration. A caller that fails before they are
    /// used should remove them, as [`vfio_user::Server::bind`](crate::vfio_user::Server::bind)
    /// does.
    #[cfg(feature = "std")]
    pub created: Vec<crate::medium::file::CreatedImage>,
    /// True if a protocol auditor watches the controller: see
    /// [`Controller::findings`](crate::Controller::findings).
    pub audit: bool,
}

impl Default for Config {
    /// Makes a common drive with one namespace: 64 MiB in memory, blocks of 4 KiB.
    fn default() -> Self {
        let store = MemoryStore::new(64 << 20).expect("64 MiB of memory");
        Self {
            namespaces: Vec::from([NamespaceConfig::new(4096, Box::new(store))]),
            ..Self::empty()
        }
    }
}

impl Config {
    /// Makes the default configuration without its namespace.
    pub fn empty() -> Self {
        Self {
            namespaces: Vec::new(),
            max_queues: 64,
            mqes: 4096,
            mdts: 5,
            dstrd: 0,
            mpsmin: 0,
            mpsmax: 4,
            cqr: true,
            write_cache: true,
            cache_bytes: 16 << 20,
            sgl: true,
            nssr: true,
            serial: String::from("SIM00000000000000001"),
            model: String::from("nvme-gpu simulated controller"),
            hmpre: 0,
            hmmin: 0,
            profile: LatencyProfile::NONE,
            faults: FaultPlan::default(),
            abort_limit: 4,
            aer_limit: 4,
            ready_delay_ns: 0,
            shutdown_delay_ns: 0,
            sanitize_ns: 0,
            vectors: 65,
            threads: 1,
            #[cfg(feature = "std")]
            created: Vec::new(),
            audit: false,
        }
    }

    /// Checks every value.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        self.check_values()?;
        let bad = |option, why| Err(ConfigError::new(option, why));
        if self.namespaces.is_empty() || self.namespaces.len() > 256 {
            return bad("ns", "must be 1 to 256 namespaces");
        }
        for namespace in &self.namespaces {
            if !crate::medium::namespace::FORMATS.contains(&namespace.block_bytes) {
                return bad("block", "must be 512 or 4096");
            }
            let bytes = namespace.store.bytes();
            if bytes == 0 || !bytes.is_multiple_of(u64::from(namespace.block_bytes)) {
                return bad("size", "must be a multiple of the block size, and not 0");
            }
        }
        Ok(())
    }

    /// Checks every value except the namespaces.
    pub(crate) fn check_values(&self) -> Result<(), ConfigError> {
        let bad = |option, why| Err(ConfigError::new(option, why));
        if !(1..=4095).contains(&self.max_queues) {
            return bad("queues", "must be 1 to 4095");
        }
        if !(2..=65_536).contains(&self.mqes) {
            return bad("mqes", "must be 2 to 65536 entries");
        }
        if self.dstrd > 10 {
            return bad("dstrd", "must be 0 to 10");
        }
        if self.mpsmin > self.mpsmax || self.mpsmax > 4 {
            return bad("mpsmin", "must not be above mpsmax, which is at most 4");
        }
        if self.mdts > 16 {
            return bad("mdts", "must be 0 to 16");
        }
        if !(1..=256).contains(&self.abort_limit) || !(1..=256).contains(&self.aer_limit) {
            return bad("limit", "abort and event limits must be 1 to 256");
        }
        if !(1..=64).contains(&self.threads) {
            return bad("threads", "must be 1 to 64");
        }
        Ok(())
    }
}

/// Error in the configuration of a device: the option, and the value that it may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The wrong option, or the path of the image.
    pub option: String,
    /// The cause, with the remedy.
    pub why: String,
    /// Error number of the operating system, if a file was the cause.
    pub errno: Option<i32>,
}

impl ConfigError {
    pub(crate) fn new(option: &str, why: &str) -> Self {
        Self {
            option: String::from(option),
            why: String::from(why),
            errno: None,
        }
    }
}

impl core::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}: {}", self.option, self.why)
    }
}

impl core::error::Error for ConfigError {}
