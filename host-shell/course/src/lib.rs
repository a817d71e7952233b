//! A course in kernels that runs and measures itself: each step changes one thing of the step before.
//!
//! Nothing of the product depends on this crate; users compare steps, or measure a machine with them.
//!
//! - [`ladder`]: products of matrices, step by step up to the tensor cores.
//! - [`flash`], [`linear`]: attention and linear layers over memory, step by step.
//! - [`pipeline`]: batches of matrices that are read while others are multiplied.

pub mod flash;
pub mod ladder;
pub mod linear;
pub mod pipeline;
