//! Litmus tests: the edges of docs/memory-model.md as races between threads of a GPU and of the CPU.
//!
//! A launch runs many instances of one [`Shape`] side by side, each over separate memory and for many iterations.
//! Written numbers grow, so that a reader that sees a message but not the words before it has seen a forbidden outcome,
//! and no thread waits for another. [`run`] is a thread's part: the kernel `nvme_litmus` calls it, and so does the
//! stand-in for the driver.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]
#![deny(missing_docs)]

mod device;
#[cfg(target_arch = "nvptx64")]
mod kernel;
mod lanes;
mod queues;
mod run;
mod words;

pub use run::{Thread, run};

/// The kernel `nvme_litmus` as PTX; `cargo xtask ptx --refresh` writes it.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../litmus.ptx");

/// Shape of a race. Roles are numbered from the one that writes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Shape {
    /// Message passing. Role 0 writes x, then y; role 1 reads y, then x.
    Message,
    /// Store buffering. Each role writes its word and reads the other one's, into the logs.
    Buffering,
    /// A completion. Role 0 writes x (the data), then the entry y as a controller does; role 1 reads the
    /// entry as the core does, then x.
    Completion,
    /// A completion ring of four entries. As [`Completion`](Self::Completion), with data at z; role 1
    /// gives entries back by doorbell x, and role 0 overwrites them then.
    Ring,
    /// A submission. Role 0 writes z (the buffer), the entry y and the doorbell x; role 1 reads the
    /// doorbell, then the others.
    Doorbell,
    /// As [`Doorbell`](Self::Doorbell), with a block that writes the words together and rings once.
    Lanes,
    /// A completion that another thread drains. Role 0 is that of [`Completion`](Self::Completion); role 1 reads the
    /// entry and writes its value to cell z; role 2 reads the cell, then x.
    Relay,
    /// A barrier: a block's threads write a word each and read each other's.
    Barrier,
    /// Doorbells in turn. Every thread of role 0 tries lock y, as the core's ring lock; its holder adds to number z and
    /// writes it to doorbell x. Role 1 is the CPU's: the doorbell never moves backwards.
    Turns,
}

/// Ordering of the operations of a [`Shape`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Flavour {
    /// Relaxed accesses with fences between them (of `.sc` for [`Shape::Buffering`]).
    Fence,
    /// Release stores and acquire loads.
    Order,
    /// A release exchange and an acquire addition.
    Exchange,
    /// Four relaxed reads, then one fence for all.
    Batch,
    /// A barrier among a warp, then the leader's fence.
    Warp,
    /// A barrier among a block, then the leader's fence.
    Block,
    /// Weaker: acquire-release fences where only `.sc` is enough.
    AcqRel,
    /// Weaker: relaxed accesses alone, no fence, no barrier.
    Relaxed,
    /// Weaker still: the last load may be served by the first-level cache; no lock.
    Plain,
    /// As [`Order`](Self::Order), with the last load as an asynchronous copy to shared memory, past the first-level
    /// cache: the load of kernels that read data of DMA or of another block.
    Copy,
    /// Weaker: the same copy after a relaxed load.
    CopyRelaxed,
    /// Weaker still: a copy that the first-level cache may serve, after a relaxed load.
    CopyCached,
}

/// Threads among which the orders hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Within {
    /// `.gpu`
    Gpu,
    /// `.sys`
    Sys,
}

/// Parameters of one launch. Addresses are device addresses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Args {
    /// Location x of instance 0; those of the other instances follow `stride` bytes apart.
    pub x: u64,
    /// Location y, likewise. Entries and rings follow each other without a gap.
    pub y: u64,
    /// Location z, likewise.
    pub z: u64,
    /// Address of the values that each role of [`Shape::Buffering`] read: one plus the value, `u32`, by iteration, then
    /// by instance.
    pub logs: [u64; 2],
    /// Memory for threads without a role to make traffic in: 65,536 words of 4 bytes.
    pub stress: u64,
    /// One [`Counts`], zeroed.
    pub counts: u64,
    /// Time after which threads give up.
    pub timeout_ns: u64,
    /// Seed of the pauses and of the pairing of threads.
    pub seed: u64,
    /// Iterations of each instance.
    pub iterations: u32,
    /// Number of instances: a power of two from 2 on.
    pub instances: u32,
    /// Bytes between instances: a multiple of 64.
    pub stride: u32,
    /// A [`Shape`].
    pub shape: u32,
    /// A [`Flavour`].
    pub flavour: u32,
    /// A [`Within`].
    pub within: u32,
    /// A bit for each role that this launch takes.
    pub roles: u32,
    /// Number of blocks of each role; further blocks only make traffic.
    pub blocks: u32,
    /// Longest pause in turns: a power of two minus one.
    pub pause: u32,
    /// 0.
    pub reserved: u32,
}
const _: () = assert!(size_of::<Args>() == 112);

/// Counts of the threads of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Times that a reader looked.
    pub reads: u64,
    /// Number of these reads that saw a newer message than the read before.
    pub fresh: u64,
    /// Number of these reads that missed words written before the message.
    pub forbidden: u64,
    /// Threads that ran out of time.
    pub late: u64,
    /// Threads with a role that have ended.
    pub finished: u64,
}

impl Counts {
    /// Records that a reader saw message `seen` (`last` in the read before), and at least number `least` in the words
    /// written before it.
    #[inline(always)]
    pub fn judge(&mut self, last: u32, seen: u32, least: u32) {
        self.reads += 1;
        self.fresh += u64::from(seen != last);
        self.forbidden += u64::from(least < seen);
    }
}
