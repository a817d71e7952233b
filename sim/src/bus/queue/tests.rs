//! Tests of `queue`.

use super::*;
use crate::bus::ring::RingBase;
use crate::memory::DmaMemory;
use crate::memory::VecMemory;

fn ring(entries: u32, entry_bytes: usize) -> QueueRing {
    QueueRing {
        base: RingBase::Contiguous(0),
        entries,
        entry_bytes,
    }
}

#[test]
fn phase_flips_on_wrap_and_space_follows_the_head() {
    let memory = VecMemory::new(4096);
    let guard = memory.guard();
    let dma = Dma::new(&guard);
    let mut cq = CompletionQueue::new(ring(3, 16));
    let cqe = Cqe::from_words(0, 0);
    let mut phases = Vec::new();
    for _ in 0..7 {
        assert!(cq.space() > 0);
        let at = cq.tail as usize * 2 + 1;
        cq.post(None, &dma, cqe, PublishFaults::default()).unwrap();
        phases.push(memory.words()[at].load(Ordering::Relaxed) >> 48 & 1);
        assert!(cq.take_head(cq.tail));
    }
    assert_eq!(phases, [1, 1, 1, 0, 0, 0, 1]);
    cq.post(None, &dma, cqe, PublishFaults::default()).unwrap();
    cq.post(None, &dma, cqe, PublishFaults::default()).unwrap();
    assert_eq!(cq.space(), 0);
}

#[test]
fn impossible_doorbells_are_refused_and_reported_once() {
    let mut cq = CompletionQueue::new(ring(4, 16));
    cq.tail = 2;
    assert!(!cq.take_head(3));
    assert!(cq.take_head(3), "the same bad value again is not news");
    assert!(!cq.take_head(u32::MAX));
    assert!(cq.take_head(2));
    assert_eq!(cq.head, 2);
    // Three entries are to be released, the last of them at index 3: there is no index 4.
    (cq.head, cq.tail) = (1, 0);
    assert!(!cq.take_head(4));
    assert_eq!(cq.head, 1);
    assert!(cq.take_head(0));
    let mut sq = SubmissionQueue::new(ring(4, 64), 1, 0, false);
    assert!(!sq.take_tail(4));
    assert_eq!(sq.waiting(), 0);
    assert!(sq.take_tail(3));
    assert_eq!(sq.waiting(), 3);
}

#[test]
fn a_ring_in_pages_splits_at_page_ends() {
    let base = RingBase::Pages {
        shift: 12,
        pages: alloc::vec![0x8000, 0x3000],
    };
    let ring = QueueRing {
        base,
        entries: 100,
        entry_bytes: 64,
    };
    assert_eq!(ring.run(62, 10), (0x8F80, 2));
    assert_eq!(ring.run(64, 50), (0x3000, 36));
}

/// Ranges that are announced for copying if memory cannot be mapped: each whole ring, and nothing else.
#[test]
fn a_ring_settles_last_as_a_whole() {
    #[derive(Default)]
    struct Told(core::cell::RefCell<Vec<(u64, u64)>>);

    impl crate::memory::DmaGuard for Told {
        fn lookup(&self, _iova: u64) -> Option<crate::memory::DmaRegion<'_>> {
            None
        }

        fn write_back_last(&self, iova: u64, len: u64) {
            self.0.borrow_mut().push((iova, len));
        }
    }

    let told = Told::default();
    let base = RingBase::Contiguous(0x8000);
    let whole = QueueRing {
        base,
        ..ring(100, 16)
    };
    whole.write_back_last(&Dma::new(&told));
    assert_eq!(told.0.take(), [(0x8000, 1600)]);
    let base = RingBase::Pages {
        shift: 13,
        pages: alloc::vec![0x1_0000, 0x4000],
    };
    let scattered = QueueRing {
        base,
        ..ring(256, 64)
    };
    scattered.write_back_last(&Dma::new(&told));
    assert_eq!(told.0.take(), [(0x1_0000, 8192), (0x4000, 8192)]);
}
