//! Walks the data pointer of a command whose PSDT selects PRPs.
//!
//! The lists are in the driver's memory and each entry is read once, so a driver that changes a
//! list meanwhile gets either value. Every page of a list covers data or chains to a page that
//! does, so a list that points at itself ends too.

use crate::memory::Dma;
use nvme_spec::{PageSize, Status};

/// Calls `each(address, bytes)` for the extents of `len` bytes of data.
///
/// NVMe Base 2.0c, 4.1.1 (Physical Region Page Entry and List).
#[inline]
pub(crate) fn walk(
    dma: &Dma<'_>,
    [prp1, prp2]: [u64; 2],
    len: u64,
    page: PageSize,
    mut each: impl FnMut(u64, usize) -> Result<(), Status>,
) -> Result<(), Status> {
    if prp1 & 3 != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    let bytes = page.bytes();
    let first = len.min(bytes - (prp1 & (bytes - 1)));
    let remaining = len - first;
    // Drivers leave PRP2 at 0 when there is no second page. Taken as an address it could hit mapped
    // memory; a transfer error reports the short buffer.
    if remaining != 0 && prp2 == 0 {
        return Err(Status::DATA_TRANSFER_ERROR);
    }
    if remaining > bytes {
        each(prp1, first as usize)?;
        return list(dma, prp2, remaining, page, each);
    }
    // Both entries are checked before any data moves, so that an invalid second one has no effect.
    if remaining != 0 && prp2 & (bytes - 1) != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    each(prp1, first as usize)?;
    if remaining != 0 {
        each(prp2, remaining as usize)
    } else {
        Ok(())
    }
}

fn list(
    dma: &Dma<'_>,
    mut pointer: u64,
    mut remaining: u64,
    page: PageSize,
    mut each: impl FnMut(u64, usize) -> Result<(), Status>,
) -> Result<(), Status> {
    let bytes = page.bytes();
    // The first list may start inside a page, since PRP2 is only qword aligned. The pages that a
    // list chains to start at their beginning, so their offset is 0.
    if pointer & 7 != 0 {
        return Err(Status::INVALID_PRP_OFFSET);
    }
    loop {
        let entries = (bytes - (pointer & (bytes - 1))) / 8;
        let whole = dma.span(
            pointer,
            (entries.min(remaining.div_ceil(bytes)) * 8) as usize,
        );
        for i in 0..entries {
            let word = whole.and_then(|span| span.words::<1>(i as usize * 8));
            let [entry] = match word {
                Some(word) => word,
                None => dma
                    .words(pointer + i * 8)
                    .map_err(|_| Status::DATA_TRANSFER_ERROR)?,
            };
            if entry & (bytes - 1) != 0 {
                return Err(Status::INVALID_PRP_OFFSET);
            }
            // The last entry of a list page is a pointer to the next list only if more than one
            // page of data remains; otherwise it is the last page of data.
            if i + 1 == entries && remaining > bytes {
                pointer = entry;
                break;
            }
            let take = remaining.min(bytes);
            each(entry, take as usize)?;
            remaining -= take;
            if remaining == 0 {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::VecMemory;
    use crate::memory::{DmaGuard, DmaMemory, DmaRegion, MemorySpan};
    use alloc::vec::Vec;

    type Pieces = Result<Vec<(u64, usize)>, Status>;

    /// Memory in which every word is a separate mapping.
    struct ListWords<'a>(&'a VecMemory);

    impl DmaGuard for ListWords<'_> {
        fn lookup(&self, iova: u64) -> Option<DmaRegion<'_>> {
            let word = self.0.words().get((iova / 8) as usize)?;
            Some(DmaRegion {
                start: iova & !7,
                span: MemorySpan::of_words(core::slice::from_ref(word)),
            })
        }
    }

    fn extents(lists: &[(u64, &[u64])], prps: [u64; 2], len: u64, page: PageSize) -> Pieces {
        let memory = VecMemory::new(1 << 20);
        for (at, entries) in lists {
            for (i, entry) in entries.iter().enumerate() {
                memory
                    .write(at + i as u64 * 8, &entry.to_le_bytes())
                    .unwrap();
            }
        }
        let walk_over = |guard: &dyn DmaGuard| {
            let mut out = Vec::new();
            walk(&Dma::new(guard), prps, len, page, |at, len| {
                out.push((at, len));
                Ok(())
            })?;
            Ok(out)
        };
        let found = walk_over(&memory.guard());
        assert_eq!(
            walk_over(&ListWords(&memory)),
            found,
            "a list in one mapping or in many"
        );
        found
    }

    #[test]
    fn short_transfers_need_no_list() {
        let k4 = PageSize::KIB4;
        assert_eq!(
            extents(&[], [0x1000, 0], 4096, k4),
            Ok([(0x1000, 4096)].into())
        );
        assert_eq!(
            extents(&[], [0x1FFC, 0x5000], 512, k4),
            Ok([(0x1FFC, 4), (0x5000, 508)].into())
        );
        // PRP2 is the second page, not a list, as long as one page is left.
        assert_eq!(
            extents(&[], [0x1000, 0x5000], 8192, k4),
            Ok([(0x1000, 4096), (0x5000, 4096)].into())
        );
        assert_eq!(
            extents(&[], [0x1002, 0], 512, k4),
            Err(Status::INVALID_PRP_OFFSET)
        );
        assert_eq!(
            extents(&[], [0x1004, 0x5008], 4096, k4),
            Err(Status::INVALID_PRP_OFFSET)
        );
        // PRP2 is reserved when PRP1 covers the data.
        assert_eq!(
            extents(&[], [0x1000, 0x5008], 512, k4),
            Ok([(0x1000, 512)].into())
        );
    }

    #[test]
    fn a_list_may_start_inside_a_page_and_chains_from_its_last_entry() {
        let k4 = PageSize::KIB4;
        let lists: &[(u64, &[u64])] = &[(0x2FF0, &[0x7000, 0x4000]), (0x4000, &[0x8000, 0x9000])];
        let expected = [
            (0x1800, 2048),
            (0x7000, 4096),
            (0x8000, 4096),
            (0x9000, 2048),
        ];
        assert_eq!(
            extents(lists, [0x1800, 0x2FF0], 12288, k4),
            Ok(expected.into())
        );
        // The last entry is data when at most a page is left.
        let lists: &[(u64, &[u64])] = &[(0x2FF0, &[0x7000, 0x4000])];
        let expected = [(0x1000, 4096), (0x7000, 4096), (0x4000, 4096)];
        assert_eq!(
            extents(lists, [0x1000, 0x2FF0], 12288, k4),
            Ok(expected.into())
        );
    }

    #[test]
    fn bad_entries_are_refused() {
        let k4 = PageSize::KIB4;
        let offset: &[(u64, &[u64])] = &[(0x2000, &[0x7000, 0x8004])];
        assert_eq!(
            extents(offset, [0x1000, 0x2000], 12288, k4),
            Err(Status::INVALID_PRP_OFFSET)
        );
        assert_eq!(
            extents(&[], [0x1000, 0x2004], 12288, k4),
            Err(Status::INVALID_PRP_OFFSET)
        );
        assert_eq!(
            extents(&[], [0x1000, 1 << 40], 12288, k4),
            Err(Status::DATA_TRANSFER_ERROR)
        );
        let chain: &[(u64, &[u64])] = &[(0x2FF8, &[0x4008])];
        assert_eq!(
            extents(chain, [0x1000, 0x2FF8], 16384, k4),
            Err(Status::INVALID_PRP_OFFSET)
        );
    }

    #[test]
    fn a_list_that_chains_to_itself_ends() {
        let k4 = PageSize::KIB4;
        let own: Vec<u64> = core::iter::repeat_n(0x2000, 512).collect();
        let lists: &[(u64, &[u64])] = &[(0x2000, &own)];
        let extents = extents(lists, [0x1000, 0x2000], 4096 * 2000, k4).unwrap();
        assert_eq!(extents.len(), 2000);
    }

    #[test]
    fn pages_of_64_kib_work() {
        let k64 = PageSize::from_mps(4).unwrap();
        let lists: &[(u64, &[u64])] = &[(0x8000, &[0x2_0000, 0x3_0000])];
        let expected = [(0x1_1000, 0xF000), (0x2_0000, 0x1_0000), (0x3_0000, 0x1000)];
        assert_eq!(
            extents(lists, [0x1_1000, 0x8000], 0x2_0000, k64),
            Ok(expected.into())
        );
    }
}
