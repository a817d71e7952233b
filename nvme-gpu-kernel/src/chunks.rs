//! `nvme_hash_chunks`: hashes of chunks in GPU memory, one warp a chunk.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::hash::{self, CONSTANTS, HashChunk, HashChunks, HashLanes, SHORT, fold};

/// The lanes of a warp over a chunk: lane `l` has column `l % 8` of stripes `l / 8`, `l / 8 + 4` and so on,
/// so that one load of all lanes covers 256 consecutive bytes. `ALIGNED`: the chunk begins at a multiple of
/// 8.
pub(crate) struct OnWarp<const ALIGNED: bool> {
    pub from: u64,
    pub lane: u32,
}

#[inline(always)]
fn swap(value: u64, bits: u32) -> u64 {
    let half = |half: u64| u64::from(arch::butterfly(arch::FULL, half as u32, bits));
    half(value >> 32) << 32 | half(value)
}

impl<const ALIGNED: bool> HashLanes<1, 4> for OnWarp<ALIGNED> {
    #[inline(always)]
    fn place(&self) -> (u32, u32) {
        (self.lane % 8, self.lane / 8)
    }

    #[inline(always)]
    fn load(&self, at: u32) -> u64 {
        match ALIGNED {
            // SAFETY: `at` is inside the chunk, which begins at a multiple of 8; the host vouches for the
            // chunk.
            true => unsafe { arch::load_word(self.from + u64::from(at)) },
            false => self.load_any(at),
        }
    }

    #[inline(always)]
    fn load_any(&self, at: u32) -> u64 {
        let from = self.from + u64::from(at);
        let shift = from as u32 % 8 * 8;
        // SAFETY: aligned words that contain a byte of the chunk; the host vouches for up to 7
        // bytes around it. Bytes outside the chunk are shifted out and never hashed.
        let (low, high) = unsafe { (arch::load_word(from & !7), arch::load_word((from + 7) & !7)) };
        low >> shift | high << 1 << (63 - shift)
    }

    #[inline(always)]
    fn byte(&self, at: u32) -> u64 {
        // SAFETY: `at` is inside the chunk.
        unsafe { arch::load_u8(self.from + u64::from(at)) }.into()
    }

    #[inline(always)]
    fn constant(&self, index: u32) -> u64 {
        // A Rust access would become a non-coherent load, which the checks of the PTX forbid.
        // SAFETY: inside the table; the host runs the same code with checked indices.
        unsafe { arch::load_word(&raw const CONSTANTS as u64 + u64::from(index) * 8) }
    }

    #[inline(always)]
    fn join(&self, [own]: [u64; 1], [other]: [u64; 1]) -> [u64; 1] {
        let mut sum = own.wrapping_add(swap(other, 1));
        sum = sum.wrapping_add(swap(sum, 8));
        [sum.wrapping_add(swap(sum, 16))]
    }

    #[inline(always)]
    fn total(&self, [column]: [u64; 1]) -> u64 {
        let mut sum = fold(column, swap(column, 1));
        sum = sum.wrapping_add(swap(sum, 2));
        sum.wrapping_add(swap(sum, 4))
    }
}

entry! {
    /// Hashes chunks. Blocks of whole warps; any number of blocks.
    ///
    /// # Safety
    /// Every address in `job` is valid as [`HashChunks`] documents; nothing writes to the chunks meanwhile.
    pub unsafe fn nvme_hash_chunks(job: HashChunks) {
        let of_block = arch::block_threads() / 32;
        let mut index = u64::from(arch::block() * of_block + arch::thread() / 32);
        let warps = u64::from(arch::blocks() * of_block);
        while index < job.count {
            let place = job.chunks + index * size_of::<HashChunk>() as u64;
            // SAFETY: the host vouches for `count` chunks.
            let (at, bytes) = unsafe { (arch::load_word(place), arch::load_word(place + 8)) };
            let (from, lane) = (job.base + at, arch::lane());
            let bytes = bytes as u32;
            let hash = match from % 8 {
                _ if bytes <= SHORT => hash::of_short(&OnWarp::<false> { from, lane }, bytes),
                0 => hash::of_long(&OnWarp::<true> { from, lane }, bytes),
                _ => hash::of_long(&OnWarp::<false> { from, lane }, bytes),
            };
            if lane == 0 {
                // SAFETY: the host vouches for `count` results; only this lane writes this one.
                unsafe { arch::store_u64(job.hashes + index * 8, hash) };
            }
            index += warps;
        }
    }
}
