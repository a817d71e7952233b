//! A whole driver against a controller that answers anything: bring-up, commands, aborts, deletion of a
//! queue, reset, shutdown. Every state machine ends, every command ends once with its own buffer, and
//! the driver breaks no rule before the controller does.

use super::bad_controller::{BadController, LISTS, Rings};
use crate::bringup::Host;
use arbitrary::Arbitrary;
use nvme_core::bringup::{
    self, BringupMachine, BringupStep, HostMemoryPages, QueueCapabilities, QueuePlan,
};
use nvme_core::mem::{CqRing, DmaWords, DoorbellRegister, SqRing};
use nvme_core::recovery::{self, AbortAttempt, DeletionStep, QueueDeletion};
use nvme_core::shutdown::{self, ShutdownKind, ShutdownMachine};
use nvme_core::spec::{Cid, Iova, Lba, Nsid, PageSize, Qid, nvm};
use nvme_core::sync::AtomicU64;
use nvme_core::{
    BringupError, CommandCompletion, CommandData, CommandSlot, ControllerIdentity, ListMemory,
    QueueMemory, QueuePair, Quiesced, RegisterAccess,
};
use std::collections::HashMap;

const MS: u64 = 1_000_000;
const SLOTS: usize = 6;
const LIST_WORDS: usize = 4;
/// Turns of one machine, with a clock that goes faster and faster once the bytes are used up.
const MOST_TURNS: u32 = 20_000;

type Pair<'a> = QueuePair<'a, u32, Vec<CommandSlot<u32>>>;

/// Actions of the driver once the controller works.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Call {
    Submit { pages: u8, offset: u8, limit_ms: u8 },
    Ring,
    Poll,
    Expire,
    Abort { pick: u8 },
    Delete,
    Reset,
    Stop,
}

struct Driver<'a> {
    controller: &'a BadController<'a>,
    admin: Pair<'a>,
    io: Pair<'a>,
    /// The buffer of each I/O command in flight.
    lent: HashMap<u16, u32>,
    next: u32,
    now_ns: u64,
    jump_ns: u64,
    /// Steps of the bring-up.
    turns: u32,
    /// The controller's capabilities when it first worked.
    made_for: Option<QueueCapabilities>,
}

/// Runs every operation of a driver, with answers from the bytes.
pub fn hostile_controller(bytes: &[u8]) {
    let Some(controller) = BadController::new(bytes, SLOTS * LIST_WORDS) else {
        return;
    };
    let mut driver = Driver {
        admin: pair(controller.identity(), &controller.admin, &[]),
        io: pair(controller.identity(), &controller.io, &controller.lists),
        controller: &controller,
        lent: HashMap::new(),
        next: 0,
        now_ns: 0,
        jump_ns: MS,
        turns: 0,
        made_for: None,
    };
    for _ in 0..3 {
        while driver.bring_up() == Ok(true) && driver.work() {}
        let kind = match controller.next() {
            Some(true) => ShutdownKind::Abrupt,
            _ => ShutdownKind::Normal,
        };
        driver.shut_down(kind);
    }
    assert_eq!(driver.io.in_flight() as usize, driver.lent.len());
    controller.audited.borrow().judge();
}

fn pair<'a>(identity: &ControllerIdentity, rings: &'a Rings, lists: &'a [AtomicU64]) -> Pair<'a> {
    let memory = QueueMemory {
        sq: SqRing::new(&rings.sq, rings.at),
        cq: CqRing::new(&rings.cq, rings.at.offset(0x1_0000)),
        sq_doorbell: DoorbellRegister::new(&rings.tail),
        cq_doorbell: DoorbellRegister::new(&rings.head),
        lists: ListMemory::new(DmaWords::new(lists, LISTS), PageSize::KIB4, LIST_WORDS),
    };
    let slots = (0..SLOTS).map(|_| CommandSlot::new()).collect();
    QueuePair::new(identity, Qid(rings.qid), memory, slots)
}

impl Host for Driver<'_> {
    fn step<'r>(
        &mut self,
        machine: &mut BringupMachine<'_>,
        registers: &'r dyn RegisterAccess,
    ) -> Result<BringupStep<'r>, BringupError> {
        self.turns += 1;
        assert!(self.turns <= MOST_TURNS, "bring-up has no end");
        machine.step(registers, &mut self.admin, self.now_ns)
    }

    fn wait(&mut self, until_ns: u64) {
        Driver::wait(self, until_ns);
    }

    fn disabled(&mut self, proof: &Quiesced<'_>) {
        self.reclaim(proof);
        self.controller.may_enable.set(true);
    }

    fn host_memory(&mut self, preferred: u64, minimum: u64) -> Option<HostMemoryPages> {
        assert!(preferred > 0 && minimum <= u64::from(u32::MAX) * 4096);
        let memory = HostMemoryPages {
            pages: 1,
            list: Iova(0x50_0000),
            entries: 1,
        };
        let given = self.controller.next::<bool>().unwrap_or(true);
        given.then_some(memory)
    }
}

impl Driver<'_> {
    /// Advances the time, then lets the controller act.
    fn wait(&mut self, until_ns: u64) {
        assert!(until_ns > self.now_ns, "a wait that does not wait");
        if self.controller.act() {
            self.now_ns = until_ns;
        } else {
            self.now_ns = until_ns + self.jump_ns;
            self.jump_ns = (self.jump_ns * 2).min(1 << 50);
        }
    }

    /// Brings the controller up; returns whether the I/O queue can be used.
    fn bring_up(&mut self) -> Result<bool, BringupError> {
        let plans = [QueuePlan {
            qid: Qid(1),
            sq_entries: self.io.sq().entries(),
            sq_iova: self.io.sq().iova(),
            cq_entries: self.io.cq().entries(),
            cq_iova: self.io.cq().iova(),
            vector: None,
        }];
        let config = bringup::BringupConfig {
            queue_pairs: 3,
            plans: &plans,
            command_timeout_ns: 10 * MS,
            min_ready_timeout_ms: 5,
            made_for: self.made_for,
        };
        self.jump_ns = MS;
        let controller = self.controller;
        let mut machine = BringupMachine::new(controller, config, controller.words())?;
        self.turns = 0;
        let result = crate::bringup::bring_up(&mut machine, controller, self);
        controller.may_enable.set(false);
        if let Err(error) = result {
            let again = machine.step(controller, &mut self.admin, self.now_ns + MS);
            let gone = Some(BringupError::DeviceGone);
            let told = again.err();
            assert!(
                told == Some(error) || told == gone,
                "{error:?}, then {told:?}"
            );
            assert!(!error.to_string().contains('\n'));
            return Err(error);
        }
        let info = machine.info();
        assert!(
            (1..=3).contains(&info.queue_pairs) && info.created == 1,
            "{info:?}"
        );
        let namespaces = &info.namespaces;
        assert!(namespaces.is_sorted_by(|one, two| one.nsid < two.nsid));
        assert!(namespaces.iter().all(|one| one.nsid.0 <= info.max_nsid));
        // The lists have pages of 4 KiB.
        let fits = info.capabilities.page == PageSize::KIB4;
        assert!(fits || self.made_for.is_none(), "enabled with other pages");
        if fits {
            self.made_for.get_or_insert(info.capabilities);
        }
        Ok(fits)
    }

    /// Ends all commands, because the controller is proved to have stopped.
    fn reclaim(&mut self, proof: &Quiesced<'_>) {
        while self.admin.reclaim(proof).is_some() {}
        while let Some(done) = self.io.reclaim(proof) {
            self.account(&done);
        }
        assert!(self.lent.is_empty(), "a reset ends every command");
        assert!(self.admin.restart(proof) && self.io.restart(proof));
    }

    fn account(&mut self, done: &CommandCompletion<u32>) {
        let buffer = self.lent.remove(&done.cid.0);
        assert_eq!(buffer, Some(done.buffer), "{} ended with that", done.cid);
    }

    /// Runs commands until the bytes end; returns whether a reset follows.
    fn work(&mut self) -> bool {
        while let Some(call) = self.controller.next::<Call>() {
            match call {
                Call::Submit {
                    pages,
                    offset,
                    limit_ms,
                } => self.submit(u64::from(pages), u64::from(offset), limit_ms),
                Call::Ring => self.io.ring(),
                Call::Poll => {
                    self.controller.act();
                    if !self.poll() {
                        return true;
                    }
                }
                Call::Expire => {
                    self.now_ns += 10 * MS;
                    while let Some(cid) = self.io.expire(self.now_ns) {
                        assert!(self.lent.contains_key(&cid.0), "{cid} was not in flight");
                    }
                }
                Call::Abort { pick } => {
                    if !self.abort(pick) {
                        return true;
                    }
                }
                Call::Delete => {
                    self.delete();
                    return true;
                }
                Call::Reset => return true,
                Call::Stop => return false,
            }
            assert_eq!(self.io.in_flight() as usize, self.lent.len());
        }
        false
    }

    fn submit(&mut self, pages: u64, offset: u64, limit_ms: u8) {
        let pages = pages % 8;
        let sqe = nvm::read(Nsid(1), Lba(0), pages.max(1) as u32 * 8);
        let data = CommandData::Contiguous {
            // Each command has its own memory.
            iova: Iova(((u64::from(self.next) + 16) << 20) + offset),
            len: pages * 4096,
        };
        let deadline = self.now_ns + u64::from(limit_ms) * MS;
        match self.io.submit(sqe, data, self.next, deadline) {
            Ok(cid) => assert_eq!(self.lent.insert(cid.0, self.next), None, "{cid} twice"),
            Err(rejected) => assert_eq!(rejected.buffer, self.next, "its own buffer back"),
        }
        self.next += 1;
    }

    /// Takes completions; `false` after a fault.
    fn poll(&mut self) -> bool {
        // A ring full of valid phase tags must not keep the loop running for ever.
        for _ in 0..self.controller.io.cq.len() {
            match self.io.poll() {
                Ok(Some(done)) => self.account(&done),
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
        true
    }

    /// Aborts a command; `false` when only a reset helps.
    fn abort(&mut self, pick: u8) -> bool {
        let mut cids: Vec<u16> = self.lent.keys().copied().collect();
        cids.sort_unstable();
        let Some(&cid) = cids.get(usize::from(pick) % cids.len().max(1)) else {
            return true;
        };
        self.jump_ns = MS;
        let mut attempt = AbortAttempt::new(Qid(1), Cid(cid), 20 * MS);
        for _ in 0..MOST_TURNS {
            if !self.poll() {
                return false;
            }
            let in_flight = self.io.is_in_flight(Cid(cid));
            match attempt.step(&mut self.admin, in_flight, self.now_ns, drop) {
                recovery::RecoveryStep::Wait { until_ns } => self.wait(until_ns),
                recovery::RecoveryStep::Ended => {
                    assert!(!in_flight, "ended, and still in flight");
                    return true;
                }
                recovery::RecoveryStep::ResetNeeded(_) => return false,
            }
        }
        panic!("an abort has no end");
    }

    /// Deletes the I/O queue; only a reset makes a new one.
    fn delete(&mut self) {
        self.jump_ns = MS;
        let mut deletion = QueueDeletion::new(self.io.close(), 20 * MS);
        for _ in 0..MOST_TURNS {
            match deletion.step(&mut self.admin, self.now_ns, drop) {
                DeletionStep::Wait { until_ns } => self.wait(until_ns),
                DeletionStep::Emptied(proof) => {
                    assert!(self.admin.reclaim(&proof).is_none(), "of one queue");
                    assert!(!self.admin.restart(&proof), "of one queue");
                    while let Some(done) = self.io.reclaim(&proof) {
                        self.account(&done);
                    }
                    assert!(self.lent.is_empty() && self.io.in_flight() == 0);
                }
                DeletionStep::Done | DeletionStep::ResetNeeded(_) => return,
            }
        }
        panic!("a deletion has no end");
    }

    fn shut_down(&mut self, kind: ShutdownKind) {
        self.jump_ns = MS;
        let mut machine = ShutdownMachine::new(kind, 50);
        for _ in 0..MOST_TURNS {
            match machine.step(self.controller, self.now_ns) {
                Ok(shutdown::ShutdownStep::Wait { until_ns }) => self.wait(until_ns),
                Ok(shutdown::ShutdownStep::Done(proof)) => return self.reclaim(&proof),
                Err(_) => return,
            }
        }
        panic!("a shutdown has no end");
    }
}
