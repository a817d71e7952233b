//! The kernels of a layer's mixture of experts, in the order of the launches: route, admit, (read), settle, product,
//! join. The host decides on none of these launches, so that all layers of a token fit into one CUDA graph.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::cache::{CacheRequest, ExpertCache, RangeList, words};
use super::{
    ActivateParameters, AdmitParameters, ChosenExpert, ExpertActivation, ExpertLocations,
    JoinParameters, MATRICES, NO_SLOT, ProductParameters, ReplacementPolicy, RouteParameters,
    SettleParameters,
};
use crate::arch::{FloatArray, butterfly64, exp, sum_of_warp, thread, warp};
use crate::product::strip;
use crate::quantised::{TILE_ROWS, tiles};
use crate::strip::{GroupShape, first_row};
use crate::wide::tile;
use crate::{GemvParameters, index_of, ranked};
use core::num::{NonZeroU32, NonZeroU64};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};
use nvme_gpu_kernel::{WholeWarp, arch, entry};

entry! {
    /// Selects experts. A warp takes one token a turn: the largest logit, then the largest of those below it, and
    /// so on.
    ///
    /// # Safety
    /// All memory that [`RouteParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_moe_route(route: RouteParameters) {
        let (mut token, warps) = warp();
        while token < u64::from(route.tokens) {
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            unsafe { route_token(&route, token) };
            token += warps;
        }
    }
}

/// Selects the experts of one token.
///
/// # Safety
/// As [`nvme_moe_route`].
#[inline(always)]
unsafe fn route_token(route: &RouteParameters, token: u64) {
    let first = token * u64::from(route.experts) * 4;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let logits = unsafe { FloatArray::at(route.logits + first) };
    let chosen = route.chosen + token * u64::from(route.choices) * size_of::<ChosenExpert>() as u64;
    let (mut below, mut largest, mut sum) = (u64::MAX, 0.0, 0.0);
    let mut at = 0;
    while at < route.choices {
        let mut best = 0;
        let mut expert = arch::lane();
        while expert < route.experts {
            let mine = ranked(logits.load(expert.into()), expert);
            best = if mine < below && mine > best {
                mine
            } else {
                best
            };
            expert += 32;
        }
        below = most_of_warp(best);
        let expert = index_of(below);
        let logit = logits.load(expert.into());
        largest = if at == 0 { logit } else { largest };
        sum += exp(logit - largest);
        if arch::lane() == 0 {
            let one = ChosenExpert {
                expert,
                slot: NO_SLOT,
                weight: logit,
                reserved: 0,
            };
            // SAFETY: the host vouches for `choices` entries a token, and `at` is below `choices`.
            unsafe { *(chosen as usize as *mut ChosenExpert).add(at as usize) = one };
        }
        at += 1;
    }
    let of_all = route.over_all != 0 || route.probabilities != 0;
    let total = if of_all {
        total(route, logits, largest)
    } else {
        sum
    };
    let factor = 1.0 / if route.over_all != 0 { total } else { sum };
    arch::sync_warp(arch::FULL);
    let mut at = arch::lane();
    while at < route.choices {
        // SAFETY: the host vouches for the entry; lane 0's stores came before the barrier above.
        unsafe {
            let one = (chosen as usize as *mut ChosenExpert).add(at as usize);
            (*one).weight = exp((*one).weight - largest) * factor;
        }
        at += 32;
    }
    if route.probabilities != 0 {
        // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
        let probabilities = unsafe { FloatArray::at(route.probabilities + first) };
        let mut expert = arch::lane();
        while expert < route.experts {
            let share = exp(logits.load(expert.into()) - largest) / total;
            probabilities.store(expert.into(), share);
            expert += 32;
        }
    }
}

#[inline(always)]
fn total(route: &RouteParameters, logits: FloatArray, largest: f32) -> f32 {
    let (mut sum, mut expert) = (0.0, arch::lane());
    while expert < route.experts {
        sum += exp(logits.load(expert.into()) - largest);
        expert += 32;
    }
    sum_of_warp(sum)
}

#[inline(always)]
pub fn most_of_warp(value: u64) -> u64 {
    let (mut most, mut bits) = (value, 16);
    while bits != 0 {
        let other = butterfly64(most, bits);
        most = if other > most { other } else { most };
        bits /= 2;
    }
    most
}

/// Returns the cache that `admit` names; `None` for sizes or a policy that do not fit.
///
/// # Safety
/// All memory that [`AdmitParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
pub unsafe fn cache_of(admit: &AdmitParameters) -> Option<ExpertCache<'_>> {
    let count = words(admit.slots, admit.experts * admit.layers);
    // SAFETY: the host vouches for `count` words at `words`, which are accessed through atomics alone.
    let words =
        unsafe { core::slice::from_raw_parts(admit.words as usize as *const AtomicU32, count) };
    let policy = ReplacementPolicy::of_number(admit.policy)?;
    ExpertCache::new(words, admit.slots, admit.pinned, policy)
}

/// Returns the layer's location on the drive.
///
/// # Safety
/// As [`cache_of`].
#[inline(always)]
pub unsafe fn places_of(admit: &AdmitParameters) -> &ExpertLocations {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe { &*(admit.places as usize as *const ExpertLocations) }
}

/// Returns word `word` of choice `pair`.
///
/// # Safety
/// As [`cache_of`].
#[inline(always)]
pub unsafe fn word_of(chosen: u64, pair: u32, word: u64) -> &'static AtomicU32 {
    let at = chosen + u64::from(pair) * size_of::<ChosenExpert>() as u64 + word * 4;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe { &*(at as usize as *const AtomicU32) }
}

/// Loads choice `pair`, without its weight.
///
/// # Safety
/// As [`cache_of`].
#[inline(always)]
pub unsafe fn chosen_of(chosen: u64, pair: u32) -> ChosenExpert {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let word = |word| unsafe { word_of(chosen, pair, word) }.load(Order::Relaxed, Scope::Gpu);
    ChosenExpert {
        expert: word(0),
        slot: word(1),
        weight: 0.0,
        reserved: 0,
    }
}

entry! {
    /// Finds or assigns a slot for each choice. One warp decides, so that no lock is needed.
    ///
    /// # Safety
    /// All memory that [`AdmitParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_moe_admit(admit: AdmitParameters) {
        if warp().0 != 0 {
            return;
        }
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (cache, places) = unsafe { (cache_of(&admit), places_of(&admit)) };
        let Some(cache) = cache else { return };
        let asked = CacheRequest {
            first: admit.layer * admit.experts,
            experts: admit.experts,
            pairs: admit.pairs,
        };
        let ranges = (admit.list + size_of::<ListHead>() as u64) as usize as *mut RangeTarget;
        let least = |value: u64| !most_of_warp(!value);
        let mut list = RangeList::default();
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
                let to = admit.data + u64::from(slot) * admit.slot_bytes;
                let mut matrix = 0;
                while matrix < MATRICES {
                    let of_drive = (places.byte(matrix, expert), places.bytes[matrix]);
                    let to = to + places.at(matrix, expert);
                    let (at, range) = list.add((of_drive.0, of_drive.1, to), admit.piece_shift);
                    if arch::lane() == 0 {
                        // SAFETY: the host vouches for [`MATRICES`] ranges for each pair.
                        unsafe { *ranges.add(at as usize) = range };
                    }
                    matrix += 1;
                }
            },
            least,
        );
        if arch::lane() == 0 {
            let head = ListHead {
                range_count: list.ranges.into(),
                pieces: list.pieces,
            };
            // SAFETY: the host vouches for the head of the list; only lane 0 writes it.
            unsafe { *(admit.list as usize as *mut ListHead) = head };
        }
    }
}

entry! {
    /// Marks slots whose reads failed. A thread checks one read a turn.
    ///
    /// # Safety
    /// All memory that [`SettleParameters`] names is allocated and stays so while the kernel runs; the reads have
    /// ended.
    pub unsafe fn nvme_moe_settle(settle: SettleParameters) {
        let admit = &settle.admit;
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (cache, head) = unsafe { (cache_of(admit), *(admit.list as usize as *const ListHead)) };
        let Some(cache) = cache else { return };
        let ranges = (admit.list + size_of::<ListHead>() as u64) as usize as *const RangeTarget;
        let (me, threads) = thread();
        let mut at = 0;
        while at < head.range_count {
            // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
            let range = unsafe { *ranges.add(at as usize) };
            let (mut piece, pieces) = (me, range.pieces(admit.piece_shift));
            while piece < pieces {
                let number = range.first + piece;
                // SAFETY: the host vouches for `most_pieces` status words, and `number` is checked against it
                // first.
                let is_read = number < settle.most_pieces
                    && unsafe { *(settle.status as usize as *const i32).add(number as usize) } == 0;
                if !is_read {
                    let slot = (range.to - admit.data) / admit.slot_bytes.max(1);
                    cache.mark_bad(slot as u32);
                }
                piece += threads;
            }
            at += 1;
        }
    }
}

entry! {
    /// Multiplies as `nvme_gemv` does: each pair gets a share of the warps.
    ///
    /// # Safety
    /// All memory that [`ProductParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_moe_product(product: ProductParameters) {
        let Some(stored) = StoredFormat::of_number(product.stored) else {
            return;
        };
        let shape = GroupShape::of(stored, product.columns);
        let Some(pairs) = NonZeroU64::new(product.admit.pairs.into()) else {
            return;
        };
        let (mut item, warps) = warp();
        let share = if warps < pairs.get() {
            1
        } else {
            warps / pairs
        };
        while shape.groups != 0 && item < share * pairs.get() {
            let (pair, part) = ((item % pairs) as u32, (item / pairs) as u32);
            let row = |part| first_row(product.rows.into(), part, share as u32);
            let rows = row(part)..row(part + 1);
            // SAFETY: the host vouches for all addresses in `product`, as under `# Safety`.
            match unsafe { gemv_of(&product, stored, pair) } {
                // SAFETY: as above; `gemv_of` has checked that the expert is loaded in its slot.
                Some(gemv) => unsafe { strip(&gemv, (stored, shape), 0, rows) },
                // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
                None => unsafe { no_numbers(&product, pair, rows, (arch::lane(), 32)) },
            }
            item += warps;
        }
    }
}

entry! {
    /// Multiplies as `nvme_gemv_wide` does: each block takes one tile of rows of a pair, the pairs interleaved.
    ///
    /// # Safety
    /// All memory that [`ProductParameters`] names is allocated and stays so while the kernel runs, and its products
    /// [are wide](GemvParameters::is_wide).
    pub unsafe fn nvme_moe_product_wide(product: ProductParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        if let Some((gemv, part)) = unsafe { part_of_pair(&product, like(&product).tile_rows()) } {
            // SAFETY: as above; `part_of_pair` has checked that the expert is loaded in its slot.
            unsafe { tile(&gemv, 0, part) };
        }
    }
}

entry! {
    /// Multiplies as `nvme_gemv_quantised` does: each block takes tiles of rows of a pair once, the pairs
    /// interleaved.
    ///
    /// # Safety
    /// All memory that [`ProductParameters`] names is allocated and stays so while the kernel runs, its products [are
    /// quantised](GemvParameters::is_quantised), and blocks have [`GemvParameters::QUANTISED_SHARED`] bytes.
    pub unsafe fn nvme_moe_product_quantised(product: ProductParameters) {
        let of_block = like(&product).block_tiles();
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        if let Some((gemv, part)) = unsafe { part_of_pair(&product, of_block * TILE_ROWS) } {
            // SAFETY: as above; `part_of_pair` has checked that the expert is loaded in its slot.
            unsafe { tiles(&gemv, 0, part * of_block) };
        }
    }
}

/// Returns the products of all pairs, as far as the number of rows of a block depends on them.
#[inline(always)]
fn like(product: &ProductParameters) -> GemvParameters {
    GemvParameters {
        rows: product.rows,
        tokens: product.admit.pairs,
        stored: product.stored,
        ..GemvParameters::default()
    }
}

/// Returns the product of the block's pair, and the number of the part of it that the block computes,
/// `height` rows.
///
/// If the pair's expert was not read, the function stores NaN in those rows and returns `None`: nothing is
/// left to compute.
///
/// # Safety
/// All memory that [`ProductParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
unsafe fn part_of_pair(product: &ProductParameters, height: u32) -> Option<(GemvParameters, u32)> {
    let stored = StoredFormat::of_number(product.stored)?;
    let pairs = NonZeroU32::new(product.admit.pairs)?;
    let (pair, part) = (arch::block() % pairs, arch::block() / pairs);
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    if let Some(gemv) = unsafe { gemv_of(product, stored, pair) } {
        return Some((gemv, part));
    }
    let first = part * height;
    let end = first + height;
    let end = if end < product.rows {
        end
    } else {
        product.rows
    };
    let threads = (arch::thread(), arch::block_threads());
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    unsafe { no_numbers(product, pair, first.into()..end.into(), threads) };
    None
}

/// Returns the product of pair `pair`, or `None` if its expert was not read.
///
/// # Safety
/// All memory that [`ProductParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
pub unsafe fn gemv_of(
    product: &ProductParameters,
    stored: StoredFormat,
    pair: u32,
) -> Option<GemvParameters> {
    let admit = &product.admit;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let (cache, places, chosen) = unsafe {
        (
            cache_of(admit),
            places_of(admit),
            chosen_of(admit.chosen, pair),
        )
    };
    let (cache, row_bytes) = (cache?, stored.row_bytes(product.columns)?);
    let vector = pair / product.shared.max(1);
    match cache.is_bad(chosen.slot) {
        true => None,
        false => Some(GemvParameters {
            weights: admit.data
                + u64::from(chosen.slot) * admit.slot_bytes
                + places.at(product.matrix as usize, chosen.expert),
            x: product.x + u64::from(vector) * u64::from(product.columns) * 4,
            y: product.y + u64::from(pair) * u64::from(product.rows) * 4,
            row_bytes,
            rows: product.rows,
            columns: product.columns,
            stride: 0,
            tokens: admit.pairs,
            stored: product.stored,
            adds: 0,
        }),
    }
}

/// Stores NaN in the elements `rows` of pair `pair`. The caller is thread `first` of `step` threads.
///
/// # Safety
/// All memory that [`ProductParameters`] names is allocated and stays so while the kernel runs.
#[inline(always)]
pub unsafe fn no_numbers(
    product: &ProductParameters,
    pair: u32,
    rows: core::ops::Range<u64>,
    (first, step): (u32, u32),
) {
    let y = product.y + u64::from(pair) * u64::from(product.rows) * 4;
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let y = unsafe { FloatArray::at(y) };
    let mut row = rows.start + u64::from(first);
    while row < rows.end {
        y.store(row, f32::NAN);
        row += u64::from(step);
    }
}

entry! {
    /// Activates the gates of all pairs. A thread takes one element a turn.
    ///
    /// # Safety
    /// All memory that [`ActivateParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_moe_activate(activate: ActivateParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (gate, up) = (numbers(activate.gate), numbers(activate.up));
        let (gate_bias, up_bias) = (numbers(activate.gate_bias), numbers(activate.up_bias));
        let limits = (activate.activation, activate.limit, activate.alpha);
        let (Some(activation), Some(elements)) = (
            ExpertActivation::of_numbers(limits),
            NonZeroU64::new(activate.elements.into()),
        ) else {
            return;
        };
        let (mut at, threads) = thread();
        while at < elements.get() * u64::from(activate.pairs) {
            let (mut x, mut factor) = (gate.load(at), up.load(at));
            if activate.gate_bias != 0 || activate.up_bias != 0 {
                // SAFETY: the host vouches for the choices, as under `# Safety`.
                let chosen = unsafe { chosen_of(activate.chosen, (at / elements) as u32) };
                let of_expert = u64::from(chosen.expert) * elements.get() + at % elements;
                if activate.gate_bias != 0 {
                    x += gate_bias.load(of_expert);
                }
                if activate.up_bias != 0 {
                    factor += up_bias.load(of_expert);
                }
            }
            gate.store(at, activation.value_by(x, factor, exp));
            at += threads;
        }
    }
}

entry! {
    /// Adds up the weighted results of a token's experts. A thread takes one element a turn.
    ///
    /// # Safety
    /// All memory that [`JoinParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_moe_join(join: JoinParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (x, y, bias) = (numbers(join.x), numbers(join.y), numbers(join.bias));
        let Some(elements) = NonZeroU64::new(join.elements.into()) else {
            return;
        };
        let (mut at, threads) = thread();
        while at < elements.get() * u64::from(join.tokens) {
            let (token, element) = (at / elements, at % elements);
            let mut sum = 0.0;
            let mut choice = 0;
            while choice < join.choices {
                let pair = token as u32 * join.choices + choice;
                // SAFETY: the host vouches for the choices and the vectors, as under `# Safety`.
                let weight = unsafe { word_of(join.chosen, pair, 2) }.load(Order::Relaxed, Scope::Gpu);
                let mut result = x.load(u64::from(pair) * elements.get() + element);
                if join.bias != 0 {
                    // SAFETY: as above.
                    let expert = unsafe { chosen_of(join.chosen, pair) }.expert;
                    result += bias.load(u64::from(expert) * elements.get() + element);
                }
                sum += f32::from_bits(weight) * result;
                choice += 1;
            }
            y.store(
                at,
                if join.adds == 0 {
                    sum
                } else {
                    y.load(at) + sum
                },
            );
            at += threads;
        }
    }
}
