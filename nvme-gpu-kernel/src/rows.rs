//! Rows of a table: where a row's bytes lie on the drive, and the words of launches that gather or scatter rows.
//!
//! Addresses are device addresses. `nvme_gather` takes one [`Gather`] by value.

use crate::Queues;
use core::mem::offset_of;

/// Threads of each block of `nvme_gather`.
pub const BLOCK_THREADS: u32 = 256;
/// Warps of each block: each gathers 32 rows at a time.
pub const BLOCK_WARPS: u32 = BLOCK_THREADS / 32;
/// Result cells of one station: rows that a block has under way at most.
pub const STATION_CELLS: u32 = BLOCK_THREADS;
/// Bytes of the slots of one warp.
pub const WARP_BYTES: u64 = 128 << 10;
/// Bytes of the slots of one station.
pub const STATION_BYTES: u64 = WARP_BYTES * BLOCK_WARPS as u64;

/// What became of a row: 0 and the NVMe status (SCT << 8 | SC) of its read are 0 or more, these are less.
pub mod code {
    /// The row's bytes are where they were asked for.
    pub const OK: i32 = 0;
    /// The table has no such row.
    pub const OUT_OF_RANGE: i32 = -1;
    /// The read got no answer before its deadline.
    pub const TIMED_OUT: i32 = -2;
    /// The controller was reset meanwhile, or is gone.
    pub const GONE: i32 = -3;
    /// The launch gave up before it came to this row.
    pub const NOT_RUN: i32 = -5;
}

/// A launch that gathers rows, and the memory that it uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Gather {
    /// The queues, with a result cell for each row of each station.
    pub queues: Queues,
    /// The words of the [`Gate`](nvme_core::gate::Gate), in memory of the host.
    pub gate: u64,
    /// A `u32` for each station: 0 while it is free.
    pub stations: u64,
    /// Slot memory: [`STATION_BYTES`] for each station.
    pub slots: u64,
    /// Where the controller finds it.
    pub slots_iova: u64,
    /// The rows asked for, `i32` or `i64` each; 0 for rows 0, 1, 2 and so on.
    pub ids: u64,
    /// Where row k goes: `out + k * out_stride`.
    pub out: u64,
    /// One `i32` for each row ([`code`]), or 0 for none.
    pub status: u64,
    /// One [`Progress`], which belongs to the summary.
    pub progress: u64,
    /// One [`Summary`] in memory of the host.
    pub summary: u64,
    /// How many rows are asked for.
    pub count: u64,
    /// Where row 0 begins in the namespace, in bytes.
    pub first_byte: u64,
    /// Rows of the table.
    pub rows: u64,
    /// Bytes from one row to the next in the output.
    pub out_stride: u64,
    /// How long each read may take.
    pub timeout_ns: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// Bytes of a slot: the blocks that one row can touch.
    pub slot_bytes: u32,
    /// Neighbouring rows that one command may read together, at least 1.
    pub run_rows: u32,
    /// log2 of the bytes of a block.
    pub block_shift: u32,
    /// log2 of the bytes that all addresses and lengths here are multiples of, 0 to 4.
    pub unit_shift: u32,
    /// Namespace.
    pub nsid: u32,
    /// Whether ids are `i64`.
    pub wide_ids: u32,
    /// Stations.
    pub station_count: u32,
    /// Rows that a warp has under way, 1 to 32.
    pub lanes: u32,
    /// What a row becomes that was not read: 0 for zero bytes, or a [`Format`](nvme_formats::Format) whose
    /// [`zero_byte`](nvme_formats::Format::zero_byte)s it gets.
    pub failed_as: u32,
}

// As `nvme_gpu_rows` of nvme_gpu_device.cuh.
const _: () = assert!(size_of::<Gather>() == 176);
const _: () = assert!(offset_of!(Gather, first_byte) == 104);
const _: () = assert!(offset_of!(Gather, timeout_ns) == 128);

/// A launch that gathers rows by way of a cache of them: `nvme_gather_cached`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Cached {
    /// The launch. Its `unit_shift` holds for `data` and `line_bytes`, too.
    pub gather: Gather,
    /// The words of the [`RowCache`](nvme_core::row_cache::RowCache): a `u32`, a `u64` and a `u64` for each line.
    pub states: u64,
    /// As above.
    pub ids: u64,
    /// As above.
    pub epochs: u64,
    /// `line_bytes` bytes for each line.
    pub data: u64,
    /// A `u64` in memory of the host: how many writes of the host have ended.
    pub written_by_host: u64,
    /// A `u64` in memory of the GPU: how many blocks of scatters have ended.
    pub written_by_gpu: u64,
    /// Lines.
    pub lines: u32,
    /// Bytes from one line to the next: those of a row, rounded up to 16.
    pub line_bytes: u32,
}

/// Rows that a launch writes at most, where it is given ids: each is compared with all later ones.
pub const SCATTER_ROWS: u64 = 32_768;

/// A launch that writes rows: `nvme_scatter`. First byte and length of the table's rows are multiples of a block, and
/// the table has fewer than 2^32 of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Scatter {
    /// The launch: rows come from `out`.
    pub gather: Gather,
    /// A `u64` in memory of the GPU, which each block counts up when its writes have ended.
    pub written: u64,
}

/// A launch that widens the elements of rows that lie in GPU memory, in place: `nvme_widen_rows`.
///
/// `out` of the launch is where the stored row of row 0 lies: in the last bytes of the place of its wide one. Besides it
/// `out_stride`, `count`, `progress` and `summary` are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Widened {
    /// The launch.
    pub gather: Gather,
    /// A [`Format`](nvme_formats::Format).
    pub format: u32,
    /// A [`Wide`](nvme_formats::Wide).
    pub wide: u32,
    /// Elements of a row, at least 1.
    pub elements: u32,
    /// Bytes from where a wide row begins to where its stored row does.
    pub before: u32,
}

/// Members that a launch over stripes has at most: each is the business of one lane of a warp.
pub const MEMBERS: u32 = 32;

/// One of the drives that a launch over stripes reads, as it lies in memory of the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Member {
    /// Its queues, with a result cell for each row of each station.
    pub queues: Queues,
    /// The words of its gate, for as many stations as the launch has.
    pub gate: u64,
    /// A `u32` for each station: the word of a [`Party`](nvme_core::gate::Party) of the station's warps.
    pub stations: u64,
    /// Slot memory of its own: [`STATION_BYTES`] for each station.
    pub slots: u64,
    /// Where its controller finds it.
    pub slots_iova: u64,
    /// Namespace.
    pub nsid: u32,
    /// log2 of the bytes of its blocks.
    pub block_shift: u32,
}

/// A launch that gathers rows of several drives in stripes: `nvme_gather_striped`.
///
/// `queues`, `gate`, `slots` and `nsid` of the gather mean nothing: each member has its own. A row touches two members
/// at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Striped {
    /// The launch.
    pub gather: Gather,
    /// A [`Member`] for each.
    pub members: u64,
    /// log2 of the bytes of one member before the next one follows: fewer than 2^32 times in all.
    pub stripe_shift: u32,
    /// How many members, [`MEMBERS`] at most.
    pub member_count: u32,
}

/// Ranges that a launch reads at most: what the parameters of a kernel hold.
pub const RANGES: usize = 96;

/// A range of bytes of a drive, and where it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// Its first byte in the namespace.
    pub byte: u64,
    /// How many, at least 1.
    pub bytes: u64,
    /// Where they go.
    pub to: u64,
    /// Pieces of the ranges before it.
    pub first: u64,
}

/// Ranges, and the pieces in which they are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Split {
    /// How many are set, at least 1.
    pub range_count: u32,
    /// log2 of the bytes of a piece.
    pub piece_shift: u32,
}

/// A launch that reads ranges of bytes: `nvme_read_ranges`. A piece of a range ends where the drive's bytes are a
/// multiple of `row_bytes`, a power of two of whole blocks.
///
/// `count` of the gather is the pieces of all ranges. Its ids, table, output and row status mean nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Ranges {
    /// The launch. Its `unit_shift` holds for pieces of `row_bytes` bytes.
    pub gather: Gather,
    /// How the ranges are split.
    pub split: Split,
    /// The ranges.
    pub ranges: [Range; RANGES],
}

// What kernels for sm_80 take.
const _: () = assert!(size_of::<Ranges>() <= 4096);

/// What lies before the [`Range`]s of a list in GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ListHead {
    /// How many ranges follow.
    pub range_count: u64,
    /// Pieces of all of them.
    pub pieces: u64,
}

/// A launch that reads ranges of bytes which a kernel before it listed: `nvme_read_listed`.
///
/// As [`Ranges`], with `count` as the most pieces. `status` of the gather has a code for each piece. A list with more ranges
/// or pieces than the launch takes is refused as a whole, before anything is read: each of its pieces is `OUT_OF_RANGE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Listed {
    /// The launch.
    pub gather: Gather,
    /// A [`ListHead`] in memory of the GPU, and its ranges.
    pub list: u64,
    /// Ranges at most, [`LIST_RANGES`] of them.
    pub most_ranges: u32,
    /// log2 of the bytes of a piece.
    pub piece_shift: u32,
}

impl Listed {
    /// Whether the launch takes a list with this head.
    #[inline(always)]
    pub fn takes(&self, head: &ListHead) -> bool {
        head.range_count <= u64::from(self.most_ranges) && head.pieces <= self.gather.count
    }
}

/// Ranges of a list at most: their bytes are counted in 32 bits.
pub const LIST_RANGES: u32 = (u32::MAX / size_of::<Range>() as u32) + 1;

/// A piece of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Its range.
    pub range: u32,
    /// Its first byte in the namespace.
    pub byte: u64,
    /// How many; 0 for a piece that the ranges do not have.
    pub bytes: u32,
    /// Where they go.
    pub to: u64,
}

/// A launch that checks gathered rows of a table whose words count up: `nvme_check_rows`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Check {
    /// Ids and output of the gather; rows of a multiple of 8 bytes.
    pub gather: Gather,
    /// Seed of the [`data_word`](crate::work::data_word)s of the table.
    pub seed: u64,
    /// A count of rows with a wrong word, `u64`.
    pub wrong: u64,
}

/// A launch whose walks go from row to row of a table by what the rows hold: `nvme_follow_rows`.
///
/// Walk `w` begins with row `ids[w]`. The `u64` that a row begins with, modulo `rows`, is the id of the walk's next row.
/// Row `h` of walk `w` goes to `out + (w * hops + h) * out_stride`. Rows have a multiple of 16 bytes, from a multiple of
/// 16 on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Follow {
    /// The launch: `count` walks, `lanes` of them by a warp at a time.
    pub gather: Gather,
    /// Gets an `i64` for each walk: the id after its last row.
    pub ends: u64,
    /// Rows of each walk.
    pub hops: u32,
    /// 0.
    pub reserved: u32,
}

/// Counts of a launch that is under way, in memory of the GPU, zeroed before the first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Progress {
    /// Rows that were not read.
    pub failed: u64,
    /// [`worst`] of the first of them.
    pub worst: u64,
    /// Blocks that have ended, and marks of launches of which some have; see `launch_end`.
    pub blocks: u64,
    /// As `failed`, of ends that the host was told of while another launch with these words ended.
    pub kept_failed: u64,
    /// As `worst`, of these.
    pub kept_worst: u64,
    /// Launches that have ended: not zeroed.
    pub launches: u32,
    /// Ends that the host is being told of.
    pub ending: u32,
}

/// What a launch came to, in memory of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Summary {
    /// As in [`Progress`].
    pub failed: u64,
    /// As in [`Progress`].
    pub worst: u64,
    /// How many launches with this summary have ended, stored last: `launches` of [`Progress`].
    pub ended: u32,
    /// Zero.
    pub reserved: u32,
}

/// The number of a row that failed, the member of a stripe that failed it, and its code, in a word that is larger for a
/// lower number. Never 0.
pub const fn worst(row: u64, member: Option<u32>, code: i32) -> u64 {
    let member = match member {
        Some(member) => (member as u64 + 1) & 0xFF,
        None => 0,
    };
    (!row) << 24 | member << 16 | code as u16 as u64
}

/// The row, the member and the code of [`worst`], for numbers below 2^39 and members below 255.
pub const fn of_worst(word: u64) -> (u64, Option<u32>, i32) {
    let member = (word >> 16) as u32 & 0xFF;
    (
        !(word >> 24) & ((1 << 40) - 1),
        member.checked_sub(1),
        word as u16 as i16 as i32,
    )
}

/// Where a row lies: the blocks that hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its first byte in the namespace.
    pub byte: u64,
    /// The block that holds that byte.
    pub block: u64,
    /// How many blocks hold the row.
    pub blocks: u32,
}

impl Gather {
    /// Threads of a block that read rows by themselves at a time: each has a slot and a cell of the station.
    pub const fn threads(&self) -> u32 {
        let slots = match STATION_BYTES.checked_div(self.slot_bytes as u64) {
            Some(slots) => slots,
            None => 0,
        };
        if slots < STATION_CELLS as u64 {
            slots as u32
        } else {
            STATION_CELLS
        }
    }

    /// Where row `id` lies, if the table has it. The host has checked that the table ends inside the namespace.
    #[inline(always)]
    pub fn place(&self, id: i64) -> Option<Place> {
        let row = id as u64;
        if id < 0 || row >= self.rows {
            return None;
        }
        let byte = self
            .first_byte
            .wrapping_add(row.wrapping_mul(u64::from(self.row_bytes)));
        let block = byte >> self.block_shift;
        let last = byte.wrapping_add(u64::from(self.row_bytes) - 1) >> self.block_shift;
        let blocks = (last.wrapping_sub(block) as u32).wrapping_add(1);
        Some(Place {
            byte,
            block,
            blocks,
        })
    }

    /// The blocks that hold `bytes` bytes from `byte` on; means nothing without a byte.
    #[inline(always)]
    pub fn blocks_of(&self, byte: u64, bytes: u32) -> Place {
        let block = byte >> self.block_shift;
        let last = byte.wrapping_add(u64::from(bytes)).wrapping_sub(1) >> self.block_shift;
        let blocks = (last.wrapping_sub(block) as u32).wrapping_add(1);
        Place {
            byte,
            block,
            blocks,
        }
    }
}

impl Range {
    /// Its pieces.
    pub const fn pieces(&self, piece_shift: u32) -> u64 {
        ((self.byte + self.bytes - 1) >> piece_shift) - (self.byte >> piece_shift) + 1
    }
}

impl Split {
    /// Piece `index` of all, of `most` ranges at most. `word` gives the `u64` at a byte of the ranges.
    #[inline(always)]
    pub fn piece(&self, index: u64, most: u32, word: impl Fn(u32) -> u64) -> Piece {
        let of = |range: u32, field: usize| word(range * size_of::<Range>() as u32 + field as u32);
        // The last range that begins at it or before.
        let mut at = 0;
        let mut step = most.next_power_of_two() / 2;
        while step != 0 {
            let next = at + step;
            if next < self.range_count && of(next, offset_of!(Range, first)) <= index {
                at = next;
            }
            step /= 2;
        }
        let first = of(at, offset_of!(Range, byte));
        // A list comes from a kernel of a program: whatever its words are, a piece lies inside its range.
        let past = first.saturating_add(of(at, offset_of!(Range, bytes)));
        let before = index.wrapping_sub(of(at, offset_of!(Range, first)));
        let number = (first >> self.piece_shift).wrapping_add(before);
        let byte = first.max(number << self.piece_shift);
        let end = past.min(number.wrapping_add(1) << self.piece_shift);
        Piece {
            range: at,
            byte,
            bytes: end.saturating_sub(byte) as u32,
            to: of(at, offset_of!(Range, to)).wrapping_add(byte - first),
        }
    }
}

impl Ranges {
    /// Piece `index` of all.
    pub fn piece(&self, index: u64) -> Piece {
        self.split.piece(index, RANGES as u32, |at| self.word(at))
    }

    /// The `u64` at byte `at` of the ranges; 0 past the last one.
    fn word(&self, at: u32) -> u64 {
        let at = at as usize;
        let Some(range) = self.ranges.get(at / size_of::<Range>()) else {
            return 0;
        };
        match at % size_of::<Range>() / 8 {
            0 => range.byte,
            1 => range.bytes,
            2 => range.to,
            _ => range.first,
        }
    }
}

/// Bytes of a slot for rows of `row_bytes` bytes that begin at multiples of `row_bytes` from `first_byte` on.
pub const fn slot_bytes(first_byte: u64, row_bytes: u32, block_shift: u32) -> u64 {
    let block = 1u64 << block_shift;
    let row = row_bytes as u64;
    // A row that begins at the last byte of a block touches the most; rows that begin at multiples of a unit
    // begin at most at the block's last unit.
    let unit = 1u64 << tz(first_byte | row | block);
    let worst = (block - unit) + row;
    worst.div_ceil(block) << block_shift
}

const fn tz(value: u64) -> u32 {
    value.trailing_zeros()
}

#[cfg(test)]
mod tests;
