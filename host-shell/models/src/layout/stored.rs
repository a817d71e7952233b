//! How a matrix of an expert is stored, by the types and shapes of its tensors.

use super::names::TensorRole;
use super::reads::ExpertPart;
use nvme_host::catalog::Dtype;
use std::fmt;

/// The format of a matrix: the meaning of its elements together with their scales.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpertFormat {
    /// Elements of this type, without scales.
    Plain(Dtype),
    /// FP8 E4M3 in blocks of rows and columns, each with a scale.
    Fp8 {
        /// Rows of a block.
        rows: u64,
        /// Columns of a block.
        columns: u64,
    },
    /// MXFP4 of safetensors: E2M1, two in a byte, the first in the lower half, and an E8M0 scale for 32 of a row.
    Mxfp4,
    /// NVFP4 of safetensors: E2M1 as in MXFP4, and an E4M3 scale for 16 of a row.
    Nvfp4 {
        /// True if scales are divided by the matrix's scale, as by compressed-tensors; else they are multiplied by it.
        divides: bool,
    },
    /// Numbers of 4 bits from -8 on, eight in a word of 32 bits, in groups of a row, each with a scale.
    Int4 {
        /// Elements that share a scale.
        group: u64,
    },
    /// Bytes with which nothing computes here, and why.
    Unknown(String),
}

impl fmt::Display for ExpertFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => f.write_str(dtype.name()),
            Self::Fp8 { rows, columns } => write!(f, "float8_e4m3fn {rows}x{columns}"),
            Self::Mxfp4 => f.write_str("mxfp4 (low nibble first)"),
            Self::Nvfp4 { divides: false } => f.write_str("nvfp4 (low nibble first)"),
            Self::Nvfp4 { divides: true } => f.write_str("nvfp4 (low nibble first, divided)"),
            Self::Int4 { group } => write!(f, "int4 group {group}"),
            Self::Unknown(why) => write!(f, "unknown: {why}"),
        }
    }
}

/// A format, with the rows and columns of the matrix in elements; 0 columns if they are not known.
pub type Stored = (ExpertFormat, u64, u64);

/// Tensors of a matrix, by their roles.
struct MatrixParts<'a> {
    parts: &'a [&'a ExpertPart],
    weight: &'a ExpertPart,
    scale: Option<&'a ExpertPart>,
}

/// Returns how the matrix of `parts` is stored.
///
/// # Errors
/// The fault of tensors that do not go together, as a sentence.
pub fn stored(parts: &[&ExpertPart]) -> Result<Stored, String> {
    let role = |wanted: TensorRole| parts.iter().find(|part| part.role == wanted).copied();
    let mut weights = parts.iter().filter(|part| part.role.is_weight());
    let (weight, more) = (weights.next(), weights.next());
    let weight = match (weight, more) {
        (Some(weight), None) => *weight,
        (Some(one), Some(other)) => {
            return Err(format!(
                "{} and {} are the same matrix",
                one.tensor, other.tensor
            ));
        }
        (None, _) => {
            let other = parts.first().map_or("", |part| &part.tensor);
            return Err(format!("there is no matrix for {other}"));
        }
    };
    let all = MatrixParts {
        parts,
        weight,
        scale: role(TensorRole::Scale),
    };
    let found = match weight.role {
        TensorRole::WeightBlocks => all.blocks()?,
        TensorRole::PackedWeight => all.packed()?,
        _ => all.plain()?,
    };
    Ok(found)
}

/// Checks that a bias among `parts` has a number for each of `rows`.
///
/// # Errors
/// The fault, as a sentence.
pub fn check_bias(parts: &[&ExpertPart], rows: u64) -> Result<(), String> {
    let bias = parts.iter().find(|part| part.role == TensorRole::Bias);
    let weight = parts.iter().find(|part| part.role.is_weight());
    match bias.zip(weight) {
        Some((bias, weight)) if bias.shape != [rows] => Err(misfit(bias, &[rows], weight)),
        _ => Ok(()),
    }
}

impl MatrixParts<'_> {
    fn role(&self, role: TensorRole) -> Option<&ExpertPart> {
        self.parts.iter().find(|part| part.role == role).copied()
    }

    /// Returns the two lengths of the weight.
    fn lengths(&self) -> Result<(u64, u64), String> {
        match self.weight.shape[..] {
            [rows, columns] if rows > 0 && columns > 0 => Ok((rows, columns)),
            _ => Err(format!(
                "{} has the shape {:?} for an expert, not rows and columns",
                self.weight.tensor, self.weight.shape
            )),
        }
    }

    fn blocks(&self) -> Result<Stored, String> {
        let weight = self.weight;
        let [rows, blocks, 16] = weight.shape[..] else {
            return Err(format!(
                "{} has the shape {:?} for an expert, not rows and blocks of 16 bytes",
                weight.tensor, weight.shape
            ));
        };
        let scale = self
            .scale
            .ok_or_else(|| format!("{} has no scales", weight.tensor))?;
        if weight.dtype != Dtype::U8 || !matches!(scale.dtype, Dtype::U8 | Dtype::F8E8M0) {
            return Ok((self.unknown(), rows, 0));
        }
        self.check_scale(scale, &[rows, blocks])?;
        let columns = blocks.checked_mul(32).ok_or("too many blocks")?;
        Ok((ExpertFormat::Mxfp4, rows, columns))
    }

    fn packed(&self) -> Result<Stored, String> {
        let (rows, words) = self.lengths()?;
        match self.weight.dtype {
            Dtype::U8 | Dtype::I8 => self.of_4_bits(rows, words.checked_mul(2)),
            Dtype::I32 => self.int4(rows, words),
            _ => Ok((self.unknown(), rows, 0)),
        }
    }

    /// compressed-tensors' `pack-quantized`. Words of GPTQ and AWQ are packed along other lengths.
    fn int4(&self, rows: u64, words: u64) -> Result<Stored, String> {
        let other = [TensorRole::ZeroPoint, TensorRole::GroupIndex];
        let has_other = other.iter().any(|role| self.role(*role).is_some());
        let (Some(scale), Some(shape)) = (self.scale, self.role(TensorRole::PackedShape)) else {
            return Ok((self.unknown(), rows, 0));
        };
        let columns = words.checked_mul(8).ok_or("too many words")?;
        let is_float = matches!(scale.dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32);
        if has_other || !is_float || shape.shape != [2] || shape.dtype != Dtype::I64 {
            return Ok((self.unknown(), rows, columns));
        }
        let groups = match scale.shape[..] {
            [of_rows, groups] if of_rows == rows && groups > 0 => groups,
            _ => return Err(misfit(scale, &[rows, columns.div_ceil(32)], self.weight)),
        };
        match columns % groups {
            0 => Ok((
                ExpertFormat::Int4 {
                    group: columns / groups,
                },
                rows,
                columns,
            )),
            _ => Err(misfit(scale, &[rows, columns.div_ceil(32)], self.weight)),
        }
    }

    /// E2M1 with scales; of another kind the bytes have no known meaning.
    fn of_4_bits(&self, rows: u64, columns: Option<u64>) -> Result<Stored, String> {
        let columns = columns.ok_or("too many columns")?;
        let Some(scale) = self.scale else {
            return Ok((self.unknown(), rows, 0));
        };
        let multiplied = self.role(TensorRole::GlobalScale);
        let divided = self.role(TensorRole::GlobalDivisor);
        match (scale.dtype, multiplied, divided) {
            (Dtype::F8E8M0 | Dtype::U8, None, None) => {
                self.check_scale(scale, &[rows, columns.div_ceil(32)])?;
                self.check_blocks(columns, 32)?;
                Ok((ExpertFormat::Mxfp4, rows, columns))
            }
            (Dtype::F8E4M3, Some(global), None) | (Dtype::F8E4M3, None, Some(global)) => {
                self.check_scale(scale, &[rows, columns.div_ceil(16)])?;
                self.check_blocks(columns, 16)?;
                if !global.is_scalar || global.dtype != Dtype::F32 {
                    return Ok((self.unknown(), rows, columns));
                }
                let divides = divided.is_some();
                Ok((ExpertFormat::Nvfp4 { divides }, rows, columns))
            }
            _ => Ok((self.unknown(), rows, 0)),
        }
    }

    fn plain(&self) -> Result<Stored, String> {
        let (rows, columns) = self.lengths()?;
        let dtype = self.weight.dtype;
        let Some(scale) = self.scale else {
            return Ok((self.without_scales(), rows, self.columns(columns)));
        };
        match (dtype, scale.dtype) {
            (Dtype::U8, _) | (Dtype::I8, Dtype::F8E8M0) => {
                self.of_4_bits(rows, columns.checked_mul(2))
            }
            (Dtype::F4, _) => self.of_4_bits(rows, Some(columns)),
            (Dtype::F8E4M3, _) => self.fp8(scale, rows, columns),
            _ => Ok((self.unknown(), rows, columns)),
        }
    }

    /// Returns the columns of a matrix whose lengths are `columns`, unless its bytes may have several elements.
    fn columns(&self, columns: u64) -> u64 {
        match self.weight.dtype {
            Dtype::U8 | Dtype::I8 | Dtype::I32 => 0,
            _ => columns,
        }
    }

    fn without_scales(&self) -> ExpertFormat {
        let is_known = |part: &&&ExpertPart| {
            use TensorRole::{Bias, GlobalScale, InputScale};
            part.role.is_weight() || matches!(part.role, Bias | InputScale | GlobalScale)
        };
        // A scale of the whole matrix is known of GGUF's NVFP4 alone.
        let global = self.role(TensorRole::GlobalScale);
        let fits = global.is_none_or(|one| one.is_scalar && self.weight.dtype == Dtype::Nvfp4);
        // Their scales may be in a file that was not named.
        let needs_scales = matches!(
            self.weight.dtype,
            Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::F4 | Dtype::F6E2M3 | Dtype::F6E3M2
        );
        if needs_scales {
            return ExpertFormat::Unknown(format!("{} without scales", self.weight.dtype.name()));
        }
        match self.parts.iter().filter(is_known).count() == self.parts.len() && fits {
            true => ExpertFormat::Plain(self.weight.dtype),
            false => self.unknown(),
        }
    }

    /// Finds the blocks that share a scale, of those that are in use.
    fn fp8(&self, scale: &ExpertPart, rows: u64, columns: u64) -> Result<Stored, String> {
        let blocks: &[(u64, u64)] = match scale.dtype {
            Dtype::F8E8M0 => &[(1, 32), (32, 32), (128, 128)],
            Dtype::F32 | Dtype::Bf16 | Dtype::F16 => &[(128, 128), (1, columns), (rows, columns)],
            _ => return Ok((self.unknown(), rows, columns)),
        };
        let fits = |(of_rows, of_columns): &&(u64, u64)| {
            let shape = [rows.div_ceil(*of_rows), columns.div_ceil(*of_columns)];
            let is_column = shape[1] == 1 && scale.shape == shape[..1];
            scale.shape == shape || is_column || (shape == [1, 1] && scale.is_scalar)
        };
        let other = [
            TensorRole::GlobalScale,
            TensorRole::GlobalDivisor,
            TensorRole::ZeroPoint,
        ];
        if other.iter().any(|role| self.role(*role).is_some()) {
            return Ok((self.unknown(), rows, columns));
        }
        match blocks.iter().find(fits) {
            Some((of_rows, of_columns)) => {
                let format = ExpertFormat::Fp8 {
                    rows: *of_rows,
                    columns: *of_columns,
                };
                Ok((format, rows, columns))
            }
            None => {
                let (of_rows, of_columns) = blocks[0];
                let shape = [rows.div_ceil(of_rows), columns.div_ceil(of_columns)];
                Err(misfit(scale, &shape, self.weight))
            }
        }
    }

    fn check_scale(&self, scale: &ExpertPart, shape: &[u64]) -> Result<(), String> {
        match scale.shape == shape {
            true => Ok(()),
            false => Err(misfit(scale, shape, self.weight)),
        }
    }

    fn check_blocks(&self, columns: u64, block: u64) -> Result<(), String> {
        match columns % block {
            0 => Ok(()),
            _ => Err(format!(
                "{} has rows of {columns} elements, not a multiple of {block}, the elements of a scale",
                self.weight.tensor
            )),
        }
    }

    /// Names the types whose meaning is not known together.
    fn unknown(&self) -> ExpertFormat {
        let parts = self
            .parts
            .iter()
            .map(|part| format!("{} of {}", part.role.name(), part.dtype.name()));
        ExpertFormat::Unknown(parts.collect::<Vec<_>>().join(", "))
    }
}

fn misfit(part: &ExpertPart, shape: &[u64], weight: &ExpertPart) -> String {
    format!(
        "{} has the shape {:?} for an expert, and {} of {:?} needs {shape:?}",
        part.tensor, part.shape, weight.tensor, weight.shape
    )
}
