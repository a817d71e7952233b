//! Attention over pages of a drive, as a host thread: how a launch is split, and where pages lie, is worked out by the
//! code of the kernel. Sums are by `f64`.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::streamed::Stream;
use crate::warps::all_warps;
use nvme_compute_kernel::PagedAttention;
use nvme_compute_kernel::pages::PagePart;
use nvme_formats::{f32_of_bf16, f32_of_f16};
use nvme_gpu_kernel::ring::ScatteredPieces;
use nvme_gpu_kernel::rows::code;

/// A word that a launch names.
fn word(address: u64) -> u32 {
    // SAFETY: the host vouches for it.
    unsafe { (address as usize as *const u32).read() }
}

fn number(address: u64, index: u64) -> f32 {
    f32::from_bits(word(address + index * 4))
}

fn store(address: u64, index: u64, value: f32) {
    // SAFETY: as above.
    unsafe { ((address + index * 4) as usize as *mut f32).write(value) };
}

/// All blocks of a launch of `blocks` blocks of `nvme_attention_paged`.
pub fn attend(attention: &PagedAttention, blocks: u32) {
    all_warps(&attention.rows, blocks, |(warp, warps), reads, fail| {
        let stream = &mut Stream::new(reads);
        for item in (u64::from(warp)..attention.parts()).step_by(warps as usize) {
            let part = attention.part(item);
            let code = run(attention, &part, stream);
            if code != code::OK {
                fail(part.row(attention), code);
            }
        }
    });
}

/// What a query has added up; products are in units of the logarithm to the base of two.
#[derive(Clone)]
struct Sum {
    query: Vec<f64>,
    largest: f64,
    total: f64,
    sums: Vec<f64>,
}

fn run(attention: &PagedAttention, part: &PagePart, stream: &mut Stream<'_, '_>) -> i32 {
    let elements = u64::from(attention.head_elements);
    let scale = f64::from(attention.scale) * std::f64::consts::LOG2_E;
    let each = (0..part.queries(attention)).map(|query| {
        let first = attention.vector(part, query) * elements;
        let one = |element| f64::from(number(attention.queries, first + element)) * scale;
        Sum {
            query: (0..elements).map(one).collect(),
            largest: -1e30,
            total: 0.0,
            sums: vec![0.0; elements as usize],
        }
    });
    let mut sums: Vec<Sum> = each.collect();
    let code = pages(attention, part, stream, &mut sums);
    if attention.tail != 0 && part.split + 1 == attention.splits {
        let count = word(attention.tail_counts + u64::from(part.sequence) * 4);
        let from = attention.tail_piece(part) as usize as *const u8;
        // SAFETY: the host gives a page for each sequence.
        let piece = unsafe { std::slice::from_raw_parts(from, attention.piece_bytes() as usize) };
        tokens(
            attention,
            piece,
            count.min(attention.page_tokens),
            &mut sums,
        );
    }
    for (query, sum) in sums.iter().enumerate() {
        let at = attention.partial_index(part, query as u32) * (elements + 2);
        for (element, value) in sum.sums.iter().enumerate() {
            store(attention.partial, at + element as u64, *value as f32);
        }
        let total = if code == code::OK {
            sum.total as f32
        } else {
            f32::NAN
        };
        store(attention.partial, at + elements, sum.largest as f32);
        store(attention.partial, at + elements + 1, total);
    }
    code
}

/// Adds the part's pages on the drive. What became of them.
fn pages(
    attention: &PagedAttention,
    part: &PagePart,
    stream: &mut Stream<'_, '_>,
    sums: &mut [Sum],
) -> i32 {
    let table = attention.table(part);
    let (from, until) = attention.share(part, word(attention.count_address(part)));
    let id = |index: u64| u64::from(word(table + index * 4));
    if (from..until).any(|index| id(index) >= attention.rows.rows) {
        return code::OUT_OF_RANGE;
    }
    if from == until {
        return code::OK;
    }
    let pieces = ScatteredPieces {
        byte_of: |number: u64| attention.byte(part, id(from + number)),
        bytes: attention.piece_bytes(),
        count: until - from,
        stage_shift: attention.rows.slot_bytes.trailing_zeros(),
    };
    let mut code = stream.rest();
    stream.begin();
    for number in 0..pieces.count {
        match stream.piece(&pieces, number) {
            code::OK => {
                let piece = stream.bytes(&pieces, number);
                tokens(attention, &piece, attention.page_tokens, sums);
            }
            ended => code = ended,
        }
    }
    code
}

fn tokens(attention: &PagedAttention, piece: &[u8], count: u32, sums: &mut [Sum]) {
    let elements = attention.head_elements as usize;
    let values = attention.page_tokens as usize * elements;
    let element = |at: usize| {
        let half = u16::from_le_bytes([piece[2 * at], piece[2 * at + 1]]);
        f64::from(match attention.is_bf16 {
            0 => f32_of_f16(half),
            _ => f32_of_bf16(half),
        })
    };
    for sum in sums {
        for token in 0..count as usize {
            let at = token * elements;
            let each = sum.query.iter().enumerate();
            let product: f64 = each.map(|(e, query)| query * element(at + e)).sum();
            let next = sum.largest.max(product);
            let (before, weight) = ((sum.largest - next).exp2(), (product - next).exp2());
            sum.largest = next;
            sum.total = sum.total * before + weight;
            for (e, value) in sum.sums.iter_mut().enumerate() {
                *value = *value * before + weight * element(values + at + e);
            }
        }
    }
}

/// As `nvme_attention_join`.
pub fn join(attention: &PagedAttention) {
    let (elements, splits) = (
        u64::from(attention.head_elements),
        u64::from(attention.splits),
    );
    for vector in 0..u64::from(attention.sequences) * u64::from(attention.heads) {
        let at = |split: u64| (vector * splits + split) * (elements + 2);
        let largest = |split| f64::from(number(attention.partial, at(split) + elements));
        let most = (0..splits).map(largest).fold(-1e30, f64::max);
        let weighed = |element: u64| -> f64 {
            let one = |split| {
                let value = f64::from(number(attention.partial, at(split) + element));
                value * (largest(split) - most).exp2()
            };
            (0..splits).map(one).sum()
        };
        let total = weighed(elements + 1);
        for element in 0..elements {
            let sum = if total == 0.0 {
                0.0
            } else {
                weighed(element) / total
            };
            store(attention.y, vector * elements + element, sum as f32);
        }
    }
}
