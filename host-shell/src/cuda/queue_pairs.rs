//! Queue pairs of a controller that a GPU drives, and what happens when a command does not end.
//!
//! Invariant: while a kernel runs the queues' locks are held, so that no thread resets the controller
//! under it; data memory that a command may still reach is kept until the command has ended.
// UNSAFETY: launches are told of data memory by address.
#![allow(unsafe_code)]

use super::held::Held;
use super::kernels::{Kernel, Kernels};
use super::queues::{GpuQueues, Grid, LaunchResult, Remote};
use super::registered::Registered;
use super::tier::{Access, GpuData};
use crate::controller::Controller;
use crate::controller::queue::Queue;
use crate::controller::session::Session;
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::group::Alone;
use nvme_core::queue_state::QueueState;
use nvme_core::spec::{Cid, Qid};
use nvme_core::{Cells, Collective, ControllerFault, Drained, QueueMemory, Quiesced, SharedQueue};
use nvme_gpu_kernel::work::Launch;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Commands in flight that are aborted one by one; more of them are ended by a reset.
const MOST_ABORTS: usize = 8;

/// What recovery did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Completions that had come late.
    pub late: u32,
    /// Commands ended by Abort.
    pub aborted: u32,
    /// Commands ended by a controller reset.
    pub reset: u32,
    /// Why the controller was reset, if it was.
    pub cause: Option<String>,
}

/// How the words of the states were last used: owned and shared queues lay them out differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueKind {
    Owned,
    Shared,
}

/// Queue pairs of one controller in the hands of a GPU. Deleted on drop.
pub struct GpuQueuePairs {
    set: GpuQueues,
    kind: Option<QueueKind>,
    /// A reset took the commands away: cells begin anew.
    fresh: Arc<AtomicBool>,
    /// A reset could not be told to the GPU.
    dead: Arc<AtomicBool>,
    /// Data memory of commands that may be in flight.
    data: Held<GpuData>,
    session: Arc<Session>,
    queues: Vec<Queue>,
    _rings: Vec<Registered>,
    _access: Arc<Access>,
}

impl GpuQueuePairs {
    /// Creates `count` queue pairs of at least `entries` entries (rounded up to a power of two) and hands
    /// them to the GPU.
    ///
    /// # Errors
    /// [`Error::Usage`] when the controller has not as many or not as large ones.
    pub fn create(
        kernels: &Arc<Kernels>,
        controller: &Controller,
        access: &Arc<Access>,
        count: u32,
        entries: u32,
    ) -> Result<Self> {
        let entries = entries.max(2).next_power_of_two();
        let most = controller.info().capabilities.max_entries;
        if entries > most {
            return Err(Error::usage(
                format!("queues of {entries} entries; the controller has {most} at most"),
                format!("use a --depth below {most}"),
            ));
        }
        let (mut queues, mut rings, mut words) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let queue = controller.create_queue_pair(entries)?;
            {
                let inner = lock(queue.inner());
                words.push(inner.pair.words());
                rings.push(Registered::pages(access.gpu(), inner.pair.pages())?);
            }
            queues.push(queue);
        }
        let translate = |host: u64| {
            let of_rings = rings.iter().find_map(|ring| ring.translate(host).ok());
            of_rings.map_or_else(|| access.doorbell(host), Ok)
        };
        let identity = controller.device().registers().identity();
        let set = GpuQueues::new(kernels, identity, &words, 0, translate)?;
        let pairs = Self {
            set,
            kind: None,
            fresh: Arc::default(),
            dead: Arc::default(),
            data: Held::default(),
            session: Arc::clone(controller.session()),
            queues,
            _rings: rings,
            _access: Arc::clone(access),
        };
        for (index, queue) in pairs.queues.iter().enumerate() {
            let hook = pairs.hook(index);
            lock(queue.inner()).lent = Some(hook);
        }
        Ok(pairs)
    }

    /// Runs a kernel of the queues (not a bare limit) with its data in `data`, and waits for it.
    ///
    /// The data fields of `launch` are filled in here; its `data` says how far into `data` it begins. Each kernel bounds its own time; `limit` bounds
    /// the host's patience with it.
    ///
    /// # Errors
    /// [`Error::Usage`] for a kernel that keeps other books than the last one, otherwise as
    /// [`GpuQueues::run`].
    pub fn run(
        &mut self,
        grid: Grid,
        launch: Launch,
        data: &Arc<GpuData>,
        accounts: bool,
        limit: Duration,
    ) -> Result<LaunchResult> {
        self.check_alive()?;
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
        if kind.is_some() && self.kind.is_some() && kind != self.kind {
            return Err(Error::usage(
                "queues that one group owned cannot be shared, nor the other way round",
                "create other queues",
            ));
        }
        self.kind = self.kind.or(kind);
        if self.fresh.swap(false, Ordering::AcqRel) {
            self.set.clear_cells()?;
        }
        let launch = Launch {
            data: data.address() + launch.data,
            data_iova: data.iova().0 + launch.data,
            data_bytes: (data.len() as u64).saturating_sub(launch.data),
            ..launch
        };
        // An earlier launch that timed out may have commands in flight that this one does not know of.
        let is_first = self.data.is_empty();
        self.data.keep(data);
        // In the order of identifiers, as recovery takes them.
        let mut entries: Vec<_> = self.queues.iter().collect();
        entries.sort_by_key(|queue| queue.qid().0);
        let held: Vec<_> = entries.iter().map(|queue| lock(queue.inner())).collect();
        // SAFETY: the data is kept in `self.data` until nothing is in flight; the locks keep every thread
        // else from the queues.
        let ran = unsafe { self.set.run(grid, launch, accounts, limit, || Ok(())) };
        drop(held);
        let ran = ran?;
        let all_ended = ran.report.timed_out == 0 && ran.report.fault == 0;
        if all_ended && (is_first || self.in_flight()?.is_empty()) {
            self.data.release();
        }
        Ok(ran)
    }

    /// After a launch with timeouts or a fault: takes late completions, aborts what is in flight, and
    /// resets the controller when that does not help. Afterwards nothing is in flight.
    ///
    /// # Errors
    /// [`Error::Gone`] when the controller does not come back; data memory is kept then, and leaked on drop.
    pub fn recover(&mut self) -> Result<Recovered> {
        let recovered = self.end_all()?;
        self.data.release();
        Ok(recovered)
    }

    fn end_all(&mut self) -> Result<Recovered> {
        self.check_alive()?;
        let mut recovered = Recovered::default();
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
        self.fresh.store(true, Ordering::Release);
        Ok(recovered)
    }

    /// Aborts commands one after the other; the reason for a reset when one does not end.
    fn abort(
        &mut self,
        index: usize,
        qid: Qid,
        cids: &[Cid],
        recovered: &mut Recovered,
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

    /// Takes the completions that are there: how many, a fault, and what is still in flight.
    fn drain(&mut self, index: usize) -> Result<(u32, Option<ControllerFault>, Vec<Cid>)> {
        let kind = self.kind;
        self.set.inspect(index, |memory, state| {
            let late = match kind {
                Some(QueueKind::Owned) => drain_owned(memory, state),
                _ => drain_shared(memory, state),
            };
            (late, state.fault(), state.cids().collect())
        })
    }

    /// The commands in flight, with their queues.
    ///
    /// # Errors
    /// [`Error::Device`] when GPU memory cannot be read.
    pub fn in_flight(&mut self) -> Result<Vec<(Qid, Cid)>> {
        let mut all = Vec::new();
        for index in 0..self.queues.len() {
            let qid = self.queues[index].qid();
            let cids: Vec<Cid> = self.set.inspect(index, |_, state| state.cids().collect())?;
            all.extend(cids.into_iter().map(|cid| (qid, cid)));
        }
        Ok(all)
    }

    fn check_alive(&self) -> Result<()> {
        if self.dead.load(Ordering::Acquire) {
            return Err(Error::Gone {
                cause: "the GPU could not be told of a controller reset".to_owned(),
            });
        }
        Ok(())
    }

    /// What a reset does to queue `index`.
    fn hook(&self, index: usize) -> crate::controller::queue_inner::Lent {
        let remote: Remote = self.set.remote(index);
        let (fresh, dead) = (Arc::clone(&self.fresh), Arc::clone(&self.dead));
        Box::new(move |proof: &Quiesced<'_>| {
            let told = remote.inspect(|memory, state| {
                SharedQueue::new(memory, state, Cells::new(&[]))
                    .recover(proof)
                    .is_some()
            });
            if !matches!(told, Ok(true)) {
                dead.store(true, Ordering::Release);
            }
            fresh.store(true, Ordering::Release);
        })
    }
}

impl Drop for GpuQueuePairs {
    fn drop(&mut self) {
        if !self.data.is_empty() {
            // A failure leaks the data; the session keeps the rings until the controller is shut down.
            let _ = self.recover();
        }
        for queue in &self.queues {
            lock(queue.inner()).lent = None;
        }
    }
}

fn drain_owned(memory: QueueMemory<'_>, state: QueueState<'_>) -> u32 {
    let mut queue = Collective::resume(Alone, memory, state);
    let mut taken = 0;
    // A fault is in the state afterwards.
    while let Ok(count @ 1..) = queue.reap::<1>(|_| {}) {
        taken += count;
    }
    queue.suspend();
    taken
}

fn drain_shared(memory: QueueMemory<'_>, state: QueueState<'_>) -> u32 {
    // No wait for the results is left: there are no cells.
    let queue = SharedQueue::new(memory, state, Cells::new(&[]));
    let mut taken = 0;
    while let Drained::Took(count @ 1..) = queue.drain(&Alone) {
        taken += count;
    }
    taken
}
