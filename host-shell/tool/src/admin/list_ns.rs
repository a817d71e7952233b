//! `list-ns`.

use crate::common::{DeviceArgs, output};
use clap::Args;
use nvme_host::Result;
use serde_json::{Value, json};

/// List the active namespaces
#[derive(Args)]
pub struct ListNs {
    #[command(flatten)]
    device: DeviceArgs,
}

impl ListNs {
    pub fn run(self) -> Result<()> {
        let controller = self.device.start()?;
        let all = controller.namespaces()?;
        if self.device.json {
            let list: Value = all.iter().map(|nsid| json!({ "nsid": nsid.0 })).collect();
            return output::json(&json!({ "nsid_list": list }));
        }
        let lines: Vec<String> = all
            .iter()
            .enumerate()
            .map(|(n, nsid)| format!("[{n:4}]:{:#x}", nsid.0))
            .collect();
        output::print(&lines.join("\n"))
    }
}
