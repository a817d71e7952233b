//! Queue pairs whose rings, lists and states all lie in GPU memory.
//!
//! The controller accesses GPU memory by DMA: the caller passes the addresses by which it does so. Between two launches
//! the host works on copies of the states.

use super::driver::Gpu;
use super::memory::DeviceMemory;
use nvme_core::bringup::QueuePlan;
use nvme_core::handoff::QueueWords;
use nvme_core::mem::{CqCell, CqRing, DmaWords, DoorbellRegister, SqCell, SqRing};
use nvme_core::queue_state::{self, QueueState};
use nvme_core::spec::{Iova, PageSize, Qid};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::{ControllerIdentity, ListMemory, QueueMemory, Quiesced, ResultCells, SharedQueue};
use nvme_driver::error::{Error, Result};
use std::sync::Arc;
use zerocopy::IntoBytes;

const PAGE: usize = 4096;

/// Number and size of the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingShape {
    /// Queue pairs, with identifiers from 1 on.
    pub queues: u32,
    /// Entries of both rings: a power of two.
    pub entries: u32,
    /// Command slots, at most `entries` - 1.
    pub slots: u32,
    /// 64-bit words of list memory for each slot.
    pub list_words: u32,
    /// Position at which the counters start: see [`QueueState::init`].
    pub start: u32,
}

/// Offsets of the parts of a queue in its memory.
#[derive(Clone, Copy, Debug)]
struct RingLayout {
    cq: usize,
    lists: usize,
    state: usize,
    total: usize,
}

impl RingLayout {
    fn of(shape: &RingShape) -> Self {
        let page = |bytes: usize| bytes.next_multiple_of(PAGE);
        let cq = page(shape.entries as usize * size_of::<SqCell>());
        let lists = cq + page(shape.entries as usize * size_of::<CqCell>());
        let state = lists + page(shape.slots as usize * shape.list_words as usize * 8);
        let total = state + page(queue_state::words(shape.entries) * 4);
        Self {
            cq,
            lists,
            state,
            total,
        }
    }
}

/// Queue pairs in GPU memory. The controller must not use the rings any more when this is dropped.
pub struct GpuRings {
    shape: RingShape,
    layout: RingLayout,
    memory: Arc<DeviceMemory>,
    /// The first queue, from the start of `memory` on.
    skip: usize,
    device_words: DeviceMemory,
    iova: Iova,
}

impl GpuRings {
    /// Allocates zeroed rings, lists and states of `shape`, as those of unused queues. `map` maps
    /// the memory for the controller and returns its address there; `doorbells` returns the GPU's
    /// addresses of a queue's tail and head doorbell.
    ///
    /// # Errors
    /// [`Error::Usage`] for rings that a kernel cannot drive, [`Error::Environment`] without GPU memory.
    pub fn new(
        gpu: &Arc<Gpu>,
        shape: RingShape,
        map: impl FnOnce(&Arc<DeviceMemory>) -> Result<Iova>,
        doorbells: impl Fn(Qid) -> [u64; 2],
    ) -> Result<Self> {
        if !QueueState::possible(shape.entries, shape.slots) {
            return Err(Error::usage(
                format!(
                    "a queue of {} entries cannot have {} slots",
                    shape.entries, shape.slots
                ),
                "use a power of two of entries, and fewer slots than entries",
            ));
        }
        let layout = RingLayout::of(&shape);
        let bytes = layout.total * shape.queues as usize;
        let memory = Arc::new(DeviceMemory::new(gpu, bytes + PAGE)?);
        let skip = memory.address().next_multiple_of(PAGE as u64) - memory.address();
        let iova = map(&memory)?.offset(skip);
        if iova.0 % PAGE as u64 != 0 {
            return Err(Error::internal(format!(
                "the controller finds GPU memory at {iova}, which is no start of a page"
            )));
        }
        let rings = Self {
            shape,
            layout,
            skip: skip as usize,
            device_words: DeviceMemory::new(gpu, size_of::<QueueWords>() * shape.queues as usize)?,
            memory,
            iova,
        };
        let all: Vec<QueueWords> = (0..shape.queues)
            .map(|index| rings.words(index, doorbells(Qid(index as u16 + 1))))
            .collect();
        rings.device_words.upload(0, all.as_slice().as_bytes())?;
        Ok(rings)
    }

    fn words(&self, index: u32, [tail, head]: [u64; 2]) -> QueueWords {
        let (shape, layout) = (&self.shape, &self.layout);
        let base = self.memory.address() + self.at(index, 0) as u64;
        let iova = self.iova.offset((layout.total * index as usize) as u64);
        QueueWords {
            sq: base,
            cq: base + layout.cq as u64,
            sq_doorbell: tail,
            cq_doorbell: head,
            lists: base + layout.lists as u64,
            lists_iova: iova.0 + layout.lists as u64,
            state: base + layout.state as u64,
            entries: shape.entries,
            slots: shape.slots,
            list_words: shape.list_words,
            page_shift: PAGE.trailing_zeros(),
            qid: index + 1,
            reserved: 0,
        }
    }

    /// Returns the offset of part `part` of queue `index`.
    fn at(&self, index: u32, part: usize) -> usize {
        self.skip + self.layout.total * index as usize + part
    }

    /// Returns the GPU's address of the array of queue words.
    pub fn address(&self) -> u64 {
        self.device_words.address()
    }

    /// Returns the memory of everything.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// Returns the parameters with which bring-up creates the queues on the controller.
    pub fn plans(&self) -> Vec<QueuePlan> {
        let plan = |index: u32| {
            let iova = self
                .iova
                .offset((self.layout.total * index as usize) as u64);
            QueuePlan {
                qid: Qid(index as u16 + 1),
                sq_entries: self.shape.entries,
                sq_iova: iova,
                cq_entries: self.shape.entries,
                cq_iova: iova.offset(self.layout.cq as u64),
                vector: None,
            }
        };
        (0..self.shape.queues).map(plan).collect()
    }

    /// Makes all queues new ones of the controller `identity`. While no kernel and no controller uses them.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn init(&self, identity: &ControllerIdentity) -> Result<()> {
        for index in 0..self.shape.queues {
            self.with_state(index, |state| state.init(identity, self.shape.start))?;
            self.zero_cq(index)?;
        }
        Ok(())
    }

    /// Ends the commands in flight, after the controller has stopped accessing memory, and returns their
    /// number. The queues can be created again.
    ///
    /// # Errors
    /// [`Error::Internal`] when `proof` is of another controller.
    pub fn recover(&self, proof: &Quiesced<'_>) -> Result<u32> {
        let (sq, cq): (Vec<SqCell>, Vec<CqCell>) = (0..2).map(|_| Default::default()).unzip();
        let bells = [AtomicU32::new(0), AtomicU32::new(0)];
        let mut ended = 0;
        for index in 0..self.shape.queues {
            let count = self.with_state(index, |state| {
                let memory = QueueMemory {
                    sq: SqRing::new(&sq, Iova(0)),
                    cq: CqRing::new(&cq, Iova(0)),
                    sq_doorbell: DoorbellRegister::new(&bells[0]),
                    cq_doorbell: DoorbellRegister::new(&bells[1]),
                    lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
                };
                // The state afterwards fits a group that owns the queue as well.
                SharedQueue::new(memory, state, ResultCells::new(&[])).recover(proof)
            })?;
            ended += count.ok_or_else(|| Error::internal("the proof is of another controller"))?;
            self.zero_cq(index)?;
        }
        Ok(ended)
    }

    /// Returns the number of commands in flight on all queues, as their states say. While no kernel uses them.
    ///
    /// # Errors
    /// [`Error::Environment`] with the driver's answer.
    pub fn in_flight(&self) -> Result<u32> {
        (0..self.shape.queues)
            .map(|index| self.with_state(index, |state| state.in_flight()))
            .sum()
    }

    fn zero_cq(&self, index: u32) -> Result<()> {
        let zeroes = vec![0; self.layout.lists - self.layout.cq];
        self.memory.upload(self.at(index, self.layout.cq), &zeroes)
    }

    /// Calls `act` with a copy of a queue's state, and copies it back to the GPU.
    fn with_state<R>(&self, index: u32, act: impl FnOnce(QueueState<'_>) -> R) -> Result<R> {
        let mut words = vec![0u32; queue_state::words(self.shape.entries)];
        let at = self.at(index, self.layout.state);
        self.memory.download(at, words.as_mut_bytes())?;
        let copy: Vec<AtomicU32> = words.iter().copied().map(AtomicU32::new).collect();
        let qid = Qid(index as u16 + 1);
        let state = QueueState::new(&copy, qid, self.shape.entries, self.shape.slots);
        let result = act(state.ok_or_else(|| Error::internal("impossible queue sizes"))?);
        for (to, from) in words.iter_mut().zip(&copy) {
            *to = from.load(Order::Relaxed, Scope::Sys);
        }
        self.memory.upload(at, words.as_bytes())?;
        Ok(result)
    }
}
