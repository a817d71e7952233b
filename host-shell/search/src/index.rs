//! An index on a store: the part of it that lies in memory, and access to its nodes.

use super::header::{HEADER_BYTES, IndexHeader, checksum};
use super::source::VectorSet;
use nvme_compute_kernel::search::NODE_BLOCK;
use nvme_compute_kernel::search::walk::{IndexQuantisation, NodeWords};
use nvme_driver::{Error, Result};
use nvme_store::Store;
use std::sync::Arc;

/// Bytes that are read at a time when an index is opened.
const PIECE: usize = 8 << 20;

/// An index that can be searched. Centroids and codes of the vectors are in memory, nodes on the store.
#[derive(Debug)]
pub struct VectorIndex {
    pub(super) store: Arc<Store>,
    offset: u64,
    header: IndexHeader,
    pub(super) centroids: Vec<f32>,
    pub(super) codes: Vec<u8>,
}

impl VectorIndex {
    /// Opens the index at byte `offset` of `store`. None of its bytes is trusted: header, centroids and codes are
    /// checked here, each node when it is read.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no index, or a damaged one; the errors of reads.
    pub fn open(store: &Arc<Store>, offset: u64) -> Result<Self> {
        let mut head = [0; HEADER_BYTES];
        store.read_at(offset, &mut head)?;
        let header = IndexHeader::parse(&head).map_err(|why| broken(offset, &why))?;
        let end = offset.checked_add(header.bytes_of_index());
        if !offset.is_multiple_of(NODE_BLOCK) || end.is_none_or(|end| end > store.len()) {
            return Err(broken(offset, "it does not lie inside the device"));
        }
        let read = |at: u64, bytes: u64, sum: u64, what: &str| {
            let bytes = read(store, offset + at, bytes)?;
            match checksum(&bytes) == sum {
                true => Ok(bytes),
                false => Err(broken(
                    offset,
                    &format!("the checksum of its {what} is wrong"),
                )),
            }
        };
        let (at, bytes) = (header.centroids_at(), header.centroids_bytes());
        let centroids = read(at, bytes, header.centroids_sum, "centroids")?;
        let words = centroids.as_chunks::<4>().0.iter();
        let centroids: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
        if !centroids.iter().all(|x| x.is_finite()) {
            return Err(broken(offset, "a centroid is not finite"));
        }
        let (at, bytes) = (header.codes_at(), header.codes_bytes());
        Ok(Self {
            codes: read(at, bytes, header.codes_sum, "codes")?,
            store: Arc::clone(store),
            offset,
            header,
            centroids,
        })
    }

    /// Returns the header.
    pub fn header(&self) -> &IndexHeader {
        &self.header
    }

    /// Returns the store on which the index lies.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Returns the number of bytes of memory that searches need beside their queries.
    pub fn memory_bytes(&self) -> u64 {
        self.header.centroids_bytes() + self.header.codes_bytes()
    }

    /// Returns the nodes.
    #[cfg(feature = "cuda")]
    pub(super) fn nodes(&self) -> Result<nvme_store::Table> {
        let first = self.offset + self.header.nodes_at();
        self.store.table(
            first,
            self.header.source.count.into(),
            self.header.node_bytes(),
        )
    }

    /// Returns the offset of node `id`.
    pub(super) fn node_at(&self, id: u32) -> u64 {
        self.offset + self.header.nodes_at() + u64::from(id) * self.header.node_bytes()
    }

    pub(super) fn quantised(&self) -> IndexQuantisation<'_> {
        IndexQuantisation {
            centroids: &self.centroids,
            codes: &self.codes,
            elements: self.header.elements() as usize,
            sub_elements: self.header.sub_elements as usize,
            code_bytes: self.header.code_bytes() as usize,
            nodes: self.header.source.count,
            tag: self.header.tag,
        }
    }

    /// Reads the vectors of the nodes: [`VectorMetric::of_vectors`](super::VectorMetric::of_vectors) of the caller's
    /// vectors.
    ///
    /// # Errors
    /// [`Error::Device`] for a node with another id than expected; the errors of reads; [`Error::Environment`] without
    /// memory.
    pub fn vectors(&self) -> Result<VectorSet> {
        let (count, elements) = (self.header.source.count, self.header.elements());
        let node_bytes = self.header.node_bytes();
        let index = self.quantised();
        let mut numbers = Vec::new();
        let none = |_| Error::environment("no memory for the vectors", "use a smaller index");
        let all = count as usize * elements as usize;
        numbers.try_reserve_exact(all).map_err(none)?;
        let step = (PIECE as u64 / node_bytes) as u32;
        let mut first = 0;
        while first < count {
            let nodes = step.min(count - first);
            let bytes = read(
                &self.store,
                self.node_at(first),
                u64::from(nodes) * node_bytes,
            )?;
            for (node, id) in bytes.chunks_exact(node_bytes as usize).zip(first..) {
                let words = node.as_chunks::<4>().0.iter();
                let words: Vec<u32> = words.map(|word| u32::from_le_bytes(*word)).collect();
                let node = NodeWords::of(&words, id, &index).ok_or_else(|| {
                    broken(self.offset, &format!("node {id} is not what it should be"))
                })?;
                numbers.extend(node.vector());
            }
            first += nodes;
        }
        VectorSet::new(elements, numbers)
    }

    /// Returns the number of queries in `numbers` elements.
    ///
    /// # Errors
    /// [`Error::Usage`] for an incomplete query.
    pub(super) fn queries(&self, numbers: usize) -> Result<usize> {
        let elements = self.header.source.elements as usize;
        match numbers.is_multiple_of(elements) {
            true => Ok(numbers / elements),
            false => Err(Error::usage(
                format!("{numbers} numbers are no whole queries of {elements}"),
                "use as many elements as the vectors of the index have",
            )),
        }
    }
}

fn broken(offset: u64, why: &str) -> Error {
    Error::device(
        format!("the index at byte {offset}: {why}"),
        "check the offset, or build the index again (nvme-gpu search build)",
    )
}

fn read(store: &Store, at: u64, bytes: u64) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    let none = || {
        Error::environment(
            format!("no memory for {bytes} bytes"),
            "use a smaller index",
        )
    };
    let length = usize::try_from(bytes).map_err(|_| none())?;
    all.try_reserve_exact(length).map_err(|_| none())?;
    all.resize(length, 0);
    for (piece, number) in all.chunks_mut(PIECE).zip(0..) {
        store.read_at(at + number * PIECE as u64, piece)?;
    }
    Ok(all)
}
