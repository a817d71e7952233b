//! Queue pairs of a controller lent to a GPU: created, and recovered when a command does not end.
//!
//! A reset ends the commands that the GPU had in flight through a hook in each queue. No kernel uses the queues
//! meanwhile: the caller holds their locks while a kernel runs, or [`QueueUsers`] keep launches out.

use super::driver::Gpu;
use super::queue_set::{QueueSet, RemoteQueue};
use super::registered::RegisteredMemory;
use super::tier::GpuAccess;
use nvme_core::group::LoneThread;
use nvme_core::queue_state::QueueState;
use nvme_core::spec::{Cid, Qid};
use nvme_core::{
    CollectiveQueue, ControllerFault, DrainResult, QueueMemory, Quiesced, ResultCells, SharedQueue,
};
use nvme_driver::controller::Controller;
use nvme_driver::controller::queue::DriverQueue;
use nvme_driver::controller::queue_inner::GpuDrivenQueue;
use nvme_driver::controller::session::ControllerSession;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Limit of the commands in flight that are aborted one by one. Each Abort may take its whole deadline, so more
/// commands are ended by a single reset, which is faster.
const MOST_ABORTS: usize = 8;

/// Counts of a recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryCounts {
    /// Number of completions that arrived late.
    pub late: u32,
    /// Commands ended by Abort.
    pub aborted: u32,
    /// Commands ended by a controller reset.
    pub reset: u32,
    /// Cause of the controller reset, if there was one.
    pub cause: Option<String>,
}

/// Layout of the state words at their last use: owned and shared queues differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueKind {
    Owned,
    Shared,
}

/// Users of a queue whose launches the host does not wait for.
pub(super) trait QueueUsers: Send + Sync {
    /// Waits until the kernels of a caller have given the queues back; returns true if they have. Called once for each
    /// queue.
    fn are_returned(&self) -> bool {
        true
    }

    /// Keeps out those whose namespace is about to be erased, without a reset, and waits until none of them is inside;
    /// returns true if none is. Called once for each queue. Their commands may still be in flight.
    fn keep_out(&self) -> bool {
        self.are_returned()
    }

    /// Keeps them out, and waits until none is inside; returns true if none is. Called once for each queue.
    fn stop(&self) -> bool;

    /// Admits them again after [`stop`](Self::stop) and a reset that ended their commands, or shuts them out for good.
    fn resume(&self, works: bool);
}

/// Queue pairs of one controller that a GPU drives. Deleted on drop.
pub(super) struct LentQueues {
    pub set: QueueSet,
    pub kind: Option<QueueKind>,
    pub session: Arc<ControllerSession>,
    pub queues: Vec<DriverQueue>,
    /// Set when a reset has ended the commands, so that result cells must be cleared before the next launch.
    fresh: Arc<AtomicBool>,
    /// Set when the GPU's memory could not be updated after a reset: the queues are unusable.
    dead: Arc<AtomicBool>,
    users: Option<Arc<dyn QueueUsers>>,
    _rings: Vec<RegisteredMemory>,
    _elsewhere: Option<Arc<RegisteredMemory>>,
    _access: Arc<GpuAccess>,
}

impl LentQueues {
    /// Creates `count` queue pairs of at least `entries` entries (rounded up to a power of two) and lends them to the
    /// GPU. `users` is `Some` if launches use them for which the host does not wait.
    ///
    /// # Errors
    /// [`Error::Usage`] when the controller has not as many or not as large ones.
    pub fn create(
        gpu: &Arc<Gpu>,
        controller: &Controller,
        access: &Arc<GpuAccess>,
        (count, entries): (u32, u32),
        users: Option<Arc<dyn QueueUsers>>,
    ) -> Result<Self> {
        Self::of_two_sizes(gpu, controller, access, [(count, entries), (0, 2)], users)
    }

    /// Lends queues of two sizes: the first number of them, then others of at most as many entries.
    ///
    /// # Errors
    /// Lends queues of two sizes: the first number of queues, then further ones with at most as many entries.
    pub fn of_two_sizes(
        gpu: &Arc<Gpu>,
        controller: &Controller,
        access: &Arc<GpuAccess>,
        sizes: [(u32, u32); 2],
        users: Option<Arc<dyn QueueUsers>>,
    ) -> Result<Self> {
        let most = controller.info().capabilities.max_entries;
        // Checked before the rounding: above 2^31 there is no larger power of two.
        let entries = sizes[0].1.max(2);
        if entries > most || entries.next_power_of_two() > most {
            return Err(Error::usage(
                format!("queues of {entries} entries; the controller has {most} at most"),
                format!("use a --depth below {most}"),
            ));
        }
        let entries = entries.next_power_of_two();
        let sizes =
            sizes.map(|(count, of_each)| (count, of_each.clamp(2, entries).next_power_of_two()));
        let count = sizes[0].0 + sizes[1].0;
        let (mut queues, mut rings, mut words) = (Vec::new(), Vec::new(), Vec::new());
        let page = controller.info().capabilities.page.bytes();
        let shadow = access.rings((count, entries, page))?;
        let each = |(count, entries)| std::iter::repeat_n(entries, count as usize);
        for entries in sizes.into_iter().flat_map(each) {
            let queue = match &shadow {
                Some(shadow) => controller.create_queue_pair_in(entries, shadow.memory())?,
                None => controller.create_queue_pair(entries)?,
            };
            {
                let inner = lock(queue.inner());
                words.push(inner.pair.words());
                rings.push(RegisteredMemory::pages(access.gpu(), inner.pair.pages())?);
            }
            queues.push(queue);
        }
        let elsewhere = controller.session().ring_memory();
        let elsewhere = elsewhere
            .map(|memory| access.registered(memory))
            .transpose()?;
        let translate = |host: u64| {
            let on_gpu = shadow.as_ref().and_then(|shadow| shadow.translate(host));
            let of_rings = || rings.iter().find_map(|ring| ring.translate(host).ok());
            let elsewhere = || elsewhere.as_ref()?.translate(host).ok();
            on_gpu
                .or_else(of_rings)
                .or_else(elsewhere)
                .map_or_else(|| access.doorbell(host), Ok)
        };
        let identity = controller.device().registers().identity();
        let set = QueueSet::new(gpu, identity, &words, 0, shadow.clone(), translate)?;
        let lent = Self {
            set,
            kind: None,
            session: Arc::clone(controller.session()),
            queues,
            fresh: Arc::default(),
            dead: Arc::default(),
            users,
            _rings: rings,
            _elsewhere: elsewhere.clone(),
            _access: Arc::clone(access),
        };
        for (index, queue) in lent.queues.iter().enumerate() {
            let hook = lent.hook(index);
            lock(queue.inner()).lent = Some(hook);
        }
        Ok(lent)
    }

    /// True if a reset has ended commands since the last call: their cells have to be cleared.
    pub fn take_fresh(&self) -> bool {
        // The swap takes the flag and, by its acquire half, sees the recovered queue states that the reset
        // stored before it set the flag. The caller clears the cells before the next launch uses them.
        self.fresh.swap(false, Ordering::AcqRel)
    }

    /// Reaps late completions, aborts the commands in flight, and resets the controller when that does not
    /// help. Afterwards nothing is in flight.
    ///
    /// # Errors
    /// [`Error::Gone`] when the controller does not come back.
    pub fn end_all(&self) -> Result<RecoveryCounts> {
        self.check_alive()?;
        let mut recovered = RecoveryCounts::default();
        for index in 0..self.queues.len() {
            let qid = self.queues[index].qid();
            let (late, fault, cids) = self.drain(index)?;
            recovered.late += late;
            let cause = match fault {
                Some(fault) => Some(fault.to_string()),
                None if cids.len() > MOST_ABORTS => {
                    Some(format!("{} commands got no answer", cids.len()))
                }
                None => self.abort(index, qid, &cids, &mut recovered)?,
            };
            if let Some(cause) = cause {
                recovered.reset = self.in_flight()?.len() as u32;
                self.session.reset(&cause)?;
                self.check_alive()?;
                recovered.cause = Some(cause);
                return Ok(recovered);
            }
        }
        // Release: pairs with `take_fresh`. Cells of commands that were aborted may hold an old result, which
        // the next launch would take for the result of one of its commands.
        self.fresh.store(true, Ordering::Release);
        Ok(recovered)
    }

    /// Aborts commands in sequence; returns the cause for a reset when one does not end.
    fn abort(
        &self,
        index: usize,
        qid: Qid,
        cids: &[Cid],
        recovered: &mut RecoveryCounts,
    ) -> Result<Option<String>> {
        let session = Arc::clone(&self.session);
        for cid in cids {
            let mut failure = None;
            let cause = session.abort_lent(qid, *cid, || match self.drain(index) {
                Ok((_, None, left)) => left.contains(cid),
                Ok((_, Some(fault), _)) => {
                    failure.get_or_insert_with(|| Ok(fault.to_string()));
                    false
                }
                Err(error) => {
                    failure.get_or_insert(Err(error));
                    false
                }
            });
            match failure {
                Some(Ok(fault)) => return Ok(Some(fault)),
                Some(Err(error)) => return Err(error),
                None => {}
            }
            if let Some(cause) = cause {
                return Ok(Some(format!("abort: {cause}")));
            }
            recovered.aborted += 1;
        }
        Ok(None)
    }

    /// Takes the state of queue `index` to the host for `look`, under the queue's lock: a reset, which has the locks of
    /// all queues, takes the state to the host as well, and the later of two uploads would undo the other's changes.
    fn inspect<R>(
        &self,
        index: usize,
        look: impl FnOnce(QueueMemory<'_>, QueueState<'_>) -> R,
    ) -> Result<R> {
        let _inner = lock(self.queues[index].inner());
        self.set.inspect(index, look)
    }

    /// Reaps the completions that have arrived: their number, a fault, and the commands still in flight.
    fn drain(&self, index: usize) -> Result<(u32, Option<ControllerFault>, Vec<Cid>)> {
        let kind = self.kind;
        self.inspect(index, |memory, state| {
            let late = match kind {
                Some(QueueKind::Owned) => drain_owned(memory, state),
                _ => drain_shared(memory, state),
            };
            (late, state.fault(), state.cids().collect())
        })
    }

    /// Returns the commands in flight, with their queues.
    ///
    /// # Errors
    /// [`Error::Device`] when GPU memory cannot be read.
    pub fn in_flight(&self) -> Result<Vec<(Qid, Cid)>> {
        let mut all = Vec::new();
        for index in 0..self.queues.len() {
            let qid = self.queues[index].qid();
            let cids: Vec<Cid> = self.inspect(index, |_, state| state.cids().collect())?;
            all.extend(cids.into_iter().map(|cid| (qid, cid)));
        }
        Ok(all)
    }

    /// # Errors
    /// [`Error::Gone`] once the GPU's side of the queues is not known.
    pub fn check_alive(&self) -> Result<()> {
        if self.dead.load(Ordering::Acquire) {
            return Err(Error::Gone {
                cause: "the GPU could not be told of a controller reset".to_owned(),
            });
        }
        Ok(())
    }

    /// Returns the handler by which a reset stops and restarts queue `index`.
    fn hook(&self, index: usize) -> Box<dyn GpuDrivenQueue> {
        Box::new(ResetHook {
            remote: self.set.remote(index),
            fresh: Arc::clone(&self.fresh),
            dead: Arc::clone(&self.dead),
            users: self.users.clone(),
            is_stopped: true,
        })
    }
}

/// A queue's side of a reset.
struct ResetHook {
    remote: RemoteQueue,
    fresh: Arc<AtomicBool>,
    dead: Arc<AtomicBool>,
    /// Users whose launches the host does not wait for.
    users: Option<Arc<dyn QueueUsers>>,
    is_stopped: bool,
}

impl GpuDrivenQueue for ResetHook {
    fn is_returned(&mut self) -> bool {
        self.users.as_ref().is_none_or(|users| users.are_returned())
    }

    fn keep_out(&mut self) -> bool {
        self.users.as_ref().is_none_or(|users| users.keep_out())
    }

    fn stop(&mut self) {
        self.is_stopped = self.users.as_ref().is_none_or(|users| users.stop());
    }

    fn end(&mut self, proof: &Quiesced<'_>) {
        let told = || -> Result<bool> {
            let _guest = self.remote.gpu().enter()?;
            let is_ours = self.remote.inspect(|memory, state| {
                SharedQueue::new(memory, state, ResultCells::new(&[]))
                    .recover(proof)
                    .is_some()
            })?;
            self.remote.clear_completions()?;
            Ok(is_ours)
        };
        // A kernel that has not left the queue may use it at any time, so the queue is lost: recovering its
        // state now would hand the same slots out twice. Later launches are refused with this cause.
        if !self.is_stopped || !matches!(told(), Ok(true)) {
            self.dead.store(true, Ordering::Release);
        }
        self.fresh.store(true, Ordering::Release);
    }

    fn resume(&mut self, works: bool) {
        if let Some(users) = &self.users {
            // Acquire: pairs with the release in `end`. A queue whose state could not be recovered stays
            // closed, since the GPU would otherwise reuse commands that the controller no longer knows.
            users.resume(works && !self.dead.load(Ordering::Acquire));
        }
    }
}

impl Drop for LentQueues {
    fn drop(&mut self) {
        for queue in &self.queues {
            lock(queue.inner()).lent = None;
        }
    }
}

fn drain_owned(memory: QueueMemory<'_>, state: QueueState<'_>) -> u32 {
    let mut queue = CollectiveQueue::resume(LoneThread, memory, state);
    let mut taken = 0;
    // A fault is in the state afterwards.
    while let Ok(count @ 1..) = queue.reap::<1>(|_| {}) {
        taken += count;
    }
    queue.suspend();
    taken
}

fn drain_shared(memory: QueueMemory<'_>, state: QueueState<'_>) -> u32 {
    // No thread waits for the results any more, so that no cells are needed.
    let queue = SharedQueue::new(memory, state, ResultCells::new(&[]));
    let mut taken = 0;
    while let DrainResult::Took(count @ 1..) = queue.drain(&LoneThread) {
        taken += count;
    }
    taken
}
