//! The doorbells of a controller, mapped into this process.
// UNSAFETY: the page of doorbells arrives as a raw pointer from the device.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use nvme_core::mem::Doorbell;
use nvme_core::spec::Qid;
use nvme_core::spec::register::{cq_head_doorbell, offset, sq_tail_doorbell};

/// A mapped stretch of doorbells: BAR0 from 1000h on, or the memory that a simulator polls.
#[derive(Clone, Copy, Debug)]
pub struct DoorbellMap {
    start: *mut u32,
    bytes: usize,
}

impl DoorbellMap {
    /// `bytes` bytes of doorbells from `start` on.
    ///
    /// # Safety
    /// `start` is 4-byte aligned and stays valid for volatile 32-bit accesses to `bytes` bytes for as
    /// long as the [`Device`](crate::device::Device) that hands out this map.
    pub unsafe fn new(start: *mut u32, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// The memory that an embedded simulator polls.
    #[cfg(feature = "sim")]
    pub(crate) fn of_simulator(doorbells: &nvme_sim::Doorbells) -> Self {
        let start = doorbells.as_ptr().cast_mut().cast::<u32>();
        // SAFETY: page-aligned atomics of that many bytes, which the device keeps as long as it lives.
        unsafe { Self::new(start, doorbells.bytes()) }
    }

    /// Words that a [`Relay`](crate::relay::Relay) passes on; it keeps them as long as it lives.
    pub(crate) fn of_words(pages: &[crate::relay::WordPage]) -> Self {
        let start = pages.as_ptr().cast_mut().cast::<u32>();
        // SAFETY: page-aligned atomics of that many bytes, which the device keeps as long as it lives.
        unsafe { Self::new(start, size_of_val(pages)) }
    }

    /// Tail and head doorbell of queue `qid`, valid while the device is: see [`Pair`](crate::dma::Pair).
    pub(crate) fn pair(
        self,
        qid: Qid,
        dstrd: u8,
    ) -> Result<(Doorbell<'static>, Doorbell<'static>)> {
        Ok((
            self.one(sq_tail_doorbell(qid.0, dstrd))?,
            self.one(cq_head_doorbell(qid.0, dstrd))?,
        ))
    }

    fn one(self, register: u32) -> Result<Doorbell<'static>> {
        let at = (register - offset::DOORBELLS) as usize;
        if at + 4 > self.bytes {
            return Err(Error::device(
                format!(
                    "doorbell at {register:#x} lies past the {} mapped bytes",
                    self.bytes
                ),
                "use fewer queues",
            ));
        }
        // SAFETY: inside the mapped doorbells, checked above; the queue pair that rings it keeps the
        // device, and with it the mapping, alive.
        Ok(unsafe { Doorbell::from_raw(self.start.wrapping_byte_add(at)) })
    }
}
