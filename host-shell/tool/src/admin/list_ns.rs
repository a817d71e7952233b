//! `list-ns`: the active namespaces of a controller, and the reasons why some cannot be used.

use crate::common::{DeviceArgs, output};
use clap::Args;
use nvme_host::core::spec::Nsid;
use nvme_host::{Controller, Error, Result};
use serde_json::{Value, json};

/// List the active namespaces, and why one cannot be read and written
#[derive(Args)]
pub struct ListNs {
    #[command(flatten)]
    device: DeviceArgs,
}

impl ListNs {
    pub fn run(self) -> Result<()> {
        let controller = self.device.start()?;
        let all = controller.namespaces()?;
        let all: Vec<(Nsid, Option<String>)> = all
            .into_iter()
            .map(|nsid| Ok((nsid, why_unusable(&controller, nsid)?)))
            .collect::<Result<_>>()?;
        if self.device.form.json {
            let list: Value = all.iter().map(to_json).collect();
            return output::json(&json!({ "nsid_list": list }));
        }
        let lines: Vec<String> = all
            .iter()
            .enumerate()
            .map(|(n, (nsid, why))| {
                let why = why.as_ref().map_or(String::new(), |why| format!("  {why}"));
                format!("[{n:4}]:{:#x}{why}", nsid.0)
            })
            .collect();
        output::print(&lines.join("\n"))
    }
}

/// Returns the reason why this program cannot read and write a namespace, if it cannot.
fn why_unusable(controller: &Controller, nsid: Nsid) -> Result<Option<String>> {
    match controller.usable_namespace(nsid) {
        Ok(_) => Ok(None),
        Err(error @ (Error::Device { .. } | Error::Usage { .. })) => Ok(Some(error.to_string())),
        Err(error) => Err(error),
    }
}

fn to_json((nsid, why): &(Nsid, Option<String>)) -> Value {
    match why {
        None => json!({ "nsid": nsid.0 }),
        Some(why) => json!({ "nsid": nsid.0, "unusable": why }),
    }
}
