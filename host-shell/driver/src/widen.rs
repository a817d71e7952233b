//! Rows whose elements are dequantised or upcast in a gather: stored format and output format.

use crate::error::{Error, Result};
pub use nvme_formats::ScaleFormat;
use nvme_formats::{Format, ScaleLayout, WideFormat};
use std::sync::Arc;

/// A conversion of rows in a gather: stored elements of format `from` become elements of format `to`.
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

/// Content of rows that a gather could not read.
///
/// ```
/// use nvme_driver::widen::FailedContent;
///
/// assert_eq!(FailedContent::nan_of("bfloat16").unwrap(), FailedContent::Bytes(0xFF));
/// assert!(FailedContent::nan_of("int32").is_err(), "integers have no NaN");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailedContent {
    /// Zeros.
    #[default]
    Zeros,
    /// This byte in each byte of the stored row. Rows that the gather widens get the conversion of such a stored row.
    Bytes(u8),
}

impl FailedContent {
    /// Returns rows of NaN for elements of the dtype `dtype`, by its name in Python, or for the rows of blocks that are stored
    /// as that.
    ///
    /// # Errors
    /// [`Error::Usage`] for elements that have no NaN.
    pub fn nan_of(dtype: &str) -> Result<Self> {
        match dtype {
            "float8_e4m3fnuz" | "float8_e5m2fnuz" => Ok(Self::Bytes(0x80)),
            // Ones in each bit: the exponent of a NaN, and a fraction that is not 0.
            "float16" | "bfloat16" | "float32" | "float64" | "complex64" | "complex128"
            | "float8_e4m3fn" | "float8_e5m2" | "float8_e8m0fnu" => Ok(Self::Bytes(0xFF)),
            // Their scales of 16 bits are NaN.
            "q8_0" | "q4_0" | "q4_1" | "q2_k" | "q3_k" | "q4_k" | "q5_k" | "q6_k" | "iq4_nl"
            | "iq4_xs" | "float8_scaled" => Ok(Self::Bytes(0xFF)),
            "mxfp4" | "float4_e2m1fn_x2" => Err(Error::usage(
                format!(
                    "rows of {dtype} cannot be NaN when they fail: each of their stored bytes is a number"
                ),
                "let failed rows be zeros, or an error",
            )),
            _ => Err(Error::usage(
                format!(
                    "rows of {dtype} cannot be NaN when they fail: only floating-point elements have NaN"
                ),
                "let failed rows be zeros, or an error",
            )),
        }
    }

    /// Returns the byte that fills a failed row.
    pub fn byte(self) -> u8 {
        match self {
            Self::Zeros => 0,
            Self::Bytes(byte) => byte,
        }
    }
}

impl RowWidening {
    /// Parses the names of the dtypes, as Python and C use them: `float16`, `bfloat16`,
    /// `float8_e4m3fn`, `float8_e5m2`, `float4_e2m1fn_x2`, `float8_scaled` (rows of ds4) and the blocks of GGUF (`q8_0`, `q4_0`,
    /// `q4_1`, `q2_k` to `q6_k`, `iq4_nl`, `iq4_xs`, `mxfp4`) are converted to `float16`, `bfloat16` or `float32`.
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
            "float4_e2m1fn_x2" => Some(Format::F4E2M1),
            "float8_scaled" => Some(Format::F8Scaled),
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
                "rows of float16, bfloat16, float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2, float8_scaled, q8_0, q4_0, q4_1, \
                 q2_k to q6_k, iq4_nl, iq4_xs and mxfp4 come out as float16, bfloat16 or float32",
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

/// Scales that lie apart from the rows whose elements they multiply, as those of FP8 and NVFP4 tensors do. They stay in
/// memory, and are not read from the drive with the rows.
///
/// Element `c` of row `r` is multiplied by scale `c / columns` of row `r`, which itself is multiplied by the factor, or
/// divided by it. Each step is rounded to `f32` once.
///
/// ```
/// use nvme_driver::widen::{RowScales, ScaleFactor, ScaleFormat, ScaleMemory};
///
/// // 1,000 rows of 256 elements, with an E8M0 scale for 32 of them.
/// let memory = ScaleMemory::Host(vec![127; 8 * 1000].into());
/// let scales = RowScales::new(ScaleFormat::E8M0, 32, ScaleFactor::Times(1.0), memory)?;
/// scales.check(1000, 256)?;
/// assert!(scales.check(1001, 256).is_err(), "too few of them");
/// # Ok::<(), nvme_driver::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RowScales {
    layout: ScaleLayout,
    memory: ScaleMemory,
}

/// The factor by which all scales of a table are multiplied or divided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScaleFactor {
    /// A multiplier, as `weight_scale_2` in files of NVIDIA's Model Optimizer; 1.0 changes nothing.
    Times(f32),
    /// A divisor, as `weight_global_scale` in files of compressed-tensors.
    Over(f32),
}

/// Location of the stored scales, row after row.
#[derive(Clone)]
pub enum ScaleMemory {
    /// No scales are stored: the factor is the scale of all elements.
    Nowhere,
    /// Memory of the host, for rows that the CPU gathers.
    Host(Arc<[u8]>),
    /// `bytes` bytes from `address` on, which the GPU of a store can access for as long as gathers may use them.
    Gpu {
        /// Address on the GPU.
        address: u64,
        /// Number of bytes.
        bytes: u64,
    },
}

impl std::fmt::Debug for ScaleMemory {
    /// Prints the number of bytes without their content.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nowhere => f.write_str("Nowhere"),
            Self::Host(bytes) => write!(f, "Host({} bytes)", bytes.len()),
            Self::Gpu { address, bytes } => write!(f, "Gpu({bytes} bytes at {address:#x})"),
        }
    }
}

impl RowScales {
    /// Makes scales of `format`, one for `columns` elements of a row.
    ///
    /// # Errors
    /// [`Error::Usage`] for a number of columns that is no power of two or exceeds 65,536, and for a factor that is zero or
    /// not finite.
    pub fn new(
        format: ScaleFormat,
        columns: u32,
        factor: ScaleFactor,
        memory: ScaleMemory,
    ) -> Result<Self> {
        if !columns.is_power_of_two() || columns > 1 << 16 {
            return Err(Error::usage(
                format!("{columns} columns that share a scale are no power of two up to 65,536"),
                "use the number of elements that one scale is for",
            ));
        }
        let (ScaleFactor::Times(number) | ScaleFactor::Over(number)) = factor;
        if !number.is_finite() || number == 0.0 {
            return Err(Error::usage(
                format!("the factor {number} of scales is zero or not finite"),
                "use the number that the tensor's file has",
            ));
        }
        let format = match memory {
            ScaleMemory::Nowhere => 0,
            _ => format as u32,
        };
        let layout = ScaleLayout {
            format,
            shift: columns.trailing_zeros(),
            factor: number.to_bits(),
            divides: u32::from(matches!(factor, ScaleFactor::Over(_))),
        };
        Ok(Self { layout, memory })
    }

    /// Returns the format of scales by the name of their elements, if they may have it.
    pub fn format_of_name(name: &str) -> Option<ScaleFormat> {
        match name {
            "float32" => Some(ScaleFormat::F32),
            "bfloat16" => Some(ScaleFormat::Bf16),
            "float8_e8m0fnu" => Some(ScaleFormat::E8M0),
            "float8_e4m3fn" => Some(ScaleFormat::E4M3),
            _ => None,
        }
    }

    /// Makes one scale for all elements of a table.
    ///
    /// # Errors
    /// As [`new`](Self::new) for the factor.
    pub fn of_table(scale: f32) -> Result<Self> {
        let factor = ScaleFactor::Times(scale);
        Self::new(ScaleFormat::F32, 1, factor, ScaleMemory::Nowhere)
    }

    /// Returns what kernels receive.
    pub fn layout(&self) -> ScaleLayout {
        self.layout
    }

    /// Checks that there are exactly the scales for `rows` rows of `elements` elements.
    ///
    /// # Errors
    /// [`Error::Usage`] otherwise.
    pub fn check(&self, rows: u64, elements: u64) -> Result<()> {
        let bytes = match &self.memory {
            ScaleMemory::Nowhere => return Ok(()),
            ScaleMemory::Host(bytes) => bytes.len() as u64,
            ScaleMemory::Gpu { bytes, .. } => *bytes,
        };
        let each = u32::try_from(elements).map(|elements| self.layout.row_bytes(elements));
        let wanted = each.ok().and_then(|each| rows.checked_mul(each.into()));
        if wanted != Some(bytes) {
            return Err(Error::usage(
                format!(
                    "{bytes} bytes of scales are not those of {rows} rows of {elements} elements, of which {} share a scale",
                    1u64 << self.layout.shift
                ),
                "check the tensor of the scales, and the number of columns that share one",
            ));
        }
        Ok(())
    }

    /// Returns the scales of row `row`, which [`check`](Self::check) has found to exist, for the CPU.
    ///
    /// # Errors
    /// [`Error::Usage`] for scales in memory of a GPU.
    pub fn of_row(&self, row: u64, elements: u64) -> Result<(ScaleLayout, &[u8])> {
        let each = self.layout.row_bytes(elements as u32) as usize;
        match &self.memory {
            ScaleMemory::Nowhere => Ok((self.layout, &[])),
            ScaleMemory::Host(bytes) => {
                let first = (row as usize).saturating_mul(each);
                let bytes = bytes.get(first..).and_then(|rest| rest.get(..each));
                Ok((self.layout, bytes.unwrap_or(&[])))
            }
            ScaleMemory::Gpu { .. } => Err(Error::usage(
                "the scales lie in memory of a GPU, and the CPU gathers these rows",
                "give scales in memory of the host, or gather to memory of the GPU from a drive whose queues it drives",
            )),
        }
    }

    /// Returns the address of the scales for the kernels of a GPU; 0 if no scales are stored.
    ///
    /// # Errors
    /// [`Error::Usage`] for scales in memory of the host.
    pub fn address(&self) -> Result<u64> {
        match &self.memory {
            ScaleMemory::Nowhere => Ok(0),
            ScaleMemory::Gpu { address, .. } => Ok(*address),
            ScaleMemory::Host(_) => Err(Error::usage(
                "the scales lie in memory of the host, and the GPU gathers these rows",
                "give scales in memory of the GPU",
            )),
        }
    }

    /// Returns address and bytes of scales in memory of a GPU.
    pub fn on_gpu(&self) -> Option<(u64, u64)> {
        match self.memory {
            ScaleMemory::Gpu { address, bytes } => Some((address, bytes)),
            _ => None,
        }
    }
}

/// Rows that come out in another format than they are stored in, with scales if there are any.
#[derive(Clone, Debug)]
pub struct RowConversion {
    /// The formats.
    pub widen: RowWidening,
    /// Scales that lie apart from the rows.
    pub scales: Option<Arc<RowScales>>,
}

impl From<RowWidening> for RowConversion {
    fn from(widen: RowWidening) -> Self {
        Self {
            widen,
            scales: None,
        }
    }
}

impl RowConversion {
    /// Returns the bytes of a converted row, of a table of `rows` rows of `stored` bytes.
    ///
    /// # Errors
    /// As [`RowWidening::row_bytes`] and [`RowScales::check`].
    pub fn row_bytes(&self, rows: u64, stored: u64) -> Result<u64> {
        if let Some(scales) = &self.scales {
            scales.check(rows, self.widen.elements(stored)?)?;
        }
        self.widen.row_bytes(stored)
    }
}
