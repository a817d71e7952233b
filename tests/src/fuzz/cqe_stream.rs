//! Whatever a controller posts, every command ends at most once and with its own buffer, and the driver breaks
//! no rule before the controller does.

use super::{Input, is_audited};
use crate::audit::driver_is_right;
use nvme_auditor::Auditor;
use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use nvme_core::spec::{Cid, Cqe, Iova, Nsid, PageSize, Qid, Sqe};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::{
    CommandData, CommandSlot, ControllerFault, ControllerIdentity, ListMemory, QueueMemory,
    QueuePair,
};
use std::collections::HashMap;

const QID: u16 = 3;

/// The bytes are ring sizes, then a stream of submissions and of completions, right and wrong ones.
pub fn cqe_stream(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let sq_entries = 2 + usize::from(input.byte() % 15);
    let cq_entries = 2 + usize::from(input.byte() % 15);
    let sq_cells: Vec<SqCell> = (0..sq_entries).map(|_| SqCell::default()).collect();
    let cq_cells: Vec<CqCell> = (0..cq_entries).map(|_| CqCell::default()).collect();
    let bells: [AtomicU32; 2] = Default::default();
    let slots: Vec<CommandSlot<u32>> = (0..1 + input.byte() % 16)
        .map(|_| CommandSlot::new())
        .collect();
    let memory = QueueMemory {
        sq: SqRing::new(&sq_cells, Iova(0)),
        cq: CqRing::new(&cq_cells, Iova(0)),
        sq_doorbell: DoorbellRegister::new(&bells[0]),
        cq_doorbell: DoorbellRegister::new(&bells[1]),
        lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
    };
    let mut pair = QueuePair::new(&ControllerIdentity::new(), Qid(QID), memory, slots);

    // The test tracks the buffer of each command in flight, and the controller's positions.
    let mut lent: HashMap<u16, u32> = HashMap::new();
    let mut next_buffer = 0;
    let (mut posted, mut fetched) = (0usize, 0usize);
    // The position of each command that was placed.
    let mut places: HashMap<u16, usize> = HashMap::new();
    let mut pushed = 0usize;
    // Positions before this one are published.
    let mut rung = 0usize;
    let mut controller = is_audited(bytes).then(|| Controller::new(&sq_cells, cq_entries, &bells));
    while !input.is_empty() {
        match input.byte() % 4 {
            0 => {
                let sqe = Sqe::new(input.byte(), Nsid(1));
                if let Ok(cid) = pair.submit(sqe, CommandData::None, next_buffer, 0) {
                    assert_eq!(lent.insert(cid.0, next_buffer), None, "{cid} was in flight");
                    places.insert(cid.0, pushed);
                    pushed += 1;
                } else {
                    // Whatever head the controller reports, only commands in flight fill the queue.
                    assert_eq!(lent.len() as u32, pair.depth(), "refused without reason");
                }
                next_buffer += 1;
            }
            1 => {
                pair.ring();
                rung = pushed;
            }
            kind => {
                let honest = kind == 2;
                fetched = (fetched + 1).min(rung);
                let published = |cid: &u16| places.get(cid).is_some_and(|place| *place < rung);
                let mut cids: Vec<u16> = lent.keys().copied().filter(published).collect();
                cids.sort_unstable();
                let pick = usize::from(input.byte());
                let cid = if honest && !cids.is_empty() {
                    cids[pick % cids.len()]
                } else {
                    input.half()
                };
                // An honest controller has fetched every command that it completes.
                let place = places.get(&cid).filter(|_| honest && published(&cid));
                fetched = fetched.max(place.map_or(0, |place| place + 1));
                if let Some(controller) = &mut controller {
                    controller.fetch(fetched);
                }
                let phase = posted / cq_entries % 2 == 0;
                let status = if honest { 0 } else { input.half() & !1 };
                let cqe = Cqe {
                    dw0: input.word(),
                    dw1: 0,
                    sqhd: if honest {
                        (fetched % sq_entries) as u16
                    } else {
                        input.half()
                    },
                    sqid: if input.byte() == 255 {
                        input.half()
                    } else {
                        QID
                    },
                    cid,
                    phase_status: status | u16::from(phase),
                };
                if let Some(controller) = &mut controller {
                    controller.post(posted % cq_entries, &cqe);
                }
                cq_cells[posted % cq_entries].post(cqe);
                posted += 1;
                check(&mut lent, published, pair.poll());
            }
        }
        assert_eq!(pair.in_flight() as usize, lent.len());
        assert!(pair.in_flight() <= pair.depth());
    }
    assert!(
        matches!(pair.poll(), Ok(None)),
        "more was polled than posted"
    );
    if let Some(controller) = controller {
        driver_is_right(controller.auditor.findings());
    }
}

/// The controller's memory as the auditor sees it.
struct Controller<'a> {
    auditor: Auditor,
    sq: &'a [SqCell],
    /// The tail doorbell and the head doorbell.
    bells: &'a [AtomicU32; 2],
    /// Number of entries that the tail doorbell has published, and of those that were fetched.
    published: usize,
    fetched: usize,
}

impl<'a> Controller<'a> {
    fn new(sq: &'a [SqCell], cq_entries: usize, bells: &'a [AtomicU32; 2]) -> Self {
        let mut auditor = Auditor::new();
        auditor.add_pair(QID, (Some(0), sq.len() as u32), (None, cq_entries as u32));
        Self {
            auditor,
            sq,
            bells,
            published: 0,
            fetched: 0,
        }
    }

    /// Looks at the doorbells and fetches what is published, up to position `until`.
    fn fetch(&mut self, until: usize) {
        let [tail, head] = self
            .bells
            .each_ref()
            .map(|bell| bell.load(Order::Acquire, Scope::Sys));
        let sq = self.sq;
        let word = |at: u64| {
            let sqe = sq.get(at as usize / 64)?.load();
            Some(sqe.to_words()[at as usize % 64 / 8])
        };
        self.auditor.sq_doorbell(QID, tail, &word);
        self.auditor.cq_doorbell(QID, head);
        let entries = sq.len();
        self.published += (tail as usize + entries - self.published % entries) % entries;
        while self.fetched < until.min(self.published) {
            let index = self.fetched % entries;
            let sqe = sq[index].load();
            self.auditor.fetched(QID, index as u32, &sqe, &word);
            self.fetched += 1;
        }
    }

    fn post(&mut self, index: usize, cqe: &Cqe) {
        self.auditor
            .posted(QID, Some(index as u32), cqe, true, &|_| None);
    }
}

fn check(
    lent: &mut HashMap<u16, u32>,
    published: impl Fn(&u16) -> bool,
    polled: Result<Option<nvme_core::CommandCompletion<u32>>, ControllerFault>,
) {
    match polled {
        Ok(Some(done)) => {
            let buffer = lent.remove(&done.cid.0);
            assert_eq!(
                buffer,
                Some(done.buffer),
                "{} ended with the wrong buffer",
                done.cid
            );
        }
        Ok(None) => panic!("an entry with the right phase tag was not seen"),
        Err(ControllerFault::UnknownCid(Cid(cid)) | ControllerFault::StaleCid(Cid(cid))) => {
            assert!(
                !lent.contains_key(&cid) || !published(&cid),
                "a command that was published was called unknown"
            );
        }
        Err(_) => {}
    }
}
