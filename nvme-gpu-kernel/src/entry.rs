//! Kernels: the workloads of the demo, the benchmark and the tests.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::{Block, Gpu, Warp};
use crate::work::{Launch, Report, account};
use nvme_core::group::{Alone, Group, Here};
use nvme_core::handoff::QueueWords;
use nvme_core::spec::nvm::{self, opcode};
use nvme_core::spec::{Iova, Lba, Nsid, PageSize, Sqe};
use nvme_core::sync::AtomicU64;
use nvme_core::{
    Cells, Collective, Command, Data, Finished, Outcome, SharedQueue, SubmitError, Token, WaitError,
};

const LAST: u64 = u64::MAX;

/// The counts of one thread.
#[derive(Default)]
struct Tally {
    completed: u64,
    failed: u64,
    timed_out: u64,
    refused: u64,
    status: u32,
    fault: u32,
    cq_loads: u64,
    sq_doorbells: u64,
    cq_doorbells: u64,
    sqes: u64,
}

impl Tally {
    #[inline(always)]
    fn end(&mut self, work: &Work, index: u64, outcome: Outcome) {
        match outcome {
            Outcome::Done(status) => {
                if status.is_success() {
                    self.completed += 1;
                } else {
                    self.failed += 1;
                    self.status = u32::from(status.0);
                }
                work.account(index, account::DONE | u32::from(status.0));
            }
            Outcome::Aborted(_) => {
                self.failed += 1;
                work.account(index, account::ABORTED);
            }
        }
    }

    #[inline(always)]
    fn timed_out(&mut self, work: &Work, index: u64) {
        self.timed_out += 1;
        work.account(index, account::TIMED_OUT);
    }

    #[inline(always)]
    fn refuse(&mut self, work: &Work, index: u64, error: SubmitError) {
        self.refused += 1;
        work.account(
            index,
            match error {
                SubmitError::QueueFull => account::FULL,
                SubmitError::Refused(fault) => {
                    self.fault = fault.code();
                    account::FAULTED
                }
                SubmitError::Map(_) | SubmitError::CellBusy => account::REFUSED,
            },
        );
    }

    /// Adds this thread's counts to the report.
    #[inline(always)]
    fn report(&self, launch: &Launch, began_ns: u64) {
        let report = launch.report as usize as *mut Report;
        // SAFETY: the host vouches for the report; only these instructions touch it.
        unsafe {
            let add = |at: *mut u64, value| {
                if value != 0 {
                    arch::add(at, value);
                }
            };
            add(&raw mut (*report).completed, self.completed);
            add(&raw mut (*report).failed, self.failed);
            add(&raw mut (*report).timed_out, self.timed_out);
            add(&raw mut (*report).refused, self.refused);
            add(&raw mut (*report).sqes, self.sqes);
            add(&raw mut (*report).sq_doorbells, self.sq_doorbells);
            add(&raw mut (*report).cq_doorbells, self.cq_doorbells);
            add(&raw mut (*report).cq_loads, self.cq_loads);
            arch::raise(&raw mut (*report).first_ns_complement, LAST - began_ns);
            arch::raise(&raw mut (*report).last_ns, arch::now_ns());
            if self.status != 0 {
                arch::raise(&raw mut (*report).status, u64::from(self.status));
            }
            if self.fault != 0 {
                arch::raise(&raw mut (*report).fault, u64::from(self.fault));
            }
        }
    }
}

/// A launch with its sizes worked out.
struct Work<'l> {
    launch: &'l Launch,
    bytes: u64,
    page: PageSize,
}

impl<'l> Work<'l> {
    #[inline(always)]
    fn new(launch: &'l Launch, page_shift: u32) -> Self {
        let bytes = match launch.opcode as u8 {
            opcode::READ | opcode::WRITE | opcode::COMPARE => {
                u64::from(launch.blocks) << launch.block_shift
            }
            opcode::DATASET_MANAGEMENT => 16,
            _ => 0,
        };
        Self {
            launch,
            bytes,
            page: PageSize::from_mps(page_shift.wrapping_sub(12) as u8).unwrap_or(PageSize::KIB4),
        }
    }

    #[inline(always)]
    fn account(&self, index: u64, word: u32) {
        if self.launch.accounts != 0 && index < self.launch.commands {
            let accounts = self.launch.accounts as usize as *mut u32;
            // SAFETY: the host gives one word for each command; each is written by its own thread.
            unsafe { accounts.add(index as usize).write_volatile(word) };
        }
    }

    /// Command `index`, with its data in buffer `buffer` unless the launch is linear.
    #[inline(always)]
    fn command(&self, index: u64, buffer: u64, tag: u32) -> Command<'l> {
        let launch = self.launch;
        let unit = match launch.pattern {
            crate::work::pattern::RANDOM => {
                let random = crate::work::data_word(launch.seed, index);
                ((u128::from(random) * u128::from(launch.units)) >> 64) as u64
            }
            // A division only where the span is shorter than the work.
            _ if index < launch.units => index,
            _ => index.checked_rem(launch.units).unwrap_or(0),
        };
        let lba = Lba(launch.lba + unit * u64::from(launch.blocks));
        let (nsid, blocks) = (Nsid(launch.nsid), launch.blocks);
        let sqe = match launch.opcode as u8 {
            opcode::READ => nvm::read(nsid, lba, blocks),
            opcode::WRITE => nvm::write(nsid, lba, blocks),
            opcode::COMPARE => nvm::compare(nsid, lba, blocks),
            opcode::WRITE_ZEROES => nvm::write_zeroes(nsid, lba, blocks),
            opcode::DATASET_MANAGEMENT => nvm::deallocate(nsid, 1),
            other => Sqe::new(other, nsid),
        };
        let place = if launch.linear != 0 { index } else { buffer };
        Command::new(sqe, self.data(place * self.bytes), tag)
    }

    #[inline(always)]
    fn data(&self, offset: u64) -> Data<'l> {
        let len = self.bytes;
        if len == 0 {
            return Data::None;
        }
        if offset + len > self.launch.data_bytes {
            // An empty transfer is refused when it is mapped.
            return Data::Contiguous {
                iova: Iova(0),
                len: 0,
            };
        }
        if self.launch.pages == 0 {
            let iova = Iova(self.launch.data_iova + offset);
            return Data::Contiguous { iova, len };
        }
        let table = self.launch.pages as usize as *const Iova;
        let first = offset >> self.page.shift();
        let within = offset & (self.page.bytes() - 1);
        let count = (within + len).div_ceil(self.page.bytes());
        // SAFETY: the host gives one IOVA for each page of the data, and the range lies in the data;
        // nothing writes the table while the kernel runs.
        let pages =
            unsafe { core::slice::from_raw_parts(table.add(first as usize), count as usize) };
        Data::Pages {
            offset: within,
            len,
            pages,
        }
    }
}

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

/// A group drives queue `number` of the launch: command i belongs to queue i mod `queue_count`.
#[inline(always)]
fn drive<G: Group, const ENTRIES: usize>(launch: &Launch, group: G, number: u32) {
    let began_ns = arch::now_ns();
    let Some(words) = queue_words(launch, number) else {
        return;
    };
    // SAFETY: the host vouches for the words; the group alone uses the queue.
    let Some((memory, state)) = (unsafe { words.attach() }) else {
        return;
    };
    let work = Work::new(launch, words.page_shift);
    let mut tally = Tally::default();
    let queues = u64::from(launch.queue_count);
    let mine = u64::from(number);
    let total = (launch.commands + queues - 1 - mine) / queues;
    let mut queue = Collective::resume(group, memory, state);
    let depth = launch.depth.clamp(1, queue.depth());
    let slots = u64::from(queue.depth());
    let size = queue.group().size();
    let (mut next, mut ended, mut expired) = (0u64, 0u64, 0u64);
    let (mut busy, mut turn) = (false, 0);
    let mut look_ns = began_ns + launch.timeout_ns;
    let nth = |sequence: u64| sequence * queues + mine;
    while ended + expired < total {
        let now_ns = arch::now_ns();
        while next < total && queue.in_flight() < depth {
            let room = u64::from(depth - queue.in_flight()).min(total - next);
            let rank = queue.group().rank();
            let wants = u64::from(rank) < room;
            let sequence = next + u64::from(rank);
            let index = nth(sequence);
            let placed = queue.submit(
                wants,
                |slot| work.command(index, mine * slots + u64::from(slot), sequence as u32),
                now_ns + launch.timeout_ns,
            );
            let lost = placed.is_err();
            tally.sqes += u64::from(wants && !lost);
            if let Err(error) = placed {
                tally.refuse(&work, index, error);
            }
            let lost = u64::from(queue.group().vote(wants && lost).total);
            ended += lost;
            next += room.min(u64::from(size));
            if lost != 0 {
                break;
            }
        }
        queue.ring();
        // Wide reads only where the last one was full: an empty one costs the bus as much.
        let took = |done: Finished| {
            let index = nth(restore(u64::from(done.tag), next));
            tally.end(&work, index, Outcome::Done(done.status));
        };
        let result = if busy {
            queue.reap::<ENTRIES>(took)
        } else {
            queue.reap::<1>(took)
        };
        tally.cq_loads += if busy { ENTRIES as u64 } else { 1 };
        match result {
            Ok(0) => {
                busy = false;
                if now_ns >= look_ns {
                    expired += u64::from(queue.expire(now_ns, |tag| {
                        tally.timed_out(&work, nth(restore(u64::from(tag), next)));
                    }));
                    look_ns = now_ns + launch.timeout_ns / 8;
                }
                if turn >= 4 {
                    arch::sleep_ns(64);
                }
                turn += 1;
            }
            Ok(found) => {
                ended += u64::from(found);
                busy = found >= size;
                turn = 0;
            }
            Err(fault) => {
                tally.fault = fault.code();
                break;
            }
        }
    }
    let [sq, cq] = queue.doorbells();
    if queue.group().leads() {
        tally.sq_doorbells = u64::from(sq);
        tally.cq_doorbells = u64::from(cq);
    } else if queue.group().rank() % 32 != 0 {
        // Loads are counted once a warp.
        tally.cq_loads = 0;
    }
    queue.suspend();
    tally.report(launch, began_ns);
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
    drive::<Alone, 1>(&launch, Alone, arch::block());
}

/// One warp a queue: grid = queues, blocks of 32 threads.
///
/// # Safety
/// As [`nvme_owner`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_warp(launch: Launch) {
    drive::<Warp, 4>(&launch, Warp, arch::block());
}

/// One block a queue: grid = queues, blocks of a multiple of 32 threads.
///
/// # Safety
/// As [`nvme_owner`].
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_block(launch: Launch) {
    drive::<Block, 1>(&launch, Block::here(), arch::block());
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
    unsafe { sharing::<false>(&launch) };
}

/// As [`nvme_shared`], but each thread submits up to `launch.depth` commands before it waits for them,
/// in the reverse order. The tokens are kept in `launch.tokens`.
///
/// # Safety
/// As [`nvme_owner`]; the queues are used by threads of this launch alone.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn nvme_tokens(launch: Launch) {
    // SAFETY: the host vouches for the launch.
    unsafe { sharing::<true>(&launch) };
}

/// Finds the thread's queue, does the thread's share of the work and reports.
///
/// # Safety
/// As [`nvme_owner`].
#[inline(always)]
unsafe fn sharing<const SEVERAL: bool>(launch: &Launch) {
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
        one_by_one(&queue, &work, &mut tally, thread, threads);
    }
    tally.report(launch, began_ns);
}

/// Submits a command and waits for it, over and over.
#[inline(always)]
fn one_by_one(
    queue: &SharedQueue<'_>,
    work: &Work<'_>,
    tally: &mut Tally,
    thread: u64,
    threads: u64,
) {
    let launch = work.launch;
    let mut index = thread;
    while index < launch.commands {
        let deadline_ns = Gpu.now_ns() + launch.timeout_ns;
        let command = work.command(index, thread, thread as u32);
        match queue.submit(&Gpu, command, deadline_ns) {
            Ok(token) => {
                tally.sqes += 1;
                if !finish(queue, work, tally, index, token, deadline_ns) {
                    return;
                }
            }
            Err(error) => {
                tally.refuse(work, index, error);
                return;
            }
        }
        index += threads;
    }
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
    let mut index = thread;
    while index < launch.commands {
        let deadline_ns = Gpu.now_ns() + launch.timeout_ns;
        let (mut held, mut failed) = (0, false);
        while held < u64::from(launch.depth) && index + held * threads < launch.commands {
            let at = index + held * threads;
            let cell = held * threads + thread;
            match queue.submit(&Gpu, work.command(at, cell, cell as u32), deadline_ns) {
                Ok(token) => {
                    tally.sqes += 1;
                    // SAFETY: the host gives three words for each thread and token.
                    unsafe { tokens.add(cell as usize).write(token.words()) };
                    held += 1;
                }
                Err(error) => {
                    tally.refuse(work, at, error);
                    failed = true;
                    break;
                }
            }
        }
        while held > 0 {
            held -= 1;
            let cell = held * threads + thread;
            // SAFETY: written above by this thread.
            let token = Token::from_words(unsafe { tokens.add(cell as usize).read() });
            failed |= !finish(
                queue,
                work,
                tally,
                index + held * threads,
                token,
                deadline_ns,
            );
        }
        if failed {
            return;
        }
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
    match queue.wait(&Gpu, token, deadline_ns) {
        Ok((outcome, _)) => {
            tally.end(work, index, outcome);
            true
        }
        Err((WaitError::TimedOut, _)) => {
            tally.timed_out(work, index);
            false
        }
        Err((WaitError::Refused(fault), _)) => {
            tally.refused += 1;
            tally.fault = fault.code();
            work.account(index, account::FAULTED);
            false
        }
    }
}
