//! Parameters and results of a launch: the words that the host and the kernels share.
//!
//! Addresses are device addresses. Every kernel of `entry` and `bare` takes one [`LaunchArguments`] by value; the host
//! fills it in, launches, and reads the [`LaunchReport`] afterwards.

/// Orders of a launch's commands over its span.
///
/// Command `i` of a launch always has the same location, whichever thread runs it, so that the data of a
/// launch can be checked afterwards.
pub mod pattern {
    /// Ascending; wraps to the start at the end.
    pub const SEQUENTIAL: u32 = 0;
    /// Uniform over the span, from the launch's seed.
    pub const RANDOM: u32 = 1;
}

/// The parameters of a launch: its work, and the memory that it uses.
///
/// Fields that a kernel does not use may be 0; each kernel's doc says which memory it needs beyond the
/// queues.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct LaunchArguments {
    /// Address of the queues, consecutive [`QueueWords`](nvme_core::handoff::QueueWords).
    pub queues: u64,
    /// Address of the result cells, 8 bytes each, zeroed before the first launch: one for each token that may
    /// wait.
    pub cells: u64,
    /// Address of one [`LaunchReport`], zeroed.
    pub report: u64,
    /// Address of one `u32` for each command ([`account`]), or 0 for none.
    pub accounts: u64,
    /// Address of the data for the kernel, for checks; 0 if the kernel cannot reach it.
    pub data: u64,
    /// Address of the data for the controller, if it is contiguous there (`pages` is 0).
    pub data_iova: u64,
    /// Address of the IOVAs of the data's pages, `u64` each; 0 if the data is contiguous.
    pub pages: u64,
    /// Address of three `u32` for each thread and token of `nvme_tokens`, or 0.
    pub tokens: u64,
    /// Address of [`TracedEvent`] records in memory that the host reads, or 0 for none.
    pub trace: u64,
    /// Bytes of the data memory.
    pub data_bytes: u64,
    /// Number of commands.
    pub commands: u64,
    /// First block of the span.
    pub lba: u64,
    /// Command-sized units in the span.
    pub units: u64,
    /// Seed of [`pattern::RANDOM`].
    pub seed: u64,
    /// Limit of the wait for one command, in nanoseconds.
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
    /// Commands in flight on each queue (`nvme_owner`, `nvme_warp`, `nvme_block`), or tokens that each thread
    /// of `nvme_tokens` holds at once.
    pub depth: u32,
    /// One of [`pattern`].
    pub pattern: u32,
    /// Lanes of each warp that work in `nvme_shared` and `nvme_tokens`, 1 to 32.
    pub lanes: u32,
    /// If not 0, data of command `i` is at unit `i`; otherwise buffers are reused.
    pub linear: u32,
    /// Number of records at `trace`, a power of two; newer ones replace older ones.
    pub trace_records: u32,
    /// If not 0, the lanes of a warp of `nvme_tokens` use different queues in turn; otherwise all use the
    /// same one.
    pub mixed: u32,
}

/// An event of a command, with its time.
///
/// Records are written when the thread sees the event, so the records of one command are in order, those of
/// several threads are not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct TracedEvent {
    /// The words of an [`TraceEvent`](nvme_core::trace::TraceEvent).
    pub event: [u64; 2],
    /// The command's index in the launch.
    pub index: u64,
    /// Time on the GPU's clock, in nanoseconds; never 0.
    pub now_ns: u64,
}

/// The end of one command, as a word.
pub mod account {
    /// The command was never submitted.
    pub const NONE: u32 = 0;
    /// Completed; the status field is in bits 14:0.
    pub const DONE: u32 = 1 << 31;
    /// The controller was reset while it was in flight.
    pub const ABORTED: u32 = 1 << 26;
    /// The deadline passed; the command is still in flight.
    pub const TIMED_OUT: u32 = 1 << 30;
    /// The queue was refused after a controller fault, before or after the command was submitted.
    pub const FAULTED: u32 = 1 << 29;
    /// No slot became free before the deadline.
    pub const FULL: u32 = 1 << 28;
    /// The buffer cannot be described, which is an error of the launch.
    pub const REFUSED: u32 = 1 << 27;
}

/// The counts of a launch.
///
/// Threads add to it with atomic instructions while the kernel runs, and the host reads it after the launch
/// has ended; only then do the counts belong together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct LaunchReport {
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
    /// Number of records made at [`LaunchArguments::trace`], including those that newer ones replaced.
    pub traced: u64,
    /// Number of words of data that differ from the written ones (kernel `nvme_verify`).
    pub wrong: u64,
    /// 1 plus the index of the last such word.
    pub wrong_at: u64,
    /// Commands that completed after their deadline had been reported; they count as completed or failed and
    /// no longer as timed out.
    pub late: u64,
}

impl LaunchReport {
    /// Returns the time from the start of the first thread to the end of the last, in nanoseconds.
    pub const fn elapsed_ns(&self) -> u64 {
        self.last_ns
            .saturating_sub(u64::MAX - self.first_ns_complement)
    }
}

/// Returns the word at `index` (8 bytes each) of the data that the tests and the demo write for `seed`.
///
/// SplitMix64 of seed and index: each word differs from its neighbours, so a block that was read from or
/// written to the wrong location is detected.
#[inline]
pub const fn data_word(seed: u64, index: u64) -> u64 {
    let mut z = seed ^ index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
