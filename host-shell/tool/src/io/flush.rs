//! `flush`: makes earlier writes durable.

use crate::admin::passthru::dword;
use crate::common::{DeviceArgs, output};
use clap::Args;
use nvme_host::Result;
use nvme_host::core::spec::Nsid;
use serde_json::json;

/// Commit everything that was written to a namespace
#[derive(Args)]
pub struct FlushCommand {
    #[command(flatten)]
    device: DeviceArgs,
    /// Namespace; 0xffffffff for all of them, where the controller takes that
    #[arg(long, short = 'n', value_name = "NSID", default_value = "1", value_parser = dword)]
    namespace_id: u32,
}

impl FlushCommand {
    pub fn run(self) -> Result<()> {
        let controller = self.device.start()?;
        match Nsid(self.namespace_id) {
            Nsid::ALL => controller.flush_all()?,
            nsid => controller.namespace(nsid)?.flush()?,
        }
        if self.device.form.json {
            return output::json(&json!({ "flushed": true, "nsid": self.namespace_id }));
        }
        output::print("NVMe Flush: success")
    }
}
