//! Products of a vector and rows that ids name, as a host thread: the pieces of rows, their tiles and their sums are worked
//! out by the code of the kernel; the lanes of a warp are one.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::streamed::{Stream, dot};
use crate::warps::all_warps;
use nvme_compute_kernel::GemvGathered;
use nvme_compute_kernel::strip::{GroupShape, RowCursor, TILE_BYTES, WINDOW_BYTES, first_row};
use nvme_formats::StoredFormat;
use nvme_gpu_kernel::ring::{RangePieces, RowPieces};
use nvme_gpu_kernel::rows::code;

/// All blocks of a launch of `blocks` blocks.
pub fn gemv(gemv: &GemvGathered, blocks: u32) {
    all_warps(&gemv.rows, blocks, |(warp, warps), reads, fail| {
        let first = first_row(gemv.rows.count, warp, warps);
        let end = first_row(gemv.rows.count, warp + 1, warps);
        let pieces = RowPieces {
            byte_of: |row: u64| gemv.byte_of(id(gemv, first + row)),
            split: gemv.split().expect("a split"),
            rows: end - first,
            end: u64::MAX,
        };
        let mut stream = Stream::new(reads);
        for row in 0..pieces.rows {
            let (sum, why) = product(gemv, &pieces, row, &mut stream);
            // SAFETY: the host gives an element for each id.
            unsafe {
                let to = (gemv.y as usize as *mut f32).add((first + row) as usize);
                to.write(if why == code::OK { sum } else { f32::NAN });
            }
            if why != code::OK {
                fail(first + row, why);
            }
        }
    });
}

fn id(gemv: &GemvGathered, index: u64) -> i64 {
    let (ids, index) = (gemv.rows.ids as usize, index as usize);
    // SAFETY: the host gives `count` ids.
    unsafe {
        match gemv.rows.wide_ids {
            0 => i64::from((ids as *const i32).add(index).read()),
            _ => (ids as *const i64).add(index).read(),
        }
    }
}

/// The product of row `row` of `pieces`, and why there is none.
fn product(
    gemv: &GemvGathered,
    pieces: &RowPieces<impl Fn(u64) -> Option<u64>>,
    row: u64,
    stream: &mut Stream<'_, '_>,
) -> (f32, i32) {
    if stream.rest() != code::OK {
        return (0.0, stream.rest());
    }
    let Some(begin) = (pieces.byte_of)(row) else {
        return (0.0, code::OUT_OF_RANGE);
    };
    let stored = StoredFormat::of_number(gemv.stored).expect("a format");
    let shape = GroupShape::of(stored, gemv.columns);
    let bytes = stored.row_bytes(gemv.columns);
    assert_eq!(bytes, Some(u64::from(gemv.rows.row_bytes)));
    let mut ended = (0.0, code::NOT_RUN);
    let mut done = |_: u64, sum: f32, code: i32| ended = (sum, code);
    let mut window = [0u8; WINDOW_BYTES as usize];
    let mut cursor = RowCursor::new(0, begin);
    let of_row = u64::from(pieces.split.of_row.get());
    for number in row * of_row..(row + 1) * of_row {
        let code = stream.piece(pieces, number);
        let (begin, until) = pieces.piece(number);
        if code != code::OK {
            cursor.advance(shape, until, code, |_, _, _| 0.0, &mut done);
            if code < 0 {
                break;
            }
            continue;
        }
        let mut tile = begin & !(TILE_BYTES - 1);
        while tile < until {
            let end = until.min(tile + TILE_BYTES);
            let from = stream.address_in(pieces, number, tile);
            stream.take(&mut window, from, tile, tile.max(begin)..end);
            let dot = |byte: u64, groups: u32, group: u32| {
                let vector = (gemv.x, gemv.columns);
                dot(vector, stored, shape, &window, (byte, groups, group))
            };
            cursor.advance(shape, end, code::OK, dot, &mut done);
            tile += TILE_BYTES;
        }
    }
    cursor.give_up(1, stream.rest(), &mut done);
    ended
}
