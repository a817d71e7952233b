//! The ends and chain pointers of PRP lists, with one entry more and less than every full page: a walk that follows the
//! specification alone reads the lists that the core wrote.
#![cfg(not(loom))]

use nvme_core::PointerError;
use nvme_core::mem::DmaWords;
use nvme_core::prp::{self, PrpPair};
use nvme_core::spec::{Iova, PageSize};
use nvme_core::sync::AtomicU64;

/// Start of the list memory; no data page has an address there.
const LISTS: u64 = 0x4000_0000_0000;
/// A word that was never written. No entry and no pointer has this value.
const UNWRITTEN: u64 = 0xA5A5_A5A5_A5A5_A5A5;

/// List memory as the controller reads it.
struct Lists {
    words: Vec<AtomicU64>,
    iova: Iova,
}

impl Lists {
    fn new(iova: u64, words: usize) -> Self {
        let words = (0..words).map(|_| AtomicU64::new(UNWRITTEN)).collect();
        let iova = Iova(iova);
        Self { words, iova }
    }

    fn view(&self) -> DmaWords<'_> {
        DmaWords::new(&self.words, self.iova)
    }

    /// Returns the word that the controller reads at `address`.
    fn read(&self, address: u64) -> u64 {
        let bytes = address.checked_sub(self.iova.0).expect("below the lists");
        assert_eq!(bytes % 8, 0, "entries are 8 bytes");
        let index = (bytes / 8) as usize;
        assert!(index < self.words.len(), "beyond the lists");
        let value = self.view().get(index);
        assert_ne!(value, UNWRITTEN, "entry {index} was never written");
        value
    }

    fn written(&self) -> usize {
        let view = self.view();
        let written = |&index: &usize| view.get(index) != UNWRITTEN;
        (0..self.words.len()).filter(written).count()
    }
}

/// Result of a controller's walk through PRP1, PRP2 and the lists.
#[derive(Debug, Default, PartialEq, Eq)]
struct Walk {
    /// The pages of data, as (address, bytes).
    data: Vec<(u64, u64)>,
    /// Number of list entries that point to data.
    entries: u64,
    /// Number of list entries that point to the next list page.
    chains: u64,
}

/// NVMe Base 2.0c, "Physical Region Page Entry and List": PRP1 may have an offset. PRP2 is reserved
/// when the data end in PRP1's page, is the second page when they end there, and points to a list
/// otherwise. The last entry within a memory page of a list is a pointer to the next list when more
/// than one memory page of data is still to be transferred, and data when not; no other entry is a
/// pointer. Entries have no offset.
fn walk(page: u64, prps: PrpPair, len: u64, lists: &Lists) -> Walk {
    let mut found = Walk::default();
    let first = len.min(page - prps.prp1 % page);
    found.data.push((prps.prp1, first));
    let mut left = len - first;
    if left == 0 {
        assert_eq!(prps.prp2, 0, "PRP2 is reserved");
    } else if left <= page {
        assert_eq!(prps.prp2 % page, 0, "the second page has no offset");
        found.data.push((prps.prp2, left));
    } else {
        let mut at = prps.prp2;
        while left > 0 {
            let entry = lists.read(at);
            assert_eq!(entry % page, 0, "an entry or a chained list has no offset");
            if (at + 8).is_multiple_of(page) && left > page {
                found.chains += 1;
                at = entry;
            } else {
                found.entries += 1;
                let bytes = left.min(page);
                found.data.push((entry, bytes));
                left -= bytes;
                at += 8;
            }
        }
    }
    found
}

/// A buffer that needs a list of `entries` entries.
struct Case {
    page: PageSize,
    /// Offset of the buffer in its first page.
    offset: u64,
    entries: u64,
    /// Bytes in the last page.
    last: u64,
    /// Offset of the list in its first page.
    list_offset: u64,
    /// Number of pointers to a next list page that the list must have.
    chains: u64,
}

impl Case {
    fn len(&self) -> u64 {
        let page = self.page.bytes();
        page - self.offset + (self.entries - 1) * page + self.last
    }

    /// Maps the buffer, contiguous and scattered, and compares the pages that a controller finds with it.
    fn check(&self) {
        let page = self.page.bytes();
        let base = 0x7_0000_0000 / page * page;
        let contiguous: Vec<Iova> = (0..=self.entries)
            .map(|index| Iova(base + index * page))
            .collect();
        // The pages are every other one, backwards, so that no two are neighbours.
        let scattered: Vec<Iova> = (0..=self.entries)
            .map(|index| Iova(base + 2 * (self.entries - index) * page))
            .collect();
        for (pages, in_one_piece) in [
            (&contiguous, true),
            (&contiguous, false),
            (&scattered, false),
        ] {
            let map = |view| match in_one_piece {
                true => prp::map(self.page, pages[0].offset(self.offset), self.len(), view),
                false => prp::map_table(self.page, self.offset, self.len(), pages, view),
            };
            let need = (self.entries + self.chains) as usize;
            // The list has more room than it needs, which shows that no word past its end is written.
            let lists = Lists::new(LISTS + self.list_offset, need + 600);
            let prps = map(lists.view()).expect("a valid buffer");
            let told = format!(
                "{} entries from {:#x}, the last page with {}, list at {:#x} of pages of {page}",
                self.entries, self.offset, self.last, self.list_offset
            );
            assert_eq!(prps.prp2, lists.iova.0, "{told}");
            let found = walk(page, prps, self.len(), &lists);
            let mut data = vec![(pages[0].0 + self.offset, page - self.offset)];
            data.extend(pages[1..].iter().map(|at| (at.0, page)));
            data.last_mut().expect("pages").1 = self.last;
            let expected = Walk {
                data,
                entries: self.entries,
                chains: self.chains,
            };
            assert!(
                found == expected,
                "{told}: {} entries and {} chains, or other pages",
                found.entries,
                found.chains
            );
            assert_eq!(lists.written(), need, "{told}: words written");

            // A list with exactly the counted words suffices; with one word less it is refused.
            let enough = Lists::new(lists.iova.0, need);
            assert_eq!(map(enough.view()), Ok(prps), "{told}");
            let less = Lists::new(lists.iova.0, need - 1);
            assert_eq!(map(less.view()), Err(PointerError::ListTooSmall), "{told}");
        }
    }

    /// Checks each case of `table` with whole and with partial first and last pages.
    fn check_all(page: PageSize, list_offset: u64, table: &[(u64, u64)]) {
        for &(entries, chains) in table {
            for offset in [0, 4, page.bytes() / 2, page.bytes() - 4] {
                for last in [1, page.bytes() - 1, page.bytes()] {
                    let case = Case {
                        page,
                        offset,
                        entries,
                        last,
                        list_offset,
                        chains,
                    };
                    case.check();
                }
            }
        }
    }
}

/// 4 KiB hold 512 entries. All of them are data as long as nothing follows; then each page but the
/// last has 511 and a pointer: 511 + 512 = 1,023, and 511 + 511 + 512 = 1,534.
#[test]
fn a_full_page_chains_only_when_an_entry_follows() {
    let table = [
        (2, 0),
        (511, 0),
        (512, 0),
        (513, 1),
        (514, 1),
        (1022, 1),
        (1023, 1),
        (1024, 2),
        (1025, 2),
        (1533, 2),
        (1534, 2),
        (1535, 3),
    ];
    Case::check_all(PageSize::KIB4, 0, &table);
}

/// The words of the two lists were written by hand.
#[test]
fn the_last_word_of_a_page_is_data_of_512_entries_and_a_pointer_of_513() {
    let map = |entries: u64, lists: &Lists| {
        prp::map(
            PageSize::KIB4,
            Iova(0x10_0E00),
            512 + entries * 4096,
            lists.view(),
        )
        .unwrap()
    };
    let prps = |prp1| PrpPair { prp1, prp2: LISTS };
    let lists = Lists::new(LISTS, 1024);
    assert_eq!(map(512, &lists), prps(0x10_0E00));
    assert_eq!(lists.read(LISTS), 0x10_1000);
    assert_eq!(lists.read(LISTS + 0xFF0), 0x2F_F000);
    assert_eq!(lists.read(LISTS + 0xFF8), 0x30_0000);
    assert_eq!(lists.written(), 512);

    let lists = Lists::new(LISTS, 1024);
    assert_eq!(map(513, &lists), prps(0x10_0E00));
    assert_eq!(lists.read(LISTS + 0xFF0), 0x2F_F000);
    assert_eq!(lists.read(LISTS + 0xFF8), LISTS + 0x1000);
    assert_eq!(lists.read(LISTS + 0x1000), 0x30_0000);
    assert_eq!(lists.read(LISTS + 0x1008), 0x30_1000);
    assert_eq!(lists.written(), 514);
}

/// A list that begins inside a page has what is left of that page, down to one word: a pointer at once
/// when there are two entries. The pages that follow are whole.
#[test]
fn a_list_inside_a_page_chains_at_that_pages_end() {
    Case::check_all(
        PageSize::KIB4,
        4096 - 8,
        &[(2, 1), (512, 1), (513, 2), (1023, 2), (1024, 3)],
    );
    Case::check_all(
        PageSize::KIB4,
        4096 - 16,
        &[(2, 0), (3, 1), (513, 1), (514, 2), (1024, 2), (1025, 3)],
    );
    Case::check_all(
        PageSize::KIB4,
        2048,
        &[(255, 0), (256, 0), (257, 1), (767, 1), (768, 2), (1279, 3)],
    );
}

#[test]
fn larger_pages_hold_longer_lists() {
    let kib8 = PageSize::from_mps(1).unwrap();
    let table = [(1023, 0), (1024, 0), (1025, 1), (2047, 1), (2048, 2)];
    Case::check_all(kib8, 0, &table);
    // 4 KiB of a page of 8 KiB are left: its middle is no end.
    Case::check_all(kib8, 4096, &[(512, 0), (513, 1), (1535, 1), (1536, 2)]);
    let kib64 = PageSize::from_mps(4).unwrap();
    Case::check_all(kib64, 0, &[(512, 0), (513, 0), (8192, 0), (8193, 1)]);
}

/// The host reserves as many words as the longest list of that length takes: one that begins with the last word of a
/// page, which is a chain pointer.
#[test]
fn list_words_count_the_chains_of_the_worst_offset() {
    for (entries, chains) in [
        (511, 0),
        (512, 0),
        (513, 1),
        (1023, 1),
        (1024, 2),
        (1534, 2),
        (1535, 3),
    ] {
        // As long as it can be: the first page has 4 bytes, the last one all but 4.
        let len = entries * 4096;
        assert_eq!(
            prp::list_words(PageSize::KIB4, len) as u64,
            1 + entries + chains,
            "{entries} entries"
        );
    }
}
