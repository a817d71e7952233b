//! Blocks that read: each warp reads parts of strips from the drive and writes them to their stages as
//! halves. After a read without an end a warp reads no more, publishes its missing rows as NaN, and the other
//! warps continue.
// UNSAFETY: launches hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::kernel::{LaunchWords, count, strips, wait};
use super::{GemmStreamed, STRIP_ROWS};
use crate::arch::{Window, copy_16};
use crate::eight::{EightElements, words};
use crate::strip::{GroupShape, RowCursor, TILE_BYTES};
use crate::tile::mma::{pack_bf16, pack_f16};
use crate::tile::store4;
use core::cell::Cell;
use core::ops::Range;
use nvme_core::group::ThreadGroup;
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::ring::{RangePieces, RowPieces};
use nvme_gpu_kernel::rows::code;
use nvme_gpu_kernel::{RangeStream, WholeBlock, arch};

/// NaN as bf16 and as f16, the value of elements that were not read.
const NOT_READ: u16 = 0xFFFF;

/// Runs a block that reads. Every thread calls it.
///
/// # Safety
/// All memory that [`GemmStreamed`] names is allocated and stays so while the kernel runs.
#[inline(always)]
pub unsafe fn read(gemm: &GemmStreamed, block: &WholeBlock) {
    // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
    let stream = unsafe { RangeStream::enter(&gemm.rows) };
    let stored = StoredFormat::of_number(gemm.stored);
    let (Some(stored), Some(split), Some(strips)) = (stored, gemm.split(), strips(&gemm.gemm))
    else {
        stream.leave(0, 0);
        return;
    };
    let mut reader = GemmReader {
        gemm,
        stored,
        shape: GroupShape::of(stored, gemm.gemm.columns),
        stream,
        words: LaunchWords::new(&gemm.gemm, strips),
    };
    // A warp whose reads fail leaves the remaining batches to the other warps.
    while reader.stream.rest() == code::OK {
        let mut batch = 0;
        if arch::lane() == 0 {
            // SAFETY: this function's caller vouches for the addresses, as under `# Safety`.
            batch = unsafe { count(gemm.gemm.batches()) };
        }
        let batch = arch::shuffle(arch::FULL, batch, 0);
        let first = u64::from(batch) * gemm.batch_parts();
        let left = gemm.parts().saturating_sub(first);
        if left == 0 {
            break;
        }
        let pieces = RowPieces {
            byte_of: move |number: u64| Some(gemm.part_byte(first + number)),
            split,
            rows: left.min(gemm.batch_parts()),
            end: gemm.row_byte(gemm.gemm.rows.into()),
        };
        reader.stream.begin();
        let mut number = 0;
        while number < pieces.rows {
            reader.part(&pieces, (number, first + number));
            number += 1;
        }
    }
    let rest = match reader.stream.rest() {
        code::OK => code::NOT_RUN,
        rest => rest,
    };
    // A barrier: every warp of the block has filled all parts that it will fill.
    block.sync();
    if block.leads() {
        reader.words.strips.end_filling(gemm.readers, rest as u32);
    }
    let GemmReader { stream, words, .. } = reader;
    stream.leave(words.failed, words.worst);
}

struct GemmReader<'g> {
    gemm: &'g GemmStreamed,
    stored: StoredFormat,
    shape: GroupShape,
    stream: RangeStream<'g>,
    words: LaunchWords<'g>,
}

impl GemmReader<'_> {
    /// Reads part `part`, which has number `number` in its batch.
    #[inline(always)]
    fn part(
        &mut self,
        pieces: &RowPieces<impl Fn(u64) -> Option<u64>>,
        (number, part): (u64, u64),
    ) {
        let gemm = self.gemm;
        let (begin, row) = (gemm.part_byte(part), part as u32 * gemm.part_rows);
        let left = gemm.gemm.rows - row;
        let rows = if left < gemm.part_rows {
            left
        } else {
            gemm.part_rows
        };
        let strip = row / STRIP_ROWS;
        let to = gemm.stage(strip) + u64::from(row % STRIP_ROWS) * u64::from(gemm.gemm.columns) * 2;
        let why = self.wait(strip);
        let is_free = why == code::OK;
        let raw = matches!(self.stored, StoredFormat::Bf16 | StoredFormat::F16) && begin % 16 == 0;
        let of_part = u64::from(pieces.split.of_row.get());
        let mut cursor = RowCursor::new(row.into(), begin);
        let mut piece = number * of_part;
        let past = piece + of_part;
        while piece < past && pieces.is_read(piece) {
            let ended = match self.stream.rest() {
                code::OK => self.stream.piece(pieces, piece),
                rest => rest,
            };
            let (from, until) = pieces.piece(piece);
            if is_free && raw {
                self.copy(pieces, piece, ended, to + (from - begin));
            } else if is_free {
                self.convert(pieces, piece, ended, (&mut cursor, (row, to)));
            }
            if ended != code::OK {
                self.fail(gemm, from..until, ended);
            }
            piece += 1;
        }
        arch::sync_warp(arch::FULL);
        if arch::lane() == 0 {
            if is_free {
                self.words.strips.fill(strip);
            } else {
                self.words.fail(row..row + rows, why);
            }
        }
    }

    /// Waits until the stage of `strip` may be overwritten; returns [`code::OK`], or the reason why it never
    /// may.
    #[inline(always)]
    fn wait(&self, strip: u32) -> i32 {
        let gemm = self.gemm;
        let mut why = code::OK;
        if arch::lane() == 0 {
            let before = strip.saturating_sub(super::STAGES);
            let uses = gemm.gemm.tiles_of(before);
            let ready = || self.words.strips.may_fill(strip, uses);
            why = wait(&self.words.strips, gemm.patience_ns, ready);
        }
        // The barrier orders the writes of all lanes after lane 0's acquire of the strip's counter.
        arch::sync_warp(arch::FULL);
        arch::shuffle(arch::FULL, why as u32, 0) as i32
    }

    /// Marks rows with bytes in this range as not read.
    #[inline(always)]
    fn fail(&mut self, gemm: &GemmStreamed, bytes: Range<u64>, why: i32) {
        if arch::lane() == 0 {
            let row = |byte: u64| {
                let at = (byte - gemm.rows.first_byte).checked_div(gemm.rows.row_bytes.into());
                at.unwrap_or(0) as u32
            };
            let (first, last) = (row(bytes.start), row(bytes.end - 1));
            self.words.fail(first..last + 1, why);
        }
    }

    /// Copies the read's halves unchanged, or writes NaN if the read failed.
    #[inline(always)]
    fn copy(&self, pieces: &impl RangePieces, piece: u64, ended: i32, to: u64) {
        let (begin, until) = pieces.piece(piece);
        let bytes = (until - begin) as u32;
        if ended == code::OK {
            let from = self.stream.address_in(pieces, piece, begin);
            // SAFETY: the source is a landed read in the warp's slot; the target is part of a stage that
            // `may_fill` has freed and no other warp writes.
            unsafe { copy_16(to, from, bytes) };
            return;
        }
        let mut at = arch::lane() * 2;
        while at < bytes {
            // SAFETY: as above.
            unsafe { *((to + u64::from(at)) as usize as *mut u16) = NOT_READ };
            at += 64;
        }
    }

    /// Converts the units that end in this read to halves. `first` is the row at which the part begins, `to`
    /// its address.
    #[inline(always)]
    fn convert(
        &self,
        pieces: &impl RangePieces,
        piece: u64,
        ended: i32,
        (cursor, (first, to)): (&mut RowCursor, (u32, u64)),
    ) {
        let (gemm, shape, window) = (self.gemm, self.shape, Window::here());
        let row_bytes = u64::from(gemm.gemm.columns) * 2;
        let place = |row: u64| to + (row - u64::from(first)) * row_bytes;
        let row = Cell::new(cursor.row());
        let store = |byte: u64, groups: u32, group: u32| {
            let units = groups * shape.group_units;
            let to = place(row.get()) + u64::from(group * shape.group_units * UNIT) * 2;
            self.units(window, byte as u32, units, to);
            0.0
        };
        let mut done = |number: u64, _: f32, code: i32| {
            row.set(number + 1);
            if code != code::OK {
                // Other lanes may still be writing halves of this row; the barrier orders NaN after them.
                arch::sync_warp(arch::FULL);
                // SAFETY: the first 32 halves of a row of a stage that no other warp writes.
                unsafe {
                    let at = place(number) + u64::from(arch::lane()) * 2;
                    *(at as usize as *mut u16) = NOT_READ;
                }
            }
        };
        let (begin, until) = pieces.piece(piece);
        if ended != code::OK {
            cursor.advance(shape, until, ended, store, &mut done);
            return;
        }
        let mut tile = begin & !(TILE_BYTES - 1);
        while tile < until {
            let end = if until < tile + TILE_BYTES {
                until
            } else {
                tile + TILE_BYTES
            };
            let from = self.stream.address_in(pieces, piece, tile);
            window.take(tile, from, (begin, end));
            cursor.advance(shape, end, code::OK, store, &mut done);
            tile += TILE_BYTES;
        }
    }

    /// Converts `units` units, from byte `byte` of the window on, to address `to`, a multiple of 16.
    #[inline(always)]
    fn units(&self, window: Window, byte: u32, units: u32, to: u64) {
        let is_f16 = self.gemm.gemm.is_f16 != 0;
        // The format is the same for all units, so there is one loop for each, without a branch inside.
        match self.stored {
            StoredFormat::Bf16 | StoredFormat::F16 => shifted(window, (byte, units), to),
            StoredFormat::Q8_0 => scaled(StoredFormat::Q8_0, is_f16, window, (byte, units), to),
            StoredFormat::Q4_0 => scaled(StoredFormat::Q4_0, is_f16, window, (byte, units), to),
            StoredFormat::Q4_1 => scaled(StoredFormat::Q4_1, is_f16, window, (byte, units), to),
            StoredFormat::Q4K => halves(StoredFormat::Q4K, is_f16, window, (byte, units), to),
            _ => halves(StoredFormat::Q6K, is_f16, window, (byte, units), to),
        }
    }
}

/// Converts units with a scale each.
#[inline(always)]
fn scaled(stored: StoredFormat, is_f16: bool, window: Window, (byte, units): (u32, u32), to: u64) {
    let (_, bytes) = stored.block();
    let (half, word) = (|at| window.half(at), |at| window.word(at));
    let eight = |unit, quarter, pack: fn(f32, f32) -> u32| {
        let eight = EightElements::of(stored, (byte + unit * bytes, quarter), half, word);
        let [[a, b, c, d], [e, f, g, h]] = eight.values();
        [pack(a, b), pack(c, d), pack(e, f), pack(g, h)]
    };
    // One loop for each number format, without a branch inside.
    match is_f16 {
        true => quarters(units, to, |unit, quarter| eight(unit, quarter, pack_f16)),
        false => quarters(units, to, |unit, quarter| eight(unit, quarter, pack_bf16)),
    }
}

/// Copies units whose halves need no conversion.
#[inline(always)]
fn shifted(window: Window, (byte, units): (u32, u32), to: u64) {
    quarters(units, to, |unit, quarter| {
        words(byte + unit * UNIT * 2 + quarter * 16, |at| window.word(at))
    });
}

/// Converts units by the warp, eight units a turn, four lanes a unit. `eight` returns the halves of a quarter
/// of a unit.
#[inline(always)]
fn quarters(units: u32, to: u64, eight: impl Fn(u32, u32) -> [u32; 4]) {
    let lane = arch::lane();
    let (mut unit, mut at) = (lane / 4, to + u64::from(lane) * 16);
    while unit < units {
        let words = eight(unit, lane % 4);
        // SAFETY: inside a row of a stage that no other warp writes, at a multiple of 16.
        unsafe { store4(at, words.map(f32::from_bits)) };
        unit += 8;
        at += 512;
    }
}

/// Converts units one element a lane.
#[inline(always)]
fn halves(stored: StoredFormat, is_f16: bool, window: Window, (byte, units): (u32, u32), to: u64) {
    let lane = arch::lane();
    let half = |k: u32| window.half(byte + 2 * k);
    let mut unit = 0;
    while unit < units {
        let value = stored.element(unit, lane, half);
        let word = if is_f16 {
            pack_f16(value, 0.0)
        } else {
            pack_bf16(value, 0.0)
        };
        let at = to + u64::from(unit * UNIT + lane) * 2;
        // SAFETY: inside a row of a stage that no other warp writes.
        unsafe { *(at as usize as *mut u16) = word as u16 };
        unit += 1;
    }
}
