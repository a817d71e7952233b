//! `write`: a file onto blocks, durable at exit.

use super::{NamespaceArgs, WriteArgs, check_stop, file, output, progress};
use clap::Args;
use nvme_host::core::spec::Lba;
use nvme_host::{Error, Namespace, Result};
use serde_json::json;
use std::path::PathBuf;

/// Bytes sent between two looks at Ctrl-C.
const CHUNK: usize = 8 << 20;

/// Write a file to blocks; the data is durable when the command ends
#[derive(Args)]
pub struct Write {
    #[command(flatten)]
    namespace: NamespaceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// First block
    #[arg(long, short = 's', visible_alias = "start-block", default_value_t = 0)]
    lba: u64,
    /// Input file, a whole number of blocks; `-` is standard input
    #[arg(long = "in", short = 'i', visible_alias = "data", value_name = "FILE")]
    input: PathBuf,
    /// Blocks that the input must have; for checking
    #[arg(long, short = 'b')]
    blocks: Option<u64>,
    /// Force unit access instead of a flush at the end
    #[arg(long)]
    fua: bool,
}

impl Write {
    pub fn run(self) -> Result<()> {
        // Everything that can be wrong is found before the first block changes.
        let bytes = file::read_input(&self.input)?;
        let device = &self.namespace.device;
        let controller = device.start_writing(&self.write, "write", &device.config())?;
        let mut namespace = controller.namespace(self.namespace.nsid())?;
        let blocks = whole_blocks(&namespace, &bytes, &self.input)?;
        if let Some(expected) = self.blocks.filter(|expected| *expected != blocks) {
            return Err(Error::usage(
                format!(
                    "{} holds {blocks} blocks, not {expected}",
                    self.input.display()
                ),
                "correct --blocks, or leave it out",
            ));
        }
        namespace.check(Lba(self.lba), blocks)?;
        let bar = progress::bytes(bytes.len() as u64, "writing");
        let mut lba = self.lba;
        for part in bytes.chunks(CHUNK) {
            check_stop()?;
            match self.fua {
                true => namespace.write_fua(Lba(lba), part)?,
                false => namespace.write(Lba(lba), part)?,
            }
            lba += part.len() as u64 / u64::from(namespace.block_bytes());
            bar.inc(part.len() as u64);
        }
        if !self.fua {
            namespace.flush()?;
        }
        bar.finish_and_clear();
        drop(namespace);
        controller.shut_down()?;
        if self.namespace.device.json {
            return output::json(
                &json!({ "lba": self.lba, "blocks": blocks, "bytes": bytes.len() }),
            );
        }
        Ok(())
    }
}

/// The number of blocks in an input, which must be whole and not none.
pub fn whole_blocks(namespace: &Namespace, bytes: &[u8], path: &std::path::Path) -> Result<u64> {
    let block = namespace.block_bytes() as usize;
    if bytes.is_empty() || !bytes.len().is_multiple_of(block) {
        return Err(Error::usage(
            format!(
                "{} has {} bytes, which is not a whole number of {block}-byte blocks",
                path.display(),
                bytes.len()
            ),
            format!("pad it to a multiple of {block} (`truncate -s %{block} FILE`)"),
        ));
    }
    Ok((bytes.len() / block) as u64)
}
