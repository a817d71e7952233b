//! DMA memory for both sides: the driver sees its pages as rings and words, the controller by address.
//!
//! Every page is a separate mapping, so that no access may rely on neighbours. A page can be unmapped to prove that the
//! controller no longer needs it: an access to it is refused and remembered.
// UNSAFETY: the core's rings are made from raw DMA memory, as on a real machine.
#![allow(unsafe_code)]

use nvme_core::mem::{CqRing, DmaWords, DoorbellRegister, SqRing};
use nvme_core::spec::Iova;
use nvme_sim::{DmaGuard, DmaMemory, DmaRegion, Doorbells, HostMemory, MemorySpan};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Size of a page of this memory in bytes; the controller's page size may be larger.
pub const PAGE: u64 = 4096;

/// The address of the first page: above 4 GiB, so that a lost upper half of an address is detected.
const BASE: u64 = 0x12_3400_0000;

#[repr(C, align(4096))]
struct Page([AtomicU64; 512]);

/// Pages at consecutive addresses, taken from one end and never given back.
pub struct Memory {
    pages: Vec<Page>,
    unmapped: Vec<AtomicBool>,
    refused: Mutex<Vec<u64>>,
    next: AtomicUsize,
}

/// A stretch of [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// First byte, page aligned.
    pub iova: Iova,
    /// Bytes, a multiple of [`PAGE`].
    pub bytes: u64,
}

impl Memory {
    /// Allocates zeroed memory of at least `bytes` bytes, aligned to the largest page size in `align`.
    pub fn new(bytes: u64) -> Self {
        let pages = bytes.div_ceil(PAGE) as usize;
        Self {
            pages: (0..pages)
                .map(|_| Page([const { AtomicU64::new(0) }; 512]))
                .collect(),
            unmapped: (0..pages).map(|_| AtomicBool::new(false)).collect(),
            refused: Mutex::default(),
            next: AtomicUsize::new(0),
        }
    }

    /// Takes `bytes` bytes, rounded up to pages, at a multiple of `align` (a power of two).
    ///
    /// # Panics
    /// When the memory is used up.
    pub fn take(&self, bytes: u64, align: u64) -> Area {
        let first =
            (self.next.load(Ordering::Relaxed) as u64 * PAGE).next_multiple_of(align.max(PAGE));
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        let end = ((first + bytes) / PAGE) as usize;
        assert!(
            end <= self.pages.len(),
            "the test's memory is used up: give it more"
        );
        self.next.store(end, Ordering::Relaxed);
        Area {
            iova: Iova(BASE + first),
            bytes,
        }
    }

    /// Returns the memory to its first state.
    pub fn reset(&mut self) {
        let used = *self.next.get_mut();
        for page in &mut self.pages[..used] {
            *page = Page([const { AtomicU64::new(0) }; 512]);
        }
        self.unmapped
            .iter_mut()
            .for_each(|flag| *flag.get_mut() = false);
        self.refused
            .get_mut()
            .expect("no panic under this lock")
            .clear();
        *self.next.get_mut() = 0;
    }

    fn start_of(&self, area: Area) -> *mut u8 {
        let first = ((area.iova.0 - BASE) / PAGE) as usize;
        assert!(first + (area.bytes / PAGE) as usize <= self.pages.len());
        // wrapping_add, because a pointer to a single page could not reach the next one.
        self.pages.as_ptr().wrapping_add(first).cast_mut().cast()
    }

    /// Returns the address of `area` in this process, for code that takes addresses.
    pub fn address(&self, area: Area) -> u64 {
        self.start_of(area).expose_provenance() as u64
    }

    /// Returns a submission ring at the start of `area`.
    ///
    /// # Panics
    /// When the area is too short.
    pub fn sq_ring(&self, area: Area, entries: u32) -> SqRing<'_> {
        assert!(u64::from(entries) * 64 <= area.bytes);
        // SAFETY: the memory is page aligned, inside `pages` for the whole area, and used as atomics on both sides.
        unsafe { SqRing::from_raw(self.start_of(area), entries, area.iova) }
    }

    /// Returns a completion ring at the start of `area`.
    ///
    /// # Panics
    /// When the area is too short.
    pub fn cq_ring(&self, area: Area, entries: u32) -> CqRing<'_> {
        assert!(u64::from(entries) * 16 <= area.bytes);
        // SAFETY: the memory is page aligned, inside `pages` for the whole area, and used as atomics on both sides.
        unsafe { CqRing::from_raw(self.start_of(area), entries, area.iova) }
    }

    /// Returns the words of `area`.
    pub fn words(&self, area: Area) -> DmaWords<'_> {
        // SAFETY: the memory is page aligned, inside `pages` for the whole area, and used as atomics on both sides.
        unsafe { DmaWords::from_raw(self.start_of(area), (area.bytes / 8) as usize, area.iova) }
    }

    fn word(&self, iova: u64) -> &AtomicU64 {
        let at = iova.checked_sub(BASE).expect("an address of this memory");
        &self.pages[(at / PAGE) as usize].0[(at % PAGE / 8) as usize]
    }

    /// Copies bytes from any address, as the driver's side sees them.
    pub fn read(&self, iova: Iova, bytes: &mut [u8]) {
        let (mut at, mut rest) = (iova.0, bytes);
        while !rest.is_empty() {
            let skip = (at & 7) as usize;
            let (part, after) = rest.split_at_mut(rest.len().min(8 - skip));
            let whole = self.word(at & !7).load(Ordering::Relaxed).to_le_bytes();
            part.copy_from_slice(&whole[skip..skip + part.len()]);
            at += part.len() as u64;
            rest = after;
        }
    }

    /// Copies bytes in at any address.
    pub fn write(&self, iova: Iova, bytes: &[u8]) {
        let (mut at, mut rest) = (iova.0, bytes);
        while !rest.is_empty() {
            let skip = (at & 7) as usize;
            let (part, after) = rest.split_at(rest.len().min(8 - skip));
            let word = self.word(at & !7);
            let mut whole = word.load(Ordering::Relaxed).to_le_bytes();
            whole[skip..skip + part.len()].copy_from_slice(part);
            word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
            at += part.len() as u64;
            rest = after;
        }
    }

    /// Unmaps `area` for the controller, or maps it again.
    pub fn set_mapped(&self, area: Area, mapped: bool) {
        let first = ((area.iova.0 - BASE) / PAGE) as usize;
        for flag in &self.unmapped[first..first + (area.bytes / PAGE) as usize] {
            flag.store(!mapped, Ordering::Relaxed);
        }
    }

    /// Addresses that the controller was refused so far.
    pub fn refused(&self) -> Vec<u64> {
        self.refused.lock().unwrap().clone()
    }
}

/// Returns all of `memory` for a controller that has its own threads.
///
/// # Panics
/// Never: the pages are consecutive.
pub fn host_memory(memory: &'static Memory) -> HostMemory {
    let host = HostMemory::new();
    let start = memory.pages.as_ptr().cast_mut().cast();
    // SAFETY: the pages live for ever and are used as atomics on both sides.
    let mapped = unsafe { host.map(BASE, start, memory.pages.len() as u64 * PAGE) };
    mapped.expect("an empty table");
    host
}

/// The controller's access to the memory.
pub struct Guard<'a>(&'a Memory);

impl DmaGuard for Guard<'_> {
    fn lookup(&self, iova: u64) -> Option<DmaRegion<'_>> {
        let page = iova.checked_sub(BASE).map(|at| (at / PAGE) as usize);
        let page = page.filter(|page| {
            self.0
                .unmapped
                .get(*page)
                .is_some_and(|gone| !gone.load(Ordering::Relaxed))
        });
        let Some(page) = page else {
            self.0.refused.lock().unwrap().push(iova);
            return None;
        };
        let start = BASE + page as u64 * PAGE;
        Some(DmaRegion {
            start,
            span: MemorySpan::of_words(&self.0.pages[page].0),
        })
    }
}

impl DmaMemory for &Memory {
    type Guard<'a>
        = Guard<'a>
    where
        Self: 'a;

    fn guard(&self) -> Guard<'_> {
        Guard(self)
    }
}

/// Returns the driver's view of a doorbell in the simulator's doorbell memory.
pub fn doorbell(doorbells: &Doorbells, qid: u16, completion: bool) -> DoorbellRegister<'_> {
    let word = if completion {
        doorbells.cq_head(qid)
    } else {
        doorbells.sq_tail(qid)
    };
    // SAFETY: the word is an aligned atomic that lives as long as the doorbells.
    unsafe { DoorbellRegister::from_raw(word.as_ptr()) }
}
