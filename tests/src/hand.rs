//! A queue pair in plain memory, and its controller by hand: tests decide what completes, and when.
//!
//! The controller's side checks what any controller may rely on: the tail doorbell never goes back and
//! never passes more entries than there are slots.
//!
//! The fake of a controller's queues for all tests of the core. Others model another side: `fuzz/bad_controller`
//! answers by a fuzzer's script, registers and Identify data too; `fuzz/cqe_stream` posts raw completions and
//! records what the auditor sees; `properties` is registers without queues; `sequences/memory` of the core
//! records each atomic operation, below the core's public surface.

use crate::watch::Watch;
use nvme_core::group::ThreadGroup;
use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use nvme_core::queue_state::{QueueState, words};
use nvme_core::recovery::{DeletionStep, QueueDeletion};
use nvme_core::shutdown::{self, ShutdownKind, ShutdownMachine};
use nvme_core::spec::{Cid, Cqe, Iova, PageSize, Qid, Sqe, Status};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_core::{
    ClosedQueue, CollectiveQueue, CommandSlot, ControllerIdentity, ListMemory, QueueMemory,
    QueuePair, Quiesced, RegisterAccess, ResultCells, SharedQueue,
};

/// The identifier of a queue whose test does not choose another one.
pub const QID: Qid = Qid(1);

/// 64-bit words of list memory for each slot.
pub const LIST_WORDS: usize = 4;

/// The memory of one queue pair.
pub struct Rig {
    sq: Vec<SqCell>,
    cq: Vec<CqCell>,
    tail: AtomicU32,
    head: AtomicU32,
    state: Vec<AtomicU32>,
    lists: Vec<AtomicU64>,
    cells: Vec<AtomicU64>,
    slots: u32,
    qid: Qid,
    registers: Disabled,
}

fn zeroed<T: Default>(count: usize) -> Vec<T> {
    (0..count).map(|_| T::default()).collect()
}

impl Rig {
    /// Makes a queue of `entries` entries whose positions begin at `start`, with `cells` result cells.
    ///
    /// # Panics
    /// When there can be no such queue.
    pub fn new(entries: u32, slots: u32, cells: usize, start: u32) -> Self {
        Self::of(QID, entries, slots, cells, start)
    }

    /// Makes such a queue with the identifier `qid`.
    ///
    /// # Panics
    /// When there can be no such queue.
    pub fn of(qid: Qid, entries: u32, slots: u32, cells: usize, start: u32) -> Self {
        let rig = Self {
            sq: zeroed(entries as usize),
            cq: zeroed(entries as usize),
            tail: AtomicU32::new(0),
            head: AtomicU32::new(0),
            state: zeroed(words(entries)),
            lists: zeroed(slots as usize * LIST_WORDS),
            cells: zeroed(cells),
            slots,
            qid,
            registers: Disabled(ControllerIdentity::new()),
        };
        rig.state().init(rig.identity(), start);
        rig
    }

    /// Returns the controller that the queue belongs to; each rig has its own.
    pub fn identity(&self) -> &ControllerIdentity {
        self.registers.identity()
    }

    /// Rings, doorbells and lists.
    pub fn memory(&self) -> QueueMemory<'_> {
        let lists = DmaWords::new(&self.lists, Iova(0x10_0000));
        QueueMemory {
            sq: SqRing::new(&self.sq, Iova(0)),
            cq: CqRing::new(&self.cq, Iova(0)),
            sq_doorbell: DoorbellRegister::new(&self.tail),
            cq_doorbell: DoorbellRegister::new(&self.head),
            lists: ListMemory::new(lists, PageSize::KIB4, LIST_WORDS),
        }
    }

    /// Returns the queue's state.
    ///
    /// # Panics
    /// When there can be no such queue.
    pub fn state(&self) -> QueueState<'_> {
        let entries = self.sq.len() as u32;
        QueueState::new(&self.state, self.qid, entries, self.slots).expect("a possible queue")
    }

    /// Returns the result cells.
    pub fn cells(&self) -> ResultCells<'_> {
        ResultCells::new(&self.cells)
    }

    /// Returns the queue as any thread uses it.
    pub fn shared(&self) -> SharedQueue<'_> {
        SharedQueue::new(self.memory(), self.state(), self.cells())
    }

    /// Returns the queue as a group uses it.
    pub fn collective<G: ThreadGroup>(&self, group: G) -> CollectiveQueue<'_, G> {
        CollectiveQueue::resume(group, self.memory(), self.state())
    }

    /// Resets the doorbells as a controller's reset does, and returns the proof of it.
    ///
    /// # Panics
    /// Never, because these registers need no wait.
    pub fn reset(&self) -> Quiesced<'_> {
        self.tail.store(0, Order::Relaxed, Scope::Sys);
        self.head.store(0, Order::Relaxed, Scope::Sys);
        match ShutdownMachine::new(ShutdownKind::Normal, 1).step(&self.registers, 0) {
            Ok(shutdown::ShutdownStep::Done(proof)) => proof,
            other => panic!("a disabled controller is disabled: {other:?}"),
        }
    }
}

/// The registers of a controller that is disabled.
struct Disabled(ControllerIdentity);

impl RegisterAccess for Disabled {
    fn identity(&self) -> &ControllerIdentity {
        &self.0
    }

    fn read32(&self, _offset: u32) -> u32 {
        0
    }

    fn read64(&self, _offset: u32) -> u64 {
        0
    }

    fn write32(&self, _offset: u32, _value: u32) {}

    fn write64(&self, _offset: u32, _value: u64) {}
}

/// The controller's side of a [`Rig`].
pub struct Hand<'a> {
    rig: &'a Rig,
    /// Entries that the last look at the tail doorbell showed and that were not fetched yet.
    waiting: u32,
    /// Entries fetched and completions posted since the queue was created.
    fetched: u32,
    posted: u32,
    /// Number of freed completions, as the last read of the head doorbell showed.
    freed: u32,
    watch: Watch,
}

impl<'a> Hand<'a> {
    /// Returns the controller of a queue that was just created.
    pub fn new(rig: &'a Rig) -> Self {
        Self {
            rig,
            waiting: 0,
            fetched: 0,
            posted: 0,
            freed: 0,
            watch: Watch::new(rig.qid.0, rig.sq.len() as u32),
        }
    }

    /// Continues the controller of another hand, which had fetched and posted this many entries.
    pub fn resumed(rig: &'a Rig, fetched: u32, posted: u32) -> Self {
        Self {
            fetched,
            posted,
            ..Self::new(rig)
        }
    }

    /// Returns the queue.
    pub fn rig(&self) -> &'a Rig {
        self.rig
    }

    fn mask(&self) -> u32 {
        self.rig.sq.len() as u32 - 1
    }

    /// Reads the tail doorbell; returns how many entries can be fetched.
    ///
    /// # Panics
    /// If the tail went back, or passed more entries than there are slots.
    pub fn look(&mut self) -> u32 {
        // Acquire: pairs with the release fence before the doorbell.
        let tail = self.rig.tail.load(Order::Acquire, Scope::Sys);
        let sq = &self.rig.sq;
        self.watch
            .tail(self.rig.qid.0, tail, &|at| Some(sq.get(at)?.load()));
        let waiting = tail.wrapping_sub(self.fetched) & self.mask();
        assert!(
            waiting >= self.waiting,
            "the tail doorbell went back: {} of {} waiting entries left",
            waiting,
            self.waiting
        );
        // A controller that completes commands before it fetches them owes a negative number: they are fetched later.
        let owed = self.fetched.wrapping_sub(self.posted) as i32;
        let unfinished = waiting as i32 + owed;
        assert!(
            unfinished <= self.rig.slots as i32,
            "{unfinished} commands, more than slots: the tail doorbell went back or too far"
        );
        self.waiting = waiting;
        waiting
    }

    /// Returns the next entry, if the tail doorbell has passed it; its slot's list is read, too.
    pub fn fetch(&mut self) -> Option<Sqe> {
        if self.waiting == 0 && self.look() == 0 {
            return None;
        }
        let index = self.fetched & self.mask();
        self.waiting -= 1;
        self.fetched = self.fetched.wrapping_add(1);
        let sqe = self.rig.sq[index as usize].load();
        self.watch.fetched(self.rig.qid.0, index, &sqe);
        let list = usize::from(sqe.cid().0 & 0xFFF) * LIST_WORDS;
        for word in self.rig.lists.iter().skip(list).take(LIST_WORDS) {
            word.load_settled(Scope::Sys);
        }
        Some(sqe)
    }

    /// Reads the head doorbell: the number of completions that the driver has freed since the beginning.
    ///
    /// # Panics
    /// If the head went back, or passed the posted entries.
    pub fn look_back(&mut self) -> u32 {
        // Acquire: the driver's reads of the entries that it gave back are over.
        let head = self.rig.head.load(Order::Acquire, Scope::Sys);
        self.watch.head(self.rig.qid.0, head);
        let more = head.wrapping_sub(self.freed) & self.mask();
        let unseen = self.posted.wrapping_sub(self.freed);
        assert!(
            more <= unseen,
            "the head doorbell went back or too far: {more} of {unseen}"
        );
        self.freed = self.freed.wrapping_add(more);
        self.freed
    }

    /// Returns whether the head doorbell leaves room in the completion ring.
    pub fn has_room(&mut self) -> bool {
        self.posted.wrapping_sub(self.look_back()) < self.mask()
    }

    /// Returns the entry that an honest controller posts next for this command.
    pub fn completion(&self, cid: Cid, status: Status, dw0: u32) -> Cqe {
        let phase = self.posted & (self.mask() + 1) == 0;
        Cqe {
            dw0,
            // The value is arbitrary: no queue reads it.
            dw1: !dw0,
            sqhd: (self.fetched & self.mask()) as u16,
            sqid: self.rig.qid.0,
            cid: cid.0,
            phase_status: status.0 << 1 | u16::from(phase),
        }
    }

    /// Posts an entry as it is.
    ///
    /// # Panics
    /// If the driver has not made room.
    pub fn post(&mut self, cqe: Cqe) {
        assert!(self.has_room(), "the completion queue is full");
        self.post_anyway(cqe);
    }

    /// Posts an entry even if the driver has not made room, as no controller may.
    pub fn post_anyway(&mut self, cqe: Cqe) {
        let index = self.posted & self.mask();
        self.watch.posted(self.rig.qid.0, index, &cqe);
        self.rig.cq[index as usize].post(cqe);
        self.posted = self.posted.wrapping_add(1);
    }

    /// Overwrites the entries that the head doorbell has freed, as a controller may at any time; in the first lap only.
    /// Their phase tags are kept.
    pub fn scribble(&mut self) {
        self.scribble_before(u32::MAX);
    }

    /// Does the same as [`scribble`](Self::scribble), of the entries before `end`.
    pub fn scribble_before(&mut self, end: u32) {
        for index in 0..self.look_back().min(end) {
            self.rig.cq[index as usize].post(Cqe {
                dw0: u32::MAX,
                dw1: u32::MAX,
                sqhd: u16::MAX,
                sqid: u16::MAX,
                cid: u16::MAX,
                phase_status: u16::MAX,
            });
        }
    }

    /// Completes a command.
    pub fn complete(&mut self, cid: Cid, status: Status, dw0: u32) {
        self.post(self.completion(cid, status, dw0));
    }

    /// Fetches and completes everything that is there, in order; dword 0 is the command's cdw10.
    /// Returns how many there were.
    pub fn serve(&mut self) -> u32 {
        let mut count = 0;
        while let Some(sqe) = self.fetch() {
            self.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
            count += 1;
        }
        count
    }
}

/// Returns the proof that a queue of the controller `identity` was deleted, by a controller that answers everything.
///
/// # Panics
/// When the queue is of another controller.
pub fn deleted(identity: &ControllerIdentity, queue: ClosedQueue) -> Quiesced<'static> {
    let rig = Rig::of(Qid::ADMIN, 4, 3, 0, 0);
    let slots: Vec<CommandSlot<u32>> = (0..3).map(|_| CommandSlot::new()).collect();
    let mut admin = QueuePair::new(identity, Qid::ADMIN, rig.memory(), slots);
    let mut hand = Hand::new(&rig);
    let mut deletion = QueueDeletion::new(queue, 1);
    loop {
        match deletion.step(&mut admin, 0, |_| {}) {
            DeletionStep::Wait { .. } => assert_eq!(hand.serve(), 1),
            DeletionStep::Emptied(proof) => return proof,
            other => panic!("{other:?}"),
        }
    }
}
