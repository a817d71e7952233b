//! Both rings with two entries each, a driver and a controller, up to three preemptions.

use loom::sync::Arc;
use loom::thread;
use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use nvme_core::spec::{Cqe, Iova, Nsid, Sqe};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope, spin};
use nvme_core::{CompletionQueue, SubmissionQueue};
use nvme_tests::model::{Bound, check};

const ENTRIES: usize = 2;

/// The memory both sides share. `data` is the buffer of one command at a time.
struct Shared {
    sq: [SqCell; ENTRIES],
    cq: [CqCell; ENTRIES],
    data: [AtomicU64; 1],
    sq_tail: AtomicU32,
    cq_head: AtomicU32,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            sq: Default::default(),
            cq: Default::default(),
            data: Default::default(),
            sq_tail: AtomicU32::new(0),
            cq_head: AtomicU32::new(0),
        })
    }

    fn data(&self) -> DmaWords<'_> {
        DmaWords::new(&self.data, Iova(0))
    }
}

fn command(n: u32) -> Sqe {
    let mut sqe = Sqe::new(n as u8, Nsid(n));
    (sqe.cdw2, sqe.cdw15) = (n, n);
    sqe
}

/// Serves `commands` commands: fetch when the tail doorbell has moved, check the whole entry and the
/// buffer, answer into the buffer, post.
fn controller(shared: &Shared, commands: u32) {
    for n in 1..=commands {
        let index = (n as usize - 1) % ENTRIES;
        // Acquire: pairs with the release fence of the driver's doorbell.
        while shared.sq_tail.load(Order::Acquire, Scope::Sys) != n % ENTRIES as u32 {
            spin();
        }
        assert_eq!(
            shared.sq[index].load(),
            command(n),
            "half of a submission was fetched"
        );
        assert_eq!(
            shared.data().get(0),
            u64::from(n),
            "the buffer was not there at the fetch"
        );
        shared.data().set(0, u64::from(n) << 32);
        let phase = (n as usize - 1) / ENTRIES % 2 == 0;
        let (sqhd, cid) = ((n as usize % ENTRIES) as u16, n as u16);
        shared.cq[index].post(Cqe {
            dw0: n,
            dw1: n,
            sqhd,
            sqid: 1,
            cid,
            phase_status: u16::from(phase),
        });
        if n < commands {
            while shared.cq_head.load(Order::Acquire, Scope::Sys) != n % ENTRIES as u32 {
                spin();
            }
        }
    }
}

/// Three commands through two entries: every slot is used, and one again after the wrap.
#[test]
fn every_submission_and_completion_is_seen_whole() {
    check(
        "three commands through two entries: no entry, completion or buffer is seen half, or before its turn",
        Bound::Preemptions(3),
        || {
            const COMMANDS: u32 = 3;
            let shared = Shared::new();
            let device = Arc::clone(&shared);
            let device = thread::spawn(move || controller(&device, COMMANDS));

            let sq_bell = DoorbellRegister::new(&shared.sq_tail);
            let cq_bell = DoorbellRegister::new(&shared.cq_head);
            let mut sq = SubmissionQueue::new(SqRing::new(&shared.sq, Iova(0)), sq_bell);
            let mut cq = CompletionQueue::new(CqRing::new(&shared.cq, Iova(0)), cq_bell);
            for n in 1..=COMMANDS {
                shared.data().set(0, u64::from(n));
                assert!(sq.push(command(n)));
                sq.ring();
                let cqe = loop {
                    match cq.pop() {
                        Some(cqe) => break cqe,
                        None => spin(),
                    }
                };
                assert_eq!(
                    (cqe.dw0, cqe.dw1, cqe.cid),
                    (n, n, n as u16),
                    "half of a completion was seen"
                );
                assert_eq!(
                    shared.data().get(0),
                    u64::from(n) << 32,
                    "the data came after its completion"
                );
                assert!(sq.is_head_of(u64::from(n) - 1, cqe.sqhd));
                sq.end_one();
                cq.ring();
            }
            device.join().unwrap();
        },
    );
}
