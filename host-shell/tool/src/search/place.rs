//! Where an index lies.

use crate::common::number;
use clap::Args;
use nvme_host::StoreOptions;
use nvme_host::units::parse_bytes;
use std::time::Duration;

/// Where on the device, and how it is reached.
#[derive(Args)]
pub struct IndexPlace {
    /// First byte of the index on the device, a multiple of 4096
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    pub offset: u64,
    /// Namespace
    #[arg(long, short = 'n', value_name = "NSID", default_value_t = 1, value_parser = number::<u32>(1..=0xFFFF_FFFE))]
    namespace_id: u32,
    /// How long a command may take before it is aborted
    #[arg(long, short = 't', visible_alias = "timeout", value_name = "MS", default_value_t = 5000, value_parser = number::<u64>(1..=3_600_000))]
    timeout_ms: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

impl IndexPlace {
    /// Returns the options of a store with `queues` queues of the CPU.
    pub fn options(&self, queues: u32) -> StoreOptions {
        StoreOptions {
            nsid: self.namespace_id,
            queues,
            timeout: self.timeout(),
            ..StoreOptions::default()
        }
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}
