//! Gathers of few rows that convert elements on the way from the slots to the output, in one launch.
//!
//! Each thread loads units of 16, 8 or 4 bytes from the slots and stores their converted elements. The bits are those of
//! `nvme_widen_rows`, which converts rows in memory: both decode by `nvme-formats`.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::batched::{BatchWork, NOWHERE, enter};
use super::halves::resume;
use super::map::{OneRange, RowMap};
use crate::arch;
use crate::extents::MappedLaunch;
use crate::rows::{Batched, GatherLaunch, HalvedGather, STATION_BYTES, failed_byte};
use crate::units::UnitSteps;
use crate::wide_batch::{BatchWidening, WidenedLaunch, plain_block};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_formats::{Format, WideFormat, value};

entry! {
    #[cfg(feature = "rows")]
    /// Gathers rows as `nvme_gather_batched` does, and stores their converted elements.
    ///
    /// # Safety
    /// As `nvme_gather_batched`; the addresses of the conversion are valid as [`BatchWidening`] documents.
    pub unsafe fn nvme_gather_batched_wide(widened: WidenedLaunch<Batched>) {
        let widening = UnitWidening::new(&widened.widening);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        if let Some((work, rows, id)) = unsafe { enter(&widened.launch, OneRange) } {
            work.gather_wide(rows, id, &widening);
        }
    }
}

entry! {
    #[cfg(feature = "rows")]
    /// Finishes a gather as `nvme_finish_batched` does, and stores the converted elements.
    ///
    /// # Safety
    /// As `nvme_finish_batched`; the addresses of the conversion are valid as [`BatchWidening`] documents.
    pub unsafe fn nvme_finish_batched_wide(widened: WidenedLaunch<HalvedGather>) {
        let widening = UnitWidening::new(&widened.widening);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        if let Some((work, rows, id)) = unsafe { resume(&widened.launch, OneRange) } {
            work.gather_wide(rows, id, &widening);
        }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Does the same as `nvme_gather_batched_wide` for a table in several ranges.
    ///
    /// # Safety
    /// As `nvme_gather_batched_wide`; the ranges as for `nvme_gather_batched_mapped`.
    pub unsafe fn nvme_gather_batched_wide_mapped(mapped: MappedLaunch<WidenedLaunch<Batched>>) {
        let widened = &mapped.launch;
        let widening = UnitWidening::new(&widened.widening);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        if let Some((work, rows, id)) = unsafe { enter(&widened.launch, mapped.map) } {
            work.gather_wide(rows, id, &widening);
        }
    }
}

entry! {
    #[cfg(feature = "mapped")]
    /// Does the same as `nvme_finish_batched_wide` for a table in several ranges.
    ///
    /// # Safety
    /// As `nvme_finish_batched_wide`; the ranges as for `nvme_gather_batched_mapped`.
    pub unsafe fn nvme_finish_batched_wide_mapped(mapped: MappedLaunch<WidenedLaunch<HalvedGather>>) {
        let widened = &mapped.launch;
        let widening = UnitWidening::new(&widened.widening);
        // SAFETY: the caller keeps the conditions under `# Safety`.
        if let Some((work, rows, id)) = unsafe { resume(&widened.launch, mapped.map) } {
            work.gather_wide(rows, id, &widening);
        }
    }
}

/// A unit of a row: its row in the block, its first byte in the row, and its address in the slots, or 0.
type Unit = (u32, u32, u64);
/// The bytes of a unit, the first one lowest.
type UnitWords = (u64, u64);

/// The conversion of a launch.
#[derive(Clone, Copy)]
pub(super) struct UnitWidening<'w> {
    widening: &'w BatchWidening,
    format: Format,
    wide: WideFormat,
}

impl<'w> UnitWidening<'w> {
    #[inline(always)]
    fn new(widening: &'w BatchWidening) -> Self {
        let format = Format::of_number(widening.format);
        let (Some(format), Some(wide)) = (format, WideFormat::of_number(widening.wide)) else {
            // The host writes no numbers of other formats.
            arch::trap()
        };
        Self {
            widening,
            format,
            wide,
        }
    }

    /// Stores the converted elements of the units of `count` rows from row `first` on. The slot of row k begins at
    /// `slots` plus k slots, and the row there at word k of `words`; a row without such a place has failed.
    #[inline(always)]
    fn rows(
        &self,
        rows: &GatherLaunch,
        (slots, words): (u64, &[AtomicU32]),
        (first, count): (u64, u32),
    ) {
        let shift = rows.unit_shift;
        let mut units = UnitSteps::new(rows.row_bytes >> shift);
        while units.row < count {
            let mut next = || {
                let (row, byte) = units.next(shift);
                let word = words.get(row as usize).filter(|_| row < count);
                let in_slot = word.map_or(NOWHERE, |word| word.load(Order::Relaxed, Scope::Cta));
                let slot = u64::from(row) * u64::from(rows.slot_bytes) + u64::from(in_slot);
                let from = match in_slot {
                    NOWHERE => 0,
                    _ => slots + slot + byte,
                };
                (row, byte as u32, from)
            };
            // Four loads are in flight before the first store; an array would be placed on a stack.
            let (a, b, c, d) = (next(), next(), next(), next());
            let load = |unit: Unit| load_unit(rows, shift, unit.2);
            let (of_a, of_b, of_c, of_d) = (load(a), load(b), load(c), load(d));
            self.store(rows, (first, count), a, of_a);
            self.store(rows, (first, count), b, of_b);
            self.store(rows, (first, count), c, of_c);
            self.store(rows, (first, count), d, of_d);
        }
    }

    /// Stores the converted elements of a unit, two at a time where they have 16 bits.
    #[inline(always)]
    fn store(
        &self,
        rows: &GatherLaunch,
        (first, count): (u64, u32),
        (row, byte, _): Unit,
        words: UnitWords,
    ) {
        if row >= count {
            return;
        }
        let (of_block, byte_shift) = plain_block(self.format);
        let begin = (byte >> byte_shift) * of_block;
        let elements = (1 << rows.unit_shift >> byte_shift) * of_block;
        let index = first + u64::from(row);
        let (scales, scales_it) = self.scales_of(rows, index);
        let to = self.widening.out + index * rows.out_stride;
        let bits = |at: u32| {
            let element = self.value(at, words);
            let layout = &self.widening.layout;
            let element = match scales_it {
                false => element,
                true => {
                    // SAFETY: the access stays inside the scales of the row, for which the host vouches.
                    let scale = layout.value(begin + at, |byte| unsafe {
                        arch::load_u8(scales + u64::from(byte))
                    });
                    element * scale
                }
            };
            self.wide.bits_of(element)
        };
        let mut at = 0;
        while at < elements {
            let (word, step) = match self.wide.bytes() {
                2 => (bits(at) & 0xFFFF | bits(at + 1) << 16, 2),
                _ => (bits(at), 1),
            };
            let place = to + u64::from((begin + at) * self.wide.bytes());
            // SAFETY: the word lies in the converted row, at a multiple of 4, as the host has checked.
            unsafe { arch::store_u32(place, word) };
            at += step;
        }
    }

    /// Returns the address of the scales of row `index` of the launch, and true if its elements are multiplied by them.
    #[inline(always)]
    fn scales_of(&self, rows: &GatherLaunch, index: u64) -> (u64, bool) {
        let BatchWidening { layout, scales, .. } = self.widening;
        let bytes = layout.row_bytes(self.widening.elements);
        if bytes == 0 {
            return (0, layout.scales());
        }
        let ids = GatherLaunch {
            ids: self.widening.ids,
            wide_ids: self.widening.wide_ids,
            ..GatherLaunch::default()
        };
        // SAFETY: the host vouches for an id of each row.
        let id = unsafe { crate::launch::id(&ids, index) };
        // The row is zeros, since the table does not have it.
        let is_there = id >= 0 && (id as u64) < rows.rows;
        match is_there {
            true => (scales + id as u64 * u64::from(bytes), true),
            false => (0, false),
        }
    }

    /// Returns element `at` of a unit.
    #[inline(always)]
    fn value(&self, at: u32, words: UnitWords) -> f32 {
        let byte = |byte: u32| {
            let word = if byte < 8 { words.0 } else { words.1 };
            (word >> (byte % 8 * 8)) as u8
        };
        match self.format {
            Format::F16 => value(Format::F16, at, byte),
            Format::Bf16 => value(Format::Bf16, at, byte),
            Format::F8E4M3 => value(Format::F8E4M3, at, byte),
            Format::F8E5M2 => value(Format::F8E5M2, at, byte),
            _ => value(Format::F4E2M1, at, byte),
        }
    }
}

/// Loads a unit of `1 << shift` bytes; without an address, returns that of a failed row.
#[inline(always)]
fn load_unit(rows: &GatherLaunch, shift: u32, from: u64) -> UnitWords {
    if from == 0 {
        // Failed rows of these formats consist of copies of one byte.
        let byte = u64::from(failed_byte(rows.failed_as, 0));
        let word = byte * 0x0101_0101_0101_0101;
        return (word, word);
    }
    // SAFETY: the unit lies in a slot, at a multiple of its length.
    unsafe {
        match shift {
            4 => arch::load_pair(from),
            3 => (arch::load_u64(from), 0),
            _ => (u64::from(arch::load_u32(from)), 0),
        }
    }
}

impl<M: RowMap> BatchWork<'_, '_, M> {
    /// Gathers the rows of the block as `gather` does, and stores their converted elements.
    #[inline(always)]
    fn gather_wide(mut self, (first, most): (u64, u32), id: i64, widening: &UnitWidening<'_>) {
        let rows = self.rows;
        let index = first + u64::from(arch::thread());
        let is_live = arch::thread() < most && index < rows.count;
        // SAFETY: the host vouches for the extents.
        let part = unsafe { self.map.span(rows, (id, 0)) }.filter(|_| is_live);
        let left = rows.count.saturating_sub(first);
        let count = if left < u64::from(most) {
            left as u32
        } else {
            most
        };
        let (became, in_slot) = self.read_whole((id, part));
        let words = self.publish(in_slot);
        let slots = u64::from(self.station).wrapping_mul(STATION_BYTES);
        let slots = rows.slots.wrapping_add(slots);
        widening.rows(rows, (slots, words), (first, count));
        self.failed.note(rows, index, is_live, (None, became));
        self.leave();
    }
}
