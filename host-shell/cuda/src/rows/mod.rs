//! `out = table[ids]` and `table[ids] = rows`: rows from and to a drive by ids that lie in GPU memory, on the caller's
//! stream.
//!
//! The rule: while a kernel may wait for the drive, no thread of ours calls the GPU's driver. A launch returns at once;
//! a recovery closes a gate that every kernel passes, and waits for the kernels inside by polling memory that both
//! sides see (docs/adr/0008).
//!
//! - [`GpuRows`]: the queues, slots and kernel of one controller; [`StripedRows`]: the same of several controllers.
//! - [`RowTable`]: location and size of rows.
//! - [`PendingRows`]: a gather in progress.
//! - `streamed`: rows that the caller's kernel consumes while it reads them.
//! - `batched`: gathers and scatters of few rows, by queues that blocks own (docs/adr/0028). `halves`: such gathers as
//!   two launches, with other work between them (docs/adr/0029).
//! - `distinct`: gathers of many rows that read each distinct one once.
//! - `ranges`: reads of any length, many in one launch. `scatter`: rows that the GPU writes.
//! - `wide`: rows whose elements a second launch dequantises or upcasts.
//! - `board`, `state`: the words and the memory that launches and their recovery share.
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

mod batched;
mod begun_point;
mod board;
mod by_host;
mod cache;
mod counts;
mod distinct;
mod ended;
mod halves;
mod kernels;
mod map;
mod numbers;
mod parameters;
mod pending;
mod ranges;
mod records;
mod request;
mod scatter;
mod slot;
mod state;
mod streamed;
mod striped;
mod watch;
mod wide;

pub use begun_point::BegunPoint;
pub use board::RowFailures;
pub use by_host::{HostRows, MoveRows};
pub use cache::TableCache;
pub use counts::{MovedRows, RowCounts};
pub use halves::{BegunRows, GatherIds, GatherTarget};
pub use map::TableMap;
pub use pending::{GatherOutcome, LaunchSequence, PendingRows};
pub use request::{ReadList, ReadRange, RowDirection, RowRequest, RowTable};
pub(super) use state::RowsState;
pub use state::StoreLaunches;
pub use striped::StripedRows;

use super::data::GpuData;
use super::driver::Gpu;
use super::leftovers::{self, LaunchLeftover};
use super::lent::LentQueues;
use super::module::KernelFunction;
use super::tier::GpuAccess;
use kernels::RowKernels;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::nvm;
use nvme_driver::controller::Controller;
use nvme_driver::controller::session::UserFacts;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_driver::widen::{FailedContent, RowConversion};
use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::rows::{
    BLOCK_THREADS, BLOCK_WARPS, CachedBatched, CachedGather, GatherLaunch, STATION_BYTES,
    STATION_CELLS, WARP_BYTES, slot_bytes,
};
use parameters::LaunchParameters;
use slot::{LaunchSlot, Named};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use watch::LaunchWatch;
use wide::WideRows;

/// Entries of a queue that belongs to a station: room for a command of each thread.
const BATCH_ENTRIES: u32 = 512;

/// Options of a [`GpuRows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsOptions {
    /// Queue pairs that the GPU drives.
    pub queues: u32,
    /// Entries of each, rounded up to a power of two.
    pub entries: u32,
    /// Blocks of a launch that run at a time, each with 1 MiB of slot memory.
    pub stations: u32,
    /// Queue pairs in addition to `queues`, for launches of few rows: each belongs to a station, so that there are at
    /// most as many. A controller may grant fewer; without any, such launches use the shared queues.
    pub owned: u32,
    /// Largest number of bytes, of all rows, of such a launch: larger ones reach the link's rate by the shared queues,
    /// whose warps copy while others read.
    pub owned_bytes: u64,
}

impl RowsOptions {
    /// Returns these options, with at most as many queues for stations as `controller` has in addition to `queues` and
    /// `others`.
    pub fn within(self, controller: &Controller, others: u32) -> Self {
        let granted = controller.info().queue_pairs;
        let left = granted.saturating_sub(self.queues.saturating_add(others));
        Self {
            owned: self.owned.min(left),
            ..self
        }
    }
}

impl Default for RowsOptions {
    fn default() -> Self {
        Self {
            queues: 16,
            entries: 1024,
            stations: 32,
            owned: 16,
            owned_bytes: 192 << 10,
        }
    }
}

/// Queues, slots and kernels by which a GPU gathers rows from one namespace, and writes them.
pub struct GpuRows {
    watch: Option<LaunchWatch>,
    lent: Option<LentQueues>,
    /// Number of the last queues of `lent`: each belongs to a station.
    owned: u32,
    /// Largest number of bytes of a launch by these queues.
    owned_bytes: u64,
    /// Limit of the commands of a block: room in such a queue, and threads of a block.
    most_of_block: u32,
    state: Arc<RowsState>,
    slots: Option<GpuData>,
    kernels: Option<Arc<RowKernels>>,
    footing: Arc<UserFacts>,
    info: NamespaceInfo,
    max_transfer: u64,
    timeout: Duration,
}

impl GpuRows {
    /// Returns the launches of these rows, which can be asked for once they are dropped.
    pub fn launches(&self) -> StoreLaunches {
        StoreLaunches::of(&self.state)
    }

    /// Lends queues of `controller` to the GPU of `access` for rows of namespace `info`.
    ///
    /// # Errors
    /// As [`GpuQueuePairs::create`](super::GpuQueuePairs::create), and without memory.
    pub fn create(
        controller: &Controller,
        access: &Arc<GpuAccess>,
        info: NamespaceInfo,
        options: RowsOptions,
        timeout: Duration,
    ) -> Result<Self> {
        leftovers::reap();
        let gpu = access.gpu();
        let _guest = gpu.enter()?;
        let stations = options.stations.clamp(1, gpu.multiprocessors()?);
        let state = Arc::new(RowsState::new(gpu, stations, timeout)?);
        let bytes = stations as usize * STATION_BYTES as usize;
        let slots = access.slots(bytes)?;
        let kernels = Arc::new(RowKernels::load(gpu, &state.counts.last)?);
        let owned = options.owned.min(stations);
        let batch = BATCH_ENTRIES.min(options.entries);
        let lent = LentQueues::of_two_sizes(
            gpu,
            controller,
            access,
            [(options.queues, options.entries), (owned, batch)],
            Some(Arc::clone(&state) as _),
        )?;
        let footing = Arc::new(UserFacts::new(controller.session(), info));
        let _ = state.footing.set(Arc::downgrade(&footing));
        Ok(Self {
            watch: Some(LaunchWatch::start(&state, controller.session(), &footing)?),
            footing,
            lent: Some(lent),
            owned,
            owned_bytes: options.owned_bytes,
            // One entry of a ring stays empty.
            most_of_block: BLOCK_THREADS.min(batch.max(2).next_power_of_two() - 1),
            state,
            slots: Some(slots),
            kernels: Some(kernels),
            info,
            max_transfer: controller.max_transfer(),
            timeout,
        })
    }

    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.state.gpu
    }

    /// Registers and bytes of local memory of a thread of the kernel, as compiled for this GPU.
    ///
    /// # Errors
    /// As [`Module::cost`](crate::Module::cost).
    pub fn cost(&self) -> Result<(u32, u32)> {
        self.kernels.as_ref().map_or(Ok((0, 0)), |of| of.cost())
    }

    /// Checks that `table` lies inside the namespace.
    fn check_inside(&self, table: &RowTable) -> Result<()> {
        let row = u64::from(table.row_bytes);
        let end = table
            .rows
            .checked_mul(row)
            .and_then(|bytes| bytes.checked_add(table.first_byte));
        let size = self.info.blocks * u64::from(self.info.block_bytes);
        if row == 0 || end.is_none_or(|end| end > size) {
            return Err(Error::usage(
                format!(
                    "{} rows of {row} bytes from byte {} on do not lie inside the {size} bytes of namespace {}",
                    table.rows, table.first_byte, self.info.nsid
                ),
                "check offset, rows and row size",
            ));
        }
        Ok(())
    }

    /// Checks that `table` lies inside the namespace and that its rows fit into slots.
    ///
    /// # Errors
    /// [`Error::Usage`] otherwise.
    pub fn check(&self, table: &RowTable) -> Result<()> {
        self.check_inside(table)?;
        self.check_fits(table)
    }

    fn check_fits(&self, table: &RowTable) -> Result<()> {
        let row = u64::from(table.row_bytes);
        if !self.fits(table) {
            let (slot, most) = (self.slot_bytes(table), self.most_bytes());
            return Err(Error::usage(
                format!(
                    "rows of {row} bytes lie in {slot} bytes of blocks, and a read moves {most} at most"
                ),
                "use smaller rows, or read them as several",
            ));
        }
        Ok(())
    }

    /// True if a slot holds a row of `table`.
    pub fn fits(&self, table: &RowTable) -> bool {
        self.slot_bytes(table) <= self.most_bytes()
    }

    fn most_bytes(&self) -> u64 {
        WARP_BYTES.min(self.max_transfer)
    }

    /// Does the same as [`check`](Self::check), of a table in the ranges of `map`, which the store has checked.
    fn check_mapped(&self, table: &RowTable, map: Option<&TableMap>) -> Result<()> {
        match map {
            Some(_) => self.check_fits(table),
            None => self.check(table),
        }
    }

    fn slot_bytes(&self, table: &RowTable) -> u64 {
        slot_bytes(
            table.first_byte,
            table.row_bytes,
            self.info.block_bytes.trailing_zeros(),
        )
    }

    /// Enqueues a gather in `stream`, a `CUstream` of this GPU (0 is the default one). Returns before it runs.
    /// The caller's context and capture mode are preserved; the stream may be captured.
    ///
    /// # Safety
    /// The addresses in `request` are valid on the GPU for what it says until the gather has ended, and for as
    /// long as a graph that captured it may be launched.
    ///
    /// # Errors
    /// As [`check`](Self::check); [`Error::Environment`] with the driver's answer, or with too many under way.
    pub unsafe fn gather(
        &self,
        table: &RowTable,
        request: &RowRequest,
        ways: GatherOptions<'_>,
        stream: u64,
    ) -> Result<PendingRows> {
        self.check_mapped(table, ways.map)?;
        let request = &request.judged_for_gather(self.gpu(), table, ways.widen, stream)?;
        let conversion = WideRows::judged(ways.widen, self.gpu(), stream)?;
        let wide = WideRows::new(table, request, conversion)?;
        let launch = self.launch(table, &wide.stored).ok_or_else(closed)?;
        let launch = GatherLaunch {
            failed_as: wide.failed_as(ways.failed),
            ..launch
        };
        if let Some(distinct) = self.distinct(&launch, ways) {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            return unsafe { self.gather_distinct(distinct, &wide, ways.map, stream) };
        }
        let named = TableMap::named(ways.map, ways.cache.and_then(TableCache::named));
        if let Some(widened) = self.converting(table, &wide, (&launch, ways)) {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            return unsafe { self.gather_converting(widened, (ways.map, named), stream) };
        }
        // SAFETY: the caller keeps the conditions; each of the three kernels stores all rows where the request wants
        // them.
        unsafe {
            self.widened(&wide, stream, |slot| {
                let slot = slot
                    .moving_rows_of(&launch)
                    .through_cache(ways.cache.is_some());
                self.start(launch, (slot, named), stream, |kernels, launch, blocks| {
                    // SAFETY: the caller vouches for the request's addresses, the others are ours until the gate is
                    // shut for good and nothing is inside.
                    self.put_gather(kernels, (launch, blocks), ways, stream)
                })
            })
        }
    }

    /// Enqueues the kernel that gathers `launch` in `stream`, with `blocks` blocks: through the cache of `ways`, by
    /// queues that blocks own, or by shared ones. Counts the last two.
    ///
    /// # Safety
    /// As [`gather`](Self::gather).
    unsafe fn put_gather(
        &self,
        kernels: &RowKernels,
        (launch, blocks): (GatherLaunch, u32),
        ways: GatherOptions<'_>,
        stream: u64,
    ) -> Result<()> {
        let counts = &self.state.counts;
        if let Some(cache) = ways.cache {
            let cache = cache.words();
            if let Some((batched, shape)) = self.batched_cached(&launch, ways.map) {
                counts.owned.fetch_add(1, Ordering::Relaxed);
                let size = (shape.blocks, shape.threads);
                let cached = CachedBatched { batched, cache };
                let kernel = kernels.gather_batched_cached;
                let mapped = |map: &TableMap| map.kernels.gather_batched_cached;
                // SAFETY: the kernels take one `CachedBatched`, or one with a map; the caller vouches for its addresses.
                return unsafe {
                    put_one(kernels, (kernel, mapped), (size, ways.map), cached, stream)
                };
            }
            counts.shared.fetch_add(1, Ordering::Relaxed);
            let cached = CachedGather {
                gather: launch,
                cache,
            };
            let kernel = kernels.gather_cached;
            let mapped = |map: &TableMap| map.kernels.gather_cached;
            let size = (blocks, BLOCK_THREADS);
            // SAFETY: the kernels take one `CachedGather`, or one with a map; the caller vouches for its addresses.
            return unsafe { put_one(kernels, (kernel, mapped), (size, ways.map), cached, stream) };
        }
        if let Some((batched, shape)) = self.batched(&launch, ways.map) {
            counts.owned.fetch_add(1, Ordering::Relaxed);
            let size = (shape.blocks, shape.threads);
            let kernel = kernels.gather_batched;
            let mapped = |map: &TableMap| map.kernels.gather_batched;
            // SAFETY: the kernels take one `Batched`, or one with a map; the caller vouches for its addresses.
            return unsafe {
                put_one(kernels, (kernel, mapped), (size, ways.map), batched, stream)
            };
        }
        counts.shared.fetch_add(1, Ordering::Relaxed);
        let mapped = |map: &TableMap| map.kernels.gather;
        let size = (blocks, BLOCK_THREADS);
        // SAFETY: the kernels take one `GatherLaunch`, or one with a map; the caller vouches for its addresses.
        unsafe {
            put_one(
                kernels,
                (kernels.gather, mapped),
                (size, ways.map),
                launch,
                stream,
            )
        }
    }

    /// Enqueues a gather in `stream` by `gather`, and the second launch for the rows of `wide`, if there is one: both
    /// as one operation.
    ///
    /// # Safety
    /// The conditions are those of [`gather`](Self::gather); in addition, `gather` stores all rows where the request
    /// wants them.
    unsafe fn widened(
        &self,
        wide: &WideRows,
        stream: u64,
        gather: impl FnOnce(LaunchSlot) -> Result<PendingRows>,
    ) -> Result<PendingRows> {
        if wide.launch().is_none() {
            return gather(self.slot()?);
        }
        let [first, second] = self.slots()?;
        let kernels = self.kernels.as_ref().ok_or_else(closed)?;
        LaunchSequence::run(self.gpu(), stream, |sequence| {
            sequence.add(gather(first)?, 0);
            // SAFETY: the caller keeps the conditions under `# Safety`.
            sequence.add(unsafe { wide.put(kernels, (second, None), stream) }?, 0);
            Ok(())
        })
    }

    /// Reserves numbers for N launches of one operation: all of them, or none.
    ///
    /// # Errors
    /// [`Error::Environment`] with too many under way.
    fn slots<const N: usize>(&self) -> Result<[LaunchSlot; N]> {
        let slots = self.state.reserve(N)?;
        slots
            .try_into()
            .map_err(|_| Error::internal("another number of launches was reserved"))
    }

    fn slot(&self) -> Result<LaunchSlot> {
        let [slot] = self.slots()?;
        Ok(slot)
    }

    /// Enqueues `launch` in `stream` by `put`, which receives it with the summary words of its number and the number of
    /// blocks. Until the launch has ended, or for as long as a graph may run it, `named` is kept alive.
    fn start(
        &self,
        launch: GatherLaunch,
        (slot, named): (LaunchSlot, Named),
        stream: u64,
        put: impl FnOnce(&RowKernels, GatherLaunch, u32) -> Result<()>,
    ) -> Result<PendingRows> {
        let kernels = self.kernels.as_ref().ok_or_else(closed)?;
        if launch.count == 0 {
            return Ok(PendingRows::nothing());
        }
        self.check_current(nvm::opcode::READ)?;
        let chunks = launch.count.div_ceil(u64::from(launch.lanes));
        let blocks = chunks.div_ceil(u64::from(BLOCK_WARPS));
        let blocks = blocks.min(u64::from(launch.station_count)) as u32;
        let slot = slot.put(launch, (kernels, named), stream, |launch| {
            put(kernels, launch, blocks)
        })?;
        Ok(PendingRows::of_kernel(slot))
    }

    /// Checks that the namespace still has the properties that launches are made for; `opcode` is that of their
    /// commands.
    ///
    /// # Errors
    /// [`Error::Changed`] when it is not.
    fn check_current(&self, opcode: u8) -> Result<()> {
        self.footing.check(opcode)
    }

    /// Allocates GPU memory for a cache of `bytes` bytes of rows of `table`, which lies in the ranges of `map` if there is
    /// one.
    ///
    /// # Errors
    /// [`Error::Usage`] for less than a set of lines, [`Error::Environment`] without memory.
    pub fn cache(
        &self,
        table: &RowTable,
        map: Option<&TableMap>,
        bytes: u64,
    ) -> Result<TableCache> {
        self.check_mapped(table, map)?;
        TableCache::new(&self.state, table, bytes)
    }

    /// Returns a launch through which a caller's kernel reads rows of `table`: see `nvme_gpu_kernel`'s `TableRows`. It
    /// can be passed to kernels until the store is closed; kernels that run then, or later, receive no rows any more.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn device_rows(&self, table: &RowTable) -> Result<GatherLaunch> {
        self.check(table)?;
        let request = RowRequest {
            ids: 0,
            wide_ids: true,
            count: 0,
            out: 0,
            out_stride: 0,
            status: 0,
        };
        // The end of the caller's kernels cannot be seen, so that the memory is kept for good.
        self.state.is_kept.store(true, Ordering::Release);
        self.check_current(nvm::opcode::READ)?;
        self.launch(table, &request).ok_or_else(closed)
    }

    /// Returns the number of ended launches with numbers of scatters: it changes after each scatter.
    pub fn writes_ended(&self) -> u64 {
        self.state.scatters_ended()
    }

    /// Calls `report` with the counts of launches a few times a second, from a separate thread, until this is dropped.
    /// `report` replaces an earlier function, and calls none of the functions here. Calls follow one another.
    pub fn report_to(&self, report: impl FnMut(&RowCounts) + Send + 'static) {
        *lock(&self.state.counts.report) = Some(Box::new(report));
    }

    /// Calls the function of [`report_to`](Self::report_to) with the counts as they are now.
    pub fn report_counts(&self) {
        self.state.report_counts();
    }

    /// Counts a write of the host that has ended.
    pub fn wrote(&self) {
        self.state.memory.board.wrote();
    }

    /// Returns the launch without the parts that are specific to one call.
    fn launch(&self, table: &RowTable, request: &RowRequest) -> Option<GatherLaunch> {
        let (lent, slots) = (self.lent.as_ref()?, self.slots.as_ref()?);
        let common = LaunchParameters {
            slot: self.slot_bytes(table),
            max_transfer: self.max_transfer,
            timeout: self.timeout,
            block_shift: self.info.block_bytes.trailing_zeros(),
            stations: self.state.stations,
        };
        Some(GatherLaunch {
            queues: self.queues(lent),
            gate: self.state.memory.board.gate_address(),
            stations: self.state.memory.free.address(),
            slots: slots.address(),
            slots_iova: slots.iova().0,
            nsid: self.info.nsid.0,
            ..common.gather(table, request)
        })
    }

    /// Returns the queues that are lent, with a result cell for each row of each station.
    fn queues(&self, lent: &LentQueues) -> QueueArray {
        QueueArray {
            queues: lent.set.address(),
            cells: self.state.memory.cells.address(),
            queue_count: lent.set.len() as u32 - self.owned,
            cell_count: self.state.stations * STATION_CELLS,
        }
    }
}

/// Enqueues blocks and threads of `size` of the first kernel, or of the second one, which takes `map` behind the launch.
///
/// # Safety
/// The kernels take one `T`, whose addresses are valid for them.
///
/// # Errors
/// As [`RowKernels::launch_of`].
unsafe fn put_one<T: Copy>(
    kernels: &RowKernels,
    (kernel, mapped): (KernelFunction, impl Fn(&TableMap) -> KernelFunction),
    (size, map): ((u32, u32), Option<&TableMap>),
    launch: T,
    stream: u64,
) -> Result<()> {
    // SAFETY: the caller keeps the conditions under `# Safety`.
    unsafe {
        match map {
            Some(map) => kernels.launch_of(stream, mapped(map), size, &map.launch(launch)),
            None => kernels.launch_of(stream, kernel, size, &launch),
        }
    }
}

fn closed() -> Error {
    Error::Gone {
        cause: "the store was closed".to_owned(),
    }
}

/// Options of a gather.
#[derive(Clone, Copy, Default)]
pub struct GatherOptions<'a> {
    /// Rows that were read not long ago are taken from there.
    pub cache: Option<&'a TableCache>,
    /// Rows whose elements are converted to a wider format.
    pub widen: Option<&'a RowConversion>,
    /// Ranges of a table that lies in several. The store has checked them; the table's first byte is the map's
    /// [`bits`](TableMap::bits).
    pub map: Option<&'a TableMap>,
    /// Content of rows that cannot be read.
    pub failed: FailedContent,
}

impl Drop for GpuRows {
    fn drop(&mut self) {
        drop(self.watch.take());
        // Launches may outlive the store, and its counters do not.
        drop(lock(&self.state.counts.report).take());
        let is_idle = self.state.end();
        self.state.judge();
        if !is_idle {
            // A kernel may still use the queues and the slots, so they are leaked.
            std::mem::forget(self.lent.take());
            std::mem::forget(self.slots.take());
        }
        if !is_idle || !self.state.is_over() {
            // A launch that its stream has not reached refers to its kernel and its summary words, and a kernel
            // that does not end refers to everything. Besides, freeing GPU memory here would wait for that
            // stream.
            leftovers::keep(Box::new(RowsLeft {
                state: Arc::clone(&self.state),
                _kernels: self.kernels.take(),
            }));
        }
        leftovers::reap();
    }
}

/// Objects that launches of a closed store may still use.
struct RowsLeft {
    state: Arc<RowsState>,
    _kernels: Option<Arc<RowKernels>>,
}

impl LaunchLeftover for RowsLeft {
    fn is_over(&self) -> bool {
        self.state.is_over()
    }
}
