//! PRP lists: the two data pointers of a command for a buffer of whole or part pages.
//!
//! Invariant: every entry but the first is page aligned, and the last entry of a list page points to the next
//! list page only if more entries remain than fit.
//!
//! NVMe Base 2.0c, 4.1.1 (Physical Region Page Entry and List).

use crate::error::PointerError;
use crate::mem::DmaWords;
use crate::spec::{Iova, PageSize};

/// PRP1 and PRP2 of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrpPair {
    /// First page, possibly with an offset.
    pub prp1: u64,
    /// 0, the second page, or the list.
    pub prp2: u64,
}

/// Returns the words of list memory that a transfer of `len` bytes may need, at any offset and with any start
/// of the list.
///
/// The count includes the chain pointers. A list that begins with the last word of a page needs the most.
pub const fn list_words(page: PageSize, len: u64) -> usize {
    match len.div_ceil(page.bytes()) {
        entries @ 0..=1 => entries as usize,
        _ => list_words_from_page(page, len) + 1,
    }
}

/// Returns [`list_words`] for a list that begins with a page, or that stays within one.
pub(crate) const fn list_words_from_page(page: PageSize, len: u64) -> usize {
    let entries = len.div_ceil(page.bytes());
    let per_page = page.prp_entries();
    if entries <= per_page {
        return entries as usize;
    }
    // A full list page ends with a chain pointer unless it is the last page, so each such page
    // holds one entry less. A list that counted it as an address would be one entry too short.
    let chained = (entries - 2) / (per_page - 1);
    (entries + chained) as usize
}

/// Maps `len` bytes from `iova` on, contiguous in the controller's address space.
///
/// # Errors
/// [`PointerError::Empty`], [`PointerError::Misaligned`] when `iova` is not a multiple of 4,
/// [`PointerError::ListTooSmall`] when `list` cannot hold the entries.
#[inline]
pub fn map(
    page: PageSize,
    iova: Iova,
    len: u64,
    list: DmaWords<'_>,
) -> Result<PrpPair, PointerError> {
    answer(map_contiguous(page, iova, len, list))
}

/// Maps `len` bytes that start `offset` bytes into the first of `pages`, each anywhere.
///
/// # Errors
/// As [`map`]; also [`PointerError::Misaligned`] when a page is not page aligned, and
/// [`PointerError::TooLong`] when `pages` ends before the bytes do.
pub fn map_table(
    page: PageSize,
    offset: u64,
    len: u64,
    pages: &[Iova],
    list: DmaWords<'_>,
) -> Result<PrpPair, PointerError> {
    answer(map_listed(page, offset, len, pages, list))
}

fn answer((prps, error): (PrpPair, Option<PointerError>)) -> Result<PrpPair, PointerError> {
    error.map_or(Ok(prps), Err)
}

// From here on a function returns an error together with an initialised value, not a `Result`: a register
// that a `Result` leaves undefined on one path stays allocated for as long as a kernel's loop runs.

const NONE: PrpPair = PrpPair { prp1: 0, prp2: 0 };
/// The mark of a page that the table does not have. No page has this address, since it is not
/// aligned. So the mark cannot be taken for a page, whatever the caller's table holds.
const NO_PAGE: u64 = u64::MAX;

/// Maps as [`map`] does; with an error the pointers are meaningless.
#[inline(always)]
pub(crate) fn map_contiguous(
    page: PageSize,
    iova: Iova,
    len: u64,
    list: DmaWords<'_>,
) -> (PrpPair, Option<PointerError>) {
    // The last byte has to be inside the 64-bit address space; otherwise the page addresses below would wrap
    // to 0 and name memory of someone else.
    if iova.0.checked_add(len.wrapping_sub(1)).is_none() && len != 0 {
        return (NONE, Some(PointerError::TooLong));
    }
    let base = iova.0 - page.offset_of(iova);
    map_pages(page, iova, len, list, |index| {
        base + (index << page.shift())
    })
}

/// Maps as [`map_table`] does; with an error the pointers are meaningless.
#[inline(always)]
pub(crate) fn map_listed(
    page: PageSize,
    offset: u64,
    len: u64,
    pages: &[Iova],
    list: DmaWords<'_>,
) -> (PrpPair, Option<PointerError>) {
    let at = |index: u64| match usize::try_from(index).ok().and_then(|at| pages.get(at)) {
        Some(iova) => iova.0,
        None => NO_PAGE,
    };
    let first = at(0);
    if let Some(error) = check(page, first) {
        return (NONE, Some(error));
    }
    if offset >= page.bytes() {
        return (NONE, Some(PointerError::Misaligned));
    }
    map_pages(page, Iova(first).offset(offset), len, list, at)
}

/// Returns the error of an entry of a list, if any.
#[inline(always)]
fn check(page: PageSize, entry: u64) -> Option<PointerError> {
    if entry == NO_PAGE {
        Some(PointerError::TooLong)
    } else if page.offset_of(Iova(entry)) != 0 {
        Some(PointerError::Misaligned)
    } else {
        None
    }
}

/// Maps pages in general: `page_at(i)` is the i-th page of the buffer; page 0 is the one that holds `first`.
#[inline(always)]
fn map_pages(
    page: PageSize,
    first: Iova,
    len: u64,
    list: DmaWords<'_>,
    page_at: impl Fn(u64) -> u64,
) -> (PrpPair, Option<PointerError>) {
    if len == 0 {
        return (NONE, Some(PointerError::Empty));
    }
    if !first.0.is_multiple_of(4) {
        return (NONE, Some(PointerError::Misaligned));
    }
    let in_first = page.bytes() - page.offset_of(first);
    let rest = page.count(len.saturating_sub(in_first));
    let (prp2, error) = match rest {
        0 => (0, None),
        1 => {
            let second = page_at(1);
            (second, check(page, second))
        }
        entries => (list.iova().0, fill_list(page, list, entries, page_at)),
    };
    (
        PrpPair {
            prp1: first.0,
            prp2,
        },
        error,
    )
}

fn fill_list(
    page: PageSize,
    list: DmaWords<'_>,
    entries: u64,
    page_at: impl Fn(u64) -> u64,
) -> Option<PointerError> {
    if !list.iova().0.is_multiple_of(8) {
        return Some(PointerError::Misaligned);
    }
    // A list may start in the middle of a page; it still ends, or chains, at the page's end.
    // Counting from the page's start would write past it.
    let mut left_in_page = (page.bytes() - page.offset_of(list.iova())) / 8;
    let mut word = 0;
    let mut index = 0;
    while index < entries {
        // The last entry of a page is a pointer only if more than one entry remains: exactly one
        // fits into the place itself. A pointer there would send the controller to a list page that
        // does not exist.
        let chains = left_in_page == 1 && index + 1 < entries;
        // A chain pointer is the address of the next word of the list, which begins the next page, since the
        // list is contiguous for the controller.
        let mut value = list.iova().0 + (word as u64 + 1) * 8;
        if chains {
            left_in_page = page.prp_entries();
        } else {
            index += 1;
            left_in_page -= 1;
            value = page_at(index);
            if let Some(error) = check(page, value) {
                return Some(error);
            }
        }
        if word >= list.len() {
            return Some(PointerError::ListTooSmall);
        }
        list.set(word, value);
        word += 1;
    }
    None
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::AtomicU64;

    const LIST: u64 = 0x10_0000;

    fn words(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    fn read(list: &[AtomicU64]) -> Vec<u64> {
        let view = DmaWords::new(list, Iova(0));
        (0..list.len()).map(|i| view.get(i)).collect()
    }

    #[test]
    fn short_transfers_need_no_list() {
        // (iova, len) -> (prp1, prp2), by hand, 4 KiB pages.
        for (iova, len, prp1, prp2) in [
            (0x1000, 1, 0x1000, 0),
            (0x1000, 4096, 0x1000, 0),
            (0x1004, 4092, 0x1004, 0),
            (0x1004, 4093, 0x1004, 0x2000),
            (0x1FFC, 4, 0x1FFC, 0),
            (0x1FFC, 5, 0x1FFC, 0x2000),
            (0x1FFC, 4100, 0x1FFC, 0x2000),
            (0x1000, 8192, 0x1000, 0x2000),
            (0xFFFF_FFFF_FFFF_F000, 4096, 0xFFFF_FFFF_FFFF_F000, 0),
        ] {
            let got = map(
                PageSize::KIB4,
                Iova(iova),
                len,
                DmaWords::new(&[], Iova(LIST)),
            );
            assert_eq!(got, Ok(PrpPair { prp1, prp2 }), "({iova:#x}, {len})");
        }
    }

    #[test]
    fn longer_transfers_list_every_page_after_the_first() {
        let list = words(512);
        let view = DmaWords::new(&list, Iova(LIST));
        let got = map(PageSize::KIB4, Iova(0x1FFC), 4101, view).unwrap();
        assert_eq!(
            got,
            PrpPair {
                prp1: 0x1FFC,
                prp2: LIST
            }
        );
        assert_eq!(read(&list)[..3], [0x2000, 0x3000, 0]);

        // 513 pages: 512 entries fill the page exactly, and the last one is data, not a chain.
        map(PageSize::KIB4, Iova(0x10000), 513 * 4096, view).unwrap();
        assert_eq!(read(&list)[511], 0x10000 + 512 * 4096);
    }

    #[test]
    fn one_entry_more_than_a_page_chains() {
        let list = words(1024);
        let view = DmaWords::new(&list, Iova(LIST));
        map(PageSize::KIB4, Iova(0x20_0000), 514 * 4096, view).unwrap();
        let got = read(&list);
        assert_eq!(got[510], 0x20_0000 + 511 * 4096);
        assert_eq!(got[511], LIST + 4096);
        assert_eq!(got[512], 0x20_0000 + 512 * 4096);
        assert_eq!(got[513], 0x20_0000 + 513 * 4096);
        assert_eq!(got[514], 0);
        assert_eq!(list_words_from_page(PageSize::KIB4, 513 * 4096), 514);
    }

    #[test]
    fn a_list_may_start_in_the_middle_of_a_page() {
        let list = words(8);
        // Two entries fit before the page ends: 3 pages more need data, chain, data, data.
        let view = DmaWords::new(&list, Iova(LIST + 4096 - 16));
        map(PageSize::KIB4, Iova(0x4000), 4 * 4096, view).unwrap();
        assert_eq!(read(&list)[..5], [0x5000, LIST + 4096, 0x6000, 0x7000, 0]);
    }

    #[test]
    fn pages_of_64_kib_list_in_64_kib_steps() {
        let list = words(16);
        let page = PageSize::from_mps(4).unwrap();
        let view = DmaWords::new(&list, Iova(LIST));
        let got = map(page, Iova(0x1_0010), 3 * 65_536, view).unwrap();
        assert_eq!(
            got,
            PrpPair {
                prp1: 0x1_0010,
                prp2: LIST
            }
        );
        assert_eq!(read(&list)[..4], [0x2_0000, 0x3_0000, 0x4_0000, 0]);
    }

    #[test]
    fn a_table_may_scatter_pages() {
        let list = words(4);
        let view = DmaWords::new(&list, Iova(LIST));
        let pages = [Iova(0x9000), Iova(0x3000), Iova(0x7000)];
        let got = map_table(PageSize::KIB4, 8, 4096 * 2, &pages, view).unwrap();
        assert_eq!(
            got,
            PrpPair {
                prp1: 0x9008,
                prp2: LIST
            }
        );
        assert_eq!(read(&list)[..2], [0x3000, 0x7000]);
        let short = map_table(PageSize::KIB4, 8, 4096 * 3, &pages, view);
        assert_eq!(short, Err(PointerError::TooLong));
        let askew = map_table(PageSize::KIB4, 0, 8192, &[Iova(0x1000), Iova(0x2008)], view);
        assert_eq!(askew, Err(PointerError::Misaligned));
        let table = |offset, pages| map_table(PageSize::KIB4, offset, 512, pages, view);
        assert_eq!(table(0, &[Iova(0x1004)]), Err(PointerError::Misaligned));
        assert_eq!(table(4096, &[Iova(0x1000)]), Err(PointerError::Misaligned));
        assert_eq!(table(0, &[]), Err(PointerError::TooLong));
    }

    #[test]
    fn bad_buffers_are_errors() {
        let none = DmaWords::new(&[], Iova(LIST));
        assert_eq!(
            map(PageSize::KIB4, Iova(0), 0, none),
            Err(PointerError::Empty)
        );
        assert_eq!(
            map(PageSize::KIB4, Iova(2), 4, none),
            Err(PointerError::Misaligned)
        );
        assert_eq!(
            map(PageSize::KIB4, Iova(0), 3 * 4096, none),
            Err(PointerError::ListTooSmall)
        );
        let wraps = map(PageSize::KIB4, Iova(u64::MAX - 3), 8, none);
        assert_eq!(wraps, Err(PointerError::TooLong));
    }

    #[test]
    fn list_words_is_enough_and_not_too_much() {
        // A list that begins with a page, and the worst place for one: the last word of a page.
        let from_page: fn(PageSize, u64) -> usize = list_words_from_page;
        for (at, words_for) in [(LIST, from_page), (LIST + 4088, list_words)] {
            for pages in 1..2000u64 {
                let len = pages * 4096;
                // The worst offset makes the transfer touch one page more.
                let count = words_for(PageSize::KIB4, len);
                let list = words(count);
                let view = DmaWords::new(&list, Iova(at));
                assert!(
                    map(PageSize::KIB4, Iova(0x1FFC), len, view).is_ok(),
                    "{pages} pages"
                );
                if pages > 1 {
                    let less = DmaWords::new(&list[..count - 1], Iova(at));
                    assert_eq!(
                        map(PageSize::KIB4, Iova(0x1FFC), len, less),
                        Err(PointerError::ListTooSmall),
                        "{pages} pages"
                    );
                }
            }
        }
    }
}
