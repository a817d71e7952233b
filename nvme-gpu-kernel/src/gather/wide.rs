//! Conversion of gathered elements to a wider format, in place: a stored row occupies the last bytes of the
//! space of its converted row. It is read from its start to its end, so that each converted element is stored
//! over bytes that were already read.
// UNSAFETY: loads and stores at addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::groups::WholeBlock;
use crate::launch;
use crate::launch_end;
use crate::rows::{BLOCK_WARPS, WidenLaunch};
use nvme_core::group::ThreadGroup;
use nvme_formats::{Format, ScaleLayout, WideFormat, value};

entry! {
    /// Converts rows that an earlier launch in the stream has gathered. Blocks of
    /// [`BLOCK_THREADS`](crate::rows::BLOCK_THREADS) threads; any number of blocks. A row that was not read
    /// consists of [`zero_byte`](Format::zero_byte)s, and becomes zeros.
    ///
    /// # Safety
    /// The addresses in `rows` are valid as [`WidenLaunch`] documents.
    pub unsafe fn nvme_widen_rows(rows: WidenLaunch) {
        let Some(widening) = ElementWidening::new(&rows) else {
            return;
        };
        let block = WholeBlock::here();
        let gather = &rows.gather;
        let mut index = u64::from(arch::block() * BLOCK_WARPS + arch::thread() / 32);
        while index < gather.count {
            // SAFETY: the host gives `count` ids, if any.
            let widening = unsafe { widening.of_row(&rows, index) };
            widening.row_of_format(gather.out + index * gather.out_stride);
            index += u64::from(arch::blocks() * BLOCK_WARPS);
        }
        // A barrier: the rows of all warps are stored before the leader reports.
        block.sync();
        if block.leads() {
            launch_end::end_block(gather, 0);
        }
    }
}

/// The conversion of a launch's elements.
#[derive(Clone, Copy)]
struct ElementWidening {
    format: Format,
    wide: WideFormat,
    elements: u32,
    before: u32,
    layout: ScaleLayout,
    /// Address of the scales of the row at hand.
    scales: u64,
}

impl ElementWidening {
    #[inline(always)]
    fn new(rows: &WidenLaunch) -> Option<Self> {
        Some(Self {
            format: Format::of_number(rows.format)?,
            wide: WideFormat::of_number(rows.wide)?,
            elements: rows.elements,
            before: rows.before,
            layout: rows.layout,
            scales: rows.scales,
        })
    }

    /// Returns the conversion of row `index` of the launch, with the scales of its id. The id may be another one than the
    /// gather found there; it is one of the table, or the row has no scales.
    ///
    /// # Safety
    /// The launch has more than `index` ids, or none.
    #[inline(always)]
    unsafe fn of_row(mut self, rows: &WidenLaunch, index: u64) -> Self {
        let bytes = self.layout.row_bytes(self.elements);
        if bytes != 0 {
            // SAFETY: the caller keeps the conditions under `# Safety`.
            let id = unsafe { launch::id(&rows.gather, index) };
            match id >= 0 && (id as u64) < rows.gather.rows {
                true => self.scales += id as u64 * u64::from(bytes),
                // The row is zeros, since the table does not have it.
                false => self.layout = ScaleLayout::default(),
            }
        }
        self
    }

    /// Converts the row whose stored elements begin at `stored`. Every lane of the warp calls it.
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
            Format::Q2K => self.row(Format::Q2K, stored),
            Format::Q3K => self.row(Format::Q3K, stored),
            Format::Q4K => self.row(Format::Q4K, stored),
            Format::Q5K => self.row(Format::Q5K, stored),
            Format::Q6K => self.row(Format::Q6K, stored),
            Format::Iq4Nl => self.row(Format::Iq4Nl, stored),
            Format::Iq4Xs => self.row(Format::Iq4Xs, stored),
            Format::Mxfp4 => self.row(Format::Mxfp4, stored),
            Format::F4E2M1 => self.row(Format::F4E2M1, stored),
            Format::F8Scaled => self.row(Format::F8Scaled, stored),
        }
    }

    /// Converts one row, 128 elements a turn: all of them are loaded before the first one is stored, since a
    /// converted element may overwrite stored ones.
    #[inline(always)]
    fn row(&self, format: Format, stored: u64) {
        let mut at = arch::lane();
        // Every lane runs the same number of turns, since the lanes wait for each other.
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

    /// Loads an element; past the end the last one. Without a branch, so that all loads of a turn overlap.
    #[inline(always)]
    fn load(&self, format: Format, stored: u64, index: u32) -> f32 {
        let index = index.min(self.elements.saturating_sub(1));
        // SAFETY: the access stays inside the stored row, which has at least one element; the host vouches for it.
        let element = value(format, index, |byte| unsafe {
            arch::load_u8(stored + u64::from(byte))
        });
        match self.layout.scales() {
            false => element,
            true => {
                // SAFETY: the access stays inside the scales of the row, for which the host vouches.
                let scale = self.layout.value(index, |byte| unsafe {
                    arch::load_u8(self.scales + u64::from(byte))
                });
                element * scale
            }
        }
    }

    #[inline(always)]
    fn store(&self, stored: u64, index: u32, value: f32) {
        if index >= self.elements {
            return;
        }
        let to = stored - u64::from(self.before) + u64::from(index * self.wide.bytes());
        let bits = self.wide.bits_of(value);
        // SAFETY: the access stays inside the converted row, at a multiple of an element's bytes; the host has checked
        // both.
        unsafe {
            match self.wide {
                WideFormat::F16 | WideFormat::Bf16 => arch::store_u16(to, bits as u16),
                WideFormat::F32 => arch::store_u32(to, bits),
            }
        }
    }
}
