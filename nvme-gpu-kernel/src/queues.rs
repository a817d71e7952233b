//! Queues in the parameters of a kernel: the words that the host passes by value, and their conversion to the
//! core's types.
// UNSAFETY: the words hold addresses that the host vouches for.
#![allow(unsafe_code)]

/// Queues and result cells, as the host passes them to a kernel. Addresses are device addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct QueueArray {
    /// Address of the queues, consecutive [`QueueWords`](nvme_core::handoff::QueueWords).
    pub queues: u64,
    /// Address of the result cells, 8 bytes each, zeroed before their first use.
    pub cells: u64,
    /// Number of queues.
    pub queue_count: u32,
    /// Number of cells: one for each command that may be in flight or not yet waited for.
    pub cell_count: u32,
}
const _: () = assert!(size_of::<QueueArray>() == 24);

#[cfg(any(target_arch = "nvptx64", feature = "lanes"))]
mod device {
    use super::QueueArray;
    #[cfg(any(feature = "gathers", feature = "scatter"))]
    use nvme_core::BatchQueue;
    use nvme_core::group::ThreadGroup;
    use nvme_core::handoff::QueueWords;
    use nvme_core::sync::AtomicU64;
    use nvme_core::{CollectiveQueue, ResultCells, SharedQueue};

    impl QueueArray {
        /// Returns queue `index` for any threads: each makes its own view, and all may use it at any time.
        ///
        /// `None` when there is no such queue, or its words have impossible sizes.
        ///
        /// # Safety
        /// The words are valid as [`QueueArray`] documents and stay so for all of `'a`; no group owns the queue.
        #[inline(always)]
        pub unsafe fn shared<'a>(&self, index: u32) -> Option<SharedQueue<'a>> {
            // SAFETY: the caller vouches for the words.
            let (memory, state) = unsafe { self.words(index)?.attach() }?;
            let cells = self.cells as usize as *const AtomicU64;
            // SAFETY: the caller vouches for `cell_count` cells, which are accessed through atomics alone.
            let cells = unsafe { core::slice::from_raw_parts(cells, self.cell_count as usize) };
            Some(SharedQueue::new(memory, state, ResultCells::new(cells)))
        }

        /// Returns queue `index` for one group, which owns it until it calls
        /// [`suspend`](CollectiveQueue::suspend). Every member calls this.
        ///
        /// # Safety
        /// As [`shared`](Self::shared), and no other thread uses the queue meanwhile.
        #[inline(always)]
        pub unsafe fn owned<'a, G: ThreadGroup>(
            &self,
            index: u32,
            group: G,
        ) -> Option<CollectiveQueue<'a, G>> {
            // SAFETY: the caller vouches for the words.
            let (memory, state) = unsafe { self.words(index)?.attach() }?;
            Some(CollectiveQueue::resume(group, memory, state))
        }

        /// Returns queue `index` for one group, which owns it and leaves nothing in flight. Every member calls this.
        ///
        /// # Safety
        /// As [`shared`](Self::shared), and no other thread uses the queue meanwhile.
        #[cfg(any(feature = "gathers", feature = "scatter"))]
        #[inline(always)]
        pub unsafe fn batches<'a, G: ThreadGroup>(
            &self,
            index: u32,
            group: G,
        ) -> Option<BatchQueue<'a, G>> {
            if index >= self.queue_count {
                return None;
            }
            let words = self.queues + u64::from(index) * size_of::<QueueWords>() as u64;
            // All words are loaded before the first is looked at: a trip to memory for each check would follow the one
            // before.
            // SAFETY: the caller vouches for the words, whose size is ten times 8 bytes; nothing writes to them.
            let w = unsafe { crate::arch::load_ten(words) };
            let words = QueueWords {
                sq: w[0],
                cq: w[1],
                sq_doorbell: w[2],
                cq_doorbell: w[3],
                lists: w[4],
                lists_iova: w[5],
                state: w[6],
                entries: w[7] as u32,
                slots: (w[7] >> 32) as u32,
                list_words: w[8] as u32,
                page_shift: (w[8] >> 32) as u32,
                qid: w[9] as u32,
                reserved: 0,
            };
            // SAFETY: the caller vouches for the words.
            let (memory, state) = unsafe { words.attach() }?;
            Some(BatchQueue::take(group, memory, state))
        }

        /// Returns the page size of the controller of queue `index` in bytes; 4,096 when there is no such queue.
        ///
        /// # Safety
        /// As [`shared`](Self::shared).
        #[inline(always)]
        pub unsafe fn page_bytes(&self, index: u32) -> u64 {
            // SAFETY: the caller vouches for the words.
            let words = unsafe { self.words(index) };
            1 << words.map_or(12, |words| words.page_shift.clamp(12, 16))
        }

        /// Returns the words of queue `index`.
        ///
        /// # Safety
        /// As [`shared`](Self::shared).
        #[inline(always)]
        unsafe fn words<'a>(&self, index: u32) -> Option<&'a QueueWords> {
            if index >= self.queue_count {
                return None;
            }
            let words = self.queues as usize as *const QueueWords;
            // SAFETY: the index is below the count; the caller vouches for the words, which nothing changes.
            Some(unsafe { &*words.add(index as usize) })
        }
    }
}
