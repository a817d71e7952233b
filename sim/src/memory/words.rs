//! Page-aligned atomic words, on the heap or in memory that another process maps: the storage of
//! the doorbells. They start at a page boundary because a client or a GPU can map whole pages only.

#[cfg(all(feature = "std", target_os = "linux"))]
use super::shared::SharedMemory;
use alloc::boxed::Box;
use core::ops::Deref;
use core::sync::atomic::AtomicU32;
use zerocopy::FromZeros;

/// Granularity of the length of the words.
pub(crate) const PAGE: usize = 4096;
/// Largest page of a machine that runs this.
const MOST_PAGE: usize = 64 << 10;

#[derive(FromZeros)]
#[repr(C, align(4096))]
struct WordPage([AtomicU32; PAGE / 4]);

enum BackingMemory {
    Heap(#[expect(dead_code, reason = "kept for its memory")] Box<[WordPage]>),
    #[cfg(all(feature = "std", target_os = "linux"))]
    Shared(SharedMemory),
}

/// Words at a fixed address.
pub(crate) struct AlignedWords {
    start: *const AtomicU32,
    len: usize,
    #[cfg_attr(not(all(feature = "std", target_os = "linux")), expect(dead_code))]
    owner: BackingMemory,
}

// SAFETY: the words are atomics, and the owner of their memory can be sent and shared.
unsafe impl Send for AlignedWords {}
// SAFETY: as above.
unsafe impl Sync for AlignedWords {}

impl AlignedWords {
    /// Allocates at least `bytes` zeroed bytes. Nothing else lies in their pages, whatever the size of a page: a GPU's
    /// driver registers whole pages, and each once.
    pub fn on_heap(bytes: usize) -> Self {
        let len = bytes.next_multiple_of(PAGE);
        let whole = (len.next_multiple_of(MOST_PAGE) + MOST_PAGE) / PAGE - 1;
        let pages = <[WordPage]>::new_box_zeroed_with_elems(whole);
        let pages = pages.expect("out of memory");
        let lead = pages.as_ptr().addr().wrapping_neg() % MOST_PAGE;
        Self {
            start: pages.as_ptr().wrapping_byte_add(lead).cast(),
            len: len / 4,
            owner: BackingMemory::Heap(pages),
        }
    }

    /// Allocates at least `bytes` zeroed bytes in a memfd, from its byte `lead` (whole pages) on.
    #[cfg(all(feature = "std", target_os = "linux"))]
    pub fn shared(name: &str, lead: usize, bytes: usize) -> std::io::Result<Self> {
        let memory = SharedMemory::new(name, lead + bytes.next_multiple_of(PAGE))?;
        Ok(Self {
            start: memory.start().cast_const().wrapping_add(lead).cast(),
            len: (memory.len() - lead) / 4,
            owner: BackingMemory::Shared(memory),
        })
    }

    /// Returns the descriptor of shared words.
    #[cfg(all(feature = "std", target_os = "linux"))]
    pub fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        match &self.owner {
            BackingMemory::Heap(_) => None,
            BackingMemory::Shared(memory) => Some(memory.fd()),
        }
    }
}

impl Deref for AlignedWords {
    type Target = [AtomicU32];

    #[inline]
    fn deref(&self) -> &[AtomicU32] {
        // SAFETY: the owner keeps `len` aligned words at `start` as long as `self` lives. They are
        // never seen as plain data, so that a driver may store to them at any moment.
        unsafe { core::slice::from_raw_parts(self.start, self.len) }
    }
}
