//! Manifests as JSON. The file is not trusted: its parts must be disjoint, cover the file, and have a hash for
//! each chunk.

use super::{Manifest, ManifestPart};
use crate::files::open_regular;
use nvme_driver::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::Path;

const FORMAT: &str = "nvme-gpu manifest";
const VERSION: u32 = 1;
/// Bytes of a chunk of the manifests that are read: powers of two.
const SMALLEST: u32 = 1 << 10;
const LARGEST: u32 = 16 << 20;
/// Digits of a hash.
const DIGITS: usize = 16;

/// Fields that identify the format version; the rest may belong to another version.
#[derive(Deserialize)]
struct ManifestHead {
    format: String,
    version: u32,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct ManifestText {
    format: String,
    version: u32,
    bytes: u64,
    chunk_bytes: u32,
    xxh3: String,
    parts: Vec<PartText>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PartText {
    name: String,
    offset: u64,
    bytes: u64,
    /// 16 digits for each chunk.
    xxh3: String,
}

impl Manifest {
    /// Opens the manifest in the file at `path`.
    ///
    /// # Errors
    /// [`Error::File`] for one that is not read, [`Error::Usage`] for what is no regular file; as [`parse`](Self::parse), with the path.
    pub fn open(path: &Path) -> Result<Self> {
        let (mut file, _) = open_regular(path)?;
        let mut text = Vec::new();
        let read = file.read_to_end(&mut text);
        read.map_err(Error::file("read", path))?;
        Self::parse(&text).map_err(|error| error.with_context(&path.display().to_string()))
    }

    /// Parses the manifest that [`to_json`](Self::to_json) has written.
    ///
    /// # Errors
    /// [`Error::Usage`] with the location of the fault: line and column, or the part.
    pub fn parse(text: &[u8]) -> Result<Self> {
        parsed(text).map_err(|what| {
            Error::usage(
                format!("this is not a manifest: {what}"),
                "make it again: `nvme-gpu manifest FILE --out MANIFEST`",
            )
        })
    }

    /// Returns the manifest as text for a file.
    pub fn to_json(&self) -> String {
        let parts = self.parts.iter().map(|part| PartText {
            name: part.name.clone(),
            offset: part.offset,
            bytes: part.bytes,
            xxh3: part
                .hashes
                .iter()
                .map(|hash| format!("{hash:016x}"))
                .collect(),
        });
        let text = ManifestText {
            format: FORMAT.to_owned(),
            version: VERSION,
            bytes: self.bytes,
            chunk_bytes: self.chunk_bytes,
            xxh3: format!("{:016x}", self.xxh3),
            parts: parts.collect(),
        };
        // The value holds only numbers, strings and lists, so that serialization cannot fail.
        serde_json::to_string_pretty(&text).unwrap_or_default()
    }
}

fn parsed(text: &[u8]) -> std::result::Result<Manifest, String> {
    let head: ManifestHead = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if head.format != FORMAT || head.version != VERSION {
        return Err(format!(
            "the format {:?} in version {}, not {FORMAT:?} in version {VERSION}",
            head.format, head.version
        ));
    }
    let text: ManifestText = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let is_known = (SMALLEST..=LARGEST).contains(&text.chunk_bytes);
    if !is_known || !text.chunk_bytes.is_power_of_two() {
        return Err(format!(
            "chunks of {} bytes, not a power of two from {SMALLEST} to {LARGEST}",
            text.chunk_bytes
        ));
    }
    let xxh3 = hashes(&text.xxh3).ok().filter(|hashes| hashes.len() == 1);
    let xxh3 = xxh3.ok_or("xxh3 of the file is not 16 hexadecimal digits")?;
    let (mut parts, mut at) = (Vec::with_capacity(text.parts.len()), 0);
    for (index, part) in text.parts.into_iter().enumerate() {
        let part = parsed_part(part, at, text.chunk_bytes);
        let part = part.map_err(|what| format!("part {index} {what}"))?;
        at = part.end();
        parts.push(part);
    }
    if at != text.bytes || parts.is_empty() {
        return Err(format!("parts of {at} bytes of a file of {}", text.bytes));
    }
    Ok(Manifest {
        bytes: text.bytes,
        chunk_bytes: text.chunk_bytes,
        xxh3: xxh3[0],
        parts,
    })
}

/// Returns the part that begins at byte `at` of the file.
fn parsed_part(
    part: PartText,
    at: u64,
    chunk_bytes: u32,
) -> std::result::Result<ManifestPart, String> {
    let name = &part.name;
    if part.offset != at || part.bytes == 0 || at.checked_add(part.bytes).is_none() {
        return Err(format!(
            "({name:?}): {} bytes at byte {}, behind {at} of those before it",
            part.bytes, part.offset
        ));
    }
    let hashes = hashes(&part.xxh3).map_err(|what| format!("({name:?}): {what}"))?;
    let chunks = part.bytes.div_ceil(chunk_bytes.into());
    if hashes.len() as u64 != chunks {
        return Err(format!(
            "({name:?}): {} hashes of {chunks} chunks",
            hashes.len()
        ));
    }
    Ok(ManifestPart {
        name: part.name,
        offset: part.offset,
        bytes: part.bytes,
        hashes,
    })
}

/// Parses concatenated hashes, in lower or upper case digits.
fn hashes(text: &str) -> std::result::Result<Vec<u64>, String> {
    let groups = text.as_bytes().chunks(DIGITS).enumerate();
    let hash = |(index, group): (usize, &[u8])| {
        let wrong = || format!("hash {index} is not {DIGITS} hexadecimal digits");
        if group.len() != DIGITS {
            return Err(wrong());
        }
        group.iter().try_fold(0u64, |hash, digit| {
            let value = char::from(*digit).to_digit(16).ok_or_else(wrong)?;
            Ok(hash << 4 | u64::from(value))
        })
    };
    groups.map(hash).collect()
}
