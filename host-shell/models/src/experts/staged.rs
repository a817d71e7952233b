//! Memory of the GPU for published experts: the staging area into which they are read, the ranges of each, and their
//! biases.
// UNSAFETY: reads ranges to addresses of the cache.
#![allow(unsafe_code)]

use super::ExpertLayers;
use super::published::PublishedLayer;
use nvme_compute_kernel::experts::cache::words;
use nvme_compute_kernel::experts::published::{
    AdmitPublished, ArrangeParameters, StagedExpert, StagedParts, StagedRange, StagingArea,
};
use nvme_compute_kernel::experts::{AdmitParameters, MATRICES};
use nvme_formats::StoredFormat;
use nvme_host::Result;
use nvme_host::cuda::{DeviceMemory, Gpu, PendingRows, ReadRange};
use std::sync::Arc;

/// Bytes of the count before the experts that a step reads.
const STAGED_HEAD: u64 = 8;

/// Sizes of a staging area.
pub struct StagingSize {
    areas: u32,
    area_bytes: u64,
    most_ranges: u32,
    /// Reads of a step at most.
    pub pieces: u64,
}

impl StagingSize {
    /// Returns the sizes for `needed` experts of a step; `None` for experts that lie merged in the store.
    pub fn of(experts: &ExpertLayers, needed: u32, piece_bytes: u64) -> Option<Self> {
        let layers = &experts.published;
        let most_ranges = layers.iter().map(PublishedLayer::most_ranges).max()?;
        let area_bytes = layers.iter().map(PublishedLayer::staging_bytes).max()?;
        // A range may begin and end inside of a piece.
        let of_expert = area_bytes / piece_bytes + 2 * u64::from(most_ranges);
        Some(Self {
            areas: needed,
            area_bytes,
            most_ranges,
            pieces: of_expert * u64::from(needed),
        })
    }

    /// Returns the ranges of a step at most.
    pub fn list_ranges(&self) -> u32 {
        self.most_ranges * self.areas
    }
}

/// Published experts in memory of the GPU.
pub struct StagedExperts {
    area: StagingArea,
    most_ranges: u32,
    experts: u32,
    /// First byte of each layer's biases, if it has any.
    biases: Vec<Option<[u64; MATRICES]>>,
    ranges: DeviceMemory,
    parts: DeviceMemory,
    data: DeviceMemory,
    words: DeviceMemory,
    staged: DeviceMemory,
    of_biases: DeviceMemory,
}

impl StagedExperts {
    /// Allocates the memory, and puts into it what stays.
    ///
    /// # Errors
    /// [`Error::Environment`](nvme_host::Error::Environment) without memory.
    pub fn new(gpu: &Arc<Gpu>, experts: &ExpertLayers, size: &StagingSize) -> Result<Self> {
        let memory = |bytes: u64| DeviceMemory::new(gpu, bytes.max(16) as usize);
        let with = |bytes: &[u8]| {
            let memory = memory(bytes.len() as u64)?;
            memory.upload(0, bytes)?;
            Ok::<_, nvme_host::Error>(memory)
        };
        let layers = &experts.published;
        let (mut ranges, mut parts, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        let mut firsts = Vec::new();
        for layer in layers.iter() {
            for range in layer.ranges(size.most_ranges)? {
                let StagedRange { byte, bytes, at } = range;
                ranges.extend([byte, bytes, at].into_iter().flat_map(u64::to_le_bytes));
            }
            layer
                .parts
                .iter()
                .for_each(|one| put_parts(&mut parts, one));
            let is_there = layer.biases.iter().all(|bias| !bias.is_empty());
            firsts.push(is_there.then(|| {
                layer.biases.each_ref().map(|bias| {
                    let first = numbers.len() as u64;
                    numbers.extend(bias.iter().flat_map(|one| one.to_le_bytes()));
                    first
                })
            }));
        }
        let of_biases = with(&numbers)?;
        let at = |first: u64| of_biases.address() + first;
        let biases = firsts
            .into_iter()
            .map(|firsts| firsts.map(|firsts| firsts.map(at)));
        let data = memory(u64::from(size.areas) * size.area_bytes)?;
        let of_words = with(&vec![0; words(size.areas, 0) * 4])?;
        let staged = u64::from(size.areas) * size_of::<StagedExpert>() as u64;
        let staged = with(&vec![0; (STAGED_HEAD + staged) as usize])?;
        Ok(Self {
            area: StagingArea {
                data: data.address(),
                bytes: size.area_bytes,
                words: of_words.address(),
                staged: staged.address(),
                areas: size.areas,
                reserved: 0,
            },
            most_ranges: size.most_ranges,
            experts: experts.shape.experts,
            biases: biases.collect(),
            ranges: with(&ranges)?,
            parts: with(&parts)?,
            data,
            words: of_words,
            staged,
            of_biases,
        })
    }

    /// Returns the bytes of memory of the GPU.
    pub fn memory_bytes(&self) -> u64 {
        let all = [
            &self.ranges,
            &self.parts,
            &self.data,
            &self.words,
            &self.staged,
            &self.of_biases,
        ];
        all.iter().map(|memory| memory.len() as u64).sum()
    }

    /// Returns the addresses of the biases of a layer's files.
    pub fn biases(&self, layer: u32) -> Option<[u64; MATRICES]> {
        self.biases.get(layer as usize).copied().flatten()
    }

    /// Returns the parameters of the lookup, with the addresses of given numbers and weights, or zeros.
    pub fn admission(&self, admit: &AdmitParameters, given: (u64, u64)) -> AdmitPublished {
        let of_layer = u64::from(admit.layer) * u64::from(self.experts);
        let bytes = u64::from(self.most_ranges) * size_of::<StagedRange>() as u64;
        AdmitPublished {
            admit: *admit,
            ranges: self.ranges.address() + of_layer * bytes,
            staging: self.area,
            given: given.0,
            weights: given.1,
            most_ranges: self.most_ranges,
            reserved: 0,
        }
    }

    /// Returns the parameters with which failed reads mark their areas.
    pub fn settled(&self, admit: &AdmitParameters) -> AdmitParameters {
        self.area.settled(admit)
    }

    /// Returns the parameters of the arrangement of what a step has read.
    pub fn arrangement(
        &self,
        experts: &ExpertLayers,
        admit: &AdmitParameters,
    ) -> ArrangeParameters {
        let of_layer = u64::from(admit.layer) * u64::from(self.experts);
        let shape = |matrix| {
            let (rows, columns) = super::shape_of(experts.shape, matrix);
            [rows, columns]
        };
        let shapes = [shape(0), shape(1), shape(2)];
        let mut sources = experts.published[admit.layer as usize].sources;
        for (source, [_, columns]) in sources.iter_mut().zip(shapes) {
            let row = StoredFormat::of_number(source.stored).and_then(|one| one.row_bytes(columns));
            source.row_bytes = row.and_then(|bytes| bytes.try_into().ok()).unwrap_or(0);
        }
        ArrangeParameters {
            admit: *admit,
            staging: self.area,
            parts: self.parts.address() + of_layer * size_of::<StagedParts>() as u64,
            shapes,
            sources,
        }
    }

    /// Returns the threads that arrange all experts of a step at once.
    pub fn threads(&self, experts: &ExpertLayers) -> u64 {
        let shape = experts.shape;
        let rows = 2 * u64::from(shape.hidden) + u64::from(shape.width);
        rows * u64::from(self.area.areas) * 32
    }

    /// Enqueues the read of one expert, of a layer and for a slot, into the first area, outside of a step.
    ///
    /// # Safety
    /// The stream has done what was enqueued for this cache before.
    ///
    /// # Errors
    /// The errors of [`read_ranges_on_gpu`](nvme_host::Store::read_ranges_on_gpu).
    pub unsafe fn read(
        &self,
        experts: &ExpertLayers,
        (layer, expert, slot): (u32, u32, u32),
        stream: u64,
    ) -> Result<PendingRows> {
        let staged: Vec<u8> = [1, 0, expert, slot]
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect();
        self.staged.upload(0, &staged)?;
        let count = self.most_ranges as usize;
        let ranges = experts.published[layer as usize].ranges(self.most_ranges)?;
        let ranges = ranges.iter().skip(expert as usize * count).take(count);
        let ranges = ranges
            .filter(|range| range.bytes > 0)
            .map(|range| ReadRange {
                offset: range.byte,
                bytes: range.bytes,
                to: self.area.data + range.at,
            });
        let ranges: Vec<ReadRange> = ranges.collect();
        // SAFETY: the area is memory of the cache, which stays, and nothing else uses it.
        unsafe { experts.store.read_ranges_on_gpu(&ranges, stream) }
    }
}

/// Appends the bytes of a `StagedParts`.
fn put_parts(out: &mut Vec<u8>, parts: &StagedParts) {
    let places = parts.weights.into_iter().chain(parts.scales);
    out.extend(places.flat_map(u64::to_le_bytes));
    out.extend(parts.factors.into_iter().flat_map(f32::to_le_bytes));
    out.extend(parts.reserved.to_le_bytes());
}
