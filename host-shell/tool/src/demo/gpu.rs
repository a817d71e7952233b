//! The demo from a GPU: kernels build the commands, ring, poll and check the data; then the CPU checks
//! every byte again.

use super::image::DemoImage;
use super::options::DemoCommand;
use crate::common::images::CommandFiles;
use crate::common::output;
use crate::gpu::reconnecting::{SessionReport, SessionSource};
use crate::gpu::transfer::{self, GpuTransfer, TransferTotals};
use nvme_host::core::spec::{Nsid, nvm};
use nvme_host::cuda::bench::SubmitMode;
use nvme_host::cuda::{SessionSetup, TierRequest};
use nvme_host::{Error, Result, units};
use serde_json::json;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Runs the demo on GPU `index`; every read is one command.
pub fn run(demo: &DemoCommand, files: &CommandFiles, index: u32) -> Result<()> {
    let image = DemoImage::create(demo)?;
    let (block, unit) = (image.block, image.unit);
    let setup = SessionSetup {
        gpu: index,
        mode: SubmitMode::Warp,
        tier: TierRequest::Auto { gpu_memory: false },
        data_in_cmb: false,
        threads: 0,
        queues: demo.queues,
        depth: demo.depth,
        nsid: Nsid(1),
    };
    let begin = Instant::now();
    let source = SessionSource {
        device: &image.device,
        config: demo.config(),
        setup,
        trace: None,
        files,
        recover: None,
        bytes: unit,
        data_bytes: transfer::CHUNK,
    };
    let mut transfer = GpuTransfer::open(source, nvme_host::open(&image.device)?)?;
    let bring_up = begin.elapsed();
    let blocks = demo.size / block;
    let bar = transfer::bar(transfer.reconnecting.session()?, blocks, "reading");
    let mut bytes = vec![0; unit as usize];
    let mut sums = Vec::new();
    let totals = transfer.run(
        nvm::opcode::READ,
        (0, blocks),
        &bar,
        |_, _, _| Ok(()),
        |session, lba, len| {
            let wrong = session.verify(lba, len, demo.seed)?;
            if wrong != 0 {
                return Err(Error::Mismatch {
                    what: format!("the GPU found {wrong} wrong words from LBA {lba} on"),
                });
            }
            let mut at = 0;
            while at < len {
                let part = &mut bytes[..unit.min(len - at) as usize];
                session.data().read(at as usize, part)?;
                sums.push(xxh3_64(part));
                at += part.len() as u64;
            }
            Ok(())
        },
    )?;
    bar.finish_and_clear();
    let digest = compared(&sums, &image)?;
    let name = transfer.reconnecting.session()?.gpu().name().to_owned();
    let session = transfer.reconnecting.close()?;
    report(demo, &image, &totals, &name, session, digest, bring_up)
}

/// Returns the digest of `sums`, which are those of the image's units.
fn compared(sums: &[u64], image: &DemoImage) -> Result<u64> {
    let different = sums.iter().zip(&image.sums).position(|(a, b)| a != b);
    if different.is_some() || sums.len() != image.sums.len() {
        let lba = different.unwrap_or(sums.len()) as u64 * image.unit / image.block;
        return Err(Error::Mismatch {
            what: format!("the CPU finds that the blocks from LBA {lba} on are not the image's"),
        });
    }
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    Ok(xxh3_64(&bytes))
}

fn report(
    demo: &DemoCommand,
    image: &DemoImage,
    totals: &TransferTotals,
    name: &str,
    session: SessionReport,
    digest: u64,
    bring_up: Duration,
) -> Result<()> {
    let (by, tier) = (session.gpu, session.tier);
    let gbps = demo.size as f64 / totals.seconds.max(1e-9) / 1e9;
    let rate = totals.commands as f64 / totals.seconds.max(1e-9);
    let path = image.path.as_ref().filter(|_| demo.keep);
    let kept = path.map(|path| path.display().to_string());
    if demo.form.json {
        return output::json(&json!({
            "verified": true,
            "verified_by": ["gpu", "cpu"],
            "bytes": demo.size,
            "seconds": totals.seconds,
            "gb_per_s": gbps,
            "commands": totals.commands,
            "commands_per_s": rate,
            "checksum_xxh3": format!("{digest:016x}"),
            "controller": image.controller,
            "driver": by,
            "gpu": name,
            "tier": tier,
            "per_command": totals.per_command(),
            "bring_up_ms": bring_up.as_secs_f64() * 1e3,
            "image": kept,
        }));
    }
    let mut text = format!(
        "verified {} ({} bytes) on the GPU and again on the CPU: every byte read is the image's \
         (xxh3 {digest:016x})\n\
         {gbps:.2} GB/s, {} commands/s, {} commands in {:.3} s, bring-up {:.1} ms\n\
         driven by {by}, one warp per queue; {}\n\
         {tier}\n",
        units::bytes(demo.size),
        demo.size,
        units::count(rate),
        totals.commands,
        totals.seconds,
        bring_up.as_secs_f64() * 1e3,
        image.controller,
    );
    if let Some(path) = kept {
        text.push_str(&format!("image kept: {path}\n"));
    }
    output::print(&text)
}
