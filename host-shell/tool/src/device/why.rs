//! `why`: what moves the bytes of a device, and what stands between it and a better way.

use crate::common::{OutputForm, output, visible};
use clap::Args;
use nvme_host::{Result, Store, StoreOptions};
use serde_json::json;

/// Say what moves the bytes of a device now, the next better way, and the one thing that stands between
///
/// Opens the device for reading only, as a program would: a drive that another program drives is refused.
#[derive(Args)]
pub struct WhyCommand {
    /// Device or file: sim:, vfio:, kmod:, vfio-user:, file:, stripe:, or a path
    device: String,
    /// Open it with GPU N (0 without a number)
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0")]
    gpu: Option<u32>,
    #[command(flatten)]
    form: OutputForm,
}

impl WhyCommand {
    pub fn run(self) -> Result<()> {
        let options = StoreOptions {
            read_only: true,
            #[cfg(feature = "cuda")]
            gpu: self.gpu.map(|index| nvme_host::store::GpuOptions {
                index,
                ..Default::default()
            }),
            ..StoreOptions::default()
        };
        let members = Store::open(&self.device, &options)?.explain();
        if self.form.json {
            return output::json(&json!({ "members": members }));
        }
        let lines: Vec<String> = members.iter().map(ToString::to_string).collect();
        output::print(&visible::lines(&lines.join("\n")))
    }
}
