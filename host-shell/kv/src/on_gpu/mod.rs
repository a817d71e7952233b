//! Pages in memory of a GPU: read, checked and written by the GPU where it drives the queues of one drive, else moved by
//! the CPU through memory of the host.
//!
//! [`load`] and [`store`] put work into a stream and return what waits for its end, which may run on any thread.

mod load;
mod store;
mod way;

pub use load::load;
pub use store::store;
pub use way::{GpuPages, GpuWay, OwnPages, OwnWay, PageJob, PagePieces, UnfinishedWork, way_of};
