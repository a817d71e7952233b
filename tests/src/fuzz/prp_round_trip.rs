//! Checks that any buffer, mapped by the core and walked as the specification says, is the same
//! buffer.

use super::Input;
use nvme_core::mem::DmaWords;
use nvme_core::prp;
use nvme_core::spec::{Iova, PageSize};
use nvme_core::sync::AtomicU64;

/// The longest transfer that is tried, in pages: enough for three chained lists of 4 KiB.
const MOST_PAGES: u64 = 1600;

/// Address of the first list; the memory after it is reserved for lists.
const LISTS: u64 = 0x4000_0000_0000;

/// The page size, the address, the length and the list's address come from `bytes`.
pub fn prp_round_trip(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let page = PageSize::from_mps(input.byte() % 5).unwrap();
    let iova = Iova(input.long() >> 2 & !3);
    let len = u64::from(input.word()) % (MOST_PAGES * page.bytes() - 1) + 1;
    let list_offset = u64::from(input.half()) * 8 % page.bytes();
    let scattered = input.byte() & 1 != 0;

    let room = prp::list_words(page, len);
    let words: Vec<AtomicU64> = (0..room).map(|_| AtomicU64::new(0)).collect();
    let list = DmaWords::new(&words, Iova(LISTS + list_offset));

    let (prps, expected) = if scattered {
        let offset = page.offset_of(iova);
        let pages = (offset + len).div_ceil(page.bytes());
        // The table lists every other page in descending order, so that no two of its pages are adjacent.
        let table: Vec<Iova> = (0..pages)
            .map(|index| Iova((2 * (pages - index) + 64) * page.bytes()))
            .collect();
        let prps = prp::map_table(page, offset, len, &table, list).expect("a valid buffer");
        let pieces = pieces(page, offset, len, |index| table[index as usize].0);
        (prps, pieces)
    } else {
        let prps = prp::map(page, iova, len, list).expect("a valid buffer");
        let base = iova.0 - page.offset_of(iova);
        (
            prps,
            pieces(page, page.offset_of(iova), len, |index| {
                base + index * page.bytes()
            }),
        )
    };
    assert_eq!(
        walk(page, prps, len, list),
        expected,
        "{page:?} {iova} {len} list at {list_offset:#x}"
    );
}

/// Returns the buffer's pieces, page by page, as (address, bytes).
fn pieces(page: PageSize, offset: u64, len: u64, page_at: impl Fn(u64) -> u64) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let (mut at, end) = (offset, offset + len);
    while at < end {
        let bytes = (page.bytes() - at % page.bytes()).min(end - at);
        found.push((page_at(at / page.bytes()) + at % page.bytes(), bytes));
        at += bytes;
    }
    found
}

/// Returns the ranges that a controller reads from PRP1, PRP2 and the lists: NVMe Base 2.0c,
/// "Physical Region Page Entry and List".
fn walk(page: PageSize, prps: prp::PrpPair, len: u64, list: DmaWords<'_>) -> Vec<(u64, u64)> {
    let first = (page.bytes() - prps.prp1 % page.bytes()).min(len);
    let mut found = vec![(prps.prp1, first)];
    let mut left = len - first;
    if left == 0 {
        assert_eq!(
            prps.prp2, 0,
            "PRP2 is reserved when one page holds everything"
        );
        return found;
    }
    if left <= page.bytes() {
        assert_eq!(prps.prp2 % page.bytes(), 0);
        found.push((prps.prp2, left));
        return found;
    }
    let mut at = prps.prp2;
    while left > 0 {
        assert_eq!(at % 8, 0, "a list is qword aligned");
        let index = at
            .checked_sub(list.iova().0)
            .expect("inside the list memory")
            / 8;
        assert!(
            (index as usize) < list.len(),
            "the list runs past its memory"
        );
        let entry = list.get(index as usize);
        let last_of_page = at % page.bytes() == page.bytes() - 8;
        if last_of_page && left > page.bytes() {
            assert_eq!(entry % page.bytes(), 0, "a chained list starts on a page");
            at = entry;
            continue;
        }
        assert_eq!(
            entry % page.bytes(),
            0,
            "only the first entry may have an offset"
        );
        found.push((entry, left.min(page.bytes())));
        left = left.saturating_sub(page.bytes());
        at += 8;
    }
    found
}
