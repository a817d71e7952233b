//! A queue passed on as `QueueWords`: the memory that they name is used, and impossible words are refused.
// UNSAFETY: attaching turns addresses into rings; the memory that they name lives in the test.
#![cfg(not(loom))]
#![allow(unsafe_code)]

use nvme_core::group::LoneThread;
use nvme_core::handoff::QueueWords;
use nvme_core::mem::{CqCell, SqCell};
use nvme_core::queue_state::{QueueState, words};
use nvme_core::spec::{Cqe, Iova, Nsid, Qid, Sqe, Status};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_core::{
    CollectiveQueue, CommandData, CommandOutcome, ControllerIdentity, MemberCommand, PointerError,
    ResultCells, SharedQueue, SubmitError,
};

const QID: Qid = Qid(5);
const LISTS: u64 = 0x70_0000;

/// The memory of a queue, as a host lays it out.
struct Memory {
    sq: Vec<SqCell>,
    cq: Vec<CqCell>,
    /// The tail and the head doorbell.
    bells: Vec<AtomicU32>,
    lists: Vec<AtomicU64>,
    state: Vec<AtomicU32>,
    cells: Vec<AtomicU64>,
}

impl Memory {
    fn new(entries: u32, slots: u32, list_words: u32) -> (Self, QueueWords) {
        fn zeroed<T: Default>(count: usize) -> Vec<T> {
            (0..count).map(|_| T::default()).collect()
        }
        let memory = Self {
            sq: zeroed(entries as usize),
            cq: zeroed(entries as usize),
            bells: zeroed(2),
            lists: zeroed((slots * list_words) as usize),
            state: zeroed(words(entries)),
            cells: zeroed(4),
        };
        QueueState::new(&memory.state, QID, entries, slots)
            .expect("a possible queue")
            .init(&ControllerIdentity::new(), 0);
        let words = QueueWords {
            sq: memory.sq.as_ptr().expose_provenance() as u64,
            cq: memory.cq.as_ptr().expose_provenance() as u64,
            sq_doorbell: (&raw const memory.bells[0]).expose_provenance() as u64,
            cq_doorbell: (&raw const memory.bells[1]).expose_provenance() as u64,
            lists: memory.lists.as_ptr().expose_provenance() as u64,
            lists_iova: LISTS,
            state: memory.state.as_ptr().expose_provenance() as u64,
            entries,
            slots,
            list_words,
            page_shift: 12,
            qid: u32::from(QID.0),
            reserved: 0,
        };
        (memory, words)
    }

    fn shared(&self, words: &QueueWords) -> Option<SharedQueue<'_>> {
        // SAFETY: `words` name the vectors of `self`, which the queue borrows; they hold atomics alone.
        let (memory, state) = unsafe { words.attach() }?;
        Some(SharedQueue::new(
            memory,
            state,
            ResultCells::new(&self.cells),
        ))
    }
}

fn read(pages: u64) -> MemberCommand<'static> {
    let data = CommandData::Contiguous {
        iova: Iova(0x10_0000),
        len: pages * 4096,
    };
    MemberCommand::new(Sqe::new(2, Nsid(1)), data, 3)
}

/// A command goes through every piece of memory that the words name.
#[test]
fn an_attached_queue_uses_the_memory_that_its_words_name() {
    let (memory, words) = Memory::new(8, 7, 4);
    let queue = memory.shared(&words).expect("a possible queue");
    assert_eq!(queue.state().qid(), QID);
    assert_eq!((queue.state().mask(), queue.state().slots()), (7, 7));

    let token = queue.place(&LoneThread, read(4)).expect("room");
    queue.ring(&LoneThread);
    assert_eq!(memory.bells[0].load(Order::Relaxed, Scope::Sys), 1);
    let sqe = memory.sq[0].load();
    assert_eq!(sqe.cid(), token.cid());
    // PRP2 names the slot's list, which holds the three pages after the first one.
    let slot = u64::from(sqe.cid().0 & 0xFFF);
    assert_eq!(sqe.dptr, [0x10_0000, LISTS + slot * 32]);
    let list = &memory.lists[slot as usize * 4..][..4];
    let list: Vec<u64> = list
        .iter()
        .map(|word| word.load_settled(Scope::Sys))
        .collect();
    assert_eq!(list, [0x10_1000, 0x10_2000, 0x10_3000, 0]);
    assert_eq!(queue.state().in_flight(), 1);

    let status = Status::LBA_OUT_OF_RANGE;
    memory.cq[0].post(Cqe {
        dw0: 0,
        dw1: 0,
        sqhd: 1,
        sqid: QID.0,
        cid: sqe.cid().0,
        phase_status: status.0 << 1 | 1,
    });
    queue.drain(&LoneThread);
    assert_eq!(
        queue.poll(&token),
        Some((CommandOutcome::Completed(status), 0))
    );
    assert_eq!(queue.state().in_flight(), 0);
    assert_eq!(queue.fault(), None);
}

/// The state lies in the memory of the words: a second view continues where the first one stopped.
#[test]
fn a_queue_that_is_attached_again_goes_on() {
    let (memory, words) = Memory::new(4, 3, 0);
    let first = memory.shared(&words).unwrap();
    let token = first.place(&LoneThread, read(1)).unwrap();
    first.ring(&LoneThread);
    let again = memory.shared(&words).unwrap();
    let busy = again.place(&LoneThread, read(1));
    assert_eq!(busy.unwrap_err(), SubmitError::CellBusy, "its cell waits");
    assert_eq!(again.state().cids().collect::<Vec<_>>(), [token.cid()]);

    // SAFETY: as in `shared`; no other view of the queue is used meanwhile.
    let (rings, state) = unsafe { words.attach() }.unwrap();
    let mut owned = CollectiveQueue::resume(LoneThread, rings, state);
    assert_eq!((owned.in_flight(), owned.depth()), (1, 3));
    // Without list memory a transfer of two pages works, one of three does not.
    let refused = owned.submit(true, |_| read(3), 1 << 30);
    assert_eq!(refused, Err(SubmitError::Map(PointerError::ListTooSmall)));
    let cid = owned.submit(true, |_| read(2), 1 << 30).unwrap().unwrap();
    owned.ring();
    assert_eq!(memory.bells[0].load(Order::Relaxed, Scope::Sys), 2);
    assert_eq!(memory.sq[1].load().dptr, [0x10_0000, 0x10_1000]);
    assert_eq!(memory.sq[1].load().cid(), cid);
}

#[test]
fn words_that_describe_no_queue_are_refused() {
    let (memory, words) = Memory::new(8, 7, 4);
    type Change = fn(&mut QueueWords);
    let refused: [(&str, Change); 9] = [
        ("no page size", |words| words.page_shift = 0),
        ("pages of 2 KiB", |words| words.page_shift = 11),
        ("pages of 2^28 bytes", |words| words.page_shift = 28),
        ("4 KiB in the lowest byte alone", |words| {
            words.page_shift = 0x10C
        }),
        ("one entry", |words| words.entries = 1),
        ("no power of two", |words| words.entries = 6),
        ("more than 65,536 entries", |words| words.entries = 1 << 17),
        ("no slots", |words| words.slots = 0),
        ("as many slots as entries", |words| words.slots = 8),
    ];
    for (what, change) in refused {
        let mut changed = words;
        change(&mut changed);
        assert!(memory.shared(&changed).is_none(), "{what}");
    }
    assert!(memory.shared(&words).is_some());
}
