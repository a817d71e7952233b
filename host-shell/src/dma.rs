//! Memory that the controller reaches by DMA: regions mapped at the device, buffers leased out of
//! them, and the queue pairs whose rings lie in them.
//!
//! Invariant: memory stays mapped, here and at the device, until nothing can touch it any more. A
//! [`DmaBuffer`] that is lent to a command is inside its queue pair, so nobody can read or free it;
//! a [`Pair`] that is dropped with commands in flight leaks its memory instead of freeing it.
// UNSAFETY: buffers view raw memory as bytes and queue pairs view it as rings of atomics.
#![allow(unsafe_code)]

use crate::bar::DoorbellMap;
use crate::cmb::{ControllerMemory, Piece};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::GRANULE;
pub use crate::pages::Pages;
use nvme_core::bringup::QueuePlan;
use nvme_core::mem::{CqRing, DmaWords, SqRing};
#[cfg(feature = "cuda")]
use nvme_core::spec::register::{cq_head_doorbell, sq_tail_doorbell};
use nvme_core::spec::{Iova, PageSize, Qid};
use nvme_core::{ListMemory, QueueMemory, QueuePair, Slot};
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// Memory that the controller can reach. Unmapped at the device, then freed, on drop.
pub struct Region {
    pages: Arc<Pages>,
    iova: Iova,
    device: Arc<dyn Device>,
}

impl Region {
    /// Allocates at least `bytes` bytes and maps them at the device.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        Self::over(device, Arc::new(device.alloc_dma(bytes)?))
    }

    /// Maps memory that exists already.
    fn over(device: &Arc<dyn Device>, pages: Arc<Pages>) -> Result<Self> {
        let iova = device.map_dma(&pages)?;
        Ok(Self {
            pages,
            iova,
            device: Arc::clone(device),
        })
    }

    /// Where the controller finds the first byte.
    pub fn iova(&self) -> Iova {
        self.iova
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// The memory, for registration with a GPU.
    #[cfg(feature = "cuda")]
    pub fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // A device that cannot unmap may still write there: then the memory is leaked.
        if self.device.unmap_dma(self.iova, self.pages.len()).is_err() {
            std::mem::forget(Arc::clone(&self.pages));
        }
    }
}

/// A stretch of DMA memory with one owner: the caller, or the command that it is lent to.
pub struct DmaBuffer {
    region: Arc<Region>,
    offset: usize,
    len: usize,
    capacity: usize,
}

impl std::fmt::Debug for DmaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DmaBuffer")
            .field("iova", &self.iova())
            .field("len", &self.len)
            .finish()
    }
}

impl DmaBuffer {
    /// A buffer of `bytes` bytes in a region of its own.
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let region = Arc::new(Region::new(device, bytes)?);
        Ok(Self {
            region,
            offset: 0,
            len: bytes,
            capacity: bytes,
        })
    }

    /// A buffer over memory that exists already, such as a peer device's
    /// ([`Pages::of_file`](crate::Pages::of_file)), mapped at `device`.
    pub fn over(device: &Arc<dyn Device>, pages: Arc<Pages>) -> Result<Self> {
        let len = pages.len();
        let region = Arc::new(Region::over(device, pages)?);
        Ok(Self {
            region,
            offset: 0,
            len,
            capacity: len,
        })
    }

    /// `count` buffers of `bytes` bytes (a multiple of 4) in one region, in address order.
    pub fn several(device: &Arc<dyn Device>, bytes: usize, count: usize) -> Result<Vec<Self>> {
        let too_long = || {
            Error::usage(
                "the buffers do not fit into memory",
                "use fewer or smaller ones",
            )
        };
        let total = bytes.checked_mul(count).ok_or_else(too_long)?;
        let region = Arc::new(Region::new(device, total)?);
        let piece = |index| Self {
            region: Arc::clone(&region),
            offset: index * bytes,
            len: bytes,
            capacity: bytes,
        };
        Ok((0..count).map(piece).collect())
    }

    /// The memory of the whole region, for registration with a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn pages(&self) -> &Arc<Pages> {
        self.region.pages()
    }

    /// Where the controller finds the first byte.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.region.iova.offset(self.offset as u64)
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Shortens or lengthens the buffer, up to the `capacity` that it was made with.
    pub fn resize(&mut self, bytes: usize) {
        self.len = bytes.min(self.capacity);
    }

    /// Which of [`several`](Self::several) buffers this is.
    #[inline]
    pub fn index(&self) -> usize {
        self.offset / self.capacity.max(1)
    }

    /// The bytes. The controller was never given them, or gave them back.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: offset + len lie inside the region, which the Arc keeps; the range has one owner,
        // and a controller that was told of it has completed that command.
        unsafe { std::slice::from_raw_parts(self.region.pages.start().add(self.offset), self.len) }
    }

    /// The bytes, to be filled before they are lent.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` is the only owner of the range.
        unsafe {
            std::slice::from_raw_parts_mut(self.region.pages.start().add(self.offset), self.len)
        }
    }
}

/// A page for Identify data during bring-up.
pub(crate) struct Scratch(Region);

impl Scratch {
    pub(crate) fn new(device: &Arc<dyn Device>) -> Result<Self> {
        Region::new(device, GRANULE).map(Self)
    }

    /// The page as the words that the core reads it by.
    pub(crate) fn words(&self) -> DmaWords<'_> {
        // SAFETY: the region is page aligned, lives as long as the borrow, and only atomics touch it.
        unsafe { DmaWords::from_raw(self.0.pages.start(), GRANULE / 8, self.0.iova) }
    }
}

/// What a command holds while it is in flight.
pub type Lease = Option<DmaBuffer>;

/// The queue pair type of this library.
pub type HostPair = QueuePair<'static, Lease, Box<[Slot<Lease>]>>;

/// How large a queue pair is and what it is for.
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

/// A queue pair together with the memory that its rings lie in.
///
/// The pair's `'static` is this struct's own lifetime: it is never handed out by value.
pub struct Pair {
    queue: ManuallyDrop<HostPair>,
    memory: ManuallyDrop<Region>,
    /// Where the rings lie instead, when they lie in the controller: submission, completion.
    pieces: ManuallyDrop<[Option<Piece>; 2]>,
    vector: Option<u16>,
    doorbells: Arc<dyn Device>,
    leaked: bool,
    #[cfg(feature = "cuda")]
    words: nvme_core::handoff::QueueWords,
}

impl Pair {
    /// Allocates rings and list memory and makes an empty pair of them. The rings that `cmb` takes lie
    /// there, the others and the lists in this process.
    pub fn new(
        device: &Arc<dyn Device>,
        shape: PairShape,
        cmb: Option<&Arc<ControllerMemory>>,
    ) -> Result<Self> {
        let entries = shape.entries as usize;
        let page = shape.page.bytes() as usize;
        let sq_bytes = (entries * 64).next_multiple_of(page);
        let cq_bytes = (entries * 16).next_multiple_of(page);
        let words_per_slot = ListMemory::share(shape.page, shape.max_bytes);
        let slots = (entries - 1).min(nvme_core::MAX_IN_FLIGHT as usize);
        let memory = Region::new(device, sq_bytes + cq_bytes + slots * words_per_slot * 8)?;
        let map: DoorbellMap = device.doorbells();
        let (sq_doorbell, cq_doorbell) = map.pair(shape.qid, shape.dstrd)?;
        let start = memory.pages.start();
        let iova = memory.iova;
        let rings = sq_bytes + cq_bytes;
        let inside = |bytes, takes: fn(&ControllerMemory) -> bool| {
            let cmb = cmb.filter(|cmb| takes(cmb));
            cmb.map(|cmb| cmb.take(bytes)).transpose()
        };
        let sq_piece = inside(sq_bytes, ControllerMemory::takes_submission_queues)?;
        let cq_piece = inside(cq_bytes, ControllerMemory::takes_completion_queues)?;
        let place = |piece: &Option<Piece>, offset: usize| match piece {
            Some(piece) => (piece.start(), piece.iova()),
            None => (start.wrapping_add(offset), iova.offset(offset as u64)),
        };
        let (sq_start, sq_iova) = place(&sq_piece, 0);
        let (cq_start, cq_iova) = place(&cq_piece, sq_bytes);
        // SAFETY: the place is page aligned, holds `sq_bytes`, and outlives the pair, because both are
        // in one struct that drops or leaks the pair first; only atomics touch it.
        let sq = unsafe { SqRing::from_raw(sq_start, shape.entries, sq_iova) };
        // SAFETY: as above, `cq_bytes` on pages of their own.
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
        let words = {
            let address = |offset: usize| start.wrapping_add(offset).addr() as u64;
            nvme_core::handoff::QueueWords {
                sq: sq_start.addr() as u64,
                cq: cq_start.addr() as u64,
                sq_doorbell: map.address(sq_tail_doorbell(shape.qid.0, shape.dstrd)),
                cq_doorbell: map.address(cq_head_doorbell(shape.qid.0, shape.dstrd)),
                lists: address(rings),
                lists_iova: iova.0 + rings as u64,
                entries: shape.entries,
                slots: slots as u32,
                list_words: words_per_slot as u32,
                page_shift: shape.page.shift(),
                qid: u32::from(shape.qid.0),
                ..Default::default()
            }
        };
        let slots: Box<[Slot<Lease>]> = (0..slots).map(|_| Slot::new()).collect();
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

    /// The pair by host addresses, without state, for a kernel that drives it in this pair's stead.
    #[cfg(feature = "cuda")]
    pub(crate) fn words(&self) -> nvme_core::handoff::QueueWords {
        self.words
    }

    /// Rings and lists, for registration with a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn pages(&self) -> &Arc<Pages> {
        self.memory.pages()
    }

    /// The pair itself.
    #[inline]
    pub(crate) fn queue(&mut self) -> &mut HostPair {
        &mut self.queue
    }

    /// How the controller is told of this pair when it is created.
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

    /// From now on the memory is leaked rather than freed: the controller may still use it.
    pub(crate) fn keep_forever(&mut self) {
        self.leaked = true;
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let in_use = self.leaked || self.queue.in_flight() > 0;
        // A device that is gone cannot reach what is unmapped, nor what is mapped there later: nothing.
        if in_use && self.doorbells.gone().is_none() {
            // The controller may still write to the rings and buffers: they are leaked, with the
            // device that they are mapped at.
            std::mem::forget(Arc::clone(&self.doorbells));
            return;
        }
        // SAFETY: dropped once, here, before the memory that it refers to.
        unsafe { ManuallyDrop::drop(&mut self.queue) };
        // SAFETY: dropped once, here, after the queue and all that its commands held.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.pieces) };
    }
}

/// What an embedded simulator may reach: pages of this process, at their own addresses.
#[cfg(feature = "sim")]
pub(crate) struct SharedPages {
    memory: nvme_sim::HostMemory,
    mapped: std::sync::Mutex<std::collections::BTreeMap<u64, Arc<Pages>>>,
}

#[cfg(feature = "sim")]
impl SharedPages {
    pub(crate) fn new() -> Self {
        Self {
            memory: nvme_sim::HostMemory::new(),
            mapped: std::sync::Mutex::default(),
        }
    }

    /// The table to give to the simulator.
    pub(crate) fn memory(&self) -> nvme_sim::HostMemory {
        self.memory.clone()
    }

    pub(crate) fn map(&self, pages: &Arc<Pages>) -> Result<Iova> {
        let iova = pages.start().addr() as u64;
        // SAFETY: the pages stay readable and writable while `mapped` holds them, which is until they
        // are unmapped; buffers in them are viewed as plain bytes only while no command holds them.
        unsafe { self.memory.map(iova, pages.start(), pages.len() as u64) }.map_err(|error| {
            Error::environment(format!("memory at {iova:#x}: {error}"), "unmap it first")
        })?;
        crate::queue::lock(&self.mapped).insert(iova, Arc::clone(pages));
        Ok(Iova(iova))
    }

    /// Lets the simulator reach `bytes` bytes of `peer` at `address`, by copies of the peer's own.
    #[cfg(feature = "cuda")]
    pub(crate) fn map_peer(
        &self,
        address: u64,
        bytes: usize,
        peer: Arc<dyn nvme_sim::Peer>,
    ) -> Result<Iova> {
        self.memory
            .map_peer(address, address, bytes as u64, peer)
            .map_err(|error| {
                Error::environment(
                    format!("GPU memory at {address:#x}: {error}"),
                    "unmap it first",
                )
            })?;
        Ok(Iova(address))
    }

    pub(crate) fn unmap(&self, iova: Iova, bytes: usize) {
        self.memory.unmap(iova.0, bytes as u64);
        crate::queue::lock(&self.mapped).remove(&iova.0);
    }
}

#[cfg(feature = "sim")]
impl Drop for SharedPages {
    fn drop(&mut self) {
        self.memory.unmap(0, u64::MAX);
    }
}
