//! Gathers in halves: one launch submits the reads and leaves the GPU, a second one copies the rows (docs/adr/0029).
//!
//! Between the two launches a gather holds stations, and no block of it is on the GPU. If it is dropped before its
//! second launch, another launch in another stream returns the stations.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::super::captured::keep_with_graph;
use super::super::leftovers::{self, LaunchLeftover};
use super::super::pointer::KernelArgument;
use super::super::stream::Stream;
use super::batched::{LEAST_SHIFT, OwnedShape, held_stations};
use super::begun_point::BegunPoint;
use super::kernels::RowKernels;
use super::pending::{LaunchSequence, PendingRows};
use super::records::RecordMemory;
use super::request::{RowRequest, RowTable};
use super::slot::{LaunchSlot, Named};
use super::state::RowsState;
use super::wide::WideRows;
use super::{GpuRows, TableMap, closed};
use nvme_core::spec::nvm;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_driver::widen::{FailedContent, RowConversion};
use nvme_gpu_kernel::rows::{Batched, GatherLaunch, HalvedGather, RECORD_BYTES};
use nvme_gpu_kernel::wide_batch::{BatchWidening, WidenedLaunch};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Ids of the rows of a gather in halves.
#[derive(Clone, Copy, Debug)]
pub struct GatherIds {
    /// Address on the GPU of `count` ids, `i64` when `wide_ids`, else `i32`. 0 means rows 0, 1, 2 and so on.
    pub ids: u64,
    /// True if ids are `i64`.
    pub wide_ids: bool,
    /// Number of ids.
    pub count: u64,
}

/// Addresses on the GPU at which the second half stores rows and row status.
#[derive(Clone, Copy, Debug)]
pub struct GatherTarget {
    /// Address of the first row.
    pub out: u64,
    /// Bytes from one row to the next there.
    pub out_stride: u64,
    /// Address of an `i32` for each row, which receives its status, or 0.
    pub status: u64,
}

/// Rows whose reads were submitted, or will be by a graph.
#[must_use = "the rows come with the second half"]
pub struct BegunRows {
    halves: Arc<GatherHalves>,
}

/// The two launches of a gather. The handle owns it, and so does the graph of a captured gather: when the last owner
/// drops it, the stations are returned.
struct GatherHalves {
    state: Arc<RowsState>,
    kernels: Arc<RowKernels>,
    record: Arc<RecordMemory>,
    /// Ranges of a table in several, which both launches use.
    map: Option<Arc<TableMap>>,
    /// Content of rows that cannot be read.
    failed: FailedContent,
    halved: HalvedGather,
    shape: OwnedShape,
    point: BegunPoint,
    second: Mutex<SecondHalf>,
    /// The first launch is in its stream, or in a graph.
    is_begun: AtomicBool,
}

/// State of the second launch.
enum SecondHalf {
    /// It is to come, and has its number.
    Numbered(LaunchSlot),
    /// It is to come: a launch was refused, and so was another number afterwards.
    Unnumbered,
    /// It is in a stream.
    Launched,
}

/// Work of the second launch.
#[derive(Clone, Copy)]
enum SecondLaunch {
    /// Copies the rows, converted as this says.
    Copies(Option<BatchWidening>),
    /// Frees the stations alone.
    Drops,
}

/// A gather in halves, as the graph keeps it in which its first launch was captured.
struct HalvesOfGraph(#[expect(dead_code, reason = "held for its drop")] Arc<GatherHalves>);

impl LaunchLeftover for HalvesOfGraph {}

impl GpuRows {
    /// Begins a gather in `stream`, a `CUstream` of this GPU: its launch submits the reads, and leaves the GPU. Returns
    /// `None`, with nothing in the stream, if no queue of a block can be held for the rows: without such queues, for
    /// more bytes or rows than their limits, and for rows that are not in units of 4 bytes. Rows that cannot be read
    /// become `failed`.
    ///
    /// # Safety
    /// The ids are valid on the GPU until the launch has ended, and for as long as a graph that captured it may be launched.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub unsafe fn begin(
        &self,
        table: &RowTable,
        map: Option<&Arc<TableMap>>,
        failed: FailedContent,
        ids: &GatherIds,
        stream: u64,
    ) -> Result<Option<BegunRows>> {
        let map = map.cloned();
        self.check_mapped(table, map.as_deref())?;
        let width = if ids.wide_ids { 8 } else { 4 };
        let count = if ids.ids == 0 { 0 } else { ids.count };
        let argument = KernelArgument::read("ids", ids.ids, count, width);
        let [address] = self.gpu().judge_all(stream, [argument])?;
        let request = RowRequest {
            ids: address,
            wide_ids: ids.wide_ids,
            count: ids.count,
            out: 0,
            out_stride: table.row_bytes.into(),
            status: 0,
        };
        let launch = self.launch(table, &request).ok_or_else(closed)?;
        let Some((batched, shape)) = self.halved(&launch, map.as_deref()) else {
            return Ok(None);
        };
        self.check_current(nvm::opcode::READ)?;
        let halves = Arc::new(self.halves((batched, shape), (map, failed), stream)?);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { halves.begin(stream) }?;
        self.state.counts.begun.fetch_add(1, Ordering::Relaxed);
        Ok(Some(BegunRows { halves }))
    }

    /// Reserves the numbers and the memory of the two launches.
    fn halves(
        &self,
        (batched, shape): (Batched, OwnedShape),
        (map, failed): (Option<Arc<TableMap>>, FailedContent),
        stream: u64,
    ) -> Result<GatherHalves> {
        let state = &self.state;
        let kernels = self.kernels.as_ref().ok_or_else(closed)?;
        // The records have the same length in each gather, so that the next gather finds its own where this one leaves
        // zeros.
        let ids_at = u64::from(self.owned) * RECORD_BYTES;
        let bytes = ids_at + batched.gather.count * 8;
        let second = self.slot()?;
        let record = state.records.take(&state.gpu, bytes as usize)?;
        let halved = HalvedGather {
            batched,
            records: record.address(),
            kept_ids: record.address() + ids_at,
            late_rows: state.memory.board.late_rows_address(),
            held_stations: held_stations(self.owned),
            is_dropped: 0,
        };
        Ok(GatherHalves {
            state: Arc::clone(state),
            kernels: Arc::clone(kernels),
            record: Arc::new(record),
            map,
            failed,
            halved,
            shape,
            point: BegunPoint::new(&state.gpu, stream)?,
            second: Mutex::new(SecondHalf::Numbered(second)),
            is_begun: AtomicBool::new(false),
        })
    }
}

impl BegunRows {
    /// Finishes the gather in `stream`, a `CUstream` of its GPU, after the first half, also if that is in another
    /// stream: waits for the reads, copies the rows to `target`, converted as `widen` says, and frees the stations.
    /// Returns before it runs. A read's deadline counts from the time when it was submitted. After a recovery between
    /// the halves each row is zero with status [`GONE`](nvme_gpu_kernel::rows::code::GONE).
    ///
    /// # Safety
    /// The addresses in `target` are valid on the GPU for all rows until the gather has ended, and for as long as a graph
    /// that captured it may be launched.
    ///
    /// # Errors
    /// [`Error::Usage`] for a gather that was finished before, for an output whose stored rows would not lie in units of 4
    /// bytes, as [`GpuRows::gather`] and as [`BegunPoint::order`]; [`Error::Environment`] with the driver's answer. The gather can be finished still, except for
    /// the first of these.
    pub unsafe fn finish(
        &mut self,
        target: &GatherTarget,
        widen: Option<&RowConversion>,
        stream: u64,
    ) -> Result<PendingRows> {
        let halves = &*self.halves;
        let gather = &halves.halved.batched.gather;
        let mut second = lock(&halves.second);
        if matches!(*second, SecondHalf::Launched) {
            return Err(BegunPoint::finished_twice());
        }
        let gpu = &halves.state.gpu;
        let (wide, after) = halves.wide(target, widen, stream)?;
        let widening = wide.by_gather();
        let request = RowRequest {
            out: widening.map_or(wide.stored.out, |widening| widening.out),
            ..wide.stored
        };
        let of_out = (request.out | request.out_stride).trailing_zeros();
        if of_out < LEAST_SHIFT {
            return Err(Error::usage(
                format!(
                    "rows that were begun go to multiples of 4 bytes: those at {:#x} are {} bytes apart",
                    request.out, request.out_stride
                ),
                "align the output, or gather the rows by one call",
            ));
        }
        halves.point.order(stream)?;
        let slot = match std::mem::replace(&mut *second, SecondHalf::Unnumbered) {
            SecondHalf::Numbered(slot) => slot,
            _ => halves.state.reserve(1)?.pop().ok_or_else(closed)?,
        };
        let launch = GatherLaunch {
            out: request.out,
            out_stride: request.out_stride,
            status: request.status,
            failed_as: wide.failed_as(halves.failed),
            unit_shift: gather.unit_shift.min(of_out),
            ..*gather
        };
        let slot = slot.moving_rows_of(&launch);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        let put = unsafe { halves.put(slot, launch, SecondLaunch::Copies(widening), stream) };
        *second = match put {
            Ok(_) => SecondHalf::Launched,
            Err(_) => halves.next_number(),
        };
        let finished = PendingRows::of_kernel(put?);
        let Some(after) = after else {
            return Ok(finished);
        };
        LaunchSequence::run(gpu, stream, |sequence| {
            sequence.add(finished, 0);
            let named: Named = Some(Arc::clone(&halves.record) as _);
            // SAFETY: the caller's; the ids are in the record, which stays.
            sequence.add(
                unsafe { wide.put(&halves.kernels, (after, named), stream) }?,
                0,
            );
            Ok(())
        })
    }

    /// Drops the rows. Returns the launch that returns the stations; once it has ended, nothing uses the ids. If the
    /// gather is captured, its graph returns the stations when it is destroyed.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn cancel(self) -> Result<PendingRows> {
        if self.halves.point.is_captured() {
            return Ok(PendingRows::nothing());
        }
        match self.halves.cancel() {
            Some(given_back) => given_back.map(PendingRows::of_kernel),
            None => Ok(PendingRows::nothing()),
        }
    }

    /// True if it was finished.
    pub fn is_finished(&self) -> bool {
        matches!(*lock(&self.halves.second), SecondHalf::Launched)
    }
}

impl GatherHalves {
    /// Plans the rows of `target`, which it checks, with the number of one more launch if they are converted.
    fn wide(
        &self,
        target: &GatherTarget,
        widen: Option<&RowConversion>,
        stream: u64,
    ) -> Result<(WideRows, Option<LaunchSlot>)> {
        let gather = &self.halved.batched.gather;
        let table = RowTable {
            first_byte: gather.first_byte,
            rows: gather.rows,
            row_bytes: gather.row_bytes,
        };
        let request = RowRequest {
            ids: 0,
            wide_ids: true,
            count: gather.count,
            out: target.out,
            out_stride: target.out_stride,
            status: target.status,
        };
        let gpu = &self.state.gpu;
        // The ids are those that the first launch has copied: the caller may have overwritten its memory since.
        let request = RowRequest {
            ids: self.halved.kept_ids,
            ..request.judged_for_gather(gpu, &table, widen, stream)?
        };
        let wide = WideRows::new(&table, &request, WideRows::judged(widen, gpu, stream)?)?;
        let after = match wide.launch() {
            Some(_) if wide.by_gather().is_none() => self.state.reserve(1)?.pop(),
            _ => None,
        };
        Ok((wide, after))
    }

    /// Puts the first launch into `stream`.
    ///
    /// # Safety
    /// As [`GpuRows::begin`].
    unsafe fn begin(self: &Arc<Self>, stream: u64) -> Result<()> {
        let _guest = self.state.gpu.enter()?;
        if self.point.is_captured() {
            keep_with_graph(stream, Box::new(HalvesOfGraph(Arc::clone(self))))?;
        }
        // Blocks of different gathers begin their search at different stations.
        let number = match &*lock(&self.second) {
            SecondHalf::Numbered(slot) => slot.number(),
            _ => 0,
        };
        let gather = GatherLaunch {
            summary: self.state.memory.board.summary_address(number),
            ..self.halved.batched.gather
        };
        let halved = self.halved_of(gather, false);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.launch_first(stream, &halved) }?;
        // If the event is not recorded, no second launch can be ordered after this one. The stations stay taken, and
        // the record is leaked, because the GPU may still write it.
        let recorded = self.point.record();
        match &recorded {
            Ok(()) => self.is_begun.store(true, Ordering::Release),
            Err(_) => std::mem::forget(Arc::clone(&self.record)),
        }
        recorded
    }

    fn halved_of(&self, gather: GatherLaunch, is_dropped: bool) -> HalvedGather {
        HalvedGather {
            batched: Batched {
                gather,
                ..self.halved.batched
            },
            is_dropped: is_dropped.into(),
            ..self.halved
        }
    }

    /// Enqueues the second launch in `stream`, as launch `slot`.
    ///
    /// # Safety
    /// As [`BegunRows::finish`], for the addresses in `launch`.
    unsafe fn put(
        &self,
        slot: LaunchSlot,
        launch: GatherLaunch,
        second: SecondLaunch,
        stream: u64,
    ) -> Result<Arc<LaunchSlot>> {
        let named = TableMap::named(self.map.as_deref(), Some(Arc::clone(&self.record) as _));
        slot.put(launch, (&self.kernels, named), stream, |gather| {
            let is_dropped = matches!(second, SecondLaunch::Drops);
            let launch = self.halved_of(gather, is_dropped);
            let widening = match second {
                SecondLaunch::Copies(Some(widening)) => widening,
                // SAFETY: the caller keeps the conditions under `# Safety`.
                _ => return unsafe { self.launch_second(stream, &launch) },
            };
            // SAFETY: the caller keeps the conditions under `# Safety`.
            unsafe { self.launch_widened(stream, &WidenedLaunch { launch, widening }) }
        })
    }

    /// # Safety
    /// The addresses in `halved` are valid as that says.
    unsafe fn launch_first(&self, stream: u64, halved: &HalvedGather) -> Result<()> {
        let (size, kernels) = ((self.shape.blocks, self.shape.threads), &self.kernels);
        // SAFETY: the kernels take one `HalvedGather`, or one with a map; the caller vouches for its addresses.
        unsafe {
            match &self.map {
                Some(map) => {
                    let kernel = map.kernels.begin_batched;
                    kernels.launch_of(stream, kernel, size, &map.launch(*halved))
                }
                None => kernels.launch_of(stream, kernels.begin_batched, size, halved),
            }
        }
    }

    /// # Safety
    /// The addresses in `halved` are valid as that says.
    unsafe fn launch_second(&self, stream: u64, halved: &HalvedGather) -> Result<()> {
        let (size, kernels) = ((self.shape.blocks, self.shape.threads), &self.kernels);
        // SAFETY: the kernels take one `HalvedGather`, or one with a map; the caller vouches for its addresses.
        unsafe {
            match &self.map {
                Some(map) => {
                    let kernel = map.kernels.finish_batched;
                    kernels.launch_of(stream, kernel, size, &map.launch(*halved))
                }
                None => kernels.launch_of(stream, kernels.finish_batched, size, halved),
            }
        }
    }

    /// # Safety
    /// The addresses in `widened` are valid as that says.
    unsafe fn launch_widened(
        &self,
        stream: u64,
        widened: &WidenedLaunch<HalvedGather>,
    ) -> Result<()> {
        let (size, kernels) = ((self.shape.blocks, self.shape.threads), &self.kernels);
        // SAFETY: the kernels take one `WidenedLaunch`, or one with a map; the caller vouches for its addresses.
        unsafe {
            match &self.map {
                Some(map) => {
                    let kernel = map.kernels.finish_batched_wide;
                    kernels.launch_of(stream, kernel, size, &map.launch(*widened))
                }
                None => kernels.launch_of(stream, kernels.finish_batched_wide, size, widened),
            }
        }
    }

    /// Returns the state after a second launch that was refused.
    fn next_number(&self) -> SecondHalf {
        let slot = self.state.reserve(1).ok().and_then(|mut slots| slots.pop());
        slot.map_or(SecondHalf::Unnumbered, SecondHalf::Numbered)
    }

    /// Frees the resources of a gather that was begun and not finished, or that is in a graph.
    fn cancel(&self) -> Option<Result<Arc<LaunchSlot>>> {
        let second = std::mem::replace(&mut *lock(&self.second), SecondHalf::Launched);
        let is_left = !matches!(second, SecondHalf::Launched) || self.point.is_captured();
        if !is_left || !self.is_begun.load(Ordering::Acquire) {
            return None;
        }
        let given_back = self.give_back(second);
        if given_back.is_err() {
            // The driver takes no launches any more. Those before may still use the memory.
            std::mem::forget(Arc::clone(&self.record));
        }
        Some(given_back)
    }

    /// Puts a launch into another stream, which waits for the reads, and frees the stations.
    fn give_back(&self, second: SecondHalf) -> Result<Arc<LaunchSlot>> {
        let slot = match second {
            SecondHalf::Numbered(slot) => slot,
            _ => self.state.reserve(1)?.pop().ok_or_else(closed)?,
        };
        let stream = Stream::new(&self.state.gpu)?;
        self.point.before(stream.handle())?;
        let gather = self.halved.batched.gather;
        // SAFETY: no rows are stored; the other addresses belong to this gather until the launch has ended.
        unsafe { self.put(slot, gather, SecondLaunch::Drops, stream.handle()) }
    }
}

impl Drop for GatherHalves {
    fn drop(&mut self) {
        if let Some(Ok(slot)) = self.cancel() {
            leftovers::keep(Box::new(GivenBack(slot)));
        }
    }
}

/// A launch that frees stations, with the words that it uses, because its store may have been closed.
struct GivenBack(Arc<LaunchSlot>);

impl LaunchLeftover for GivenBack {
    fn is_over(&self) -> bool {
        self.0.ended() != 0
    }
}
