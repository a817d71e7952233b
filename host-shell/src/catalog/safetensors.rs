//! safetensors: eight bytes of length, a header in JSON, and the data of all tensors without gaps.

use super::dtype::Dtype;
use super::entry::{Entry, Parsed, in_order};
use super::source::{Fault, Source, read_head};
use super::value::Value as Meta;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

/// The length before the header.
const PREFIX: u64 = 8;
/// The longest header, as in the format's own library.
const MOST: u64 = 100_000_000;

/// What the header says of a tensor.
#[derive(Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<u64>,
    /// First and last byte + 1, from the end of the header on.
    data_offsets: (u64, u64),
}

/// The header in the order of its names, which are unique.
struct Header {
    metadata: Vec<(String, Meta)>,
    tensors: Vec<(String, Tensor)>,
}

/// Pairs of a JSON object; an error for a name that is there twice.
pub struct Pairs<T>(pub Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Reader<T> {
            type Value = Pairs<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut pairs = Vec::new();
                let mut names = HashSet::new();
                while let Some((name, value)) = map.next_entry::<String, T>()? {
                    if !names.insert(name.clone()) {
                        return Err(M::Error::custom(format_args!("{name:?} is there twice")));
                    }
                    pairs.push((name, value));
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Reader(std::marker::PhantomData))
    }
}

/// A tensor, or the pairs of `__metadata__`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Value {
    Tensor(Tensor),
    Metadata(Pairs<String>),
}

impl Header {
    fn read(text: &[u8]) -> Result<Self, String> {
        let pairs: Pairs<Value> =
            serde_json::from_slice(text).map_err(|error| format!("its header: {error}"))?;
        let mut header = Self {
            metadata: Vec::new(),
            tensors: Vec::new(),
        };
        for (name, value) in pairs.0 {
            match value {
                Value::Metadata(pairs) if name == "__metadata__" => {
                    let pairs = pairs.0.into_iter();
                    header.metadata = pairs.map(|(key, text)| (key, Meta::Text(text))).collect();
                }
                Value::Tensor(tensor) if name != "__metadata__" => {
                    header.tensors.push((name, tensor));
                }
                _ => return Err(format!("its header describes {name:?} as something else")),
            }
        }
        Ok(header)
    }
}

/// Whether bytes at the begin of a file can be of this format.
pub fn is_likely(head: &[u8]) -> bool {
    head.get(8) == Some(&b'{')
}

/// The tensors of the file, in the order of their data.
pub fn parse(source: &dyn Source) -> Result<Parsed, Fault> {
    let prefix = read_head(source, 0, PREFIX)?;
    let length = prefix
        .iter()
        .rev()
        .fold(0, |all, byte| all << 8 | u64::from(*byte));
    if length > MOST {
        return Err(format!("a header of {length} bytes, above {MOST}").into());
    }
    let header = Header::read(&read_head(source, PREFIX, length)?)?;
    let data = PREFIX + length;
    let mut entries = Vec::new();
    for (name, tensor) in header.tensors {
        let (begin, end) = tensor.data_offsets;
        let dtype = Dtype::of_safetensors(&tensor.dtype)
            .ok_or_else(|| format!("{name:?} is of the unknown type {:?}", tensor.dtype))?;
        let bytes = end
            .checked_sub(begin)
            .ok_or_else(|| format!("{name:?} ends at {end}, before it begins at {begin}"))?;
        let offset = data.checked_add(begin);
        let offset = offset.ok_or_else(|| format!("{name:?} begins at {begin}"))?;
        entries.push(Entry::new(name, dtype, tensor.shape, offset, bytes)?);
    }
    in_order(&mut entries)?;
    let mut end = data;
    for entry in &entries {
        if entry.offset != end {
            let (name, at) = (&entry.name, entry.offset);
            return Err(format!("{name:?} begins at byte {at} of the file, not at {end}").into());
        }
        end += entry.bytes;
    }
    Ok(Parsed {
        entries,
        metadata: header.metadata,
        bytes: end,
        padded: end,
    })
}
