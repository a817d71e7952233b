//! Queue pairs of a controller that a GPU drives, and what happens when a command does not end.
//!
//! Invariant: while a kernel runs the queues' locks are held, so that no thread resets the controller
//! under it; data memory that a command may still reach is kept until the command has ended.
// UNSAFETY: launches receive the addresses of data memory.
#![allow(unsafe_code)]

use super::data::GpuData;
use super::held::KeepAlive;
use super::kernels::{Kernel, QueueKernels};
pub use super::lent::RecoveryCounts;
use super::lent::{LentQueues, QueueKind};
use super::queues::{LaunchGrid, LaunchMemory, LaunchResult};
use super::stream::Stream;
use super::tier::GpuAccess;
use nvme_core::spec::{Cid, Qid};
use nvme_driver::controller::Controller;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_gpu_kernel::work::LaunchArguments;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Queue pairs of one controller that a GPU drives. Deleted on drop.
pub struct GpuQueuePairs {
    lent: LentQueues,
    launches: LaunchMemory,
    /// Data memory of commands that may be in flight.
    data: KeepAlive<GpuData>,
    /// Flag that ends launches early, and the time that one may take after it was set.
    stop: Option<(Arc<AtomicBool>, Duration)>,
}

impl GpuQueuePairs {
    /// Creates `count` queue pairs of at least `entries` entries (rounded up to a power of two) and lends them to the
    /// GPU.
    ///
    /// # Errors
    /// [`Error::Usage`] when the controller has not as many or not as large ones.
    pub fn create(
        kernels: &Arc<QueueKernels>,
        controller: &Controller,
        access: &Arc<GpuAccess>,
        count: u32,
        entries: u32,
    ) -> Result<Self> {
        Ok(Self {
            lent: LentQueues::create(kernels.gpu(), controller, access, (count, entries), None)?,
            launches: LaunchMemory::new(kernels)?,
            data: KeepAlive::default(),
            stop: None,
        })
    }

    /// Limits the wait for a launch to `grace` once `stop` is set.
    pub fn end_early(&mut self, stop: Arc<AtomicBool>, grace: Duration) {
        self.stop = Some((stop, grace));
    }

    /// Runs a kernel of the queues (not a bare limit) with its data in `data`, and waits for it.
    ///
    /// The data fields of `launch` are filled in here; its `data` is the offset in `data` at which the launch's data
    /// begins. Each kernel bounds its own time; `limit` bounds the host's wait for it.
    ///
    /// # Errors
    /// [`Error::Usage`] for a kernel that keeps other books than the last one, otherwise as
    /// [`GpuQueues::run`](super::GpuQueues::run).
    pub fn run(
        &mut self,
        grid: LaunchGrid,
        launch: LaunchArguments,
        data: &Arc<GpuData>,
        accounts: bool,
        limit: Duration,
    ) -> Result<LaunchResult> {
        self.lent.check_alive()?;
        let kind = match grid.kernel {
            kernel if kernel.shares() => Some(QueueKind::Shared),
            Kernel::Owner
            | Kernel::Warp
            | Kernel::Block
            | Kernel::OwnerTraced
            | Kernel::WarpTraced
            | Kernel::BlockTraced => Some(QueueKind::Owned),
            _ => None,
        };
        if kind.is_some() && self.lent.kind.is_some() && kind != self.lent.kind {
            return Err(Error::usage(
                "queues that one group owned cannot be shared, nor the other way round",
                "create other queues",
            ));
        }
        self.lent.kind = self.lent.kind.or(kind);
        if self.lent.take_fresh() {
            self.launches.clear_cells()?;
        }
        let launch = LaunchArguments {
            data: data.address() + launch.data,
            data_iova: data.iova().0 + launch.data,
            data_bytes: (data.len() as u64).saturating_sub(launch.data),
            ..launch
        };
        // An earlier launch that timed out may have commands in flight that this one does not know of.
        let is_first = self.data.is_empty();
        self.data.keep(data);
        // The locks are taken in the order of identifiers, as recovery takes them.
        let mut entries: Vec<_> = self.lent.queues.iter().collect();
        entries.sort_by_key(|queue| queue.qid().0);
        let held: Vec<_> = entries.iter().map(|queue| lock(queue.inner())).collect();
        // SAFETY: the data memory is kept in `self.data` until nothing is in flight. The locks on all queues
        // keep every other thread, and recovery, from the queues while the GPU drives them.
        let ran = unsafe {
            let wait = |stream: &Stream, limit| match &self.stop {
                Some((stop, grace)) => stream.wait_unless(limit, (stop, *grace)),
                None => stream.wait(limit, || Ok(())),
            };
            self.launches
                .run(&self.lent.set, grid, launch, accounts, limit, wait)
        };
        drop(held);
        let ran = ran?;
        let all_ended = ran.report.timed_out == 0 && ran.report.fault == 0;
        if all_ended && (is_first || self.in_flight()?.is_empty()) {
            self.data.release();
        }
        Ok(ran)
    }

    /// Recovers after a launch with time-outs or a fault: reaps late completions, aborts the commands in flight, and
    /// resets the controller when that does not help. Afterwards nothing is in flight.
    ///
    /// # Errors
    /// [`Error::Gone`] when the controller does not come back; data memory is kept then, and leaked on drop.
    pub fn recover(&mut self) -> Result<RecoveryCounts> {
        let recovered = self.lent.end_all()?;
        self.data.release();
        Ok(recovered)
    }

    /// Returns the commands in flight, with their queues.
    ///
    /// # Errors
    /// [`Error::Environment`] when GPU memory cannot be read.
    pub fn in_flight(&self) -> Result<Vec<(Qid, Cid)>> {
        self.lent.in_flight()
    }
}

impl Drop for GpuQueuePairs {
    fn drop(&mut self) {
        if !self.data.is_empty() {
            // A failure leaks the data; the session keeps the rings until the controller is shut down.
            let _ = self.recover();
        }
    }
}
