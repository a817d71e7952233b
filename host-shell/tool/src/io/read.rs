//! `read`: blocks into a file.

use crate::common::file::OutputFile;
use crate::common::images::CommandFiles;
use crate::common::{NamespaceArgs, check_stop, number, output, progress};
use clap::Args;
use nvme_host::Result;
use nvme_host::core::spec::Lba;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Bytes fetched between two writes to the output.
const CHUNK: u64 = 8 << 20;

/// Read blocks into a file or to standard output
#[derive(Args)]
pub struct ReadCommand {
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// First block
    #[arg(long, short = 's', visible_alias = "start-block", default_value_t = 0, value_parser = number::<u64>(0..=u64::MAX))]
    lba: u64,
    /// Number of blocks (the number itself, not 0's based); all from LBA on when missing
    #[arg(long, short = 'b', value_parser = number::<u64>(0..=u64::MAX))]
    blocks: Option<u64>,
    /// Output file, replaced when everything has been read; standard output when missing or `-`
    #[arg(long, short = 'o', visible_alias = "data", value_name = "FILE")]
    out: Option<PathBuf>,
    #[cfg(feature = "cuda")]
    #[command(flatten)]
    by_gpu: crate::gpu::transfer::TransferArgs,
}

impl ReadCommand {
    /// True if standard output is free for messages, because the data goes into a file.
    fn is_into_file(&self) -> bool {
        self.out.as_deref().is_some_and(|out| out != Path::new("-"))
    }

    pub fn run(self, files: &CommandFiles) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.by_gpu.gpu.gpu.is_some() {
            return self.run_on_gpu(files);
        }
        let controller = self.namespace.device.start_reading()?;
        let mut namespace = controller.namespace(self.namespace.nsid())?;
        let blocks = self
            .blocks
            .unwrap_or_else(|| namespace.blocks().saturating_sub(self.lba).max(1));
        namespace.check(Lba(self.lba), blocks)?;
        let mut out = OutputFile::create(self.out.as_deref(), files)?;
        let block = u64::from(namespace.block_bytes());
        let bar = progress::bytes(blocks * block, "reading");
        let per_chunk = (CHUNK / block).min(blocks);
        let mut bytes = vec![0; (per_chunk * block) as usize];
        let mut at = 0;
        while at < blocks {
            check_stop()?;
            let count = per_chunk.min(blocks - at);
            let part = &mut bytes[..(count * block) as usize];
            namespace.read(Lba(self.lba + at), part)?;
            out.write(part)?;
            bar.inc(part.len() as u64);
            at += count;
        }
        out.commit()?;
        bar.finish_and_clear();
        drop(namespace);
        controller.shut_down()?;
        if self.namespace.device.form.json && self.is_into_file() {
            return output::json(
                &json!({ "lba": self.lba, "blocks": blocks, "bytes": blocks * block }),
            );
        }
        Ok(())
    }

    /// Reads the same with queues that a GPU drives.
    #[cfg(feature = "cuda")]
    fn run_on_gpu(self, files: &CommandFiles) -> Result<()> {
        use crate::gpu::transfer as gpu;
        let device = &self.namespace.device;
        let opened = device.open()?;
        let mut transfer = self.by_gpu.open(files, &self.namespace, opened, false)?;
        let session = transfer.reconnecting.session()?;
        let block = u64::from(session.info().block_bytes);
        let all = session.info().blocks.saturating_sub(self.lba);
        let blocks = self.blocks.unwrap_or(all.max(1));
        transfer.check(self.lba, blocks)?;
        let mut out = OutputFile::create(self.out.as_deref(), files)?;
        let bar = gpu::bar(transfer.reconnecting.session()?, blocks, "reading");
        let mut bytes = Vec::new();
        let totals = transfer.run(
            nvme_host::core::spec::nvm::opcode::READ,
            (self.lba, blocks),
            &bar,
            |_, _, _| Ok(()),
            |session, _, len| {
                bytes.resize(len as usize, 0);
                session.data().read(0, &mut bytes)?;
                out.write(&bytes)
            },
        )?;
        out.commit()?;
        bar.finish_and_clear();
        let report = transfer.reconnecting.close()?;
        if device.form.json && self.is_into_file() {
            let mut value = json!({
                "lba": self.lba, "blocks": blocks, "bytes": blocks * block, "gpu": report.gpu,
                "tier": report.tier, "commands": totals.commands, "per_command": totals.per_command(),
            });
            report.add_to(&mut value);
            return output::json(&value);
        }
        Ok(())
    }
}
