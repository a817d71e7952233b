//! The words that describe a queue pair to a kernel: the host fills them in, the kernel attaches to them.
//!
//! The order of calls: the host creates the queue, initialises its state with [`QueueState::init`], fills in
//! [`QueueWords`] and launches; the kernel calls [`QueueWords::attach`] and makes a
//! [`CollectiveQueue`](crate::CollectiveQueue) or a [`SharedQueue`](crate::SharedQueue) of the parts. After the launch
//! the state tells the host what is still in flight.
//!
//! Invariant: the layout is the same on both sides and for every compiler: `repr(C)`, addresses as `u64`.
//! Each address is valid for the reader of the words: device addresses for a kernel.
// UNSAFETY: the words hold addresses; `attach` turns them into rings and state, which is sound only for
// addresses that its caller vouches for.
#![allow(unsafe_code)]

use crate::mem::{CqRing, DmaWords, DoorbellRegister, SqRing};
use crate::queue_pair::{ListMemory, QueueMemory};
use crate::queue_state::QueueState;
use crate::spec::{Iova, PageSize, Qid};
use crate::sync::AtomicU32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A queue pair that exists on the controller, as a kernel needs it described.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct QueueWords {
    /// Address of the submission ring.
    pub sq: u64,
    /// Address of the completion ring.
    pub cq: u64,
    /// Address of the submission queue tail doorbell.
    pub sq_doorbell: u64,
    /// Address of the completion queue head doorbell.
    pub cq_doorbell: u64,
    /// Address of the list memory.
    pub lists: u64,
    /// I/O address of the list memory.
    pub lists_iova: u64,
    /// Address of the queue's state: [`words`](crate::queue_state::words) words.
    pub state: u64,
    /// Entries of both rings: a power of two, 2 to 65,536.
    pub entries: u32,
    /// Command slots: at most `entries` - 1 and 4,095.
    pub slots: u32,
    /// 64-bit words of list memory for each slot.
    pub list_words: u32,
    /// log2 of CC.MPS in bytes, 12 to 16.
    pub page_shift: u32,
    /// The queue's identifier, 1 to 65,535.
    pub qid: u32,
    /// Zero.
    pub reserved: u32,
}
const _: () = assert!(size_of::<QueueWords>() == 80);
const _: () = assert!(core::mem::offset_of!(QueueWords, entries) == 56);

impl QueueWords {
    /// Returns the rings, doorbells, lists and state that the words name, or `None` for impossible sizes.
    ///
    /// # Safety
    /// Every address is valid on this processor for all of `'a`, for the sizes that the words give,
    /// aligned as [`SqRing::from_raw`], [`CqRing::from_raw`] and [`DmaWords::from_raw`] ask, and used
    /// through atomics alone.
    pub unsafe fn attach<'a>(&self) -> Option<(QueueMemory<'a>, QueueState<'a>)> {
        let page = PageSize::from_mps(u8::try_from(self.page_shift.checked_sub(12)?).ok()?)?;
        let (entries, slots) = (self.entries, self.slots);
        if !QueueState::possible(entries, slots) {
            return None;
        }
        let lists = slots as usize * self.list_words as usize;
        let words = crate::queue_state::words(entries);
        let at = |address: u64| address as usize as *mut u8;
        // SAFETY: the caller of `attach` vouches that `sq` names `entries` entries, aligned, for
        // `'a`, used through atomics alone; `entries` was checked above. A device may change the
        // entries meanwhile, which atomics allow.
        let sq = unsafe { SqRing::from_raw(at(self.sq), entries, Iova(0)) };
        // SAFETY: the same promise of the caller, for the completion ring.
        let cq = unsafe { CqRing::from_raw(at(self.cq), entries, Iova(0)) };
        let lists = match lists {
            0 => DmaWords::new(&[], Iova(self.lists_iova)),
            // SAFETY: the same promise of the caller, for `slots * list_words` words of lists.
            _ => unsafe { DmaWords::from_raw(at(self.lists), lists, Iova(self.lists_iova)) },
        };
        // SAFETY: the caller vouches that the address is the tail doorbell of this queue, mapped for `'a`.
        let sq_doorbell = unsafe { DoorbellRegister::from_raw(at(self.sq_doorbell).cast()) };
        // SAFETY: the same promise of the caller, for the head doorbell.
        let cq_doorbell = unsafe { DoorbellRegister::from_raw(at(self.cq_doorbell).cast()) };
        // SAFETY: the caller vouches for `words(entries)` words of state for `'a`, used through
        // atomics alone; AtomicU32 has the layout of u32. Other threads of the kernel share these
        // words, which atomics allow.
        let state =
            unsafe { core::slice::from_raw_parts(at(self.state).cast::<AtomicU32>(), words) };
        let memory = QueueMemory {
            sq,
            cq,
            sq_doorbell,
            cq_doorbell,
            lists: ListMemory::new(lists, page, self.list_words as usize),
        };
        let state = QueueState::new(state, Qid(self.qid as u16), entries, slots)?;
        Some((memory, state))
    }
}
