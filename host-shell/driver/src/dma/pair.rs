//! Queue pairs together with the memory of their rings.
//!
//! Invariant: a [`OwnedPair`] that is dropped with commands in flight leaks its memory instead of freeing it, since the
//! controller may still write to it: only a proof that the controller is quiet ends those commands.
// UNSAFETY: queue pairs view raw memory as rings of atomics.
#![allow(unsafe_code)]

use super::pages::DmaPages;
use super::region::{DmaBuffer, MappedRegion};
use crate::device::Device;
use crate::device::bar::DoorbellMap;
use crate::device::ring_memory::{RingMemory, RingPiece};
use crate::error::{Error, Result};
use nvme_core::bringup::QueuePlan;
use nvme_core::mem::{CqRing, DmaWords, SqRing};
#[cfg(feature = "cuda")]
use nvme_core::spec::register::{cq_head_doorbell, sq_tail_doorbell};
use nvme_core::spec::{Iova, PageSize, Qid};
use nvme_core::{CommandSlot, ListMemory, QueueMemory, QueuePair};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Keep-alive of a command in flight: its data buffer.
pub type Lease = Option<DmaBuffer>;

/// The queue pair type of this library.
pub type HostPair = QueuePair<'static, Lease, Box<[CommandSlot<Lease>]>>;

/// Parameters of a queue pair: identifier, size and transfer limits.
#[derive(Clone, Copy, Debug)]
pub struct PairShape {
    /// The queue's identifier.
    pub qid: Qid,
    /// Entries of both rings.
    pub entries: u32,
    /// CC.MPS.
    pub page: PageSize,
    /// The longest transfer of one command, in bytes.
    pub max_bytes: u64,
    /// Data blocks of SGLs may begin at any byte and have any length.
    pub sgl_bytes: bool,
    /// CAP.DSTRD.
    pub dstrd: u8,
    /// Interrupt vector of the completion queue, or none for polling.
    pub vector: Option<u16>,
}

/// A queue pair together with the memory of its rings.
///
/// The `'static` lifetime of the inner pair is really this struct's lifetime, therefore the inner pair never
/// leaves it by value.
pub struct OwnedPair {
    queue: ManuallyDrop<HostPair>,
    memory: ManuallyDrop<MappedRegion>,
    /// Submission and completion ring outside of `memory`, for example in the controller memory buffer.
    pieces: ManuallyDrop<[Option<RingPiece>; 2]>,
    vector: Option<u16>,
    doorbells: Arc<dyn Device>,
    leaked: bool,
    #[cfg(feature = "cuda")]
    words: nvme_core::handoff::QueueWords,
}

impl OwnedPair {
    /// Allocates rings and list memory and makes an empty pair of them. A ring that the memory `elsewhere` takes lies
    /// there; the other ring and the lists lie in this process.
    pub fn new(
        device: &Arc<dyn Device>,
        shape: PairShape,
        elsewhere: Option<&Arc<RingMemory>>,
    ) -> Result<Self> {
        let entries = shape.entries as usize;
        let page = shape.page.bytes() as usize;
        let sq_bytes = (entries * 64).next_multiple_of(page);
        let cq_bytes = (entries * 16).next_multiple_of(page);
        let words_per_slot = ListMemory::share(shape.page, shape.max_bytes);
        let slots = (entries - 1).min(nvme_core::MAX_IN_FLIGHT as usize);
        let memory = MappedRegion::new(device, sq_bytes + cq_bytes + slots * words_per_slot * 8)?;
        let map: DoorbellMap = device.doorbells();
        let (sq_doorbell, cq_doorbell) = map.pair(shape.qid, shape.dstrd)?;
        let start = memory.pages.start();
        let iova = memory.iova;
        let rings = sq_bytes + cq_bytes;
        let [sq_piece, cq_piece] = pieces_of(elsewhere, sq_bytes, cq_bytes)?;
        let place = |piece: &Option<RingPiece>, offset: usize| match piece {
            Some(piece) => (piece.start(), piece.iova()),
            None => (start.wrapping_add(offset), iova.offset(offset as u64)),
        };
        let (sq_start, sq_iova) = place(&sq_piece, 0);
        let (cq_start, cq_iova) = place(&cq_piece, sq_bytes);
        // SAFETY: the place is page aligned, holds `sq_bytes`, and outlives the pair, because both are
        // in one struct that drops or leaks the pair first; only atomics touch it.
        let sq = unsafe { SqRing::from_raw(sq_start, shape.entries, sq_iova) };
        // SAFETY: as above: `cq_bytes` bytes on pages that no other ring shares.
        let cq = unsafe { CqRing::from_raw(cq_start, shape.entries, cq_iova) };
        // SAFETY: as above; the lists follow the rings.
        let words = unsafe {
            DmaWords::from_raw(
                start.add(rings),
                slots * words_per_slot,
                iova.offset(rings as u64),
            )
        };
        let lists = ListMemory::new(words, shape.page, words_per_slot);
        let lists = lists.with_sgl_bytes(shape.sgl_bytes);
        if lists.max_transfer() < shape.max_bytes {
            return Err(Error::device(
                "the memory for PRP lists does not begin with a page of the controller",
                "report this",
            ));
        }
        let queue_memory = QueueMemory {
            sq,
            cq,
            sq_doorbell,
            cq_doorbell,
            lists,
        };
        #[cfg(feature = "cuda")]
        let words = nvme_core::handoff::QueueWords {
            sq: sq_start.addr() as u64,
            cq: cq_start.addr() as u64,
            sq_doorbell: map.address(sq_tail_doorbell(shape.qid.0, shape.dstrd)),
            cq_doorbell: map.address(cq_head_doorbell(shape.qid.0, shape.dstrd)),
            lists: start.wrapping_add(rings).addr() as u64,
            lists_iova: iova.0 + rings as u64,
            entries: shape.entries,
            slots: slots as u32,
            list_words: words_per_slot as u32,
            page_shift: shape.page.shift(),
            qid: u32::from(shape.qid.0),
            ..Default::default()
        };
        let slots: Box<[CommandSlot<Lease>]> = (0..slots).map(|_| CommandSlot::new()).collect();
        let queue = QueuePair::new(
            device.registers().identity(),
            shape.qid,
            queue_memory,
            slots,
        );
        Ok(Self {
            queue: ManuallyDrop::new(queue),
            memory: ManuallyDrop::new(memory),
            pieces: ManuallyDrop::new([sq_piece, cq_piece]),
            vector: shape.vector,
            doorbells: Arc::clone(device),
            leaked: false,
            #[cfg(feature = "cuda")]
            words,
        })
    }

    /// Returns the pair by host addresses, without state, for a kernel that drives it in this pair's stead.
    #[cfg(feature = "cuda")]
    pub fn words(&self) -> nvme_core::handoff::QueueWords {
        self.words
    }

    /// Rings and lists, for registration with a GPU.
    #[cfg(feature = "cuda")]
    pub fn pages(&self) -> &Arc<DmaPages> {
        self.memory.pages()
    }

    /// Returns the pair itself.
    #[inline]
    pub(crate) fn queue(&mut self) -> &mut HostPair {
        &mut self.queue
    }

    /// Returns a view of the completion ring, which lies in memory of this process.
    pub(crate) fn completion_view(&self) -> CompletionView {
        let sq_bytes = self.queue.cq().iova().0 - self.queue.sq().iova().0;
        let view = CompletionView {
            pages: Arc::clone(&self.memory.pages),
            offset: sq_bytes as usize,
            entries: self.queue.cq().entries(),
            iova: self.queue.cq().iova(),
            next: AtomicU32::new(0),
        };
        view.advance(self);
        view
    }

    /// Returns the parameters of the commands that create this pair on the controller.
    pub(crate) fn plan(&self) -> QueuePlan {
        QueuePlan {
            qid: self.queue.qid(),
            sq_entries: self.queue.sq().entries(),
            sq_iova: self.queue.sq().iova(),
            cq_entries: self.queue.cq().entries(),
            cq_iova: self.queue.cq().iova(),
            vector: self.vector,
        }
    }

    /// Leaks the memory on drop rather than freeing it: the controller may still use it.
    pub(crate) fn keep_forever(&mut self) {
        self.leaked = true;
    }
}

/// View of the next entry of a completion ring in memory of this process, for threads that do not own the pair.
pub(crate) struct CompletionView {
    pages: Arc<DmaPages>,
    offset: usize,
    entries: u32,
    iova: Iova,
    /// The entry that the pair's owner takes next: its index, shifted left by one, and its phase tag.
    next: AtomicU32,
}

impl CompletionView {
    /// True if an entry has arrived that the owner has not taken, or has not [dealt with](Self::advance).
    #[inline]
    pub fn has_arrived(&self) -> bool {
        // Acquire: pairs with the release in `advance`. A caller that finds nothing new sees all that the owner
        // did with the entries before.
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: the ring lies in `pages`, which this view keeps mapped; `OwnedPair::new` made it for these entries at
        // this place, and only atomics touch it.
        let ring = unsafe {
            let start = self.pages.start().add(self.offset);
            CqRing::from_raw(start, self.entries, self.iova)
        };
        ring.read(next >> 1, next & 1 == 1).is_some()
    }

    /// Moves the view to the next entry of `pair`, whose owner has dealt with all entries that it took.
    /// Called after that, so that a thread which sees nothing new may rely on all earlier ends.
    #[inline]
    pub fn advance(&self, pair: &OwnedPair) {
        let (index, phase) = pair.queue.cq().next_entry();
        let next = index << 1 | u32::from(phase);
        if self.next.load(Ordering::Relaxed) != next {
            self.next.store(next, Ordering::Release); // Release: pairs with has_arrived.
        }
    }
}

/// Allocates the rings that `memory` accepts: submission, completion.
fn pieces_of(
    memory: Option<&Arc<RingMemory>>,
    sq_bytes: usize,
    cq_bytes: usize,
) -> Result<[Option<RingPiece>; 2]> {
    let inside = |bytes, takes: fn(&RingMemory) -> bool| {
        let memory = memory.filter(|memory| takes(memory));
        memory.map(|memory| memory.take(bytes)).transpose()
    };
    Ok([
        inside(sq_bytes, RingMemory::takes_submission_queues)?,
        inside(cq_bytes, RingMemory::takes_completion_queues)?,
    ])
}

impl Drop for OwnedPair {
    fn drop(&mut self) {
        let in_use = self.leaked || self.queue.in_flight() > 0;
        // A device that is gone cannot access memory that is unmapped, nor other memory that is
        // mapped at the same address later. So the memory may be freed, although commands were in
        // flight.
        if in_use && self.doorbells.gone().is_none() {
            // The controller may still write to the rings and buffers: they are leaked, with the
            // device that they are mapped at. Freed pages would get its late writes under another
            // owner.
            std::mem::forget(Arc::clone(&self.doorbells));
            return;
        }
        // SAFETY: it is dropped once, here, and before the memory that its rings lie in: dropping the queue first ends
        // the last references to that memory. `memory` below follows the same rule.
        unsafe { ManuallyDrop::drop(&mut self.queue) };
        // SAFETY: it is dropped once, here, after the queue and all that its commands held.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.pieces) };
    }
}
