//! `flush`: makes what was written durable.

use crate::common::{NamespaceArgs, output};
use clap::Args;
use nvme_host::Result;
use serde_json::json;

/// Commit everything that was written to a namespace
#[derive(Args)]
pub struct Flush {
    #[command(flatten)]
    namespace: NamespaceArgs,
}

impl Flush {
    pub fn run(self) -> Result<()> {
        let controller = self.namespace.device.start()?;
        controller.namespace(self.namespace.nsid())?.flush()?;
        if self.namespace.device.json {
            return output::json(&json!({ "flushed": true, "nsid": self.namespace.namespace_id }));
        }
        output::print("NVMe Flush: success")
    }
}
