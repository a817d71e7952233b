//! The index of a cache of rows, for kernels: the row in each line, the readers of a line, and the choice of
//! the line to replace.
//!
//! Set-associative: a row has [`WAYS`] lines that may hold it. A line that is read is marked recent; the
//! clock takes the first line without that mark, and clears the marks that it passes. The bytes of the lines
//! are not kept here.
//!
//! The order of calls. A reader: [`find`](RowCache::find), which pins the line; copy;
//! [`release`](RowCache::release). A filler, after a miss: [`claim`](RowCache::claim), which makes it the line's only
//! user; copy, once the row was read; [`publish`](RowCache::publish), or [`abandon`](RowCache::abandon) if it was not.
//!
//! Writes make every line stale at once: each line has the epoch in which the read of its row began, and a
//! line of another epoch is no hit. A writer to the drive increments the count of its side after the write
//! has ended and before it reports success. The host and the GPU each have a count; an [epoch] is the sum of
//! both.
//!
//! Invariant: while a line is busy nothing else pins or claims it; it is claimed only while nothing pins it.
//! So `id` and `epoch` of a pinned line do not change. Loom checks it (`tests/tests/loom/row_cache.rs`).

use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};

/// Number of lines in a set; fewer for loom, whose executions grow with each load.
pub const WAYS: usize = if cfg!(loom) { 2 } else { 16 };
/// Attempts of a claim when others take the lines first: rows of one block often want lines of one set.
const CLAIMS: u32 = if cfg!(loom) { 1 } else { 4 };
/// A filler uses the line.
const BUSY: u32 = 1;
/// The line was read since the clock passed.
const RECENT: u32 = 2;
/// Unit of the count of readers. A reader that is about to find that the line holds another row
/// counts, too. So a line is never replaced under a reader that may still copy from it.
const READER: u32 = 4;
/// Mask of the count of readers: at most 4,095 groups use a cache at once, and each pins a line
/// once. So the count cannot overflow into the bits beside it.
const READERS: u32 = 0xFFF * READER;
/// Position of some bits of the row's hash, which tell most other rows apart without a load of `id`; 0 for a
/// line that is empty or busy.
const CHECK_SHIFT: u32 = 14;

/// Counts of the host's writes that have ended: a ticket, and copies of it for groups that look at the same time, since
/// loads of one word of host memory by several groups wait for each other.
///
/// A writer takes a ticket after its write has ended, and raises every copy to it before it reports success. So whoever
/// finds a number in a copy reads what all writes with tickets up to it have written, whichever copy it is.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub struct WriteCounts<'a>(&'a [AtomicU64]);

/// Number of the copies.
pub const WRITE_COPIES: usize = if cfg!(loom) { 2 } else { 32 };
/// Words from one copy to the next: a line each.
const COPY_WORDS: usize = if cfg!(loom) { 1 } else { 16 };

/// Number of the words of [`WriteCounts`].
pub const WRITE_WORDS: usize = (1 + WRITE_COPIES) * COPY_WORDS;

/// Returns the index of the word that group `group` looks at.
#[inline(always)]
pub const fn write_copy(group: u32) -> usize {
    (1 + group as usize % WRITE_COPIES) * COPY_WORDS
}

#[cfg(not(target_arch = "nvptx64"))]
impl<'a> WriteCounts<'a> {
    /// Makes the counts over their words, zeroed before their first use; `None` for fewer than [`WRITE_WORDS`].
    pub fn new(words: &'a [AtomicU64]) -> Option<Self> {
        (words.len() >= WRITE_WORDS).then_some(Self(words))
    }

    /// Counts a write that has ended, on the host.
    pub fn ended(&self) {
        // Acquire and release: the ends of the writes with earlier tickets come before the copies that this one raises.
        let ticket = self.0[0].fetch_add(1, Order::AcqRel, Scope::Sys) + 1;
        for copy in 0..WRITE_COPIES as u32 {
            // Release: pairs with the acquire of a gather, which then reads what was written.
            self.0[write_copy(copy)].fetch_max(ticket, Order::Release, Scope::Sys);
        }
    }
}

/// A cache over its words, zeroed before their first use.
///
/// Kernels and the host-side stand-in make views of the same words; nothing but the words says what is
/// cached, so a new view sees the lines that earlier launches filled.
#[derive(Clone, Copy, Debug)]
pub struct RowCache<'a> {
    states: &'a [AtomicU32],
    ids: &'a [AtomicU64],
    epochs: &'a [AtomicU64],
    sets: u32,
}

/// A pinned or claimed line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedLine(u32);

impl PinnedLine {
    /// Returns the line's number.
    pub fn index(self) -> u32 {
        self.0
    }
}

/// The set of lines that may hold a row, and the hash bits that such a line has.
#[derive(Clone, Copy)]
struct LineSet {
    first: u32,
    check: u32,
}

impl LineSet {
    /// True if a line with the word `state` may hold the row.
    #[inline(always)]
    fn may_be(self, state: u32) -> bool {
        (state ^ self.check) >> CHECK_SHIFT == 0
    }
}

/// The state of a set's lines, one bit for each line.
#[derive(Clone, Copy, Default)]
struct WayBits {
    /// Lines that may hold the row.
    may: u32,
    /// Lines that are neither pinned nor busy.
    free: u32,
    recent: u32,
    /// Lines without a useful row.
    idle: u32,
}

impl WayBits {
    /// Returns the line to replace, as a clock that starts at `hand` chooses it, and the lines whose marks it
    /// clears on the way.
    ///
    /// Idle lines first: they hold nothing, or a row of another epoch that can never be a hit again. If every
    /// free line is recent, the clock has passed all of them, and the first free line is replaced.
    #[inline(always)]
    fn victim(self, hand: u32) -> Option<(u32, u32)> {
        const ALL: u32 = (1 << WAYS) - 1;
        // Rotates the bits so that the hand is bit 0, and back: the first set bit is then the first line that
        // the clock reaches.
        let from_hand = |ways: u32| (ways >> hand | ways << (WAYS as u32 - hand)) & ALL;
        let from_first = |ways: u32| (ways << hand | ways >> (WAYS as u32 - hand)) & ALL;
        let (idle, old) = (self.free & self.idle, self.free & !self.recent);
        let (choice, passes) = match (idle, old) {
            (0, 0) => (self.free, ALL),
            (0, old) => {
                let first = from_hand(old).trailing_zeros();
                (old, (1 << first) - 1)
            }
            (idle, _) => (idle, 0),
        };
        if choice == 0 {
            return None;
        }
        let way = (from_hand(choice).trailing_zeros() + hand) % WAYS as u32;
        Some((way, from_first(passes) & self.free & self.recent))
    }
}

/// Returns the epoch of a gather that loaded these counts of ended writes before it read from the drive. Both
/// counts only grow.
///
/// The sum is enough to tell gathers apart: of two gathers with the same sum, one that saw fewer writes of
/// one side saw more of the other, so it began after a write that the other gather must not miss. 64 bits,
/// since a 32-bit count would repeat within hours of writing, and a line untouched in the meantime would be a
/// hit with an old row.
#[inline(always)]
pub const fn epoch(by_host: u64, by_gpu: u64) -> u64 {
    by_host.wrapping_add(by_gpu)
}

impl<'a> RowCache<'a> {
    /// Makes a cache over its words, as many of each kind; `None` for less than one set.
    #[inline(always)]
    pub fn new(
        states: &'a [AtomicU32],
        ids: &'a [AtomicU64],
        epochs: &'a [AtomicU64],
    ) -> Option<Self> {
        let lines = states.len().min(ids.len()).min(epochs.len());
        let sets = (lines / WAYS) as u32;
        (sets > 0).then_some(Self {
            states,
            ids,
            epochs,
            sets,
        })
    }

    #[inline(always)]
    fn spot(&self, id: u64) -> LineSet {
        // The finalizer of SplitMix64.
        let mut hash = id.wrapping_add(0x9E37_79B9_7F4A_7C15);
        hash = (hash ^ hash >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        hash = (hash ^ hash >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        hash ^= hash >> 31;
        // Maps the upper half of the hash evenly to the sets without a division; the lower half supplies the
        // check bits, so both are independent.
        let set = ((hash >> 32) * u64::from(self.sets)) >> 32;
        LineSet {
            first: set as u32 * WAYS as u32,
            check: hash as u32 >> CHECK_SHIFT << CHECK_SHIFT | 1 << CHECK_SHIFT,
        }
    }

    #[inline(always)]
    fn state(&self, line: u32) -> Option<&'a AtomicU32> {
        self.states.get(line as usize)
    }

    /// True if a line that nothing fills holds row `id` of epoch `epoch`.
    #[inline(always)]
    fn holds(&self, line: u32, id: u64, epoch: u64) -> bool {
        let at = line as usize;
        let has = |id: &AtomicU64| id.load(Order::Relaxed, Scope::Gpu);
        self.ids.get(at).map(has) == Some(id) && self.is_of(line, epoch)
    }

    #[inline(always)]
    fn is_of(&self, line: u32, epoch: u64) -> bool {
        let at = line as usize;
        let has = |epoch: &AtomicU64| epoch.load(Order::Relaxed, Scope::Gpu);
        self.epochs.get(at).map(has) == Some(epoch)
    }

    /// Pins the line of row `id`, if it was read in epoch `epoch`: its bytes stay until
    /// [`release`](Self::release).
    ///
    /// When threads want the same row at the same time, one of them calls it for all.
    #[inline(always)]
    pub fn find(&self, id: u64, epoch: u64) -> Option<PinnedLine> {
        let spot = self.spot(id);
        let mut ways = self.ways(spot);
        while ways != 0 {
            let line = spot.first + ways.trailing_zeros();
            ways &= ways - 1;
            if !self.pin(line, spot.check) {
                continue;
            }
            if self.holds(line, id, epoch) {
                return Some(PinnedLine(line));
            }
            self.release(PinnedLine(line));
        }
        None
    }

    /// Returns the lines of a set that may hold a row, one bit for each.
    #[inline(always)]
    fn ways(&self, spot: LineSet) -> u32 {
        let mut ways = 0;
        self.states_of(spot, |way, was| {
            ways |= u32::from(spot.may_be(was)) << way;
        });
        ways
    }

    /// Passes the number and the state of each line of a set to `see`. All words are loaded before the first is passed,
    /// so that the loads overlap.
    #[cfg(not(all(target_arch = "nvptx64", feature = "gathers")))]
    #[inline(always)]
    fn states_of(&self, spot: LineSet, mut see: impl FnMut(u32, u32)) {
        for way in 0..WAYS as u32 {
            let state = self.state(spot.first + way);
            let was = state.map_or(BUSY, |state| state.load(Order::Relaxed, Scope::Gpu));
            see(way, was);
        }
    }

    /// Passes the number and the state of each line of a set to `see`. The states of a set are half a line of memory:
    /// four loads that overlap.
    #[cfg(all(target_arch = "nvptx64", feature = "gathers"))]
    #[inline(always)]
    fn states_of(&self, spot: LineSet, mut see: impl FnMut(u32, u32)) {
        let of_set = self.states.get(spot.first as usize..);
        let Some(states) = of_set.and_then(|states| states.first_chunk()) else {
            return;
        };
        // Constant indices: a loop would place the array on a stack.
        let [a, b, c, d] = crate::arch::load_sixteen(states);
        let mut four = |first: u32, of: [u32; 4]| {
            see(first, of[0]);
            see(first + 1, of[1]);
            see(first + 2, of[2]);
            see(first + 3, of[3]);
        };
        four(0, a);
        four(4, b);
        four(8, c);
        four(12, d);
    }

    /// Returns the state of a set's lines for a filler of row `id` of epoch `epoch`.
    #[inline(always)]
    fn look(&self, spot: LineSet, epoch: u64) -> WayBits {
        let mut ways = WayBits::default();
        self.states_of(spot, |way, was| {
            let is_stale = !self.is_of(spot.first + way, epoch);
            ways.may |= u32::from(spot.may_be(was)) << way;
            ways.free |= u32::from(was & (BUSY | READERS) == 0) << way;
            ways.recent |= u32::from(was & RECENT != 0) << way;
            ways.idle |= u32::from(was == 0 || is_stale) << way;
        });
        ways
    }

    #[inline(always)]
    fn pin(&self, line: u32, check: u32) -> bool {
        let Some(state) = self.state(line) else {
            return false;
        };
        // Acquire: pairs with the release of the filler, so that its bytes, id and epoch are visible. An
        // addition rather than a compare-exchange: of many groups that want the same line none has to retry.
        // The price is that a group may count as a reader of a line that it does not want, for a moment.
        let was = state.fetch_add(READER, Order::Acquire, Scope::Gpu);
        if (was ^ check) >> CHECK_SHIFT != 0 || was & BUSY != 0 {
            state.fetch_add(READER.wrapping_neg(), Order::Relaxed, Scope::Gpu);
            return false;
        }
        if was & RECENT == 0 {
            state.fetch_or(RECENT, Order::Relaxed, Scope::Gpu);
        }
        true
    }

    /// Unpins a line: the caller reads its bytes no longer.
    #[inline(always)]
    pub fn release(&self, line: PinnedLine) {
        if let Some(state) = self.state(line.0) {
            // Release: pairs with the acquire of the next filler's claim, which may overwrite the bytes that
            // were read here. A row that is copied out while it is overwritten would be half of each.
            state.fetch_add(READER.wrapping_neg(), Order::Release, Scope::Gpu);
        }
    }

    /// Claims a line for row `id`, whose read began in epoch `epoch`; `None` when the row is cached already,
    /// or every line is in use.
    ///
    /// `hand` is the starting point of the clock: any number that changes from call to call.
    #[inline(always)]
    pub fn claim(&self, id: u64, epoch: u64, hand: u32) -> Option<PinnedLine> {
        let spot = self.spot(id);
        let (mut hand, mut left) = (hand, CLAIMS);
        while left != 0 {
            let ways = self.look(spot, epoch);
            let mut may = ways.may;
            while may != 0 {
                // The line may be replaced right after this look; then the row is read from the drive
                // once more, which is only slower. No pin is taken, since nothing is copied from the
                // line here.
                if self.holds(spot.first + may.trailing_zeros(), id, epoch) {
                    return None;
                }
                may &= may - 1;
            }
            let (way, passed) = ways.victim(hand % WAYS as u32)?;
            let mut marked = passed;
            while marked != 0 {
                if let Some(state) = self.state(spot.first + marked.trailing_zeros()) {
                    state.fetch_and(!RECENT, Order::Relaxed, Scope::Gpu);
                }
                marked &= marked - 1;
            }
            let line = spot.first + way;
            let state = self.state(line)?;
            let was = state.load(Order::Relaxed, Scope::Gpu);
            // Acquire: pairs with the release of the earlier readers, so that their loads come before the
            // filler's stores.
            if was & (BUSY | READERS) == 0
                && state.compare_exchange(was, BUSY, Order::Acquire, Scope::Gpu) == was
            {
                return Some(PinnedLine(line));
            }
            // Another group was first; the next look is from another line on.
            hand = hand.wrapping_add(1);
            left -= 1;
        }
        None
    }

    /// Gives the claimed line back without a row.
    #[cfg(any(feature = "gathers", not(target_arch = "nvptx64")))]
    #[inline(always)]
    pub fn abandon(&self, line: PinnedLine) {
        if let Some(state) = self.state(line.0) {
            // Relaxed: the line's bytes were not touched. An addition, as in `publish`: the line is then empty, since a
            // claim has cleared all other bits but the count of readers.
            state.fetch_add(BUSY.wrapping_neg(), Order::Relaxed, Scope::Gpu);
        }
    }

    /// Publishes the claimed line as row `id`, whose read began in epoch `epoch`.
    #[inline(always)]
    pub fn publish(&self, line: PinnedLine, id: u64, epoch: u64) {
        let at = line.0 as usize;
        if let (Some(its_id), Some(its_epoch)) = (self.ids.get(at), self.epochs.get(at)) {
            its_id.store(id, Order::Relaxed, Scope::Gpu);
            its_epoch.store(epoch, Order::Relaxed, Scope::Gpu);
        }
        if let Some(state) = self.state(line.0) {
            // Release: pairs with the acquire of a pin; bytes, id and epoch come before. An addition, since
            // groups that test the line meanwhile count as readers, and a store would lose their counts.
            let published = self.spot(id).check.wrapping_sub(BUSY);
            state.fetch_add(published, Order::Release, Scope::Gpu);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::vec::Vec;

    struct Words(Vec<AtomicU32>, Vec<AtomicU64>, Vec<AtomicU64>);

    impl Words {
        fn new(lines: usize) -> Self {
            Self(
                (0..lines).map(|_| AtomicU32::new(0)).collect(),
                (0..lines).map(|_| AtomicU64::new(0)).collect(),
                (0..lines).map(|_| AtomicU64::new(0)).collect(),
            )
        }

        fn cache(&self) -> RowCache<'_> {
            RowCache::new(&self.0, &self.1, &self.2).unwrap()
        }
    }

    #[test]
    fn a_row_is_found_in_its_epoch_alone() {
        let words = Words::new(32);
        let cache = words.cache();
        assert_eq!(cache.find(7, 1), None);
        let line = cache.claim(7, 1, 5).unwrap();
        assert_eq!(cache.find(7, 1), None, "it is being filled");
        cache.publish(line, 7, 1);
        assert_eq!(cache.find(7, 1), Some(line));
        cache.release(line);
        assert_eq!(cache.find(7, 2), None);
        assert_eq!(cache.find(8, 1), None);
        assert_eq!(cache.claim(7, 1, 0), None, "it is there");
        assert_eq!(
            RowCache::new(&words.0[..15], &words.1, &words.2).map(drop),
            None
        );
    }

    #[test]
    fn an_abandoned_line_holds_nothing_and_is_the_next_to_be_claimed() {
        let words = Words::new(WAYS);
        let cache = words.cache();
        for id in 0..WAYS as u64 {
            let line = cache.claim(id, 0, 0).unwrap();
            cache.publish(line, id, 0);
        }
        let line = cache.claim(100, 0, 3).unwrap();
        cache.abandon(line);
        assert_eq!(cache.find(100, 0), None);
        assert_eq!(cache.claim(101, 0, 9), Some(line));
    }

    #[test]
    fn an_epoch_is_not_the_same_again_after_2_to_the_32_writes() {
        let words = Words::new(WAYS);
        let cache = words.cache();
        let first = epoch(3, 4);
        let line = cache.claim(7, first, 0).unwrap();
        cache.publish(line, 7, first);
        let later = epoch(3 + (1 << 31), 4 + (1 << 31));
        assert_eq!(cache.find(7, later), None);
        assert_eq!(cache.find(7, first), Some(line));
    }

    #[test]
    fn a_pinned_line_stays_and_the_clock_takes_one_that_is_not_recent() {
        let words = Words::new(WAYS);
        let cache = words.cache();
        for id in 0..WAYS as u64 {
            let line = cache.claim(id, 0, 0).unwrap();
            cache.publish(line, id, 0);
        }
        // All were read but row 9; row 3 still is.
        for id in (0..WAYS as u64).filter(|id| *id != 9) {
            let line = cache.find(id, 0).unwrap();
            if id != 3 {
                cache.release(line);
            }
        }
        let line = cache.claim(100, 0, 11).unwrap();
        cache.publish(line, 100, 0);
        assert_eq!(cache.find(9, 0), None);
        let kept = (0..WAYS as u64).filter(|id| cache.find(*id, 0).is_some());
        assert_eq!(kept.count(), WAYS - 1);
        // Every line is pinned now but the new one, then that one, too.
        assert!(cache.find(100, 0).is_some());
        assert_eq!(cache.claim(200, 0, 1), None);
    }

    #[test]
    fn stale_lines_go_first() {
        let words = Words::new(WAYS);
        let cache = words.cache();
        let claimed: Vec<PinnedLine> = (0..WAYS as u64)
            .map(|id| cache.claim(id, 0, 0).unwrap())
            .collect();
        for (id, line) in (0..).zip(claimed) {
            cache.publish(line, id, u64::from(id != 4));
        }
        let line = cache.claim(50, 1, 9).unwrap();
        cache.publish(line, 50, 1);
        for id in (0..WAYS as u64).filter(|id| *id != 4) {
            assert!(cache.find(id, 1).is_some(), "{id}");
        }
    }

    /// Zipf's ids over a cache of a tenth of the rows, beside an LRU list of as many.
    #[test]
    fn the_clock_hits_nearly_as_often_as_an_ideal_lru() {
        const ROWS: usize = 20_000;
        let lines = ROWS / 10;
        let words = Words::new(lines);
        let cache = words.cache();
        let mut sums: Vec<f64> = Vec::new();
        for rank in 1..=ROWS {
            let before = sums.last().copied().unwrap_or(0.0);
            sums.push(before + (rank as f64).powf(-0.99));
        }
        let total = sums[ROWS - 1];
        let mut seed = 1u64;
        let mut throw = || {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let at = (seed >> 11) as f64 / (1u64 << 53) as f64 * total;
            sums.partition_point(|sum| *sum < at) as u64
        };
        let (mut hits, mut ideal, mut asked) = (0, 0, 0);
        let (mut last, mut order) = (
            std::collections::HashMap::new(),
            std::collections::BTreeMap::new(),
        );
        for turn in 0..200_000u32 {
            let id = throw();
            let counts = u32::from(turn >= 50_000);
            asked += counts;
            match cache.find(id, 0) {
                Some(line) => {
                    hits += counts;
                    cache.release(line);
                }
                None => {
                    if let Some(line) = cache.claim(id, 0, turn) {
                        cache.publish(line, id, 0);
                    }
                }
            }
            match last.insert(id, turn) {
                Some(before) => {
                    ideal += counts;
                    order.remove(&before);
                }
                None if last.len() > lines => {
                    let (_, oldest) = order.pop_first().unwrap();
                    last.remove(&oldest);
                }
                None => {}
            }
            order.insert(turn, id);
        }
        let share = |count: u32| f64::from(count) / f64::from(asked);
        assert!(
            share(hits) > share(ideal) - 0.02,
            "{} {}",
            share(hits),
            share(ideal)
        );
        assert!(share(ideal) > 0.5, "{}", share(ideal));
    }
}
