//! Queues that CUDA kernels drive. The driver library is looked up when it is needed and never linked.
//!
//! Here belongs what calls the CUDA driver or cuFile, and what lends a controller's queues and memory to kernels. Bytes
//! and rows of a store are in `nvme-store`, measurements in `nvme-bench`.
//!
//! From the bottom up:
//!
//! - [`Gpu`]: the CUDA driver and one GPU; where there is none, an error of one line says why.
//! - [`RegisteredMemory`], [`DeviceMemory`]: memory of this process or of a device that is mapped for the GPU, and
//!   GPU memory.
//! - [`QueueKernels`], [`Stream`]: the embedded kernels, launches, and a watch over them with a deadline.
//! - [`Module`]: kernels of the caller, from PTX or a cubin.
//! - [`PageMover`]: pages of a page store between a drive and tensors, checked on the way.
//! - [`GdsFile`]: files into GPU memory by cuFile, where it is installed.
//! - [`GpuAccess`], [`GpuData`]: the tier: how the GPU rings doorbells and where data and rings lie.
//! - [`GpuQueues`]: queue pairs that the GPU drives, and launches over them.
//! - [`GpuQueuePairs`]: queue pairs of a controller that the GPU drives, and their recovery.
//! - [`GpuRings`]: queue pairs whose rings lie in GPU memory.
//! - [`KernelQueues`]: queue pairs for kernels that the caller launches.
//! - [`LaunchTrace`]: the events that kernels recorded.
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
mod pages;
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

pub use blas::{BlasElement, BlasProduct, CublasHandle};
#[cfg(feature = "sim")]
pub use copier::SimulatorCopier;
pub use cufile::{
    BATCH, GdsBuffer, GdsFile, GdsIo, GdsPending, GdsWay, is_of_cufile, probe as probe_cufile,
};
pub use data::GpuData;
pub use driver::{Gpu, GpuFacts, WriteOrder};
pub use gpu_rings::{GpuRings, RingShape};
pub use graph::CudaGraph;
pub use hash::{ChunkHasher, HashedChunk, HostWords};
pub use kernel_queues::{KernelQueues, KernelQueuesOptions, QueueReserve};
pub use kernels::{Kernel, QueueKernels};
pub use lender::CallerMemory;
pub use memory::DeviceMemory;
pub use mode::SubmitMode;
pub use module::{KernelFunction, LaunchSize, Module};
pub use pages::{
    HostCopy, HostPages, PageEnd, PageExtent, PageMover, PageRead, PageWrite, PendingPages,
    PendingWrites, StagingBatch,
};
pub use pinning::HostPinning;
pub use pointer::{KernelArgument, MemoryLocation, MemoryUse, is_host_memory};
pub use queue_pairs::{GpuQueuePairs, RecoveryCounts};
pub use queues::{GpuQueues, LaunchGrid, LaunchResult};
pub use registered::RegisteredMemory;
pub use rows::{
    BegunPoint, BegunRows, GatherIds, GatherOptions, GatherOutcome, GatherTarget, GpuRows,
    HostRows, LaunchSequence, MoveRows, MovedRows, PendingRows, ReadList, ReadRange, RowCounts,
    RowDirection, RowFailures, RowRequest, RowTable, RowsOptions, StoreLaunches, StripedRows,
    TableCache, TableMap,
};
pub use session::{GpuSession, LaunchWork, LostCommands, SessionSetup};
pub use stream::{Stream, StreamEvent};
pub use tensor_map::HalfMatrix;
pub use tier::{GpuAccess, QueueTier, TierRequest};
pub use trace::LaunchTrace;

pub use nvme_gpu_kernel::DEVICE_LAYOUT;
pub use nvme_gpu_kernel::VERSION as PTX_VERSION;
pub use nvme_gpu_kernel::work::data_word;
