//! Products whose matrix streams from a drive, as a host thread: parts, their pieces and the words of a launch are worked
//! out by the code of the kernel. The matrix is read whole before it is multiplied with: there are no stages.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::streamed::Stream;
use crate::warps::all_warps;
use nvme_compute_kernel::gemm::{GemmParameters, GemmStreamed};
use nvme_compute_kernel::reference;
use nvme_formats::{StoredFormat, bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use nvme_gpu_kernel::ring::{RangePieces, RowPieces};
use nvme_gpu_kernel::rows::code;
use std::cell::RefCell;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Zeroes the words of a launch.
pub fn clear(gemm: &GemmParameters) {
    let first = gemm.words as usize as *mut u32;
    // SAFETY: the host gives this number of words.
    unsafe { from_raw_parts_mut(first, gemm.work_words() as usize) }.fill(0);
}

/// The product of a matrix in memory of the GPU.
pub fn resident(gemm: &GemmParameters) {
    let count = gemm.rows as usize * gemm.columns as usize;
    // SAFETY: the host gives this number of halves.
    let w = unsafe { from_raw_parts(gemm.w as usize as *const u16, count) };
    multiply(gemm, w, &vec![code::OK; gemm.rows as usize]);
}

/// The matrix as halves, and what became of its rows.
struct Matrix {
    w: Vec<u16>,
    codes: Vec<i32>,
}

pub fn streamed(gemm: &GemmStreamed, blocks: u32) {
    assert!(
        gemm.readers >= 1 && gemm.readers < blocks,
        "blocks that multiply"
    );
    let (rows, columns) = (gemm.gemm.rows as usize, gemm.gemm.columns as usize);
    let matrix = RefCell::new(Matrix {
        w: vec![0; rows * columns],
        codes: vec![code::NOT_RUN; rows],
    });
    all_warps(&gemm.rows, gemm.readers, |(warp, warps), reads, fail| {
        let mut stream = Stream::new(reads);
        let mut batch = u64::from(warp);
        while batch * gemm.batch_parts() < gemm.parts() {
            read(gemm, batch, &mut stream, &mut matrix.borrow_mut());
            batch += u64::from(warps);
        }
        if warp + 1 == warps {
            let matrix = matrix.borrow();
            multiply(&gemm.gemm, &matrix.w, &matrix.codes);
            let lost = matrix.codes.iter().zip(0..);
            for (why, row) in lost.filter(|(why, _)| **why != code::OK) {
                fail(row, *why);
            }
        }
    });
}

/// Reads a batch of parts.
fn read(gemm: &GemmStreamed, batch: u64, stream: &mut Stream<'_, '_>, matrix: &mut Matrix) {
    let stored = StoredFormat::of_number(gemm.stored).expect("a format");
    let bytes = stored.row_bytes(gemm.gemm.columns);
    assert_eq!(bytes, Some(u64::from(gemm.rows.row_bytes)));
    let first = batch * gemm.batch_parts();
    let pieces = RowPieces {
        byte_of: |number: u64| Some(gemm.part_byte(first + number)),
        split: gemm.split().expect("a split"),
        rows: (gemm.parts() - first).min(gemm.batch_parts()),
        end: gemm.row_byte(gemm.gemm.rows.into()),
    };
    stream.begin();
    let of_part = u64::from(pieces.split.of_row.get());
    for number in 0..pieces.rows {
        let first_row = ((first + number) * u64::from(gemm.part_rows)) as usize;
        let rows = (matrix.codes.len() - first_row).min(gemm.part_rows as usize);
        let codes = &mut matrix.codes[first_row..][..rows];
        codes.fill(code::OK);
        let begin = gemm.part_byte(first + number);
        let mut bytes = vec![0; rows * gemm.rows.row_bytes as usize];
        for piece in number * of_part..(number + 1) * of_part {
            if !pieces.is_read(piece) {
                continue;
            }
            let ended = match stream.rest() {
                code::OK => stream.piece(&pieces, piece),
                rest => rest,
            };
            let (from, until) = pieces.piece(piece);
            let (from, until) = ((from - begin) as usize, (until - begin) as usize);
            if ended == code::OK {
                let at = stream.address_in(&pieces, piece, pieces.piece(piece).0);
                let at = at as usize as *const u8;
                for (offset, to) in bytes[from..until].iter_mut().enumerate() {
                    // SAFETY: bytes of a slot of the warp, whose read has ended.
                    *to = unsafe { at.add(offset).read_volatile() };
                }
                continue;
            }
            let row_bytes = gemm.rows.row_bytes as usize;
            for code in &mut codes[from / row_bytes..=(until - 1) / row_bytes] {
                *code = if *code == code::OK { ended } else { *code };
            }
        }
        let columns = gemm.gemm.columns as usize;
        let to = matrix.w[first_row * columns..].chunks_mut(columns);
        for (row, to) in bytes.chunks(gemm.rows.row_bytes as usize).zip(to) {
            let mut numbers = vec![0.0; columns];
            reference::unpack(stored, row, &mut numbers);
            for (to, number) in to.iter_mut().zip(numbers) {
                *to = match gemm.gemm.is_f16 {
                    0 => bf16_of_f32(number),
                    _ => f16_of_f32(number),
                };
            }
        }
    }
}

/// Every element of `Y`: NaN where the row of `W` was not read.
fn multiply(gemm: &GemmParameters, w: &[u16], codes: &[i32]) {
    let (rows, columns) = (gemm.rows as usize, gemm.columns as usize);
    let wide = |half: &u16| match gemm.is_f16 {
        0 => f32_of_bf16(*half),
        _ => f32_of_f16(*half),
    };
    let w: Vec<f32> = w.iter().map(wide).collect();
    // SAFETY: the host gives this number of halves, and of elements.
    let (x, y) = unsafe {
        let x = gemm.x as usize as *const u16;
        let y = gemm.y as usize as *mut f32;
        let tokens = gemm.tokens as usize;
        (
            from_raw_parts(x, tokens * columns),
            from_raw_parts_mut(y, tokens * rows),
        )
    };
    for (y, x) in y.chunks_mut(rows.max(1)).zip(x.chunks(columns)) {
        let x: Vec<f32> = x.iter().map(wide).collect();
        for ((y, w), why) in y.iter_mut().zip(w.chunks(columns)).zip(codes) {
            let sum = x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>();
            *y = if *why == code::OK { sum } else { f32::NAN };
        }
    }
}
