//! Rows of a table: the location of a row's bytes on the drive, and the words of launches that gather or
//! scatter rows.
//!
//! Addresses are device addresses. Each kernel takes one of the structures by value: `nvme_gather` a
//! [`GatherLaunch`], the others a structure that begins with one. The host fills it in; [`LaunchSummary`] tells the
//! host the result.

mod ranges;
mod striped;

pub use ranges::{
    LIST_RANGES, ListHead, ListedLaunch, RANGES, RangePiece, RangeSplit, RangeTarget, RangesLaunch,
};
pub use striped::{BatchedStripes, MEMBERS, StripedGather, StripedMember};

use crate::QueueArray;
use core::mem::offset_of;
use nvme_formats::Format;

/// Threads of each block of `nvme_gather`.
pub const BLOCK_THREADS: u32 = 256;
/// Warps of each block: each gathers 32 rows in one chunk.
pub const BLOCK_WARPS: u32 = BLOCK_THREADS / 32;
/// Result cells of one station: limit of the rows that a block has in flight.
pub const STATION_CELLS: u32 = BLOCK_THREADS;
/// Bytes of the slots of one warp.
pub const WARP_BYTES: u64 = 128 << 10;
/// Bytes of the slots of one station.
pub const STATION_BYTES: u64 = WARP_BYTES * BLOCK_WARPS as u64;

/// Codes of a row's end: the NVMe status (SCT << 8 | SC) of its read is 0 or more, these are negative, except
/// for `OK`.
pub mod code {
    /// The row's bytes are in the output.
    pub const OK: i32 = 0;
    /// The table has no such row.
    pub const OUT_OF_RANGE: i32 = -1;
    /// The read was not answered by its deadline.
    pub const TIMED_OUT: i32 = -2;
    /// The controller was reset meanwhile, or is gone.
    pub const GONE: i32 = -3;
    /// The launch ended before it reached this row.
    pub const NOT_RUN: i32 = -5;
}

/// Parameters of a launch that gathers rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GatherLaunch {
    /// Queues, with a result cell for each row of each station.
    pub queues: QueueArray,
    /// Address of the words of the [`AdmissionGate`](crate::gate::AdmissionGate), in host memory.
    pub gate: u64,
    /// Address of a `u32` for each station: 0 while it is free.
    pub stations: u64,
    /// Address of the slot memory: [`STATION_BYTES`] for each station.
    pub slots: u64,
    /// Address of the slot memory for the controller.
    pub slots_iova: u64,
    /// Address of the ids of the requested rows, `i32` or `i64` each; 0 for rows 0, 1, 2 and so on.
    pub ids: u64,
    /// Address of the output: row k is stored at `out + k * out_stride`.
    pub out: u64,
    /// Address of one `i32` for each row ([`code`]), or 0 for none.
    pub status: u64,
    /// Address of one [`LaunchProgress`], which belongs to the summary.
    pub progress: u64,
    /// Address of one [`LaunchSummary`] in host memory.
    pub summary: u64,
    /// Number of requested rows.
    pub count: u64,
    /// First byte of row 0 in the namespace.
    pub first_byte: u64,
    /// Rows of the table.
    pub rows: u64,
    /// Distance of the rows in the output, in bytes.
    pub out_stride: u64,
    /// Limit of the time of each read, in nanoseconds.
    pub timeout_ns: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// Bytes of a slot: the largest number of blocks that one row can touch.
    pub slot_bytes: u32,
    /// Neighbouring rows that one command may read together, at least 1.
    pub run_rows: u32,
    /// log2 of the bytes of a block.
    pub block_shift: u32,
    /// log2 of a number of bytes that divides all addresses and lengths here, 0 to 4.
    pub unit_shift: u32,
    /// Namespace.
    pub nsid: u32,
    /// 1 if ids are `i64`, 0 if they are `i32`.
    pub wide_ids: u32,
    /// Number of stations.
    pub station_count: u32,
    /// Number of rows that a warp has in flight, 1 to 32.
    pub lanes: u32,
    /// Content of a row that was not read: 0 for zero bytes; a [`Format`] whose
    /// [`zero_byte`](Format::zero_byte)s it gets; or [`filled`], a byte for all of it.
    pub failed_as: u32,
}

/// Marks a byte in [`failed_as`](GatherLaunch::failed_as).
const FILLED: u32 = 1 << 8;

/// Returns the [`failed_as`](GatherLaunch::failed_as) of rows that become copies of `byte`: of floating-point elements
/// whose NaN has it in each byte, NaN.
pub const fn filled(byte: u8) -> u32 {
    FILLED | byte as u32
}

/// Returns byte `at` of a row that was not read.
#[inline(always)]
pub const fn failed_byte(failed_as: u32, at: u32) -> u8 {
    match Format::of_number(failed_as) {
        Some(format) => format.zero_byte(at),
        // A byte that [`filled`] did not make is 0.
        None => failed_as as u8,
    }
}

// Same layout as `nvme_gpu_rows` of nvme_gpu_device.cuh.
const _: () = assert!(size_of::<GatherLaunch>() == 176);
const _: () = assert!(offset_of!(GatherLaunch, first_byte) == 104);
const _: () = assert!(offset_of!(GatherLaunch, timeout_ns) == 128);

/// A cache of rows, as launches find it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CacheWords {
    /// Address of the states of the [`RowCache`](crate::row_cache::RowCache), a `u32` for each line; a multiple of 16.
    pub states: u64,
    /// Address of the ids of its lines, a `u64` each.
    pub ids: u64,
    /// Address of the epochs of its lines, a `u64` each.
    pub epochs: u64,
    /// Address of `line_bytes` bytes for each line.
    pub data: u64,
    /// Address of the [`WriteCounts`](crate::row_cache::WriteCounts) in host memory: writes of the host that have ended.
    /// A `u64` for each station follows them: the rows that its blocks found in caches, for the host.
    pub written_by_host: u64,
    /// Address of a `u64` in GPU memory: the number of blocks of scatters that have ended. A `u64` for each station
    /// follows it: the rows that its blocks found in caches.
    pub written_by_gpu: u64,
    /// Number of lines.
    pub lines: u32,
    /// Distance of the lines in bytes: the bytes of a row, rounded up to 16.
    pub line_bytes: u32,
}

/// Parameters of a launch that gathers rows through a cache of rows: `nvme_gather_cached`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CachedGather {
    /// Parameters of the gather. Its `unit_shift` holds for the bytes of the cache, too.
    pub gather: GatherLaunch,
    /// The cache.
    pub cache: CacheWords,
}

/// Parameters of a launch that gathers rows by queues that its blocks own: `nvme_gather_batched`.
///
/// Rows, first byte, output and stride are multiples of 4 bytes, by [`unit_shift`](GatherLaunch::unit_shift). A station has slots for `rows_of_block` rows, and each
/// queue has room for as many commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Batched {
    /// Parameters of the gather. Its own queues are not used.
    pub gather: GatherLaunch,
    /// Queues; each belongs to the station of the same number. `cells` is not used.
    pub owned: QueueArray,
    /// Rows that a block reads at a time, 1 to [`BLOCK_THREADS`].
    pub rows_of_block: u32,
    /// 0.
    pub reserved: u32,
}

/// Parameters of a launch that gathers rows through a cache of rows, by queues that its blocks own:
/// `nvme_gather_batched_cached`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CachedBatched {
    /// Parameters of the gather. Its `unit_shift` holds for the bytes of the cache, too.
    pub batched: Batched,
    /// The cache.
    pub cache: CacheWords,
}

/// Bytes from the record of a block to that of the next one: blocks that write to one line wait for each other.
pub const RECORD_BYTES: u64 = 128;

/// Parameters of the two launches of a gather in halves: `nvme_begin_batched` submits, `nvme_finish_batched` waits and
/// copies. Both have the same blocks and threads, and the same parameters but for those that only one of them uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HalvedGather {
    /// Parameters of the gather. Only the first launch uses the ids, only the second one output, status and words of its
    /// end.
    pub batched: Batched,
    /// Address of a [`BatchRecord`](crate::BatchRecord) for each block, [`RECORD_BYTES`] apart. Zero before the first
    /// launch; nothing else uses them between the two.
    pub records: u64,
    /// Address of an `i64` for each row: the first launch stores the ids there.
    pub kept_ids: u64,
    /// Address of a `u32` in host memory for each station: rows that second launches read by themselves there.
    pub late_rows: u64,
    /// Number of stations, the first ones of those with a queue, that a batch may hold from the first launch to the
    /// second. The remaining stations are for blocks that run, so that no block waits for a launch behind its own in
    /// the stream.
    pub held_stations: u32,
    /// 1 for a second launch that reads nothing, and only frees the stations.
    pub is_dropped: u32,
}

/// Largest number of rows that a launch with ids writes: each id is compared with all later ones.
pub const SCATTER_ROWS: u64 = 32_768;

/// Parameters of a launch that writes rows: `nvme_scatter`. First byte and length of the table's rows are
/// multiples of a block, and the table has fewer than 2^32 of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ScatterLaunch {
    /// Parameters shared with a gather; the rows are read from `out`.
    pub gather: GatherLaunch,
    /// Address of a `u64` in GPU memory, which each block increments when its writes have ended.
    pub written: u64,
}

/// Parameters of a launch that writes rows by queues that its blocks own: `nvme_scatter_batched`. The conditions of
/// [`ScatterLaunch`] and of [`Batched`] hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct BatchedScatter {
    /// Parameters shared with a gather; the rows are read from `out`.
    pub batched: Batched,
    /// As [`ScatterLaunch::written`].
    pub written: u64,
}

/// Parameters of a launch that converts the elements of rows in GPU memory to a wider format, in place:
/// `nvme_widen_rows`.
///
/// `out` is the address of the stored row of row 0, in the last bytes of the space of its converted row. Of
/// the other fields `out_stride`, `count`, `progress` and `summary` are used, and for rows with scales `ids`, `wide_ids`
/// and `rows`: an id that the table does not have belongs to a row of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WidenLaunch {
    /// Parameters shared with a gather.
    pub gather: GatherLaunch,
    /// Number of a [`Format`].
    pub format: u32,
    /// Number of a [`WideFormat`](nvme_formats::WideFormat).
    pub wide: u32,
    /// Elements of a row, at least 1.
    pub elements: u32,
    /// Distance from the start of a converted row to that of its stored row, in bytes.
    pub before: u32,
    /// Address of the scales of row 0 of the table, if they are stored: those of row k are
    /// [`ScaleLayout::row_bytes`](nvme_formats::ScaleLayout::row_bytes) times k bytes further on.
    pub scales: u64,
    /// Layout of the scales that the elements are multiplied by.
    pub layout: nvme_formats::ScaleLayout,
}

/// Parameters of a launch that checks gathered rows of a table with known content: `nvme_check_rows`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CheckLaunch {
    /// Ids and output of the gather; rows of a multiple of 8 bytes.
    pub gather: GatherLaunch,
    /// Seed of the [`data_word`](crate::work::data_word)s of the table.
    pub seed: u64,
    /// Address of a count of rows with a wrong word, `u64`.
    pub wrong: u64,
}

/// Parameters of a launch of pointer chases: walks from row to row of a table by ids that the rows hold:
/// `nvme_follow_rows`.
///
/// Walk `w` begins with row `ids[w]`. The first `u64` of a row, modulo `rows`, is the id of the walk's next
/// row. Row `h` of walk `w` is stored at `out + (w * hops + h) * out_stride`. Rows have a multiple of 16
/// bytes and begin at a multiple of 16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct FollowLaunch {
    /// Parameters of the gather: `count` walks, `lanes` of them in each warp at once.
    pub gather: GatherLaunch,
    /// Address of an `i64` for each walk: the id after its last row.
    pub ends: u64,
    /// Rows of each walk.
    pub hops: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Counts of a launch in progress, in GPU memory, zeroed before the first launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchProgress {
    /// Number of rows that were not read.
    pub failed: u64,
    /// Word of the first of these rows, as [`worst`] encodes it.
    pub worst: u64,
    /// Number of blocks that have ended, and marks of launches with only some blocks ended; see `launch_end`.
    pub blocks: u64,
    /// Failures of ends that were reported while another launch with these words was in progress.
    pub kept_failed: u64,
    /// [`worst`] of these failures.
    pub kept_worst: u64,
    /// Number of launches that have ended: not zeroed.
    pub launches: u32,
    /// Number of ends that are being reported to the host.
    pub ending: u32,
}

/// The result of a launch, in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchSummary {
    /// As in [`LaunchProgress`].
    pub failed: u64,
    /// As in [`LaunchProgress`].
    pub worst: u64,
    /// Number of launches with this summary that have ended, stored last: `launches` of [`LaunchProgress`].
    pub ended: u32,
    /// Reserved, 0.
    pub reserved: u32,
    /// Number of rows that failed in all launches with this summary: not zeroed.
    pub failed_ever: u64,
}

/// Encodes the number of a row that failed, the striped member that failed it, and its code, in a word that
/// is larger for a lower number. Never 0.
pub const fn worst(row: u64, member: Option<u32>, code: i32) -> u64 {
    let member = match member {
        Some(member) => (member as u64 + 1) & 0xFF,
        None => 0,
    };
    (!row) << 24 | member << 16 | code as u16 as u64
}

/// Decodes row, member and code of [`worst`], for numbers below 2^39 and members below 255.
pub const fn of_worst(word: u64) -> (u64, Option<u32>, i32) {
    let member = (word >> 16) as u32 & 0xFF;
    (
        !(word >> 24) & ((1 << 40) - 1),
        member.checked_sub(1),
        word as u16 as i16 as i32,
    )
}

/// The location of a row: the blocks that hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlocks {
    /// First byte in the namespace.
    pub byte: u64,
    /// Block that holds the first byte.
    pub block: u64,
    /// Number of blocks that hold the row.
    pub blocks: u32,
}

impl GatherLaunch {
    /// Returns the number of threads of a block that can read rows at once: each needs a slot and a cell of
    /// the station.
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

    /// Returns the location of row `id`, if the table has it. The host has checked that the table ends inside
    /// the namespace.
    #[inline(always)]
    pub fn place(&self, id: i64) -> Option<RowBlocks> {
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
        Some(RowBlocks {
            byte,
            block,
            blocks,
        })
    }

    /// Returns the blocks that hold `bytes` bytes from `byte` on; meaningless for 0 bytes.
    #[inline(always)]
    pub fn blocks_of(&self, byte: u64, bytes: u32) -> RowBlocks {
        let block = byte >> self.block_shift;
        let last = byte.wrapping_add(u64::from(bytes)).wrapping_sub(1) >> self.block_shift;
        let blocks = (last.wrapping_sub(block) as u32).wrapping_add(1);
        RowBlocks {
            byte,
            block,
            blocks,
        }
    }
}

/// Returns the bytes of a slot for rows of `row_bytes` bytes that begin at multiples of `row_bytes` from
/// `first_byte` on.
pub const fn slot_bytes(first_byte: u64, row_bytes: u32, block_shift: u32) -> u64 {
    let block = 1u64 << block_shift;
    let row = row_bytes as u64;
    // A row that begins at the last byte of a block touches the most blocks. If rows begin at multiples of a
    // unit, the latest start in a block is its last unit.
    let unit = 1u64 << tz(first_byte | row | block);
    let worst = (block - unit) + row;
    worst.div_ceil(block) << block_shift
}

const fn tz(value: u64) -> u32 {
    value.trailing_zeros()
}

#[cfg(test)]
mod tests;
