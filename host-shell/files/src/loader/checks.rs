//! The chunks of a manifest that lie in the memory of a layer.

use super::chunk::LayerChunk;
use super::plan::{LayerPlan, ModelLayers};
use crate::manifest::Manifest;
use nvme_driver::error::{Error, Result};
use std::ops::Range;

impl LayerPlan {
    /// Returns the chunks by which the layer is verified, in the order of its memory; none without a manifest.
    pub fn chunks(&self) -> &[LayerChunk] {
        &self.chunks
    }

    /// Returns the number of bytes of the layer that are verified.
    pub fn verified_bytes(&self) -> u64 {
        self.chunks
            .iter()
            .map(|one| u64::from(one.chunk.bytes))
            .sum()
    }

    /// Returns the ranges to verify: the layer's tensors, or all of its bytes if it has none.
    fn to_verify(&self) -> Vec<(u64, u64)> {
        match self.tensors().is_empty() {
            true => self
                .pieces()
                .iter()
                .map(|one| (one.at, one.bytes))
                .collect(),
            false => self
                .tensors()
                .iter()
                .map(|one| (one.at, one.bytes))
                .collect(),
        }
    }

    /// Returns the file's bytes that lie in the layer's memory from `at` on.
    fn place(&self, at: u64, bytes: u64, begin: u64) -> Option<Range<u64>> {
        // They are in the order of the layer's memory, which no two share.
        let behind = self.pieces().partition_point(|piece| piece.at <= at);
        let piece = self.pieces().get(behind.checked_sub(1)?)?;
        if at + bytes > piece.at + piece.bytes {
            return None;
        }
        let offset = (piece.offset + (at - piece.at)).checked_sub(begin)?;
        Some(offset..offset + bytes)
    }
}

impl ModelLayers {
    /// Returns the same layers, verified by `manifest` when they are loaded: a layer that differs from the
    /// manifest's file is an error, and is never returned to a caller. The file begins at offset `begin` of the
    /// layers' positions ([`Catalog::begin`](crate::Catalog::begin)). Of layers with tensors only the tensors
    /// are verified, not the gaps between them.
    ///
    /// Call it before [`placed`](Self::placed).
    ///
    /// # Errors
    /// [`Error::Usage`] for layers that are not whole chunks of the manifest, or do not lie in its file.
    pub fn verified_by(mut self, manifest: &Manifest, begin: u64) -> Result<Self> {
        for layer in &mut self.layers {
            let mut chunks = Vec::new();
            for (at, bytes) in layer.to_verify() {
                if bytes == 0 {
                    continue;
                }
                let named = |error: Error| error.with_context(&format!("layer {}", layer.name()));
                let range = layer.place(at, bytes, begin).ok_or_else(|| {
                    named(Error::usage(
                        format!("its bytes lie before byte {begin}, where the file begins"),
                        "give the place of the manifest's file",
                    ))
                })?;
                let first = range.start;
                let found = manifest.chunks_of(range).map_err(named)?;
                chunks.extend(found.into_iter().map(|chunk| LayerChunk {
                    at: at + (chunk.offset - first),
                    chunk,
                }));
            }
            layer.chunks = chunks.into();
        }
        Ok(self)
    }
}
