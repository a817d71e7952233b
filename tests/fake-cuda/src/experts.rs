//! The kernels of experts as a host thread: a group of one decides.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::compute::{numbers, outputs, rows};
use nvme_compute_kernel::experts::cache::{CacheRequest, ExpertCache, words};
use nvme_compute_kernel::experts::{
    AdmitParameters, ChosenExpert, ExpertLocations, JoinParameters, ProductParameters,
    ReplacementPolicy, RouteParameters, SettleParameters, reference,
};
use nvme_compute_kernel::reference::dot;
use nvme_core::group::LoneThread;
use nvme_core::sync::AtomicU32;
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::rows::{ListHead, RangeTarget};
use std::slice::{from_raw_parts, from_raw_parts_mut};

fn choices<'a>(address: u64, count: u32) -> &'a mut [ChosenExpert] {
    // SAFETY: the host vouches for them.
    unsafe { from_raw_parts_mut(address as usize as *mut ChosenExpert, count as usize) }
}

fn cache_of(admit: &AdmitParameters) -> ExpertCache<'_> {
    let count = words(admit.slots, admit.experts * admit.layers);
    // SAFETY: the host gives this number of words, which are atomics.
    let words = unsafe { from_raw_parts(admit.words as usize as *const AtomicU32, count) };
    let policy = ReplacementPolicy::of_number(admit.policy).expect("a policy");
    ExpertCache::new(words, admit.slots, admit.pinned, policy).expect("enough words")
}

fn places_of(admit: &AdmitParameters) -> ExpertLocations {
    // SAFETY: the host vouches for it.
    unsafe { *(admit.places as usize as *const ExpertLocations) }
}

pub fn route(route: &RouteParameters) {
    let experts = route.experts as usize;
    for token in 0..route.tokens {
        let first = u64::from(token) * u64::from(route.experts) * 4;
        let logits = numbers(route.logits + first, experts);
        let chosen = reference::route(logits, route.choices as usize, route.over_all != 0);
        let to = route.chosen + u64::from(token * route.choices) * size_of::<ChosenExpert>() as u64;
        choices(to, route.choices).copy_from_slice(&chosen);
        if route.probabilities != 0 {
            outputs(route.probabilities + first, experts)
                .copy_from_slice(&reference::probabilities(logits));
        }
    }
}

pub fn admit(admit: &AdmitParameters) {
    let places = places_of(admit);
    let asked = CacheRequest {
        places: &places,
        first: admit.layer * admit.experts,
        experts: admit.experts,
        pairs: admit.pairs,
        data: admit.data,
        slot_bytes: admit.slot_bytes,
        piece_shift: admit.piece_shift,
    };
    let ranges = (admit.list as usize + size_of::<ListHead>()) as *mut RangeTarget;
    let (range_count, pieces) = cache_of(admit).admit(
        &LoneThread,
        &asked,
        |pair| choices(admit.chosen, admit.pairs)[pair as usize],
        |pair, slot| choices(admit.chosen, admit.pairs)[pair as usize].slot = slot,
        // SAFETY: the host gives three ranges for each pair.
        |at, range| unsafe { ranges.add(at as usize).write(range) },
        |least| least,
    );
    let head = ListHead {
        range_count: range_count.into(),
        pieces,
    };
    // SAFETY: as above.
    unsafe { (admit.list as usize as *mut ListHead).write(head) };
}

pub fn settle(settle: &SettleParameters) {
    let admit = &settle.admit;
    // SAFETY: the host vouches for the list and for a word for each piece.
    let (ranges, status) = unsafe {
        let head = *(admit.list as usize as *const ListHead);
        assert!(
            head.pieces <= settle.most_pieces,
            "more pieces than there may be"
        );
        let ranges = (admit.list as usize + size_of::<ListHead>()) as *const RangeTarget;
        (
            from_raw_parts(ranges, head.range_count as usize),
            from_raw_parts(settle.status as usize as *const i32, head.pieces as usize),
        )
    };
    for range in ranges {
        let first = range.first as usize;
        let codes = &status[first..][..range.pieces(admit.piece_shift) as usize];
        if codes.iter().any(|code| *code != 0) {
            let slot = (range.to - admit.data) / admit.slot_bytes;
            cache_of(admit).mark_bad(slot as u32);
        }
    }
}

pub fn product(product: &ProductParameters) {
    let admit = &product.admit;
    let (cache, places) = (cache_of(admit), places_of(admit));
    let stored = StoredFormat::of_number(product.stored).expect("a format");
    let row_bytes = stored.row_bytes(product.columns).expect("whole blocks") as usize;
    let (height, width) = (product.rows as usize, product.columns as usize);
    for (pair, chosen) in (0u64..).zip(&*choices(admit.chosen, admit.pairs)) {
        let y = outputs(product.y + pair * u64::from(product.rows) * 4, height);
        if cache.is_bad(chosen.slot) {
            y.fill(f32::NAN);
            continue;
        }
        let vector = pair / u64::from(product.shared);
        let x = numbers(product.x + vector * u64::from(product.columns) * 4, width);
        let matrix = admit.data
            + u64::from(chosen.slot) * admit.slot_bytes
            + places.at(product.matrix as usize, chosen.expert);
        let matrix = rows(matrix, height * row_bytes);
        for (y, row) in y.iter_mut().zip(matrix.chunks(row_bytes)) {
            *y = dot(stored, row, x);
        }
    }
}

pub fn join(join: &JoinParameters) {
    let elements = join.elements as usize;
    let pairs = join.tokens * join.choices;
    let x = numbers(join.x, pairs as usize * elements);
    let y = outputs(join.y, join.tokens as usize * elements);
    let each = choices(join.chosen, pairs)
        .chunks(join.choices as usize)
        .zip(x.chunks(join.choices as usize * elements));
    for (y, (chosen, x)) in y.chunks_mut(elements).zip(each) {
        for (element, y) in y.iter_mut().enumerate() {
            let terms = chosen.iter().zip(x.chunks(elements));
            let sum: f32 = terms.map(|(one, x)| one.weight * x[element]).sum();
            *y = if join.adds == 0 { sum } else { *y + sum };
        }
    }
}
