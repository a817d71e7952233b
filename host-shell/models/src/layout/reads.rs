//! The reads that fetch an expert: ranges of the store, neighbours merged.

use super::files::PlacedTensors;
use super::names::{ExpertMatrix, TensorRole};
use nvme_host::catalog::Dtype;
use nvme_host::{Error, Result, Store};
use std::ops::Range;
use std::sync::Arc;

/// Limit in bytes of a gap between two parts that is read along with them. A drive reads whole blocks, so that a gap
/// inside of one costs nothing.
const MOST_GAP: u64 = 4096;
/// Reads begin in memory where they begin in the store, modulo this: loads and copies of 16 bytes keep their alignment.
const ALIGNMENT: u64 = 16;

/// A tensor of an expert, or its part of a tensor of all experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertPart {
    /// The matrix to which it belongs.
    pub matrix: ExpertMatrix,
    /// Its role for the matrix.
    pub role: TensorRole,
    /// Name of the tensor in the file.
    pub tensor: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Lengths of this expert's part, the slowest first.
    pub shape: Vec<u64>,
    /// Length in bytes.
    pub bytes: u64,
    /// First byte in the expert's memory.
    pub at: u64,
    /// True for a single number: a few bytes far from the others, which a program keeps in memory.
    pub is_scalar: bool,
}

/// A range of the store that is read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRead {
    /// First byte in the store.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// First byte in the expert's memory.
    pub at: u64,
}

/// An expert: its parts, and the reads that fetch them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertRanges {
    parts: Vec<ExpertPart>,
    reads: Vec<ExpertRead>,
    scalar_reads: Vec<ExpertRead>,
    /// Bytes of memory of the reads without those of scalars.
    streamed: u64,
    /// Bytes of memory of all reads.
    bytes: u64,
}

/// A part and its location in a file.
pub(super) struct FilePart {
    pub part: ExpertPart,
    /// Number of the file.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
}

impl ExpertRanges {
    /// Finds the ranges of `parts` in the store.
    ///
    /// # Errors
    /// [`Error::Usage`] for bytes in a hole of a file, with the name of the tensor.
    pub(super) fn of(parts: Vec<FilePart>, files: &[Arc<dyn PlacedTensors>]) -> Result<Self> {
        let mut all = Self::default();
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_by_key(|one| {
            let FilePart { part, file, offset } = &parts[*one];
            (part.is_scalar, *file, *offset)
        });
        let mut found: Vec<ExpertPart> = parts.iter().map(|one| one.part.clone()).collect();
        for one in order {
            let FilePart { part, file, offset } = &parts[one];
            let pieces = files[*file].pieces(*offset, part.bytes);
            let pieces = pieces.map_err(|error| error.with_context(&part.tensor))?;
            let at = all.add(part.is_scalar, &pieces);
            found[one].at = at.ok_or_else(|| too_long(&part.tensor))?;
        }
        all.parts = found;
        Ok(all)
    }

    /// Appends a part that lies in `pieces`, and returns its first byte in memory.
    fn add(&mut self, is_scalar: bool, pieces: &[Range<u64>]) -> Option<u64> {
        let mut first = None;
        for piece in pieces {
            let bytes = piece.end - piece.start;
            let reads = match is_scalar {
                true => &mut self.scalar_reads,
                false => &mut self.reads,
            };
            let at = match reads.last_mut() {
                // Also a second piece of a part, which continues the first one in memory.
                Some(last) if is_close(last, piece.start) && first.is_none() => {
                    last.bytes = piece.end - last.offset;
                    last.at + (piece.start - last.offset)
                }
                _ => {
                    let at = match first {
                        Some(_) => self.bytes,
                        None => aligned(self.bytes, piece.start)?,
                    };
                    reads.push(ExpertRead {
                        offset: piece.start,
                        bytes,
                        at,
                    });
                    at
                }
            };
            first = first.or(Some(at));
            self.bytes = at.checked_add(bytes)?;
        }
        if !is_scalar {
            self.streamed = self.bytes;
        }
        Some(first.unwrap_or(self.bytes))
    }

    /// Returns the parts, by matrix and role.
    pub fn parts(&self) -> &[ExpertPart] {
        &self.parts
    }

    /// Returns the part of a matrix with this role.
    pub fn part(&self, matrix: ExpertMatrix, role: TensorRole) -> Option<&ExpertPart> {
        let mut parts = self.parts.iter();
        parts.find(|part| (part.matrix, part.role) == (matrix, role))
    }

    /// Returns the reads of all parts but scalars, in the order of the store.
    pub fn reads(&self) -> &[ExpertRead] {
        &self.reads
    }

    /// Returns the reads of the scalars, whose memory follows that of the other parts.
    pub fn scalar_reads(&self) -> &[ExpertRead] {
        &self.scalar_reads
    }

    /// Returns the bytes of memory that [`reads`](Self::reads) fill, with gaps.
    pub fn streamed_bytes(&self) -> u64 {
        self.streamed
    }

    /// Returns the bytes of memory of all reads.
    pub fn memory_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of all parts, without gaps.
    pub fn part_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// Reads the expert into `memory`, which has [`memory_bytes`](Self::memory_bytes).
    ///
    /// # Errors
    /// [`Error::Usage`] for memory of another length; the errors of [`Store::read_at`].
    pub fn read(&self, store: &Store, memory: &mut [u8]) -> Result<()> {
        if memory.len() as u64 != self.bytes {
            return Err(Error::usage(
                format!(
                    "the memory has {} bytes, the expert {}",
                    memory.len(),
                    self.bytes
                ),
                "use as many",
            ));
        }
        for read in self.reads.iter().chain(&self.scalar_reads) {
            let (from, to) = (read.at as usize, (read.at + read.bytes) as usize);
            store.read_at(read.offset, &mut memory[from..to])?;
        }
        Ok(())
    }
}

impl ExpertRanges {
    /// Reads the bytes of one part, such as a bias.
    ///
    /// # Errors
    /// [`Error::Usage`] for a part of another expert; the errors of [`Store::read_at`].
    pub fn read_part(&self, store: &Store, part: &ExpertPart) -> Result<Vec<u8>> {
        let mut bytes = vec![0; part.bytes as usize];
        let mut left = &mut bytes[..];
        let mut at = part.at;
        for read in self.reads.iter().chain(&self.scalar_reads) {
            let end = read.at + read.bytes;
            if left.is_empty() || at < read.at || at >= end {
                continue;
            }
            let count = (end - at).min(left.len() as u64);
            let (some, more) = left.split_at_mut(count as usize);
            store.read_at(read.offset + (at - read.at), some)?;
            (left, at) = (more, at + count);
        }
        match left.is_empty() {
            true => Ok(bytes),
            false => Err(Error::usage(
                format!("{} is not a part of this expert", part.tensor),
                "use a part that this expert lists",
            )),
        }
    }
}

/// True if bytes from `start` of the store on may be read together with `last`.
fn is_close(last: &ExpertRead, start: u64) -> bool {
    let past = last.offset + last.bytes;
    start >= past && start - past <= MOST_GAP
}

/// Returns the first position from `at` on that is `start` modulo the alignment.
fn aligned(at: u64, start: u64) -> Option<u64> {
    let gap = (start % ALIGNMENT + ALIGNMENT - at % ALIGNMENT) % ALIGNMENT;
    at.checked_add(gap)
}

fn too_long(tensor: &str) -> Error {
    Error::usage(
        format!("the expert of {tensor} has 2^64 bytes or more"),
        "get the file again",
    )
}
