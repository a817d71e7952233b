//! Pages of keys and values: the location of a head's part of a page, and the assignment of a launch's work
//! to warps. Plain code, which the host and the stand-in of CUDA run, too.

use crate::PagedAttention;

/// Queries that a warp computes together: those of heads that share keys and values.
pub const QUERIES: usize = 8;
/// Limit of the elements of a head.
pub const MOST_ELEMENTS: u32 = 128;
/// Limit of the parts of a query's pages.
pub const MOST_SPLITS: u32 = 64;

/// A part of the pages of a head of a sequence, for up to [`QUERIES`] queries.
///
/// A warp computes one part from start to end; the second kernel joins the parts of the same query. More
/// parts keep more warps busy when there are few sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagePart {
    /// Number of the sequence.
    pub sequence: u32,
    /// Number of the head of keys and values.
    pub kv_head: u32,
    /// Number of the group of [`QUERIES`] queries within those of the head.
    pub chunk: u32,
    /// Number of the part of the pages.
    pub split: u32,
}

impl PagePart {
    /// Returns the number by which a launch reports the part: sequence and head combined.
    pub const fn row(&self, attention: &PagedAttention) -> u64 {
        self.sequence as u64 * attention.kv_heads as u64 + self.kv_head as u64
    }

    /// Returns the number of its queries.
    pub fn queries(&self, attention: &PagedAttention) -> u32 {
        let group = attention.heads / attention.kv_heads;
        (group - self.chunk * QUERIES as u32).min(QUERIES as u32)
    }
}

impl PagedAttention {
    /// Returns the number of groups of [`QUERIES`] queries of a head.
    const fn chunks(&self) -> u32 {
        (self.heads / self.kv_heads).div_ceil(QUERIES as u32)
    }

    /// Returns the number of parts.
    pub const fn parts(&self) -> u64 {
        self.sequences as u64 * self.kv_heads as u64 * self.chunks() as u64 * self.splits as u64
    }

    /// Returns part `item`.
    pub const fn part(&self, item: u64) -> PagePart {
        let (item, split) = (item / self.splits as u64, item % self.splits as u64);
        let (item, chunk) = (item / self.chunks() as u64, item % self.chunks() as u64);
        PagePart {
            sequence: (item / self.kv_heads as u64) as u32,
            kv_head: (item % self.kv_heads as u64) as u32,
            chunk: chunk as u32,
            split: split as u32,
        }
    }

    /// Returns log2 of the lanes that hold a token of a head, four elements each.
    pub const fn lane_shift(&self) -> u32 {
        match self.head_elements {
            ..=32 => 3,
            33..=64 => 4,
            _ => 5,
        }
    }

    /// Returns the bytes of a head's keys and values in a page.
    pub const fn piece_bytes(&self) -> u32 {
        self.page_tokens * self.head_elements * 4
    }

    /// Returns the first byte, in the namespace, of the part's share of page `page`.
    pub const fn byte(&self, part: &PagePart, page: u64) -> u64 {
        self.rows.first_byte
            + page * self.rows.row_bytes as u64
            + part.kv_head as u64 * self.piece_bytes() as u64
    }

    /// Returns the address of the part's tokens in GPU memory.
    pub const fn tail_piece(&self, part: &PagePart) -> u64 {
        self.tail + part.row(self) * self.piece_bytes() as u64
    }

    /// Returns the address of the part's page numbers.
    pub const fn table(&self, part: &PagePart) -> u64 {
        let index = part.sequence as u64 * self.sequence_stride as u64
            + part.kv_head as u64 * self.head_stride as u64;
        self.pages + index * 4
    }

    /// Returns the address of the number of pages.
    pub const fn count_address(&self, part: &PagePart) -> u64 {
        let index = match self.head_stride {
            0 => part.sequence as u64,
            _ => part.row(self),
        };
        self.counts + index * 4
    }

    /// Returns the part's share of `count` pages, as the first one and one past the last.
    pub const fn share(&self, part: &PagePart, count: u32) -> (u64, u64) {
        let count = if count < self.most_pages {
            count
        } else {
            self.most_pages
        } as u64;
        let splits = self.splits as u64;
        let split = part.split as u64;
        (count * split / splits, count * (split + 1) / splits)
    }

    /// Returns the number of query `query` of the part among all queries.
    pub const fn vector(&self, part: &PagePart, query: u32) -> u64 {
        let group = self.heads / self.kv_heads;
        let head = part.kv_head * group + part.chunk * QUERIES as u32 + query;
        part.sequence as u64 * self.heads as u64 + head as u64
    }

    /// Returns the number of the part's partial sum for query `query`.
    pub const fn partial_index(&self, part: &PagePart, query: u32) -> u64 {
        self.vector(part, query) * self.splits as u64 + part.split as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn parts_cover_every_query_and_every_page_once() {
        for (sequences, heads, kv_heads, splits, pages) in [
            (1, 1, 1, 1, 1),
            (3, 8, 2, 5, 7),
            (2, 32, 2, 3, 100),
            (1, 22, 1, 64, 9),
        ] {
            let attention = PagedAttention {
                sequences,
                heads,
                kv_heads,
                splits,
                head_elements: 64,
                page_tokens: 16,
                most_pages: pages,
                ..PagedAttention::default()
            };
            let mut seen = BTreeSet::new();
            for item in 0..attention.parts() {
                let part = attention.part(item);
                let (from, until) = attention.share(&part, pages + 5);
                for query in 0..part.queries(&attention) {
                    let vector = attention.vector(&part, query);
                    assert!(
                        attention.partial_index(&part, query)
                            < vector * u64::from(splits) + u64::from(splits)
                    );
                    for page in from..until {
                        assert!(seen.insert((vector, page)), "twice");
                    }
                }
            }
            assert_eq!(seen.len() as u32, sequences * heads * pages);
        }
    }
}
