//! The pair: a driver built from the core's parts, a simulated controller, and a clock between them.

use crate::bringup::Host;
use crate::memory::{Area, Memory, doorbell};
use crate::{Bar, Rng, Seed, audit};
use nvme_core::bringup::{
    self, BringupMachine, BringupStep, ControllerInfo, QueueCapabilities, QueuePlan,
};
use nvme_core::spec::{Cid, Iova, Lba, Nsid, PageSize, Qid, Sqe, Status};
use nvme_core::transfer::{self, TransferLimits};
use nvme_core::{
    BringupError, CommandCompletion, CommandData, CommandOutcome, CommandSlot, ControllerFault,
    ControllerIdentity, ListMemory, QueueMemory, QueuePair, Quiesced, RegisterAccess,
    RejectedCommand, SubmitError,
};
use nvme_sim::{Config, Controller, Rule};
use std::collections::HashSet;

/// Deadline of a command, in virtual time.
pub const COMMAND_NS: u64 = 1_000_000_000;

/// Configuration of the driver side.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Entries of the submission and the completion ring of each I/O queue pair.
    pub queues: Vec<(u32, u32)>,
    /// Entries of the admin rings.
    pub admin: (u32, u32),
    /// Command slots per queue.
    pub slots: usize,
    /// The longest transfer that a slot's list memory can describe.
    pub max_bytes: u64,
    /// Bytes of memory for everything, buffers included.
    pub memory: u64,
    /// Seed of the schedule.
    pub seed: u64,
    /// Rules that this test breaks on purpose. The auditor has to find each of them, and nothing else but what the
    /// controller's faults explain.
    pub breaks: &'static [Rule],
}

impl Default for Setup {
    /// Returns one queue pair of 16 entries with 16 MiB of memory.
    fn default() -> Self {
        Self {
            queues: vec![(16, 16)],
            admin: (8, 8),
            slots: 64,
            max_bytes: 1 << 20,
            memory: 16 << 20,
            seed: 1,
            breaks: &[],
        }
    }
}

/// The end of a command, with the number that it was submitted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The number.
    pub id: u64,
    /// The command.
    pub cid: Cid,
    /// The outcome of the command.
    pub outcome: CommandOutcome,
    /// Command-specific dword 0.
    pub dw0: u32,
    /// True if the command had expired before.
    pub late: bool,
}

type Queue<'a> = QueuePair<'a, u64, Vec<CommandSlot<u64>>>;

/// Both sides and the time.
pub struct Pair<'a> {
    /// The memory, which both sides share.
    pub memory: &'a Memory,
    /// The controller.
    pub sim: &'a Controller<&'a Memory>,
    bar: Bar<'a, &'a Memory>,
    /// The admin queue pair.
    pub admin: Queue<'a>,
    /// The I/O queue pairs: identifiers 1, 2, ...
    pub io: Vec<Queue<'a>>,
    /// The controller's description from the last bring-up.
    pub info: Option<ControllerInfo>,
    /// Virtual time.
    pub now_ns: u64,
    /// Draws the schedule.
    pub rng: Rng,
    /// Ends of all commands, in order.
    pub ended: Vec<End>,
    setup: Setup,
    page: PageSize,
    identify: Area,
    lent: HashSet<u64>,
    next_id: u64,
    _seed: Seed,
}

/// Makes a controller and a driver for it, and runs `test` on them. Nothing is brought up yet.
///
/// # Panics
/// If no controller can have the configuration, or the auditor finds what the test does not break on purpose.
pub fn with_pair<R>(
    mut config: Config,
    mut setup: Setup,
    test: impl FnOnce(&mut Pair<'_>) -> R,
) -> R {
    let seed = Seed::new(setup.seed);
    setup.seed = seed.get();
    let memory = Memory::new(setup.memory);
    config.audit = true;
    let explained = config.faults.breaks();
    let breaks = setup.breaks;
    let sim = Controller::new(config, &memory).expect("a valid configuration");
    let identity = ControllerIdentity::new();
    let bar = Bar {
        sim: &sim,
        identity: &identity,
    };
    let mut pair = Pair::new(&memory, bar, setup, seed);
    let _shown = audit::Shown(&sim);
    let result = test(&mut pair);
    audit::check(&sim.findings(), breaks, &explained);
    result
}

impl<'a> Pair<'a> {
    fn new(memory: &'a Memory, bar: Bar<'a, &'a Memory>, setup: Setup, seed: Seed) -> Self {
        let sim = bar.sim;
        let page = QueueCapabilities::read(&bar).map_or(PageSize::KIB4, |found| found.page);
        let queue = |qid: u16, (sq_entries, cq_entries): (u32, u32)| {
            let sq = memory.take(u64::from(sq_entries) * 64, page.bytes());
            let cq = memory.take(u64::from(cq_entries) * 16, page.bytes());
            let share = ListMemory::share(page, setup.max_bytes);
            let lists = memory.take((share * setup.slots * 8) as u64, page.bytes());
            let parts = QueueMemory {
                sq: memory.sq_ring(sq, sq_entries),
                cq: memory.cq_ring(cq, cq_entries),
                sq_doorbell: doorbell(sim.doorbells(), qid, false),
                cq_doorbell: doorbell(sim.doorbells(), qid, true),
                lists: ListMemory::new(memory.words(lists), page, share).with_sgl_bytes(true),
            };
            QueuePair::new(
                bar.identity,
                Qid(qid),
                parts,
                (0..setup.slots).map(|_| CommandSlot::new()).collect(),
            )
        };
        Self {
            memory,
            sim,
            bar,
            admin: queue(0, setup.admin),
            io: setup
                .queues
                .iter()
                .zip(1..)
                .map(|(entries, qid)| queue(qid, *entries))
                .collect(),
            info: None,
            now_ns: 0,
            rng: Rng::new(setup.seed),
            ended: Vec::new(),
            page,
            identify: memory.take(page.bytes(), page.bytes()),
            lent: HashSet::new(),
            next_id: 1,
            setup,
            _seed: seed,
        }
    }

    /// Returns the registers as the driver sees them.
    pub fn registers(&self) -> impl RegisterAccess + 'a {
        self.bar
    }

    /// Returns the controller's page size.
    pub fn page(&self) -> PageSize {
        self.page
    }

    /// Returns a fresh buffer, page aligned.
    pub fn buffer(&self, bytes: u64) -> Area {
        self.memory.take(bytes, self.page.bytes())
    }

    /// Brings the controller up, or resets it: every command in flight ends as aborted.
    ///
    /// # Errors
    /// Errors of the state machine.
    pub fn bring_up(&mut self) -> Result<(), BringupError> {
        let plans: Vec<QueuePlan> = self.io.iter().map(plan_of).collect();
        let config = bringup::BringupConfig {
            queue_pairs: self.setup.queues.len() as u32,
            plans: &plans,
            command_timeout_ns: COMMAND_NS,
            ..bringup::BringupConfig::default()
        };
        let bar = self.bar;
        let mut machine = BringupMachine::new(&bar, config, self.memory.words(self.identify))?;
        crate::bringup::bring_up(&mut machine, &bar, self)?;
        self.info = Some(machine.info().clone());
        Ok(())
    }

    /// Lets the controller work at the present time, then moves the clock: to the controller's next
    /// event, but not past `until_ns`.
    pub fn sleep_until(&mut self, until_ns: u64) {
        let next = self.sim.step(self.now_ns).next_event_ns;
        let next = next.map_or(until_ns, |next| {
            next.clamp(self.now_ns + 1, until_ns.max(self.now_ns + 1))
        });
        self.now_ns = next.min(until_ns);
        self.sim.step(self.now_ns);
    }

    /// Submits a command to I/O queue `queue` (0 is the first) under a new number.
    ///
    /// # Errors
    /// The errors of the queue.
    pub fn submit(
        &mut self,
        queue: usize,
        sqe: Sqe,
        data: CommandData<'_>,
    ) -> Result<u64, SubmitError> {
        let id = self.next_id;
        let deadline = self.now_ns + COMMAND_NS;
        match self.io[queue].submit(sqe, data, id, deadline) {
            Ok(_) => {
                self.next_id += 1;
                assert!(self.lent.insert(id));
                Ok(id)
            }
            Err(RejectedCommand { error, buffer }) => {
                assert_eq!(buffer, id, "a rejected command gives its own buffer back");
                Err(error)
            }
        }
    }

    fn account(&mut self, done: CommandCompletion<u64>) {
        let CommandCompletion {
            cid,
            buffer: id,
            outcome,
            dw0,
            late,
            ..
        } = done;
        // Number 0 is the core's own admin commands.
        assert!(
            id == 0 || self.lent.remove(&id),
            "command {id} ended twice, or never began"
        );
        if id != 0 {
            self.ended.push(End {
                id,
                cid,
                outcome,
                dw0,
                late,
            });
        }
    }

    /// Takes every completion that is there from I/O queue `queue`.
    ///
    /// # Errors
    /// The queue's error about a wrong completion.
    pub fn poll(&mut self, queue: usize) -> Result<usize, ControllerFault> {
        let mut count = 0;
        while let Some(done) = self.io[queue].poll()? {
            self.account(done);
            count += 1;
        }
        Ok(count)
    }

    /// Rings, steps and polls until command `id` has ended or its deadline has passed.
    ///
    /// # Errors
    /// The queue's error about a wrong completion.
    pub fn wait(&mut self, queue: usize, id: u64) -> Result<Option<End>, ControllerFault> {
        self.io[queue].ring();
        let deadline = self.now_ns + COMMAND_NS;
        loop {
            self.sim.step(self.now_ns);
            self.poll(queue)?;
            if let Some(end) = self.ended.iter().rev().find(|end| end.id == id) {
                return Ok(Some(*end));
            }
            if self.now_ns >= deadline {
                return Ok(None);
            }
            self.sleep_until(deadline);
        }
    }

    /// Runs one I/O command on queue `queue` to its end.
    ///
    /// # Panics
    /// If the command is refused, or does not end with a status.
    pub fn run(&mut self, queue: usize, sqe: Sqe, data: CommandData<'_>) -> Status {
        let id = self.submit(queue, sqe, data).expect("room in the queue");
        match self
            .wait(queue, id)
            .expect("honest completions")
            .map(|end| end.outcome)
        {
            Some(CommandOutcome::Completed(status)) => status,
            other => panic!("no status: {other:?}"),
        }
    }

    /// Runs one admin command to its end: its status and dword 0.
    ///
    /// # Panics
    /// If the command is refused, or not answered in time.
    pub fn run_admin(&mut self, sqe: Sqe, data: CommandData<'_>) -> (Status, u32) {
        let deadline = self.now_ns + COMMAND_NS;
        let cid = self
            .admin
            .submit(sqe, data, 0, deadline)
            .expect("room in the admin queue");
        self.admin.ring();
        while self.now_ns < deadline {
            self.sim.step(self.now_ns);
            while let Some(done) = self.admin.poll().expect("honest completions") {
                if let (true, CommandOutcome::Completed(status)) = (done.cid == cid, done.outcome) {
                    return (status, done.dw0);
                }
            }
            self.sleep_until(deadline);
        }
        panic!("admin command {:#04x} was not answered", sqe.opcode());
    }

    /// Returns the limits of the first namespace, as bring-up found them.
    ///
    /// # Panics
    /// Before bring-up.
    pub fn limits(&self, nsid: Nsid) -> TransferLimits {
        let info = self.info.as_ref().expect("brought up");
        let namespace = info
            .namespaces
            .iter()
            .find(|one| one.nsid == nsid)
            .expect("that namespace");
        TransferLimits {
            block_bytes: namespace.block_bytes,
            blocks: namespace.blocks,
            max_bytes: info.max_transfer,
            boundary_blocks: namespace.boundary_blocks,
        }
    }

    /// Moves blocks between the namespace and memory at `iova`, split as the core splits them: `command` is
    /// `nvm::read`, `nvm::write` or `nvm::compare`. It ends with the first status other than success.
    ///
    /// # Panics
    /// When the range is refused.
    pub fn transfer(
        &mut self,
        command: fn(Nsid, Lba, u32) -> Sqe,
        nsid: Nsid,
        lba: Lba,
        blocks: u64,
        iova: Iova,
    ) -> Status {
        let limits = self.limits(nsid);
        for piece in transfer::split(lba, blocks, limits).expect("a range of the namespace") {
            let len = u64::from(piece.blocks) * u64::from(limits.block_bytes);
            let data = CommandData::Contiguous {
                iova: iova.offset(piece.offset),
                len,
            };
            let status = self.run(0, command(nsid, piece.lba, piece.blocks), data);
            if !status.is_success() {
                return status;
            }
        }
        Status::SUCCESS
    }

    /// Commands that were submitted and have not ended.
    pub fn outstanding(&self) -> usize {
        self.lent.len()
    }
}

impl Host for Pair<'_> {
    fn step<'r>(
        &mut self,
        machine: &mut BringupMachine<'_>,
        registers: &'r dyn RegisterAccess,
    ) -> Result<BringupStep<'r>, BringupError> {
        machine.step(registers, &mut self.admin, self.now_ns)
    }

    fn wait(&mut self, until_ns: u64) {
        assert!(until_ns > self.now_ns, "a wait that does not wait");
        self.sleep_until(until_ns);
    }

    fn disabled(&mut self, proof: &Quiesced<'_>) {
        while let Some(done) = self.admin.reclaim(proof) {
            self.account(done);
        }
        for index in 0..self.io.len() {
            while let Some(done) = self.io[index].reclaim(proof) {
                self.account(done);
            }
            self.io[index].restart(proof);
        }
        self.admin.restart(proof);
    }
}

/// Returns the plan that creates `queue` where its rings lie.
fn plan_of(queue: &Queue<'_>) -> QueuePlan {
    QueuePlan {
        qid: queue.qid(),
        sq_entries: queue.sq().entries(),
        sq_iova: queue.sq().iova(),
        cq_entries: queue.cq().entries(),
        cq_iova: queue.cq().iova(),
        vector: None,
    }
}
