//! Kernels that use what they read, as a host thread: block after block, warp after warp. The product of a matrix on a
//! drive and a vector: the ring of a warp, its tiles and its rows are worked out by the code of the kernel; the lanes of a
//! warp are one.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::warps::{Reads, all_warps};
use nvme_compute_kernel::GemvStreamed;
use nvme_compute_kernel::strip::{GroupShape, RowCursor, TILE_BYTES, WINDOW_BYTES, first_row};
use nvme_core::CommandToken;
use nvme_formats::{StoredFormat, UNIT};
use nvme_gpu_kernel::ring::{RangePieces, RangeRing};
use nvme_gpu_kernel::rows::code;

/// All blocks of a launch of `blocks` blocks.
pub fn gemv(gemv: &GemvStreamed, blocks: u32) {
    all_warps(&gemv.rows, blocks, |(warp, warps), reads, fail| {
        strip(gemv, warp, warps, &mut Stream::new(reads), fail);
    });
}

/// The rows of one warp.
fn strip(
    gemv: &GemvStreamed,
    warp: u32,
    warps: u32,
    stream: &mut Stream<'_, '_>,
    fail: &mut dyn FnMut(u64, i32),
) {
    let stored = StoredFormat::of_number(gemv.stored).expect("a format");
    let shape = GroupShape::of(stored, gemv.columns);
    let rows = &gemv.rows;
    assert_eq!(
        stored.row_bytes(gemv.columns),
        Some(u64::from(rows.row_bytes))
    );
    let (first, end) = (
        first_row(rows.count, warp, warps),
        first_row(rows.count, warp + 1, warps),
    );
    if first == end {
        return;
    }
    let byte = |row: u64| rows.first_byte + row * u64::from(rows.row_bytes);
    let mut done = |row: u64, sum: f32, why: i32| {
        // SAFETY: the host gives an element for each row.
        let to = unsafe { (gemv.y as usize as *mut f32).add(row as usize) };
        let value = if why == code::OK { sum } else { f32::NAN };
        // SAFETY: as above.
        unsafe { to.write(value) };
        if why != code::OK {
            fail(row, why);
        }
    };
    let ring = RangeRing {
        begin: byte(first),
        end: byte(end),
        piece_shift: rows.slot_bytes.trailing_zeros(),
    };
    let mut window = [0u8; WINDOW_BYTES as usize];
    let mut cursor = RowCursor::new(first, byte(first));
    for number in ring.first()..=ring.last() {
        let ended = stream.piece(&ring, number);
        let (begin, until) = ring.piece(number);
        if ended != code::OK {
            cursor.advance(shape, until, ended, |_, _, _| 0.0, &mut done);
            if ended < 0 {
                break;
            }
            continue;
        }
        let mut tile = begin & !(TILE_BYTES - 1);
        while tile < until {
            let end = until.min(tile + TILE_BYTES);
            stream.take(
                &mut window,
                stream.address(tile),
                tile,
                tile.max(begin)..end,
            );
            let dot = |byte: u64, groups: u32, group: u32| {
                let vector = (gemv.x, gemv.columns);
                dot(vector, stored, shape, &window, (byte, groups, group))
            };
            cursor.advance(shape, end, code::OK, dot, &mut done);
            tile += TILE_BYTES;
        }
    }
    cursor.give_up(end, stream.rest(), &mut done);
}

/// Sum over the lanes of `groups` groups, the first of which is number `group` of its row and begins at `byte`, with the
/// vector of `columns` elements at `x`.
pub fn dot(
    (x, columns): (u64, u32),
    stored: StoredFormat,
    shape: GroupShape,
    window: &[u8],
    (byte, groups, group): (u64, u32, u32),
) -> f32 {
    let half = |k: u32| {
        let at = ((byte + 2 * u64::from(k)) % WINDOW_BYTES) as usize;
        u16::from_le_bytes([window[at], window[at + 1]])
    };
    let x = x as usize as *const f32;
    let first = group * shape.group_units * UNIT;
    let of_unit = |unit: u32| {
        (0..UNIT)
            .map(|lane| {
                let at = first + unit * UNIT + lane;
                assert!(at < columns, "outside the vector");
                // SAFETY: the host gives an element for each column.
                stored.element(unit, lane, half) * unsafe { *x.add(at as usize) }
            })
            .sum::<f32>()
    };
    (0..groups * shape.group_units).map(of_unit).sum()
}

/// The pieces of a warp.
pub struct Stream<'s, 'r> {
    reads: &'s mut Reads<'r>,
    /// The read under way at each stage, or the code of the last one.
    stages: Vec<Result<CommandToken, i32>>,
    fetched: u64,
    due: u64,
}

impl<'s, 'r> Stream<'s, 'r> {
    pub fn new(reads: &'s mut Reads<'r>) -> Self {
        Self {
            reads,
            stages: Vec::new(),
            fetched: 0,
            due: 0,
        }
    }

    /// As `nvme_gpu_kernel::RangeStream::piece`.
    pub fn piece(&mut self, pieces: &impl RangePieces, number: u64) -> i32 {
        if self.reads.ends == code::OK && self.reads.gate.look().is_err() {
            self.reads.ends = code::GONE;
        }
        if self.stages.is_empty() {
            self.stages
                .resize_with(pieces.stages() as usize, || Err(code::OK));
        }
        if number >= self.due {
            for stage in 0..pieces.stages() {
                let next = pieces.next_at(stage, number);
                let is_new = next >= self.fetched && next <= pieces.last();
                if is_new && self.reads.ends == code::OK && pieces.is_read(next) {
                    self.stages[stage as usize] = self.submit(pieces, next);
                }
            }
            self.fetched = number + u64::from(pieces.stages());
            self.due = number + pieces.batch();
        }
        if self.reads.ends != code::OK {
            let all = (0..self.stages.len()).map(|stage| self.wait(stage)).min();
            self.reads.has_lost |= all.is_some_and(|code| code < 0);
            return self.reads.ends;
        }
        let ended = self.wait(pieces.stage(number) as usize);
        if ended < 0 {
            self.reads.has_lost = true;
            self.reads.ends = code::NOT_RUN;
        }
        ended
    }

    /// As `nvme_gpu_kernel::RangeStream::begin`.
    pub fn begin(&mut self) {
        self.fetched = 0;
        self.due = 0;
    }

    /// As `nvme_gpu_kernel::RangeStream::rest`.
    pub fn rest(&self) -> i32 {
        self.reads.ends
    }

    /// The bytes of piece `number`, which has landed and begins with a block.
    pub fn bytes(&self, pieces: &impl RangePieces, number: u64) -> Vec<u8> {
        let (begin, end) = pieces.piece(number);
        let from = (self.reads.rows.slots + self.reads.slots + pieces.slot(number, begin)) as usize
            as *const u8;
        let each = (0..(end - begin) as usize).map(|at| {
            // SAFETY: a stage of the warp's slots, whose read has ended.
            unsafe { from.add(at).read_volatile() }
        });
        each.collect()
    }

    /// Where a byte of a [`RangeRing`] lies that has landed.
    fn address(&self, byte: u64) -> u64 {
        self.reads.rows.slots + self.reads.slots + RangeRing::place(byte)
    }

    /// As `nvme_gpu_kernel::RangeStream::address_in`.
    pub fn address_in(&self, pieces: &impl RangePieces, number: u64, byte: u64) -> u64 {
        let shift = self.reads.rows.block_shift;
        let block = pieces.piece(number).0 >> shift << shift;
        let slot = self.reads.slots + pieces.slot(number, block);
        (self.reads.rows.slots + slot).wrapping_add(byte.wrapping_sub(block))
    }

    /// Copies the bytes `bytes` of the drive, which are of the tile from `tile` on, to their half of the window. That tile
    /// lies at `from`.
    pub fn take(&self, window: &mut [u8], from: u64, tile: u64, bytes: std::ops::Range<u64>) {
        let from = from as usize as *const u8;
        let half = &mut window[(tile % WINDOW_BYTES) as usize..][..TILE_BYTES as usize];
        let (begin, end) = ((bytes.start - tile) as usize, (bytes.end - tile) as usize);
        for (at, to) in (begin..end).zip(&mut half[begin..end]) {
            // SAFETY: a tile of a slot of the warp, whose read has ended.
            *to = unsafe { from.wrapping_add(at).read_volatile() };
        }
    }

    fn submit(&self, pieces: &impl RangePieces, number: u64) -> Result<CommandToken, i32> {
        let rows = self.reads.rows;
        let (begin, end) = pieces.piece(number);
        let place = rows.blocks_of(begin, (end - begin) as u32);
        let slot = self.reads.slots + pieces.slot(number, place.block << rows.block_shift);
        self.reads.submit(place, slot, pieces.stage(number))
    }

    /// How the last read of a stage ended.
    fn wait(&mut self, stage: usize) -> i32 {
        let Some(of) = self.stages.get_mut(stage) else {
            return code::OK;
        };
        let code = match std::mem::replace(of, Err(code::OK)) {
            Err(code) => code,
            Ok(token) => self.reads.wait(token),
        };
        *of = Err(code);
        code
    }
}
