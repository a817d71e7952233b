//! PTX entry points: what a GPU adds to `nvme-core`.
//!
//! On the host only [`work`] is here: the words that a launch is told and answers with. `cargo xtask
//! ptx` builds the rest for `nvptx64-nvidia-cuda`. No queue logic lives here: the kernels call the
//! same collective and shared queues that the host can run.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch)
)]
#![deny(missing_docs)]

#[cfg(target_arch = "nvptx64")]
mod arch;
#[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
mod entry;
#[cfg(target_arch = "nvptx64")]
mod groups;
#[cfg(all(target_arch = "nvptx64", feature = "probes"))]
mod probes;
pub mod work;

/// The kernels as PTX, for any GPU from sm_80 on; `cargo xtask ptx --refresh` writes it.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/nvme_gpu_kernel.ptx");
