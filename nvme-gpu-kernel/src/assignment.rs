//! The assignment of a launch's commands to threads: data address, result cell and statistics of each
//! command.
// UNSAFETY: a launch holds addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::work::{LaunchArguments, LaunchReport, TracedEvent, account};
use nvme_core::group::BusTraffic;
use nvme_core::handoff::QueueWords;
use nvme_core::spec::nvm::{self, opcode};
use nvme_core::spec::{Iova, Lba, Nsid, PageSize, Sqe};
use nvme_core::sync::{AtomicU32, Order, Scope, opaque};
use nvme_core::trace::TraceEvent;
use nvme_core::{
    CommandData, CommandOutcome, ControllerFault, MemberCommand, SubmitError, WaitError,
};

/// Returns queue `index` of the launch.
#[inline(always)]
pub fn queue_words(launch: &LaunchArguments, index: u32) -> Option<&QueueWords> {
    if index >= launch.queue_count {
        return None;
    }
    let words = launch.queues as usize as *const QueueWords;
    // SAFETY: the host vouches for `queue_count` queues and does not change them while the kernel runs.
    Some(unsafe { &*words.add(index as usize) })
}

/// The counts of one thread. Rare events are added to the report at once, which keeps registers free.
#[derive(Default)]
pub struct ThreadTally {
    pub completed: u32,
    pub sqes: u32,
}

impl ThreadTally {
    #[inline(always)]
    pub fn end(&mut self, work: &AssignedWork, index: u64, outcome: CommandOutcome) {
        match outcome {
            CommandOutcome::Completed(status) if status.is_success() => self.completed += 1,
            CommandOutcome::Completed(status) => {
                // SAFETY: the host vouches for the report, which is only accessed by these atomic
                // instructions.
                unsafe {
                    arch::add(work.count(|report| &raw mut (*report).failed), 1);
                    let status = u64::from(status.0);
                    arch::raise(work.count(|report| &raw mut (*report).status), status);
                }
            }
            // SAFETY: as above.
            CommandOutcome::Aborted(_) => unsafe {
                arch::add(work.count(|report| &raw mut (*report).failed), 1);
            },
        }
        work.account(
            index,
            match outcome {
                CommandOutcome::Completed(status) => account::DONE | u32::from(status.0),
                CommandOutcome::Aborted(_) => account::ABORTED,
            },
        );
    }
}

/// A launch with the sizes derived from its parameters.
///
/// Each thread makes one at its start and keeps it in registers; everything that changes during the launch is
/// in the report or in the thread's own counts.
pub struct AssignedWork<'l> {
    pub launch: &'l LaunchArguments,
    page: PageSize,
}

impl<'l> AssignedWork<'l> {
    #[inline(always)]
    pub fn new(launch: &'l LaunchArguments, page_shift: u32) -> Self {
        Self {
            launch,
            page: PageSize::from_mps(page_shift.wrapping_sub(12) as u8).unwrap_or(PageSize::KIB4),
        }
    }

    /// Returns the address of one of the report's counts.
    #[inline(always)]
    fn count(&self, field: impl FnOnce(*mut LaunchReport) -> *mut u64) -> *mut u64 {
        field(self.launch.report as usize as *mut LaunchReport)
    }

    #[inline(always)]
    pub fn timed_out(&self, index: u64) {
        // SAFETY: the host vouches for the report, which is only accessed by these atomic instructions.
        unsafe { arch::add(self.count(|report| &raw mut (*report).timed_out), 1) };
        self.account(index, account::TIMED_OUT);
    }

    /// Counts a command that completed after it was reported as timed out.
    #[inline(always)]
    pub fn came_late(&self) {
        // SAFETY: as in `timed_out`; adding the maximum subtracts one, since the sum wraps.
        unsafe {
            arch::add(self.count(|report| &raw mut (*report).timed_out), u64::MAX);
            arch::add(self.count(|report| &raw mut (*report).late), 1);
        }
    }

    #[inline(always)]
    pub fn refuse(&self, index: u64, error: SubmitError) {
        // SAFETY: as in `timed_out`.
        unsafe { arch::add(self.count(|report| &raw mut (*report).refused), 1) };
        // Comparisons instead of a match: the compiler would turn a match into a table, and load it
        // like data. Each such load would wait for memory that the comparisons do not need.
        let mut word = account::REFUSED;
        if error == SubmitError::QueueFull {
            word = account::FULL;
        }
        if error == SubmitError::Refused {
            word = account::FAULTED;
        }
        self.account(index, word);
    }

    /// Reports a wait that ended without the command's result.
    #[inline(always)]
    pub fn give_up(&self, index: u64, error: WaitError) {
        match error {
            WaitError::TimedOut => self.timed_out(index),
            WaitError::Refused => self.refuse(index, SubmitError::Refused),
        }
    }

    #[inline(always)]
    pub fn fault(&self, fault: ControllerFault) {
        let code = u64::from(fault.code());
        // SAFETY: as in `timed_out`.
        unsafe { arch::raise(self.count(|report| &raw mut (*report).fault), code) };
    }

    /// Counts an access of a shared queue to the bus.
    #[inline(always)]
    pub fn on_bus_access(&self, traffic: BusTraffic) {
        // SAFETY: as in `timed_out`.
        unsafe {
            let (field, count) = match traffic {
                BusTraffic::SqDoorbell => (self.count(|all| &raw mut (*all).sq_doorbells), 1),
                BusTraffic::CqDoorbell => (self.count(|all| &raw mut (*all).cq_doorbells), 1),
                BusTraffic::CqLoads(loads) => (self.count(|all| &raw mut (*all).cq_loads), loads),
            };
            arch::add(field, u64::from(count));
        }
    }

    /// Adds a thread's counts to the report.
    #[inline(always)]
    pub fn report(&self, tally: &ThreadTally, bus: [u32; 3], began_ns: u64) {
        let [sq_doorbells, cq_doorbells, cq_loads] = bus.map(u64::from);
        // SAFETY: as in `timed_out`.
        unsafe {
            let add = |at: *mut u64, value| {
                if value != 0 {
                    arch::add(at, value);
                }
            };
            let report = self.launch.report as usize as *mut LaunchReport;
            add(&raw mut (*report).completed, u64::from(tally.completed));
            add(&raw mut (*report).sqes, u64::from(tally.sqes));
            add(&raw mut (*report).sq_doorbells, sq_doorbells);
            add(&raw mut (*report).cq_doorbells, cq_doorbells);
            add(&raw mut (*report).cq_loads, cq_loads);
            arch::raise(&raw mut (*report).first_ns_complement, u64::MAX - began_ns);
            arch::raise(&raw mut (*report).last_ns, arch::now_ns());
        }
    }

    #[inline(always)]
    fn account(&self, index: u64, word: u32) {
        if self.launch.accounts != 0 && index < self.launch.commands {
            let accounts = self.launch.accounts as usize as *mut u32;
            // SAFETY: the host vouches for one word for each command; only the command's own thread writes
            // it.
            unsafe { accounts.add(index as usize).write_volatile(word) };
        }
    }

    /// Appends a record to the launch's trace; only for launches with a trace.
    #[inline(always)]
    pub fn record(&self, index: u64, event: TraceEvent) {
        let launch = self.launch;
        let report = launch.report as usize as *mut LaunchReport;
        // SAFETY: the host vouches for the report; only this atomic instruction changes the field.
        let number = unsafe { &*(&raw const (*report).traced).cast::<AtomicU32>() };
        let number = number.fetch_add(1, Order::Relaxed, Scope::Gpu);
        let at = number & launch.trace_records.wrapping_sub(1);
        let [head, argument] = event.to_words();
        let record = launch.trace as usize as *mut TracedEvent;
        // SAFETY: the host vouches for `trace_records` records, a power of two, and each number belongs to
        // one thread. Written word by word: a whole record would be assembled in local memory first.
        unsafe {
            let words = record.add(at as usize).cast::<u64>();
            words.write_volatile(head);
            words.add(1).write_volatile(argument);
            words.add(2).write_volatile(index);
            words.add(3).write_volatile(arch::now_ns());
        }
    }

    /// Makes command `index`, with its data in buffer `buffer` unless the launch is linear.
    #[inline(always)]
    pub fn command(&self, index: u64, buffer: u64, tag: u32) -> MemberCommand<'l> {
        let launch = self.launch;
        let unit = match launch.pattern {
            crate::work::pattern::RANDOM => {
                let random = crate::work::data_word(launch.seed, index);
                ((u128::from(random) * u128::from(launch.units)) >> 64) as u64
            }
            // Division only if the span is shorter than the work, and in 32 bits if possible, since 64-bit
            // division is slow on a GPU.
            _ if index < launch.units => index,
            _ => match (u32::try_from(index), u32::try_from(launch.units)) {
                (Ok(index), Ok(units)) => u64::from(index.checked_rem(units).unwrap_or(0)),
                _ => index.checked_rem(launch.units).unwrap_or(0),
            },
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
        MemberCommand::new(sqe, self.data(place), tag)
    }

    /// Returns the bytes of a command's data. Computed again for each command: registers are scarcer than
    /// instructions.
    #[inline(always)]
    fn bytes(&self) -> u64 {
        let launch = self.launch;
        match opaque(launch.opcode) as u8 {
            opcode::READ | opcode::WRITE | opcode::COMPARE => {
                u64::from(launch.blocks) << opaque(launch.block_shift)
            }
            opcode::DATASET_MANAGEMENT => 16,
            _ => 0,
        }
    }

    #[inline(always)]
    fn data(&self, place: u64) -> CommandData<'l> {
        let len = self.bytes();
        let offset = place * len;
        if len == 0 {
            return CommandData::None;
        }
        if offset + len > self.launch.data_bytes {
            // An empty transfer is rejected when it is mapped, so data outside the memory ends in an error.
            return CommandData::Contiguous {
                iova: Iova(0),
                len: 0,
            };
        }
        if self.launch.pages == 0 {
            let iova = Iova(self.launch.data_iova + offset);
            return CommandData::Contiguous { iova, len };
        }
        let table = self.launch.pages as usize as *const Iova;
        let shift = opaque(self.page.shift());
        let first = offset >> shift;
        let within = offset & ((1 << shift) - 1);
        let count = (within + len).div_ceil(1 << shift);
        // SAFETY: the host vouches for one IOVA for each page of the data, and the range is inside the data,
        // as checked above; nothing writes the table while the kernel runs.
        let pages =
            unsafe { core::slice::from_raw_parts(table.add(first as usize), count as usize) };
        CommandData::Pages {
            offset: within,
            len,
            pages,
        }
    }
}
