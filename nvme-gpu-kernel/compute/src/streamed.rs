//! The product of a matrix on a drive with a vector: each warp reads its rows while it multiplies the ones
//! before.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::GemvStreamed;
use crate::arch::{self as here, FloatArray, Window, sum_of_warp};
use crate::strip::{GroupShape, RowCursor, TILE_BYTES, first_row};
use crate::sums::sum_of_units;
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::ring::{RangePieces, RangeRing};
use nvme_gpu_kernel::rows::{code, worst};
use nvme_gpu_kernel::{RangeStream, arch, entry};

entry! {
    /// Computes the products. A warp takes consecutive rows.
    ///
    /// # Safety
    /// All memory that [`GemvStreamed`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_gemv_streamed(gemv: GemvStreamed) {
        let Some(stored) = StoredFormat::of_number(gemv.stored) else {
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
        let rows = gemv.rows.count;
        let first = first_row(rows, warp as u32, warps as u32);
        let end = first_row(rows, warp as u32 + 1, warps as u32);
        let byte = |row: u64| gemv.rows.first_byte + row * u64::from(gemv.rows.row_bytes);
        let mut ended = FailedRows {
            failed: 0,
            worst: 0,
        };
        let mut done = |row: u64, sum: f32, code: i32| ended.row(y, row, sum, code);
        let window = Window::here();
        let dot = |byte: u64, groups: u32, group: u32| {
            let units = groups * shape.group_units;
            let first = u64::from(group * shape.group_units * UNIT);
            sum_of_units(stored, window, byte as u32, units, (x, first))
        };
        let mut cursor = RowCursor::new(first, byte(first));
        let ring = RangeRing {
            begin: byte(first),
            end: byte(end),
            piece_shift: gemv.rows.slot_bytes.trailing_zeros(),
        };
        let mut number = ring.first();
        while first < end && number <= ring.last() {
            let code = stream.piece(&ring, number);
            let (begin, until) = ring.piece(number);
            if code != code::OK {
                cursor.advance(shape, until, code, dot, &mut done);
                if code < 0 {
                    break;
                }
            }
            let mut tile = begin & !(TILE_BYTES - 1);
            while code == code::OK && tile < until {
                let end = until.min(tile + TILE_BYTES);
                window.take(tile, stream.address(tile), (begin, end));
                cursor.advance(shape, end, code::OK, dot, &mut done);
                tile += TILE_BYTES;
            }
            number += 1;
        }
        cursor.give_up(end, stream.rest(), &mut done);
        stream.leave(ended.failed, ended.worst);
    }
}

/// The failures of a warp's rows.
struct FailedRows {
    failed: u64,
    worst: u64,
}

impl FailedRows {
    /// Ends row `row`: adds up `sum`, the lane's share, and stores the result. Every lane calls it.
    #[inline(always)]
    fn row(&mut self, y: FloatArray, row: u64, sum: f32, code: i32) {
        let sum = sum_of_warp(sum);
        if arch::lane() == 0 {
            y.store(row, if code == code::OK { sum } else { f32::NAN });
        }
        if code != code::OK {
            self.failed += 1;
            let this = worst(row, None, code);
            self.worst = if this > self.worst { this } else { self.worst };
        }
    }
}
