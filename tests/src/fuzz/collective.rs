//! A collective queue whose controller posts anything: each command ends at most once, as an entry that
//! was posted for it says; the first wrong entry refuses the queue; recovery ends the remaining commands.

use super::entries::{Entry, Posted, sizes};
use crate::hand::{Hand, Rig};
use arbitrary::{Arbitrary, Unstructured};
use nvme_core::group::LoneThread;
use nvme_core::spec::{Cid, Iova, Nsid, Sqe};
use nvme_core::{CollectiveQueue, CommandData, MemberCommand, SubmitError, TaggedCompletion};
use std::collections::HashMap;

/// The unit in which deadlines are kept.
const TICK_NS: u64 = 1024;

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Call {
    Submit {
        wants_dw0: bool,
        pages: u8,
        ticks: u8,
    },
    Refrain,
    Ring,
    Publish,
    RingWithin {
        depth: u8,
    },
    Reap {
        each: u8,
    },
    Post(Entry),
    Expire {
        ticks: u8,
    },
    Handover,
    Recover,
}

struct Lent {
    cid: Cid,
    wants_dw0: bool,
    /// Number of entries that the head doorbell had freed when the command was placed.
    since: usize,
    deadline_ns: u64,
    expired: bool,
}

struct Model<'a> {
    queue: CollectiveQueue<'a, LoneThread>,
    hand: Hand<'a>,
    posted: Posted,
    /// The buffers in flight, by tag.
    lent: HashMap<u32, Lent>,
    next: u32,
    now_ns: u64,
    refused: bool,
}

/// Sizes, then submissions and completions, right and wrong ones.
pub fn collective(bytes: &[u8]) {
    let mut input = Unstructured::new(bytes);
    let Ok([entries, slots, start]) = sizes(&mut input) else {
        return;
    };
    let rig = Rig::new(entries, slots, 0, start);
    let mut model = Model {
        queue: rig.collective(LoneThread),
        hand: Hand::new(&rig),
        posted: Posted::default(),
        lent: HashMap::new(),
        next: 0,
        // A deadline of 0 ns passes a tick late: 0 stands for none.
        now_ns: TICK_NS,
        refused: false,
    };
    while !input.is_empty() {
        let Ok(call) = Call::arbitrary(&mut input) else {
            break;
        };
        match call {
            Call::Handover => {
                model.queue.suspend();
                model.queue = rig.collective(LoneThread);
            }
            Call::Recover => model = recover(&rig, model),
            _ => model.call(call),
        }
        assert_eq!(model.queue.in_flight() as usize, model.lent.len());
        assert_eq!(rig.state().in_flight() as usize, model.lent.len());
        assert_eq!(rig.state().fault().is_some(), model.refused);
    }
    recover(&rig, model);
}

/// Resets the controller: every command that is left ends as aborted, and the queue works again.
fn recover<'a>(rig: &'a Rig, model: Model<'a>) -> Model<'a> {
    let proof = rig.reset();
    let mut tags = Vec::new();
    assert!(model.queue.recover(&proof, |tag| tags.push(tag)));
    tags.sort_unstable();
    let mut lent: Vec<u32> = model.lent.keys().copied().collect();
    lent.sort_unstable();
    assert_eq!(tags, lent, "a reset ends every command");
    Model {
        queue: rig.collective(LoneThread),
        hand: Hand::new(rig),
        posted: Posted::default(),
        lent: HashMap::new(),
        refused: false,
        ..model
    }
}

impl Model<'_> {
    fn call(&mut self, call: Call) {
        match call {
            Call::Submit {
                wants_dw0,
                pages,
                ticks,
            } => self.submit(wants_dw0, pages, ticks),
            Call::Refrain => {
                let none = self.queue.submit(false, |_| panic!("it wants none"), 0);
                assert_eq!(none.is_err(), self.refused);
            }
            Call::Ring => self.queue.ring(),
            Call::Publish => self.queue.publish(),
            Call::RingWithin { depth } => self.queue.ring_within(u32::from(depth)),
            Call::Reap { each } => {
                let mut ended = Vec::new();
                let result = match each % 3 {
                    0 => self.queue.reap::<1>(|end| ended.push(end)),
                    1 => self.queue.reap::<2>(|end| ended.push(end)),
                    _ => self.queue.reap::<4>(|end| ended.push(end)),
                };
                self.refused |= result.is_err();
                if let Ok(count) = result {
                    assert_eq!(count as usize, ended.len());
                }
                ended.into_iter().for_each(|end| self.end(end));
            }
            Call::Post(entry) => self.posted.post(&mut self.hand, entry),
            Call::Expire { ticks } => {
                self.now_ns += u64::from(ticks) * TICK_NS;
                let mut late = Vec::new();
                let count = self.queue.expire(self.now_ns, |tag| late.push(tag));
                assert_eq!(count as usize, late.len());
                for (tag, one) in &mut self.lent {
                    let due = one.deadline_ns <= self.now_ns && !one.expired;
                    assert_eq!(late.contains(tag), due, "deadline of {tag}");
                    one.expired |= due;
                }
            }
            Call::Handover | Call::Recover => {}
        }
    }

    fn submit(&mut self, wants_dw0: bool, pages: u8, ticks: u8) {
        let (tag, deadline_ns) = (self.next, self.now_ns + u64::from(ticks) * TICK_NS);
        let data = CommandData::Contiguous {
            iova: Iova(0x10_0000),
            len: u64::from(pages % 9) * 4096,
        };
        let command = MemberCommand::new(Sqe::new(2, Nsid(1)), data, tag).wanting_dw0(wants_dw0);
        let depth = self.queue.depth();
        let make = |slot| {
            assert!(slot < depth);
            command
        };
        match self.queue.submit(true, make, deadline_ns) {
            Ok(cid) => {
                assert!(!self.refused, "placed on a refused queue");
                let cid = cid.expect("it wanted one");
                let since = self.hand.look_back() as usize;
                let one = Lent {
                    cid,
                    wants_dw0,
                    since,
                    deadline_ns,
                    expired: false,
                };
                assert!(
                    self.lent.values().all(|other| other.cid != cid),
                    "{cid} twice"
                );
                self.lent.insert(tag, one);
                self.next += 1;
            }
            Err(SubmitError::QueueFull) => assert_eq!(self.lent.len() as u32, depth),
            Err(SubmitError::Refused) => assert!(self.refused),
            Err(SubmitError::Map(_)) => {}
            Err(SubmitError::CellBusy) => panic!("a collective has no cells"),
            Err(SubmitError::Closed) => panic!("a kernel's queue says that it is refused"),
        }
    }

    fn end(&mut self, end: TaggedCompletion) {
        let one = self
            .lent
            .remove(&end.tag)
            .expect("a command in flight ended");
        assert_eq!((one.cid, one.expired), (end.cid, end.late));
        let mut told = self.posted.told(end.cid, end.status, one.since);
        let right = told.any(|cqe| cqe.dw0 == end.dw0 || !one.wants_dw0);
        assert!(right, "{end:?}: the controller did not say that");
        assert!(one.wants_dw0 || end.dw0 == 0);
    }
}
