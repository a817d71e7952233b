//! Rows whose elements are dequantised or upcast in a gather: stored format and output format.

use crate::error::{Error, Result};
use nvme_formats::{Format, WideFormat};

/// Stored elements of format `from` come out as `to`.
///
/// ```
/// use nvme_driver::widen::RowWidening;
/// use nvme_formats::{Format, WideFormat};
///
/// let widen = RowWidening { from: Format::Q8_0, to: WideFormat::F16 };
/// assert_eq!(widen.row_bytes(34).unwrap(), 64);
/// assert!(widen.row_bytes(33).is_err(), "no whole blocks");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowWidening {
    /// Format on the drive.
    pub from: Format,
    /// Format of the output.
    pub to: WideFormat,
}

impl RowWidening {
    /// Parses the names of the dtypes, as Python and C use them: `float16`, `bfloat16`,
    /// `float8_e4m3fn`, `float8_e5m2` and the blocks of GGUF (`q8_0`, `q4_0`, `q4_1`, `q2_k` to `q6_k`, `iq4_nl`, `iq4_xs`,
    /// `mxfp4`) are converted to `float16`, `bfloat16` or `float32`.
    ///
    /// # Errors
    /// [`Error::Usage`] for other names.
    pub fn of_names(stored: &str, dtype: &str) -> Result<Self> {
        let from = match stored {
            "float16" => Some(Format::F16),
            "bfloat16" => Some(Format::Bf16),
            "float8_e4m3fn" => Some(Format::F8E4M3),
            "float8_e5m2" => Some(Format::F8E5M2),
            "q8_0" => Some(Format::Q8_0),
            "q4_0" => Some(Format::Q4_0),
            "q4_1" => Some(Format::Q4_1),
            "q2_k" => Some(Format::Q2K),
            "q3_k" => Some(Format::Q3K),
            "q4_k" => Some(Format::Q4K),
            "q5_k" => Some(Format::Q5K),
            "q6_k" => Some(Format::Q6K),
            "iq4_nl" => Some(Format::Iq4Nl),
            "iq4_xs" => Some(Format::Iq4Xs),
            "mxfp4" => Some(Format::Mxfp4),
            _ => None,
        };
        let to = match dtype {
            "float16" => Some(WideFormat::F16),
            "float32" => Some(WideFormat::F32),
            "bfloat16" => Some(WideFormat::Bf16),
            _ => None,
        };
        match (from, to) {
            (Some(from), Some(to)) => Ok(Self { from, to }),
            _ => Err(Error::usage(
                format!("rows of {stored} do not come out as {dtype}"),
                "rows of float16, bfloat16, float8_e4m3fn, float8_e5m2, q8_0, q4_0, q4_1, q2_k to q6_k, iq4_nl, iq4_xs and \
                 mxfp4 come out as float16, bfloat16 or float32",
            )),
        }
    }

    /// Returns the number of bytes of a wide row whose stored row has `stored` bytes.
    ///
    /// # Errors
    /// [`Error::Usage`] where a stored row is not whole blocks of the format.
    pub fn row_bytes(self, stored: u64) -> Result<u64> {
        let elements = self.elements(stored)?;
        Ok(elements * u64::from(self.to.bytes()))
    }

    /// Returns the number of elements of a row.
    ///
    /// # Errors
    /// As [`row_bytes`](Self::row_bytes).
    pub fn elements(self, stored: u64) -> Result<u64> {
        let block = self.from.block_bytes();
        self.from.elements(stored).ok_or_else(|| {
            Error::usage(
                format!(
                    "rows of {stored} bytes are not whole blocks of {:?}, which have {block} bytes",
                    self.from
                ),
                "check the size of a row, or gather without a change of format",
            )
        })
    }
}
