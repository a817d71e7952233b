//! `topology`: how controllers and GPUs are connected, and which tiers that allows.

use crate::common::{OutputForm, output};
use clap::Args;
use nvme_host::topology::MachineTopology as Found;
use nvme_host::{Error, Result};

/// Show how NVMe controllers and GPUs are connected: switches, links, ACS, IOMMU groups, and the tiers of each pair
///
/// Changes nothing. Root sees more: ACS, and links of older kernels.
#[derive(Args)]
pub struct TopologyCommand {
    #[command(flatten)]
    form: OutputForm,
}

impl TopologyCommand {
    pub fn run(self) -> Result<()> {
        let found = Found::here();
        if self.form.json {
            let value =
                serde_json::to_value(&found).map_err(|error| Error::internal(error.to_string()))?;
            return output::json(&value);
        }
        output::print(&found.to_string())
    }
}
