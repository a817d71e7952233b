//! Numbers of launches: each has summary words in which the launch reports its end. A number is reserved before the
//! launch, until nothing can run or query the launch any more.

use super::super::captured::keep_with_graph;
use super::super::leftovers::{self, LaunchLeftover};
use super::super::stream::is_capturing;
use super::counts::{LaunchLoad, MovedRows};
use super::kernels::RowKernels;
pub(super) use super::numbers::Named;
use super::numbers::{AbandonedLaunch, LAUNCHES};
use super::state::RowsState;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_gpu_kernel::rows::{GatherLaunch, LaunchProgress};
use std::sync::Arc;

/// State of a launch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SlotStage {
    Reserved,
    InStream,
    InGraph,
}

/// The number of a launch, and the objects that the launch needs until it has ended, or until no graph can run it any
/// more.
///
/// Handles share it, and for a captured launch the graph does. It keeps the words of the store alive.
pub(super) struct LaunchSlot {
    state: Arc<RowsState>,
    number: u32,
    before: u32,
    stage: SlotStage,
    kernels: Option<Arc<RowKernels>>,
    named: Named,
    /// Rows that each run of the launch moves; none if they are not counted.
    moved: MovedRows,
    is_scatter: bool,
    /// The rows go through a cache.
    is_cached: bool,
}

impl RowsState {
    /// Reserves numbers for `count` launches of one operation: all of them, or none.
    ///
    /// # Errors
    /// [`Error::Environment`] when not as many are free.
    pub(super) fn reserve(self: &Arc<Self>, count: usize) -> Result<Vec<LaunchSlot>> {
        // Graphs that were destroyed return their numbers here, and memory that nothing uses any more.
        leftovers::reap();
        let ended = |number| self.memory.board.ended(number);
        let (numbers, over) = {
            let mut launches = self.launches();
            let over = match launches.free.len() < count
                || launches.abandoned.len() >= launches.most_abandoned
            {
                true => launches.look_at_abandoned(ended),
                false => Vec::new(),
            };
            let rest = launches.free.len().checked_sub(count);
            let numbers = rest.map(|rest| launches.free.split_off(rest));
            for number in numbers.iter().flatten() {
                launches.held.insert(*number, ended(*number));
            }
            (numbers, over)
        };
        // The objects are dropped outside the lock, because that may free memory of the GPU.
        drop(over);
        let numbers = numbers.ok_or_else(|| {
            Error::environment(
                format!(
                    "{count} launches are more than are free of the store's {LAUNCHES}, which those under way and \
                     those of graphs have"
                ),
                "wait for operations that are under way, destroy graphs that are not used any more, or open another \
                 store for more graphs",
            )
        })?;
        let slot = |number| LaunchSlot {
            state: Arc::clone(self),
            number,
            before: self.memory.board.ended(number),
            stage: SlotStage::Reserved,
            kernels: None,
            named: None,
            moved: MovedRows::default(),
            is_scatter: false,
            is_cached: false,
        };
        Ok(numbers.into_iter().map(slot).collect())
    }
}

impl RowsState {
    /// Marks the launches as ones that write.
    pub(super) fn are_scatters(&self, slots: &mut [LaunchSlot]) {
        for slot in &mut *slots {
            slot.is_scatter = true;
        }
        let numbers = slots.iter().map(|slot| slot.number);
        self.launches().of_scatters.extend(numbers);
    }

    /// Returns a count that grows with each scatter that ends, and with other launches that reuse their
    /// numbers.
    pub(super) fn scatters_ended(&self) -> u64 {
        let launches = self.launches();
        let ended = |number: &u32| u64::from(self.memory.board.ended(*number));
        launches.of_scatters.iter().map(ended).sum()
    }
}

impl LaunchSlot {
    /// Returns the words of the store that the launch is one of.
    pub fn state(&self) -> &Arc<RowsState> {
        &self.state
    }

    /// Returns it with `rows` rows of `bytes` bytes together, which each run of the launch moves.
    pub fn moving(mut self, rows: u64, bytes: u64) -> Self {
        self.moved = MovedRows { rows, bytes };
        self
    }

    /// Returns it with the rows of `launch`.
    pub fn moving_rows_of(self, launch: &GatherLaunch) -> Self {
        let bytes = launch.count.wrapping_mul(launch.row_bytes.into());
        self.moving(launch.count, bytes)
    }

    /// Returns it as one whose rows go through a cache, if `is_cached`.
    pub fn through_cache(mut self, is_cached: bool) -> Self {
        self.is_cached = is_cached;
        self
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the kernels that it was launched with.
    pub fn kernels(&self) -> Option<&Arc<RowKernels>> {
        self.kernels.as_ref()
    }

    /// Enqueues `launch` in `stream` by `put`, which receives it with the words of this number. Until it has ended, or
    /// for as long as a graph may run it, `kernels` and `named` are kept alive.
    ///
    /// # Errors
    /// The errors of `put`, and [`Error::Environment`] with the driver's answer: the launch is not in the stream then.
    pub fn put(
        self,
        launch: GatherLaunch,
        (kernels, named): (&Arc<RowKernels>, Named),
        stream: u64,
        put: impl FnOnce(GatherLaunch) -> Result<()>,
    ) -> Result<Arc<Self>> {
        let _guest = self.state.gpu.enter()?;
        let is_captured = is_capturing(stream)?;
        let launch = GatherLaunch {
            progress: self.state.progress.address()
                + u64::from(self.number) * size_of::<LaunchProgress>() as u64,
            summary: self.state.memory.board.summary_address(self.number),
            ..launch
        };
        let mut slot = Arc::new(self.launched(is_captured, kernels, named));
        if is_captured {
            keep_with_graph(stream, Box::new(OfGraph(Arc::clone(&slot))))?;
        }
        if let Err(error) = put(launch) {
            if let Some(slot) = Arc::get_mut(&mut slot) {
                slot.refused();
            }
            return Err(error);
        }
        // Also a launch that moves no rows: its ends are not those of the launch that had the number before.
        let load = LaunchLoad {
            moved: slot.moved,
            is_scatter: slot.is_scatter,
            is_cached: slot.is_cached,
            is_captured,
        };
        lock(&slot.state.counts.loads).begin(slot.number, load, slot.before);
        Ok(slot)
    }

    /// Returns the number of launches with this number that have ended since it was reserved.
    pub fn ended(&self) -> u32 {
        self.state
            .memory
            .board
            .ended(self.number)
            .wrapping_sub(self.before)
    }

    pub fn is_captured(&self) -> bool {
        self.stage == SlotStage::InGraph
    }

    /// Records that it is in a stream from now on, or in the graph that the stream is captured in.
    fn launched(mut self, is_captured: bool, kernels: &Arc<RowKernels>, named: Named) -> Self {
        self.kernels = Some(Arc::clone(kernels));
        self.named = named;
        self.stage = match is_captured {
            true => SlotStage::InGraph,
            false => SlotStage::InStream,
        };
        if is_captured {
            self.state.launches().held.remove(&self.number);
        }
        self
    }

    /// Records that the driver refused the launch.
    fn refused(&mut self) {
        if self.stage == SlotStage::InStream {
            self.stage = SlotStage::Reserved;
        }
    }
}

impl Drop for LaunchSlot {
    fn drop(&mut self) {
        let (kernels, named) = (self.kernels.take(), self.named.take());
        let is_over = self.stage != SlotStage::InStream || self.ended() != 0;
        let mut launches = self.state.launches();
        launches.held.remove(&self.number);
        match is_over {
            true => launches.free.push(self.number),
            false => launches.abandoned.push(AbandonedLaunch {
                number: self.number,
                before: self.before,
                _kernels: kernels,
                _named: named,
            }),
        }
    }
}

/// A captured launch, as its graph has it.
struct OfGraph(#[expect(dead_code, reason = "held for its drop")] Arc<LaunchSlot>);

impl LaunchLeftover for OfGraph {}
