//! Elements of rows become wider, in place: a stored row lies in the last bytes of the place of its wide one, and is
//! read from its begin to its end, so that a wide element is stored where the stored ones were read already.
// UNSAFETY: loads and stores at addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::rows::{Gather, Widened};
use nvme_formats::{Format, Wide, value};

/// What becomes of the elements of a launch.
#[derive(Clone, Copy)]
pub struct Widening {
    format: Format,
    wide: Wide,
    elements: u32,
    /// Bytes from where a wide row begins to where its stored row does.
    pub before: u32,
}

impl Widening {
    #[inline(always)]
    pub fn new(rows: &Widened) -> Option<Self> {
        Some(Self {
            format: Format::of_number(rows.format)?,
            wide: Wide::of_number(rows.wide)?,
            elements: rows.elements,
            before: rows.before,
        })
    }

    /// Widens the rows `first + lane` of the lanes in `there`. Every lane of the warp calls it.
    #[inline(always)]
    pub fn rows(&self, rows: &Gather, first: u64, there: u32) {
        let mut left = there;
        while left != 0 {
            let lane = left.trailing_zeros();
            left &= left - 1;
            let stored = rows.out + (first + u64::from(lane)) * rows.out_stride;
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
