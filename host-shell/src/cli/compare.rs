//! `compare`: blocks against a file, by the controller.

use super::write::whole_blocks;
use super::{NamespaceArgs, check_stop, file, output};
use clap::Args;
use nvme_host::Result;
use nvme_host::core::spec::Lba;
use serde_json::json;
use std::path::PathBuf;

const CHUNK: usize = 8 << 20;

/// Compare blocks with a file; exit code 3 when they differ
#[derive(Args)]
pub struct Compare {
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// First block
    #[arg(long, short = 's', visible_alias = "start-block", default_value_t = 0)]
    lba: u64,
    /// File with the expected data, a whole number of blocks; `-` is standard input
    #[arg(long = "in", short = 'i', visible_alias = "data", value_name = "FILE")]
    input: PathBuf,
}

impl Compare {
    pub fn run(self) -> Result<()> {
        let bytes = file::read_input(&self.input)?;
        let controller = self.namespace.device.start()?;
        let mut namespace = controller.namespace(self.namespace.nsid())?;
        let blocks = whole_blocks(namespace.block_bytes(), &bytes, &self.input)?;
        namespace.check(Lba(self.lba), blocks)?;
        let mut lba = self.lba;
        for part in bytes.chunks(CHUNK) {
            check_stop()?;
            namespace.compare(Lba(lba), part)?;
            lba += part.len() as u64 / u64::from(namespace.block_bytes());
        }
        if self.namespace.device.json {
            return output::json(
                &json!({ "equal": true, "lba": self.lba, "blocks": blocks, "bytes": bytes.len() }),
            );
        }
        output::print(&format!(
            "compare: {blocks} blocks from LBA {} are equal",
            self.lba
        ))
    }
}
