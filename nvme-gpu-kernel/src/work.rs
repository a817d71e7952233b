//! Parameters and results of a launch: the words that the host and the kernels share.
//!
//! Addresses are device addresses. Every kernel takes one [`Launch`] by value.

/// Order of a launch's commands over its span.
pub mod pattern {
    /// Ascending, from the start again at the end.
    pub const SEQUENTIAL: u32 = 0;
    /// Uniform over the span, by the launch's seed.
    pub const RANDOM: u32 = 1;
}

/// The work of a launch and the memory that it uses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Launch {
    /// The queues: [`QueueWords`](nvme_core::handoff::QueueWords) one after the other.
    pub queues: u64,
    /// Result cells, 8 bytes each, zeroed before the first launch: one for each token that may wait.
    pub cells: u64,
    /// One [`Report`], zeroed.
    pub report: u64,
    /// One `u32` for each command ([`account`]), or 0 for none.
    pub accounts: u64,
    /// Where the kernel finds the data, for checks; 0 when it cannot.
    pub data: u64,
    /// Where the controller finds the data when it is contiguous there (`pages` is 0).
    pub data_iova: u64,
    /// The IOVA of each page of the data, `u64` each; 0 when it is contiguous.
    pub pages: u64,
    /// Three `u32` for each thread and token of `nvme_tokens`, or 0.
    pub tokens: u64,
    /// [`Traced`] records in memory that the host reads, or 0 for none.
    pub trace: u64,
    /// Bytes of the data memory.
    pub data_bytes: u64,
    /// Commands in all.
    pub commands: u64,
    /// First block of the span.
    pub lba: u64,
    /// Command-sized units in the span.
    pub units: u64,
    /// Seed of [`pattern::RANDOM`].
    pub seed: u64,
    /// Longest wait for one command, in nanoseconds.
    pub timeout_ns: u64,
    /// Number of queues.
    pub queue_count: u32,
    /// Number of cells.
    pub cell_count: u32,
    /// Namespace.
    pub nsid: u32,
    /// NVM command set opcode: flush, write, read, compare, write zeroes, or dataset management, whose
    /// data is one range of 16 bytes for each command.
    pub opcode: u32,
    /// Blocks of each command.
    pub blocks: u32,
    /// log2 of a block's bytes, 9 to 16.
    pub block_shift: u32,
    /// Commands in flight on each queue (`nvme_owner`, `nvme_warp`, `nvme_block`), or tokens that each
    /// thread of `nvme_tokens` holds at a time.
    pub depth: u32,
    /// [`pattern`].
    pub pattern: u32,
    /// Lanes of each warp that work in `nvme_shared` and `nvme_tokens`, 1 to 32.
    pub lanes: u32,
    /// When not 0, data of command `i` lies at unit `i`; else buffers are reused.
    pub linear: u32,
    /// Records that fit at `trace`, a power of two; newer ones replace older ones.
    pub trace_records: u32,
    /// When not 0, the lanes of a warp of `nvme_tokens` take turns at the queues; else they are all on one.
    pub mixed: u32,
}

/// Something that happened to a command, and when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Traced {
    /// The words of an [`Event`](nvme_core::trace::Event).
    pub event: [u64; 2],
    /// The command's index in the launch.
    pub index: u64,
    /// On the GPU's clock; never 0.
    pub now_ns: u64,
}

/// How one command ended.
pub mod account {
    /// It never was submitted.
    pub const NONE: u32 = 0;
    /// It completed; the status field is in bits 14:0.
    pub const DONE: u32 = 1 << 31;
    /// The controller was reset while it was in flight.
    pub const ABORTED: u32 = 1 << 26;
    /// Its deadline passed; it is still in flight.
    pub const TIMED_OUT: u32 = 1 << 30;
    /// The queue was refused after a controller fault, before or after it was submitted.
    pub const FAULTED: u32 = 1 << 29;
    /// No slot became free before the deadline.
    pub const FULL: u32 = 1 << 28;
    /// Its buffer cannot be described: an error of the launch.
    pub const REFUSED: u32 = 1 << 27;
}

/// Counts of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Report {
    /// Commands that completed with success.
    pub completed: u64,
    /// Commands that completed with an error status.
    pub failed: u64,
    /// Commands whose deadline passed.
    pub timed_out: u64,
    /// Commands that were not submitted.
    pub refused: u64,
    /// Entries written to submission rings.
    pub sqes: u64,
    /// Submission queue doorbells rung.
    pub sq_doorbells: u64,
    /// Completion queue doorbells rung.
    pub cq_doorbells: u64,
    /// Loads of completion queue memory, counted per warp instruction.
    pub cq_loads: u64,
    /// `u64::MAX` minus the start of the first thread, on the GPU's clock.
    pub first_ns_complement: u64,
    /// End of the last thread, on the same clock.
    pub last_ns: u64,
    /// The largest error status, 0 when there was none.
    pub status: u64,
    /// The code of a [`ControllerFault`](nvme_core::ControllerFault), 0 when there was none.
    pub fault: u64,
    /// Records made at [`Launch::trace`], those that newer ones replaced included.
    pub traced: u64,
    /// Words of data that were not what was written (kernel `nvme_verify`).
    pub wrong: u64,
    /// 1 plus the index of the last such word.
    pub wrong_at: u64,
    /// Commands that completed after their deadline had been reported; they count as completed or failed,
    /// no longer as timed out.
    pub late: u64,
}

impl Report {
    /// From the start of the first thread to the end of the last.
    pub const fn elapsed_ns(&self) -> u64 {
        self.last_ns
            .saturating_sub(u64::MAX - self.first_ns_complement)
    }
}

/// The word at `index` (8 bytes each) of the data that the tests and the demo write for `seed`.
#[inline]
pub const fn data_word(seed: u64, index: u64) -> u64 {
    let mut z = seed ^ index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
