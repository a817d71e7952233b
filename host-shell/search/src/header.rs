//! Header of an index, its first block: the geometry of all other parts. Every field is checked before it is used.

use super::metric::VectorMetric;
use super::source::{VectorDistribution, VectorSource};
use nvme_compute_kernel::search::{
    self, CENTROIDS, MOST_DEGREE, MOST_ELEMENTS, NODE_BLOCK, node_bytes,
};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 4096;
/// Largest number of nodes of an index.
pub const MOST_NODES: u64 = search::MOST_NODES;
const MAGIC: [u8; 8] = *b"NVMEVSEA";
const VERSION: u32 = 1;
/// Number of bytes of a header that are used; the others are 0.
const USED: usize = 80;

/// Parameters and checksums of an index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexHeader {
    /// Source of the vectors and the number of their elements; for generated ones the distribution and the seed.
    pub source: VectorSource,
    /// Elements of a subspace.
    pub sub_elements: u32,
    /// Largest number of neighbours of a node.
    pub degree: u32,
    /// Entry point of searches.
    pub entry: u32,
    /// Tag that each node repeats.
    pub tag: u32,
    /// [`checksum`] of the centroids.
    pub centroids_sum: u64,
    /// Checksum of the codes.
    pub codes_sum: u64,
    /// Metric by which the vectors are compared.
    pub metric: VectorMetric,
    /// Length of the longest vector, by which [`VectorMetric::InnerProduct`] divided all vectors; 0 for other metrics.
    pub longest: f32,
}

impl IndexHeader {
    /// Parses the header in `bytes`.
    ///
    /// # Errors
    /// Description of its fault.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(format!("{} bytes are no header", bytes.len()));
        };
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if bytes[..8] != MAGIC {
            return Err("no index begins here".to_owned());
        }
        if word(8) != VERSION {
            return Err(format!("an index of version {}, not {VERSION}", word(8)));
        }
        if long(72) != checksum(&bytes[..72]) || bytes[USED..].iter().any(|byte| *byte != 0) {
            return Err("the header's checksum is wrong".to_owned());
        }
        let kind = VectorDistribution::ALL.get(word(12) as usize);
        let kind = kind.ok_or_else(|| format!("vectors of kind {}", word(12)))?;
        let metric = VectorMetric::ALL.get(word(64) as usize);
        let metric = metric.ok_or_else(|| format!("a metric of the number {}", word(64)))?;
        let header = Self {
            metric: *metric,
            longest: f32::from_bits(word(68)),
            source: VectorSource {
                kind: *kind,
                seed: long(16),
                count: word(24),
                elements: word(28),
            },
            sub_elements: word(32),
            degree: word(36),
            entry: word(40),
            tag: word(44),
            centroids_sum: long(48),
            codes_sum: long(56),
        };
        header.check()?;
        Ok(header)
    }

    /// # Errors
    /// The impossible number.
    pub fn check(&self) -> Result<(), String> {
        let (count, elements) = (self.source.count, self.elements());
        for (what, value, most) in [
            ("vectors", u64::from(count), MOST_NODES),
            ("elements", elements.into(), MOST_ELEMENTS.into()),
            (
                "elements of a subspace",
                self.sub_elements.into(),
                elements.into(),
            ),
            ("neighbours", self.degree.into(), MOST_DEGREE.into()),
            (
                "for the first node, counted from 1,",
                u64::from(self.entry) + 1,
                count.into(),
            ),
        ] {
            if !(1..=most).contains(&value) {
                return Err(format!("{value} {what}: there may be 1 to {most}"));
            }
        }
        let is_length = match self.metric {
            VectorMetric::InnerProduct => self.longest.is_finite() && self.longest > 0.0,
            VectorMetric::Euclidean | VectorMetric::Cosine => self.longest.to_bits() == 0,
        };
        if !is_length || self.source.elements == 0 {
            return Err(format!(
                "a longest vector of {} elements and the length {}",
                self.source.elements, self.longest
            ));
        }
        Ok(())
    }

    /// Returns the header as it is stored.
    pub fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        let mut put = |at: usize, word: u64, length: usize| {
            bytes[at..at + length].copy_from_slice(&word.to_le_bytes()[..length]);
        };
        for (at, word) in [
            (8, VERSION),
            (12, self.source.kind as u32),
            (24, self.source.count),
            (28, self.source.elements),
            (32, self.sub_elements),
            (36, self.degree),
            (40, self.entry),
            (44, self.tag),
            (64, self.metric as u32),
            (68, self.longest.to_bits()),
        ] {
            put(at, word.into(), 4);
        }
        for (at, word) in [
            (16, self.source.seed),
            (48, self.centroids_sum),
            (56, self.codes_sum),
        ] {
            put(at, word, 8);
        }
        let sum = checksum(&bytes[..72]);
        bytes[72..USED].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Returns the number of elements of a vector in nodes, in which it is compared.
    pub fn elements(&self) -> u32 {
        self.metric.stored_elements(self.source.elements)
    }

    /// Bytes of a node.
    pub fn node_bytes(&self) -> u64 {
        node_bytes(self.elements())
    }

    /// Returns the number of bytes from the codes of one node to those of the next.
    pub fn code_bytes(&self) -> u64 {
        let subspaces = self.elements().div_ceil(self.sub_elements.max(1));
        u64::from(subspaces).next_multiple_of(4)
    }

    /// Returns the number of bytes of all centroids.
    pub fn centroids_bytes(&self) -> u64 {
        u64::from(self.elements()) * u64::from(CENTROIDS) * 4
    }

    /// Returns the number of bytes of all codes.
    pub fn codes_bytes(&self) -> u64 {
        u64::from(self.source.count) * self.code_bytes()
    }

    /// Returns the offset of the centroids from the start of the index.
    pub fn centroids_at(&self) -> u64 {
        HEADER_BYTES as u64
    }

    /// Returns the offset of the codes.
    pub fn codes_at(&self) -> u64 {
        let end = self.centroids_at() + self.centroids_bytes();
        end.next_multiple_of(NODE_BLOCK)
    }

    /// Returns the offset of the nodes.
    pub fn nodes_at(&self) -> u64 {
        (self.codes_at() + self.codes_bytes()).next_multiple_of(NODE_BLOCK)
    }

    /// Returns the number of bytes of the index.
    pub fn bytes_of_index(&self) -> u64 {
        self.nodes_at() + u64::from(self.source.count) * self.node_bytes()
    }
}

/// Computes a checksum against accidental damage; it is no protection against intent.
pub fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let all = words.iter().chain([&last]);
    all.fold(bytes.len() as u64, |sum, word| {
        let mixed = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed ^ mixed >> 29
    })
}
