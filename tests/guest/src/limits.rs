//! The module nvme_gpu counts what it pins against the limit on locked memory, and gives it back.
// UNSAFETY: system calls with raw pointers to structures of this module, and memory that is mapped here.
#![allow(unsafe_code)]

use crate::Outcome;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

const MAP: u64 = 0xC030_4EE1;
const UNMAP: u64 = 0x4008_4EE2;
const LIMIT: u64 = 1 << 20;
/// linux/capability.h
const CAP_IPC_LOCK: u32 = 14;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

fn last(call: &str) -> String {
    format!("{call}: {}", io::Error::last_os_error())
}

/// Gives up the capability that lifts the limit, and sets the limit.
fn confine() -> Outcome {
    let mut header = [CAPABILITY_VERSION_3, 0];
    // Effective, permitted and inheritable, low words and then high words.
    let mut sets = [0u32; 6];
    // SAFETY: both are as long as this version of the call says.
    if unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) } != 0 {
        return Err(last("capget"));
    }
    for low in &mut sets[..3] {
        *low &= !(1 << CAP_IPC_LOCK);
    }
    // SAFETY: as above.
    if unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_ptr()) } != 0 {
        return Err(last("capset"));
    }
    let limit = libc::rlimit {
        rlim_cur: LIMIT,
        rlim_max: LIMIT,
    };
    // SAFETY: the kernel reads the structure.
    match unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) } {
        0 => Ok(()),
        _ => Err(last("setrlimit")),
    }
}

/// The handle of `bytes` bytes from `address` on, or the errno.
fn map(node: &File, address: u64, bytes: u64) -> Result<u64, i32> {
    let mut list = [0u64; 3 * 512];
    let list_at = list.as_mut_ptr().expose_provenance() as u64;
    let mut ask = [48, address, bytes, 0, 512 << 32, list_at];
    // SAFETY: the kernel reads and writes the structure, and the list that it names, which has 512 places.
    match unsafe { libc::ioctl(node.as_raw_fd(), MAP as _, ask.as_mut_ptr()) } {
        0.. => Ok(ask[4] & 0xFFFF_FFFF),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(-1)),
    }
}

fn unmap(node: &File, handle: u64) -> Outcome {
    let ask = [8 | handle << 32];
    // SAFETY: the kernel reads the structure.
    match unsafe { libc::ioctl(node.as_raw_fd(), UNMAP as _, ask.as_ptr()) } {
        0 => Ok(()),
        _ => Err(last("UNMAP")),
    }
}

/// KiB that this process has locked.
fn locked() -> Result<u64, String> {
    let text = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let word = line.and_then(|rest| rest.split_whitespace().next());
    word.and_then(|word| word.parse().ok())
        .ok_or_else(|| "/proc/self/status has no VmLck".to_owned())
}

/// Half the limit is mapped, more than the limit is refused, and what was unmapped can be locked again.
pub fn run(address: &str) -> Outcome {
    let path = format!("/dev/nvme-gpu-{address}");
    let node = File::options().read(true).write(true).open(&path);
    let node = node.map_err(|error| format!("{path}: {error}"))?;
    confine()?;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
    let raw = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            2 * LIMIT as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if raw == libc::MAP_FAILED {
        return Err(last("mmap"));
    }
    let start = raw.expose_provenance() as u64;
    let before = locked()?;
    for round in 0..3 {
        let half = map(&node, start, LIMIT / 2).map_err(|errno| format!("half: errno {errno}"))?;
        if locked()? != before + LIMIT / 2048 {
            return Err(format!("round {round}: {} KiB are locked", locked()?));
        }
        match map(&node, start + LIMIT / 2, LIMIT) {
            Err(libc::ENOMEM) => {}
            other => return Err(format!("round {round}: over the limit: {other:?}")),
        }
        unmap(&node, half)?;
        if locked()? != before {
            return Err(format!("round {round}: {} KiB stay locked", locked()?));
        }
    }
    println!(
        "half of the limit is mapped, more than the limit is refused, and nothing stays locked"
    );
    Ok(())
}
