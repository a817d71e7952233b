//! `Y = X W^T` whose matrix `W` streams from a drive through a few stages of GPU memory: how a launch is shared out. The
//! kernels, the host and the stand-in of CUDA use the same words.
//!
//! `W` has strips of [`STRIP_ROWS`] rows. Blocks that read fill the stage of a strip in parts of a few rows,
//! as elements of 16 bits; blocks that multiply take tiles of [`TILE_TOKENS`] x [`TILE_ROWS`] elements of `Y`, strip after
//! strip. [`Strips`](nvme_core::strips::Strips) is what they wait by.

#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod kernel;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod multiply;
#[cfg(all(target_arch = "nvptx64", feature = "gemm"))]
mod read;

use core::num::NonZeroU32;
use nvme_core::strips::words;
use nvme_gpu_kernel::ring::RowSplit;
use nvme_gpu_kernel::rows::{Gather, WARP_BYTES};

/// Tokens of a tile.
pub const TILE_TOKENS: u32 = 128;
/// Rows of `W` of a tile.
pub const TILE_ROWS: u32 = 256;
/// Columns that a block has in shared memory at a time.
pub const DEPTH: u32 = 32;
/// How many such steps are under way or in use.
pub const STEPS: u32 = 4;
/// Bytes of dynamic shared memory of a block.
pub const SHARED_BYTES: u32 = STEPS * (TILE_TOKENS + TILE_ROWS) * DEPTH * 2;
/// Rows of a strip, of which blocks that multiply at the same time share what they load of `X`.
pub const STRIP_ROWS: u32 = 2 * TILE_ROWS;
/// Stages of strips.
pub const STAGES: u32 = 3;

/// A product of halves in GPU memory, and how its tiles are shared out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Gemm {
    /// `tokens` rows of `columns` halves, at a multiple of 16.
    pub x: u64,
    /// `rows` rows of `columns` halves, at a multiple of 16; nothing where they are streamed.
    pub w: u64,
    /// `tokens` rows of `rows` `f32`.
    pub y: u64,
    /// [`work_words`](Self::work_words) words of 32 bits, which `nvme_gemm_clear` has zeroed.
    pub words: u64,
    /// Rows of `x`.
    pub tokens: u32,
    /// Rows of `w`.
    pub rows: u32,
    /// Columns of both, a multiple of [`DEPTH`], at least one.
    pub columns: u32,
    /// 1 where the halves are f16, 0 where they are bf16.
    pub is_f16: u32,
}

/// A tile of `Y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The strip that it needs.
    pub strip: u32,
    /// Its first row of `X`.
    pub token: u32,
    /// Its first row of `W`.
    pub row: u32,
}

impl Gemm {
    /// How many strips there are.
    pub const fn strips(&self) -> u32 {
        self.rows.div_ceil(STRIP_ROWS)
    }

    /// Rows of strip `strip`.
    pub const fn strip_rows(&self, strip: u32) -> u32 {
        let left = self.rows.saturating_sub(strip * STRIP_ROWS);
        if left < STRIP_ROWS { left } else { STRIP_ROWS }
    }

    /// Tiles of strip `strip`: the uses of its stage.
    pub const fn tiles_of(&self, strip: u32) -> u32 {
        self.strip_rows(strip).div_ceil(TILE_ROWS) * self.tokens.div_ceil(TILE_TOKENS)
    }

    /// Tile `ticket` of all, strip after strip. Tiles of the same tokens follow on each other.
    pub const fn tile(&self, ticket: u32) -> Option<Tile> {
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
        Some(Tile {
            strip,
            token: down * TILE_TOKENS,
            row: strip * STRIP_ROWS + (at - down * across) * TILE_ROWS,
        })
    }

    /// Words of 32 bits that a launch has besides: three counters, those of the strips, and a code for each row.
    pub const fn work_words(&self) -> u64 {
        3 + words(self.strips()) as u64 + self.rows as u64
    }

    /// Where the counter lies that tells blocks what they do.
    pub const fn roles(&self) -> u64 {
        self.words
    }

    /// Where the counter of tiles lies.
    pub const fn tiles(&self) -> u64 {
        self.words + 4
    }

    /// Where the counter of batches lies.
    pub const fn batches(&self) -> u64 {
        self.words + 8
    }

    /// Where the words of the strips lie.
    pub const fn strip_words(&self) -> u64 {
        self.words + 12
    }

    /// Where the code of row `row` lies: 0, or why it was not read.
    pub const fn code(&self, row: u32) -> u64 {
        self.strip_words() + 4 * (words(self.strips()) as u64 + row as u64)
    }
}

/// `Y = X W^T` for a matrix `W` on a drive: the blocks of one launch read it, and multiply with what has come.
///
/// Columns of `Y` whose row of `W` was not read whole are NaN, and counted as failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GemmStreamed {
    /// The rows of `W`: `count` and `rows` of them from `first_byte` on, an even number, `row_bytes` bytes each.
    pub rows: Gather,
    /// The product.
    pub gemm: Gemm,
    /// [`stage_bytes`](Self::stage_bytes) bytes for each of [`STAGES`] stages, at a multiple of 16.
    pub stages: u64,
    /// How long blocks wait for each other.
    pub patience_ns: u64,
    /// The [`Stored`](nvme_formats::Stored) of `W`: not f32.
    pub stored: u32,
    /// Blocks that read, at least 1.
    pub readers: u32,
    /// Rows of a part of a strip, a power of two, [`STRIP_ROWS`] at most.
    pub part_rows: u32,
    /// Of the [`RowSplit`] of a part.
    pub piece_bytes: u32,
    /// Of the [`RowSplit`].
    pub of_part: u32,
    /// Of the [`RowSplit`].
    pub stage_shift: u32,
}

/// What a block does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It reads parts of strips.
    Reads,
    /// It computes tiles.
    Multiplies,
}

impl GemmStreamed {
    /// What the block does that began as number `ticket` of its launch. The first one reads and the second one
    /// multiplies: two blocks of a launch that are on the GPU bring it to an end.
    pub const fn role(&self, ticket: u32) -> Role {
        match ticket {
            0 => Role::Reads,
            1 => Role::Multiplies,
            _ if ticket <= self.readers => Role::Reads,
            _ => Role::Multiplies,
        }
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(columns: u32) -> u64 {
        STRIP_ROWS as u64 * columns as u64 * 2
    }

    /// Where strip `strip` lies.
    pub const fn stage(&self, strip: u32) -> u64 {
        self.stages + (strip % STAGES) as u64 * Self::stage_bytes(self.gemm.columns)
    }

    /// Parts of all strips.
    pub const fn parts(&self) -> u64 {
        match self.gemm.rows.checked_next_multiple_of(self.part_rows) {
            Some(rows) => match rows.checked_div(self.part_rows) {
                Some(parts) => parts as u64,
                None => 0,
            },
            None => 0,
        }
    }

    /// Parts of strip `strip`.
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

    /// How a part is split into pieces.
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

    /// Parts that follow on each other, which a warp reads at a time: as many as its slots hold.
    pub const fn batch_parts(&self) -> u64 {
        match (WARP_BYTES >> self.stage_shift).checked_div(self.of_part as u64) {
            None | Some(0) => 1,
            Some(parts) => parts,
        }
    }

    /// Where part `part` begins on the drive.
    pub const fn part_byte(&self, part: u64) -> u64 {
        self.row_byte(part * self.part_rows as u64)
    }

    /// Where row `row` begins on the drive, or where the last one ends.
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
            let gemm = Gemm {
                tokens,
                rows,
                columns: 32,
                ..Gemm::default()
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
                gemm: Gemm {
                    rows,
                    ..Gemm::default()
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
            let reading = roles.filter(|role| *role == Role::Reads).count();
            assert_eq!(reading, readers as usize);
            assert_eq!(streamed.role(0), Role::Reads);
            assert_eq!(streamed.role(1), Role::Multiplies);
        }
    }
}
