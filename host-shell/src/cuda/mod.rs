//! CUDA at run time: the driver library is looked up when it is needed and never linked.
//!
//! From the bottom up:
//!
//! - [`Gpu`]: the driver and one GPU of it, or one clear line why there is none.
//! - [`Registered`], [`DeviceMemory`]: memory of this process or of a device that the GPU reaches, and
//!   memory of the GPU.
//! - [`Kernels`], [`Stream`]: the embedded kernels, launches, and a watch over them with a deadline.
//! - [`null`]: a controller of CPU threads that moves no data, for benchmarks.
//!
//! Every call into the driver lies in this folder.

mod driver;
mod kernels;
mod memory;
pub mod null;
mod stream;

pub use driver::{Gpu, Order};
pub use kernels::{Kernel, Kernels};
pub use memory::{DeviceMemory, Registered};
pub use stream::{Event, Stream};
