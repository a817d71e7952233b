//! Layers whose experts lie as published files have them: the ranges of each, and how its matrices get into a slot of the
//! cache.

use super::{ExpertMatrices, Layer};
use crate::layout::{ExpertLayout, ExpertMatrix, StoredMatrix};
use nvme_compute_kernel::experts::MATRICES;
use nvme_compute_kernel::experts::published::{
    ElementDecoder, MOST_RANGES, PublishedForm, SlotArrangement, StagedParts, StagedRange,
};
use nvme_formats::{Format, ScaleFormat, StoredFormat, value};
use nvme_host::catalog::Dtype;
use nvme_host::{Error, Result};

/// Gate, up and down, in the order of the kernels.
pub const ORDER: [ExpertMatrix; MATRICES] =
    [ExpertMatrix::Gate, ExpertMatrix::Up, ExpertMatrix::Down];
/// Reads begin in the staging area where they begin on the drive, modulo this.
const ALIGNMENT: u64 = 16;

/// The experts of a layer in published files, with what stays in memory.
#[derive(Debug)]
pub struct PublishedLayer {
    layout: ExpertLayout,
    /// Stored form of gate, up and down.
    pub sources: [PublishedForm; MATRICES],
    /// Locations of each expert's parts in its staging area.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "for kernels"))]
    pub parts: Vec<StagedParts>,
    /// Biases of gate, up and down: a row for each expert. Empty without biases.
    pub biases: [Vec<f32>; MATRICES],
}

impl PublishedLayer {
    /// Describes the experts of `layout`, and reads their biases and the scales of whole matrices.
    ///
    /// # Errors
    /// [`Error::Usage`] for a format with which no kernel computes, experts in different formats, and experts in too many
    /// ranges; the errors of the reads.
    pub fn new(layout: ExpertLayout) -> Result<Self> {
        let refused = |what: String, remedy: &str| {
            Error::usage(format!("{}: {what}", layout.name()), remedy.to_owned())
        };
        let mut sources = [PublishedForm::default(); MATRICES];
        for (source, matrix) in sources.iter_mut().zip(ORDER) {
            *source = arranged(layout.stored_matrix(0, matrix)?.source);
        }
        let mut parts = Vec::with_capacity(layout.experts().len());
        let mut biases: [Vec<f32>; MATRICES] = Default::default();
        for (number, ranges) in (0u32..).zip(layout.experts()) {
            let mut found = StagedParts::default();
            for (at, matrix) in ORDER.into_iter().enumerate() {
                let stored = layout.stored_matrix(number, matrix)?;
                if arranged(stored.source) != sources[at] {
                    return Err(refused(
                        format!(
                            "{} of expert {number} is stored in another form than that of expert 0",
                            matrix.name()
                        ),
                        "compute with each expert by itself: a cache has one form for those of a layer",
                    ));
                }
                let read = |part| ranges.read_part(layout.store(), part);
                if let Some(shape) = stored.packed_shape {
                    stored.check_packed_shape(shape, &read(shape)?)?;
                }
                found.weights[at] = stored.weight.at;
                found.scales[at] = stored.scale.map_or(0, |scale| scale.at);
                found.factors[at] = match stored.factor {
                    Some(factor) => StoredMatrix::factor_of(&read(factor)?),
                    None => 1.0,
                };
                if let Some(bias) = stored.bias {
                    let count = match matrix {
                        ExpertMatrix::Down => layout.width(),
                        _ => layout.hidden(),
                    };
                    let rows = rows_of(&stored.source, count, bias.dtype, &read(bias)?);
                    biases[at].extend(rows.ok_or_else(|| {
                        refused(
                            format!("{} has the type {}", bias.tensor, bias.dtype.name()),
                            "use biases of float32, float16 or bfloat16",
                        )
                    })?);
                }
            }
            parts.push(found);
            let reads = ranges_of(&layout, number)?;
            let is_aligned =
                |one: &StagedRange| one.byte % ALIGNMENT == one.at % ALIGNMENT && one.bytes > 0;
            if reads.len() > MOST_RANGES as usize || !reads.iter().all(is_aligned) {
                return Err(refused(
                    format!(
                        "expert {number} lies in {} ranges of the drive, or in blocks of an odd size",
                        reads.len()
                    ),
                    "copy the files to a drive with more free room: kernels read 64 ranges of an expert at most",
                ));
            }
        }
        Ok(Self {
            layout,
            sources,
            parts,
            biases,
        })
    }

    /// Returns the experts in the files.
    pub fn layout(&self) -> &ExpertLayout {
        &self.layout
    }

    /// Returns gate, up and down as they lie in a slot.
    pub fn matrices(&self) -> Layer {
        self.sources.map(|source| ExpertMatrices {
            offset: 0,
            // The number is that of a format.
            stored: StoredFormat::of_number(source.stored).unwrap_or(StoredFormat::F32),
        })
    }

    /// Returns the largest number of ranges of an expert.
    #[cfg(feature = "cuda")]
    pub fn most_ranges(&self) -> u32 {
        let experts = 0..self.layout.experts().len() as u32;
        let each = experts.map(|one| ranges_of(&self.layout, one).map_or(0, |all| all.len()));
        each.max().unwrap_or(0) as u32
    }

    /// Returns `count` ranges for each expert, the unused ones empty.
    #[cfg(feature = "cuda")]
    pub fn ranges(&self, count: u32) -> Result<Vec<StagedRange>> {
        let mut all = Vec::new();
        for expert in 0..self.layout.experts().len() as u32 {
            let mut ranges = ranges_of(&self.layout, expert)?;
            ranges.resize(count as usize, StagedRange::default());
            all.extend(ranges);
        }
        Ok(all)
    }

    /// Returns the bytes of a staging area.
    #[cfg(feature = "cuda")]
    pub fn staging_bytes(&self) -> u64 {
        self.layout.memory_bytes().next_multiple_of(ALIGNMENT)
    }

    /// Returns the bytes of an expert, as the files have them.
    ///
    /// # Errors
    /// The errors of the reads.
    pub fn read(&self, expert: u32) -> Result<Vec<u8>> {
        let ranges = self.layout.expert(expert)?;
        let mut memory = vec![0; ranges.memory_bytes() as usize];
        ranges.read(self.layout.store(), &mut memory)?;
        Ok(memory)
    }
}

/// Returns the ranges of an expert that a step reads, cut to elements and scales. Other parts stay in memory, and are
/// read again only where they lie between two of these in one range.
fn ranges_of(layout: &ExpertLayout, expert: u32) -> Result<Vec<StagedRange>> {
    let ranges = layout.expert(expert)?;
    let mut needed = Vec::with_capacity(2 * MATRICES);
    for matrix in ORDER {
        let stored = layout.stored_matrix(expert, matrix)?;
        needed.push(stored.weight);
        needed.extend(stored.scale);
    }
    // Scalars that are the only scale of a matrix are read with it.
    let all = ranges.reads().iter().chain(ranges.scalar_reads());
    let all = all.filter_map(|read| {
        let end = read.at + read.bytes;
        let inside = needed
            .iter()
            .map(|part| (part.at.max(read.at), (part.at + part.bytes).min(end)))
            .filter(|(first, end)| first < end);
        let at = inside.clone().map(|(first, _)| first).min()?;
        let end = inside.map(|(_, end)| end).max()?;
        Some(StagedRange {
            byte: read.offset + (at - read.at),
            bytes: end - at,
            at,
        })
    });
    Ok(all.collect())
}

/// Adds the form of the slot to the stored form of a matrix: rows as they are, where a product knows their format, MXFP4 in
/// GGUF's blocks, and of all others numbers of binary32, which every format has exactly.
fn arranged(source: PublishedForm) -> PublishedForm {
    let is_plain = source.is_transposed == 0;
    let fits = |stored: StoredFormat| is_plain && stored.row_bytes(source.columns).is_some();
    let of_blocks = |decoder| source.decoder == decoder as u32;
    let (arrangement, stored) = if of_blocks(ElementDecoder::Words) && fits(StoredFormat::F32) {
        (SlotArrangement::Rows, StoredFormat::F32)
    } else if of_blocks(ElementDecoder::Blocks)
        && let Some(stored) = Format::of_number(source.format)
            .and_then(multiplied)
            .filter(|stored| fits(*stored))
    {
        (SlotArrangement::Rows, stored)
    } else if of_blocks(ElementDecoder::E2M1)
        && source.scale == ScaleFormat::E8M0 as u32
        && source.block_columns == 32
        && fits(StoredFormat::Mxfp4)
    {
        (SlotArrangement::Mxfp4, StoredFormat::Mxfp4)
    } else {
        (SlotArrangement::Numbers, StoredFormat::F32)
    };
    PublishedForm {
        arrangement: arrangement as u32,
        stored: stored as u32,
        ..source
    }
}

/// Returns the format under which kernels multiply blocks of `format`.
fn multiplied(format: Format) -> Option<StoredFormat> {
    Some(match format {
        Format::F16 => StoredFormat::F16,
        Format::Bf16 => StoredFormat::Bf16,
        Format::Q8_0 => StoredFormat::Q8_0,
        Format::Q4_0 => StoredFormat::Q4_0,
        Format::Q4_1 => StoredFormat::Q4_1,
        Format::Q4K => StoredFormat::Q4K,
        Format::Q6K => StoredFormat::Q6K,
        Format::Mxfp4 => StoredFormat::Mxfp4,
        _ => return None,
    })
}

/// Returns the `count` numbers of a bias that belong to the rows of `source`.
fn rows_of(source: &PublishedForm, count: u64, dtype: Dtype, bytes: &[u8]) -> Option<Vec<f32>> {
    let numbers: Vec<f32> = match dtype {
        Dtype::F32 => {
            let words = bytes.as_chunks::<4>().0.iter();
            words.map(|word| f32::from_le_bytes(*word)).collect()
        }
        Dtype::F16 | Dtype::Bf16 => {
            let format = match dtype {
                Dtype::F16 => Format::F16,
                _ => Format::Bf16,
            };
            let halves = bytes.as_chunks::<2>().0.iter();
            halves
                .map(|half| value(format, 0, |k| half[k as usize]))
                .collect()
        }
        _ => return None,
    };
    let of_matrix = numbers.into_iter().skip(source.first_row as usize);
    let rows = of_matrix.step_by(source.row_step.max(1) as usize);
    Some(rows.take(count as usize).collect())
}
