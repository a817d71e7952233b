//! Queue pairs, result cells and a buffer for kernels that the caller launches.
//!
//! Invariant: between [`begin`](KernelQueues::begin) and its matching [`end`](KernelQueues::end) no thread touches the
//! queues. A controller reset waits for that end; once its deadline has passed, the queues belong to the kernels until
//! the store is closed.
// UNSAFETY: asks the driver about a function of the caller's.
#![allow(unsafe_code)]

use super::data::GpuData;
use super::driver::{Gpu, check};
use super::lent::{LentQueues, QueueKind, QueueUsers, RecoveryCounts};
use super::memory::DeviceMemory;
use super::tier::GpuAccess;
use cudarc::driver::sys::{self, CUresult};
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::nvm;
use nvme_driver::controller::Controller;
use nvme_driver::controller::session::UserFacts;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_gpu_kernel::QueueArray;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The symbol that the device library carries its layout number in.
const LAYOUT: &std::ffi::CStr = c"nvme_gpu_device_layout";

/// Options of a [`KernelQueues`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelQueuesOptions {
    /// Queue pairs, 1 or more.
    pub queues: u32,
    /// Entries of each, rounded up to a power of two.
    pub entries: u32,
    /// Result cells: one for each command that may be in flight or not waited for yet.
    pub cells: u32,
    /// Bytes of the buffer; 0 for none.
    pub buffer_bytes: usize,
}

/// Queue pairs of one controller that are kept for kernels of the caller's.
#[derive(Debug)]
pub struct QueueReserve {
    kept: u32,
    left: AtomicU32,
}

/// Queue pairs that were taken from a [`QueueReserve`]. They return to it on drop.
struct ReservedQueues {
    reserve: Arc<QueueReserve>,
    count: u32,
}

impl QueueReserve {
    /// Keeps `kept` queue pairs.
    pub fn new(kept: u32) -> Arc<Self> {
        Arc::new(Self {
            kept,
            left: AtomicU32::new(kept),
        })
    }

    /// Takes `count` of the queue pairs that the store keeps for kernels. One atomic update takes all or
    /// none, so that two callers at the same time cannot both get the last ones.
    ///
    /// # Errors
    /// [`Error::Usage`] when fewer are left.
    fn take(self: &Arc<Self>, count: u32) -> Result<ReservedQueues> {
        let taken = self
            .left
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| {
                left.checked_sub(count)
            });
        let reserved = |_| ReservedQueues {
            reserve: Arc::clone(self),
            count,
        };
        taken.map(reserved).map_err(|left| {
            Error::usage(
                format!(
                    "{count} queue pairs for kernels are more than the {left} left of the {} that the store keeps",
                    self.kept
                ),
                "open the store with more kernel_queues, or close queues that are not used",
            )
        })
    }
}

impl Drop for ReservedQueues {
    fn drop(&mut self) {
        self.reserve.left.fetch_add(self.count, Ordering::AcqRel);
    }
}

/// Queue pairs of one controller for kernels of the caller's. Deleted on drop.
pub struct KernelQueues {
    lent: Option<LentQueues>,
    cells: Option<DeviceMemory>,
    buffer: Option<GpuData>,
    turns: Arc<QueueOwnership>,
    gpu: Arc<Gpu>,
    info: NamespaceInfo,
    footing: UserFacts,
    max_transfer: u64,
    // Shut down after the queues are deleted.
    controller: Option<Arc<Controller>>,
    // Returned after the queues are deleted.
    reserved: Option<ReservedQueues>,
}

impl KernelQueues {
    /// Lends queues of `controller` to kernels on the GPU of `access`, for namespace `info`; a command takes `timeout`
    /// at most.
    ///
    /// # Errors
    /// [`Error::Usage`] when fewer are left in `reserve`, when the controller has no such large queues, or for no cells;
    /// [`Error::Environment`] without memory.
    pub fn create(
        controller: &Arc<Controller>,
        access: &Arc<GpuAccess>,
        info: NamespaceInfo,
        (options, reserve): (KernelQueuesOptions, &Arc<QueueReserve>),
        timeout: Duration,
    ) -> Result<Self> {
        if options.queues == 0 || options.cells == 0 {
            return Err(Error::usage(
                "queues for kernels need a queue pair and a result cell",
                "ask for 1 or more of each",
            ));
        }
        let reserved = reserve.take(options.queues)?;
        let gpu = access.gpu();
        let _guest = gpu.enter()?;
        let turns = Arc::new(QueueOwnership {
            state: Mutex::default(),
            changed: Condvar::new(),
            patience: timeout * 3 + Duration::from_secs(2),
        });
        let mut lent = LentQueues::create(
            gpu,
            controller,
            access,
            (options.queues, options.entries),
            Some(Arc::clone(&turns) as _),
        )?;
        lent.kind = Some(QueueKind::Shared);
        let buffer = match options.buffer_bytes {
            0 => None,
            bytes => Some(access.data(bytes)?),
        };
        Ok(Self {
            lent: Some(lent),
            cells: Some(DeviceMemory::new(gpu, options.cells as usize * 8)?),
            buffer,
            turns,
            gpu: Arc::clone(gpu),
            info,
            footing: UserFacts::new(controller.session(), info),
            max_transfer: controller.max_transfer(),
            controller: Some(Arc::clone(controller)),
            reserved: Some(reserved),
        })
    }

    /// Returns the value that a kernel takes as its argument.
    pub fn queues(&self) -> QueueArray {
        let (Some(lent), Some(cells)) = (&self.lent, &self.cells) else {
            return QueueArray::default();
        };
        QueueArray {
            queues: lent.set.address(),
            cells: cells.address(),
            queue_count: lent.set.len() as u32,
            cell_count: (cells.len() / 8) as u32,
        }
    }

    /// Returns the buffer: its address on the GPU, its address for the controller, its bytes. Zeroes without
    /// one.
    pub fn buffer(&self) -> (u64, u64, u64) {
        self.buffer.as_ref().map_or((0, 0, 0), |buffer| {
            (buffer.address(), buffer.iova().0, buffer.len() as u64)
        })
    }

    /// Returns the namespace.
    pub fn namespace(&self) -> NamespaceInfo {
        self.info
    }

    /// Returns the most bytes of one command.
    pub fn max_transfer(&self) -> u64 {
        self.max_transfer
    }

    /// Begins the use of the queues by kernels; call it before launches. Until [`end`](Self::end)
    /// the library leaves the queues alone. Waits for a reset of the controller that is under way.
    /// May be called several times; each needs its own end.
    ///
    /// # Errors
    /// [`Error::Gone`] when the controller or the queues are unusable; [`Error::Changed`] when the namespace has
    /// changed.
    pub fn begin(&self) -> Result<()> {
        let lent = self.lent()?;
        self.footing.check(nvm::opcode::READ)?;
        let mut state = self.turns.wait_for_turn()?;
        lent.check_alive()?;
        // Once more, after the wait. Reading the facts again could wait for a command that waits for these queues.
        self.footing.check_read(nvm::opcode::READ)?;
        if state.running == 0
            && let Some(cells) = &self.cells
        {
            // A kernel that ended without waiting left its commands' results there.
            let _guest = self.gpu.enter()?;
            let _ = lent.take_fresh();
            cells.zero()?;
        }
        state.running += 1;
        Ok(())
    }

    /// Ends a [`begin`](Self::begin) after its kernels have ended, for which the caller has waited.
    /// The last end reaps late completions, aborts the commands in flight, and resets the
    /// controller when that does not help.
    ///
    /// # Errors
    /// [`Error::Usage`] without a begin; [`Error::Gone`] when the controller does not come back.
    pub fn end(&self) -> Result<RecoveryCounts> {
        let lent = self.lent()?;
        if !self.turns.leave()? {
            return Ok(RecoveryCounts::default());
        }
        let ended = || -> Result<RecoveryCounts> {
            lent.check_alive()?;
            let _guest = self.gpu.enter()?;
            match lent.in_flight()?.is_empty() {
                true => Ok(RecoveryCounts::default()),
                false => lent.end_all(),
            }
        };
        let ended = ended();
        self.turns.finish();
        // Kernels that ran while the drive changed may have read by a geometry that no longer holds.
        self.footing.check(nvm::opcode::READ)?;
        ended
    }

    fn lent(&self) -> Result<&LentQueues> {
        self.lent.as_ref().ok_or_else(|| Error::Gone {
            cause: "the queues were closed".to_owned(),
        })
    }
}

impl Drop for KernelQueues {
    fn drop(&mut self) {
        let guest = self.gpu.enter();
        let is_free = || -> Result<bool> {
            let Some(lent) = &self.lent else {
                return Ok(true);
            };
            Ok(!self.turns.is_in_use() && lent.in_flight()?.is_empty())
        };
        if guest.is_err() || !is_free().unwrap_or(false) {
            // A kernel, or the controller, may still use the queues, the cells and the buffer, so they are leaked.
            std::mem::forget(self.lent.take());
            std::mem::forget(self.cells.take());
            std::mem::forget(self.buffer.take());
            std::mem::forget(self.controller.take());
            std::mem::forget(self.reserved.take());
        } else {
            drop(self.lent.take());
            drop(self.cells.take());
            drop(self.buffer.take());
        }
    }
}

/// Ownership of the queues: kernels between begin and end, or the host.
struct QueueOwnership {
    state: Mutex<OwnershipState>,
    changed: Condvar,
    /// Time that a reset waits for kernels.
    patience: Duration,
}

#[derive(Default)]
struct OwnershipState {
    /// Begins without their end.
    running: u32,
    /// A reset has the queues.
    is_stopped: bool,
    /// The last end is recovering the commands that were left in flight.
    is_ending: bool,
    /// Kernels did not end in time, so the queues can never be taken back.
    is_stuck: bool,
    /// The controller did not come back.
    is_gone: bool,
}

impl QueueOwnership {
    fn wait<'s>(
        &self,
        state: MutexGuard<'s, OwnershipState>,
        limit: Duration,
    ) -> MutexGuard<'s, OwnershipState> {
        let waited = self.changed.wait_timeout(state, limit);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until neither a reset nor an `end` uses the queues.
    fn wait_for_turn(&self) -> Result<MutexGuard<'_, OwnershipState>> {
        let mut state = lock(&self.state);
        while (state.is_stopped || state.is_ending) && !state.is_stuck {
            state = self.wait(state, self.patience);
        }
        if state.is_stuck || state.is_gone {
            return Err(Error::Gone {
                cause:
                    "the controller was reset while a kernel used its queues, or did not come back"
                        .to_owned(),
            });
        }
        Ok(state)
    }

    /// Undoes a begin; returns true if it was the last one.
    fn leave(&self) -> Result<bool> {
        let mut state = lock(&self.state);
        if state.running == 0 {
            return Err(Error::usage(
                "an end without a begin",
                "call begin before the launches, and end after they have ended",
            ));
        }
        state.running -= 1;
        state.is_ending = state.running == 0;
        let is_last = state.is_ending;
        drop(state);
        self.changed.notify_all();
        Ok(is_last)
    }

    fn finish(&self) {
        lock(&self.state).is_ending = false;
        self.changed.notify_all();
    }

    /// Waits until no kernel has the queues, for as long as a reset may.
    fn wait_for_kernels<'s>(
        &self,
        mut state: MutexGuard<'s, OwnershipState>,
    ) -> MutexGuard<'s, OwnershipState> {
        let begin = Instant::now();
        while state.running > 0 && !state.is_stuck {
            let Some(left) = self.patience.checked_sub(begin.elapsed()) else {
                break;
            };
            state = self.wait(state, left);
        }
        state
    }

    fn is_in_use(&self) -> bool {
        let state = lock(&self.state);
        state.running > 0 || state.is_stuck
    }
}

impl QueueUsers for QueueOwnership {
    /// Waits for the kernels of any namespace, since a kernel of the caller's may name each. A later begin compares the
    /// facts.
    fn are_returned(&self) -> bool {
        let mut state = lock(&self.state);
        state.is_stopped = true;
        let mut state = self.wait_for_kernels(state);
        // An end that aborts what kernels left behind needs the admin queue, which the caller has: it is not waited for.
        let are_returned = state.running == 0 && !state.is_ending && !state.is_stuck;
        state.is_stopped = false;
        drop(state);
        self.changed.notify_all();
        are_returned
    }

    fn stop(&self) -> bool {
        let mut state = lock(&self.state);
        state.is_stopped = true;
        let mut state = self.wait_for_kernels(state);
        state.is_stuck |= state.running > 0;
        let is_free = !state.is_stuck;
        drop(state);
        self.changed.notify_all();
        is_free
    }

    fn resume(&self, works: bool) {
        let mut state = lock(&self.state);
        state.is_stopped = false;
        state.is_gone |= !works;
        drop(state);
        self.changed.notify_all();
    }
}

impl Gpu {
    /// Returns the layout number with which the code of kernel `function`, a `CUfunction`, was linked: the number in
    /// its `nvme_gpu_device.ptx`; `None` if it has none. The host fills structures of layout
    /// [`DEVICE_LAYOUT`](super::DEVICE_LAYOUT).
    ///
    /// # Safety
    /// `function` is 0 or a function of a module that is loaded in this GPU's primary context.
    ///
    /// # Errors
    /// [`Error::Usage`] for 0; [`Error::Environment`] with the driver's answer.
    pub unsafe fn device_layout(self: &Arc<Self>, function: u64) -> Result<Option<u32>> {
        if function == 0 {
            return Err(Error::usage("there is no kernel", "give a CUfunction"));
        }
        let _guest = self.enter()?;
        let mut module = null_mut();
        let function = std::ptr::with_exposed_provenance_mut(function as usize);
        // SAFETY: the caller's; the call writes one handle.
        check("cuFuncGetModule", unsafe {
            sys::cuFuncGetModule(&mut module, function)
        })?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: a module that is loaded; the call writes one address and one length.
        let found =
            unsafe { sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, module, LAYOUT.as_ptr()) };
        if found == CUresult::CUDA_ERROR_NOT_FOUND {
            return Ok(None);
        }
        check("cuModuleGetGlobal", found)?;
        let mut layout = 0u32;
        if bytes != size_of_val(&layout) {
            return Ok(None);
        }
        let stream = super::stream::Stream::new(self)?;
        // SAFETY: the same number of bytes are on both sides; the copy ends below.
        check("cuMemcpyDtoHAsync", unsafe {
            sys::cuMemcpyDtoHAsync_v2(
                (&raw mut layout).cast(),
                address,
                size_of_val(&layout),
                stream.raw(),
            )
        })?;
        stream.finish()?;
        Ok(Some(layout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(patience: Duration) -> Arc<QueueOwnership> {
        Arc::new(QueueOwnership {
            state: Mutex::default(),
            changed: Condvar::new(),
            patience,
        })
    }

    fn begin(turns: &QueueOwnership) {
        turns.wait_for_turn().unwrap().running += 1;
    }

    #[test]
    fn a_reset_waits_for_the_end_and_a_begin_for_the_reset() {
        let turns = turns(Duration::from_secs(60));
        begin(&turns);
        begin(&turns);
        let other = Arc::clone(&turns);
        let reset = std::thread::spawn(move || other.stop());
        while !lock(&turns.state).is_stopped {
            std::thread::yield_now();
        }
        assert!(!turns.leave().unwrap(), "one is left");
        assert!(!reset.is_finished());
        assert!(turns.leave().unwrap());
        turns.finish();
        assert!(reset.join().unwrap());
        let other = Arc::clone(&turns);
        let waits = std::thread::spawn(move || begin(&other));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waits.is_finished(), "the reset has the queues");
        turns.resume(true);
        waits.join().unwrap();
        assert!(turns.is_in_use() && turns.leave().unwrap());
        assert!(turns.leave().is_err(), "an end without a begin");
    }

    #[test]
    fn kernels_that_do_not_end_keep_the_queues_for_good() {
        let turns = turns(Duration::from_millis(20));
        begin(&turns);
        assert!(!turns.stop());
        turns.resume(true);
        assert!(turns.wait_for_turn().is_err());
        assert!(turns.is_in_use());
    }

    #[test]
    fn kernels_that_run_on_keep_their_queues_when_nothing_is_reset() {
        let turns = turns(Duration::from_millis(20));
        begin(&turns);
        assert!(!turns.are_returned());
        begin(&turns);
        assert!(!turns.leave().unwrap() && turns.leave().unwrap());
        turns.finish();
        assert!(turns.are_returned() && !turns.is_in_use());
        begin(&turns);
    }

    #[test]
    fn a_controller_that_is_gone_begins_nothing() {
        let turns = turns(Duration::from_millis(20));
        assert!(turns.stop());
        turns.resume(false);
        assert!(turns.wait_for_turn().is_err());
        assert!(!turns.is_in_use());
    }
}
