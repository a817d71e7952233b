//! Kernels.
// UNSAFETY: kernel parameters are raw pointers that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use nvme_core::mem::{CqRing, DmaWords, Doorbell, SqRing};
use nvme_core::spec::{Iova, Lba, Nsid, PageSize, Qid, nvm};
use nvme_core::{Data, ListMemory, Outcome, QueueMemory, QueuePair, Slot};

/// A queue pair as the host hands it to a kernel. Pointers are device pointers, IOVAs the controller's.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct QueueArgs {
    sq: *mut u8,
    sq_iova: u64,
    cq: *mut u8,
    cq_iova: u64,
    sq_doorbell: *mut u32,
    cq_doorbell: *mut u32,
    lists: *mut u8,
    lists_iova: u64,
    slots: *mut Slot<u32>,
    sq_entries: u32,
    cq_entries: u32,
    slot_count: u32,
    words_per_slot: u32,
    qid: u32,
    nsid: u32,
}

/// What to read: commands of `blocks` blocks each, from `lba` on, into consecutive pieces of a buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ReadArgs {
    lba: u64,
    buffer_iova: u64,
    commands: u32,
    blocks: u32,
    block_bytes: u32,
    depth: u32,
    timeout_ns: u64,
}

/// What a kernel reports.
#[repr(C)]
pub struct Report {
    completed: u32,
    failed: u32,
    /// 0 ended well, 1 a deadline passed, 2 the controller posted nonsense, 3 submission refused.
    end: u32,
    /// Status of the first command that failed.
    status: u32,
}

/// One thread owns the queue and keeps `depth` reads in flight until all have ended.
///
/// # Safety
/// Every pointer is what [`QueueArgs`] says, mapped for the kernel's life; `slots` holds
/// `slot_count` slots; the queue exists on the controller, empty, and no one else uses it.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_owner_read(
    queue: QueueArgs,
    read: ReadArgs,
    report: *mut Report,
) {
    // SAFETY: the host vouches for the ring, its length and its exclusive use.
    let sq = unsafe { SqRing::from_raw(queue.sq, queue.sq_entries, Iova(queue.sq_iova)) };
    // SAFETY: as above.
    let cq = unsafe { CqRing::from_raw(queue.cq, queue.cq_entries, Iova(queue.cq_iova)) };
    let words = (queue.words_per_slot * queue.slot_count) as usize;
    // SAFETY: as above.
    let lists = unsafe { DmaWords::from_raw(queue.lists, words, Iova(queue.lists_iova)) };
    // SAFETY: the host vouches for the doorbell.
    let sq_doorbell = unsafe { Doorbell::from_raw(queue.sq_doorbell) };
    // SAFETY: as above.
    let cq_doorbell = unsafe { Doorbell::from_raw(queue.cq_doorbell) };
    // SAFETY: `slot_count` slots, used by this thread alone.
    let slots = unsafe { core::slice::from_raw_parts_mut(queue.slots, queue.slot_count as usize) };
    let memory = QueueMemory {
        sq,
        cq,
        sq_doorbell,
        cq_doorbell,
        lists: ListMemory::new(lists, PageSize::KIB4, queue.words_per_slot as usize),
    };
    let mut pair = QueuePair::new(Qid(queue.qid as u16), memory, slots);
    let result = run(&mut pair, Nsid(queue.nsid), read);
    // SAFETY: the host vouches for the report.
    unsafe { report.write(result) };
}

fn run(pair: &mut QueuePair<'_, u32>, nsid: Nsid, read: ReadArgs) -> Report {
    let mut report = Report {
        completed: 0,
        failed: 0,
        end: 0,
        status: 0,
    };
    let bytes = u64::from(read.blocks) * u64::from(read.block_bytes);
    let depth = read.depth.clamp(1, pair.depth());
    let mut next = 0;
    while report.completed + report.failed < read.commands {
        let now = arch::now_ns();
        while next < read.commands && pair.in_flight() < depth {
            let sqe = nvm::read(
                nsid,
                Lba(read.lba + u64::from(next) * u64::from(read.blocks)),
                read.blocks,
            );
            let iova = Iova(read.buffer_iova + u64::from(next) * bytes);
            let data = Data::Contiguous { iova, len: bytes };
            if pair.submit(sqe, data, next, now + read.timeout_ns).is_err() {
                report.end = 3;
                return report;
            }
            next += 1;
        }
        pair.ring();
        match pair.poll() {
            Ok(Some(done)) => match done.outcome {
                Outcome::Done(status) if status.is_success() => report.completed += 1,
                Outcome::Done(status) => {
                    if report.failed == 0 {
                        report.status = u32::from(status.0);
                    }
                    report.failed += 1;
                }
                Outcome::Aborted(_) => report.failed += 1,
            },
            Ok(None) => {
                if pair.expire(now).is_some() {
                    report.end = 1;
                    return report;
                }
                arch::sleep_ns(100);
            }
            Err(_) => {
                report.end = 2;
                return report;
            }
        }
    }
    report
}
