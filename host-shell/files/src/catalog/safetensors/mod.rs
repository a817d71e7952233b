//! safetensors: eight bytes of length, a header in JSON, and the data of all tensors without gaps.
//!
//! The format's own crate decides about the header: a header that it accepts is read, a header that it rejects is
//! rejected. Duplicate names are rejected as well, although the crate accepts them and keeps the last one.

mod described;
mod refusal;

use super::entry::{ParsedHeader, in_order};
use super::pairs::JsonPairs;
use super::source::{HeaderFault, HeaderSource, read_head};
use super::value::MetadataValue;
use ::safetensors::tensor::Metadata;
use described::{TEXTS, entry};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// The length before the header.
const PREFIX: u64 = 8;
/// The longest header, as in the crate.
const MOST: u64 = 100_000_000;

/// Metadata of a header, parsed again because the crate keeps neither their order nor duplicates.
#[derive(Deserialize)]
struct MetadataTexts {
    #[serde(rename = "__metadata__", default)]
    texts: Option<JsonPairs<String>>,
}

/// A header that the crate accepts.
struct SafetensorsHeader {
    texts: JsonPairs<String>,
    /// Names of tensors, in the header's order.
    names: Vec<String>,
    tensors: Metadata,
}

impl SafetensorsHeader {
    fn read(text: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(text).map_err(|error| format!("its header: {error}"))?;
        let tensors: Metadata = serde_json::from_str(text).map_err(|error| {
            let found = refusal::of(text, PREFIX + text.len() as u64);
            found.unwrap_or_else(|| format!("its header: {error}"))
        })?;
        let fault = |error: serde_json::Error| format!("its header: {error}");
        let names: JsonPairs<IgnoredAny> = serde_json::from_str(text).map_err(fault)?;
        let texts: MetadataTexts = serde_json::from_str(text).map_err(fault)?;
        let names = names.0.into_iter().map(|(name, _)| name);
        Ok(Self {
            texts: texts.texts.unwrap_or_default(),
            names: names.filter(|name| name != TEXTS).collect(),
            tensors,
        })
    }
}

/// True if `head`, the start of a file, can be of this format. The crate allows blanks before the header's
/// brace.
pub fn is_likely(head: &[u8]) -> bool {
    match head.get(8) {
        Some(b'{') => true,
        Some(b' ' | b'\t' | b'\n' | b'\r') => length(head) <= MOST,
        _ => false,
    }
}

/// Returns the length of the header.
fn length(head: &[u8]) -> u64 {
    let bytes = head.iter().take(PREFIX as usize).rev();
    bytes.fold(0, |all, byte| all << 8 | u64::from(*byte))
}

/// Parses the header into the tensors, in the order of their data.
pub fn parse(source: &dyn HeaderSource) -> Result<ParsedHeader, HeaderFault> {
    let length = length(&read_head(source, 0, PREFIX)?);
    if length > MOST {
        return Err(format!("a header of {length} bytes, above {MOST}").into());
    }
    let header = SafetensorsHeader::read(&read_head(source, PREFIX, length)?)?;
    let data = PREFIX + length;
    let entries = header.names.iter().map(|name| {
        let info = header.tensors.info(name);
        let info =
            info.ok_or_else(|| format!("its header describes {name:?} as something else"))?;
        entry(name, info, data)
    });
    let mut entries = entries.collect::<Result<Vec<_>, String>>()?;
    in_order(&mut entries)?;
    let end = data.checked_add(header.tensors.data_len() as u64);
    let end = end.ok_or("more than 2^64 bytes")?;
    let texts = header.texts.0.into_iter();
    Ok(ParsedHeader {
        entries,
        metadata: texts
            .map(|(key, text)| (key, MetadataValue::Text(text)))
            .collect(),
        bytes: end,
        padded: end,
    })
}
