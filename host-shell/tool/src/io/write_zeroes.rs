//! `write-zeroes`: sets blocks to zero without moving data.

use crate::common::images::CommandFiles;
use crate::common::{NamespaceArgs, WriteArgs, number, output};
use clap::Args;
use nvme_host::Result;
use nvme_host::core::spec::Lba;
use serde_json::json;

/// Set blocks to zero without sending data; durable when the command ends
#[derive(Args)]
pub struct WriteZeroes {
    #[command(flatten)]
    namespace: NamespaceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// First block
    #[arg(long, short = 's', visible_alias = "start-block", value_parser = number::<u64>(0..=u64::MAX))]
    lba: u64,
    /// Number of blocks (the number itself, not 0's based)
    #[arg(long, short = 'b', value_parser = number::<u64>(0..=u64::MAX))]
    blocks: u64,
    /// Let the controller deallocate them
    #[arg(long, short = 'D')]
    deac: bool,
}

impl WriteZeroes {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let device = &self.namespace.device;
        let controller =
            device.start_writing(&self.write, "write-zeroes", &self.namespace.config())?;
        let mut namespace = controller.namespace(self.namespace.nsid())?;
        namespace.check(Lba(self.lba), self.blocks)?;
        namespace.write_zeroes(Lba(self.lba), self.blocks, self.deac)?;
        namespace.flush()?;
        files.keep_created();
        if self.namespace.device.form.json {
            return output::json(&json!({ "lba": self.lba, "blocks": self.blocks }));
        }
        output::print("NVMe Write Zeroes: success")
    }
}
