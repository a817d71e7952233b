//! Splits a range of blocks into commands.
//!
//! Each part is at most MDTS long and does not cross the boundary that the namespace prefers (NOIOB), counted
//! from LBA 0.
//!
//! NVMe Base 2.0c, "Maximum Data Transfer Size (MDTS)"; NVM Command Set 1.0c, "NOIOB".

use crate::spec::Lba;
use crate::spec::nvm::MAX_BLOCKS;
use core::fmt;

/// The limits of one command to a namespace.
///
/// They come from Identify Controller and Identify Namespace; values of 0 where the specification gives 0 no
/// meaning end in an error instead of an endless split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLimits {
    /// Bytes per block.
    pub block_bytes: u32,
    /// Blocks of the namespace.
    pub blocks: u64,
    /// Limit of a command in bytes, or `None` for no limit.
    pub max_bytes: Option<u64>,
    /// Blocks between boundaries that commands should not cross; 0 for none.
    pub boundary_blocks: u32,
}

/// One command's share of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferPiece {
    /// First block.
    pub lba: Lba,
    /// Blocks, 1 to 65,536.
    pub blocks: u32,
    /// Bytes from the start of the transfer's buffer.
    pub offset: u64,
}

/// The reason why a range cannot be transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeError {
    /// No blocks.
    Empty,
    /// The range ends past the namespace.
    PastEnd {
        /// Blocks of the namespace.
        blocks: u64,
    },
    /// MDTS is smaller than a block.
    BlockAboveMdts,
    /// The namespace has blocks of 0 bytes: LBADS is out of range.
    NoBlockSize,
    /// The range has 2^64 bytes or more.
    TooLong,
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the range has no blocks: give at least 1"),
            Self::PastEnd { blocks } => {
                write!(
                    f,
                    "the range ends past the namespace, which has {blocks} blocks"
                )
            }
            Self::BlockAboveMdts => {
                f.write_str("one block is longer than the controller's largest transfer: reformat")
            }
            Self::NoBlockSize => f.write_str(
                "the controller gives the namespace no valid block size (LBADS): reformat",
            ),
            Self::TooLong => f.write_str("the range has 2^64 bytes or more: split it"),
        }
    }
}

impl core::error::Error for RangeError {}

/// The parts of a transfer, in order.
#[derive(Clone, Debug)]
pub struct TransferPieces {
    next: u64,
    end: u64,
    start: u64,
    most: u32,
    limits: TransferLimits,
}

/// Splits `blocks` blocks from `lba` on.
///
/// The iterator allocates nothing and computes each part when it is asked for, so a transfer of any length
/// needs a few words.
///
/// # Errors
/// See [`RangeError`]; all checks come before the first part, so that no transfer fails halfway.
pub fn split(lba: Lba, blocks: u64, limits: TransferLimits) -> Result<TransferPieces, RangeError> {
    if blocks == 0 {
        return Err(RangeError::Empty);
    }
    let past_end = RangeError::PastEnd {
        blocks: limits.blocks,
    };
    let end = lba
        .0
        .checked_add(blocks)
        .filter(|end| *end <= limits.blocks)
        .ok_or(past_end)?;
    let block_bytes = u64::from(limits.block_bytes);
    if block_bytes == 0 {
        return Err(RangeError::NoBlockSize);
    }
    // The whole range was checked to fit into 64 bits, so no offset below overflows.
    if blocks.checked_mul(block_bytes).is_none() {
        return Err(RangeError::TooLong);
    }
    let by_size = limits.max_bytes.map_or(u64::MAX, |max| max / block_bytes);
    let most = by_size.min(u64::from(MAX_BLOCKS)) as u32;
    if most == 0 {
        return Err(RangeError::BlockAboveMdts);
    }
    Ok(TransferPieces {
        next: lba.0,
        end,
        start: lba.0,
        most,
        limits,
    })
}

impl Iterator for TransferPieces {
    type Item = TransferPiece;

    fn next(&mut self) -> Option<TransferPiece> {
        if self.next == self.end {
            return None;
        }
        // A command that crosses a boundary still succeeds, but the drive may split it internally and answer
        // later, so the split is made here, where the parts run in parallel.
        let to_boundary = match u64::from(self.limits.boundary_blocks) {
            0 => u64::MAX,
            boundary => boundary - self.next % boundary,
        };
        let blocks = (self.end - self.next)
            .min(u64::from(self.most))
            .min(to_boundary);
        let piece = TransferPiece {
            lba: Lba(self.next),
            blocks: blocks as u32,
            offset: (self.next - self.start) * u64::from(self.limits.block_bytes),
        };
        self.next += blocks;
        Some(piece)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LIMITS: TransferLimits = TransferLimits {
        block_bytes: 512,
        blocks: 1000,
        max_bytes: Some(8 * 512),
        boundary_blocks: 0,
    };

    fn pieces(lba: u64, blocks: u64, limits: TransferLimits) -> Vec<(u64, u32, u64)> {
        let split = split(Lba(lba), blocks, limits).unwrap();
        split
            .map(|piece| (piece.lba.0, piece.blocks, piece.offset))
            .collect()
    }

    #[test]
    fn splits_by_mdts() {
        assert_eq!(pieces(5, 8, LIMITS), [(5, 8, 0)]);
        assert_eq!(
            pieces(5, 17, LIMITS),
            [(5, 8, 0), (13, 8, 4096), (21, 1, 8192)]
        );
    }

    #[test]
    fn respects_the_boundary() {
        let limits = TransferLimits {
            boundary_blocks: 10,
            ..LIMITS
        };
        assert_eq!(
            pieces(5, 17, limits),
            [(5, 5, 0), (10, 8, 2560), (18, 2, 6656), (20, 2, 7680)]
        );
    }

    #[test]
    fn no_mdts_still_ends_at_65536_blocks() {
        let limits = TransferLimits {
            max_bytes: None,
            blocks: 1 << 40,
            ..LIMITS
        };
        assert_eq!(
            pieces(0, 65_537, limits),
            [(0, 65_536, 0), (65_536, 1, 65_536 * 512)]
        );
    }

    #[test]
    fn bad_ranges_are_refused_as_a_whole() {
        let error = |lba, blocks, limits| split(Lba(lba), blocks, limits).unwrap_err();
        assert_eq!(error(0, 0, LIMITS), RangeError::Empty);
        assert_eq!(error(1000, 1, LIMITS), RangeError::PastEnd { blocks: 1000 });
        assert_eq!(error(999, 2, LIMITS), RangeError::PastEnd { blocks: 1000 });
        assert_eq!(
            error(u64::MAX, 2, LIMITS),
            RangeError::PastEnd { blocks: 1000 }
        );
        let tiny = TransferLimits {
            max_bytes: Some(511),
            ..LIMITS
        };
        assert_eq!(error(0, 1, tiny), RangeError::BlockAboveMdts);
        for max_bytes in [None, Some(4096)] {
            let unknown = TransferLimits {
                block_bytes: 0,
                max_bytes,
                ..LIMITS
            };
            assert_eq!(error(0, 1, unknown), RangeError::NoBlockSize);
        }
        let huge = TransferLimits {
            blocks: u64::MAX,
            ..LIMITS
        };
        assert_eq!(error(0, 1 << 55, huge), RangeError::TooLong);
        assert_eq!(error(7, u64::MAX - 7, huge), RangeError::TooLong);
        let mut most = split(Lba(0), (1 << 55) - 1, huge).unwrap();
        assert_eq!(most.next().unwrap().blocks, 8);
        assert_eq!(pieces(999, 1, LIMITS), [(999, 1, 0)]);
    }
}
