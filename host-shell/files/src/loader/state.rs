//! Memory cells, their layers, and the reads in progress. A slot is reused only after the consumer's event and the last
//! read into it; a failed layer is read again when it is requested again.

use super::on_host::{CellOwner, HostLoad};
use super::options::{LoaderStats, MOST_UNDER_WAY};
use super::order::ReadSchedule;
use nvme_driver::error::{Error, Result};
use nvme_driver::words::listed;
use nvme_store::Store;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use super::on_gpu::{GpuLoad, GpuRoom};

/// Deadline of waiting for the oldest read when the limit of reads under way is reached: reads end by their own
/// deadlines long before, so a wait this long means that the stream does not run.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// A piece of memory for one layer at a time.
pub(super) struct LayerCell {
    /// Layer that the cell holds or that is being read into it; constant for a resident layer.
    pub layer: Option<usize>,
    pub is_resident: bool,
    /// True if no event tracks the last use of the cell, so that it is never reused.
    pub is_lost: bool,
    /// Number of layers in this cell that callers use.
    pub users: usize,
    pub room: CellMemory,
    /// The read that brought the layer, or is bringing it.
    pub load: Option<Arc<LayerRead>>,
}

/// The memory of a cell.
pub(super) enum CellMemory {
    Host(CellOwner),
    #[cfg(feature = "cuda")]
    Gpu(GpuRoom),
}

/// The read of a layer.
pub(super) enum LayerRead {
    Host(Arc<HostLoad>),
    #[cfg(feature = "cuda")]
    Gpu(GpuLoad),
}

/// A layer on a GPU that was not read.
pub(super) struct FailedLayer {
    pub layer: usize,
    load: Arc<LayerRead>,
    /// True if a caller received the layer before the failure was known.
    is_given: bool,
}

struct InFlightLayer {
    layer: usize,
    cell: usize,
    load: Arc<LayerRead>,
    is_given: bool,
}

pub(super) struct LoaderState {
    pub store: Option<Arc<Store>>,
    pub cells: Vec<LayerCell>,
    /// Number of the first slot; the cells before it belong to layers that stay.
    first_slot: usize,
    /// The cell of each layer that has one.
    of_layer: HashMap<usize, usize>,
    pub course: ReadSchedule,
    pub stats: LoaderStats,
    /// Reads of a GPU whose end was not examined yet, in the order of their stream.
    under_way: VecDeque<InFlightLayer>,
    failures: Vec<FailedLayer>,
}

impl LayerCell {
    /// True for a resident layer that was read, or is being read.
    pub fn is_there_for_good(&self) -> bool {
        self.is_resident && self.load.is_some()
    }
}

impl LayerRead {
    /// Waits until the read has ended, successfully or not.
    ///
    /// # Errors
    /// [`Error::Unfinished`] past the limit.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let has_ended = match self {
            Self::Host(load) => load.wait(limit),
            #[cfg(feature = "cuda")]
            Self::Gpu(load) => load.wait(limit),
        };
        match has_ended {
            true => Ok(()),
            false => Err(Error::Unfinished {
                cause: format!(
                    "the read of a layer has not ended within {} ms",
                    limit.as_millis()
                ),
                remedy: "wait longer, and for what the stream does before it".to_owned(),
            }),
        }
    }

    /// Returns the reason why the read failed, once it has ended.
    pub fn failure(&self) -> Option<Error> {
        match self {
            // Known before the layer is given out.
            Self::Host(_) => None,
            #[cfg(feature = "cuda")]
            Self::Gpu(load) => load.failure(),
        }
    }

    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Host(load) => load.bytes(),
            #[cfg(feature = "cuda")]
            Self::Gpu(_) => None,
        }
    }

    pub fn address(&self) -> u64 {
        match self {
            Self::Host(load) => {
                let bytes = load.bytes();
                bytes.map_or(0, |bytes| bytes.as_ptr().expose_provenance() as u64)
            }
            #[cfg(feature = "cuda")]
            Self::Gpu(load) => load.address(),
        }
    }

    fn is_done(&self) -> bool {
        match self {
            Self::Host(_) => true,
            #[cfg(feature = "cuda")]
            Self::Gpu(load) => load.is_done(),
        }
    }
}

impl FailedLayer {
    pub fn error(&self) -> Error {
        let error = self.load.failure();
        error.unwrap_or_else(|| Error::internal("a read that failed says nothing"))
    }
}

impl LoaderState {
    pub fn new(store: &Arc<Store>, cells: Vec<LayerCell>, course: ReadSchedule) -> Self {
        let held = cells.iter().enumerate();
        let held = held.filter_map(|(index, cell)| Some((cell.layer?, index)));
        Self {
            store: Some(Arc::clone(store)),
            of_layer: held.collect(),
            first_slot: cells.iter().filter(|cell| cell.is_resident).count(),
            cells,
            course,
            stats: LoaderStats::default(),
            under_way: VecDeque::new(),
            failures: Vec::new(),
        }
    }

    /// # Errors
    /// [`Error::Usage`] after the end.
    pub fn store(&self) -> Result<Arc<Store>> {
        self.store.clone().ok_or_else(|| {
            Error::usage(
                "the loader is closed",
                "ask for layers before it, or its store, is closed",
            )
        })
    }

    /// Finds the cell that holds a layer, or into which it is read.
    pub fn find(&self, layer: usize) -> Option<usize> {
        self.of_layer.get(&layer).copied()
    }

    /// Returns the slot to overwrite: an unused one whose layer will be requested last (Belady's policy).
    pub fn victim(&self, wanted: &HashSet<usize>) -> Option<usize> {
        let away = |cell: &LayerCell| match cell.layer {
            None => usize::MAX,
            Some(layer) => self.course.distance(layer).unwrap_or(usize::MAX - 1),
        };
        let may = |cell: &LayerCell| {
            let is_wanted = cell.layer.is_some_and(|layer| wanted.contains(&layer));
            cell.users == 0 && !cell.is_resident && !cell.is_lost && !is_wanted
        };
        let slots = self.cells.iter().enumerate().skip(self.first_slot);
        let cells = slots.filter(|(_, cell)| may(cell));
        cells
            .max_by_key(|(_, cell)| away(cell))
            .map(|(index, _)| index)
    }

    /// Returns the error for a request while no slot is free.
    pub fn no_room(&self) -> Error {
        let slots = self.cells.iter().filter(|cell| !cell.is_resident);
        let lost = slots.clone().filter(|cell| cell.is_lost).count();
        let held = slots.clone().filter(|cell| cell.users > 0);
        let held = held.map(|cell| {
            let failed = || "a failed one".to_owned();
            cell.layer.map_or_else(failed, |layer| layer.to_string())
        });
        let of_lost = match lost {
            0 => String::new(),
            _ => format!("; {lost} are lost with their streams"),
        };
        Error::usage(
            format!(
                "no slot of {} is free: layers {} are in use{of_lost}",
                slots.count(),
                listed(held)
            ),
            "let go of a layer, and of arrays of it, before the next one, or use more slots",
        )
    }

    /// Marks the cell as empty.
    pub fn forget(&mut self, cell: usize) {
        let cell = &mut self.cells[cell];
        cell.load = None;
        if !cell.is_resident
            && let Some(layer) = cell.layer.take()
        {
            self.of_layer.remove(&layer);
        }
    }

    /// Records the start of a read of `layer` into the cell.
    pub fn started(&mut self, cell: usize, layer: usize, load: Arc<LayerRead>) {
        // A read that has already failed is queued, too, so that its failure is found like any other.
        if !load.is_done() || load.failure().is_some() {
            self.under_way.push_back(InFlightLayer {
                layer,
                cell,
                load: Arc::clone(&load),
                is_given: false,
            });
        }
        self.cells[cell].layer = Some(layer);
        self.of_layer.insert(layer, cell);
        self.cells[cell].load = Some(load);
    }

    /// Counts one more user of the layer in the cell, and returns its read.
    pub fn give(&mut self, cell: usize) -> Option<Arc<LayerRead>> {
        let load = self.cells[cell].load.clone()?;
        self.cells[cell].users += 1;
        let same = self
            .under_way
            .iter_mut()
            .find(|one| Arc::ptr_eq(&one.load, &load));
        if let Some(one) = same {
            one.is_given = true;
        }
        Some(load)
    }

    /// Looks at the reads that have ended. Those of one stream end in their order.
    pub fn look(&mut self) {
        while self.under_way.front().is_some_and(|one| one.load.is_done()) {
            let Some(one) = self.under_way.pop_front() else {
                return;
            };
            if one.load.failure().is_some() {
                self.failed(one.cell, &one.load);
                self.failures.push(FailedLayer {
                    layer: one.layer,
                    load: one.load,
                    is_given: one.is_given,
                });
            }
        }
    }

    /// Records that this read did not bring the layer into the cell.
    pub fn failed(&mut self, cell: usize, load: &Arc<LayerRead>) {
        let held = self.cells[cell].load.as_ref();
        if held.is_some_and(|held| Arc::ptr_eq(held, load)) {
            self.forget(cell);
        }
    }

    /// Takes the failure that a call for `layer` has to return: the failure of a layer that a caller already uses, or
    /// of this layer.
    pub fn take_failure(&mut self, layer: usize) -> Option<FailedLayer> {
        let place = self.failures.iter().position(|one| one.is_given);
        let place = place.or_else(|| self.failures.iter().position(|one| one.layer == layer))?;
        Some(self.failures.remove(place))
    }

    /// Returns the failure of a layer that was given out.
    pub fn take_given_failure(&mut self) -> Option<FailedLayer> {
        let place = self.failures.iter().position(|one| one.is_given)?;
        Some(self.failures.remove(place))
    }

    /// Drops the failure of this read, because a caller has received it.
    pub fn drop_failure(&mut self, load: &Arc<LayerRead>) {
        self.failures.retain(|one| !Arc::ptr_eq(&one.load, load));
    }

    /// True if the last read of `layer` failed, and no call has returned that error yet.
    pub fn has_failed(&self, layer: usize) -> bool {
        self.failures.iter().any(|one| one.layer == layer)
    }

    /// True if the number of reads in progress has reached the limit, so that none is started ahead.
    pub fn is_full(&self) -> bool {
        self.under_way.len() >= MOST_UNDER_WAY
    }

    /// Returns the oldest read if the limit is reached, so that a further read has to wait for it.
    pub fn oldest_of_full(&mut self) -> Option<Arc<LayerRead>> {
        self.look();
        let oldest = self.under_way.front().filter(|_| self.is_full());
        oldest.map(|one| Arc::clone(&one.load))
    }

    /// Returns the oldest read of a layer that a caller holds.
    pub fn first_given(&self) -> Option<Arc<LayerRead>> {
        let mut given = self.under_way.iter().filter(|one| one.is_given);
        given.next().map(|one| Arc::clone(&one.load))
    }

    /// Returns the reads of layers in cells, and those under way.
    pub fn loads(&self) -> Vec<Arc<LayerRead>> {
        let of_cells = self.cells.iter().filter_map(|cell| cell.load.clone());
        let under_way = self.under_way.iter().map(|one| Arc::clone(&one.load));
        of_cells.chain(under_way).collect()
    }
}
