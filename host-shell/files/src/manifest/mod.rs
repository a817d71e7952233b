//! Manifests: the XXH3 of each chunk of a file, by which its bytes are verified after they were loaded.
//!
//! A file is divided into parts, which are its tensors and the gaps between them; a part is divided into chunks from
//! its beginning on, the last one may be shorter. So a layer of whole tensors consists of whole chunks, at any
//! offset.
//!
//! ```
//! use nvme_files::Manifest;
//! use std::ops::ControlFlow;
//!
//! # fn main() -> nvme_driver::Result<()> {
//! let file: &[u8] = &[7; 100_000];
//! let manifest = Manifest::of(&file, file.len() as u64, &[], &mut |_, _| ControlFlow::Continue(()))?;
//! let text = manifest.to_json();
//! let again = Manifest::parse(text.as_bytes())?;
//! assert_eq!(again.chunks_of(65_536..100_000)?.len(), 1);
//! again.verify(65_536, &file[65_536..])?;
//! assert!(again.verify(65_536, &[8; 100_000 - 65_536]).is_err());
//! # Ok(())
//! # }
//! ```

#[cfg(test)]
mod tests;
mod text;

use crate::catalog::{Catalog, FileSource, HeaderSource, OnProgress, StoreSource, TensorEntry};
use nvme_driver::error::{Error, Result};
use nvme_store::Store;
use std::ops::Range;
use std::path::Path;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Bytes of a chunk of the manifests that are made here.
pub const CHUNK_BYTES: u32 = 64 << 10;
/// Bytes that are read at a time, whole chunks.
const PIECE: u64 = 8 << 20;

/// The hashes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    bytes: u64,
    chunk_bytes: u32,
    xxh3: u64,
    /// Parts one behind the other, from byte 0 to the end.
    parts: Vec<ManifestPart>,
}

/// A part of the file: a tensor, or the gap between two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestPart {
    /// The tensor's name; empty for other bytes.
    pub name: String,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub bytes: u64,
    /// The XXH3-64 of each chunk.
    hashes: Vec<u64>,
}

/// A chunk of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManifestChunk {
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub bytes: u32,
    /// XXH3-64 of these bytes, with the seed 0.
    pub xxh3: u64,
}

impl ManifestChunk {
    /// # Errors
    /// [`Error::Mismatch`] for another hash.
    pub fn compare(&self, found: u64) -> Result<()> {
        if found == self.xxh3 {
            return Ok(());
        }
        Err(Error::Mismatch {
            what: format!(
                "{} bytes from byte {} of the file on have the XXH3 {found:016x}, and {:016x} in the manifest",
                self.bytes, self.offset, self.xxh3
            ),
        })
    }
}

impl ManifestPart {
    fn chunk(&self, index: u64, chunk_bytes: u32) -> ManifestChunk {
        let at = index * u64::from(chunk_bytes);
        ManifestChunk {
            offset: self.offset + at,
            bytes: (self.bytes - at).min(chunk_bytes.into()) as u32,
            xxh3: self.hashes.get(index as usize).copied().unwrap_or(0),
        }
    }

    fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

impl Manifest {
    /// Computes the manifest of the file of tensors at `path`.
    ///
    /// # Errors
    /// The errors of [`of`](Self::of), and of the catalog: the file must be in a format that it knows.
    pub fn of_file(path: &Path, on_progress: OnProgress<'_>) -> Result<Self> {
        let source = FileSource::open(path)?;
        let catalog = Catalog::of(&source)?;
        Self::of(&source, source.len(), catalog.entries(), on_progress)
    }

    /// Computes the manifest of the file of tensors that lies in `store` from byte `offset` on.
    ///
    /// # Errors
    /// As [`of_file`](Self::of_file), and those of the store.
    pub fn of_store(store: &Store, offset: u64, on_progress: OnProgress<'_>) -> Result<Self> {
        Self::of_source(&StoreSource::from(store, offset)?, on_progress)
    }

    /// Computes the manifest of the file of tensors that is the `bytes` bytes of `store` from byte
    /// `offset` on.
    ///
    /// # Errors
    /// As [`of_store`](Self::of_store), also for a file that is shorter or longer.
    pub fn of_range(
        store: &Store,
        offset: u64,
        bytes: u64,
        on_progress: OnProgress<'_>,
    ) -> Result<Self> {
        Self::of_source(&StoreSource::whole(store, offset, bytes)?, on_progress)
    }

    fn of_source(source: &dyn HeaderSource, on_progress: OnProgress<'_>) -> Result<Self> {
        let catalog = Catalog::of(source)?;
        Self::of(source, catalog.bytes(), catalog.entries(), on_progress)
    }

    /// Computes the manifest of the first `bytes` bytes of `source`, which contain `tensors` at
    /// their positions, in that order.
    ///
    /// # Errors
    /// [`Error::Usage`] for no bytes, and for tensors that overlap or lie behind them; the errors of the source;
    /// [`Error::Interrupted`] when `on_progress` breaks.
    pub fn of(
        source: &dyn HeaderSource,
        bytes: u64,
        tensors: &[TensorEntry],
        on_progress: OnProgress<'_>,
    ) -> Result<Self> {
        let mut parts = divided(bytes, tensors)?;
        let mut whole = Xxh3::new();
        let mut data = Vec::new();
        for part in &mut parts {
            let mut at = 0;
            while at < part.bytes {
                let length = (part.bytes - at).min(PIECE);
                data.resize(length as usize, 0);
                source.read_at(part.offset + at, &mut data)?;
                whole.update(&data);
                let chunks = data.chunks(CHUNK_BYTES as usize);
                part.hashes.extend(chunks.map(xxh3_64));
                at += length;
                if on_progress(part.offset + at, bytes).is_break() {
                    return Err(Error::Interrupted);
                }
            }
        }
        Ok(Self {
            bytes,
            chunk_bytes: CHUNK_BYTES,
            xxh3: whole.digest(),
            parts,
        })
    }

    /// Returns the number of bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of bytes of a chunk, but for the last ones of parts.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Returns the XXH3-64 of the whole file, which `nvme-gpu import` prints, too.
    pub fn xxh3(&self) -> u64 {
        self.xxh3
    }

    /// Returns the parts, in the order of the file.
    pub fn parts(&self) -> &[ManifestPart] {
        &self.parts
    }

    /// Returns all chunks, in the order of the file.
    pub fn chunks(&self) -> impl Iterator<Item = ManifestChunk> {
        self.parts.iter().flat_map(|part| {
            let all = 0..part.hashes.len() as u64;
            all.map(|index| part.chunk(index, self.chunk_bytes))
        })
    }

    /// Returns the chunks that make up bytes `range` of the file.
    ///
    /// # Errors
    /// [`Error::Usage`] for a range that lies past the file, or begins or ends inside of a chunk.
    pub fn chunks_of(&self, range: Range<u64>) -> Result<Vec<ManifestChunk>> {
        let (begin, end) = (range.start, range.end);
        let whole = self.cover(range);
        if begin >= end {
            return Ok(Vec::new());
        }
        if end > self.bytes {
            return Err(Error::usage(
                format!(
                    "bytes {begin} to {end} of a file that has {} by its manifest",
                    self.bytes
                ),
                "use the manifest of this file",
            ));
        }
        if whole != (begin..end) {
            return Err(Error::usage(
                format!(
                    "bytes {begin} to {end} of the file are a part of the chunks from byte {} to {}",
                    whole.start, whole.end
                ),
                "use the manifest of this file, and layers of whole tensors or chunks",
            ));
        }
        let mut chunks = Vec::new();
        let mut at = begin;
        while let Some(chunk) = self.chunk_at(at).filter(|_| at < end) {
            chunks.push(chunk);
            at = chunk.offset + u64::from(chunk.bytes);
        }
        Ok(chunks)
    }

    /// Returns the chunks that have a byte of `range`: from the first byte of the first to behind the last of
    /// the last. Bytes that are not in the file stay.
    pub fn cover(&self, range: Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return range;
        }
        let first = self.chunk_at(range.start);
        let last = self.chunk_at(range.end - 1);
        let begin = first.map_or(range.start, |chunk| chunk.offset);
        let end = last.map_or(range.end, |chunk| chunk.offset + u64::from(chunk.bytes));
        begin..end
    }

    /// Compares `data`, the file's bytes from `offset` on, which are whole chunks.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for other bytes; as [`chunks_of`](Self::chunks_of).
    pub fn verify(&self, offset: u64, data: &[u8]) -> Result<()> {
        let end = offset.saturating_add(data.len() as u64);
        for chunk in self.chunks_of(offset..end)? {
            let at = (chunk.offset - offset) as usize;
            chunk.compare(xxh3_64(&data[at..at + chunk.bytes as usize]))?;
        }
        Ok(())
    }

    /// Checks that `source` can be the manifest's file: it has the same length, or is longer if it is a device, and the
    /// bytes before the first tensor have the hashes of the manifest.
    ///
    /// # Errors
    /// [`Error::Usage`] for another length; [`Error::Mismatch`] for other bytes; the errors of the source.
    pub fn check_begin(&self, source: &dyn HeaderSource) -> Result<()> {
        let have = source.len();
        if have < self.bytes || source.is_exact() && have != self.bytes {
            return Err(Error::usage(
                format!(
                    "{} has {have} bytes, and {} by its manifest",
                    source.label(),
                    self.bytes
                ),
                "use the manifest of this file",
            ));
        }
        let is_header = |first: &&ManifestPart| first.name.is_empty() && self.parts.len() > 1;
        let Some(first) = self.parts.first().filter(is_header) else {
            return Ok(());
        };
        let mut data = Vec::new();
        for index in 0..first.hashes.len() as u64 {
            let chunk = first.chunk(index, self.chunk_bytes);
            data.resize(chunk.bytes as usize, 0);
            source.read_at(chunk.offset, &mut data)?;
            let compared = chunk.compare(xxh3_64(&data));
            compared.map_err(|error| {
                error.with_context(&format!("{} is not the manifest's file", source.label()))
            })?;
        }
        Ok(())
    }

    /// Performs [`check_begin`](Self::check_begin) for the bytes of `store` from byte `offset` on.
    ///
    /// # Errors
    /// As there.
    pub fn check_begin_in(&self, store: &Store, offset: u64) -> Result<()> {
        // The file's length was compared when its catalog was made.
        self.check_begin(&StoreSource::from(store, offset)?.at_most())
    }

    fn chunk_at(&self, byte: u64) -> Option<ManifestChunk> {
        let index = self.parts.partition_point(|part| part.end() <= byte);
        let part = self.parts.get(index)?;
        let chunk = (byte - part.offset) / u64::from(self.chunk_bytes);
        Some(part.chunk(chunk, self.chunk_bytes))
    }
}

/// Divides the file into a part for each tensor, and for the bytes before, between and after them.
fn divided(bytes: u64, tensors: &[TensorEntry]) -> Result<Vec<ManifestPart>> {
    let part = |name: &str, offset, end| ManifestPart {
        name: name.to_owned(),
        offset,
        bytes: end - offset,
        hashes: Vec::new(),
    };
    let (mut parts, mut at) = (Vec::new(), 0);
    for tensor in tensors.iter().filter(|tensor| tensor.bytes > 0) {
        let end = tensor.offset.checked_add(tensor.bytes);
        let end = end.filter(|end| tensor.offset >= at && *end <= bytes);
        let end = end.ok_or_else(|| {
            Error::usage(
                format!(
                    "tensor '{}' of {} bytes at byte {} of {bytes}, of which {at} are taken",
                    tensor.name, tensor.bytes, tensor.offset
                ),
                "give the tensors of the file in their order",
            )
        })?;
        if tensor.offset > at {
            parts.push(part("", at, tensor.offset));
        }
        parts.push(part(&tensor.name, tensor.offset, end));
        at = end;
    }
    if at < bytes {
        parts.push(part("", at, bytes));
    }
    match parts.is_empty() {
        true => Err(Error::usage(
            "the file has 0 bytes, so that there is nothing to hash",
            "name another file",
        )),
        false => Ok(parts),
    }
}
