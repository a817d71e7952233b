//! `write`: a file onto blocks, durable at exit.

use crate::common::images::CommandFiles;
use crate::common::input::{InputFile, InputTarget};
use crate::common::{NamespaceArgs, WriteArgs, check_stop, number, output, progress};
use clap::Args;
use nvme_host::Result;
use nvme_host::core::spec::Lba;
use serde_json::json;
use std::path::PathBuf;

/// Bytes sent between two looks at Ctrl-C.
const CHUNK: usize = 8 << 20;

/// Write a file to blocks; the data is durable when the command ends
#[derive(Args)]
pub struct WriteCommand {
    #[command(flatten)]
    namespace: NamespaceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// First block
    #[arg(long, short = 's', visible_alias = "start-block", default_value_t = 0, value_parser = number::<u64>(0..=u64::MAX))]
    lba: u64,
    /// Input: a file of whole blocks or a pipe; `-` is standard input
    #[arg(long = "in", short = 'i', visible_alias = "data", value_name = "FILE")]
    input: PathBuf,
    /// Blocks that the file must have, or to take from a pipe or device
    #[arg(long, short = 'b', value_parser = number::<u64>(0..=u64::MAX))]
    blocks: Option<u64>,
    /// Force unit access instead of a flush at the end
    #[arg(long)]
    fua: bool,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    by_gpu: crate::gpu::transfer::TransferArgs,
}

impl WriteCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.by_gpu.gpu.gpu.is_some() {
            return self.run_on_gpu(files);
        }
        // All checks that need no data are made before the first block changes.
        let input = InputFile::open(&self.input, files)?;
        let device = &self.namespace.device;
        let controller = device.start_writing(&self.write, "write", &self.namespace.config())?;
        let mut namespace = controller.namespace(self.namespace.nsid())?;
        let block = namespace.block_bytes();
        let target = self.target(block, namespace.blocks());
        let mut pieces = input.pieces(target, |blocks| namespace.check(Lba(self.lba), blocks))?;
        let bar = progress::bytes(pieces.blocks().unwrap_or(0) * u64::from(block), "writing");
        let (mut lba, mut piece) = (self.lba, Vec::new());
        while pieces.next(&mut piece, CHUNK)? {
            check_stop()?;
            match self.fua {
                true => namespace.write_fua(Lba(lba), &piece)?,
                false => namespace.write(Lba(lba), &piece)?,
            }
            lba += piece.len() as u64 / u64::from(block);
            bar.inc(piece.len() as u64);
        }
        if !self.fua {
            namespace.flush()?;
        }
        files.keep_created();
        bar.finish_and_clear();
        drop(namespace);
        controller.shut_down()?;
        if self.namespace.device.form.json {
            let blocks = pieces.done();
            return output::json(
                &json!({ "lba": self.lba, "blocks": blocks, "bytes": blocks * u64::from(block) }),
            );
        }
        Ok(())
    }

    fn target(&self, block: u32, size: u64) -> InputTarget {
        InputTarget {
            block,
            lba: self.lba,
            size,
            expected: self.blocks,
        }
    }

    /// Writes the same with queues that a GPU drives.
    #[cfg(feature = "cuda")]
    fn run_on_gpu(self, files: &CommandFiles) -> Result<()> {
        use crate::gpu::transfer as gpu;
        use nvme_host::core::spec::nvm::opcode;
        if self.fua {
            return Err(nvme_host::Error::usage(
                "kernels write without force unit access",
                "leave out --fua; a flush at the end makes the data durable",
            ));
        }
        let input = InputFile::open(&self.input, files)?;
        let device = &self.namespace.device;
        let opened = device.open_to_write(&self.write, "write")?;
        let mut transfer = self.by_gpu.open(files, &self.namespace, opened, true)?;
        let info = transfer.reconnecting.session()?.info();
        let (block, size) = (info.block_bytes, info.blocks);
        let target = self.target(block, size);
        let mut pieces = input.pieces(target, |blocks| transfer.check(self.lba, blocks))?;
        let most = transfer.reconnecting.session()?.data().len();
        let bar = gpu::bar(
            transfer.reconnecting.session()?,
            pieces.blocks().unwrap_or(0),
            "writing",
        );
        let (first, mut lba, mut piece) = (self.lba, self.lba, Vec::new());
        let mut totals = gpu::TransferTotals::default();
        while pieces.next(&mut piece, most)? {
            let (begin, blocks) = (lba, piece.len() as u64 / u64::from(block));
            let moved = transfer.run(
                opcode::WRITE,
                (begin, blocks),
                &bar,
                |session, lba, len| {
                    let at = ((lba - begin) * u64::from(block)) as usize;
                    session.data_mut()?.write(0, &piece[at..at + len as usize])
                },
                |_, _, _| Ok(()),
            )?;
            totals.merge(&moved);
            lba += blocks;
        }
        transfer.reconnecting.run_whole("Flush", &gpu::FLUSH)?;
        files.keep_created();
        bar.finish_and_clear();
        let report = transfer.reconnecting.close()?;
        if device.form.json {
            let mut value = json!({
                "lba": first, "blocks": pieces.done(), "bytes": pieces.done() * u64::from(block), "gpu": report.gpu, "tier": report.tier,
                "commands": totals.commands, "per_command": totals.per_command(),
            });
            report.add_to(&mut value);
            return output::json(&value);
        }
        Ok(())
    }
}
