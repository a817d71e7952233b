//! Page selection for sparse attention (Quest, MLSys 2024): summaries of a page's keys, upper bounds of its
//! products with a query, and the pages with the largest bounds. Kernels, and the choice on the CPU, run the same
//! plain code.
//!
//! A summary of a page has, for each head of keys and values, the minimum and the maximum of its keys,
//! element by element: `head_elements` halves each, in the number format of the keys. The bound of a query is
//! the sum over the elements of the larger of `query * minimum` and `query * maximum`: no product of the
//! query with a key of the page is larger. The bound of a page for a head is the largest over the queries of
//! the heads that share its keys.
//!
//! The order of launches: [`SummarisePages`] once for new pages; then, for each token, the kernels that score
//! and select by [`ChoosePages`], and attention over the selected pages.

#[cfg(all(target_arch = "nvptx64", feature = "choose"))]
mod arch;
#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
#[path = "lanes.rs"]
mod arch;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "choose"))]
mod kernel;

#[cfg(all(not(target_arch = "nvptx64"), feature = "lanes"))]
pub use kernel::{nvme_choose_pages, nvme_page_summaries, nvme_score_pages};

/// Both halves of a summary's element if a key is not a number, and before the summary is written: NaN in f16
/// and in bf16.
pub const UNKNOWN: u16 = 0xFFFF;
/// Rank of a page whose bound is not a number, and of a page number that the table does not have. Such pages are
/// selected first: nothing of unknown weight is left out, and attention reports the bad number.
pub const FIRST: u32 = u32::MAX;
/// Bins of a pass over the ranks: one for each value of eight bits.
pub const BINS: u32 = 256;
/// Bins that one lane adds up.
pub const LANE_BINS: u32 = BINS / 32;

/// Parameters of the kernel that summarises pages in GPU memory.
///
/// Argument of `nvme_page_summaries`. Summaries of other pages are kept, so only new or changed pages have to
/// be listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SummarisePages {
    /// Address of `count` pages, `page_stride` bytes apart; a multiple of 4.
    pub pages: u64,
    /// Address of their numbers, an `i64` each, all different. Numbers not below `page_count` are skipped.
    pub ids: u64,
    /// Address of `page_count` summaries.
    pub summaries: u64,
    /// Pages to summarise.
    pub count: u64,
    /// Distance of pages in bytes, a multiple of 4.
    pub page_stride: u64,
    /// Pages of the drive.
    pub page_count: u64,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a head, a multiple of 8.
    pub head_elements: u32,
    /// Tokens of a page, at least one.
    pub page_tokens: u32,
    /// 1 for bf16, 0 for f16.
    pub is_bf16: u32,
}

/// Parameters of the kernels that select pages for each head of keys and values of each sequence.
///
/// Argument of `nvme_score_pages` and then of `nvme_choose_pages`, on one stream. Heads with at most `keep`
/// pages get all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ChoosePages {
    /// Address of `sequences` times `heads` vectors of `head_elements` numbers; a multiple of 16.
    pub queries: u64,
    /// As [`PagedAttention::pages`](crate::PagedAttention::pages).
    pub pages: u64,
    /// As [`PagedAttention::counts`](crate::PagedAttention::counts).
    pub counts: u64,
    /// Address of `page_count` summaries; a multiple of 16.
    pub summaries: u64,
    /// Address of space for a rank of each page of each head: `most_pages` words a head.
    pub ranks: u64,
    /// Address of the result: the numbers of the selected pages in the order of the table, `keep` words a
    /// head.
    pub chosen: u64,
    /// Address of the number of selected pages, a word a head.
    pub chosen_counts: u64,
    /// Pages of the drive.
    pub page_count: u64,
    /// Number of sequences.
    pub sequences: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values: `heads` is a multiple.
    pub kv_heads: u32,
    /// Elements of a head, a multiple of 8.
    pub head_elements: u32,
    /// As [`PagedAttention::sequence_stride`](crate::PagedAttention::sequence_stride).
    pub sequence_stride: u32,
    /// As [`PagedAttention::head_stride`](crate::PagedAttention::head_stride).
    pub head_stride: u32,
    /// Limit of the pages of a sequence.
    pub most_pages: u32,
    /// Pages to select for each head, at least `first` + `last`.
    pub keep: u32,
    /// Number of pages at the start of the table that are always selected.
    pub first: u32,
    /// Number of pages at the end of the table that are always selected.
    pub last: u32,
    /// 1 for bf16, 0 for f16.
    pub is_bf16: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Memory by address, as a kernel loads and stores it: by instructions of the GPU, or by lanes on the host.
pub trait MemoryAccess: Copy {
    /// Loads the word at `address`, a multiple of 4.
    fn word(self, address: u64) -> u32;
    /// Stores a word.
    fn put(self, address: u64, word: u32);
    /// Loads four words; `address` is a multiple of 16.
    fn four(self, address: u64) -> [u32; 4];
    /// Loads two words; `address` is a multiple of 8.
    fn two(self, address: u64) -> [u32; 2];
    /// Converts the halves of a word to numbers, the lower one first.
    fn pair(self, word: u32, is_bf16: bool) -> [f32; 2];
}

impl SummarisePages {
    /// Returns the number of work items of [`element_pair`](Self::element_pair).
    pub const fn pairs(&self) -> u64 {
        self.count * self.kv_heads as u64 * (self.head_elements / 2) as u64
    }

    /// Writes the minimum and the maximum of two elements of a head of a page: work item `index`.
    #[inline(always)]
    pub fn element_pair(&self, memory: impl MemoryAccess, index: u64) {
        let half = u64::from(self.head_elements / 2);
        let (pair, index) = (index % half, index / half);
        let kv_heads = u64::from(self.kv_heads);
        let (head, page) = (index % kv_heads, index / kv_heads);
        let id = u64::from(memory.word(self.ids + page * 8))
            | u64::from(memory.word(self.ids + page * 8 + 4)) << 32;
        if id >= self.page_count {
            return;
        }
        let key_bytes = u64::from(self.head_elements) * 2;
        let piece = u64::from(self.page_tokens) * key_bytes * 2;
        let is_bf16 = self.is_bf16 != 0;
        let mut at = self.pages + page * self.page_stride + head * piece + pair * 4;
        let word = memory.word(at);
        let [a, b] = memory.pair(word, is_bf16);
        let (mut low, mut high) = (
            NumberExtremes::of(word as u16, a),
            NumberExtremes::of((word >> 16) as u16, b),
        );
        let mut token = 1;
        while token < self.page_tokens {
            at += key_bytes;
            let word = memory.word(at);
            let [a, b] = memory.pair(word, is_bf16);
            low.add(word as u16, a);
            high.add((word >> 16) as u16, b);
            token += 1;
        }
        let to = self.summaries + (id * kv_heads + head) * key_bytes * 2 + pair * 4;
        let ((low_least, low_most), (high_least, high_most)) = (low.halves(), high.halves());
        memory.put(to, u32::from(low_least) | u32::from(high_least) << 16);
        memory.put(
            to + key_bytes,
            u32::from(low_most) | u32::from(high_most) << 16,
        );
    }
}

/// The minimum and the maximum of some numbers, with their stored halves.
struct NumberExtremes {
    least: f32,
    most: f32,
    least_half: u16,
    most_half: u16,
    is_unknown: bool,
}

impl NumberExtremes {
    #[inline(always)]
    fn of(half: u16, value: f32) -> Self {
        Self {
            least: value,
            most: value,
            least_half: half,
            most_half: half,
            is_unknown: value.is_nan(),
        }
    }

    #[inline(always)]
    fn add(&mut self, half: u16, value: f32) {
        self.is_unknown |= value.is_nan();
        if value < self.least {
            (self.least, self.least_half) = (value, half);
        }
        if value > self.most {
            (self.most, self.most_half) = (value, half);
        }
    }

    #[inline(always)]
    fn halves(&self) -> (u16, u16) {
        match self.is_unknown {
            true => (UNKNOWN, UNKNOWN),
            false => (self.least_half, self.most_half),
        }
    }
}

/// Returns the larger number; the second one if one is not a number.
#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Maps a bound to an integer of the same order; [`FIRST`] for a bound that is not a number.
#[inline(always)]
pub fn rank_of(bound: f32) -> u32 {
    let bits = bound.to_bits();
    let order = match bits >> 31 {
        // Makes the bits of a float compare like the float: positive numbers get the upper bit, negative ones
        // are inverted.
        0 => bits | 1 << 31,
        _ => !bits,
    };
    if bound.is_nan() { FIRST } else { order }
}

/// Expands the block for each number below eight, as a constant of the given name, so that arrays stay in
/// registers.
macro_rules! eight {
    ($i:ident => $body:block) => { eight!($i in 0 1 2 3 4 5 6 7 => $body) };
    ($i:ident in $($number:literal)* => $body:block) => {{
        $({ const $i: usize = $number; $body })*
    }};
}

impl ChoosePages {
    /// Returns the heads of keys and values of all sequences.
    pub const fn rows(&self) -> u64 {
        self.sequences as u64 * self.kv_heads as u64
    }

    /// Returns the address of the page numbers of head `row`.
    #[inline(always)]
    fn table(&self, row: u64) -> u64 {
        let kv_heads = u64::from(self.kv_heads);
        let index = row / kv_heads * u64::from(self.sequence_stride)
            + row % kv_heads * u64::from(self.head_stride);
        self.pages + index * 4
    }

    /// Loads the number of pages of head `row`.
    #[inline(always)]
    pub fn count(&self, memory: impl MemoryAccess, row: u64) -> u32 {
        let index = match self.head_stride {
            0 => row / u64::from(self.kv_heads),
            _ => row,
        };
        memory.word(self.counts + index * 4).min(self.most_pages)
    }

    /// Loads the number of the page at index `place` of the table.
    #[inline(always)]
    pub fn page(&self, memory: impl MemoryAccess, row: u64, place: u32) -> u32 {
        memory.word(self.table(row) + u64::from(place) * 4)
    }

    /// Returns the address of the rank of the page at index `place` of the table.
    #[inline(always)]
    pub const fn rank_address(&self, row: u64, place: u32) -> u64 {
        self.ranks + (row * self.most_pages as u64 + place as u64) * 4
    }

    /// Returns the address of selected page `index` in the result.
    #[inline(always)]
    pub const fn chosen_address(&self, row: u64, index: u32) -> u64 {
        self.chosen + (row * self.keep as u64 + index as u64) * 4
    }

    /// True if the page at index `place` of `count` is always selected.
    #[inline(always)]
    pub fn is_kept(&self, place: u32, count: u32) -> bool {
        place < self.first || place >= count - self.last.min(count)
    }

    /// Returns the number of pages to select by rank, or `None` if all pages are selected.
    #[inline(always)]
    pub fn wanted(&self, count: u32) -> Option<u32> {
        let kept = self.first.saturating_add(self.last);
        (count > self.keep).then(|| self.keep.saturating_sub(kept))
    }

    /// Computes the rank of the page at index `place` for the queries of head `row`.
    ///
    /// Sums are added in the order of the elements, so that the stand-in on the host gets the same bits as
    /// the GPU.
    #[inline(always)]
    pub fn rank(&self, memory: impl MemoryAccess, row: u64, place: u32) -> u32 {
        let page = u64::from(self.page(memory, row, place));
        if page >= self.page_count {
            return FIRST;
        }
        let kv_heads = u64::from(self.kv_heads);
        let is_bf16 = self.is_bf16 != 0;
        let half_bytes = u64::from(self.head_elements) * 2;
        let summary = self.summaries + (page * kv_heads + row % kv_heads) * half_bytes * 2;
        let group = self.heads / self.kv_heads;
        let first = self.queries + row * u64::from(group) * half_bytes * 2;
        // The last query again for numbers past the group: a repeated query changes no maximum.
        let query = |number: u32| first + u64::from(number.min(group - 1)) * half_bytes * 2;
        let (mut best, mut chunk) = (0, 0);
        while chunk < group {
            let mut sums = [0.0f32; 8];
            let mut element = 0;
            while element < u64::from(self.head_elements) {
                let four = |from: u64| {
                    let [a, b] = memory.two(from + element * 2);
                    let ([a, b], [c, d]) = (memory.pair(a, is_bf16), memory.pair(b, is_bf16));
                    [a, b, c, d]
                };
                let (least, most) = (four(summary), four(summary + half_bytes));
                eight!(Q => {
                    let [a, b, c, d] = memory.four(query(chunk + Q as u32) + element * 4);
                    let term = |bits: u32, least: f32, most: f32| {
                        let query = f32::from_bits(bits);
                        larger(query * least, query * most)
                    };
                    sums[Q] += term(a, least[0], most[0]);
                    sums[Q] += term(b, least[1], most[1]);
                    sums[Q] += term(c, least[2], most[2]);
                    sums[Q] += term(d, least[3], most[3]);
                });
                element += 4;
            }
            eight!(Q => { best = best.max(rank_of(sums[Q])); });
            chunk += 8;
        }
        best
    }
}

/// Finds the bin, from the highest on, that contains element number `wanted` (1 is the first), and the number
/// of elements wanted from that bin.
///
/// `group` returns the sum of [`LANE_BINS`] bins, `bin` one count.
#[inline(always)]
pub fn narrow(wanted: u32, group: impl Fn(u32) -> u32, bin: impl Fn(u32) -> u32) -> (u32, u32) {
    let (mut left, mut of_group) = (wanted, 31);
    while of_group > 0 {
        let count = group(of_group);
        if count >= left {
            break;
        }
        left -= count;
        of_group -= 1;
    }
    let mut number = of_group * LANE_BINS + LANE_BINS - 1;
    while number > of_group * LANE_BINS {
        let count = bin(number);
        if count >= left {
            break;
        }
        left -= count;
        number -= 1;
    }
    (number, left)
}

/// A selection by rank: the pages with a rank above `rank`, and the first `equal` pages with exactly that
/// rank.
///
/// Pages with a rank equal to the threshold are selected in the order of the table, so that the result is the
/// same on every GPU and on the host, although several pages may have one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankThreshold {
    /// Rank of the last selected page.
    pub rank: u32,
    /// Number of pages with this rank.
    pub equal: u32,
}

impl RankThreshold {
    /// Selects all pages.
    pub const ALL: Self = Self {
        rank: 0,
        equal: u32::MAX,
    };
    /// Selects no page.
    pub const NONE: Self = Self {
        rank: u32::MAX,
        equal: 0,
    };

    /// Computes the threshold of the `wanted` largest ranks by a radix selection: four passes over eight bits
    /// each, from the highest on.
    ///
    /// `pass` receives the bits above those of the pass, the shift of a rank, and the number wanted among the
    /// ranks with those upper bits; it counts them by [`bin_of`] and returns the result of [`narrow`].
    #[inline(always)]
    pub fn of(wanted: u32, mut pass: impl FnMut(u32, u32, u32) -> (u32, u32)) -> Self {
        if wanted == 0 {
            return Self::NONE;
        }
        let (mut rank, mut equal, mut shift) = (0, wanted, 32);
        while shift > 0 {
            shift -= 8;
            let (bin, left) = pass(rank, shift, equal);
            rank = rank << 8 | bin;
            equal = left;
        }
        Self { rank, equal }
    }
}

/// Returns the bin of `rank` in the pass that shifts by `shift`, or `None` unless its upper bits are `above`.
#[inline(always)]
pub const fn bin_of(rank: u32, above: u32, shift: u32) -> Option<u32> {
    let bits = rank >> shift;
    match bits >> 8 == above {
        true => Some(bits & (BINS - 1)),
        false => None,
    }
}

#[cfg(test)]
mod tests;
