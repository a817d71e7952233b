//! `nvme_moe_product_batched`: products of many tokens, as those of a prompt. Each expert's weights are loaded once for
//! eight of its tokens.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::ProductParameters;
use super::kernels::{cache_of, chosen_of, gemv_of, no_numbers, word_of};
use crate::quantised::batched::{BLOCK_ROWS, OF_OWN, ProductBatch, VECTORS, rows};
use crate::tile::{BlockShared, opaque};
use core::num::NonZeroU32;
use nvme_core::sync::{Order, Scope};
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::rows::BLOCK_WARPS;
use nvme_gpu_kernel::{arch, entry};

const _: () = assert!(BLOCK_ROWS == ProductParameters::BATCHED_ROWS);

entry! {
    /// Multiplies as `nvme_moe_product` does: a block takes [`BLOCK_ROWS`] rows of an expert, and all pairs that chose it,
    /// eight at a time. A pair with a number that is no expert belongs to the last one.
    ///
    /// # Safety
    /// All memory that [`ProductParameters`] names is allocated and stays so while the kernel runs, its products [are
    /// quantised](GemvParameters::is_quantised), and blocks have [`GemvParameters::QUANTISED_SHARED`] bytes and 256 threads.
    pub unsafe fn nvme_moe_product_batched(product: ProductParameters) {
        let Some(parts) = NonZeroU32::new(product.rows.div_ceil(BLOCK_ROWS)) else {
            return;
        };
        let mut next = 0;
        // Every thread of the block has the same `next`.
        while next < product.admit.pairs {
            // Both numbers again for each batch: they would take registers of the multiplication.
            let block = opaque(arch::block());
            let (expert, first_row) = (block / parts, block % parts * BLOCK_ROWS);
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            let count = unsafe { collect(&product, expert, next) };
            if count != 0 {
                // SAFETY: as above.
                unsafe { multiply(&product, count, first_row) };
            }
            // A barrier: every thread has read the numbers before the next ones are stored.
            arch::sync_block();
            // SAFETY: as above.
            next = unsafe { past() }.load().to_bits();
        }
    }
}

/// Returns where the number of the pair behind the last one stands that was looked at: in a register it would be one too
/// many.
///
/// # Safety
/// As [`BlockShared::dynamic`].
#[inline(always)]
unsafe fn past() -> BlockShared {
    // SAFETY: this function's caller vouches for the memory.
    unsafe { BlockShared::dynamic() }.at(OF_OWN + BLOCK_WARPS * 4)
}

/// Stores the numbers of the next pairs from `first` on that chose `expert`, as many as a batch has, and [`past`]; returns how
/// many. Every thread of the block calls it.
///
/// # Safety
/// As [`nvme_moe_product_batched`].
#[inline(always)]
unsafe fn collect(product: &ProductParameters, expert: u32, first: u32) -> u32 {
    let admit = &product.admit;
    let (warp, lane) = (arch::thread() / 32, arch::lane());
    // SAFETY: this function's caller vouches for the memory.
    let (counts, past) = unsafe { (BlockShared::dynamic().at(OF_OWN), past()) };
    let (mut count, mut next) = (0, first);
    while next < admit.pairs && count < VECTORS {
        let pair = next + arch::thread();
        let mut is_mine = false;
        if pair < admit.pairs {
            // SAFETY: the host vouches for the choices, as under `# Safety`.
            let chosen = unsafe { word_of(admit.chosen, pair, 0) };
            let chosen = chosen.load(Order::Relaxed, Scope::Gpu);
            let last = admit.experts - 1;
            is_mine = expert == if chosen < last { chosen } else { last };
        }
        let of_warp = arch::ballot(arch::FULL, is_mine);
        if lane == 0 {
            counts.at(warp * 4).store_word(of_warp.count_ones());
        }
        // A barrier: the counts of all warps are visible after it.
        arch::sync_block();
        let (mut before, mut all, mut other) = (count, count, 0);
        while other < BLOCK_WARPS {
            let some = counts.at(other * 4).load().to_bits();
            before += if other < warp { some } else { 0 };
            all += some;
            other += 1;
        }
        let index = before + (of_warp & ((1 << lane) - 1)).count_ones();
        if is_mine && index < VECTORS {
            // SAFETY: this function's caller vouches for the memory.
            unsafe { ProductBatch::number_at(index) }.store_word(pair);
            if index == VECTORS - 1 {
                past.store_word(pair + 1);
            }
        }
        // A barrier: the numbers are visible after it, and every thread has read the counts.
        arch::sync_block();
        next += arch::block_threads();
        count = if all < VECTORS { all } else { VECTORS };
    }
    // A full batch has stored the number behind its last pair.
    if count < VECTORS && arch::thread() == 0 {
        past.store_word(next);
    }
    count
}

/// Multiplies the matrix of the pairs' expert with their vectors, as far as it is loaded. Every thread of the block calls
/// it.
///
/// # Safety
/// As [`nvme_moe_product_batched`], behind [`collect`].
#[inline(always)]
unsafe fn multiply(product: &ProductParameters, count: u32, first_row: u32) {
    let (Some(stored), Some(shared)) = (
        StoredFormat::of_number(product.stored),
        NonZeroU32::new(product.shared),
    ) else {
        return;
    };
    // SAFETY: this function's caller vouches for the memory.
    let number = |index| unsafe { ProductBatch::number_at(index) }.load().to_bits();
    // SAFETY: the host vouches for the addresses in the kernel's parameter.
    let slot = |index| unsafe { chosen_of(product.admit.chosen, number(index)) }.slot;
    // SAFETY: as above.
    let Some(cache) = (unsafe { cache_of(&product.admit) }) else {
        return;
    };
    // Pairs with numbers that are no experts may come before those of the last expert.
    let mut loaded = 0;
    while loaded + 1 < count && cache.is_bad(slot(loaded)) {
        loaded += 1;
    }
    // SAFETY: as above.
    let gemv = unsafe { gemv_of(product, stored, number(loaded)) };
    let (mut with_numbers, mut index) = (0, 0);
    while index < count {
        // One step loads an expert into one slot.
        if gemv.is_some() && slot(index) == slot(loaded) {
            with_numbers |= 1 << index;
        } else {
            let end = first_row + BLOCK_ROWS;
            let end = if end < product.rows {
                end
            } else {
                product.rows
            };
            let (of_block, threads) = (first_row.into()..end.into(), arch::block_threads());
            // SAFETY: as above.
            unsafe { no_numbers(product, number(index), of_block, (arch::thread(), threads)) };
        }
        index += 1;
    }
    if let Some(mut gemv) = gemv {
        (gemv.x, gemv.y) = (product.x, product.y);
        let batch = ProductBatch {
            count,
            stored: with_numbers,
            shared,
        };
        // SAFETY: as above; `gemv_of` has checked that the expert is loaded in its slot.
        unsafe { rows(&gemv, &batch, first_row) };
    }
}
