//! Kernels: the workloads of the demo, the benchmark and the tests.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::assignment::{Tally, Work};
use crate::groups::{Block, Gpu, Warp};
use crate::work::Launch;
use nvme_core::group::{Act, Alone, Group, Here, Traffic};
use nvme_core::handoff::QueueWords;
use nvme_core::spec::{Cid, Qid};
use nvme_core::sync::AtomicU64;
use nvme_core::trace::Event;
use nvme_core::{
    Cells, Collective, Command, Finished, Outcome, SharedQueue, SubmitError, Token, WaitError,
};

/// Queue `index` of the launch, and its page size.
#[inline(always)]
fn queue_words(launch: &Launch, index: u32) -> Option<&QueueWords> {
    if index >= launch.queue_count {
        return None;
    }
    let words = launch.queues as usize as *const QueueWords;
    // SAFETY: the host gives `queue_count` queues and does not change them while the kernel runs.
    Some(unsafe { &*words.add(index as usize) })
}

/// Rounds of a busy queue between two looks at the clock for deadlines.
const ROUNDS: u32 = 64;

/// A group drives queue `number` of the launch: command i belongs to queue i mod `queue_count`.
#[inline(always)]
fn drive<G: Group, const FEW: usize, const MANY: usize, const TRACED: bool>(
    launch: &Launch,
    group: G,
    number: u32,
) {
    let began_ns = arch::now_ns();
    let Some(words) = queue_words(launch, number) else {
        return;
    };
    // SAFETY: the host vouches for the words; the group alone uses the queue.
    let Some((memory, state)) = (unsafe { words.attach() }) else {
        return;
    };
    let (work, qid) = (Work::new(launch, words.page_shift), Qid(words.qid as u16));
    let mut tally = Tally::default();
    let queues = u64::from(launch.queue_count);
    let mine = u64::from(number);
    let total = (launch.commands + queues - 1 - mine) / queues;
    let mut queue = Collective::resume(group, memory, state);
    let depth = launch.depth.clamp(1, queue.depth());
    let slots = u64::from(queue.depth());
    let size = queue.group().size();
    let ahead = size.min(queue.depth() - depth);
    // Whole warps write whole lines, where that leaves enough in flight.
    let even = if size >= 32 && depth >= 256 { 32 } else { 1 };
    // Wide reads are for queues deep enough to fill them.
    let wide = depth > 2 * MANY as u32 * size;
    let (mut next, mut ended, mut expired) = (0u64, 0u64, 0u64);
    let (mut busy, mut turn, mut loads) = (false, 0, 0);
    let mut look_ns = began_ns + launch.timeout_ns;
    let mut rounds = 0u32;
    let nth = |sequence: u64| sequence * queues + mine;
    while ended + expired < total {
        let now_ns = arch::now_ns();
        queue.ring_within(depth);
        // One command a member is prepared while those before it are under way.
        while next < total && queue.in_flight() + even <= depth + ahead {
            let room = (depth + ahead - queue.in_flight()) & !(even - 1);
            let first = if even > 1 { queue.uneven() } else { 0 };
            let room = if first != 0 { first } else { room };
            let room = u64::from(room).min(total - next);
            let rank = queue.group().rank();
            let wants = u64::from(rank) < room;
            let sequence = next + u64::from(rank);
            let index = nth(sequence);
            let placed = queue.submit(
                wants,
                |slot| work.command(index, mine * slots + u64::from(slot), sequence as u32),
                now_ns + launch.timeout_ns,
            );
            if TRACED && let Ok(Some(cid)) = placed {
                let (opcode, nsid) = (launch.opcode as u8, launch.nsid);
                work.record(index, Event::submitted(qid, cid, opcode, nsid));
            }
            let lost = placed.is_err();
            tally.sqes += u32::from(wants && !lost);
            if let Err(error) = placed {
                work.refuse(index, error);
            }
            let lost = u64::from(queue.group().vote(wants && lost).total);
            ended += lost;
            next += room.min(u64::from(size));
            if lost != 0 {
                break;
            }
        }
        // A wide read that finds something publishes by its own fence.
        if !busy || MANY == 1 {
            queue.publish();
            queue.ring_within(depth);
        }
        // Wide reads only where the last one was full: an empty one costs the bus as much.
        let mut late = 0;
        let took = |done: Finished| {
            let index = nth(restore(u64::from(done.tag), next));
            tally.end(&work, index, Outcome::Done(done.status));
            if TRACED {
                work.record(index, Event::completed(qid, done.cid, done.status, 0));
            }
            if done.late {
                work.came_late();
                late += 1;
            }
        };
        let result = match (busy, wide) {
            (false, _) => queue.reap::<1>(took),
            (true, false) => queue.reap::<FEW>(took),
            (true, true) => queue.reap::<MANY>(took),
        };
        loads += match (busy, wide) {
            (false, _) => 1,
            (true, false) => FEW as u32,
            (true, true) => MANY as u32,
        };
        // A queue that is never idle looks at its deadlines, too.
        rounds = rounds.wrapping_add(1);
        let idle = matches!(result, Ok(0));
        // The leader's clock decides for all: members of a block read different times.
        if (idle || rounds % ROUNDS == 0)
            && queue.group().broadcast(u32::from(now_ns >= look_ns)) != 0
        {
            expired += u64::from(queue.expire(now_ns, |tag| {
                let index = nth(restore(u64::from(tag), next));
                work.timed_out(index);
                if TRACED {
                    work.record(index, Event::expired(qid, Cid(u16::MAX), now_ns));
                }
            }));
            look_ns = now_ns + launch.timeout_ns / 8;
            // Every slot is held by a command that nobody answers: what is left stays unsubmitted.
            if idle && expired >= u64::from(queue.in_flight()) {
                break;
            }
        }
        match result {
            Ok(0) => {
                busy = false;
                if turn >= 4 {
                    arch::sleep_ns(64);
                }
                turn += 1;
            }
            Ok(found) => {
                ended += u64::from(found);
                // What came late after all has ended, not expired.
                while expired != 0 {
                    let several = u64::from(queue.group().vote(late > 0).total);
                    if several == 0 {
                        break;
                    }
                    expired -= several.min(expired);
                    late -= i32::from(late > 0);
                }
                busy = found >= size;
                turn = 0;
            }
            Err(fault) => {
                work.fault(fault);
                break;
            }
        }
    }
    let [sq, cq] = queue.doorbells();
    let leads = queue.group().leads();
    let per_warp = queue.group().rank() % 32 == 0;
    queue.suspend();
    let bus = [
        if leads { sq } else { 0 },
        if leads { cq } else { 0 },
        if per_warp { loads } else { 0 },
    ];
    work.report(&tally, bus, began_ns);
}

/// The sequence number whose lower bits a tag holds: the last one below `next` that has them.
#[inline(always)]
fn restore(tag: u64, next: u64) -> u64 {
    let range = u64::from(nvme_core::queue_state::MAX_TAGS);
    let base = next & !(range - 1);
    let near = base | tag & (range - 1);
    if near < next {
        near
    } else {
        near.wrapping_sub(range)
    }
}

/// One thread a queue: grid = queues, blocks of one thread.
///
/// # Safety
/// Every address in `launch` is what [`Launch`] says; the queues exist on the controller and nothing
/// else uses them.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_owner(launch: Launch) {
    drive::<Alone, 1, 1, false>(&launch, Alone, arch::block());
}

/// One warp a queue: grid = queues, blocks of 32 threads.
///
/// # Safety
/// As [`nvme_owner`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_warp(launch: Launch) {
    drive::<Warp, 4, 8, false>(&launch, Warp, arch::block());
}

/// As [`nvme_owner`], and records what it does at `launch.trace`.
///
/// # Safety
/// As [`nvme_owner`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_owner_traced(launch: Launch) {
    drive::<Alone, 1, 1, true>(&launch, Alone, arch::block());
}

/// As [`nvme_warp`], and records what it does at `launch.trace`.
///
/// # Safety
/// As [`nvme_owner`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_warp_traced(launch: Launch) {
    drive::<Warp, 1, 1, true>(&launch, Warp, arch::block());
}

/// One block a queue: grid = queues, blocks of a multiple of 32 threads.
///
/// # Safety
/// As [`nvme_owner`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_block(launch: Launch) {
    drive::<Block, 2, 2, false>(&launch, Block::here(), arch::block());
}

/// As [`nvme_block`], and records what it does at `launch.trace`.
///
/// # Safety
/// As [`nvme_owner`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_block_traced(launch: Launch) {
    drive::<Block, 1, 1, true>(&launch, Block::here(), arch::block());
}

/// Any threads share the queues: thread t uses queue (t / 32) mod `queue_count`, and command i belongs
/// to thread i mod (active threads). `launch.lanes` lanes of each warp are active; each waits for every
/// command.
///
/// # Safety
/// As [`nvme_owner`]; the queues are used by threads of this launch alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_shared(launch: Launch) {
    // SAFETY: the host vouches for the launch.
    unsafe { sharing::<false, false>(&launch) };
}

/// As [`nvme_shared`], and records what it does at `launch.trace`.
///
/// # Safety
/// As [`nvme_shared`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_shared_traced(launch: Launch) {
    // SAFETY: the host vouches for the launch.
    unsafe { sharing::<false, true>(&launch) };
}

/// As [`nvme_shared`], but each thread submits up to `launch.depth` commands before it waits for them,
/// in the reverse order. The tokens are kept in `launch.tokens`.
///
/// # Safety
/// As [`nvme_owner`]; the queues are used by threads of this launch alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_tokens(launch: Launch) {
    // SAFETY: the host vouches for the launch.
    unsafe { sharing::<true, false>(&launch) };
}

/// A thread of a launch, that counts in its report what it does on the bus.
struct Counted<'w, 'l>(&'w Work<'l>);

impl Here for Counted<'_, '_> {
    #[inline(always)]
    fn now_ns(&self) -> u64 {
        Gpu.now_ns()
    }

    #[inline(always)]
    fn pause(&self, turn: u32) {
        Gpu.pause(turn);
    }

    #[inline(always)]
    fn saw(&self, traffic: Traffic) {
        self.0.saw(traffic);
    }

    #[inline(always)]
    fn together<A: Act>(&self, key: u64, act: A) -> A::Output {
        Gpu.together(key, act)
    }
}

/// Finds the thread's queue, does the thread's share of the work and reports.
///
/// # Safety
/// As [`nvme_owner`].
#[inline(always)]
unsafe fn sharing<const SEVERAL: bool, const TRACED: bool>(launch: &Launch) {
    let began_ns = arch::now_ns();
    let lanes = launch.lanes.clamp(1, 32);
    if arch::lane() >= lanes {
        return;
    }
    let warp = (arch::block() * arch::block_threads() + arch::thread()) / 32;
    let number = warp.checked_rem(launch.queue_count).unwrap_or(u32::MAX);
    let Some(words) = queue_words(launch, number) else {
        return;
    };
    // SAFETY: the caller vouches for the words.
    let Some((memory, state)) = (unsafe { words.attach() }) else {
        return;
    };
    let cells = launch.cells as usize as *const AtomicU64;
    // SAFETY: the host gives `cell_count` cells; they are atomics.
    let cells = unsafe { core::slice::from_raw_parts(cells, launch.cell_count as usize) };
    let queue = SharedQueue::new(memory, state, Cells::new(cells));
    let work = Work::new(launch, words.page_shift);
    let threads = u64::from(arch::blocks() * arch::block_threads() / 32 * lanes);
    let thread = u64::from(warp * lanes + arch::lane());
    let mut tally = Tally::default();
    if SEVERAL {
        hold_several(&queue, &work, &mut tally, thread, threads);
    } else {
        one_by_one::<TRACED>(&queue, &work, &mut tally, thread, threads);
    }
    if let Some(fault) = queue.fault() {
        work.fault(fault);
    }
    work.report(&tally, [0; 3], began_ns);
}

/// Submits a command and waits for it, over and over. The lanes of a warp meet after each command:
/// lanes that went on by themselves would act alone from then on, which costs the queue much more.
#[inline(always)]
fn one_by_one<const TRACED: bool>(
    queue: &SharedQueue<'_>,
    work: &Work<'_>,
    tally: &mut Tally,
    thread: u64,
    threads: u64,
) {
    let launch = work.launch;
    let lanes = arch::active();
    let mut index = thread;
    let mut goes_on = true;
    while arch::ballot(lanes, goes_on && index < launch.commands) != 0 {
        if goes_on && index < launch.commands {
            let deadline_ns = Gpu.now_ns() + launch.timeout_ns;
            let command = || work.command(index, thread, thread as u32);
            let ran = match TRACED {
                false => queue.run(&Counted(work), command, deadline_ns),
                true => run_traced(queue, work, index, command(), deadline_ns),
            };
            match ran {
                Ok(Ok((outcome, _))) => {
                    tally.sqes += 1;
                    tally.end(work, index, outcome);
                }
                Ok(Err(error)) => {
                    work.refuse(index, error);
                    goes_on = false;
                }
                Err((error, _)) => {
                    tally.sqes += 1;
                    work.give_up(index, error);
                    goes_on = false;
                }
            }
        }
        arch::sync_warp(lanes);
        index += threads;
    }
}

/// As [`SharedQueue::run`], and records what it does.
#[inline(always)]
#[allow(clippy::type_complexity)]
fn run_traced(
    queue: &SharedQueue<'_>,
    work: &Work<'_>,
    index: u64,
    command: Command<'_>,
    deadline_ns: u64,
) -> Result<Result<(Outcome, u32), SubmitError>, (WaitError, Token)> {
    let (qid, here) = (queue.state().qid(), Counted(work));
    let token = match queue.submit(&here, command, deadline_ns) {
        Ok(token) => token,
        Err(error) => return Ok(Err(error)),
    };
    let (cid, launch) = (token.cid(), work.launch);
    work.record(
        index,
        Event::submitted(qid, cid, launch.opcode as u8, launch.nsid),
    );
    let waited = queue.wait(&here, token, deadline_ns);
    match &waited {
        Ok((Outcome::Done(status), _)) => {
            work.record(index, Event::completed(qid, cid, *status, 0));
        }
        Ok((Outcome::Aborted(_), _)) => {}
        Err(_) => work.record(index, Event::expired(qid, cid, here.now_ns())),
    }
    waited.map(Ok)
}

/// Rounds of `depth` tokens: submit all, then wait in the reverse order.
#[inline(always)]
fn hold_several(
    queue: &SharedQueue<'_>,
    work: &Work<'_>,
    tally: &mut Tally,
    thread: u64,
    threads: u64,
) {
    let launch = work.launch;
    let tokens = launch.tokens as usize as *mut [u32; 3];
    let lanes = arch::active();
    let mut index = thread;
    let mut goes_on = true;
    while arch::ballot(lanes, goes_on && index < launch.commands) != 0 {
        let deadline_ns = Gpu.now_ns() + launch.timeout_ns;
        let mut held = 0;
        while goes_on && held < u64::from(launch.depth) && index + held * threads < launch.commands
        {
            let at = index + held * threads;
            let cell = held * threads + thread;
            match queue.submit(
                &Counted(work),
                work.command(at, cell, cell as u32),
                deadline_ns,
            ) {
                Ok(token) => {
                    tally.sqes += 1;
                    // SAFETY: the host gives three words for each thread and token.
                    unsafe { tokens.add(cell as usize).write(token.words()) };
                    held += 1;
                }
                Err(error) => {
                    work.refuse(at, error);
                    goes_on = false;
                }
            }
        }
        arch::sync_warp(lanes);
        while held > 0 {
            held -= 1;
            let cell = held * threads + thread;
            // SAFETY: written above by this thread.
            let token = Token::from_words(unsafe { tokens.add(cell as usize).read() });
            goes_on &= finish(
                queue,
                work,
                tally,
                index + held * threads,
                token,
                deadline_ns,
            );
        }
        arch::sync_warp(lanes);
        index += u64::from(launch.depth) * threads;
    }
}

/// Waits for one command and accounts for it; `false` when the thread should end.
#[inline(always)]
fn finish(
    queue: &SharedQueue<'_>,
    work: &Work<'_>,
    tally: &mut Tally,
    index: u64,
    token: Token,
    deadline_ns: u64,
) -> bool {
    match queue.wait(&Counted(work), token, deadline_ns) {
        Ok((outcome, _)) => {
            tally.end(work, index, outcome);
            true
        }
        Err((error, _)) => {
            work.give_up(index, error);
            false
        }
    }
}
