//! The kernels as a host thread: queue after queue, each by a group of one.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::fault;
use crate::idle::pause;
use nvme_core::group::{BusTraffic, ExecContext, GroupOp, LoneThread};
use nvme_core::handoff::QueueWords;
use nvme_core::spec::nvm::{self, opcode};
use nvme_core::spec::{Iova, Lba, Nsid, Qid, Sqe};
use nvme_core::sync::{AtomicU64, Order, Scope};
use nvme_core::trace::TraceEvent;
use nvme_core::{
    CollectiveQueue, CommandData, CommandOutcome, MemberCommand, ResultCells, SharedQueue,
    SubmitError, TaggedCompletion, WaitError,
};
use nvme_gpu_kernel::Kernel;
use nvme_gpu_kernel::work::{
    LaunchArguments, LaunchReport, TracedEvent, account, data_word, pattern,
};
use std::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::time::Instant;

/// Runs `kernel`.
pub fn run(kernel: Kernel, launch: &LaunchArguments) {
    let mut report = LaunchReport::default();
    match kernel {
        Kernel::Verify => verify(launch, &mut report),
        Kernel::PingPong => ping_pong(launch, &mut report),
        Kernel::SqeWrites => sqe_writes(launch, &mut report),
        kernel if kernel.shares() => each(launch, &mut report, shared),
        _ => each(launch, &mut report, owned),
    }
    if fault("badtrace") && launch.trace != 0 {
        for at in 0..u64::from(launch.trace_records) {
            let word = |number| data_word(1, 4 * at + number);
            let event = TraceEvent::from_words([word(0), word(1)]);
            record(launch, &mut report, event, word(2), word(3));
        }
        report.traced = u64::MAX;
    }
    // SAFETY: the host gives the report's address, and reads it when the kernel has ended.
    unsafe { (launch.report as usize as *mut LaunchReport).write(report) };
}

/// Command i belongs to queue i mod `queue_count`.
fn each(
    launch: &LaunchArguments,
    report: &mut LaunchReport,
    drive: fn(&LaunchArguments, u32, &[u64], &mut LaunchReport),
) {
    for number in 0..launch.queue_count {
        let mine: Vec<u64> = (u64::from(number)..launch.commands)
            .step_by(launch.queue_count as usize)
            .collect();
        drive(launch, number, &mine, report);
    }
}

fn words(launch: &LaunchArguments, number: u32) -> &QueueWords {
    let words = launch.queues as usize as *const QueueWords;
    // SAFETY: the host gives `queue_count` queues.
    unsafe { &*words.add(number as usize) }
}

fn command(launch: &LaunchArguments, index: u64, buffer: u64, tag: u32) -> MemberCommand<'static> {
    let unit = match launch.pattern {
        pattern::RANDOM => data_word(launch.seed, index) % launch.units,
        _ => index % launch.units,
    };
    let (nsid, lba) = (
        Nsid(launch.nsid),
        Lba(launch.lba + unit * u64::from(launch.blocks)),
    );
    let bytes = u64::from(launch.blocks) << launch.block_shift;
    let (sqe, len) = match launch.opcode as u8 {
        opcode::READ => (nvm::read(nsid, lba, launch.blocks), bytes),
        opcode::WRITE => (nvm::write(nsid, lba, launch.blocks), bytes),
        opcode::COMPARE => (nvm::compare(nsid, lba, launch.blocks), bytes),
        opcode::WRITE_ZEROES => (nvm::write_zeroes(nsid, lba, launch.blocks), 0),
        opcode::DATASET_MANAGEMENT => (nvm::deallocate(nsid, 1), 16),
        other => (Sqe::new(other, nsid), 0),
    };
    let place = match launch.linear {
        0 if fault("onebuffer") => 0,
        0 => buffer,
        _ => index,
    };
    assert!(
        (place + 1) * len <= launch.data_bytes,
        "outside the data memory"
    );
    let data = match len {
        0 => CommandData::None,
        len => CommandData::Contiguous {
            iova: Iova(launch.data_iova + place * len),
            len,
        },
    };
    MemberCommand::new(sqe, data, tag)
}

/// Writes the account of command `index`, where the launch wants them.
fn tell(launch: &LaunchArguments, index: u64, word: u32) {
    if launch.accounts != 0 {
        let accounts = launch.accounts as usize as *mut u32;
        // SAFETY: the host gives one word for each command.
        unsafe { accounts.add(index as usize).write(word) };
    }
}

fn owned(launch: &LaunchArguments, number: u32, mine: &[u64], report: &mut LaunchReport) {
    let words = words(launch, number);
    // SAFETY: the host vouches for the words; nothing else uses the queue.
    let (memory, state) = unsafe { words.attach() }.expect("possible sizes");
    let mut queue = CollectiveQueue::resume(LoneThread, memory, state);
    let (slots, qid) = (u64::from(queue.depth()), Qid(words.qid as u16));
    let (mut next, mut ended, mut late, mut idle) = (0, 0, 0, 0);
    while ended + late < mine.len() as u64 {
        while next < mine.len() && queue.in_flight() < launch.depth.clamp(1, queue.depth()) {
            let make = |slot: u32| {
                let buffer = u64::from(number) * slots + u64::from(slot);
                command(launch, mine[next], buffer, next as u32)
            };
            match queue.submit(true, make, now_ns() + launch.timeout_ns) {
                Ok(Some(cid)) => {
                    let event = TraceEvent::submitted(qid, cid, launch.opcode as u8, launch.nsid);
                    record(launch, report, event, mine[next], now_ns());
                    report.sqes += 1;
                }
                _ => {
                    tell(launch, mine[next], account::REFUSED);
                    report.refused += 1;
                    ended += 1;
                }
            }
            next += 1;
        }
        queue.ring();
        let (mut good, mut bad, mut after) = (0, None, 0);
        let reaped = queue.reap::<1>(|done: TaggedCompletion| {
            let event = TraceEvent::completed(qid, done.cid, done.status, 0);
            record(launch, report, event, mine[done.tag as usize], now_ns());
            let word = account::DONE | u32::from(done.status.0);
            tell(launch, mine[done.tag as usize], word);
            after += u64::from(done.late);
            report.late += u64::from(done.late);
            match done.status.is_success() {
                true => good += 1,
                false => bad = Some(done.status),
            }
        });
        report.cq_loads += 1;
        report.completed += good;
        if let Some(status) = bad {
            report.failed += 1;
            report.status = u64::from(status.0);
        }
        match reaped {
            Ok(0) => {
                late += u64::from(queue.expire(now_ns(), |tag| {
                    tell(launch, mine[tag as usize], account::TIMED_OUT);
                }));
                // Every slot is held by a command that got no answer: nothing more can happen.
                if late > 0 && late >= u64::from(queue.in_flight()) {
                    break;
                }
                pause(idle);
                idle += 1;
            }
            Ok(found) => {
                idle = 0;
                ended += u64::from(found);
                // What came after its deadline has ended, and is not late any more.
                late -= after;
            }
            Err(fault) => {
                report.fault = u64::from(fault.code());
                break;
            }
        }
    }
    report.timed_out += late;
    let [sq, cq] = queue.doorbells();
    report.sq_doorbells += u64::from(sq);
    report.cq_doorbells += u64::from(cq);
    queue.suspend();
}

/// Adds a record to the launch's trace, where it has one.
fn record(
    launch: &LaunchArguments,
    report: &mut LaunchReport,
    event: TraceEvent,
    index: u64,
    now_ns: u64,
) {
    if launch.trace == 0 {
        return;
    }
    let at = report.traced % u64::from(launch.trace_records);
    report.traced += 1;
    let event = event.to_words();
    let record = TracedEvent {
        event,
        index,
        now_ns,
    };
    // SAFETY: at < trace_records, which the host gives.
    unsafe {
        (launch.trace as usize as *mut TracedEvent)
            .add(at as usize)
            .write(record)
    };
}

fn shared(launch: &LaunchArguments, number: u32, mine: &[u64], report: &mut LaunchReport) {
    let here = Bus::default();
    share(&here, launch, number, mine, report);
    let [sq, cq, loads] = here.traffic.get();
    report.sq_doorbells += sq;
    report.cq_doorbells += cq;
    report.cq_loads += loads;
}

fn share(
    here: &Bus,
    launch: &LaunchArguments,
    number: u32,
    mine: &[u64],
    report: &mut LaunchReport,
) {
    let words = words(launch, number);
    // SAFETY: the host vouches for the words; nothing else uses the queue.
    let (memory, state) = unsafe { words.attach() }.expect("possible sizes");
    let cells = launch.cells as usize as *const AtomicU64;
    // SAFETY: the host gives `cell_count` cells.
    let cells = unsafe { std::slice::from_raw_parts(cells, launch.cell_count as usize) };
    let queue = SharedQueue::new(memory, state, ResultCells::new(cells));
    for index in mine {
        let deadline_ns = here.now_ns() + launch.timeout_ns;
        let work = || command(launch, *index, u64::from(number), number);
        let ran = queue.run(here, work, deadline_ns);
        for (event, now_ns) in here.events.take() {
            record(launch, report, event, *index, now_ns);
        }
        let ended = match ran {
            Ok(Ok(ended)) => Ok(ended),
            Err((error, _)) => Err(error),
            Ok(Err(error)) => {
                let word = match error {
                    SubmitError::QueueFull => account::FULL,
                    SubmitError::Refused => account::FAULTED,
                    _ => account::REFUSED,
                };
                tell(launch, *index, word);
                report.refused += 1;
                if error == SubmitError::Refused {
                    report.fault = queue.fault().map_or(0, |fault| u64::from(fault.code()));
                }
                return;
            }
        };
        report.sqes += 1;
        match ended {
            Ok((CommandOutcome::Completed(status), _)) if status.is_success() => {
                tell(launch, *index, account::DONE);
                report.completed += 1;
            }
            Ok((CommandOutcome::Completed(status), _)) => {
                tell(launch, *index, account::DONE | u32::from(status.0));
                report.failed += 1;
                report.status = u64::from(status.0);
            }
            Ok(_) => {
                tell(launch, *index, account::ABORTED);
                report.failed += 1;
            }
            Err(WaitError::TimedOut) => {
                tell(launch, *index, account::TIMED_OUT);
                report.timed_out += 1;
                return;
            }
            Err(WaitError::Refused) => {
                tell(launch, *index, account::FAULTED);
                report.refused += 1;
                report.fault = queue.fault().map_or(0, |fault| u64::from(fault.code()));
                return;
            }
        }
    }
}

/// The GPU's clock: it goes on from launch to launch.
pub fn now_ns() -> u64 {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1_000_000
}

/// Bus accesses and events of one host thread.
#[derive(Default)]
pub struct Bus {
    /// Doorbells of both kinds, loads of completions.
    traffic: Cell<[u64; 3]>,
    /// What happened to its command, and when.
    events: RefCell<Vec<(TraceEvent, u64)>>,
}

impl ExecContext for Bus {
    fn now_ns(&self) -> u64 {
        now_ns()
    }

    fn pause(&self, turn: u32) {
        pause(turn);
    }

    fn on_bus_access(&self, traffic: BusTraffic) {
        let [mut sq, mut cq, mut loads] = self.traffic.get();
        match traffic {
            BusTraffic::SqDoorbell => sq += 1,
            BusTraffic::CqDoorbell => cq += 1,
            BusTraffic::CqLoads(count) => loads += u64::from(count),
        }
        self.traffic.set([sq, cq, loads]);
    }

    fn record(&self, event: impl FnOnce() -> TraceEvent) {
        self.events.borrow_mut().push((event(), self.now_ns()));
    }

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(&LoneThread)
    }
}

fn verify(launch: &LaunchArguments, report: &mut LaunchReport) {
    let bytes = (launch.commands * u64::from(launch.blocks)) << launch.block_shift;
    let first = (launch.lba << launch.block_shift) / 8;
    for index in 0..bytes.min(launch.data_bytes) / 8 {
        let data = launch.data as usize as *const AtomicU64;
        // SAFETY: inside the data memory.
        let have = unsafe { &*data.add(index as usize) }.load(Order::Relaxed, Scope::Sys);
        if have != data_word(launch.seed, first + index) {
            report.wrong += 1;
            report.wrong_at = index + 1;
        }
    }
}

/// Entries into the rings, and doorbells where a controller is there; it is waited for, as a GPU need not.
fn sqe_writes(launch: &LaunchArguments, report: &mut LaunchReport) {
    let each = launch.commands / u64::from(launch.queue_count);
    for number in 0..launch.queue_count {
        // SAFETY: the host vouches for the words.
        let (memory, state) = unsafe { words(launch, number).attach() }.expect("possible sizes");
        for index in 0..each as u32 {
            let sqe = Sqe::new(launch.opcode as u8, Nsid(1));
            memory.sq.write(index & state.mask(), sqe);
            if launch.depth != 0 && (index % 64 == 63 || u64::from(index) + 1 == each) {
                memory.sq_doorbell.ring((index + 1) & state.mask());
                let lap = index / (state.mask() + 1);
                let begin = Instant::now();
                let mut turn = 0;
                while memory.cq.upper(index, Order::Acquire) >> 48 & 1 == u64::from(lap & 1) {
                    assert!(
                        begin.elapsed().as_secs() < 600,
                        "entry {index} is not served"
                    );
                    pause(turn);
                    turn += 1;
                }
            }
        }
    }
    report.sqes = launch.commands;
}

fn ping_pong(launch: &LaunchArguments, report: &mut LaunchReport) {
    // SAFETY: the host vouches for the words.
    let (memory, _) = unsafe { words(launch, 0).attach() }.expect("possible sizes");
    for round in 1..=launch.commands {
        memory.sq.write(0, Sqe::from_words([round; 8]));
        memory.sq_doorbell.ring(round as u32);
        let begin = Instant::now();
        let mut turn = 0;
        while memory.cq.upper(0, Order::Acquire) != round {
            if begin.elapsed().as_nanos() as u64 > launch.timeout_ns {
                report.timed_out = 1;
                return;
            }
            pause(turn);
            turn += 1;
        }
        report.completed += 1;
    }
}
