//! The search of a piece's range, for as many ranges as a list may have.

use nvme_gpu_kernel::rows::{RangePiece, RangeSplit, RangeTarget};

const PIECE_SHIFT: u32 = 12;

/// Ranges of one to three pieces, and every piece of them.
fn ranges(count: u64) -> (Vec<RangeTarget>, Vec<RangePiece>) {
    let (mut ranges, mut pieces) = (Vec::new(), Vec::new());
    for number in 0..count {
        let range = RangeTarget {
            byte: number * 40_960 + number % 7 * 600,
            bytes: 1 + number % 5 * 2_000,
            to: 1 << 40 | number << 20,
            first: pieces.len() as u64,
        };
        let (mut byte, end) = (range.byte, range.byte + range.bytes);
        while byte < end {
            let next = ((byte >> PIECE_SHIFT) + 1) << PIECE_SHIFT;
            let until = next.min(end);
            pieces.push(RangePiece {
                range: number as u32,
                byte,
                bytes: (until - byte) as u32,
                to: range.to + (byte - range.byte),
            });
            byte = until;
        }
        assert_eq!(range.pieces(PIECE_SHIFT), pieces.len() as u64 - range.first);
        ranges.push(range);
    }
    (ranges, pieces)
}

#[test]
fn every_piece_of_any_number_of_ranges_is_found() {
    for count in [
        1, 2, 3, 31, 32, 33, 63, 64, 65, 66, 95, 96, 127, 128, 129, 1000,
    ] {
        let (ranges, pieces) = ranges(count);
        let split = RangeSplit {
            range_count: count as u32,
            piece_shift: PIECE_SHIFT,
        };
        let word = |at: u32| {
            let range = ranges[at as usize / size_of::<RangeTarget>()];
            [range.byte, range.bytes, range.to, range.first]
                [at as usize % size_of::<RangeTarget>() / 8]
        };
        for (index, piece) in (0..).zip(&pieces) {
            assert_eq!(
                split.piece(index, count as u32, word),
                *piece,
                "{count} ranges"
            );
        }
    }
}
