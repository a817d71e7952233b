//! `compare`: blocks against a file, by the controller.

use crate::common::images::CommandFiles;
use crate::common::input::{InputFile, InputTarget};
use crate::common::{NamespaceArgs, check_stop, number, output};
use clap::Args;
use nvme_host::Result;
use nvme_host::core::spec::Lba;
use serde_json::json;
use std::path::PathBuf;

const CHUNK: usize = 8 << 20;

/// Compare blocks with a file; exit code 3 when they differ
#[derive(Args)]
pub struct CompareCommand {
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// First block
    #[arg(long, short = 's', visible_alias = "start-block", default_value_t = 0, value_parser = number::<u64>(0..=u64::MAX))]
    lba: u64,
    /// Expected data: a file of whole blocks or a pipe; `-` is standard input
    #[arg(long = "in", short = 'i', visible_alias = "data", value_name = "FILE")]
    input: PathBuf,
    /// Blocks that the file must have, or to take from a pipe or device
    #[arg(long, short = 'b', value_parser = number::<u64>(1..=u64::MAX))]
    blocks: Option<u64>,
}

impl CompareCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let input = InputFile::open(&self.input, files)?;
        let controller = self.namespace.device.start_reading()?;
        let mut namespace = controller.namespace(self.namespace.nsid())?;
        let block = namespace.block_bytes();
        let target = InputTarget {
            block,
            lba: self.lba,
            size: namespace.blocks(),
            expected: self.blocks,
        };
        let mut pieces = input.pieces(target, |blocks| namespace.check(Lba(self.lba), blocks))?;
        let (mut lba, mut piece) = (self.lba, Vec::new());
        while pieces.next(&mut piece, CHUNK)? {
            check_stop()?;
            namespace.compare(Lba(lba), &piece)?;
            lba += piece.len() as u64 / u64::from(block);
        }
        let blocks = pieces.done();
        if self.namespace.device.form.json {
            return output::json(&json!({
                "equal": true, "lba": self.lba, "blocks": blocks, "bytes": blocks * u64::from(block),
            }));
        }
        output::print(&format!(
            "compare: {blocks} blocks from LBA {} are equal",
            self.lba
        ))
    }
}
