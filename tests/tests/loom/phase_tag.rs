//! The phase tag says that a completion is there: the other words of the entry must be complete then, and the moved
//! data, too.

use loom::sync::Arc;
use loom::thread;
use nvme_core::CompletionQueue;
use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister};
use nvme_core::spec::{Cqe, Iova};
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_tests::model::{Bound, check};

#[derive(Default)]
struct Shared {
    cq: [CqCell; 3],
    data: [AtomicU64; 2],
    head: AtomicU32,
}

/// The controller posts two completions without waiting; a driver that looks now and then sees none,
/// one or both, never a part of one.
#[test]
fn a_completion_is_never_half_seen() {
    check(
        "a driver that looks at any time sees a completion whole or not at all, the data too",
        Bound::Exhaustive,
        || {
            let shared: Arc<Shared> = Arc::default();
            let mut cq = CompletionQueue::new(
                CqRing::new(&shared.cq, Iova(0)),
                DoorbellRegister::new(&shared.head),
            );
            let device = Arc::clone(&shared);
            let device = thread::spawn(move || {
                let data = DmaWords::new(&device.data, Iova(0));
                for n in 0..2u16 {
                    data.set(usize::from(n), u64::from(n) + 100);
                    let word = u32::from(n) + 7;
                    device.cq[usize::from(n)].post(Cqe {
                        dw0: word,
                        dw1: word,
                        sqhd: n,
                        sqid: n,
                        cid: n,
                        phase_status: 1,
                    });
                }
            });
            let data = DmaWords::new(&shared.data, Iova(0));
            let mut seen = 0;
            for _ in 0..3 {
                if let Some(cqe) = cq.pop() {
                    assert_eq!(
                        (cqe.dw0, cqe.dw1, cqe.cid),
                        (seen + 7, seen + 7, seen as u16)
                    );
                    assert_eq!(data.get(seen as usize), u64::from(seen) + 100);
                    seen += 1;
                }
            }
            device.join().unwrap();
        },
    );
}
