//! `write`: a file onto blocks, durable at exit.

use super::{NamespaceArgs, WriteArgs, check_stop, file, output, progress};
use clap::Args;
use nvme_host::core::spec::Lba;
use nvme_host::{Error, Result};
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
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    by_gpu: super::gpu::TransferArgs,
}

impl Write {
    pub fn run(self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.by_gpu.gpu.gpu.is_some() {
            return self.run_on_gpu();
        }
        // Everything that can be wrong is found before the first block changes.
        let bytes = file::read_input(&self.input)?;
        let device = &self.namespace.device;
        let controller = device.start_writing(&self.write, "write", &device.config())?;
        let mut namespace = controller.namespace(self.namespace.nsid())?;
        let blocks = self.blocks_of(&bytes, namespace.block_bytes())?;
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

    /// The number of blocks in the input, which must be what `--blocks` says.
    fn blocks_of(&self, bytes: &[u8], block_bytes: u32) -> Result<u64> {
        let blocks = whole_blocks(block_bytes, bytes, &self.input)?;
        if let Some(expected) = self.blocks.filter(|expected| *expected != blocks) {
            return Err(Error::usage(
                format!(
                    "{} holds {blocks} blocks, not {expected}",
                    self.input.display()
                ),
                "correct --blocks, or leave it out",
            ));
        }
        Ok(blocks)
    }

    /// The same with queues that a GPU drives.
    #[cfg(feature = "cuda")]
    fn run_on_gpu(self) -> Result<()> {
        use super::gpu;
        use nvme_host::core::spec::nvm::opcode;
        use nvme_host::cuda::Work;
        if self.fua {
            return Err(Error::usage(
                "kernels write without force unit access",
                "leave out --fua; a flush at the end makes the data durable",
            ));
        }
        let bytes = file::read_input(&self.input)?;
        let device = &self.namespace.device;
        let opened = nvme_host::open(&device.device)?;
        self.write.check(&*opened, "write")?;
        let mut transfer = self.by_gpu.open(&self.namespace, opened)?;
        let block = transfer.lasting.drive()?.info().block_bytes;
        let blocks = self.blocks_of(&bytes, block)?;
        let bar = gpu::bar(transfer.lasting.drive()?, blocks, "writing");
        let first = self.lba;
        let totals = transfer.run(
            opcode::WRITE,
            (first, blocks),
            &bar,
            |drive, lba, len| {
                let at = ((lba - first) * u64::from(block)) as usize;
                drive.data_mut()?.write(0, &bytes[at..at + len as usize])
            },
            |_, _, _| Ok(()),
        )?;
        let flush = Work {
            opcode: opcode::FLUSH,
            lba: 0,
            blocks: 0,
            commands: 1,
            units: 1,
            random: false,
            seed: 0,
            linear: false,
            data_at: 0,
        };
        transfer.lasting.run_whole("Flush", &flush)?;
        bar.finish_and_clear();
        let told = transfer.lasting.close()?;
        if device.json {
            let mut value = json!({
                "lba": first, "blocks": blocks, "bytes": bytes.len(), "gpu": told.gpu, "tier": told.tier,
                "commands": totals.commands, "per_command": totals.per_command(),
            });
            told.add_to(&mut value);
            return output::json(&value);
        }
        Ok(())
    }
}

/// The number of blocks in an input, which must be whole and not none.
pub fn whole_blocks(block_bytes: u32, bytes: &[u8], path: &std::path::Path) -> Result<u64> {
    let block = block_bytes as usize;
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
