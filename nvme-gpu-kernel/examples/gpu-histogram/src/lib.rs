//! Two examples of kernels that read a drive: a histogram of its bytes, in which each thread reads one block
//! ahead of the one that it counts; and walks from row to row of a table, by ids that the row before holds.
//!
//! The host's side is [`Args`] and [`PTX`]; `cargo xtask ptx` builds the kernels.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx))]

#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
pub mod kernel;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
pub mod walk;

use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::rows::GatherLaunch;

/// The kernels `histogram` and `walk` as PTX.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../histogram.ptx");

/// The kernel's argument. Addresses are device addresses unless they are the controller's.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Args {
    /// Queues to read through, and two cells for each thread.
    pub queues: QueueArray,
    /// First block.
    pub lba: u64,
    /// Units of `blocks` blocks to count.
    pub units: u64,
    /// Address of two buffers of a unit for each thread, for the GPU.
    pub buffers: u64,
    /// Address of the same buffers for the controller.
    pub buffers_iova: u64,
    /// Address of 256 counters of 8 bytes.
    pub bins: u64,
    /// Address of a counter, 8 bytes, of units that could not be read.
    pub failed: u64,
    /// Limit of a wait for a slot, and for a command, in nanoseconds.
    pub timeout_ns: u64,
    /// Namespace.
    pub nsid: u32,
    /// Blocks of a unit.
    pub blocks: u32,
    /// Bytes of a unit: a multiple of 4.
    pub unit_bytes: u32,
    /// Reserved, 0.
    pub reserved: u32,
}
const _: () = assert!(size_of::<Args>() == 96);

/// The argument of `walk`. Addresses are device addresses.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Walk {
    /// The table, from `nvme_host`'s `Table::device_rows`: rows of a multiple of 8 bytes, from a multiple of 8 on.
    pub table: GatherLaunch,
    /// Address of the starting points: an id of 8 bytes for each walk.
    pub starts: u64,
    /// Address of the end points: 8 bytes for each walk.
    pub ends: u64,
    /// Number of walks, one for each thread.
    pub walks: u32,
    /// Number of rows of each walk.
    pub steps: u32,
}
