//! A controller that moves no data: CPU threads that take submission queue entries and post
//! completions as fast as they can, or as fast as a drive does ([`DriveModel`]).
//!
//! It has no admin queue: the rings exist from the start. It checks everything: an unknown opcode, a doorbell outside
//! its ring or an overrun of the completion queue stops it with a [`ProtocolFault`].
//!
//! Every thread counts the time that it was busy, so that a run tells whether this controller or its
//! driver was the limit.
// UNSAFETY: rings and doorbells are raw memory that a GPU shares.
#![allow(unsafe_code)]

mod echo;
mod feed;
mod queue;
mod serve;

pub use echo::DoorbellEcho;
pub use feed::{NullLoad, feed};
pub use queue::ProtocolFault;
pub use serve::{NullCounts, RunningNull};

use nvme_core::handoff::QueueWords;
use nvme_core::spec::register::{cq_head_doorbell, doorbell_bytes, offset, sq_tail_doorbell};
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// Alignment of rings and registrations in bytes.
const PAGE: usize = 4096;

/// Rings and doorbells of a null controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NullShape {
    /// Queue pairs, 1 to 4,096; their identifiers begin with 1.
    pub queues: u32,
    /// Entries of each ring, a power of two from 2 to 65,536.
    pub entries: u32,
    /// CAP.DSTRD, 0 to 8: doorbells are 4 << DSTRD bytes apart.
    pub dstrd: u8,
    /// Bytes of data memory that commands may name.
    pub data_bytes: usize,
}

/// A drive: how long a command takes and how many are done in a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveModel {
    /// Latency from doorbell to completion, in nanoseconds.
    pub latency_ns: u64,
    /// Commands per second of one queue pair, which is one drive.
    pub rate: f64,
    /// Bytes that a command moves into the memory that PRP1 names; at most a page.
    pub bytes: usize,
}

impl DriveModel {
    /// A PCIe 5 drive: 3.86 million reads of 512 bytes per second, 70 us each.
    pub const SSD: Self = Self {
        latency_ns: 70_000,
        rate: 3.86e6,
        bytes: 512,
    };
}

/// A null controller at rest.
pub struct NullController {
    shape: NullShape,
    pages: Arc<DmaPages>,
    cq_at: usize,
    doorbells_at: usize,
    data_at: usize,
}

impl NullController {
    /// Allocates zeroed rings, doorbells and data memory.
    ///
    /// # Errors
    /// [`Error::Usage`] for an impossible shape, [`Error::System`] without memory.
    pub fn new(shape: NullShape) -> Result<Self> {
        let possible = (1..=4096).contains(&shape.queues)
            && (2..=65_536).contains(&shape.entries)
            && shape.entries.is_power_of_two()
            && shape.dstrd <= 8;
        if !possible {
            return Err(Error::usage(
                format!(
                    "a null controller cannot have {} queues of {} entries with a doorbell stride (DSTRD) of {}",
                    shape.queues, shape.entries, shape.dstrd
                ),
                "use 1 to 4096 queues of 2 to 65536 entries, a power of two",
            ));
        }
        let rings = shape.queues as usize * shape.entries as usize;
        let cq_at = (rings * 64).next_multiple_of(PAGE);
        let doorbells_at = (cq_at + rings * 16).next_multiple_of(PAGE);
        let doorbells = doorbell_bytes(shape.queues as u16, shape.dstrd) as usize;
        let data_at = (doorbells_at + doorbells).next_multiple_of(PAGE);
        Ok(Self {
            shape,
            pages: Arc::new(DmaPages::new(data_at + shape.data_bytes)?),
            cq_at,
            doorbells_at,
            data_at,
        })
    }

    /// Returns its shape.
    pub fn shape(&self) -> NullShape {
        self.shape
    }

    /// Returns the memory of rings, doorbells and data, for registration with a GPU.
    pub fn pages(&self) -> &Arc<DmaPages> {
        &self.pages
    }

    /// Returns the host address of the data memory, which is also the controller's address of it.
    pub fn data(&self) -> u64 {
        self.at(self.data_at).addr() as u64
    }

    /// Returns queue `index` (from 0) by host addresses, without list memory or state.
    pub fn words(&self, index: u32) -> QueueWords {
        let entries = self.shape.entries;
        let first = index as usize * entries as usize;
        let qid = (index + 1) as u16;
        let address = |offset: usize| self.at(offset).addr() as u64;
        let doorbell =
            |register: u32| address(self.doorbells_at + (register - offset::DOORBELLS) as usize);
        QueueWords {
            sq: address(first * 64),
            cq: address(self.cq_at + first * 16),
            sq_doorbell: doorbell(sq_tail_doorbell(qid, self.shape.dstrd)),
            cq_doorbell: doorbell(cq_head_doorbell(qid, self.shape.dstrd)),
            entries,
            slots: (entries - 1).min(4095),
            page_shift: 12,
            qid: u32::from(qid),
            ..QueueWords::default()
        }
    }

    /// Rings and doorbells of zeroes, as after a reset.
    fn clear(&self) {
        // SAFETY: the access stays inside our pages; the rings are not in use between two runs.
        unsafe { self.pages.start().write_bytes(0, self.data_at) };
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.pages.start().wrapping_add(offset)
    }

    fn word(&self, address: u64) -> &AtomicU32 {
        // SAFETY: an address of `words`, so a doorbell inside our pages, aligned to 4, reached through
        // atomics by every thread.
        unsafe { &*(address as usize as *const AtomicU32) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_do_not_overlap_whatever_the_stride() {
        for dstrd in [0, 4] {
            let null = NullController::new(NullShape {
                queues: 3,
                entries: 8,
                dstrd,
                data_bytes: 100,
            })
            .unwrap();
            let mut ranges = vec![(null.data(), 100)];
            for index in 0..3 {
                let words = null.words(index);
                ranges.push((words.sq, 8 * 64));
                ranges.push((words.cq, 8 * 16));
                ranges.push((words.sq_doorbell, 4));
                ranges.push((words.cq_doorbell, 4));
                assert_eq!(words.cq_doorbell - words.sq_doorbell, 4 << dstrd);
            }
            ranges.sort_unstable();
            for pair in ranges.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
        }
        for (queues, entries) in [(0, 8), (1, 7), (1, 1), (5000, 8)] {
            let shape = NullShape {
                queues,
                entries,
                dstrd: 0,
                data_bytes: 0,
            };
            assert!(NullController::new(shape).is_err());
        }
    }
}
