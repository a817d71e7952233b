//! Gathers from tables in several ranges: the same kernels, which search a map of the ranges for each row. They are a
//! separate image, so that the kernels for tables in one range need no further registers.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::striped::{self, AllRows, gather_striped};
use super::{batched, cached, gather_cached, gather_some, halves};
use crate::extents::MappedLaunch;
use crate::rows::{
    Batched, BatchedStripes, CachedBatched, CachedGather, GatherLaunch, HalvedGather, StripedGather,
};

entry! {
    #[cfg(feature = "mapped")]
    /// Gathers rows.
    ///
    /// # Safety
    /// As `nvme_gather`; the ranges are valid as [`ExtentMap`](crate::extents::ExtentMap) documents.
    pub unsafe fn nvme_gather_mapped(mapped: MappedLaunch<GatherLaunch>) {
        let rows = &mapped.launch;
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather_some(rows, mapped.map, None, None, rows.count) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Gathers rows by queues that its blocks own.
    ///
    /// # Safety
    /// As `nvme_gather_batched`; the ranges as for [`nvme_gather_mapped`]. The first bytes of ranges are multiples of 16;
    /// where a row lies in several, they meet at multiples of a block.
    pub unsafe fn nvme_gather_batched_mapped(mapped: MappedLaunch<Batched>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { batched::gather(&mapped.launch, mapped.map) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Gathers rows through a cache of rows in GPU memory.
    ///
    /// # Safety
    /// The conditions of `nvme_gather_cached`; the ranges are valid as for [`nvme_gather_mapped`].
    pub unsafe fn nvme_gather_cached_mapped(mapped: MappedLaunch<CachedGather>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { gather_cached(&mapped.launch, mapped.map) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Gathers rows through a cache of rows by queues that its blocks own.
    ///
    /// # Safety
    /// The conditions of `nvme_gather_batched_cached`; the ranges are valid as for [`nvme_gather_mapped`], and no row lies
    /// in two of them.
    pub unsafe fn nvme_gather_batched_cached_mapped(mapped: MappedLaunch<CachedBatched>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { cached::gather(&mapped.launch, mapped.map) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Begins a gather in halves.
    ///
    /// # Safety
    /// As `nvme_begin_batched`; the ranges as for [`nvme_gather_batched_mapped`].
    pub unsafe fn nvme_begin_batched_mapped(mapped: MappedLaunch<HalvedGather>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { halves::begin(&mapped.launch, mapped.map) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Finishes a gather in halves.
    ///
    /// # Safety
    /// The conditions of `nvme_finish_batched`; the ranges are valid as for [`nvme_gather_batched_mapped`].
    pub unsafe fn nvme_finish_batched_mapped(mapped: MappedLaunch<HalvedGather>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { halves::finish(&mapped.launch, mapped.map) }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Gathers rows of several drives.
    ///
    /// # Safety
    /// The conditions of `nvme_gather_striped`; the ranges are valid as for [`nvme_gather_mapped`].
    pub unsafe fn nvme_gather_striped_mapped(mapped: MappedLaunch<StripedGather>) {
        let count = mapped.launch.gather.count;
        gather_striped(&mapped.launch, mapped.map, (count, AllRows));
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Gathers rows of several drives by queues that its blocks own.
    ///
    /// # Safety
    /// The conditions of `nvme_gather_batched_striped`; the ranges are valid as for [`nvme_gather_mapped`].
    pub unsafe fn nvme_gather_batched_striped_mapped(mapped: MappedLaunch<BatchedStripes>) {
        // SAFETY: the caller keeps the conditions under `# Safety`.
        unsafe { striped::gather_batched(&mapped.launch, mapped.map) }
    }
}
