//! Gathers from several striped drives, whose reads the GPU submits to all of them: by shared queues, with a station of
//! every drive for each block ([`members`]); and of few rows by queues that blocks own, with a drive for each block.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::batched;
use super::map::{OneRange, RowMap};
use super::members::{self, StripeMembers};
use super::warp::GatherWarp;
use crate::QueueArray;
use crate::arch;
use crate::extents::RowSpan;
use crate::gate::AdmissionGate;
use crate::groups::WholeBlock;
use crate::launch::{self, WarpFailures};
use crate::launch_end;
use crate::rows::{
    BLOCK_WARPS, Batched, BatchedStripes, GatherLaunch, STATION_CELLS, StripedGather,
    StripedMember, WARP_BYTES, code,
};
use crate::station::{self, NO_STATION};
use nvme_core::group::ThreadGroup;
use nvme_core::handoff::QueueWords;
use nvme_core::stripes::StripeLayout;

entry! {
    #[cfg(feature = "rows")]
    /// Gathers rows of several striped drives.
    ///
    /// # Safety
    /// As `nvme_gather`; the members are valid as [`StripedGather`] documents.
    pub unsafe fn nvme_gather_striped(rows: StripedGather) {
        gather_striped(&rows, OneRange, (rows.gather.count, AllRows));
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Gathers rows of several striped drives by queues that its blocks own. Blocks for all rows on each drive, as
    /// [`BatchedStripes`] says; threads as of `nvme_gather_batched`.
    ///
    /// # Safety
    /// As [`nvme_gather_striped`]; only blocks at their stations use the queues behind those that are shared.
    pub unsafe fn nvme_gather_batched_striped(launch: BatchedStripes) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather_batched(&launch, OneRange) }
    }
}

/// # Safety
/// As [`nvme_gather_batched_striped`]; the ranges of the table are valid as [`ExtentMap`](crate::extents::ExtentMap)
/// documents.
#[inline(always)]
pub(super) unsafe fn gather_batched<M: RowMap>(launch: &BatchedStripes, map: M) {
    let striped = &launch.striped;
    let count = striped.member_count;
    let Some(chunk) = arch::block().checked_div(count) else {
        return;
    };
    let number = arch::block() - chunk * count;
    let stripes = StripeLayout::shifted(striped.stripe_shift, count);
    let (Some(stripes), Some(of)) = (stripes, members::member(striped, number)) else {
        return;
    };
    let shared = u64::from(of.queues.queue_count) * size_of::<QueueWords>() as u64;
    let batched = Batched {
        gather: GatherLaunch {
            gate: of.gate,
            slots: of.slots,
            slots_iova: of.slots_iova,
            nsid: of.nsid,
            block_shift: of.block_shift,
            ..striped.gather
        },
        owned: QueueArray {
            queues: of.queues.queues + shared,
            cells: 0,
            queue_count: launch.owned,
            cell_count: 0,
        },
        rows_of_block: launch.rows_of_block,
        reserved: 0,
    };
    let map = StripedMap {
        map,
        stripes,
        member: (number, of),
    };
    let claim = |gate: &AdmissionGate<'_>| members::claim(striped, (of, launch.owned), gate);
    // SAFETY: the caller keeps the conditions under `# Safety`.
    if let Some((work, rows, id)) = unsafe { batched::enter_by(&batched, (map, chunk), claim) } {
        work.gather(rows, id);
    }
}

/// The rows of a striped table that lie on one drive.
#[derive(Clone, Copy)]
struct StripedMap<'r, M> {
    /// The place of the table in the stripes.
    map: M,
    stripes: StripeLayout,
    member: (u32, &'r StripedMember),
}

impl<M> StripedMap<'_, M> {
    /// Returns `span` of the stripes as blocks of the drive, if it lies there.
    #[inline(always)]
    fn on_member(&self, rows: &GatherLaunch, span: RowSpan) -> Option<RowSpan> {
        let spot = self.stripes.spot(span.place.byte);
        let place = rows.blocks_of(spot.offset, span.bytes);
        (spot.member == self.member.0).then_some(RowSpan { place, ..span })
    }
}

impl<M: RowMap> RowMap for StripedMap<'_, M> {
    type Part = ();
    // No row lies in two ranges.
    const IS_MAP: bool = false;

    #[inline(always)]
    unsafe fn span(&self, rows: &GatherLaunch, at: (i64, u32)) -> Option<RowSpan> {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        let span = unsafe { self.map.span(rows, at) }?;
        self.on_member(rows, span)
    }

    #[inline(always)]
    fn part(_: u32, _: u32) {}

    #[inline(always)]
    fn numbers((): ()) -> Option<(u32, u32)> {
        None
    }

    #[inline(always)]
    fn member(&self) -> Option<(u32, &StripedMember)> {
        Some(self.member)
    }

    #[inline(always)]
    unsafe fn row_of_block(&self, rows: &GatherLaunch, id: i64) -> (bool, Option<RowSpan>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        let Some(span) = (unsafe { self.map.span(rows, (id, 0)) }) else {
            // The block of the first drive reports what the table does not have.
            return (self.member.0 == 0, None);
        };
        let mine = self.on_member(rows, span);
        (mine.is_some(), mine)
    }
}

/// The chunks of a launch that each warp gathers.
pub(super) trait ChunkOrder {
    /// Gathers all chunks of the warp: the one of number `first`, and every `step`th one from there on.
    fn gather<M: RowMap>(&self, work: &mut GatherWarp<'_, '_, M>, first: u32, step: u32);
}

/// All rows, in their order.
pub(super) struct AllRows;

impl ChunkOrder for AllRows {
    #[inline(always)]
    fn gather<M: RowMap>(&self, work: &mut GatherWarp<'_, '_, M>, first: u32, step: u32) {
        work.gather_all(first, step);
    }
}

/// The rows whose positions lie at this address.
pub(super) struct ListedRows(pub u64);

impl ChunkOrder for ListedRows {
    #[inline(always)]
    fn gather<M: RowMap>(&self, work: &mut GatherWarp<'_, '_, M>, first: u32, step: u32) {
        work.gather_listed(self.0, first, step);
    }
}

/// Gathers `count` rows by the shared queues of the drives.
#[inline(always)]
pub(super) fn gather_striped<M: RowMap>(
    striped: &StripedGather,
    map: M,
    (count, order): (u64, impl ChunkOrder),
) {
    let rows = &striped.gather;
    let Some(stripes) = StripeLayout::shifted(striped.stripe_shift, striped.member_count) else {
        return;
    };
    let block = WholeBlock::here();
    let warp = arch::thread() / 32;
    let (mut station, mut inside) = (NO_STATION, 0);
    if warp == 0 {
        (station, inside) = members::enter(striped);
    }
    let station = block.broadcast(station);
    let inside = block.broadcast(inside);
    let mut work = GatherWarp {
        rows,
        gate: None,
        queue: None,
        cache: None,
        ranges: None,
        map,
        count,
        members: Some(StripeMembers::new(striped, stripes, station, inside)),
        // Without a station the cell is not used.
        cell: station.wrapping_mul(STATION_CELLS).wrapping_add(warp * 32),
        slots: (u64::from(station) * u64::from(BLOCK_WARPS) + u64::from(warp)) * WARP_BYTES,
        ends: match (station, inside) {
            (NO_STATION, 0) => code::GONE,
            (NO_STATION, _) => code::NOT_RUN,
            _ => code::OK,
        },
        has_lost: false,
        failed: WarpFailures::default(),
    };
    order.gather(
        &mut work,
        arch::block() * BLOCK_WARPS + warp,
        arch::blocks() * BLOCK_WARPS,
    );
    if let Some(members) = &mut work.members {
        members.leave();
    }
    // Every warp has left its slots and the members.
    let reports = launch::report(rows, &block, (work.failed.rows, work.failed.worst));
    if block.leads() {
        if station != NO_STATION {
            station::give_back(rows, station);
        }
        launch_end::end_block(rows, reports);
    }
}
