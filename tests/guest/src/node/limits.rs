//! The module nvme_gpu counts the memory that it pins against the user's limit on locked memory, and gives it back.
// UNSAFETY: system calls with raw pointers to structures of this module.
#![allow(unsafe_code)]

use super::machine::{self, Child, Count, Ended};
use super::node::{self, Node, PAGE};
use guest_tests::Outcome;
use std::io;

const LIMIT: u64 = 1 << 20;
/// linux/capability.h
const CAP_IPC_LOCK: u32 = 14;
const CAPABILITY_VERSION_3: u32 = 0x2008_0522;

fn last(call: &str) -> String {
    format!("{call}: {}", io::Error::last_os_error())
}

/// Gives up the capability that lifts the limit, and sets the limit.
pub fn confine(limit: u64) -> Outcome {
    let mut header = [CAPABILITY_VERSION_3, 0];
    // Effective, permitted and inheritable, low words and then high words.
    let mut sets = [0u32; 6];
    // SAFETY: both arrays are as long as this version of the call requires.
    if unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) } != 0 {
        return Err(last("capget"));
    }
    for low in &mut sets[..3] {
        *low &= !(1 << CAP_IPC_LOCK);
    }
    // SAFETY: both arrays are as long as this version of the call requires.
    if unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), sets.as_ptr()) } != 0 {
        return Err(last("capset"));
    }
    let limit = libc::rlimit {
        rlim_cur: limit,
        rlim_max: limit,
    };
    // SAFETY: the kernel reads the structure.
    match unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) } {
        0 => Ok(()),
        _ => Err(last("setrlimit")),
    }
}

/// Half of the limit can be mapped, more than the limit is refused, and memory that was unmapped can be mapped again. A
/// process that gets the descriptor has the same limit, not another one.
pub fn run(address: &str) -> Outcome {
    let node = Node::opened(address)?;
    confine(LIMIT)?;
    let pinned = || machine::pinned_by("self");
    let start = node::arena(2 * LIMIT as usize)? as u64;
    let half = LIMIT as usize / 2;
    let before = pinned()?;
    for round in 0..3 {
        let (handle, _) = node
            .map(start, half)
            .map_err(|errno| format!("half: errno {errno}"))?;
        if pinned()? != before + LIMIT / 2048 {
            return Err(format!("round {round}: {} KiB are pinned", pinned()?));
        }
        match node.map(start + LIMIT / 2, LIMIT as usize) {
            Err(libc::ENOMEM) => {}
            other => return Err(format!("round {round}: over the limit: {other:?}")),
        }
        let child = Child::run(|| match node.map(start, half + PAGE) {
            Err(libc::ENOMEM) => i32::from(node.map(start, half).is_err()),
            _ => 2,
        })?;
        if child.end() != Some(Ended::Exit(0)) {
            return Err(format!("round {round}: a child has a limit of its own"));
        }
        if node.map(start, PAGE) != Err(libc::ENOMEM) {
            return Err(format!(
                "round {round}: what a child that ended has mapped is not counted"
            ));
        }
        node.unmap(handle)
            .map_err(|errno| format!("UNMAP: errno {errno}"))?;
        if pinned()? != before {
            return Err(format!("round {round}: {} KiB stay pinned", pinned()?));
        }
        // The mapping that the child made, which has the next handle.
        node.unmap(handle + 1)
            .map_err(|errno| format!("UNMAP of the child's: errno {errno}"))?;
    }
    println!(
        "half of the limit is mapped, more is refused, for children as well, and nothing stays"
    );
    Ok(())
}

/// The most mappings of one opener.
const MOST: u64 = 65_535;

/// Makes as many mappings as there can be, and one more, which fails; then all are dropped at once. `flush` is the
/// folder of an event that occurs with each request to the IOMMU to forget addresses: it must not occur once for each
/// mapping.
pub fn many(address: &str, count: u64, flush: Option<&str>) -> Outcome {
    let node = Node::opened(address)?;
    let page = node::arena(PAGE)? as u64;
    for number in 0..count {
        node.map(page, PAGE)
            .map_err(|errno| format!("mapping {number}: errno {errno}"))?;
    }
    match node.map(page, PAGE) {
        Err(libc::EBUSY) if count == MOST => {}
        Ok(_) if count < MOST => {}
        other => return Err(format!("one more: {other:?}")),
    }
    let flushes = flush.map(Count::of).transpose()?;
    let began = std::time::Instant::now();
    drop(node);
    if let Some(flushes) = flushes {
        let flushes = flushes.so_far()?;
        println!("{flushes} requests to the IOMMU while it was closed");
        if flushes > count / 16 {
            return Err(format!("{flushes} requests for {count} mappings"));
        }
    }
    println!(
        "{count} mappings; closed after {} ms",
        began.elapsed().as_millis()
    );
    Ok(())
}
