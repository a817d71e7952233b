//! Options that name the place of an index on a device, and the access to it.

use crate::common::{CommandTimeout, NamespaceId, OutputForm};
use clap::Args;
use nvme_host::StoreOptions;
use nvme_host::units::parse_bytes;
use std::time::Duration;

/// Position on the device, and access to it.
#[derive(Args)]
pub struct IndexPlace {
    /// First byte of the index on the device, a multiple of 4096
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    pub offset: u64,
    #[command(flatten)]
    namespace: NamespaceId,
    #[command(flatten)]
    timeout: CommandTimeout,
    #[command(flatten)]
    pub form: OutputForm,
}

impl IndexPlace {
    /// Returns the options of a store with `queues` queues of the CPU.
    pub fn options(&self, queues: u32) -> StoreOptions {
        StoreOptions {
            nsid: self.namespace.namespace_id,
            queues,
            timeout: self.timeout(),
            ..StoreOptions::default()
        }
    }

    pub fn timeout(&self) -> Duration {
        self.timeout.limit()
    }
}
