//! State that launches, their recovery and waiting threads share: the gate, the summaries, the station memory and
//! the launch numbers. It lives until no launch can refer to it, which may be after its store was closed.

use super::super::driver::Gpu;
use super::super::leftovers;
use super::super::lent::QueueUsers;
use super::super::memory::DeviceMemory;
use super::board::LaunchMailbox;
use super::counts::{LastLaunch, LaunchLoads, RowCounts};
use super::numbers::{LAUNCHES, LaunchNumbers};
use super::records::RecordPool;
use nvme_core::spec::nvm;
use nvme_driver::controller::session::{FactsStanding, UserFacts};
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_gpu_kernel::rows::{LaunchProgress, STATION_CELLS};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Pause between two polls of the gate.
const NAP: Duration = Duration::from_micros(20);

/// Memory that every block of a launch uses besides its queues. Launches over stripes keep the memory of each drive
/// alive. It is separate from the [`RowsState`], which has the list of abandoned launches: otherwise such a launch
/// would keep itself alive.
pub(in super::super) struct StationMemory {
    pub(super) board: LaunchMailbox,
    /// A word for each station, 0 while it is free.
    pub free: DeviceMemory,
    /// A result cell for each row under way.
    pub cells: DeviceMemory,
}

/// Function that receives the counts of a store's launches.
pub(super) type CountReport = Box<dyn FnMut(&RowCounts) + Send>;

/// Counts of gathers that were launched or captured, by the queues that they go by; and of what was moved.
#[derive(Default)]
pub(super) struct GatherCounts {
    pub owned: AtomicU64,
    pub shared: AtomicU64,
    pub owned_scatters: AtomicU64,
    pub shared_scatters: AtomicU64,
    /// Number of gathers in halves whose first launch may take such queues.
    pub begun: AtomicU64,
    /// Time that threads waited for launches, in nanoseconds.
    pub waited_ns: AtomicU64,
    pub last: Arc<LastLaunch>,
    pub loads: Mutex<LaunchLoads>,
    /// Called a few times a second while the store is open.
    pub report: Mutex<Option<CountReport>>,
}

/// State that launches of one store share.
pub(in super::super) struct RowsState {
    pub gpu: Arc<Gpu>,
    pub stations: u32,
    pub memory: Arc<StationMemory>,
    /// Time that the groups inside may need to leave.
    patience: Duration,
    /// A `u64`: how many blocks of scatters have ended; then one for each station: rows that its blocks found in caches.
    pub written: DeviceMemory,
    /// A [`LaunchProgress`] for each launch.
    pub progress: DeviceMemory,
    launches: Mutex<LaunchNumbers>,
    /// The host has the queues.
    is_stopped: AtomicBool,
    /// True if groups did not leave: the GPU may still use all memory.
    is_stuck: AtomicBool,
    /// Facts about the namespace on which launches rely. They hold the device open, which launches that outlive
    /// their store must not do.
    pub footing: OnceLock<Weak<UserFacts>>,
    /// Reason why the facts did not hold when the store was closed: launches that have ended are judged by it.
    refused_at_close: OnceLock<Error>,
    /// Counts of gathers.
    pub(super) counts: GatherCounts,
    /// Memory of gathers in halves.
    pub(super) records: Arc<RecordPool>,
    /// Memory of gathers that read each distinct row once.
    pub(super) distinct: Arc<RecordPool>,
    /// Two `u64`: the rows that these were asked for, and those that they read.
    pub(super) distinct_counts: DeviceMemory,
    /// True if a caller's kernel may use this memory at any time: it is never freed.
    pub is_kept: AtomicBool,
}

impl RowsState {
    /// Allocates words and memory for `stations` stations; reads take `timeout` at most.
    ///
    /// # Errors
    /// Without memory.
    pub fn new(gpu: &Arc<Gpu>, stations: u32, timeout: Duration) -> Result<Self> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            stations,
            memory: Arc::new(StationMemory {
                board: LaunchMailbox::new(gpu, stations, LAUNCHES)?,
                free: DeviceMemory::new(gpu, stations as usize * 4)?,
                cells: DeviceMemory::new(gpu, stations as usize * STATION_CELLS as usize * 8)?,
            }),
            // Two passes over a chunk of rows, each with the grace of a wait, and time to spare.
            patience: timeout * 3 + Duration::from_secs(2),
            written: DeviceMemory::new(gpu, 8 * (1 + stations as usize))?,
            progress: DeviceMemory::new(gpu, LAUNCHES as usize * size_of::<LaunchProgress>())?,
            launches: Mutex::default(),
            is_stopped: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            footing: OnceLock::new(),
            refused_at_close: OnceLock::new(),
            counts: GatherCounts::default(),
            records: Arc::default(),
            distinct: Arc::default(),
            distinct_counts: DeviceMemory::new(gpu, 16)?,
            is_kept: AtomicBool::new(false),
        })
    }

    /// Frees lost stations, with their cells: their commands have ended. A block that has claimed another station and
    /// not passed the gate yet keeps it.
    fn free_lost(&self) -> Result<()> {
        let gate = self.memory.board.gate();
        while let Some(station) = gate.take_lost() {
            let cells = STATION_CELLS as usize * 8;
            self.memory
                .cells
                .upload(station as usize * cells, &vec![0; cells])?;
            self.memory.free.upload(station as usize * 4, &[0; 4])?;
        }
        Ok(())
    }

    /// Keeps launches from the queues from now on, and waits for those that use them; returns true if none does
    /// any more.
    pub fn end(&self) -> bool {
        self.memory.board.gate().close_for_good();
        // `stop` is not used here: a reset by another thread may be waiting in it for the same groups, and two threads
        // that wait for each other would never end.
        self.have_left()
    }

    /// Waits until no group is inside; returns true if none is.
    fn have_left(&self) -> bool {
        let (gate, begin) = (self.memory.board.gate(), Instant::now());
        while !gate.is_idle() {
            if begin.elapsed() > self.patience {
                return false;
            }
            std::thread::sleep(NAP);
        }
        true
    }

    /// Checks whether the namespace still has the properties that launches were made for.
    ///
    /// # Errors
    /// [`Error::Changed`] if it has not; the errors of Identify if that is unknown.
    pub fn check_current(&self) -> Result<()> {
        self.footing(|footing| footing.check(nvm::opcode::READ))
            .unwrap_or_else(|| match self.refused_at_close.get() {
                Some(error) => Err(error.again()),
                None => Ok(()),
            })
    }

    /// Compares the facts a last time, for launches whose outcome is asked for once the store is closed. Called after
    /// [`end`](Self::end).
    pub fn judge(&self) {
        if let Err(error) = self.check_current() {
            // Only the store's drop calls this, once.
            let _ = self.refused_at_close.set(error);
        }
    }

    /// Returns the state of the facts as they are known: sends nothing and waits for nothing.
    pub fn standing(&self) -> FactsStanding {
        self.footing(|footing| footing.standing(nvm::opcode::READ))
            .unwrap_or_else(|| match self.refused_at_close.get() {
                Some(error) => FactsStanding::Refused(error.again()),
                None => FactsStanding::Holds,
            })
    }

    /// Evaluates `of` on the facts, while the store is open.
    fn footing<T>(&self, of: impl FnOnce(&UserFacts) -> T) -> Option<T> {
        let footing = self.footing.get().and_then(Weak::upgrade)?;
        Some(of(&footing))
    }

    /// Returns the counts as they are now.
    pub(super) fn row_counts(&self) -> RowCounts {
        let (counts, board) = (&self.counts, &self.memory.board);
        let moved = lock(&counts.loads).sum(|number| board.ended(number));
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (unique_asked, unique_read) = board.distinct_rows();
        RowCounts {
            cache_asked: moved.cached,
            cache_hits: board.cache_hits(),
            owned: load(&counts.owned),
            shared: load(&counts.shared),
            owned_scatters: load(&counts.owned_scatters),
            shared_scatters: load(&counts.shared_scatters),
            begun: load(&counts.begun),
            late_rows: board.late_rows(),
            failed_rows: board.failed_rows(),
            read: moved.read,
            written: moved.written,
            unique_asked,
            unique_read,
            waited_ns: load(&counts.waited_ns),
            under_way: moved.under_way,
            last_blocks: counts.last.blocks(),
            last_registers: counts.last.registers(),
        }
    }

    /// Passes the counts to the function that asked for them.
    pub(super) fn report_counts(&self) {
        // The counts are taken under the lock, so that none come later than newer ones.
        if let Some(report) = &mut *lock(&self.counts.report) {
            report(&self.row_counts());
        }
    }

    pub(super) fn launches(&self) -> MutexGuard<'_, LaunchNumbers> {
        lock(&self.launches)
    }

    /// True if nothing on the GPU refers to this memory any more: every launch has ended that is not in a graph, which
    /// keeps its own objects alive, and no kernel of the caller may use it later.
    pub(super) fn is_over(&self) -> bool {
        let are_over = self
            .launches()
            .are_over(|number| self.memory.board.ended(number));
        !self.is_kept.load(Ordering::Acquire) && are_over
    }
}

/// The launches of a store, also once it is closed.
pub struct StoreLaunches(Arc<RowsState>);

impl StoreLaunches {
    pub(super) fn of(state: &Arc<RowsState>) -> Self {
        Self(Arc::clone(state))
    }

    /// True if none is under way, and no graph has one.
    pub fn are_over(&self) -> bool {
        // Graphs that were destroyed return their launches.
        leftovers::reap();
        let launches = self.0.launches();
        launches.of_graphs() == 0 && launches.are_over(|number| self.0.memory.board.ended(number))
    }
}

impl QueueUsers for RowsState {
    /// Closes the gate for good if this namespace is about to be erased. Launches for another namespace continue: opening
    /// the gate again would begin another epoch, by which commands that are in flight would count as ended.
    fn keep_out(&self) -> bool {
        // Without a footing no launch exists yet; one that has gone is that of a closed store.
        let holds = self.footing.get().is_none_or(|footing| {
            let footing = footing.upgrade();
            footing.is_some_and(|footing| footing.check_read(nvm::opcode::READ).is_ok())
        });
        if !holds {
            self.memory.board.gate().close_for_good();
        }
        holds || self.have_left()
    }

    /// Closes the gate and waits until no group is inside; returns true if none is. Calls no function of the
    /// driver.
    fn stop(&self) -> bool {
        // A reset stops every queue, and each calls this; only the first one closes the gate and waits. The
        // flags are atomics because the watch thread and a closing store may both be here.
        if self.is_stopped.swap(true, Ordering::AcqRel) {
            return !self.is_stuck.load(Ordering::Acquire);
        }
        self.memory.board.gate().close();
        let have_left = self.have_left();
        if !have_left {
            self.is_stuck.store(true, Ordering::Release);
        }
        have_left
    }

    fn resume(&self, works: bool) {
        if !self.is_stopped.swap(false, Ordering::AcqRel) {
            return;
        }
        let gate = self.memory.board.gate();
        let is_stuck = self.is_stuck.load(Ordering::Acquire);
        // The GPU's driver is called while the gate is shut and nothing is inside: nothing waits for the drive.
        let freed = || -> Result<()> {
            let _guest = self.gpu.enter()?;
            self.free_lost()
        };
        // Only this namespace matters here; changes of other namespaces do not.
        let may_pass = || {
            let read = self.footing(|footing| footing.check_read(nvm::opcode::READ));
            read.unwrap_or(Ok(())).is_ok()
        };
        if works && !is_stuck && may_pass() && freed().is_ok() {
            // Writes without an end may have taken place until now.
            self.memory.board.wrote();
            // A gate that was closed for good meanwhile stays closed.
            gate.open();
        } else {
            gate.close_for_good();
        }
    }
}
