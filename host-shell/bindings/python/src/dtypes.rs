//! Elements and scales by the names of their dtypes.

use crate::error::ExceptionParts;
use nvme_host::store::{RowElement, RowScales, ScaleFormat};

/// Returns the element as which rows of a dtype are added.
///
/// # Errors
/// For what cannot be added.
pub fn element(dtype: &str) -> Result<RowElement, ExceptionParts> {
    match dtype {
        "float32" => Ok(RowElement::F32),
        "float16" => Ok(RowElement::F16),
        "bfloat16" => Ok(RowElement::Bf16),
        "int32" => Ok(RowElement::I32),
        other => {
            let cause = format!("rows of {other} cannot be added to");
            let remedy = "use float32, float16, bfloat16 or int32";
            Err(ExceptionParts::usage(cause, remedy))
        }
    }
}

/// Returns the format of scales by the name of their dtype.
pub fn scale_format(dtype: &str) -> Result<ScaleFormat, ExceptionParts> {
    let format = match dtype {
        // Bytes, as libraries without this dtype have them.
        "uint8" => Some(ScaleFormat::E8M0),
        name => RowScales::format_of_name(name),
    };
    format.ok_or_else(|| {
        ExceptionParts::usage(
            format!("scales are {dtype}"),
            "use float32, bfloat16, float8_e8m0fnu (or its bytes) or float8_e4m3fn",
        )
    })
}
