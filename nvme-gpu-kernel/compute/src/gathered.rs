//! Products of a vector with rows of a table on a drive, chosen by ids in GPU memory: each warp reads rows
//! while it multiplies the ones before.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::GemvGathered;
use crate::arch::{self as here, FloatArray, Window, id, sum_of_warp};
use crate::strip::{GroupShape, RowCursor, TILE_BYTES, first_row};
use crate::sums::sum_of_units;
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::ring::{RangePieces, RowPieces};
use nvme_gpu_kernel::rows::{code, worst};
use nvme_gpu_kernel::{RangeStream, arch, entry};

entry! {
    /// Computes the products. A warp takes consecutive ids.
    ///
    /// # Safety
    /// All memory that [`GemvGathered`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_gemv_gathered(gemv: GemvGathered) {
        let (Some(stored), Some(split)) = (StoredFormat::of_number(gemv.stored), gemv.split()) else {
            return;
        };
        let shape = GroupShape::of(stored, gemv.columns);
        if shape.groups == 0 {
            return;
        }
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let (mut stream, x, y) = unsafe {
            (
                RangeStream::enter(&gemv.rows),
                FloatArray::at(gemv.x),
                FloatArray::at(gemv.y),
            )
        };
        let (warp, warps) = here::warp();
        let first = first_row(gemv.rows.count, warp as u32, warps as u32);
        let end = first_row(gemv.rows.count, warp as u32 + 1, warps as u32);
        let pieces = RowPieces {
            // SAFETY: the host vouches for `count` ids, and `first + row` is below `count`.
            byte_of: |row: u64| gemv.byte_of(unsafe { id(&gemv.rows, first + row) }),
            split,
            rows: end - first,
            end: u64::MAX,
        };
        let window = Window::here();
        let dot = |byte: u64, groups: u32, group: u32| {
            let units = groups * shape.group_units;
            let first = u64::from(group * shape.group_units * UNIT);
            sum_of_units(stored, window, byte as u32, units, (x, first))
        };
        let (mut failed, mut lowest) = (0, 0);
        let mut row = 0;
        while row < pieces.rows {
            let (mut sum, mut why) = (0.0, code::OUT_OF_RANGE);
            let mut done = |_: u64, of_row: f32, code: i32| (sum, why) = (of_row, code);
            if stream.rest() != code::OK {
                done(0, 0.0, stream.rest());
            } else if let Some(begin) = (pieces.byte_of)(row) {
                let mut cursor = RowCursor::new(0, begin);
                let of_row = u64::from(split.of_row.get());
                let mut number = row * of_row;
                let past = number + of_row;
                while number < past {
                    let code = stream.piece(&pieces, number);
                    let (begin, until) = pieces.piece(number);
                    if code != code::OK {
                        cursor.advance(shape, until, code, dot, &mut done);
                    }
                    if code < 0 {
                        break;
                    }
                    let mut tile = begin & !(TILE_BYTES - 1);
                    while code == code::OK && tile < until {
                        let end = if until < tile + TILE_BYTES {
                            until
                        } else {
                            tile + TILE_BYTES
                        };
                        let from = stream.address_in(&pieces, number, tile);
                        window.take(tile, from, (begin, end));
                        cursor.advance(shape, end, code::OK, dot, &mut done);
                        tile += TILE_BYTES;
                    }
                    number += 1;
                }
                cursor.give_up(1, stream.rest(), &mut done);
            }
            let sum = sum_of_warp(sum);
            if arch::lane() == 0 {
                y.store(first + row, if why == code::OK { sum } else { f32::NAN });
            }
            if why != code::OK {
                failed += 1;
                let this = worst(first + row, None, why);
                lowest = if this > lowest { this } else { lowest };
            }
            row += 1;
        }
        stream.leave(failed, lowest);
    }
}
