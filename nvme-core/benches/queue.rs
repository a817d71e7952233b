//! Cost of submit and completion on one core, against a controller loop that only echoes CIDs.
//!
//! `cargo bench -p nvme-core` prints one JSON line per batch size: the median of many rounds, in
//! nanoseconds per command, driver and echo together. `--once` runs few commands, for callgrind.

use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use nvme_core::spec::{Cqe, Iova, Lba, Nsid, PageSize, Qid, nvm};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_core::{CommandData, CommandSlot, ControllerIdentity, ListMemory, QueueMemory, QueuePair};
use std::hint::black_box;
use std::time::Instant;

const ENTRIES: usize = 256;

struct Memory {
    sq: Vec<SqCell>,
    cq: Vec<CqCell>,
    lists: Vec<AtomicU64>,
    sq_bell: AtomicU32,
    cq_bell: AtomicU32,
}

/// Completes whatever was published since the last call.
struct Echo<'a> {
    memory: &'a Memory,
    head: usize,
    posted: usize,
    phase: bool,
}

impl Echo<'_> {
    fn run(&mut self) {
        let tail = self.memory.sq_bell.load(Order::Acquire, Scope::Sys) as usize;
        while self.head != tail {
            let sqe = self.memory.sq[self.head].load();
            self.head = (self.head + 1) % ENTRIES;
            self.memory.cq[self.posted].post(Cqe {
                dw0: 0,
                dw1: 0,
                sqhd: self.head as u16,
                sqid: 1,
                cid: sqe.cid().0,
                phase_status: u16::from(self.phase),
            });
            self.posted += 1;
            if self.posted == ENTRIES {
                (self.posted, self.phase) = (0, !self.phase);
            }
        }
    }
}

fn measure(batch: u32, rounds: usize, commands: u32) -> f64 {
    let memory = Memory {
        sq: (0..ENTRIES).map(|_| SqCell::default()).collect(),
        cq: (0..ENTRIES).map(|_| CqCell::default()).collect(),
        lists: (0..ENTRIES * 8).map(|_| AtomicU64::new(0)).collect(),
        sq_bell: AtomicU32::new(0),
        cq_bell: AtomicU32::new(0),
    };
    let queue = QueueMemory {
        sq: SqRing::new(&memory.sq, Iova(0x1000)),
        cq: CqRing::new(&memory.cq, Iova(0x8000)),
        sq_doorbell: DoorbellRegister::new(&memory.sq_bell),
        cq_doorbell: DoorbellRegister::new(&memory.cq_bell),
        lists: ListMemory::new(
            DmaWords::new(&memory.lists, Iova(0x1_0000)),
            PageSize::KIB4,
            8,
        ),
    };
    let slots: Vec<CommandSlot<u32>> = (0..ENTRIES).map(|_| CommandSlot::new()).collect();
    let mut pair = QueuePair::new(&ControllerIdentity::new(), Qid(1), queue, slots);
    let mut echo = Echo {
        memory: &memory,
        head: 0,
        posted: 0,
        phase: true,
    };
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            for first in (0..commands).step_by(batch as usize) {
                for n in first..first + batch {
                    let sqe = nvm::read(Nsid(1), Lba(u64::from(n)), 8);
                    let data = CommandData::Contiguous {
                        iova: Iova(u64::from(n) << 12),
                        len: 4096,
                    };
                    pair.submit(black_box(sqe), data, n, u64::MAX)
                        .expect("the queue has room");
                }
                pair.ring();
                echo.run();
                let mut ended = 0;
                while let Some(done) = pair.poll().expect("the echo is sound") {
                    black_box(done.result().expect("status 0"));
                    ended += 1;
                }
                assert_eq!(ended, batch);
            }
            start.elapsed().as_nanos() as f64 / f64::from(commands)
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let once = std::env::args().any(|argument| argument == "--once");
    let (rounds, commands) = if once { (1, 1 << 14) } else { (101, 1 << 14) };
    for batch in [1, 32, 128] {
        let ns = measure(batch, rounds, commands);
        println!(
            "{{\"bench\":\"core_submit_complete\",\"batch\":{batch},\"rounds\":{rounds},\"commands\":{commands},\"median_ns_per_command\":{ns:.2}}}"
        );
    }
}
