//! Transfers by kernels of a GPU.

pub mod lasting;
pub mod transfer;
