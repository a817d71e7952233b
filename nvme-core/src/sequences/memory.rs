//! The memory of a queue pair, a controller that answers at once, and the names of the words.

use crate::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use crate::queue_state::{OwnedState, QueueState, SharedState, words};
use crate::spec::{Cqe, Iova, PageSize, Qid};
use crate::sync::record::{RecordedStep, recorded};
use crate::sync::{AtomicU32, AtomicU64, Order, Scope};
use crate::{ControllerIdentity, ListMemory, QueueMemory, ResultCells, SharedQueue};
use std::string::{String, ToString as _};
use std::vec::Vec;
use std::{format, vec};

const LIST_WORDS: usize = 4;

/// A queue pair's memory.
pub(super) struct PairMemory {
    sq: Vec<SqCell>,
    cq: Vec<CqCell>,
    tail: AtomicU32,
    head: AtomicU32,
    state: Vec<AtomicU32>,
    lists: Vec<AtomicU64>,
    cells: Vec<AtomicU64>,
    slots: u32,
}

fn zeroed<T: Default>(count: usize) -> Vec<T> {
    (0..count).map(|_| T::default()).collect()
}

impl PairMemory {
    pub fn new(entries: u32, slots: u32) -> Self {
        let memory = Self {
            sq: zeroed(entries as usize),
            cq: zeroed(entries as usize),
            tail: AtomicU32::new(0),
            head: AtomicU32::new(0),
            state: zeroed(words(entries)),
            lists: zeroed(slots as usize * LIST_WORDS),
            cells: zeroed(slots as usize),
            slots,
        };
        memory.state().init(&ControllerIdentity::new(), 0);
        memory
    }

    pub fn queue(&self) -> QueueMemory<'_> {
        let lists = DmaWords::new(&self.lists, Iova(0x10_0000));
        QueueMemory {
            sq: SqRing::new(&self.sq, Iova(0)),
            cq: CqRing::new(&self.cq, Iova(0)),
            sq_doorbell: DoorbellRegister::new(&self.tail),
            cq_doorbell: DoorbellRegister::new(&self.head),
            lists: ListMemory::new(lists, PageSize::KIB4, LIST_WORDS),
        }
    }

    pub fn state(&self) -> QueueState<'_> {
        let entries = self.sq.len() as u32;
        QueueState::new(&self.state, Qid(1), entries, self.slots).expect("a possible queue")
    }

    pub fn shared(&self) -> SharedQueue<'_> {
        SharedQueue::new(self.queue(), self.state(), ResultCells::new(&self.cells))
    }

    /// Returns the operations of `work`, one line an operation or run of equal ones: `8 x store relaxed sys:
    /// entry`.
    pub fn sequence(&self, work: impl FnOnce()) -> Vec<String> {
        let mut lines: Vec<(String, u32)> = vec![];
        for step in recorded(work) {
            let line = self.line(step);
            match lines.last_mut() {
                Some((last, count)) if *last == line => *count += 1,
                _ => lines.push((line, 1)),
            }
        }
        let text = |(line, count): (String, u32)| match count {
            1 => line,
            _ => format!("{count} x {line}"),
        };
        lines.into_iter().map(text).collect()
    }

    fn line(&self, step: RecordedStep) -> String {
        if step.operation == "sync" {
            return "sync".to_string();
        }
        let what = format!("{} {:?} {:?}", step.operation, step.order, step.scope);
        let what = what.to_lowercase();
        match step.operation {
            "fence" => what,
            _ => format!("{what}: {}", self.name(step.at)),
        }
    }

    /// Returns the name of the word at an address.
    fn name(&self, at: usize) -> &'static str {
        fn holds<T>(words: &[T], at: usize) -> bool {
            words
                .as_ptr_range()
                .contains(&core::ptr::without_provenance(at))
        }
        if holds(&self.cq, at) {
            let upper = at & 8 != 0;
            return if upper {
                "completion, dwords 2-3"
            } else {
                "completion, dwords 0-1"
            };
        }
        let slices = [
            (holds(&self.sq, at), "entry"),
            (holds(&self.lists, at), "list"),
            (holds(&self.cells, at), "cell"),
            (
                holds(core::slice::from_ref(&self.tail), at),
                "tail doorbell",
            ),
            (
                holds(core::slice::from_ref(&self.head), at),
                "head doorbell",
            ),
        ];
        if let Some((_, name)) = slices.iter().find(|(here, _)| *here) {
            return name;
        }
        let state = self.state();
        let (shared, owned) = (SharedState::of(state), OwnedState::of(state));
        let is = |word: &AtomicU32| core::ptr::from_ref(word).addr() == at;
        let fields = [
            (is(shared.next_ticket()), "tail"),
            (is(shared.ring_lock()), "ring lock"),
            (is(shared.rung()), "rung"),
            (is(shared.drain_word()), "drain word"),
            (is(shared.read()), "head"),
            (
                (0..4).any(|quarter| is(shared.read_of(quarter))),
                "read of a quarter",
            ),
            (
                (0..shared.free_words()).any(|word| is(shared.free_bits(word))),
                "free bits",
            ),
            (
                (0..=state.mask()).any(|index| is(state.slot(index))),
                "slot",
            ),
            (
                (0..=state.mask()).any(|index| is(shared.sequence(index))),
                "sequence number",
            ),
            (
                (0..=state.mask()).any(|index| is(owned.deadline(index))),
                "deadline",
            ),
        ];
        let field = fields.iter().find(|(here, _)| *here);
        field.map_or("fault", |(_, name)| name)
    }
}

/// A controller that fetches and completes everything, in order.
pub(super) struct OrderedController<'a> {
    memory: &'a PairMemory,
    fetched: u32,
}

impl<'a> OrderedController<'a> {
    pub fn new(memory: &'a PairMemory) -> Self {
        Self { memory, fetched: 0 }
    }

    /// Completes what the tail doorbell has published, at most `count` commands.
    pub fn complete(&mut self, count: u32) {
        let memory = self.memory;
        let mask = memory.sq.len() as u32 - 1;
        for _ in 0..count {
            let tail = memory.tail.load(Order::Acquire, Scope::Sys);
            if tail == self.fetched & mask {
                return;
            }
            let index = (self.fetched & mask) as usize;
            let phase = self.fetched & (mask + 1) == 0;
            self.fetched = self.fetched.wrapping_add(1);
            memory.cq[index].post(Cqe {
                dw0: 7,
                dw1: 0,
                sqhd: (self.fetched & mask) as u16,
                sqid: 1,
                cid: memory.sq[index].load().cid().0,
                phase_status: u16::from(phase),
            });
        }
    }
}
