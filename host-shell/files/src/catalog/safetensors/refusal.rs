//! The reason why the crate refused a header: the crate's own message names neither the tensor nor the key.

use super::super::entry::in_order;
use super::super::pairs::JsonPairs;
use super::described::{TEXTS, entry};
use ::safetensors::tensor::{Dtype, TensorInfo};
use serde::de::DeserializeOwned;
use serde_json::Value as Json;

/// Describes the fault of the header `text` of a file whose data begin at byte `data`, with the tensor and the key;
/// `None` if the crate's message is as good.
pub fn of(text: &str, data: u64) -> Option<String> {
    let pairs: JsonPairs<Json> = match serde_json::from_str(text) {
        Ok(pairs) => pairs,
        Err(error) => return Some(format!("its header: {error}")),
    };
    let mut entries = Vec::new();
    for (name, value) in pairs.0 {
        if name == TEXTS {
            if let Some(fault) = of_texts(&value) {
                return Some(fault);
            }
            continue;
        }
        let described = tensor(&name, value);
        match described.and_then(|info| entry(&name, &info, data)) {
            Ok(entry) => entries.push(entry),
            Err(fault) => return Some(fault),
        }
    }
    if let Err(fault) = in_order(&mut entries) {
        return Some(fault);
    }
    let mut end = data;
    for entry in &entries {
        let (name, at) = (&entry.name, entry.offset);
        if at != end {
            return Some(format!(
                "{name:?} begins at byte {at} of the file, not at {end}, where those before it end"
            ));
        }
        end += entry.bytes;
    }
    None
}

fn of_texts(value: &Json) -> Option<String> {
    let texts = match value {
        Json::Null => return None,
        Json::Object(texts) => texts,
        other => {
            return Some(format!(
                "{TEXTS:?} is {}, not an object of texts",
                kind(other)
            ));
        }
    };
    let wrong = texts.iter().find(|(_, value)| !value.is_string());
    wrong.map(|(key, value)| {
        let kind = kind(value);
        format!("{TEXTS:?} has {kind} under the key {key:?}, where a text has to be")
    })
}

/// # Errors
/// The fault in the description of the tensor `name`.
fn tensor(name: &str, value: Json) -> Result<TensorInfo, String> {
    if let Json::Object(keys) = &value {
        let get = |key: &str| {
            let found = keys.get(key);
            found.ok_or_else(|| format!("{name:?} has no {key:?}"))
        };
        let dtype = get("dtype")?;
        read::<Dtype>(dtype).map_err(|_| {
            let shown = dtype
                .as_str()
                .map_or_else(|| kind(dtype), |text| format!("{text:?}"));
            format!("{name:?} is of the type {shown}, which safetensors does not have")
        })?;
        let shape = read::<Vec<usize>>(get("shape")?);
        shape.map_err(|error| format!("{name:?} has a wrong \"shape\": {error}"))?;
        let offsets = read::<(usize, usize)>(get("data_offsets")?);
        offsets.map_err(|error| format!("{name:?} has wrong \"data_offsets\": {error}"))?;
    }
    read(&value).map_err(|error| format!("{name:?}: {error}"))
}

fn read<T: DeserializeOwned>(value: &Json) -> Result<T, serde_json::Error> {
    serde_json::from_value(value.clone())
}

fn kind(value: &Json) -> String {
    let kind = match value {
        Json::Null => "null",
        Json::Bool(_) => "a truth value",
        Json::Number(_) => "a number",
        Json::String(_) => "a text",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    };
    kind.to_owned()
}
