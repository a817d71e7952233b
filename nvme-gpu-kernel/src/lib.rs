//! What a GPU adds to `nvme-core`: its groups and its clock, and kernels.
//!
//! - [`Queues`]: queues as the host hands them to a kernel of yours; see docs/link-the-core.md.
//! - `Gpu`, `Warp`, `Block`, `Lanes`, `arch` (on the GPU only): where code runs, and who acts together.
//! - [`work`], [`PTX`]: the kernels of the demo, the benchmark and the tests (feature `kernels`), and
//!   the words that a launch is told and answers with.
//! - Feature `device-library`: the shared queue for CUDA C++, see `include/nvme_gpu_device.cuh`.
//!
//! `cargo xtask ptx` builds it for `nvptx64-nvidia-cuda`. No queue logic lives here: kernels call the
//! same collective and shared queues that the host can run. The crate brings the panic handler and
//! `memcmp`.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch)
)]
#![deny(missing_docs)]

#[cfg(target_arch = "nvptx64")]
pub mod arch;
#[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
mod assignment;
#[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
mod bare;
#[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
mod entry;
#[cfg(target_arch = "nvptx64")]
mod groups;
#[cfg(all(target_arch = "nvptx64", feature = "device-library"))]
mod library;
#[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
mod owned;
#[cfg(all(target_arch = "nvptx64", feature = "probes"))]
mod probes;
mod queues;
#[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
mod shared;
pub mod work;

#[cfg(target_arch = "nvptx64")]
pub use groups::{Block, Gpu, Lanes, Warp};
pub use queues::Queues;

/// The kernels as PTX, for any GPU from sm_80 on; `cargo xtask ptx --refresh` writes it.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/nvme_gpu_kernel.ptx");
