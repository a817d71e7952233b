//! The only source of atomics in this crate.
//!
//! Four back ends with one interface: `core` on the host, `loom` under model checking, `tsan` under
//! ThreadSanitizer, inline PTX on the GPU. rustc's NVPTX back end drops the order of read-modify-write
//! operations and knows only the `.sys` scope, so nothing in this crate may use `core::sync::atomic`
//! directly.

/// The observers for whom an operation is ordered. The host and loom know only one scope and ignore it; on aarch64
/// fences of the host have two.
///
/// A wider scope than needed is correct but slower; a narrower one is a data race. DMA memory and doorbells
/// always need [`Scope::Sys`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The threads of one thread block.
    Cta,
    /// The threads of one GPU.
    Gpu,
    /// Every processor and device of the machine, as DMA needs.
    Sys,
}

/// Memory order of a load, a store or a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Single-copy atomic, unordered.
    Relaxed,
    /// For loads and fences: no later access moves before it.
    Acquire,
    /// For stores and fences: no earlier access moves after it.
    Release,
    /// Both, for fences and read-modify-write operations. A load treats it as `Acquire`, a store as
    /// `Release`.
    AcqRel,
}

#[cfg(not(any(loom, tsan, target_arch = "nvptx64")))]
#[path = "core.rs"]
mod backend;
#[cfg(loom)]
#[path = "loom.rs"]
mod backend;
#[cfg(all(tsan, not(loom)))]
#[path = "tsan.rs"]
mod backend;
#[cfg(all(not(any(loom, tsan)), target_arch = "nvptx64"))]
#[path = "nvptx.rs"]
mod backend;

#[cfg(any(loom, tsan, not(target_arch = "nvptx64")))]
mod by_branch;
#[cfg(all(target_arch = "aarch64", not(any(loom, tsan, miri))))]
mod outer;
#[cfg(all(test, not(any(loom, tsan, target_arch = "nvptx64"))))]
pub(crate) mod record;
pub(crate) mod serial;
#[cfg(any(loom, tsan))]
mod site;
#[cfg(all(feature = "spin-hook", not(any(loom, tsan, target_arch = "nvptx64"))))]
pub use backend::on_spin;
pub use backend::{AtomicU32, AtomicU64, fence, fence_seq_cst, opaque, spin};
#[cfg(loom)]
pub use backend::{begin_execution, overwriting, uncontended};
#[cfg(any(loom, tsan))]
pub use site::{at_site, mutated};
