//! Description of a tensor in the header, and the reserved key that names no tensor.

use super::super::dtype::Dtype;
use super::super::entry::TensorEntry;
use ::safetensors::tensor::TensorInfo;

/// The name of the header's texts, which no tensor can have.
pub const TEXTS: &str = "__metadata__";

/// Converts the description of a tensor of a file whose data begin at byte `data`.
pub fn entry(name: &str, info: &TensorInfo, data: u64) -> Result<TensorEntry, String> {
    let (begin, end) = info.data_offsets;
    let dtype = Dtype::of_safetensors(&info.dtype.to_string());
    let dtype = dtype.ok_or_else(|| {
        format!(
            "{name:?} is of the type {}, which is not known here",
            info.dtype
        )
    })?;
    let bytes = end
        .checked_sub(begin)
        .ok_or_else(|| format!("{name:?} ends at {end}, before it begins at {begin}"))?;
    let offset = data.checked_add(begin as u64);
    let offset = offset.ok_or_else(|| format!("{name:?} begins at {begin}"))?;
    let shape = info.shape.iter().map(|length| *length as u64).collect();
    TensorEntry::new(name.to_owned(), dtype, shape, offset, bytes as u64)
}
