//! The kernels of page selection for sparse attention.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use super::arch::{GlobalMemory, WarpHistogram};
use super::{ChoosePages, LANE_BINS, MemoryAccess, RankThreshold, SummarisePages, bin_of, narrow};
use crate::arch::{thread, warp};
use nvme_gpu_kernel::{arch, entry};

entry! {
    /// Writes page summaries. A thread takes two elements of a head of a page a turn.
    ///
    /// # Safety
    /// All memory that [`SummarisePages`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_page_summaries(summarise: SummarisePages) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let memory = unsafe { GlobalMemory::new() };
        let (mut index, threads) = thread();
        while index < summarise.pairs() {
            summarise.element_pair(memory, index);
            index += threads;
        }
    }
}

entry! {
    /// Scores pages: writes a rank for each. A thread takes one page of a head a turn.
    ///
    /// # Safety
    /// All memory that [`ChoosePages`] names is allocated and stays so while the kernel runs.
    pub unsafe fn nvme_score_pages(choice: ChoosePages) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let memory = unsafe { GlobalMemory::new() };
        let most = u64::from(choice.most_pages);
        let (mut index, threads) = thread();
        while index < choice.rows() * most {
            let (row, place) = (index / most, (index % most) as u32);
            if place < choice.count(memory, row) {
                let rank = choice.rank(memory, row, place);
                memory.put(choice.rank_address(row, place), rank);
            }
            index += threads;
        }
    }
}

entry! {
    /// Selects the pages with the largest ranks. A warp takes one head a turn.
    ///
    /// # Safety
    /// All memory that [`ChoosePages`] names is allocated and stays so while the kernel runs, and
    /// `nvme_score_pages` has run.
    pub unsafe fn nvme_choose_pages(choice: ChoosePages) {
        // SAFETY: the host vouches for the addresses in the kernel's parameter, as under `# Safety`.
        let memory = unsafe { GlobalMemory::new() };
        let bins = WarpHistogram::of_warp();
        let (mut row, warps) = warp();
        while row < choice.rows() {
            let count = choice.count(memory, row);
            let threshold = match choice.wanted(count) {
                None => RankThreshold::ALL,
                Some(wanted) => RankThreshold::of(wanted, |above, shift, wanted| {
                    pass(&choice, memory, bins, (row, count), (above, shift), wanted)
                }),
            };
            put(&choice, memory, (row, count), threshold);
            row += warps;
        }
    }
}

/// Counts, by their next eight bits, the ranks of the pages whose upper bits are `above`. Every lane of the
/// warp calls it.
#[inline(always)]
fn pass(
    choice: &ChoosePages,
    memory: GlobalMemory,
    bins: WarpHistogram,
    (row, count): (u64, u32),
    (above, shift): (u32, u32),
    wanted: u32,
) -> (u32, u32) {
    let lane = arch::lane();
    let mut bin = 0;
    while bin < LANE_BINS {
        bins.clear(lane * LANE_BINS + bin);
        bin += 1;
    }
    arch::sync_warp(arch::FULL);
    let mut place = lane;
    while place < count {
        if !choice.is_kept(place, count) {
            let rank = memory.word(choice.rank_address(row, place));
            if let Some(bin) = bin_of(rank, above, shift) {
                bins.increment(bin);
            }
        }
        place += 32;
    }
    arch::sync_warp(arch::FULL);
    let (mut mine, mut bin) = (0, 0);
    while bin < LANE_BINS {
        mine += bins.count(lane * LANE_BINS + bin);
        bin += 1;
    }
    let found = narrow(
        wanted,
        |group| arch::shuffle(arch::FULL, mine, group),
        |bin| bins.count(bin),
    );
    // A barrier, since the next pass clears counts that every lane has to have read.
    arch::sync_warp(arch::FULL);
    found
}

/// Writes the numbers of the selected pages, in the order of the page table. Every lane of the warp calls it.
#[inline(always)]
fn put(
    choice: &ChoosePages,
    memory: GlobalMemory,
    (row, count): (u64, u32),
    threshold: RankThreshold,
) {
    let lane = arch::lane();
    let below = (1 << lane) - 1;
    let (mut first, mut chosen, mut equal) = (0, 0, 0);
    while first < count {
        let place = first + lane;
        let is_there = place < count;
        let is_kept = is_there && choice.is_kept(place, count);
        let is_ranked = is_there && !is_kept;
        let rank = match is_ranked {
            true => memory.word(choice.rank_address(row, place)),
            false => 0,
        };
        let is_equal = is_ranked && rank == threshold.rank;
        let equals = arch::ballot(arch::FULL, is_equal);
        let before = equal + (equals & below).count_ones();
        let is_chosen =
            is_kept || is_ranked && rank > threshold.rank || is_equal && before < threshold.equal;
        let all = arch::ballot(arch::FULL, is_chosen);
        let to = chosen + (all & below).count_ones();
        if is_chosen && to < choice.keep {
            let page = choice.page(memory, row, place);
            memory.put(choice.chosen_address(row, to), page);
        }
        chosen += all.count_ones();
        equal += equals.count_ones();
        first += 32;
    }
    if lane == 0 {
        memory.put(choice.chosen_counts + row * 4, chosen.min(choice.keep));
    }
}
