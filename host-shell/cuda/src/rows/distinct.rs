//! Gathers of many rows whose ids may come again: each distinct row is read once (docs/adr/0032).
// UNSAFETY: launches kernels over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::kernels::RowKernels;
use super::pending::{LaunchSequence, PendingRows};
use super::records::RecordMemory;
use super::slot::Named;
use super::wide::WideRows;
use super::{GatherOptions, GpuRows, TableMap, closed, put_one};
use nvme_core::spec::nvm;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::distinct::{DistinctLaunch, DistinctStripes, WORDS, span_shift};
use nvme_gpu_kernel::rows::{BLOCK_THREADS, GatherLaunch, StripedGather};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Least number of rows of such a gather. A step that decodes for 64 sequences asks for 3,072 rows of an Engram table,
/// which hardly ever repeat; a chunk of a prompt asks for more, and a third to a half of them repeat.
const LEAST_ROWS: u64 = 4096;
/// Largest number of rows of such a gather, which needs 20 bytes of memory for each.
const MOST_ROWS: u64 = 1 << 22;

/// Memory of a gather: the words of its run, the hash table, and three words for each row.
struct DistinctLayout {
    slot_shift: u32,
    slots: u64,
    list: u64,
    firsts: u64,
    codes: u64,
    bytes: u64,
}

impl DistinctLayout {
    /// Returns the layout for `count` rows, or fewer than twice as many: memory is reused by gathers of the same layout
    /// alone, which find the hash table empty.
    fn of(count: u64) -> Self {
        let rows = count.next_power_of_two();
        let slots = (WORDS * size_of::<u32>()) as u64;
        let list = slots + rows * 8;
        Self {
            slot_shift: rows.trailing_zeros() + 1,
            slots,
            list,
            firsts: list + rows * 4,
            codes: list + rows * 8,
            bytes: list + rows * 12,
        }
    }
}

/// True if a gather of `count` rows looks for ids that come again.
fn is_for(count: u64) -> bool {
    (LEAST_ROWS..=MOST_ROWS).contains(&count)
}

/// The place of the rows of such a gather.
#[derive(Clone)]
pub(super) struct DistinctPlace<'m> {
    pub map: Option<&'m TableMap>,
    /// Drives in stripes instead of one; its gather is not used.
    pub stripes: Option<StripedGather>,
    /// Memory that the place refers to.
    pub named: Named,
}

impl GpuRows {
    /// Returns the launches that read each distinct row of `launch` once, with their memory. Returns `None` for a gather
    /// without ids, through a cache, or of too few or too many rows, and without memory.
    pub(super) fn distinct(
        &self,
        launch: &GatherLaunch,
        ways: GatherOptions<'_>,
    ) -> Option<(DistinctLaunch, Arc<RecordMemory>)> {
        if launch.ids == 0 || ways.cache.is_some() || !is_for(launch.count) {
            return None;
        }
        let layout = DistinctLayout::of(launch.count);
        let state = &self.state;
        let memory = state
            .distinct
            .take_exact(&state.gpu, layout.bytes as usize)
            .ok()?;
        let at = memory.address();
        let gather = GatherLaunch {
            status: match launch.status {
                0 => at + layout.codes,
                status => status,
            },
            ..*launch
        };
        let distinct = DistinctLaunch {
            gather,
            words: at,
            slots: at + layout.slots,
            list: at + layout.list,
            firsts: at + layout.firsts,
            counts: state.distinct_counts.address(),
            shown: state.memory.board.distinct_address(),
            slot_shift: layout.slot_shift,
            span_shift: span_shift(launch.row_bytes, launch.block_shift),
        };
        Some((distinct, Arc::new(memory)))
    }

    /// Enqueues the launches of `distinct` in `stream`, of a table in the ranges of `map` if there is one, and the launch
    /// that converts the rows of `wide`.
    ///
    /// # Safety
    /// As [`gather`](Self::gather).
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub(super) unsafe fn gather_distinct(
        &self,
        distinct: (DistinctLaunch, Arc<RecordMemory>),
        wide: &WideRows,
        map: Option<&TableMap>,
        stream: u64,
    ) -> Result<PendingRows> {
        let place = DistinctPlace {
            map,
            stripes: None,
            named: None,
        };
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { self.gather_distinct_at(distinct, wide, place, stream) }
    }

    /// Does the same at any place.
    ///
    /// # Safety
    /// As [`gather`](Self::gather).
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    pub(super) unsafe fn gather_distinct_at(
        &self,
        (distinct, memory): (DistinctLaunch, Arc<RecordMemory>),
        wide: &WideRows,
        place: DistinctPlace<'_>,
        stream: u64,
    ) -> Result<PendingRows> {
        let kernels = self.kernels.as_ref().ok_or_else(closed)?;
        self.check_current(nvm::opcode::READ)?;
        let mut numbers = self
            .state
            .reserve(2 + usize::from(wide.launch().is_some()))?;
        let mut number = || {
            numbers
                .pop()
                .ok_or_else(|| Error::internal("too few launches"))
        };
        let kept: Named = Some(match &place.named {
            Some(other) => Arc::new((Arc::clone(&memory), Arc::clone(other))) as _,
            None => Arc::clone(&memory) as _,
        });
        let named = TableMap::named(place.map, kept);
        self.state.counts.shared.fetch_add(1, Ordering::Relaxed);
        let _guest = self.gpu().enter()?;
        let enqueued = LaunchSequence::run(self.gpu(), stream, |sequence| {
            // SAFETY: the caller vouches for the addresses of the gather; the others are those of `memory`, which stays
            // until the launches have ended.
            sequence.kernel(|| unsafe { put_claim(kernels, &distinct, place.map, stream) })?;
            // SAFETY: as above; the kernel takes one `DistinctLaunch`.
            sequence.kernel(|| unsafe {
                kernels.launch(
                    stream,
                    kernels.list_rows,
                    blocks(kernels, &distinct),
                    &distinct,
                )
            })?;
            let slot = (number()?.moving_rows_of(&distinct.gather), named.clone());
            let gathered =
                self.start(distinct.gather, slot, stream, |kernels, gather, blocks| {
                    let distinct = DistinctLaunch { gather, ..distinct };
                    // SAFETY: as above.
                    unsafe { put_listed(kernels, (distinct, blocks), &place, stream) }
                })?;
            sequence.add(gathered, 0);
            let gather = distinct.gather;
            let units = gather.out | gather.out_stride | u64::from(gather.row_bytes);
            let gather = GatherLaunch {
                // Copies inside the output need no unit that divides addresses on the drive.
                unit_shift: units.trailing_zeros().min(4),
                ..gather
            };
            let repeated = number()?.put(gather, (kernels, named), stream, |gather| {
                let distinct = DistinctLaunch { gather, ..distinct };
                let blocks = blocks(kernels, &distinct);
                // SAFETY: as above; the kernel takes one `DistinctLaunch`.
                unsafe { kernels.launch(stream, kernels.repeat_rows, blocks, &distinct) }
            })?;
            sequence.add(PendingRows::of_kernel(repeated), 0);
            if wide.launch().is_some() {
                // SAFETY: the caller keeps the conditions under `# Safety`.
                sequence.add(unsafe { wide.put(kernels, (number()?, None), stream) }?, 0);
            }
            Ok(())
        });
        if enqueued.is_err() {
            // Without the last launch the memory is not ready for another gather.
            std::mem::forget(memory);
        }
        enqueued
    }

    /// Returns the number of rows that such gathers were asked for, and of those that they read, each run of a graph
    /// included.
    pub fn distinct_rows(&self) -> (u64, u64) {
        self.state.memory.board.distinct_rows()
    }
}

/// Returns the number of blocks of the first, second and last launch.
fn blocks(kernels: &RowKernels, distinct: &DistinctLaunch) -> u32 {
    let blocks = distinct.gather.count.div_ceil(BLOCK_THREADS.into());
    blocks.min(kernels.widen_blocks.into()) as u32
}

/// Enqueues the first launch.
///
/// # Safety
/// As [`GpuRows::gather_distinct`].
unsafe fn put_claim(
    kernels: &RowKernels,
    distinct: &DistinctLaunch,
    map: Option<&TableMap>,
    stream: u64,
) -> Result<()> {
    let size = (blocks(kernels, distinct), BLOCK_THREADS);
    let mapped = |map: &TableMap| map.kernels.claim_rows;
    // SAFETY: the kernels take one `DistinctLaunch`, or one with a map; the caller vouches for its addresses.
    unsafe {
        put_one(
            kernels,
            (kernels.claim_rows, mapped),
            (size, map),
            *distinct,
            stream,
        )
    }
}

/// Enqueues the third launch, with `blocks` blocks.
///
/// # Safety
/// As [`GpuRows::gather_distinct`].
unsafe fn put_listed(
    kernels: &RowKernels,
    (distinct, blocks): (DistinctLaunch, u32),
    place: &DistinctPlace<'_>,
    stream: u64,
) -> Result<()> {
    let stripes = place.stripes.map(|of| DistinctStripes {
        distinct,
        members: of.members,
        stripe_shift: of.stripe_shift,
        member_count: of.member_count,
    });
    let size = (blocks, BLOCK_THREADS);
    // SAFETY: the kernels take one `DistinctLaunch` or one `DistinctStripes`, or one with a map; the caller vouches for
    // its addresses.
    unsafe {
        match stripes {
            None => {
                let mapped = |map: &TableMap| map.kernels.gather_listed;
                let kernel = kernels.gather_listed;
                put_one(
                    kernels,
                    (kernel, mapped),
                    (size, place.map),
                    distinct,
                    stream,
                )
            }
            Some(stripes) => {
                let mapped = |map: &TableMap| map.kernels.gather_listed_striped;
                let kernel = kernels.gather_listed_striped;
                put_one(
                    kernels,
                    (kernel, mapped),
                    (size, place.map),
                    stripes,
                    stream,
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_holds_twice_as_many_slots_as_rows_and_nothing_overlaps() {
        for count in [4096, 4097, 100_000, MOST_ROWS] {
            let layout = DistinctLayout::of(count);
            let slots = 4u64 << layout.slot_shift;
            assert!(slots >= count * 8);
            assert_eq!(layout.list, layout.slots + slots);
            for (begin, end) in [
                (layout.list, layout.firsts),
                (layout.firsts, layout.codes),
                (layout.codes, layout.bytes),
            ] {
                assert!(end - begin >= count * 4);
            }
        }
    }

    #[test]
    fn a_decoded_step_goes_without_the_search() {
        let sequences = |count: u64| is_for(count * 48);
        assert!(!sequences(1) && !sequences(64) && sequences(256));
        assert!(is_for(8192 * 48) && !is_for(MOST_ROWS + 1));
    }
}
