//! How a controller is brought up and used.

use super::notice::Notify;
#[cfg(doc)]
use crate::error::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Where the rings of I/O queues lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rings {
    /// In memory of this process.
    #[default]
    Host,
    /// In the controller memory buffer, as far as the controller takes them there.
    Controller,
}

/// How a controller is brought up and used.
#[derive(Clone, Debug)]
pub struct Config {
    /// I/O queue pairs to ask for; the controller may grant fewer.
    pub queue_pairs: u32,
    /// How long a command may take before it is aborted.
    pub timeout: Duration,
    /// Upper bound of one command's transfer in bytes, whatever MDTS allows.
    pub max_transfer: u64,
    /// Most bytes lent as host memory buffer; 0 lends none.
    pub max_host_memory: u64,
    /// Where the rings of I/O queues lie.
    pub rings: Rings,
    /// Whether waiting threads sleep until an interrupt comes, instead of polling all the time.
    pub interrupts: bool,
    /// When set, waiting calls return [`Error::Interrupted`].
    pub stop: Option<Arc<AtomicBool>>,
    /// Called with events of the controller, and with waits that are long.
    pub notify: Notify,
}

impl Default for Config {
    /// 16 queue pairs, 5 s per command, transfers up to 1 MiB, host memory up to 64 MiB.
    fn default() -> Self {
        Self {
            queue_pairs: 16,
            timeout: Duration::from_secs(5),
            max_transfer: 1 << 20,
            max_host_memory: 64 << 20,
            rings: Rings::Host,
            interrupts: false,
            stop: None,
            notify: Notify::default(),
        }
    }
}
