//! `Y = X W^T` with a matrix `W` that streams from a drive through a few stages of GPU memory: the layout of
//! a launch's work. The kernels, the host and the stand-in of CUDA use the same words.
//!
//! `W` is cut into strips of [`STRIP_ROWS`] rows. Blocks that read fill the stage of a strip in parts of a
//! few rows, as 16-bit elements; blocks that multiply take tiles of [`TILE_TOKENS`] x [`TILE_ROWS`] elements
//! of `Y`, strip by strip. [`LaunchStrips`](nvme_gpu_kernel::strips::LaunchStrips) synchronises the two kinds of blocks.
//!
//! The order of launches: `nvme_gemm_clear`, then `nvme_gemm_streamed` or `nvme_gemm`, on one stream.

#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "gemm"))]
pub(crate) mod kernel;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "gemm"))]
mod multiply;
#[cfg(all(any(target_arch = "nvptx64", feature = "lanes"), feature = "gemm"))]
mod read;

use core::num::NonZeroU32;
use nvme_gpu_kernel::ring::RowSplit;
use nvme_gpu_kernel::rows::{GatherLaunch, WARP_BYTES};
use nvme_gpu_kernel::strips::words;

/// Tokens of a tile.
pub const TILE_TOKENS: u32 = 128;
/// Rows of `W` of a tile.
pub const TILE_ROWS: u32 = 256;
/// Columns that a block has in shared memory in one step.
pub const DEPTH: u32 = 32;
/// Number of steps that are being copied or in use.
pub const STEPS: u32 = 4;
/// Bytes of dynamic shared memory of a block.
pub const SHARED_BYTES: u32 = STEPS * (TILE_TOKENS + TILE_ROWS) * DEPTH * 2;
/// Rows of a strip. Blocks that multiply at the same time share the part of `X` that they load for it.
pub const STRIP_ROWS: u32 = 2 * TILE_ROWS;
/// Number of stages.
pub const STAGES: u32 = 3;

/// Parameters of a product of halves in GPU memory, and the assignment of its tiles to blocks.
///
/// Argument of `nvme_gemm` and `nvme_gemm_clear`. Tokens and rows may be any number: the tiles at the edges
/// of `y` are cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GemmParameters {
    /// Address of `tokens` rows of `columns` halves, a multiple of 16.
    pub x: u64,
    /// Address of `rows` rows of `columns` halves, a multiple of 16; unused if they are streamed.
    pub w: u64,
    /// Address of `tokens` rows of `rows` `f32`.
    pub y: u64,
    /// Address of [`work_words`](Self::work_words) 32-bit words, zeroed by `nvme_gemm_clear`.
    pub words: u64,
    /// Rows of `x`.
    pub tokens: u32,
    /// Rows of `w`.
    pub rows: u32,
    /// Columns of both, a multiple of [`DEPTH`], at least one.
    pub columns: u32,
    /// 1 if the halves are f16, 0 if they are bf16.
    pub is_f16: u32,
}

/// A tile of `Y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmTile {
    /// Strip that it needs.
    pub strip: u32,
    /// First row of `X`.
    pub token: u32,
    /// First row of `W`.
    pub row: u32,
}

impl GemmParameters {
    /// Returns the number of strips.
    pub const fn strips(&self) -> u32 {
        self.rows.div_ceil(STRIP_ROWS)
    }

    /// Returns the number of rows of strip `strip`.
    pub const fn strip_rows(&self, strip: u32) -> u32 {
        let left = self.rows.saturating_sub(strip * STRIP_ROWS);
        if left < STRIP_ROWS { left } else { STRIP_ROWS }
    }

    /// Returns the number of tiles of strip `strip`, which is the number of uses of its stage.
    pub const fn tiles_of(&self, strip: u32) -> u32 {
        self.strip_rows(strip).div_ceil(TILE_ROWS) * self.tokens.div_ceil(TILE_TOKENS)
    }

    /// Returns tile `ticket` of all, strip by strip. Tiles of the same tokens are consecutive.
    ///
    /// Consecutive blocks so use the same strip of `W` at the same time and share it in the L2 cache, and the
    /// strip's stage becomes free as early as possible.
    pub const fn tile(&self, ticket: u32) -> Option<GemmTile> {
        let of_strip = (STRIP_ROWS / TILE_ROWS) * self.tokens.div_ceil(TILE_TOKENS);
        let Some(strip) = ticket.checked_div(of_strip) else {
            return None;
        };
        let at = ticket - strip * of_strip;
        if strip >= self.strips() || at >= self.tiles_of(strip) {
            return None;
        }
        let across = self.strip_rows(strip).div_ceil(TILE_ROWS);
        let Some(down) = at.checked_div(across) else {
            return None;
        };
        Some(GemmTile {
            strip,
            token: down * TILE_TOKENS,
            row: strip * STRIP_ROWS + (at - down * across) * TILE_ROWS,
        })
    }

    /// Returns the number of 32-bit words of a launch: three counters, those of the strips, and a code for
    /// each row.
    pub const fn work_words(&self) -> u64 {
        3 + words(self.strips()) as u64 + self.rows as u64
    }

    /// Returns the address of the counter that assigns roles to blocks.
    pub const fn roles(&self) -> u64 {
        self.words
    }

    /// Returns the address of the counter of tiles.
    pub const fn tiles(&self) -> u64 {
        self.words + 4
    }

    /// Returns the address of the counter of batches.
    pub const fn batches(&self) -> u64 {
        self.words + 8
    }

    /// Returns the address of the words of the strips.
    pub const fn strip_words(&self) -> u64 {
        self.words + 12
    }

    /// Returns the address of the code of row `row`: 0, or the reason why it was not read.
    pub const fn code(&self, row: u32) -> u64 {
        self.strip_words() + 4 * (words(self.strips()) as u64 + row as u64)
    }
}

/// Parameters of `Y = X W^T` for a matrix `W` on a drive: the blocks of one launch read it, and multiply with
/// the strips read so far.
///
/// Columns of `Y` whose row of `W` was not read whole are NaN, and counted as failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GemmStreamed {
    /// Location of the rows of `W`: `count` and `rows` rows from `first_byte` on, an even number, `row_bytes`
    /// bytes each.
    pub rows: GatherLaunch,
    /// Product to compute.
    pub gemm: GemmParameters,
    /// Address of [`stage_bytes`](Self::stage_bytes) bytes for each of [`STAGES`] stages, a multiple of 16.
    pub stages: u64,
    /// Limit of the time that blocks wait for each other, in nanoseconds.
    pub patience_ns: u64,
    /// Number of the [`StoredFormat`](nvme_formats::StoredFormat) of `W`: neither f32 nor MXFP4.
    pub stored: u32,
    /// Number of blocks that read, at least 1.
    pub readers: u32,
    /// Rows of a part of a strip, a power of two, [`STRIP_ROWS`] at most.
    pub part_rows: u32,
    /// Bytes of a read, for the [`RowSplit`] of a part.
    pub piece_bytes: u32,
    /// Reads of a part, for its [`RowSplit`].
    pub of_part: u32,
    /// log2 of the bytes of a read's stage, for the [`RowSplit`].
    pub stage_shift: u32,
}

/// The role of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRole {
    /// The block reads parts of strips.
    Reads,
    /// The block computes tiles.
    Multiplies,
}

impl GemmStreamed {
    /// Returns the role of the block that started as number `ticket` of its launch.
    ///
    /// The first one reads and the second one multiplies, so any two blocks that are on the GPU together can
    /// finish the launch. With all readers first, a GPU with room for few blocks would never start one that
    /// multiplies, and the readers would wait for free stages for ever.
    pub const fn role(&self, ticket: u32) -> BlockRole {
        match ticket {
            0 => BlockRole::Reads,
            1 => BlockRole::Multiplies,
            _ if ticket <= self.readers => BlockRole::Reads,
            _ => BlockRole::Multiplies,
        }
    }

    /// Returns the bytes of a stage.
    pub const fn stage_bytes(columns: u32) -> u64 {
        STRIP_ROWS as u64 * columns as u64 * 2
    }

    /// Returns the address of the stage of strip `strip`.
    pub const fn stage(&self, strip: u32) -> u64 {
        self.stages + (strip % STAGES) as u64 * Self::stage_bytes(self.gemm.columns)
    }

    /// Returns the number of parts of all strips.
    pub const fn parts(&self) -> u64 {
        match self.gemm.rows.checked_next_multiple_of(self.part_rows) {
            Some(rows) => match rows.checked_div(self.part_rows) {
                Some(parts) => parts as u64,
                None => 0,
            },
            None => 0,
        }
    }

    /// Returns the number of parts of strip `strip`.
    pub const fn parts_of(&self, strip: u32) -> u32 {
        let rows = self.gemm.strip_rows(strip);
        match rows
            .wrapping_add(self.part_rows - 1)
            .checked_div(self.part_rows)
        {
            Some(parts) => parts,
            None => 0,
        }
    }

    /// Returns the split of a part into reads.
    pub const fn split(&self) -> Option<RowSplit> {
        let Some(of_row) = NonZeroU32::new(self.of_part) else {
            return None;
        };
        Some(RowSplit {
            row_bytes: self.rows.row_bytes * self.part_rows,
            piece_bytes: self.piece_bytes,
            of_row,
            stage_shift: self.stage_shift,
        })
    }

    /// Returns the number of consecutive parts that a warp reads in one batch: as many as its slots hold.
    pub const fn batch_parts(&self) -> u64 {
        match (WARP_BYTES >> self.stage_shift).checked_div(self.of_part as u64) {
            None | Some(0) => 1,
            Some(parts) => parts,
        }
    }

    /// Returns the first byte of part `part` on the drive.
    ///
    /// A part of the last strip may have fewer rows than the others; its end is `row_byte` of the number of
    /// rows.
    pub const fn part_byte(&self, part: u64) -> u64 {
        self.row_byte(part * self.part_rows as u64)
    }

    /// Returns the first byte of row `row` on the drive; for the number of rows, the end of the last row.
    pub const fn row_byte(&self, row: u64) -> u64 {
        self.rows.first_byte + row * self.rows.row_bytes as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn tiles_cover_every_element_once_strip_after_strip() {
        for (tokens, rows) in [
            (0, 5),
            (1, 1),
            (128, 256),
            (129, 257),
            (1000, 512),
            (77, 1300),
            (5, 513),
        ] {
            let gemm = GemmParameters {
                tokens,
                rows,
                columns: 32,
                ..GemmParameters::default()
            };
            let mut seen = BTreeMap::new();
            let mut of_strip = vec![0; gemm.strips() as usize];
            let mut last = 0;
            for ticket in 0.. {
                let Some(tile) = gemm.tile(ticket) else { break };
                assert!(tile.strip >= last);
                last = tile.strip;
                of_strip[tile.strip as usize] += 1;
                assert!(tile.row / STRIP_ROWS == tile.strip && tile.row < rows);
                assert!(tile.token < tokens);
                assert_eq!(seen.insert((tile.row, tile.token), ticket), None);
            }
            let all = rows.div_ceil(TILE_ROWS) * tokens.div_ceil(TILE_TOKENS);
            assert_eq!(seen.len() as u32, all);
            for (strip, tiles) in of_strip.into_iter().enumerate() {
                assert_eq!(tiles, gemm.tiles_of(strip as u32), "{tokens} x {rows}");
            }
        }
    }

    #[test]
    fn parts_are_those_of_their_strips() {
        for (rows, part_rows) in [(1, 1), (512, 4), (513, 512), (1300, 8), (5, 2)] {
            let streamed = GemmStreamed {
                gemm: GemmParameters {
                    rows,
                    ..GemmParameters::default()
                },
                part_rows,
                ..GemmStreamed::default()
            };
            let strips = 0..streamed.gemm.strips();
            let sum: u32 = strips.map(|strip| streamed.parts_of(strip)).sum();
            assert_eq!(u64::from(sum), streamed.parts());
        }
    }

    #[test]
    fn of_the_first_two_blocks_one_reads() {
        for readers in 1..9 {
            let streamed = GemmStreamed {
                readers,
                ..GemmStreamed::default()
            };
            let roles = (0..40).map(|ticket| streamed.role(ticket));
            let reading = roles.filter(|role| *role == BlockRole::Reads).count();
            assert_eq!(reading, readers as usize);
            assert_eq!(streamed.role(0), BlockRole::Reads);
            assert_eq!(streamed.role(1), BlockRole::Multiplies);
        }
    }
}
