//! Transfers by kernels of a GPU.

pub mod reconnecting;
pub mod transfer;
