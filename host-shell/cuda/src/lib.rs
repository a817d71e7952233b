//! Queues that CUDA kernels drive. The driver library is looked up when it is needed and never linked.
//!
//! Here belongs what calls the CUDA driver or cuFile, and what gives a controller's queues and memory to kernels and
//! takes them back. Bytes and rows of a store are in the crate above, measurements in
//! `nvme_host`.
//!
//! From the bottom up:
//!
//! - [`Gpu`]: the driver and one GPU of it, or one clear line why there is none.
//! - [`Registered`], [`DeviceMemory`]: memory of this process or of a device that is mapped for the GPU, and
//!   GPU memory.
//! - [`Kernels`], [`Stream`]: the embedded kernels, launches, and a watch over them with a deadline.
//! - [`Module`]: kernels of the caller, from PTX or a cubin.
//! - [`GdsFile`]: files into GPU memory by cuFile, where it is installed.
//! - [`Access`], [`GpuData`]: the tier: how the GPU rings doorbells and where data and rings lie.
//! - [`GpuQueues`]: queue pairs that the GPU drives, and launches over them.
//! - [`GpuQueuePairs`]: queue pairs of a controller that the GPU drives, and their recovery.
//! - [`GpuRings`]: queue pairs whose rings lie in GPU memory.
//! - [`KernelQueues`]: queue pairs for kernels that the caller launches.
//! - [`Trace`]: what kernels recorded.
//! - [`GpuSession`]: all of that for one namespace, as the command line uses it.
//!
//! Every call into the driver lies in this crate.
#![deny(missing_docs)]

mod batch_copy;
mod blas;
mod captured;
#[cfg(feature = "sim")]
mod copier;
mod cufile;
mod data;
mod driver;
mod gpu_rings;
mod graph;
mod guest;
mod hash;
mod held;
mod kernel_queues;
mod kernels;
mod leftovers;
mod lender;
mod lent;
mod memory;
mod mode;
mod module;
mod pinning;
mod pointer;
mod queue_pairs;
mod queue_set;
mod queues;
mod registered;
mod ring_shadow;
mod rows;
mod session;
mod stream;
mod tensor_map;
mod tier;
pub mod trace;

pub use blas::{Blas, BlasElement, BlasProduct};
#[cfg(feature = "sim")]
pub use copier::Copier;
pub use cufile::{
    BATCH, GdsBuffer, GdsFile, GdsIo, GdsPending, GdsWay, is_of_cufile, probe as probe_cufile,
};
pub use data::GpuData;
pub use driver::{Gpu, GpuFacts, Order};
pub use gpu_rings::{GpuRings, RingShape};
pub use graph::Graph;
pub use hash::{ChunkHasher, HashedChunk, HostWords};
pub use kernel_queues::{KernelQueues, KernelQueuesOptions};
pub use kernels::{Kernel, Kernels};
pub use lender::CallerMemory;
pub use memory::DeviceMemory;
pub use mode::Mode;
pub use module::{Blocks, Function, Module};
pub use pinning::Pinning;
pub use pointer::{KernelArgument, MemoryUse, Place, is_host_memory};
pub use queue_pairs::{GpuQueuePairs, Recovered};
pub use queues::{GpuQueues, Grid, LaunchResult};
pub use registered::Registered;
pub use rows::{
    Direction, Failures, Gathered, GpuRows, HostRows, LaunchSequence, MoveRows, Pending, ReadList,
    ReadRange, Request, RowTable, RowsOptions, StripedRows, TableCache, Ways,
};
pub use session::{GpuSession, Lost, Setup, Work};
pub use stream::{Event, Stream};
pub use tensor_map::HalfMatrix;
pub use tier::{Access, Tier, TierRequest};
pub use trace::Trace;

pub use nvme_gpu_kernel::DEVICE_LAYOUT;
pub use nvme_gpu_kernel::VERSION as PTX_VERSION;
pub use nvme_gpu_kernel::work::data_word;
