//! Choice of pages by the CPU. The kernels' bounds and choices are compared with it bit by bit, so both must round and
//! break ties alike: among equal bounds the first page wins.

use crate::{KvShape, KvStore};
use nvme_compute_kernel::choose::{FIRST, UNKNOWN, larger, rank_of};
use nvme_host::{Error, Result};

/// Limits of the pages that each head of keys and values attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageLimits {
    /// Number of all pages of a head, at least one and at least `first` + `last`.
    pub pages: u32,
    /// Number of pages at the start of the table that are always selected.
    pub first: u32,
    /// Number of pages at its end that are always selected.
    pub last: u32,
}

impl PageLimits {
    /// # Errors
    /// [`Error::Usage`] for no page, and for fewer than are kept in any case.
    pub fn check(&self) -> Result<()> {
        if self.pages == 0 || self.first.saturating_add(self.last) > self.pages {
            return Err(Error::usage(
                format!(
                    "{} pages of a head must be at least one and hold the first {} and the last {} that are always kept",
                    self.pages, self.first, self.last
                ),
                "choose one page at least, and as many as are kept in any case",
            ));
        }
        Ok(())
    }

    /// Selects pages by their `ranks`, and returns their indices in ascending order: the pages that are always kept,
    /// and among the others those with the largest ranks; among equal ranks the first.
    pub fn choose(&self, ranks: &[u32]) -> Vec<u32> {
        let count = ranks.len();
        let (first, last) = (self.first as usize, self.last as usize);
        let is_kept = |place: usize| place < first || place + last >= count;
        let mut places: Vec<usize> = (0..count).collect();
        places.sort_by_key(|place| (!is_kept(*place), !ranks[*place], *place));
        places.truncate(self.pages as usize);
        places.sort_unstable();
        places.into_iter().map(|place| place as u32).collect()
    }
}

impl KvShape {
    /// Returns the number of bytes of the summary of a page: for each head of keys and values the least and the
    /// largest of its keys, element by element, as they are stored.
    pub fn summary_bytes(&self) -> u64 {
        (u64::from(self.kv_heads) * u64::from(self.head_elements)).saturating_mul(4)
    }

    /// Returns the summary of a page. If an element of a key is NaN, so is the summary's, which ranks the page
    /// first.
    pub fn summary(&self, page: &[u8]) -> Vec<u8> {
        let elements = self.head_elements as usize;
        let mut summary = Vec::with_capacity(self.summary_bytes() as usize);
        for piece in page.chunks(self.piece_bytes() as usize) {
            let halves: Vec<u16> = halves(&piece[..piece.len() / 2]).collect();
            for is_largest in [false, true] {
                for element in 0..elements {
                    let keys = halves.iter().skip(element).step_by(elements).copied();
                    let half = self.extreme(keys, is_largest);
                    summary.extend(half.to_le_bytes());
                }
            }
        }
        summary
    }

    fn extreme(&self, keys: impl Iterator<Item = u16>, is_largest: bool) -> u16 {
        let mut found: Option<(f32, u16)> = None;
        for half in keys {
            let value = self.value(half);
            if value.is_nan() {
                return UNKNOWN;
            }
            let is_further = found.is_none_or(|(best, _)| match is_largest {
                true => value > best,
                false => value < best,
            });
            if is_further {
                found = Some((value, half));
            }
        }
        found.map_or(UNKNOWN, |(_, half)| half)
    }

    /// Returns the rank of a page for the queries of the heads that share the keys of head `kv_head`: larger for a
    /// larger bound of their products with its keys. The bound of a page is the largest one of these queries;
    /// `u32::MAX` if one is not a number.
    pub fn rank(&self, summary: &[u8], kv_head: u32, queries: &[&[f32]]) -> u32 {
        let elements = self.head_elements as usize;
        let mine = summary.get(kv_head as usize * elements * 4..);
        let Some(mine) = mine.and_then(|rest| rest.get(..elements * 4)) else {
            return FIRST;
        };
        let values: Vec<f32> = halves(mine).map(|half| self.value(half)).collect();
        let (least, most) = values.split_at(elements);
        let bound = |query: &&[f32]| {
            let each = query.iter().zip(least.iter().zip(most));
            each.fold(0.0f32, |sum, (query, (least, most))| {
                sum + larger(query * least, query * most)
            })
        };
        queries
            .iter()
            .map(|query| rank_of(bound(query)))
            .max()
            .unwrap_or(0)
    }
}

impl KvStore {
    /// Selects the pages of `ids` to which the heads of `queries` attend, in the order of `ids`; these heads share the
    /// keys of head `kv_head`. `summaries` has the summary of each page of the drive. An id of no page is chosen first,
    /// so that attention reports it.
    ///
    /// # Errors
    /// The errors of [`PageLimits::check`]; [`Error::Usage`] for a head that is not there, and a query of another
    /// length than a head.
    pub fn choose(
        &self,
        queries: &[&[f32]],
        ids: &[u32],
        kv_head: u32,
        summaries: &[u8],
        keep: PageLimits,
    ) -> Result<Vec<u32>> {
        keep.check()?;
        self.check_queries(queries)?;
        if kv_head >= self.shape().kv_heads {
            return Err(Error::usage(
                format!("head {kv_head} does not exist"),
                format!("there are {} heads", self.shape().kv_heads),
            ));
        }
        let each = self.shape().summary_bytes() as usize;
        let rank = |id: &u32| {
            let first = (*id as usize).saturating_mul(each);
            let summary = summaries.get(first..).unwrap_or_default();
            self.shape().rank(summary, kv_head, queries)
        };
        let ranks: Vec<u32> = ids.iter().map(rank).collect();
        Ok(keep
            .choose(&ranks)
            .into_iter()
            .map(|place| ids[place as usize])
            .collect())
    }

    /// Returns the summaries of pages `first` to `first` + `count`, which are read from the store.
    ///
    /// # Errors
    /// [`Error::Usage`] for pages that do not exist; the errors of `Store::read_at`.
    pub fn summaries(&self, first: u64, count: u64) -> Result<Vec<u8>> {
        let end = first.checked_add(count);
        if end.is_none_or(|end| end > self.table().rows()) {
            return Err(Error::usage(
                format!("the range of {count} pages from page {first} ends past the last page"),
                format!("there are {}", self.table().rows()),
            ));
        }
        let mut page = vec![0; self.shape().page_bytes() as usize];
        let mut summaries = Vec::new();
        for id in first..first + count {
            let at = self.table().offset() + id * self.shape().page_bytes();
            self.store().read_at(at, &mut page)?;
            summaries.extend(self.shape().summary(&page));
        }
        Ok(summaries)
    }
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|half| u16::from_le_bytes(*half))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dice(seed: u64) -> impl FnMut() -> f32 {
        let mut state = seed;
        move || {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        }
    }

    #[test]
    fn no_product_is_larger_than_the_bound() {
        for (round, is_bf16) in [(1, false), (2, true), (3, false), (4, true)] {
            let shape = KvShape {
                kv_heads: 3,
                head_elements: 24,
                page_tokens: 7,
                is_bf16,
            };
            let mut throw = dice(round);
            let halves: Vec<u16> = (0..shape.page_bytes() / 2)
                .map(|_| shape.stored(throw() * 3.0))
                .collect();
            let page: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
            let summary = shape.summary(&page);
            assert_eq!(summary.len() as u64, shape.summary_bytes());
            for kv_head in 0..3 {
                let query: Vec<f32> = (0..24).map(|_| throw()).collect();
                let rank = shape.rank(&summary, kv_head, &[&query]);
                let keys = &halves[kv_head as usize * 2 * 7 * 24..][..7 * 24];
                for key in keys.chunks(24) {
                    // The product is summed in the order of the bound's sum, each of whose terms is at least as large.
                    let each = query.iter().zip(key);
                    let product = each.fold(0.0f32, |sum, (q, k)| sum + q * shape.value(*k));
                    assert!(rank_of(product) <= rank);
                }
            }
        }
    }

    #[test]
    fn pages_with_equal_bounds_are_taken_from_the_begin() {
        let keep = |pages, first, last| PageLimits { pages, first, last };
        assert_eq!(keep(3, 0, 0).choose(&[5, 9, 5, 5, 9]), [0, 1, 4]);
        assert_eq!(keep(3, 1, 1).choose(&[1, 7, 7, 7, 1]), [0, 1, 4]);
        assert_eq!(keep(2, 1, 1).choose(&[1, 7, 7, 7, 1]), [0, 4]);
        assert_eq!(keep(9, 1, 1).choose(&[1, 7]), [0, 1]);
        assert_eq!(keep(1, 0, 0).choose(&[]), [0; 0]);
        assert!(keep(0, 0, 0).check().is_err());
        assert!(keep(3, 2, 2).check().is_err());
        assert!(keep(3, u32::MAX, 2).check().is_err());
        assert!(keep(4, 2, 2).check().is_ok());
    }

    #[test]
    fn choices_by_other_heads_or_shorter_queries_are_refused() {
        let device = "sim:mem?size=4MiB&block=512";
        let store = nvme_host::Store::open(device, &nvme_host::StoreOptions::default()).unwrap();
        let shape = KvShape {
            kv_heads: 2,
            head_elements: 8,
            page_tokens: 16,
            is_bf16: false,
        };
        let pages = KvStore::new(&std::sync::Arc::new(store), 0, 4, shape).unwrap();
        let summaries = pages.summaries(0, 4).unwrap();
        let keep = PageLimits {
            pages: 1,
            first: 0,
            last: 0,
        };
        let choose = |query: &[f32], kv_head: u32| {
            let found = pages.choose(&[query], &[2, 1], kv_head, &summaries, keep);
            found.map_err(|error| error.to_string())
        };
        assert_eq!(choose(&[1.0; 8], 1), Ok(vec![2]));
        let says = |found: std::result::Result<Vec<u32>, String>, text: &str| {
            let error = found.unwrap_err();
            assert!(error.contains(text), "{error}");
        };
        says(choose(&[1.0; 8], 2), "head 2 does not exist");
        says(choose(&[1.0; 7], 1), "a query has 7 elements, a head 8");
    }

    #[test]
    fn what_is_not_a_number_comes_first() {
        let shape = KvShape {
            kv_heads: 1,
            head_elements: 8,
            page_tokens: 2,
            is_bf16: false,
        };
        let mut page = vec![0u8; shape.page_bytes() as usize];
        page[2 * (8 + 3)..][..2].copy_from_slice(&0x7E00u16.to_le_bytes());
        let summary = shape.summary(&page);
        assert_eq!(&summary[6..8], UNKNOWN.to_le_bytes());
        assert_eq!(shape.rank(&summary, 0, &[&[1.0; 8]]), FIRST);
        // Neither is a page of another head, or of no head.
        assert_eq!(shape.rank(&summary, 1, &[&[1.0; 8]]), FIRST);
    }
}
