//! PTX entry points: what a GPU adds to `nvme-core`.
//!
//! Empty on the host; `cargo xtask ptx` builds it for `nvptx64-nvidia-cuda`. No queue logic lives
//! here: the kernels call the same `QueuePair` that the host uses.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch)
)]

#[cfg(target_arch = "nvptx64")]
mod arch;
#[cfg(target_arch = "nvptx64")]
mod entry;
