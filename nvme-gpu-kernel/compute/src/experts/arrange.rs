//! The kernels of published experts: their lookup in the cache, before the reads, and their arrangement in its slots, after
//! them.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::cache::{CacheRequest, ExpertCache, RangeList};
use super::kernels::{cache_of, chosen_of, most_of_warp, places_of, word_of};
use super::published::{
    AdmitPublished, ArrangeParameters, PublishedForm, SlotArrangement, StagedExpert, StagedParts,
    StagedRange, StagingArea,
};
use super::{AdmitParameters, MATRICES};
use crate::arch::{FloatArray, warp};
use core::num::NonZeroU64;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};
use nvme_gpu_kernel::{WholeWarp, arch, entry};

entry! {
    /// Finds or assigns a slot for each choice, and lists the ranges of experts that are read. One warp decides, so that no
    /// lock is needed.
    ///
    /// # Safety
    /// All memory that [`AdmitPublished`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_moe_admit_published(request: AdmitPublished) {
        if warp().0 != 0 {
            return;
        }
        let admit = &request.admit;
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (cache, areas) = unsafe { (cache_of(admit), areas_of(&request.staging, admit)) };
        let (Some(cache), Some(areas)) = (cache, areas) else { return };
        if request.given != 0 {
            // SAFETY: as above.
            unsafe { take_given(&request) };
        }
        let asked = CacheRequest {
            first: admit.layer * admit.experts,
            experts: admit.experts,
            pairs: admit.pairs,
        };
        let list_at = (admit.list + size_of::<ListHead>() as u64) as usize as *mut RangeTarget;
        let staged = (request.staging.staged + 8) as usize as *mut StagedExpert;
        let (mut list, mut area) = (RangeList::default(), 0);
        cache.admit(
            &WholeWarp,
            &asked,
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            |pair| unsafe { chosen_of(admit.chosen, pair) },
            |pair, slot| {
                // SAFETY: the same promise, for the slot's word of the choice.
                unsafe { word_of(admit.chosen, pair, 1) }.store(slot, Order::Relaxed, Scope::Gpu)
            },
            |expert, slot| {
                if area >= request.staging.areas {
                    // Not one of the experts that a step may need: its slot holds nothing.
                    cache.mark_bad(slot);
                    return;
                }
                let to = request.staging.data + u64::from(area) * request.staging.bytes;
                let first = u64::from(expert) * u64::from(request.most_ranges);
                let mut at = 0;
                while at < request.most_ranges {
                    // SAFETY: the host vouches for `most_ranges` ranges of each expert of the layer.
                    let range = unsafe {
                        *(request.ranges as usize as *const StagedRange).add((first + u64::from(at)) as usize)
                    };
                    if range.bytes == 0 {
                        break;
                    }
                    let (number, range) = list.add((range.byte, range.bytes, to + range.at), admit.piece_shift);
                    if arch::lane() == 0 {
                        // SAFETY: the host vouches for `most_ranges` entries of each area.
                        unsafe { *list_at.add(number as usize) = range };
                    }
                    at += 1;
                }
                if arch::lane() == 0 {
                    areas.clear_bad(area);
                    // SAFETY: the host vouches for an entry of each area, and `area` is below their number.
                    unsafe { *staged.add(area as usize) = StagedExpert { expert, slot } };
                }
                area += 1;
            },
            |value: u64| !most_of_warp(!value),
        );
        if arch::lane() == 0 {
            let head = ListHead {
                range_count: list.ranges.into(),
                pieces: list.pieces,
            };
            // SAFETY: the host vouches for the head of the list and for the count; only lane 0 writes them.
            unsafe {
                *(admit.list as usize as *mut ListHead) = head;
                *(request.staging.staged as usize as *mut u32) = area;
            }
        }
        // A number that is no expert has no slot, so that its result is NaN; its bias is that of an expert that exists.
        if request.given != 0 {
            arch::sync_warp(arch::FULL);
            let mut pair = arch::lane();
            while pair < admit.pairs {
                // SAFETY: the host vouches for the choices.
                let expert = unsafe { word_of(admit.chosen, pair, 0) };
                if expert.load(Order::Relaxed, Scope::Gpu) >= admit.experts {
                    expert.store(0, Order::Relaxed, Scope::Gpu);
                }
                pair += 32;
            }
        }
    }
}

/// Copies the given numbers and weights into the choices.
///
/// # Safety
/// As [`nvme_moe_admit_published`].
#[inline(always)]
unsafe fn take_given(request: &AdmitPublished) {
    let mut pair = arch::lane();
    while pair < request.admit.pairs {
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        unsafe {
            let number = *(request.given as usize as *const u32).add(pair as usize);
            let weight = *(request.weights as usize as *const u32).add(pair as usize);
            let chosen = request.admit.chosen;
            word_of(chosen, pair, 0).store(number, Order::Relaxed, Scope::Gpu);
            word_of(chosen, pair, 2).store(weight, Order::Relaxed, Scope::Gpu);
        }
        pair += 32;
    }
    arch::sync_warp(arch::FULL);
}

/// Returns the cache whose slots are the staging areas.
///
/// # Safety
/// All memory that [`StagingArea`] names is allocated and stays so while the kernel runs.
#[inline(always)]
unsafe fn areas_of<'a>(
    staging: &'a StagingArea,
    admit: &AdmitParameters,
) -> Option<ExpertCache<'a>> {
    let settled = staging.settled(admit);
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let words = unsafe {
        let count = super::cache::words(settled.slots, 0);
        core::slice::from_raw_parts(settled.words as usize as *const AtomicU32, count)
    };
    ExpertCache::new(words, settled.slots, 0, super::ReplacementPolicy::Lru)
}

entry! {
    /// Arranges the experts that were read in their slots. A warp takes one row a turn.
    ///
    /// # Safety
    /// All memory that [`ArrangeParameters`] names is allocated and stays so while the kernel runs; the reads have ended
    /// and were settled.
    pub unsafe fn nvme_moe_arrange(arrange: ArrangeParameters) {
        let admit = &arrange.admit;
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (cache, areas, count) = unsafe {
            let count = *(arrange.staging.staged as usize as *const u32);
            (cache_of(admit), areas_of(&arrange.staging, admit), count)
        };
        let (Some(cache), Some(areas)) = (cache, areas) else { return };
        let [gate, up, down] = arrange.shapes.map(|[rows, _]| u64::from(rows));
        let Some(rows) = NonZeroU64::new(gate + up + down) else { return };
        let (mut item, warps) = warp();
        while item < rows.get() * u64::from(count) {
            let (area, row) = ((item / rows) as u32, item % rows);
            // SAFETY: `nvme_moe_admit_published` has stored `count` entries.
            let staged = unsafe {
                *((arrange.staging.staged + 8) as usize as *const StagedExpert).add(area as usize)
            };
            let (matrix, row) = if row < gate {
                (0, row)
            } else if row < gate + up {
                (1, row - gate)
            } else {
                (2, row - gate - up)
            };
            // SAFETY: the host vouches for the addresses, and the entry names an expert and a slot that exist.
            let is_right = !areas.is_bad(area) && unsafe { arrange_row(&arrange, (area, staged), matrix, row) };
            if !is_right {
                cache.mark_bad(staged.slot);
            }
            item += warps;
        }
    }
}

/// Arranges a row of a matrix. Returns false in a lane that met a scale which the slot cannot hold.
///
/// # Safety
/// As [`nvme_moe_arrange`]; the expert and its slot exist.
#[inline(always)]
unsafe fn arrange_row(
    arrange: &ArrangeParameters,
    (area, staged): (u32, StagedExpert),
    matrix: usize,
    row: u64,
) -> bool {
    let admit = &arrange.admit;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let (places, parts) = unsafe {
        let parts = arrange.parts as usize as *const StagedParts;
        (places_of(admit), &*parts.add(staged.expert as usize))
    };
    let source = &source_of(&arrange.sources, matrix);
    let columns = one_of(arrange.shapes.map(|[_, columns]| columns), matrix);
    let stored_row = u64::from(source.first_row) + row * u64::from(source.row_step);
    let base = arrange.staging.data + u64::from(area) * arrange.staging.bytes;
    let (weights, scales) = (base + parts.weights[matrix], base + parts.scales[matrix]);
    let row_bytes = u64::from(source.row_bytes);
    if row_bytes == 0 {
        return false;
    }
    let to = admit.data
        + u64::from(staged.slot) * admit.slot_bytes
        + places.at(matrix, staged.expert)
        + row * row_bytes;
    // SAFETY: the host vouches for the parts of the area.
    let byte = |at: u64| unsafe { *(at as usize as *const u8) };
    if source.arrangement == SlotArrangement::Rows as u32 {
        // SAFETY: both rows have `row_bytes` bytes, of the area and of the slot.
        unsafe { copy_row(weights + stored_row * row_bytes, to, row_bytes) };
        return true;
    }
    if source.arrangement == SlotArrangement::Mxfp4 as u32 {
        let weights = weights + stored_row * u64::from(columns / 2);
        let scales = scales + stored_row * u64::from(columns / 32);
        let mut is_right = true;
        let mut at = arch::lane();
        while u64::from(at) < row_bytes / 2 {
            let one = |at| {
                PublishedForm::mxfp4_byte(
                    at,
                    |at| byte(weights + u64::from(at)),
                    |at| byte(scales + u64::from(at)),
                )
            };
            let (low, high) = (one(2 * at), one(2 * at + 1));
            // GGUF's blocks have no scale that is NaN.
            let is_nan = |at: u32, byte: u8| at.is_multiple_of(17) && byte == 255;
            is_right &= !is_nan(2 * at, low) & !is_nan(2 * at + 1, high);
            // SAFETY: rows of MXFP4 are pairs of blocks, an even number of bytes from an even address on.
            unsafe {
                *(to as usize as *mut u16).add(at as usize) = u16::from_le_bytes([low, high]);
            }
            at += 32;
        }
        return is_right;
    }
    // SAFETY: the row has `columns` numbers of four bytes.
    let to = unsafe { FloatArray::at(to) };
    let mut column = arch::lane();
    while column < columns {
        let number = source.value(
            (stored_row, column.into()),
            parts.factors[matrix],
            |at| byte(weights + at),
            |at| byte(scales + at),
        );
        to.store(column.into(), number);
        column += 32;
    }
    true
}

/// Returns one of three words without an index into the kernel's parameter, which would be copied to a stack.
#[inline(always)]
fn one_of([gate, up, down]: [u32; MATRICES], matrix: usize) -> u32 {
    match matrix {
        0 => gate,
        1 => up,
        _ => down,
    }
}

/// Returns the stored form of a matrix, word by word.
#[inline(always)]
fn source_of(all: &[PublishedForm; MATRICES], matrix: usize) -> PublishedForm {
    let word =
        |of: fn(&PublishedForm) -> u32| one_of([of(&all[0]), of(&all[1]), of(&all[2])], matrix);
    PublishedForm {
        decoder: word(|one| one.decoder),
        format: word(|one| one.format),
        scale: word(|one| one.scale),
        divides: word(|one| one.divides),
        block_rows: word(|one| one.block_rows),
        block_columns: word(|one| one.block_columns),
        rows: word(|one| one.rows),
        columns: word(|one| one.columns),
        first_row: word(|one| one.first_row),
        row_step: word(|one| one.row_step),
        is_transposed: word(|one| one.is_transposed),
        arrangement: word(|one| one.arrangement),
        stored: word(|one| one.stored),
        row_bytes: word(|one| one.row_bytes),
    }
}

/// Copies a row by the lanes of a warp, in the widest units that both addresses allow.
///
/// # Safety
/// The bytes are allocated, and do not overlap.
#[inline(always)]
unsafe fn copy_row(from: u64, to: u64, bytes: u64) {
    let together = from | to | bytes;
    // SAFETY: this function's caller vouches for the bytes; the units are aligned.
    unsafe {
        if together.is_multiple_of(16) {
            copy_units::<Sixteen>(from, to, bytes / 16);
        } else if together.is_multiple_of(4) {
            copy_units::<u32>(from, to, bytes / 4);
        } else if together.is_multiple_of(2) {
            copy_units::<u16>(from, to, bytes / 2);
        } else {
            copy_units::<u8>(from, to, bytes);
        }
    }
}

/// Sixteen bytes that are loaded and stored at once.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Sixteen([u32; 4]);

/// # Safety
/// As [`copy_row`]; both addresses are multiples of the alignment of `T`.
#[inline(always)]
unsafe fn copy_units<T: Copy>(from: u64, to: u64, count: u64) {
    let mut at = u64::from(arch::lane());
    while at < count {
        // SAFETY: this function's caller vouches for `count` units.
        unsafe {
            *(to as usize as *mut T).add(at as usize) =
                *(from as usize as *const T).add(at as usize);
        }
        at += 32;
    }
}
