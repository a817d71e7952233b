//! Queue pairs that the GPU drives: their words and states in GPU memory.
//!
//! Between two launches the states may be copied to the host, where the same core drains them, and back: see
//! [`inspect`](QueueSet::inspect).
// UNSAFETY: states are viewed as atomics, and queues are attached by the addresses in their words.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::memory::DeviceMemory;
use super::ring_shadow::RingShadow;
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::{self, QueueState};
use nvme_core::sync::AtomicU32;
use nvme_core::{ControllerIdentity, QueueMemory};
use nvme_driver::error::{Error, Result};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// States begin at multiples of this size, so that two of them never share a sector.
const STATE_ALIGN: usize = 256;

/// Queue pairs that a GPU drives.
pub(super) struct QueueSet {
    host: Vec<QueueWords>,
    words: DeviceMemory,
    states: Arc<DeviceMemory>,
    /// Rings in GPU memory, if they lie there.
    rings: Option<Arc<RingShadow>>,
}

impl QueueSet {
    /// Lends queues, given by host addresses without state, to the GPU. `translate` returns the GPU's address for each
    /// address in them; `identity` is the identity of the controller behind them, and the first position is `start`
    /// (see [`QueueState::init`]). `rings` is `Some` if the rings lie in GPU memory, too.
    ///
    /// # Errors
    /// [`Error::Usage`] for rings that a kernel cannot drive, [`Error::Device`] without GPU memory.
    pub fn new(
        gpu: &Arc<Gpu>,
        identity: &ControllerIdentity,
        host: &[QueueWords],
        start: u32,
        rings: Option<Arc<RingShadow>>,
        translate: impl Fn(u64) -> Result<u64>,
    ) -> Result<Self> {
        for words in host {
            if !QueueState::possible(words.entries, words.slots) {
                return Err(Error::usage(
                    format!(
                        "a queue of {} entries; kernels need a power of two",
                        words.entries
                    ),
                    "use a --depth of one less than a power of two",
                ));
            }
        }
        let size = host.iter().map(state_bytes).max().unwrap_or(STATE_ALIGN);
        let states = Arc::new(DeviceMemory::new(gpu, size * host.len())?);
        let words = DeviceMemory::new(gpu, size_of_val(host))?;
        let set = Self {
            host: host.to_vec(),
            words,
            states,
            rings,
        };
        let mut translated = Vec::new();
        for (index, one) in set.host.iter().enumerate() {
            translated.push(QueueWords {
                sq: translate(one.sq)?,
                cq: translate(one.cq)?,
                sq_doorbell: translate(one.sq_doorbell)?,
                cq_doorbell: translate(one.cq_doorbell)?,
                lists: translate(one.lists)?,
                state: set.states.address() + (index * size) as u64,
                ..*one
            });
        }
        set.words.upload(0, translated.as_bytes())?;
        set.restart(identity, start)?;
        Ok(set)
    }

    /// Returns the GPU's address of the array of queue words.
    pub fn address(&self) -> u64 {
        self.words.address()
    }

    /// Returns the number of queues.
    pub fn len(&self) -> usize {
        self.host.len()
    }

    /// Returns the number of bytes of GPU memory that the state of one queue takes.
    pub fn state_bytes(&self) -> usize {
        self.host.first().map_or(0, state_bytes)
    }

    /// Initialises all queues again, for rings that were zeroed. Commands in flight are forgotten.
    pub fn restart(&self, identity: &ControllerIdentity, start: u32) -> Result<()> {
        let size = self.host.iter().map(state_bytes).max().unwrap_or(0);
        let mut all = Vec::with_capacity(size * self.host.len());
        for one in &self.host {
            let words: Vec<AtomicU32> = (0..size / 4).map(|_| AtomicU32::new(0)).collect();
            let qid = nvme_core::spec::Qid(one.qid as u16);
            if let Some(state) = QueueState::new(&words, qid, one.entries, one.slots) {
                state.init(identity, start);
            }
            all.extend(words.iter().map(load));
        }
        self.states.upload(0, all.as_bytes())
    }

    /// Takes queue `index` to the host, shows it to `look` and brings its state back.
    ///
    /// The doorbells that `look` rings are the controller's. No kernel may use the queue meanwhile,
    /// which the caller sees to.
    pub fn inspect<R>(
        &self,
        index: usize,
        look: impl FnOnce(QueueMemory<'_>, QueueState<'_>) -> R,
    ) -> Result<R> {
        self.remote(index).inspect(look)
    }

    /// Returns the part by which a reset's hook can inspect a queue without `self`, while no kernel runs.
    pub(super) fn remote(&self, index: usize) -> RemoteQueue {
        RemoteQueue {
            states: Arc::clone(&self.states),
            host: self.host.clone(),
            rings: self.rings.clone(),
            index,
        }
    }
}

/// A queue's state in GPU memory and its rings, without the kernels.
pub(super) struct RemoteQueue {
    states: Arc<DeviceMemory>,
    host: Vec<QueueWords>,
    rings: Option<Arc<RingShadow>>,
    index: usize,
}

impl RemoteQueue {
    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.states.gpu()
    }

    /// Does the same as [`QueueSet::inspect`]. No kernel may use the queue.
    pub fn inspect<R>(&self, look: impl FnOnce(QueueMemory<'_>, QueueState<'_>) -> R) -> Result<R> {
        let size = self.host.iter().map(state_bytes).max();
        let size = size.unwrap_or(STATE_ALIGN);
        let one = self.words()?;
        let mut bytes = vec![0u32; size / 4];
        self.states
            .download(self.index * size, bytes.as_mut_bytes())?;
        let copy: Vec<AtomicU32> = bytes.iter().copied().map(AtomicU32::new).collect();
        let completions = match &self.rings {
            Some(rings) => Some(rings.completions(one)?),
            None => None,
        };
        let cq = completions.as_ref().map(|copy| copy.as_ptr().addr() as u64);
        let words = QueueWords {
            state: copy.as_ptr().addr() as u64,
            cq: cq.unwrap_or(one.cq),
            ..*one
        };
        // SAFETY: host addresses of rings, lists and doorbells that the owner of `host` keeps; the state and the
        // completions in GPU memory are copies, which outlive `look`.
        let attached = unsafe { words.attach() };
        let (memory, state) = attached.ok_or_else(|| Error::internal("impossible queue sizes"))?;
        let result = look(memory, state);
        for (to, from) in bytes.iter_mut().zip(&copy) {
            *to = load(from);
        }
        self.states.upload(self.index * size, bytes.as_bytes())?;
        Ok(result)
    }

    /// Zeroes completions that lie in GPU memory, for a queue that is to be created again.
    pub fn clear_completions(&self) -> Result<()> {
        match &self.rings {
            Some(rings) => rings.clear(self.words()?),
            None => Ok(()),
        }
    }

    fn words(&self) -> Result<&QueueWords> {
        let one = self.host.get(self.index);
        one.ok_or_else(|| Error::internal(format!("no queue {}", self.index)))
    }
}

fn state_bytes(words: &QueueWords) -> usize {
    (queue_state::words(words.entries) * 4).next_multiple_of(STATE_ALIGN)
}

fn load(word: &AtomicU32) -> u32 {
    word.load(nvme_core::sync::Order::Relaxed, nvme_core::sync::Scope::Sys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_small_and_apart() {
        let words = QueueWords {
            entries: 1024,
            slots: 1023,
            ..QueueWords::default()
        };
        assert!(state_bytes(&words) <= 64 << 10);
        assert!(state_bytes(&words).is_multiple_of(STATE_ALIGN));
    }
}
