//! Chunks of a manifest in memory, and their comparison with it.

use crate::manifest::ManifestChunk;
use nvme_driver::error::{Error, Result};
use xxhash_rust::xxh3::xxh3_64;

/// A chunk of a manifest in the memory of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerChunk {
    /// First byte in the layer's memory.
    pub at: u64,
    /// The chunk as the manifest describes it.
    pub chunk: ManifestChunk,
}

/// Compares the chunks in `memory`, the memory of a layer, by the CPU.
///
/// # Errors
/// [`Error::Mismatch`] for the first that is another one.
pub(super) fn verify(chunks: &[LayerChunk], memory: &[u8]) -> Result<()> {
    chunks.iter().try_for_each(|one| {
        let at = one.at as usize;
        let bytes = memory.get(at..at + one.chunk.bytes as usize);
        let bytes = bytes.ok_or_else(|| Error::internal("a chunk outside of its layer"))?;
        one.chunk.compare(xxh3_64(bytes))
    })
}
