//! Gathers and scatters of few rows: each block reads or writes by a queue that it owns (docs/adr/0028); a gather may
//! convert the rows.
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::pending::PendingRows;
use super::request::{RowRequest, RowTable};
use super::slot::Named;
use super::wide::WideRows;
use super::{GatherOptions, GpuRows, StripedRows, TableMap, put_one};
use nvme_core::handoff::QueueWords;
use nvme_driver::error::Result;
use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::rows::{
    BLOCK_THREADS, Batched, BatchedStripes, GatherLaunch, STATION_BYTES, StripedGather,
};
use nvme_gpu_kernel::wide_batch::WidenedLaunch;
use std::sync::atomic::Ordering;

/// Rows of a block, while there are queues that are free: the more queues, the more of a drive's work is done side by
/// side.
const FEW_ROWS: u64 = 8;
/// Rows of a block of a gather in halves: the caller's work hides the time of the drive, and fewer queues stay taken.
const HALF_ROWS: u64 = 16;
/// Rows of a block of a gather through a cache: the drive reads few of them, and rows that come again in a block are read
/// once.
const CACHED_ROWS: u64 = 64;
/// Bytes of a gather through a cache, as a multiple of those that may all be read from the drive.
const CACHED_TIMES: u64 = 8;
/// Threads of a block at least: the first two warps end a block side by side.
const FEW_THREADS: u64 = 64;
/// log2 of the bytes in whose multiples rows lie on the drive and in the output.
pub(super) const LEAST_SHIFT: u32 = 2;
/// Number of loads that a thread has in flight while it copies, if there are enough threads.
const THREAD_UNITS: u64 = 4;

/// Blocks and threads of a launch of one of the kernels whose blocks own queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OwnedShape {
    pub blocks: u32,
    pub threads: u32,
    rows_of_block: u32,
}

impl GpuRows {
    /// Returns the launch that gathers or writes the same rows by queues that its blocks own, and its shape. Returns
    /// `None` without such queues, for more bytes than their limit, for more rows than fit into them, and for rows that
    /// are not in units of 4 bytes; for a table in several ranges, also if a row's parts are not whole blocks.
    pub(super) fn batched(
        &self,
        launch: &GatherLaunch,
        map: Option<&TableMap>,
    ) -> Option<(Batched, OwnedShape)> {
        let limits = (self.most_of_block, self.owned_bytes);
        let shape = OwnedShape::of(launch, (self.owned, FEW_ROWS), limits)?;
        Some((self.owned_launch(launch, shape, map)?, shape))
    }

    /// Returns the same as [`batched`](Self::batched) for a gather through a cache, which takes whole rows alone.
    pub(super) fn batched_cached(
        &self,
        launch: &GatherLaunch,
        map: Option<&TableMap>,
    ) -> Option<(Batched, OwnedShape)> {
        if map.is_some_and(|map| !map.is_of_whole_rows()) {
            return None;
        }
        let limits = (
            self.most_of_block,
            self.owned_bytes.saturating_mul(CACHED_TIMES),
        );
        let shape = OwnedShape::of(launch, (self.owned, CACHED_ROWS), limits)?;
        Some((self.owned_launch(launch, shape, map)?, shape))
    }

    /// Returns the same as [`batched`](Self::batched) for the two launches of a gather in halves: its blocks take the
    /// queues that may be held from one launch to the other.
    pub(super) fn halved(
        &self,
        launch: &GatherLaunch,
        map: Option<&TableMap>,
    ) -> Option<(Batched, OwnedShape)> {
        let limits = (self.most_of_block, self.owned_bytes);
        let shape = OwnedShape::of(launch, (held_stations(self.owned), HALF_ROWS), limits)?;
        Some((self.owned_launch(launch, shape, map)?, shape))
    }

    /// Returns the launch that gathers `wide` by queues that its blocks own and converts the rows; `None` if two launches
    /// are needed. `launch` is that of the stored rows.
    pub(super) fn converting(
        &self,
        table: &RowTable,
        wide: &WideRows,
        (launch, ways): (&GatherLaunch, GatherOptions<'_>),
    ) -> Option<(WidenedLaunch<Batched>, OwnedShape)> {
        let widening = wide.by_gather().filter(|_| ways.cache.is_none())?;
        let request = RowRequest {
            out: widening.out,
            ..wide.stored
        };
        let launch = GatherLaunch {
            failed_as: launch.failed_as,
            ..self.launch(table, &request)?
        };
        let (launch, shape) = self.batched(&launch, ways.map)?;
        Some((WidenedLaunch { launch, widening }, shape))
    }

    /// Enqueues such a launch in `stream`; `named` stays until it has ended.
    ///
    /// # Safety
    /// As [`gather`](Self::gather).
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub(super) unsafe fn gather_converting(
        &self,
        (widened, shape): (WidenedLaunch<Batched>, OwnedShape),
        (map, named): (Option<&TableMap>, Named),
        stream: u64,
    ) -> Result<PendingRows> {
        self.state.counts.owned.fetch_add(1, Ordering::Relaxed);
        let size = (shape.blocks, shape.threads);
        let slot = self.slot()?.moving_rows_of(&widened.launch.gather);
        self.start(
            widened.launch.gather,
            (slot, named),
            stream,
            |kernels, gather, _| {
                let launch = Batched {
                    gather,
                    ..widened.launch
                };
                let widened = WidenedLaunch { launch, ..widened };
                let kernel = kernels.gather_batched_wide;
                let mapped = |map: &TableMap| map.kernels.gather_batched_wide;
                // SAFETY: the kernels take one such launch, or one with a map; the caller vouches for its addresses.
                unsafe { put_one(kernels, (kernel, mapped), (size, map), widened, stream) }
            },
        )
    }

    /// Returns the launch that gathers by all queues that blocks own.
    fn owned_launch(
        &self,
        launch: &GatherLaunch,
        shape: OwnedShape,
        map: Option<&TableMap>,
    ) -> Option<Batched> {
        if map.is_some_and(|map| !map.is_of_blocks(self.info.block_bytes)) {
            return None;
        }
        let lent = self.lent.as_ref()?;
        let first = u64::from(lent.set.len() as u32 - self.owned);
        let owned = QueueArray {
            queues: lent.set.address() + first * size_of::<QueueWords>() as u64,
            cells: 0,
            queue_count: self.owned,
            cell_count: 0,
        };
        Some(Batched {
            gather: *launch,
            owned,
            rows_of_block: shape.rows_of_block,
            reserved: 0,
        })
    }
}

impl StripedRows {
    /// Returns the launch over the stripes that gathers the same rows by queues that its blocks own, and its shape; `None`
    /// as [`GpuRows::batched`], and for rows that may lie on two drives.
    pub(super) fn batched(
        &self,
        striped: &StripedGather,
        map: Option<&TableMap>,
    ) -> Option<(BatchedStripes, OwnedShape)> {
        let (launch, drives) = (&striped.gather, striped.member_count);
        let least = |of: fn(&GpuRows) -> u64| self.members().map(of).min().unwrap_or(0);
        let owned = least(|one| one.owned.into()) as u32;
        let blocks = owned.checked_div(drives).unwrap_or(0);
        let limits = (
            least(|one| one.most_of_block.into()) as u32,
            least(|one| one.owned_bytes),
        );
        // A block reads its drive's share of the rows that it looks at.
        let few = FEW_ROWS * u64::from(drives);
        let is_on_one = is_on_one_drive(striped, map);
        let shape = OwnedShape::of(launch, (blocks, few), limits).filter(|_| is_on_one)?;
        let launch = BatchedStripes {
            striped: *striped,
            rows_of_block: shape.rows_of_block,
            owned,
        };
        let blocks = shape.blocks * drives;
        Some((launch, OwnedShape { blocks, ..shape }))
    }
}

/// True if no row lies in two stripes: they divide a stripe evenly, or all rows of a range lie in one stripe.
fn is_on_one_drive(striped: &StripedGather, map: Option<&TableMap>) -> bool {
    let (launch, shift) = (&striped.gather, striped.stripe_shift);
    let row_bytes = u64::from(launch.row_bytes);
    // The first byte of a table in several ranges stands for all beginnings and lengths of ranges.
    let is_even = row_bytes.is_power_of_two()
        && row_bytes <= 1 << shift
        && launch.first_byte.is_multiple_of(row_bytes);
    let is_inside = || match map {
        Some(map) => map.is_in_stripes(shift),
        None => {
            let bytes = launch.rows.saturating_mul(row_bytes);
            let last = launch.first_byte.saturating_add(bytes.max(1) - 1);
            (launch.first_byte ^ last) >> shift == 0
        }
    };
    is_even || is_inside()
}

/// Returns the number of the `owned` queues that gathers in halves may hold between their launches. The remaining ones
/// are for blocks that run: no gather waits for a launch behind it in its stream.
pub(super) fn held_stations(owned: u32) -> u32 {
    owned.saturating_sub((owned / 4).max(1))
}

impl OwnedShape {
    /// Spreads the rows of `launch`, `few` to a block at least, over `owned` queues, each with room for `most_of_block`
    /// commands; `None` for a launch that goes by shared queues, also for one of more than `most_bytes` bytes.
    fn of(
        launch: &GatherLaunch,
        (owned, few): (u32, u64),
        (most_of_block, most_bytes): (u32, u64),
    ) -> Option<Self> {
        let in_slots = STATION_BYTES.checked_div(launch.slot_bytes.into())?;
        let most = in_slots.min(most_of_block.into());
        let is_fit = launch.unit_shift >= LEAST_SHIFT && launch.count != 0;
        let bytes = launch.count.saturating_mul(launch.row_bytes.into());
        if !is_fit || bytes > most_bytes || launch.count > most * u64::from(owned) {
            return None;
        }
        let blocks = launch.count.div_ceil(few.min(most));
        let rows_of_block = launch.count.div_ceil(blocks.min(owned.into()));
        // Rounded up, the rows of a block may leave the last blocks without any.
        let blocks = launch.count.div_ceil(rows_of_block) as u32;
        let units = rows_of_block * u64::from(launch.row_bytes >> launch.unit_shift);
        let threads = rows_of_block
            .max(units.div_ceil(THREAD_UNITS))
            .next_multiple_of(32)
            .clamp(FEW_THREADS, BLOCK_THREADS.into()) as u32;
        Some(Self {
            blocks,
            threads,
            rows_of_block: rows_of_block as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST_BYTES: u64 = 2 << 20;

    fn of(count: u64, row_bytes: u32, slot_bytes: u32, unit_shift: u32) -> GatherLaunch {
        GatherLaunch {
            count,
            row_bytes,
            slot_bytes,
            unit_shift,
            ..GatherLaunch::default()
        }
    }

    fn shape(launch: &GatherLaunch, owned: u32, most: u32) -> Option<(u32, u32)> {
        OwnedShape::of(launch, (owned, FEW_ROWS), (most, MOST_BYTES))
            .map(|shape| (shape.blocks, shape.rows_of_block))
    }

    #[test]
    fn few_rows_are_spread_over_the_queues_and_many_go_by_shared_ones() {
        let small = |count| shape(&of(count, 256, 512, 4), 16, 256);
        assert_eq!(small(0), None);
        assert_eq!(small(1), Some((1, 1)));
        assert_eq!(small(24), Some((3, 8)));
        assert_eq!(small(48), Some((6, 8)));
        // Rows of published files begin at multiples of 8 or 4 bytes.
        let uneven = |shift| shape(&of(48, 256, 1024, shift), 16, 256);
        assert_eq!(
            [4, 3, 2, 1].map(uneven),
            [Some((6, 8)), Some((6, 8)), Some((6, 8)), None]
        );
        let most = MOST_BYTES / 256;
        assert_eq!(small(most + 1), None);
        let all = shape(&of(most, 256, 512, 4), 32, 256);
        assert_eq!(all, Some((32, most.div_ceil(32) as u32)));
    }

    #[test]
    fn some_queues_are_never_held_between_two_launches() {
        let held = [0, 1, 2, 4, 16, 32].map(held_stations);
        assert_eq!(held, [0, 0, 1, 3, 12, 24]);
    }

    #[test]
    fn a_block_has_no_more_rows_than_slots_commands_and_threads() {
        for (count, slot, owned, most) in [
            (1, 4096, 1, 256),
            (33, 8192, 1, 255),
            (100, 12288, 8, 63),
            (33, 512, 16, 256),
        ] {
            let launch = of(count, 256, slot, 4);
            let shape =
                OwnedShape::of(&launch, (owned, FEW_ROWS), (most, MOST_BYTES)).expect("it fits");
            let (blocks, rows) = (u64::from(shape.blocks), u64::from(shape.rows_of_block));
            assert!(shape.blocks <= owned && shape.rows_of_block <= most);
            assert!(shape.threads >= shape.rows_of_block && shape.threads <= BLOCK_THREADS);
            assert_eq!(shape.threads % 32, 0);
            assert!(rows * u64::from(slot) <= STATION_BYTES);
            assert!(blocks * rows >= count && (blocks - 1) * rows < count);
        }
    }

    #[test]
    fn what_the_kernel_does_not_copy_goes_by_shared_queues() {
        let beyond = MOST_BYTES / 4096 + 1;
        assert_eq!(shape(&of(8, 256, 512, 1), 32, 256), None);
        assert_eq!(shape(&of(beyond, 4096, 4096, 4), 32, 256), None);
        assert_eq!(shape(&of(8, 256, 512, 4), 0, 256), None);
        assert_eq!(shape(&of(257, 256, 512, 4), 1, 256), None);
    }

    #[test]
    fn rows_of_stripes_lie_on_one_drive_or_are_refused() {
        let is_on_one = |first_byte, row_bytes, rows| {
            let launch = GatherLaunch {
                first_byte,
                rows,
                ..of(1, row_bytes, 512, 2)
            };
            let striped = StripedGather {
                gather: launch,
                stripe_shift: 12,
                ..StripedGather::default()
            };
            is_on_one_drive(&striped, None)
        };
        assert!(is_on_one(0, 512, 1000) && is_on_one(1536, 512, 1000));
        assert!(is_on_one(4096, 4096, 9));
        assert!(!is_on_one(256, 512, 1000) && !is_on_one(0, 96, 1000));
        // One stripe has all of them.
        assert!(is_on_one(4096 + 8, 96, 42) && !is_on_one(4096 + 8, 96, 43));
        assert!(!is_on_one(0, 8192, 10));
    }
}
