//! GGUF: keys with typed values, descriptions of tensors, and their data at aligned offsets. Nothing in a file is
//! trusted: counts and lengths are compared with the file's size before memory is allocated for them.
//!
//! ggml, docs/gguf.md, versions 2 and 3, little-endian.

use super::dtype::Dtype;
use super::entry::{ParsedHeader, TensorEntry, in_order};
use super::source::{HeaderFault, HeaderSource, read_head};
use super::value::MetadataValue;
use std::collections::HashSet;

const MAGIC: &[u8] = b"GGUF";
/// Limit of the header in bytes, as for safetensors. The lengths in a header are the file's claims, and must
/// not make the reader allocate arbitrary amounts of memory.
const MOST_BYTES: u64 = 100_000_000;
/// Limit of the values of all keys and arrays: each takes 32 bytes of memory, and a few bytes of a hostile
/// file could otherwise claim billions of them.
const MOST_VALUES: u64 = 4 << 20;
/// The longest name of a key or tensor: the format's limit for keys.
const MOST_NAME: u64 = 65_535;
/// The most lengths of a tensor: the format's limit.
const MOST_LENGTHS: u32 = 4;
/// Limit of the depth of nested arrays: each level is a recursive call, and a hostile file could otherwise
/// exhaust the stack.
const MOST_DEPTH: u32 = 4;
const ALIGNMENT_KEY: &str = "general.alignment";
const ALIGNMENT: u64 = 32;
const MOST_ALIGNMENT: u64 = 1 << 30;
/// Bytes that are read at first, and at most, in one go.
const CHUNK: u64 = 64 << 10;
const MOST_CHUNK: u64 = 4 << 20;

/// True if `head`, the start of a file, is in this format.
pub fn is_likely(head: &[u8]) -> bool {
    head.starts_with(MAGIC)
}

/// Parses the header into the tensors, in the order of their data.
pub fn parse(source: &dyn HeaderSource) -> Result<ParsedHeader, HeaderFault> {
    let mut reader = GgufReader::new(source);
    reader.take(MAGIC.len() as u64)?;
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        let order = match version & 0xFFFF {
            0 => "big-endian, ",
            _ => "",
        };
        return Err(format!(
            "at byte 4: {order}version {version:#x} of GGUF; 2 and 3 are read, little-endian"
        )
        .into());
    }
    let (tensors, keys) = (reader.u64()?, reader.u64()?);
    let metadata = reader.metadata(keys)?;
    let alignment = alignment(&metadata)?;
    let described = reader.tensors(tensors)?;
    let end = reader.at;
    let data = end.next_multiple_of(alignment);
    let len = source.len();
    let mut entries = Vec::new();
    for one in described {
        let at = one.described_at;
        let offset = data.checked_add(one.offset);
        let stop = offset.and_then(|offset| offset.checked_add(one.bytes));
        let (Some(offset), Some(stop)) = (offset, stop) else {
            return Err(format!("at byte {at}: the data of {:?} end past 2^64", one.name).into());
        };
        if !one.offset.is_multiple_of(alignment) {
            return Err(format!(
                "at byte {at}: the data of {:?} begin at {}, no multiple of the alignment {alignment}",
                one.name, one.offset
            ).into());
        }
        if stop > len {
            return Err(format!(
                "at byte {at}: the data of {:?} end at byte {stop} of {len}",
                one.name
            )
            .into());
        }
        let entry = TensorEntry::new(one.name, one.dtype, one.shape, offset, one.bytes);
        entries.push(entry.map_err(|fault| format!("at byte {at}: {fault}"))?);
    }
    let bytes = in_order(&mut entries)?.unwrap_or(end);
    check_dense(&entries, data, alignment)?;
    Ok(ParsedHeader {
        // The data of the last tensor may be padded.
        padded: bytes.checked_next_multiple_of(alignment).unwrap_or(bytes),
        bytes,
        entries,
        metadata,
    })
}

/// Rejects bytes between tensors that belong to none, as llama.cpp does: they appear when a type has another
/// size than assumed here.
fn check_dense(entries: &[TensorEntry], data: u64, alignment: u64) -> Result<(), String> {
    let mut at = data;
    for entry in entries {
        if entry.offset != at {
            return Err(format!(
                "the data of {:?} begin at byte {}, not at {at}, where those before them end",
                entry.name, entry.offset
            ));
        }
        let end = (at + entry.bytes).checked_next_multiple_of(alignment);
        at = end.ok_or_else(|| format!("the data of {:?} end past 2^64", entry.name))?;
    }
    Ok(())
}

fn alignment(metadata: &[(String, MetadataValue)]) -> Result<u64, String> {
    let Some((_, value)) = metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY) else {
        return Ok(ALIGNMENT);
    };
    match value {
        MetadataValue::U32(value)
            if value.is_power_of_two() && u64::from(*value) <= MOST_ALIGNMENT =>
        {
            Ok(u64::from(*value))
        }
        other => Err(format!(
            "{ALIGNMENT_KEY} is {}, no power of two of 32 bits up to {MOST_ALIGNMENT}",
            serde_json::to_string(other).unwrap_or_default()
        )),
    }
}

struct TensorHeader {
    described_at: u64,
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    /// Offset of the tensor from the start of the data.
    offset: u64,
    bytes: u64,
}

/// Reads a header from its begin to its end.
struct GgufReader<'a> {
    source: &'a dyn HeaderSource,
    /// The next byte.
    at: u64,
    /// Bytes from `begin` on.
    bytes: Vec<u8>,
    begin: u64,
    chunk: u64,
    /// Values so far.
    values: u64,
}

impl<'a> GgufReader<'a> {
    fn new(source: &'a dyn HeaderSource) -> Self {
        Self {
            source,
            at: 0,
            bytes: Vec::new(),
            begin: 0,
            chunk: CHUNK,
            values: 0,
        }
    }

    /// Returns the next `bytes` bytes.
    fn take(&mut self, bytes: u64) -> Result<&[u8], HeaderFault> {
        let (at, len) = (self.at, self.source.len());
        let end = at.checked_add(bytes);
        let Some(end) = end.filter(|end| *end <= len) else {
            return Err(format!(
                "at byte {at}: {bytes} bytes of the header, where {} are left",
                len - at
            )
            .into());
        };
        if end > MOST_BYTES {
            return Err(format!("at byte {at}: the header goes on past {MOST_BYTES} bytes").into());
        }
        if end > self.begin + self.bytes.len() as u64 {
            let bytes = bytes.max(self.chunk).min(len - at);
            self.bytes = read_head(self.source, at, bytes)?;
            self.begin = at;
            self.chunk = (self.chunk * 2).min(MOST_CHUNK);
        }
        self.at = end;
        let from = (at - self.begin) as usize;
        Ok(&self.bytes[from..from + bytes as usize])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], HeaderFault> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64)?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, HeaderFault> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, HeaderFault> {
        self.array().map(u64::from_le_bytes)
    }

    fn name(&mut self, what: &str) -> Result<String, HeaderFault> {
        let at = self.at;
        let length = self.u64()?;
        if length > MOST_NAME {
            return Err(format!(
                "at byte {at}: the name of a {what} has {length} bytes, above {MOST_NAME}"
            )
            .into());
        }
        let name = std::str::from_utf8(self.take(length)?);
        let name = name.map_err(|error| format!("at byte {at}: the name of a {what}: {error}"))?;
        Ok(name.to_owned())
    }

    fn metadata(&mut self, keys: u64) -> Result<Vec<(String, MetadataValue)>, HeaderFault> {
        let mut found = Vec::new();
        let mut names = HashSet::new();
        for _ in 0..keys {
            let at = self.at;
            let key = self.name("key")?;
            if !names.insert(key.clone()) {
                return Err(format!("at byte {at}: the key {key:?} is there twice").into());
            }
            let kind = self.u32()?;
            let value = self
                .value(kind, 0)
                .map_err(|fault| fault.map(|text| format!("{text} (key {key:?})")))?;
            found.push((key, value));
        }
        Ok(found)
    }

    /// Parses a value of the type `kind`.
    fn value(&mut self, kind: u32, depth: u32) -> Result<MetadataValue, HeaderFault> {
        let at = self.at;
        self.values += 1;
        if self.values > MOST_VALUES {
            return Err(format!("at byte {at}: more than {MOST_VALUES} values").into());
        }
        Ok(match kind {
            0 => MetadataValue::U8(self.array::<1>()?[0]),
            1 => MetadataValue::I8(i8::from_le_bytes(self.array()?)),
            2 => MetadataValue::U16(u16::from_le_bytes(self.array()?)),
            3 => MetadataValue::I16(i16::from_le_bytes(self.array()?)),
            4 => MetadataValue::U32(self.u32()?),
            5 => MetadataValue::I32(i32::from_le_bytes(self.array()?)),
            6 => MetadataValue::F32(f32::from_le_bytes(self.array()?)),
            7 => match self.array::<1>()?[0] {
                0 => MetadataValue::Bool(false),
                1 => MetadataValue::Bool(true),
                other => {
                    return Err(format!("at byte {at}: {other} as a truth value").into());
                }
            },
            8 => {
                let length = self.u64()?;
                match String::from_utf8(self.take(length)?.to_vec()) {
                    Ok(text) => MetadataValue::Text(text),
                    Err(error) => MetadataValue::Bytes(error.into_bytes()),
                }
            }
            9 if depth < MOST_DEPTH => {
                let (kind, length) = (self.u32()?, self.u64()?);
                let mut values = Vec::new();
                for _ in 0..length {
                    values.push(self.value(kind, depth + 1)?);
                }
                MetadataValue::Array(values)
            }
            9 => {
                return Err(format!("at byte {at}: arrays deeper than {MOST_DEPTH}").into());
            }
            10 => MetadataValue::U64(self.u64()?),
            11 => MetadataValue::I64(i64::from_le_bytes(self.array()?)),
            12 => MetadataValue::F64(f64::from_le_bytes(self.array()?)),
            other => {
                return Err(format!("at byte {at}: a value of the unknown type {other}").into());
            }
        })
    }

    fn tensors(&mut self, tensors: u64) -> Result<Vec<TensorHeader>, HeaderFault> {
        let mut found = Vec::new();
        let mut names = HashSet::new();
        for _ in 0..tensors {
            let one = self.tensor()?;
            if !names.insert(one.name.clone()) {
                return Err(format!(
                    "at byte {}: the tensor {:?} is there twice",
                    one.described_at, one.name
                )
                .into());
            }
            found.push(one);
        }
        Ok(found)
    }

    fn tensor(&mut self) -> Result<TensorHeader, HeaderFault> {
        let described_at = self.at;
        let name = self.name("tensor")?;
        let fault =
            |what: String| HeaderFault::Format(format!("at byte {described_at}: {name:?} {what}"));
        let lengths = self.u32()?;
        if lengths > MOST_LENGTHS {
            return Err(fault(format!(
                "has {lengths} lengths, above {MOST_LENGTHS}"
            )));
        }
        let mut shape = Vec::new();
        for _ in 0..lengths {
            shape.push(self.u64()?);
        }
        let number = self.u32()?;
        let offset = self.u64()?;
        let dtype = Dtype::of_gguf(number).map_err(|what| {
            HeaderFault::unknown(
                format!("at byte {described_at}: {name:?} {what}"),
                "use a file that llama.cpp of today writes, or a newer version of this program",
            )
        })?;
        let (block, _) = dtype.block();
        // The fastest comes first here.
        let row = shape.first().copied().unwrap_or(1);
        if !row.is_multiple_of(block) {
            return Err(fault(format!(
                "has rows of {row} elements, no whole blocks of {block} of {}",
                dtype.name()
            )));
        }
        shape.reverse();
        let elements = shape
            .iter()
            .try_fold(1u64, |all, one| all.checked_mul(*one));
        let bytes = elements.and_then(|elements| dtype.bytes(elements));
        let bytes =
            bytes.ok_or_else(|| fault(format!("of the shape {shape:?} has 2^64 bytes or more")))?;
        Ok(TensorHeader {
            described_at,
            name,
            dtype,
            shape,
            offset,
            bytes,
        })
    }
}
