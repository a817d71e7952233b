//! One device of a store: its size, its limits, the pool of lanes over it, and the path of its data. A stripe has
//! several members; everything above counts in bytes of the store and never in blocks of a member.

use super::file::FileChanges;
use super::lane::LanePool;
use super::options::DataPath;
use nvme_doctor::advice::{AdviceFacts, PathAdvice, advise};
use nvme_driver::controller::Controller;
use nvme_driver::sysfs::SysfsHost;
use std::sync::Arc;
use std::time::Duration;

/// A device that a store lies on.
pub(crate) struct StoreMember {
    /// Present when a GPU gathers rows. Dropped first, so that the GPU's queues end before the others.
    #[cfg(feature = "cuda")]
    pub rows: Option<std::sync::Arc<nvme_cuda::GpuRows>>,
    /// Present when the store was opened with a GPU: for rows that the GPU does not move itself.
    #[cfg(feature = "cuda")]
    pub gpu: Option<nvme_cuda::HostRows>,
    /// Parts of queues for kernels, present for a drive of a store with a GPU.
    #[cfg(feature = "cuda")]
    pub kernels: Option<super::with_gpu::ForKernels>,
    /// Present for a file that cuFile reads.
    #[cfg(feature = "cuda")]
    pub gds: Option<super::with_gpu::ByCuFile>,
    // The queues go before their controller is shut down.
    pub pool: LanePool,
    /// Present for a controller that this process drives.
    pub controller: Option<Arc<Controller>>,
    /// Present for a file: other programs may write it, too.
    pub changes: Option<super::file::FileChanges>,
    /// Size in bytes.
    pub len: u64,
    /// True for a regular file, which ends with the last byte that was written to it.
    pub is_regular_file: bool,
    /// Transfer unit: offsets and lengths of reads and writes are multiples of it.
    pub block_bytes: u32,
    /// Reads of rows are rounded to this, a multiple of the block, so that neighbours share one.
    pub read_bytes: u32,
    /// The most bytes of one command.
    pub most_bytes: u32,
    /// Commands do not cross multiples of this number of bytes; 0 if there is no boundary.
    pub boundary_bytes: u64,
    /// Reason why the member cannot be written, and the remedy.
    pub read_only: Option<(String, &'static str)>,
    pub path: DataPath,
    /// Deadline of a command.
    pub timeout: Duration,
}

impl StoreMember {
    /// Returns the data path that is in use now.
    pub fn shown(&self) -> DataPath {
        #[cfg(feature = "cuda")]
        if let Some(gds) = &self.gds {
            return gds.shown(self.path.clone());
        }
        self.path.clone()
    }

    /// Returns what would move the bytes better.
    pub fn explain(&self) -> PathAdvice {
        let shown = self.shown();
        #[cfg(feature = "cuda")]
        let has_gpu = self.gpu.is_some();
        #[cfg(not(feature = "cuda"))]
        let has_gpu = false;
        let facts = AdviceFacts {
            device: &shown.device,
            path: &shown.path,
            why: &shown.why,
            tier: shown.tier,
            has_gpu,
            disk: self.changes.as_ref().map(FileChanges::disk),
        };
        advise(&SysfsHost::here(), &facts)
    }
}
