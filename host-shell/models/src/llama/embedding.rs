//! Rows of the embeddings of tokens, which are read one by one and not loaded with a layer.

use nvme_formats::StoredFormat;
use nvme_host::Store;
use std::ops::Range;
use std::sync::Arc;

/// The embeddings, read row by row.
#[derive(Clone)]
pub struct EmbeddingTable {
    pub store: Arc<Store>,
    pub places: Vec<EmbeddingExtent>,
    pub row_bytes: u64,
    pub stored: StoredFormat,
}

/// A range of the embeddings' bytes, and its offset in the store.
#[derive(Clone, Debug)]
pub struct EmbeddingExtent {
    /// Byte range within the embeddings; extents are ordered by it.
    bytes: Range<u64>,
    /// Offset of the range's first byte in the store.
    first: u64,
}

impl EmbeddingExtent {
    /// Returns the places of `ranges` of the store, whose bytes are contiguous in the embeddings.
    pub fn all(ranges: Vec<Range<u64>>) -> Vec<Self> {
        let mut at = 0;
        let places = ranges.into_iter().map(|range| {
            let begin = at;
            at += range.end - range.start;
            Self {
                bytes: begin..at,
                first: range.start,
            }
        });
        places.collect()
    }
}

/// A part of a row.
pub struct RowPart {
    /// First byte in the store.
    pub offset: u64,
    pub bytes: u64,
    /// First byte among the rows that are read together, `stride` bytes each.
    pub at: u64,
}

impl EmbeddingTable {
    /// Returns the reads for the rows of `tokens`.
    pub fn parts(&self, tokens: &[u32], stride: u64) -> Vec<RowPart> {
        let mut parts = Vec::new();
        for (token, row) in tokens.iter().zip(0u64..) {
            let first = u64::from(*token) * self.row_bytes;
            let end = first + self.row_bytes;
            // A file in many pieces has many places, and a prompt many tokens.
            let holding = self
                .places
                .partition_point(|place| place.bytes.end <= first);
            for place in &self.places[holding..] {
                let (from, to) = (first.max(place.bytes.start), end.min(place.bytes.end));
                if from >= to {
                    break;
                }
                parts.push(RowPart {
                    offset: place.first + (from - place.bytes.start),
                    bytes: to - from,
                    at: row * stride + (from - first),
                });
            }
        }
        parts
    }
}
