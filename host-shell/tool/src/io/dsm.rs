//! `dsm`: deallocate ranges.

use crate::common::images::CommandFiles;
use crate::common::{NamespaceArgs, WriteArgs, number, output};
use clap::Args;
use nvme_host::core::spec::Lba;
use nvme_host::{Error, Result};
use serde_json::json;

/// Deallocate (trim) ranges of blocks
#[derive(Args)]
pub struct DsmCommand {
    #[command(flatten)]
    namespace: NamespaceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// First block of each range, separated by commas
    #[arg(long, short = 's', value_delimiter = ',', required = true, value_parser = number::<u64>(0..=u64::MAX))]
    slbs: Vec<u64>,
    /// Blocks of each range, separated by commas
    #[arg(long, short = 'b', value_delimiter = ',', required = true, value_parser = number::<u32>(1..=0xFFFF_FFFF))]
    blocks: Vec<u32>,
    /// Deallocate (the only use of dsm that is supported)
    #[arg(long, visible_alias = "ad")]
    deallocate: bool,
}

impl DsmCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        if !self.deallocate {
            return Err(Error::usage(
                "dsm without --deallocate has no effect",
                "add --deallocate",
            ));
        }
        if self.slbs.len() != self.blocks.len() {
            return Err(Error::usage(
                format!(
                    "{} starts and {} lengths",
                    self.slbs.len(),
                    self.blocks.len()
                ),
                "give as many --blocks as --slbs",
            ));
        }
        let device = &self.namespace.device;
        let controller = device.start_writing(&self.write, "dsm", &self.namespace.config())?;
        let mut namespace = controller.namespace(self.namespace.nsid())?;
        let ranges: Vec<_> = self
            .slbs
            .iter()
            .map(|slba| Lba(*slba))
            .zip(self.blocks.iter().copied())
            .collect();
        namespace.deallocate(&ranges)?;
        namespace.flush()?;
        files.keep_created();
        if self.namespace.device.form.json {
            return output::json(&json!({ "ranges": ranges.len() }));
        }
        output::print("NVMe DSM: success")
    }
}
