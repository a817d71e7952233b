//! Ranges of blocks that cannot be transferred, and their error messages.

use nvme_core::spec::Lba;
use nvme_core::transfer::{RangeError, TransferLimits, TransferPiece, split};

const LIMITS: TransferLimits = TransferLimits {
    block_bytes: 4096,
    blocks: 1000,
    max_bytes: Some(4096 * 8),
    boundary_blocks: 0,
};

fn text(lba: u64, blocks: u64, limits: TransferLimits) -> String {
    let error = split(Lba(lba), blocks, limits).expect_err("not a range");
    let source: &dyn core::error::Error = &error;
    assert!(source.source().is_none());
    source.to_string()
}

#[test]
fn each_refusal_names_its_cause() {
    assert_eq!(
        text(5, 0, LIMITS),
        "the range has no blocks: give at least 1"
    );
    assert_eq!(
        text(999, 2, LIMITS),
        "the range ends past the namespace, which has 1000 blocks"
    );
    let small = TransferLimits {
        max_bytes: Some(4095),
        ..LIMITS
    };
    assert_eq!(
        text(0, 1, small),
        "one block is longer than the controller's largest transfer: reformat"
    );
    // An error in the range itself is reported before one in the limits.
    assert_eq!(split(Lba(0), 0, small).err(), Some(RangeError::Empty));
}

/// The pieces of a range follow each other without a gap and fill it.
#[test]
fn pieces_fill_the_range_within_each_limit() {
    for (boundary_blocks, max_blocks) in [(0, 8), (16, 8), (12, 8), (7, 100), (1, 3)] {
        let limits = TransferLimits {
            boundary_blocks,
            max_bytes: Some(max_blocks * 4096),
            ..LIMITS
        };
        let pieces: Vec<TransferPiece> = split(Lba(5), 90, limits).unwrap().collect();
        let mut next = 5;
        for piece in &pieces {
            assert_eq!((piece.lba, piece.offset), (Lba(next), (next - 5) * 4096));
            let blocks = u64::from(piece.blocks);
            assert!((1..=max_blocks).contains(&blocks), "{piece:?}");
            if boundary_blocks != 0 {
                let boundary = u64::from(boundary_blocks);
                assert_eq!(next / boundary, (next + blocks - 1) / boundary, "{piece:?}");
            }
            next += blocks;
        }
        assert_eq!(next, 95, "boundary {boundary_blocks}, most {max_blocks}");
    }
}
