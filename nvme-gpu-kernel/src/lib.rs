//! What a GPU adds to `nvme-core`: its groups and its clock, and kernels.
//!
//! Here belongs what a thread on a GPU needs to use a queue, kernels that move rows, and the words by which launches
//! agree with the host and with each other. Kernels that compute are in `nvme-compute-kernel`; rings and slots are in
//! `nvme-core`, for host and GPU.
//!
//! - [`QueueArray`]: queues as the host passes them to your kernel; see docs/link-the-core.md.
//! - `TableRows` (on the GPU only), [`rows`]: rows of a table by ids, read by any thread.
//! - `RangeStream` (on the GPU only), [`ring`]: a range of bytes that a warp reads in pieces while it uses the pieces
//!   that have been read.
//! - `WarpReads` (on the GPU only): rows that the lanes of a warp read, and that it uses in the buffers of the reads.
//! - `GpuThread`, `WholeWarp`, `WholeBlock`, `WarpLanes`, `arch` (on the GPU only): the execution contexts, the groups
//!   of threads that act together, and the GPU's instructions.
//! - [`gate`]: admission of kernels to queues that the host may reset. [`BatchRecord`]: passes a batch in flight from
//!   one launch to the next. [`row_cache`]: the index of a cache of rows. [`strips`]: a pipeline of matrix slices
//!   between groups of threads.
//! - [`work`], [`Kernel`], [`PTX`] (the last two on the host only): the kernels of the demo, the benchmark and the
//!   tests (feature `kernels`), and the words of a launch's parameters and results.
//! - Feature `device-library`: the shared queue for CUDA C++, see `include/nvme_gpu_device.cuh`.
//!
//! `cargo xtask ptx` builds it for `nvptx64-nvidia-cuda`. No queue logic lives here: kernels call the
//! same collective and shared queues that the host can run. The crate brings the panic handler and
//! `memcmp`.
//!
//! # Your own kernel
//!
//! `nvme-gpu-kernel/examples/gpu-histogram` is a whole crate: manifest, kernel and the host's side of its argument.
//! `cargo xtask ptx` compiles it for the GPU, so that it stays correct. Its kernel, in short:
//!
//! ```text
//! #[unsafe(no_mangle)]
//! pub unsafe extern "ptx-kernel" fn histogram(args: Args) {
//!     let Some(queue) = (unsafe { args.queues.shared(index) }) else { return };
//!     let command = MemberCommand::new(nvm::read(nsid, lba, blocks), data, cell);
//!     let Ok(token) = queue.submit(&GpuThread, command, deadline_ns) else { return };
//!     // ... work on another buffer ...
//!     let end = queue.wait(&GpuThread, token, deadline_ns);
//! }
//! ```
//!
//! Host and kernel share the type of the argument, which holds a [`QueueArray`]:
//!
//! ```
//! /// Passed by value; the fields are device addresses and numbers.
//! #[derive(Clone, Copy, Default)]
//! #[repr(C)]
//! struct Args {
//!     queues: nvme_gpu_kernel::QueueArray,
//!     lba: u64,
//!     buffers: u64,
//! }
//!
//! let args = Args { lba: 8, ..Args::default() };
//! assert_eq!(args.queues.queue_count, 0, "the host fills it: nvme_host::cuda::GpuQueues");
//! # assert_eq!((args.lba, args.buffers), (8, 0));
//! ```
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch)
)]
#![deny(missing_docs)]

/// Defines an entry point: a kernel of the GPU, and on the host a function that each lane of a launch calls.
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
#[macro_export]
macro_rules! entry {
    ($(#[$about:meta])* pub unsafe fn $name:ident($argument:ident: $of:ty) $body:block) => {
        $(#[$about])*
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $name($argument: $of) $body

        $(#[$about])*
        #[cfg(not(target_arch = "nvptx64"))]
        pub unsafe fn $name($argument: $of) $body
    };
}

#[cfg(target_arch = "nvptx64")]
pub mod arch;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
#[path = "lanes/arch.rs"]
pub mod arch;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "kernels"))]
mod assignment;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "kernels"))]
mod bare;
mod batch_record;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "hash"))]
mod chunks;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "gathers", feature = "scatter")
))]
mod copy;
pub mod distinct;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "kernels"))]
mod entry;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "gathers", feature = "scatter")
))]
mod exchange;
pub mod extents;
pub mod gate;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "gathers"))]
#[cfg_attr(
    not(all(feature = "rows", feature = "mapped")),
    allow(dead_code, unused_imports, reason = "an image has some of the kernels")
)]
mod gather;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod groups;
pub mod hash;
#[cfg(not(target_arch = "nvptx64"))]
mod image;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub mod lanes;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "gathers", feature = "scatter")
))]
mod launch;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod launch_end;
#[cfg(all(target_arch = "nvptx64", feature = "device-library"))]
mod library;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "kernels"))]
mod owned;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "hash"))]
mod page_moves;
pub mod pages;
#[cfg(all(target_arch = "nvptx64", feature = "probes"))]
mod probes;
mod queues;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod reads;
pub mod ring;
pub mod row_cache;
pub mod rows;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "scatter"))]
mod scatter;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod scratch_words;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "kernels"))]
mod shared;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod station;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod stream;
pub mod strips;
#[cfg(not(target_arch = "nvptx64"))]
mod table;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod table_rows;
#[cfg(all(
    any(target_arch = "nvptx64", feature = "lanes"),
    any(feature = "gathers", feature = "scatter")
))]
mod units;
pub mod wide_batch;
pub mod work;

pub use batch_record::{BatchRecord, BegunBatch};
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
pub use groups::{GpuThread, WarpLanes, WholeBlock, WholeWarp};
#[cfg(not(target_arch = "nvptx64"))]
pub use image::{CODE_MAGIC, CodeEntry, KernelImage};
pub use queues::QueueArray;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
pub use reads::WarpReads;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
pub use stream::{RangeStream, leave_block};
#[cfg(not(target_arch = "nvptx64"))]
pub use table::Kernel;
#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
pub use table_rows::TableRows;

/// The entry points, as each lane of a [launch](lanes::RunningLaunch) on the host calls them.
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub mod entries {
    pub use crate::bare::{nvme_pingpong, nvme_sqe_writes, nvme_verify};
    pub use crate::chunks::nvme_hash_chunks;
    pub use crate::entry::{
        nvme_block, nvme_block_traced, nvme_owner, nvme_owner_traced, nvme_shared,
        nvme_shared_narrow, nvme_shared_traced, nvme_tokens, nvme_warp, nvme_warp_traced,
    };
    pub use crate::gather::{
        nvme_begin_batched, nvme_begin_batched_mapped, nvme_check_rows, nvme_claim_rows,
        nvme_claim_rows_mapped, nvme_copy_rows, nvme_end_launch, nvme_finish_batched,
        nvme_finish_batched_mapped, nvme_finish_batched_wide, nvme_finish_batched_wide_mapped,
        nvme_follow_rows, nvme_gather, nvme_gather_batched, nvme_gather_batched_cached,
        nvme_gather_batched_cached_mapped, nvme_gather_batched_mapped, nvme_gather_batched_striped,
        nvme_gather_batched_striped_mapped, nvme_gather_batched_wide,
        nvme_gather_batched_wide_mapped, nvme_gather_cached, nvme_gather_cached_mapped,
        nvme_gather_listed, nvme_gather_listed_mapped, nvme_gather_listed_striped,
        nvme_gather_listed_striped_mapped, nvme_gather_mapped, nvme_gather_striped,
        nvme_gather_striped_mapped, nvme_list_rows, nvme_read_listed, nvme_read_ranges,
        nvme_repeat_rows, nvme_widen_rows,
    };
    pub use crate::page_moves::{nvme_check_pages, nvme_copy_pages};
    pub use crate::scatter::{nvme_scatter, nvme_scatter_batched};
}

/// Raised when a structure that the host fills for kernels of users changes: `nvme_gpu_queues` and `nvme_gpu_rows` of
/// `nvme_gpu_device.cuh`, and what they point to. The device library carries it.
pub const DEVICE_LAYOUT: u32 = 4;

/// The kernels as PTX, for any GPU from sm_80 on; `cargo xtask ptx --refresh` writes it.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/nvme_gpu_kernel.ptx");

/// The version of the kernels in [`PTX`], [`ROWS_PTX`], [`SCATTER_PTX`] and [`HASH_PTX`].
#[cfg(not(target_arch = "nvptx64"))]
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The kernels that write rows as PTX, as [`PTX`] is: a separate image, so that the gathers keep their number of
/// registers.
#[cfg(not(target_arch = "nvptx64"))]
pub const SCATTER_PTX: &str = include_str!("../ptx/nvme_gpu_scatter.ptx");

/// `nvme_gather` as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS_PTX: &str = include_str!("../ptx/nvme_gpu_rows.ptx");

/// The kernels that gather rows of tables in several ranges as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const MAPPED_PTX: &str = include_str!("../ptx/nvme_gpu_mapped.ptx");

/// `nvme_hash_chunks` and the kernels of [`pages`] as PTX, as [`PTX`] is.
#[cfg(not(target_arch = "nvptx64"))]
pub const HASH_PTX: &str = include_str!("../ptx/nvme_gpu_hash.ptx");

/// The kernels of [`PTX`], with machine code.
#[cfg(not(target_arch = "nvptx64"))]
pub static KERNELS: KernelImage = KernelImage {
    ptx: PTX,
    code: include_bytes!("../ptx/nvme_gpu_kernel.code"),
};
/// The kernels of [`ROWS_PTX`], with machine code.
#[cfg(not(target_arch = "nvptx64"))]
pub static ROWS: KernelImage = KernelImage {
    ptx: ROWS_PTX,
    code: include_bytes!("../ptx/nvme_gpu_rows.code"),
};
/// The kernels of [`MAPPED_PTX`], with machine code.
#[cfg(not(target_arch = "nvptx64"))]
pub static MAPPED: KernelImage = KernelImage {
    ptx: MAPPED_PTX,
    code: include_bytes!("../ptx/nvme_gpu_mapped.code"),
};
/// The kernels of [`SCATTER_PTX`], with machine code.
#[cfg(not(target_arch = "nvptx64"))]
pub static SCATTER: KernelImage = KernelImage {
    ptx: SCATTER_PTX,
    code: include_bytes!("../ptx/nvme_gpu_scatter.code"),
};
/// The kernels of [`HASH_PTX`], with machine code.
#[cfg(not(target_arch = "nvptx64"))]
pub static HASH: KernelImage = KernelImage {
    ptx: HASH_PTX,
    code: include_bytes!("../ptx/nvme_gpu_hash.code"),
};
