//! The kernels of `nvme-gpu-kernel/examples` as a host thread, and one that does nothing.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::kernels::Bus;
use crate::rows::Reader;
use gpu_histogram::{Args, Walk};
use nvme_core::group::ExecContext;
use nvme_core::handoff::QueueWords;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::sync::AtomicU64;
use nvme_core::{Cells, Command, Data, Outcome, SharedQueue};

/// The symbols.
pub const NAMES: [&std::ffi::CStr; 3] = [c"histogram", c"walk", c"nothing"];

/// Counts the bytes of units: one after the other, by the first thread's buffer and cell, over the queues in turn.
pub fn histogram(args: &Args) {
    let here = Bus::default();
    let bins = args.bins as usize as *mut u64;
    for unit in 0..args.units {
        let queue = unit % u64::from(args.queues.queue_count);
        let words = args.queues.queues as usize as *const QueueWords;
        // SAFETY: the host vouches for the queues and the cells.
        let queue = unsafe {
            let (memory, state) = (*words.add(queue as usize))
                .attach()
                .expect("possible sizes");
            let cells = args.queues.cells as usize as *const AtomicU64;
            let cells = std::slice::from_raw_parts(cells, args.queues.cell_count as usize);
            SharedQueue::new(memory, state, Cells::new(cells))
        };
        let lba = Lba(args.lba + unit * u64::from(args.blocks));
        let data = Data::Contiguous {
            iova: Iova(args.buffers_iova),
            len: u64::from(args.unit_bytes),
        };
        let read = || Command::new(nvm::read(Nsid(args.nsid), lba, args.blocks), data, 0);
        let ran = queue.run(&here, read, here.now_ns() + args.timeout_ns);
        match ran {
            Ok(Ok((Outcome::Completed(status), _))) if status.is_success() => {
                let from = args.buffers as usize as *const u8;
                for at in 0..args.unit_bytes as usize {
                    // SAFETY: inside the buffer, whose read has ended; one of 256 counters.
                    unsafe { *bins.add(usize::from(from.add(at).read_volatile())) += 1 };
                }
            }
            // SAFETY: the host gives the count.
            _ => unsafe { *(args.failed as usize as *mut u64) += 1 },
        }
    }
}

/// Walks from row to row: block after block, thread after thread.
pub fn walk(walk: &Walk, blocks: u32, threads: u32) {
    for block in 0..blocks {
        let mut reader = Reader::enter(&walk.table);
        for thread in 0..threads {
            let index = block * threads + thread;
            if index >= walk.walks {
                continue;
            }
            // SAFETY: the host gives an id and a place for each walk.
            let (start, end) = unsafe {
                let (starts, ends) = (walk.starts as usize, walk.ends as usize);
                let start = *(starts as *const i64).add(index as usize);
                (start, (ends as *mut i64).add(index as usize))
            };
            let mut id = start;
            for _ in 0..walk.steps {
                id = match reader.row(id, thread) {
                    Ok(row) => {
                        // SAFETY: a row of 8 bytes at least.
                        let word = unsafe { (row as usize as *const u64).read_unaligned() };
                        (word % walk.table.rows) as i64
                    }
                    Err(code) => {
                        id = i64::from(code) - (1 << 32);
                        break;
                    }
                };
            }
            // SAFETY: as above.
            unsafe { end.write(id) };
        }
        reader.leave();
    }
}
