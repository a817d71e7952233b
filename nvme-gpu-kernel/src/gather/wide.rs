//! Elements of rows become wider, in place: a stored row lies in the last bytes of the place of its wide one, and is
//! read from its begin to its end, so that a wide element is stored where the stored ones were read already.
// UNSAFETY: loads and stores at addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::Block;
use crate::launch_end;
use crate::rows::{BLOCK_WARPS, Widened};
use nvme_core::group::Group;
use nvme_formats::{Format, Wide, value};

entry! {
    /// Widens rows that a launch before it in the stream has gathered: blocks of
    /// [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads, as many as are useful. A row that was not read is one of
    /// [`zero_byte`](Format::zero_byte)s, and comes out as zeros.
    ///
    /// # Safety
    /// The addresses in `rows` are what [`Widened`] says.
    pub unsafe fn nvme_widen_rows(rows: Widened) {
        let Some(widening) = Widening::new(&rows) else {
            return;
        };
        let block = Block::here();
        let gather = &rows.gather;
        let mut index = u64::from(arch::block() * BLOCK_WARPS + arch::thread() / 32);
        while index < gather.count {
            widening.row_of_format(gather.out + index * gather.out_stride);
            index += u64::from(arch::blocks() * BLOCK_WARPS);
        }
        // The rows of all warps are stored.
        block.sync();
        if block.leads() {
            launch_end::end_block(gather, 0);
        }
    }
}

/// What becomes of the elements of a launch.
struct Widening {
    format: Format,
    wide: Wide,
    elements: u32,
    before: u32,
}

impl Widening {
    #[inline(always)]
    fn new(rows: &Widened) -> Option<Self> {
        Some(Self {
            format: Format::of_number(rows.format)?,
            wide: Wide::of_number(rows.wide)?,
            elements: rows.elements,
            before: rows.before,
        })
    }

    /// Widens the row whose stored elements begin at `stored`. Every lane of the warp calls it.
    #[inline(always)]
    fn row_of_format(&self, stored: u64) {
        match self.format {
            Format::F16 => self.row(Format::F16, stored),
            Format::Bf16 => self.row(Format::Bf16, stored),
            Format::F8E4M3 => self.row(Format::F8E4M3, stored),
            Format::F8E5M2 => self.row(Format::F8E5M2, stored),
            Format::Q8_0 => self.row(Format::Q8_0, stored),
            Format::Q4_0 => self.row(Format::Q4_0, stored),
            Format::Q4_1 => self.row(Format::Q4_1, stored),
        }
    }

    /// One row, 128 elements at a time: those are loaded before the first of them is stored.
    #[inline(always)]
    fn row(&self, format: Format, stored: u64) {
        let mut at = arch::lane();
        // All lanes go round as often: they wait for each other.
        let mut left = self.elements.div_ceil(128);
        while left != 0 {
            left -= 1;
            let a = self.load(format, stored, at);
            let b = self.load(format, stored, at + 32);
            let c = self.load(format, stored, at + 64);
            let d = self.load(format, stored, at + 96);
            arch::sync_warp(arch::FULL);
            self.store(stored, at, a);
            self.store(stored, at + 32, b);
            self.store(stored, at + 64, c);
            self.store(stored, at + 96, d);
            at += 128;
        }
        arch::sync_warp(arch::FULL);
    }

    /// Past the end the last element: without a branch, so that all loads of a round are under way at once.
    #[inline(always)]
    fn load(&self, format: Format, stored: u64, index: u32) -> f32 {
        let index = index.min(self.elements.saturating_sub(1));
        // SAFETY: inside the stored row, which has an element at least; the host vouches for it.
        value(format, index, |byte| unsafe {
            arch::load_u8(stored + u64::from(byte))
        })
    }

    #[inline(always)]
    fn store(&self, stored: u64, index: u32, value: f32) {
        if index >= self.elements {
            return;
        }
        let to = stored - u64::from(self.before) + u64::from(index * self.wide.bytes());
        let bits = self.wide.bits_of(value);
        // SAFETY: inside the wide row, at a multiple of an element's bytes: the host has checked both.
        unsafe {
            match self.wide {
                Wide::F16 => arch::store_u16(to, bits as u16),
                Wide::F32 => arch::store_u32(to, bits),
            }
        }
    }
}
