//! The names of an SPDK sketch on a controller that reaches memory of a GPU: its queues' rings move there, and reads
//! into such memory end with the bytes of the namespace.
// UNSAFETY: functions of the C interface.
#![allow(unsafe_code)]

use crate::{Outcome, patient, pattern, said};
use nvme_gpu_capi::store::{PathInfo, nvme_gpu_path};
use nvme_gpu_compat::spdk;
use nvme_host::cuda::{DeviceMemory, Gpu};
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(30);
const READS: u64 = 12;
/// Blocks of a read.
const BLOCKS: u32 = 96;
/// Blocks of the namespace have that many bytes.
const BLOCK: usize = 512;

/// Returns the tier of the open store.
fn tier() -> Result<i32, String> {
    // SAFETY: a structure of zeros is a valid value, its size is set, and the context is never freed.
    let (status, info) = unsafe {
        let mut info: PathInfo = std::mem::zeroed();
        info.size = size_of::<PathInfo>();
        let context = spdk::spdk_ctx().as_ref().ok_or("there is no context")?;
        (nvme_gpu_path(context.ns, &mut info), info)
    };
    match status {
        0 => Ok(info.tier),
        _ => Err(format!("nvme_gpu_path() returned {status}")),
    }
}

/// Checks the result of a function that returns -1 if it failed.
fn passed(name: &str, result: i64) -> Outcome {
    match result {
        0.. => Ok(()),
        _ => Err(format!("{name}() failed")),
    }
}

/// The first `mib` MiB of the namespace hold the pattern of `seed`.
pub fn run(seed: u64, mib: u64) -> Outcome {
    passed("init_spdk_nvme", spdk::init_spdk_nvme().into())?;
    passed("create_io_qpair", spdk::create_io_qpair().into())?;
    let before = tier()?;
    passed("gpu_queue_init", spdk::gpu_queue_init().into())?;
    println!(
        "tier {before} before gpu_queue_init(), {} after it",
        tier()?
    );
    if tier()? != 3 {
        return Err("the rings are not in memory of the GPU".to_owned());
    }
    passed("gpu_queue_init", spdk::gpu_queue_init().into())?;
    let gpu = Gpu::open(0).map_err(said)?;
    let bytes = BLOCKS as usize * BLOCK;
    let memory = DeviceMemory::new(&gpu, bytes).map_err(said)?;
    let lbas = mib * (1 << 20) / BLOCK as u64;
    let (mut have, mut expected) = (vec![0; bytes], vec![0; bytes]);
    for turn in 0..READS {
        let lba = turn * 7919 % (lbas - u64::from(BLOCKS));
        let buffer = std::ptr::with_exposed_provenance_mut(memory.address() as usize);
        let context = spdk::spdk_ctx();
        // SAFETY: the memory stays until the read has ended.
        let started = unsafe { spdk::submit_gpu_read(context, lba, BLOCKS, buffer) };
        passed("submit_gpu_read", started as i64)?;
        let begin = Instant::now();
        loop {
            // SAFETY: the context is never freed.
            let ended = unsafe { spdk::poll_completions(context) };
            passed("poll_completions", ended.into())?;
            if ended > 0 {
                break;
            }
            if begin.elapsed() > patient(WAIT) {
                return Err(format!("a read of LBA {lba} does not end"));
            }
        }
        memory.download(0, &mut have).map_err(said)?;
        pattern::fill(seed, lba * BLOCK as u64, &mut expected);
        if have != expected {
            return Err(format!("{BLOCKS} blocks from LBA {lba} on are wrong"));
        }
    }
    println!("{READS} reads of {BLOCKS} blocks by queues in memory of the GPU");
    Ok(())
}
