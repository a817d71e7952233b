//! The kernel that hashes chunks of GPU memory by XXH3, and the words of host memory that it writes the hashes to.
// UNSAFETY: launches a kernel over addresses that the caller vouches for; reads words that the GPU has written.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::module::{KernelFunction, Module};
use super::registered::RegisteredMemory;
use nvme_driver::dma::pages::DmaPages;
use nvme_driver::error::{Error, Result};
pub use nvme_gpu_kernel::hash::HashChunk as HashedChunk;
use nvme_gpu_kernel::hash::HashChunks;
use std::sync::Arc;

/// Threads of a block: 8 warps, each with a chunk.
const BLOCK_THREADS: u32 = 256;
/// Largest number of blocks of a launch: twice as many as a large GPU has multiprocessors.
const MOST_BLOCKS: u64 = 264;

/// `nvme_hash_chunks`, loaded for one GPU.
pub struct ChunkHasher {
    module: Module,
    function: KernelFunction,
}

impl ChunkHasher {
    /// # Errors
    /// As [`Module::of_image`].
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::of_image(gpu, &nvme_gpu_kernel::HASH)?;
        let function = module.function("nvme_hash_chunks")?;
        Ok(Self { module, function })
    }

    /// Enqueues in `stream` the hashing of `count` [`HashedChunk`]s, which lie at `chunks` in GPU memory.
    /// Offsets of chunks count from `base`; hash k is written to `hashes + 8 k`.
    ///
    /// # Safety
    /// All of that memory, and up to 7 bytes before and after each chunk, stays valid until the stream has
    /// passed the kernel; nothing writes to chunks meanwhile. `hashes` is a multiple of 8.
    ///
    /// # Errors
    /// As [`Module::launch_in`].
    pub unsafe fn launch(
        &self,
        stream: u64,
        (chunks, count): (u64, u64),
        base: u64,
        hashes: u64,
    ) -> Result<()> {
        let job = HashChunks {
            chunks,
            base,
            hashes,
            count,
        };
        let warps = u64::from(BLOCK_THREADS / 32);
        let blocks = count.div_ceil(warps).clamp(1, MOST_BLOCKS) as u32;
        // SAFETY: the kernel takes one `HashChunks`; the caller vouches for the addresses.
        unsafe {
            self.module
                .launch_in(stream, self.function, blocks, BLOCK_THREADS, &job)
        }
    }

    /// Registers and bytes of local memory of a thread.
    ///
    /// # Errors
    /// As [`Module::cost`].
    pub fn cost(&self) -> Result<(u32, u32)> {
        self.module.cost(self.function)
    }
}

/// Words of 8 bytes in memory of the host, which kernels write.
pub struct HostWords {
    pages: Arc<DmaPages>,
    registered: RegisteredMemory,
    count: usize,
}

impl HostWords {
    /// Allocates `count` zeroed words.
    ///
    /// # Errors
    /// Without memory that the GPU reaches.
    pub fn new(gpu: &Arc<Gpu>, count: usize) -> Result<Self> {
        let bytes = count.checked_mul(8).filter(|bytes| *bytes <= 1 << 40);
        let bytes = bytes.ok_or_else(|| {
            Error::usage(
                format!("{count} words for hashes exceed 2^40 bytes"),
                "use larger chunks",
            )
        })?;
        let (pages, registered) = RegisteredMemory::pinned(gpu, bytes.max(8))?;
        Ok(Self {
            pages,
            registered,
            count,
        })
    }

    /// Returns the GPU's address of word `index`.
    pub fn address(&self, index: usize) -> u64 {
        self.registered.address() + index as u64 * 8
    }

    /// Returns word `index`, 0 past the end. Words that kernels wrote are visible once their end
    /// was seen.
    pub fn get(&self, index: usize) -> u64 {
        if index >= self.count {
            return 0;
        }
        // SAFETY: the word lies inside the pages, which are aligned and mapped as long as this lives. Volatile, since
        // the GPU writes the word and the compiler must not keep an older value of it.
        unsafe { self.pages.start().cast::<u64>().add(index).read_volatile() }
    }
}
