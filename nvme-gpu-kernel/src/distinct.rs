//! Gathers of many rows whose ids may come again: each distinct row is read once, and copied to its other positions
//! (docs/adr/0032).
//!
//! Four launches in one stream. The first one enters each id with its lowest position in a hash table. The second one
//! lists these positions, in an order that keeps rows of one block of the drive together. The third one gathers the
//! rows of the list. The fourth one copies them to the remaining positions, and leaves the table empty.

use crate::rows::GatherLaunch;

/// Parameters of the four launches: of `nvme_claim_rows`, `nvme_list_rows`, `nvme_gather_listed` and
/// `nvme_repeat_rows`. The first and the last one have the same number of blocks.
///
/// The memory at `words` and `slots` is zero before the first run. One run uses it at a time; runs that overlap, as
/// those of a graph that was instantiated twice may, fail their rows with [`NOT_RUN`](crate::rows::code::NOT_RUN).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DistinctLaunch {
    /// Parameters of the gather, with ids, with `status`, and with fewer than 2^31 rows.
    pub gather: GatherLaunch,
    /// Address of [`WORDS`] words of 32 bits.
    pub words: u64,
    /// Address of `1 << slot_shift` words of 32 bits: the hash table.
    pub slots: u64,
    /// Address of a `u32` for each row: the positions of distinct rows.
    pub list: u64,
    /// Address of a `u32` for each row: the position that its row is copied from.
    pub firsts: u64,
    /// Address of two `u64`, the rows that were asked for and those that were read.
    pub counts: u64,
    /// Address of two `u64` in host memory, which receive the counts.
    pub shown: u64,
    /// log2 of the number of slots: at least twice as many as rows, and at least [`LEAST_SLOT_SHIFT`].
    pub slot_shift: u32,
    /// log2 of the bytes of the drive whose rows have slots side by side, as [`span_shift`] returns it.
    pub span_shift: u32,
}

/// Parameters of the third launch over striped drives: of `nvme_gather_listed_striped`.
///
/// `queues`, `gate`, `slots` and `nsid` of the gather are not used, as in
/// [`StripedGather`](crate::rows::StripedGather), whose other fields these are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DistinctStripes {
    /// Parameters of the launch.
    pub distinct: DistinctLaunch,
    /// Address of a [`StripedMember`](crate::rows::StripedMember) for each drive.
    pub members: u64,
    /// log2 of the bytes of a stripe.
    pub stripe_shift: u32,
    /// Number of drives.
    pub member_count: u32,
}

/// Number of the words of a run.
pub const WORDS: usize = 32;
/// Least [`slot_shift`](DistinctLaunch::slot_shift): a launch looks at 256 slots at a time.
pub const LEAST_SLOT_SHIFT: u32 = 8;
/// log2 of the slots of a span of the drive: as many as a warp gathers rows at a time.
const SPAN_SLOTS_SHIFT: u32 = 5;

impl DistinctLaunch {
    /// Returns the slot at which the search for a row begins that lies at byte `byte` of the namespace. Rows of one span
    /// of the drive begin in the order of their bytes, in 32 slots side by side.
    #[inline(always)]
    pub const fn home(&self, byte: u64) -> u32 {
        let span = byte >> self.span_shift;
        let rank = (byte >> (self.span_shift - SPAN_SLOTS_SHIFT)) as u32 & 31;
        let groups_shift = self.slot_shift - SPAN_SLOTS_SHIFT;
        // Fibonacci hashing: neighbouring spans lie far apart.
        let group = span.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - groups_shift);
        (group as u32) << SPAN_SLOTS_SHIFT | rank
    }
}

/// Returns log2 of the bytes of the drive whose rows have slots side by side: 32 rows of `row_bytes` bytes, and at least
/// one block.
pub const fn span_shift(row_bytes: u32, block_shift: u32) -> u32 {
    let rows = (row_bytes as u64) << SPAN_SLOTS_SHIFT;
    let shift = rows.next_power_of_two().trailing_zeros();
    if shift > block_shift {
        shift
    } else {
        block_shift
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(row_bytes: u32, block_shift: u32, slot_shift: u32) -> DistinctLaunch {
        DistinctLaunch {
            slot_shift,
            span_shift: span_shift(row_bytes, block_shift),
            ..DistinctLaunch::default()
        }
    }

    #[test]
    fn rows_of_one_span_begin_side_by_side_and_spans_far_apart() {
        for (row_bytes, block_shift) in [(256, 9), (264, 12), (4096, 12), (16, 12), (1, 9)] {
            let launch = launch(row_bytes, block_shift, 13);
            let span = 1u64 << launch.span_shift;
            let mut homes = std::collections::BTreeSet::new();
            for number in 0..64u64 {
                let first = launch.home(number * span);
                assert!(first < 1 << 13 && first.is_multiple_of(32));
                homes.insert(first);
                let mut before = first;
                for byte in (number * span..(number + 1) * span).step_by(row_bytes as usize) {
                    let home = launch.home(byte);
                    assert!((before..first + 32).contains(&home), "{row_bytes} {byte}");
                    before = home;
                }
            }
            assert!(homes.len() > 48, "{row_bytes}: {} homes", homes.len());
        }
    }

    #[test]
    fn a_span_has_32_rows_or_a_block() {
        assert_eq!(span_shift(256, 9), 13);
        assert_eq!(span_shift(264, 9), 14);
        assert_eq!(span_shift(16, 12), 12);
        assert_eq!(span_shift(1, 0), 5);
        assert_eq!(span_shift(128 << 10, 12), 22);
    }
}
