//! Places of the parts of an area: two superblocks, two halves of checkpoint and log, then the slots of pages.

use crate::error::{KvError, Result};
use crate::format::{CHECKPOINT_ENTRY_BYTES, UNIT};

/// The most bytes of a page.
pub const MOST_PAGE_BYTES: u32 = 1 << 30;
/// The most slots of an area.
pub const MOST_SLOTS: u32 = 1 << 30;
/// Least and most blocks of a log.
const LOG_BLOCKS: (u64, u64) = (16, 4096);
/// Blocks of an area for each block of a log.
const BLOCKS_OF_LOG_BLOCK: u64 = 1024;
const SUPERBLOCKS: u64 = 2;

/// Sizes of an area, from which every place in it follows. Offsets count from the area's first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaLayout {
    /// Bytes of the area.
    pub area_bytes: u64,
    /// The most bytes of a page.
    pub page_bytes: u32,
    /// Pages that fit.
    pub slots: u32,
    /// Blocks of each log.
    pub log_blocks: u32,
}

impl AreaLayout {
    /// Fits as many pages of up to `page_bytes` bytes as possible into `area_bytes` bytes.
    ///
    /// # Errors
    /// [`KvError::Usage`] for a page size out of range, and for an area without room for one page.
    pub fn fit(area_bytes: u64, page_bytes: u32) -> Result<Self> {
        if !(1..=MOST_PAGE_BYTES).contains(&page_bytes) {
            return Err(KvError::usage(
                format!("page_bytes {page_bytes} is not between 1 and {MOST_PAGE_BYTES}"),
                "pass the bytes of one page of the cache",
            ));
        }
        let blocks = area_bytes / UNIT;
        let log_blocks = (blocks / BLOCKS_OF_LOG_BLOCK).clamp(LOG_BLOCKS.0, LOG_BLOCKS.1);
        let mut layout = Self {
            area_bytes,
            page_bytes,
            slots: 0,
            log_blocks: log_blocks as u32,
        };
        let room = (blocks * UNIT).saturating_sub(layout.slot_at(0));
        let most = room / (layout.slot_bytes() + 2 * CHECKPOINT_ENTRY_BYTES as u64);
        // The quotient charges each slot its two entries, but not that each half rounds them up to a block.
        layout.slots = most.min(u64::from(MOST_SLOTS)) as u32;
        while layout.slots > 0 && layout.end() > area_bytes {
            layout.slots -= 1;
        }
        if layout.slots == 0 {
            layout.slots = 1;
            return Err(KvError::usage(
                format!(
                    "an area of {area_bytes} bytes has no room for a page of {page_bytes} bytes with its log, which \
                     takes {} bytes",
                    layout.end()
                ),
                "use a larger area, or smaller pages",
            ));
        }
        Ok(layout)
    }

    /// Checks sizes that a superblock names: all places lie in the area, and no arithmetic overflows.
    pub(crate) fn is_sound(&self) -> bool {
        let log_blocks = LOG_BLOCKS.0..=LOG_BLOCKS.1;
        (1..=MOST_PAGE_BYTES).contains(&self.page_bytes)
            && (1..=MOST_SLOTS).contains(&self.slots)
            && log_blocks.contains(&u64::from(self.log_blocks))
            && self.end() <= self.area_bytes
    }

    /// Returns the bytes of a slot: a header of one block, and a page in whole blocks.
    pub fn slot_bytes(&self) -> u64 {
        UNIT + u64::from(self.page_bytes).next_multiple_of(UNIT)
    }

    /// Returns the bytes of a checkpoint: its header, and the entries of all slots in whole blocks.
    fn checkpoint_bytes(&self) -> u64 {
        let entries = u64::from(self.slots) * CHECKPOINT_ENTRY_BYTES as u64;
        UNIT + entries.next_multiple_of(UNIT)
    }

    /// Returns the place of the checkpoint of half 0 or 1.
    pub fn checkpoint_at(&self, half: usize) -> u64 {
        let log = u64::from(self.log_blocks) * UNIT;
        SUPERBLOCKS * UNIT + half as u64 * (self.checkpoint_bytes() + log)
    }

    /// Returns the place of a block of the log of half 0 or 1.
    pub fn log_at(&self, half: usize, block: u32) -> u64 {
        self.checkpoint_at(half) + self.checkpoint_bytes() + u64::from(block) * UNIT
    }

    /// Returns the place of a slot.
    pub fn slot_at(&self, slot: u32) -> u64 {
        self.checkpoint_at(2) + u64::from(slot) * self.slot_bytes()
    }

    /// Returns the byte behind the last slot.
    pub fn end(&self) -> u64 {
        self.slot_at(self.slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_apart_and_fill_the_area() {
        for area_bytes in [1 << 20, (1 << 20) + 4095, 64 << 20, 1 << 40] {
            for page_bytes in [1, 4096, 4097, 64 << 10, 70_272] {
                let layout = AreaLayout::fit(area_bytes, page_bytes).unwrap();
                assert!(layout.is_sound());
                assert!(layout.checkpoint_at(0) == 2 * UNIT);
                assert!(layout.log_at(0, 0) > layout.checkpoint_at(0));
                assert_eq!(layout.log_at(0, layout.log_blocks), layout.checkpoint_at(1));
                assert_eq!(layout.log_at(1, layout.log_blocks), layout.slot_at(0));
                // One more slot, with one more block of entries in each half, would not fit.
                let wasted = area_bytes - layout.end();
                assert!(wasted < layout.slot_bytes() + 3 * UNIT || layout.slots == MOST_SLOTS);
            }
        }
    }

    #[test]
    fn a_million_pages_of_64_kib_cost_seven_percent() {
        let layout = AreaLayout::fit(70 << 30, 64 << 10).unwrap();
        assert!(layout.slots > 1_000_000);
        assert!(u64::from(layout.slots) * (64 << 10) > 70 * (1 << 30) / 100 * 93);
    }

    #[test]
    fn areas_without_room_are_refused_by_their_sizes() {
        for (area, page) in [
            (0, 4096),
            (100_000, 64 << 10),
            (1 << 30, 0),
            (1 << 62, 1 << 31),
        ] {
            let error = AreaLayout::fit(area, page).unwrap_err();
            assert!(matches!(error, KvError::Usage { .. }));
        }
    }

    #[test]
    fn sizes_that_no_area_has_are_unsound() {
        let good = AreaLayout::fit(16 << 20, 4096).unwrap();
        let wrong = [
            AreaLayout { slots: 0, ..good },
            AreaLayout {
                slots: u32::MAX,
                ..good
            },
            AreaLayout {
                slots: good.slots + 9,
                ..good
            },
            AreaLayout {
                page_bytes: 0,
                ..good
            },
            AreaLayout {
                page_bytes: u32::MAX,
                ..good
            },
            AreaLayout {
                log_blocks: 0,
                ..good
            },
            AreaLayout {
                log_blocks: u32::MAX,
                ..good
            },
            AreaLayout {
                area_bytes: 0,
                ..good
            },
        ];
        assert!(wrong.iter().all(|one| !one.is_sound()));
    }
}
