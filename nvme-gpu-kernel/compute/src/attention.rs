//! Rotary position embedding, the cache of keys and values, and attention over the cache.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch::{FloatArray, exp, sum_of_warp, thread, warp};
use crate::{AttentionParameters, RopeParameters};
use nvme_gpu_kernel::{arch, entry};

entry! {
    /// Rotates queries and keys by their positions, and writes keys and values into the cache. A thread takes one
    /// pair of elements a turn.
    ///
    /// # Safety
    /// All memory that [`RopeParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_rope(rope: RopeParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let numbers = |address| unsafe { FloatArray::at(address) };
        let (queries, keys, values) = (
            numbers(rope.queries),
            numbers(rope.keys),
            numbers(rope.values),
        );
        let (key_cache, value_cache) = (numbers(rope.key_cache), numbers(rope.value_cache));
        let angles = numbers(rope.angles);
        let pairs = u64::from(rope.head_elements / 2);
        let heads = u64::from(rope.heads + rope.kv_heads);
        let (mut at, threads) = thread();
        while at < u64::from(rope.tokens) * heads * pairs && heads != 0 && pairs != 0 {
            let (pair, head, token) = (at % pairs, at / pairs % heads, at / pairs / heads);
            let position = token + u64::from(rope.position);
            let angle = (position * pairs + pair) * 2;
            let (cos, sin) = (angles.load(angle), angles.load(angle + 1));
            // Elements of the pair, counted from the head's first one.
            let (one, other) = match rope.halves {
                0 => (2 * pair, 2 * pair + 1),
                _ => (pair, pairs + pair),
            };
            let turned = |from: FloatArray, first: u64| {
                let (a, b) = (from.load(first + one), from.load(first + other));
                (a * cos - b * sin, a * sin + b * cos)
            };
            if head < u64::from(rope.heads) {
                let first = (token * u64::from(rope.heads) + head) * pairs * 2;
                let (a, b) = turned(queries, first);
                queries.store(first + one, a);
                queries.store(first + other, b);
            } else {
                let (head, kv_heads) = (head - u64::from(rope.heads), u64::from(rope.kv_heads));
                let first = (token * kv_heads + head) * pairs * 2;
                let to = (position * kv_heads + head) * pairs * 2;
                let (a, b) = turned(keys, first);
                key_cache.store(to + one, a);
                key_cache.store(to + other, b);
                value_cache.store(to + one, values.load(first + one));
                value_cache.store(to + other, values.load(first + other));
            }
            at += threads;
        }
    }
}

entry! {
    /// Computes attention. A warp takes one head of a token a turn: it reads the positions once, and rescales its
    /// partial result when a larger product appears.
    ///
    /// # Safety
    /// All memory that [`AttentionParameters`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_attention(attention: AttentionParameters) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        unsafe {
            match attention.head_elements {
                ..=64 => heads::<2>(&attention),
                65..=128 => heads::<4>(&attention),
                _ => heads::<8>(&attention),
            }
        }
    }
}

/// Computes heads of up to 32 * `EACH` elements: each lane holds `EACH` of them.
///
/// # Safety
/// As [`nvme_attention`].
#[inline(always)]
#[allow(
    clippy::needless_range_loop,
    reason = "arrays whose places are constants stay in registers"
)]
unsafe fn heads<const EACH: usize>(attention: &AttentionParameters) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let numbers = |address| unsafe { FloatArray::at(address) };
    let (queries, keys, values, y) = (
        numbers(attention.queries),
        numbers(attention.key_cache),
        numbers(attention.value_cache),
        numbers(attention.y),
    );
    let elements = u64::from(attention.head_elements);
    let (heads, kv_heads) = (u64::from(attention.heads), u64::from(attention.kv_heads));
    let lane = u64::from(arch::lane());
    // Loads element `lane + 32 * each` of a vector that begins at `first`; 0 past its end.
    let own = |from: FloatArray, first: u64, each: usize| {
        let element = lane + 32 * each as u64;
        match element < elements {
            true => from.load(first + element),
            false => 0.0,
        }
    };
    let (mut at, warps) = warp();
    while at < heads * u64::from(attention.tokens) && heads != 0 {
        let (head, token) = (at % heads, at / heads);
        let first = at * elements;
        let kv_head = head * kv_heads / heads;
        let (mut query, mut sums) = ([0.0; EACH], [0.0; EACH]);
        for each in 0..EACH {
            query[each] = own(queries, first, each) * attention.scale;
        }
        // The sink is the first product, and its value adds nothing to the sums.
        let (mut largest, mut total) = match attention.sinks {
            0 => (f32::NEG_INFINITY, 0.0),
            sinks => (numbers(sinks).load(head), 1.0),
        };
        let seen = u64::from(attention.position) + token + 1;
        let window = u64::from(attention.window);
        let oldest = if window == 0 || window > seen {
            0
        } else {
            seen - window
        };
        for position in oldest..seen {
            let vector = (position * kv_heads + kv_head) * elements;
            let mut product = 0.0;
            for each in 0..EACH {
                product += query[each] * own(keys, vector, each);
            }
            let product = sum_of_warp(product);
            let next = if product > largest { product } else { largest };
            let (before, now) = (exp(largest - next), exp(product - next));
            total = total * before + now;
            for each in 0..EACH {
                sums[each] = sums[each] * before + now * own(values, vector, each);
            }
            largest = next;
        }
        for each in 0..EACH {
            let element = lane + 32 * each as u64;
            if element < elements {
                y.store(first + element, sums[each] / total);
            }
        }
        at += warps;
    }
}
