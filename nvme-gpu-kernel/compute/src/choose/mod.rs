//! Choice of pages for sparse attention (Quest, MLSys 2024): what is kept of a page's keys, a bound of its products, and
//! the pages with the largest bounds. Plain code that the kernels and the stand-in of CUDA run alike.
//!
//! A summary of a page is, for each head of keys and values, the least and the largest of its keys, element by element:
//! `head_elements` halves each, as the keys are stored. The bound of a query is the sum over the elements of the larger of
//! `query * least` and `query * largest`: no product of the query with a key of the page is larger. The bound of a page
//! for a head is the largest over the queries of the heads that share its keys.

#[cfg(all(target_arch = "nvptx64", feature = "choose"))]
mod arch;
#[cfg(all(target_arch = "nvptx64", feature = "choose"))]
mod kernel;

/// What both halves of a summary's element hold where a key is not a number, and before there is a summary: NaN in f16 and
/// in bf16.
pub const UNKNOWN: u16 = 0xFFFF;
/// The rank of a page whose bound is not a number, and of one that is not there: such pages are chosen first.
pub const FIRST: u32 = u32::MAX;
/// Counts of a pass over the ranks: one for each value of eight bits.
pub const BINS: u32 = 256;
/// Bins that a lane adds up.
pub const LANE_BINS: u32 = BINS / 32;

/// Makes summaries of pages in memory of the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SummarisePages {
    /// `count` pages, `page_stride` bytes apart; a multiple of 4.
    pub pages: u64,
    /// Their numbers, an `i64` each, all different. What is not below `page_count` is left out.
    pub ids: u64,
    /// `page_count` summaries.
    pub summaries: u64,
    /// How many pages to make summaries of.
    pub count: u64,
    /// From one page to the next, a multiple of 4.
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

/// Chooses pages for each head of keys and values of each sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ChoosePages {
    /// `sequences` times `heads` vectors of `head_elements` numbers; a multiple of 16.
    pub queries: u64,
    /// As [`PagedAttention::pages`](crate::PagedAttention::pages).
    pub pages: u64,
    /// As [`PagedAttention::counts`](crate::PagedAttention::counts).
    pub counts: u64,
    /// `page_count` summaries; a multiple of 16.
    pub summaries: u64,
    /// Room for a rank of each page of each head: `most_pages` words a head.
    pub ranks: u64,
    /// Gets the numbers of the chosen pages in the order of the table: `keep` words a head.
    pub chosen: u64,
    /// Gets how many there are, a word a head.
    pub chosen_counts: u64,
    /// Pages of the drive.
    pub page_count: u64,
    /// How many sequences.
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
    /// Pages of a sequence at most.
    pub most_pages: u32,
    /// Pages to choose for each head, at least `first` + `last`.
    pub keep: u32,
    /// So many at the begin of the table are chosen in any case.
    pub first: u32,
    /// So many at its end.
    pub last: u32,
    /// 1 for bf16, 0 for f16.
    pub is_bf16: u32,
    /// 0.
    pub reserved: u32,
}

/// Memory by address, as a kernel or the stand-in of CUDA loads and stores it.
pub trait Memory: Copy {
    /// The word at `address`, a multiple of 4.
    fn word(self, address: u64) -> u32;
    /// Sets it.
    fn put(self, address: u64, word: u32);
    /// Four words; a multiple of 16.
    fn four(self, address: u64) -> [u32; 4];
    /// Two words; a multiple of 8.
    fn two(self, address: u64) -> [u32; 2];
    /// The numbers in the halves of a word, the lower one first.
    fn pair(self, word: u32, is_bf16: bool) -> [f32; 2];
}

impl SummarisePages {
    /// Pieces of work of [`element_pair`](Self::element_pair).
    pub const fn pairs(&self) -> u64 {
        self.count * self.kv_heads as u64 * (self.head_elements / 2) as u64
    }

    /// Writes the least and the largest of two elements of a head of a page: piece `index` of the work.
    #[inline(always)]
    pub fn element_pair(&self, memory: impl Memory, index: u64) {
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
            Extremes::of(word as u16, a),
            Extremes::of((word >> 16) as u16, b),
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

/// The least and the largest of some numbers, and how they are stored.
struct Extremes {
    least: f32,
    most: f32,
    least_half: u16,
    most_half: u16,
    is_unknown: bool,
}

impl Extremes {
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

/// The larger one; the second where one is not a number.
#[inline(always)]
pub fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// A bound as a number that is larger for a larger bound; [`FIRST`] for what is not a number.
#[inline(always)]
pub fn rank_of(bound: f32) -> u32 {
    let bits = bound.to_bits();
    let order = match bits >> 31 {
        0 => bits | 1 << 31,
        _ => !bits,
    };
    if bound.is_nan() { FIRST } else { order }
}

/// The block for each number below eight, a constant by the name given: arrays stay in registers.
macro_rules! eight {
    ($i:ident => $body:block) => { eight!($i in 0 1 2 3 4 5 6 7 => $body) };
    ($i:ident in $($number:literal)* => $body:block) => {{
        $({ const $i: usize = $number; $body })*
    }};
}

impl ChoosePages {
    /// Heads of keys and values of all sequences.
    pub const fn rows(&self) -> u64 {
        self.sequences as u64 * self.kv_heads as u64
    }

    /// Where the numbers of the pages of head `row` lie.
    #[inline(always)]
    fn table(&self, row: u64) -> u64 {
        let kv_heads = u64::from(self.kv_heads);
        let index = row / kv_heads * u64::from(self.sequence_stride)
            + row % kv_heads * u64::from(self.head_stride);
        self.pages + index * 4
    }

    /// How many there are.
    #[inline(always)]
    pub fn count(&self, memory: impl Memory, row: u64) -> u32 {
        let index = match self.head_stride {
            0 => row / u64::from(self.kv_heads),
            _ => row,
        };
        memory.word(self.counts + index * 4).min(self.most_pages)
    }

    /// The number of the page at `place`.
    #[inline(always)]
    pub fn page(&self, memory: impl Memory, row: u64, place: u32) -> u32 {
        memory.word(self.table(row) + u64::from(place) * 4)
    }

    /// Where the rank of the page at `place` lies.
    #[inline(always)]
    pub const fn rank_address(&self, row: u64, place: u32) -> u64 {
        self.ranks + (row * self.most_pages as u64 + place as u64) * 4
    }

    /// Where the number of chosen page `index` goes.
    #[inline(always)]
    pub const fn chosen_address(&self, row: u64, index: u32) -> u64 {
        self.chosen + (row * self.keep as u64 + index as u64) * 4
    }

    /// Whether the page at `place` of `count` is chosen in any case.
    #[inline(always)]
    pub fn is_kept(&self, place: u32, count: u32) -> bool {
        place < self.first || place >= count - self.last.min(count)
    }

    /// Pages to choose by their ranks, and whether there are more to choose from.
    #[inline(always)]
    pub fn wanted(&self, count: u32) -> Option<u32> {
        let kept = self.first.saturating_add(self.last);
        (count > self.keep).then(|| self.keep.saturating_sub(kept))
    }

    /// The rank of the page at `place` for the queries of head `row`. Sums go from element 0 on, so that they have the same
    /// bits everywhere.
    #[inline(always)]
    pub fn rank(&self, memory: impl Memory, row: u64, place: u32) -> u32 {
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
        // The last query again in place of those that are not there: it changes no maximum.
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

/// The bin, from the highest on, in which number `wanted` of what was counted lies, 1 for the first, and how many of that
/// bin are wanted. `group` gives the sum of [`LANE_BINS`] bins, `bin` one of them.
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

/// From which rank on pages are chosen: those above `rank`, and the first `equal` of those that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    /// The rank.
    pub rank: u32,
    /// How many that have it.
    pub equal: u32,
}

impl Threshold {
    /// All pages are chosen.
    pub const ALL: Self = Self {
        rank: 0,
        equal: u32::MAX,
    };
    /// None is.
    pub const NONE: Self = Self {
        rank: u32::MAX,
        equal: 0,
    };

    /// That of the `wanted` largest ranks, by passes over eight bits of them each, from the highest on. `pass` gets the bits
    /// above those of the pass, by how many bits a rank is shifted, and how many are wanted of the ranks that have the bits
    /// above; it counts these by [`bin_of`] and gives what [`narrow`] finds.
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

/// The bin of `rank` in the pass that shifts by `shift`, where its bits above are `above`.
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
