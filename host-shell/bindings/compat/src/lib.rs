//! `nvme_gpu_compat.h`: reads and writes under the names of other projects' sketches, over the C interface.
//!
//! Here belong those names alone. Anything that they cannot be made of is missing in `nvme_gpu.h`, and is added
//! there.
//!
//! - [`device`]: stores by path, and the one that `NVME_GPU_DEVICE` names.
//! - [`gds`], [`spdk`], [`dictionary`], [`layers`]: the functions; [`ahead`]: layers that are read
//!   before they are asked for.
// The header documents the functions and the contract for their pointers.
#![allow(clippy::missing_safety_doc)]

pub mod ahead;
pub mod device;
pub mod dictionary;
pub mod gds;
pub mod layers;
pub mod spdk;
