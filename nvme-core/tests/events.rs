//! Trace events and where they go, with the feature and without.
#![cfg(not(loom))]

use nvme_core::spec::{Cid, Qid, Status};
use nvme_core::sync::{AtomicU64, Scope};
use nvme_core::trace::{EventTracer, TraceEvent, TraceRing};

/// Returns one event of each kind, with the text that it prints.
fn events() -> [(TraceEvent, &'static str); 6] {
    let (qid, cid) = (Qid(3), Cid(0x1002));
    [
        (
            TraceEvent::submitted(qid, cid, 0x02, 7),
            "queue 3 command 0x1002 submitted: opcode 0x02, namespace 7",
        ),
        (
            TraceEvent::completed(qid, cid, Status::LBA_OUT_OF_RANGE, 9),
            "queue 3 command 0x1002 completed: LBA Out of Range (0x0080), SQ head 9",
        ),
        (
            TraceEvent::expired(qid, cid, 1_000_000),
            "queue 3 command 0x1002 expired at 1000000 ns",
        ),
        (
            TraceEvent::reclaimed(qid, cid),
            "queue 3 command 0x1002 reclaimed",
        ),
        (
            TraceEvent::fault(qid, cid, 0xABCD),
            "queue 3 command 0x1002 fault: completion 0x000000000000abcd",
        ),
        (
            TraceEvent::from_words([0xEE00_0003_1002_0005, 6]),
            "queue 3 command 0x1002 unknown event 238: 0x0005 0x0000000000000006",
        ),
    ]
}

#[test]
fn events_print_their_values_and_come_back_from_their_words() {
    for (event, text) in events() {
        assert_eq!(event.to_string(), text);
        assert_eq!(format!("{event:?}"), text);
        assert_eq!(TraceEvent::from_words(event.to_words()), event);
    }
}

#[test]
fn a_ring_holds_an_event_in_two_words() {
    let words: [AtomicU64; 8] = Default::default();
    for (count, events) in [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (7, 3), (8, 3)] {
        let ring = TraceRing::new(&words[..count]);
        assert_eq!(ring.capacity(), events, "{count} words");
    }
}

#[test]
fn a_tracer_records_where_it_was_told_to() {
    let words: [AtomicU64; 9] = Default::default();
    let ring = TraceRing::new(&words);
    // The default tracer records nothing.
    EventTracer::default().record(events()[0].0);
    assert!(words.iter().all(|word| word.load_settled(Scope::Sys) == 0));
    let tracer = EventTracer::into_ring(ring);
    for (event, _) in events() {
        tracer.record(event);
    }
    let found: Vec<u64> = words
        .iter()
        .map(|word| word.load_settled(Scope::Sys))
        .collect();
    if cfg!(feature = "trace") {
        assert_eq!(found[0], 6, "all count, though four are kept");
        let kept = [4, 5, 2, 3].map(|number: usize| events()[number].0.to_words());
        assert_eq!(found[1..], kept.concat());
    } else {
        assert_eq!(found, [0; 9], "without the feature nothing is recorded");
    }
}

/// The tracer records a command's events in the order in which they happen.
#[cfg(feature = "trace")]
#[test]
fn a_queue_pair_tells_its_tracer_what_happens() {
    use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
    use nvme_core::spec::{Cqe, Iova, Lba, Nsid, PageSize, nvm};
    use nvme_core::{
        CommandData, CommandSlot, ControllerFault, ControllerIdentity, ListMemory, QueueMemory,
        QueuePair,
    };

    let (sq, cq): ([SqCell; 4], [CqCell; 4]) = Default::default();
    let bells: [nvme_core::sync::AtomicU32; 2] = Default::default();
    let memory = QueueMemory {
        sq: SqRing::new(&sq, Iova(0)),
        cq: CqRing::new(&cq, Iova(0)),
        sq_doorbell: DoorbellRegister::new(&bells[0]),
        cq_doorbell: DoorbellRegister::new(&bells[1]),
        lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
    };
    let qid = Qid(2);
    let mut pair = QueuePair::new(
        &ControllerIdentity::new(),
        qid,
        memory,
        vec![CommandSlot::new(), CommandSlot::new()],
    );
    let words: [AtomicU64; 31] = Default::default();
    let ring = TraceRing::new(&words);
    let sqe = nvm::write(Nsid(6), Lba(0), 1);
    pair.submit(sqe, CommandData::None, (), 5).unwrap();
    assert_eq!(
        ring.recorded(),
        0,
        "no event is recorded before there is a tracer"
    );

    pair.set_tracer(EventTracer::into_ring(ring));
    let cid = pair.submit(sqe, CommandData::None, (), 70).unwrap();
    pair.ring();
    let first = pair.expire(60).expect("past its deadline");
    let status = Status::WRITE_FAULT;
    let cqe = Cqe {
        dw0: 0,
        dw1: 0,
        sqhd: 2,
        sqid: qid.0,
        cid: cid.0,
        phase_status: status.0 << 1 | 1,
    };
    cq[0].post(cqe);
    cq[1].post(cqe);
    assert!(pair.poll().unwrap().is_some());
    let fault = pair.poll().unwrap_err();
    assert_eq!(fault, ControllerFault::UnknownCid(cid));
    let told: Vec<TraceEvent> = (0..ring.recorded()).map_while(|at| ring.read(at)).collect();
    let expected = [
        TraceEvent::submitted(qid, cid, 0x01, 6),
        TraceEvent::expired(qid, first, 60),
        TraceEvent::completed(qid, cid, status, 2),
        TraceEvent::fault(qid, cid, cqe.to_words()[1]),
    ];
    assert_eq!(told, expected);
}

#[cfg(feature = "trace")]
#[test]
fn a_ring_without_room_for_an_event_counts_nothing() {
    for count in [1, 2] {
        let words: [AtomicU64; 2] = Default::default();
        let ring = TraceRing::new(&words[..count]);
        ring.record(events()[0].0);
        assert_eq!((ring.recorded(), ring.read(0)), (0, None), "{count} words");
    }
}
