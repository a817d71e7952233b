//! Choice of pages as a host thread: summaries, ranks and thresholds are worked out by the code of the kernels.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use nvme_compute_kernel::choose::{
    BINS, ChoosePages, LANE_BINS, MemoryAccess, RankThreshold, SummarisePages, bin_of, narrow,
};
use nvme_formats::{f32_of_bf16, f32_of_f16};

/// Memory that a launch names.
#[derive(Clone, Copy)]
struct Named;

impl MemoryAccess for Named {
    fn word(self, address: u64) -> u32 {
        // SAFETY: the host vouches for it.
        unsafe { (address as usize as *const u32).read() }
    }

    fn put(self, address: u64, word: u32) {
        // SAFETY: as above.
        unsafe { (address as usize as *mut u32).write(word) };
    }

    fn four(self, address: u64) -> [u32; 4] {
        assert!(address.is_multiple_of(16), "four words at {address:#x}");
        [0, 4, 8, 12].map(|at| self.word(address + at))
    }

    fn two(self, address: u64) -> [u32; 2] {
        assert!(address.is_multiple_of(8), "two words at {address:#x}");
        [0, 4].map(|at| self.word(address + at))
    }

    fn pair(self, word: u32, is_bf16: bool) -> [f32; 2] {
        [word as u16, (word >> 16) as u16].map(|half| match is_bf16 {
            true => f32_of_bf16(half),
            false => f32_of_f16(half),
        })
    }
}

/// As `nvme_page_summaries`.
pub fn summarise(summarise: &SummarisePages) {
    (0..summarise.pairs()).for_each(|index| summarise.element_pair(Named, index));
}

/// As `nvme_score_pages`.
pub fn score(choice: &ChoosePages) {
    for row in 0..choice.rows() {
        for place in 0..choice.count(Named, row) {
            let rank = choice.rank(Named, row, place);
            Named.put(choice.rank_address(row, place), rank);
        }
    }
}

/// As `nvme_choose_pages`.
pub fn choose(choice: &ChoosePages) {
    for row in 0..choice.rows() {
        let count = choice.count(Named, row);
        let rank = |place: u32| Named.word(choice.rank_address(row, place));
        let threshold = match choice.wanted(count) {
            None => RankThreshold::ALL,
            Some(wanted) => RankThreshold::of(wanted, |above, shift, wanted| {
                let mut bins = [0u32; BINS as usize];
                let ranked = (0..count).filter(|place| !choice.is_kept(*place, count));
                for bin in ranked.filter_map(|place| bin_of(rank(place), above, shift)) {
                    bins[bin as usize] += 1;
                }
                let group = |group: u32| {
                    (0..LANE_BINS)
                        .map(|at| bins[(group * LANE_BINS + at) as usize])
                        .sum()
                };
                narrow(wanted, group, |bin| bins[bin as usize])
            }),
        };
        let (mut chosen, mut equal) = (0, 0);
        for place in 0..count {
            let is_kept = choice.is_kept(place, count);
            let is_equal = !is_kept && rank(place) == threshold.rank;
            let is_above = !is_kept && rank(place) > threshold.rank;
            if is_kept || is_above || is_equal && equal < threshold.equal {
                let page = choice.page(Named, row, place);
                Named.put(choice.chosen_address(row, chosen), page);
                chosen += 1;
            }
            equal += u32::from(is_equal);
        }
        Named.put(choice.chosen_counts + row * 4, chosen);
    }
}
