//! Arguments that the core refuses, and a text that does not fit, which is reported.
#![cfg(not(loom))]

use core::fmt::{Display, Write};
use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use nvme_core::queue_state::{QueueState, words};
use nvme_core::spec::register::{cq_head_doorbell, doorbell_bytes, sq_tail_doorbell};
use nvme_core::spec::{Cid, Iova, Lba, Nsid, PageSize, Qid, Status, nvm};
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_core::trace::TraceEvent;
use nvme_core::transfer::RangeError;
use nvme_core::{
    CommandData, CommandSlot, ControllerFault, ControllerIdentity, ListMemory, PointerError,
    QueueMemory, QueuePair, SubmitError, prp, sgl,
};

/// A writer with room for this number of bytes.
struct Room(usize);

impl Write for Room {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        self.0 = self.0.checked_sub(text.len()).ok_or(core::fmt::Error)?;
        Ok(())
    }
}

/// A message that was cut off is reported as an error.
#[test]
fn a_text_that_does_not_fit_is_an_error() {
    let cid = Cid(0x1002);
    let texts: [&dyn Display; 12] = [
        &ControllerFault::UnknownCid(cid),
        &ControllerFault::StaleCid(cid),
        &ControllerFault::SqHead(9),
        &ControllerFault::SqId(7),
        &TraceEvent::submitted(Qid(3), cid, 2, 1),
        &TraceEvent::completed(Qid(3), cid, Status::SUCCESS, 1),
        &TraceEvent::fault(Qid(3), cid, 5),
        &Status::INVALID_FIELD.with_crd(2).with_more().with_dnr(),
        &RangeError::PastEnd { blocks: 8 },
        &PointerError::Empty,
        &Iova(0x1000),
        &cid,
    ];
    for text in texts {
        let whole = text.to_string();
        for room in 0..whole.len() {
            let written = write!(Room(room), "{text}");
            assert!(written.is_err(), "{whole:?} in {room} bytes");
        }
        assert!(write!(Room(whole.len()), "{text}").is_ok(), "{whole:?}");
    }
}

#[test]
fn there_is_no_state_of_an_impossible_queue() {
    let memory: Vec<AtomicU32> = (0..words(64)).map(|_| AtomicU32::new(0)).collect();
    let state = |entries, slots| QueueState::new(&memory, Qid(1), entries, slots);
    for (entries, slots) in [
        (0, 0),
        (1, 1),
        (3, 1),
        (48, 7),
        (64, 0),
        (64, 64),
        (1 << 17, 1),
    ] {
        assert!(!QueueState::possible(entries, slots));
        assert!(state(entries, slots).is_none(), "{entries}, {slots}");
    }
    assert!(state(64, 63).is_some());
    // These sizes are possible, but this state has too few words for them.
    assert!(QueueState::possible(1024, 63) && state(1024, 63).is_none());
}

#[test]
fn a_list_begins_at_a_whole_entry() {
    let memory: [AtomicU64; 4] = Default::default();
    for offset in 1..8 {
        let list = DmaWords::new(&memory, Iova(0x10_0000 + offset));
        let mapped = prp::map(PageSize::KIB4, Iova(0x1000), 3 * 4096, list);
        assert_eq!(mapped, Err(PointerError::Misaligned), "at {offset}");
        // If no list is needed, its alignment does not matter.
        assert!(prp::map(PageSize::KIB4, Iova(0x1000), 8192, list).is_ok());
    }
}

#[test]
fn a_view_of_no_words_is_empty() {
    let memory: [AtomicU64; 2] = Default::default();
    let view = DmaWords::new(&memory, Iova(0));
    assert!(!view.is_empty());
    let none = view.slice(2, 0).expect("the end is inside");
    assert_eq!((none.is_empty(), none.len()), (true, 0));
}

/// A list of segments that does not fit costs nothing: the buffer comes back and the slot is free.
#[test]
fn segments_that_do_not_fit_are_given_back() {
    let (sq, cq): ([SqCell; 2], [CqCell; 2]) = Default::default();
    let bells: [AtomicU32; 2] = Default::default();
    let lists: [AtomicU64; 4] = Default::default();
    let memory = QueueMemory {
        sq: SqRing::new(&sq, Iova(0)),
        cq: CqRing::new(&cq, Iova(0)),
        sq_doorbell: DoorbellRegister::new(&bells[0]),
        cq_doorbell: DoorbellRegister::new(&bells[1]),
        lists: ListMemory::new(DmaWords::new(&lists, Iova(0x8000)), PageSize::KIB4, 4),
    };
    let mut pair = QueuePair::new(
        &ControllerIdentity::new(),
        Qid(1),
        memory,
        vec![CommandSlot::new()],
    );
    let part = sgl::SglSegment::Discard { len: 512 };
    let read = nvm::read(Nsid(1), Lba(0), 3);
    let three = pair.submit(read, CommandData::Sgl(&[part; 3]), "three", 0);
    let rejected = three.unwrap_err();
    assert_eq!(rejected.buffer, "three");
    assert_eq!(rejected.error, SubmitError::Map(PointerError::ListTooSmall));
    assert_eq!(pair.in_flight(), 0);
    pair.submit(read, CommandData::Sgl(&[part; 2]), "two", 0)
        .unwrap();
    assert_eq!(pair.in_flight(), 1);
    // PSDT 01b: the data pointer is a Last Segment descriptor for the slot's list.
    let entry = sq[0].load();
    assert_eq!(entry.cdw0 >> 14 & 3, 1);
    assert_eq!(entry.dptr, [0x8000, 0x3000_0000_0000_0020]);
}

/// A doorbell out of reach of 32 bits is at no offset that a BAR can have.
#[test]
fn doorbells_beyond_32_bits_are_nowhere() {
    for dstrd in [32, 63, 255] {
        assert_eq!(sq_tail_doorbell(1, dstrd), u32::MAX);
        assert_eq!(cq_head_doorbell(0, dstrd), u32::MAX);
        assert_eq!(doorbell_bytes(0, dstrd), u32::MAX);
    }
    assert_eq!(sq_tail_doorbell(u16::MAX, 15), u32::MAX);
    assert_eq!(sq_tail_doorbell(1, 15), 0x1000 + 2 * (4 << 15));
}
