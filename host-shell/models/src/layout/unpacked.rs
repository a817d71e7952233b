//! Matrices of experts as numbers, by threads of the CPU: the reference of products, and for programs that convert
//! weights. Each element is rounded to `f32` where the format's own program rounds it.

use super::checked::{ExpertLayout, MatrixLayout};
use super::names::{ExpertMatrix, TensorRole};
use super::reads::{ExpertPart, ExpertRanges};
use super::stored::ExpertFormat;
use nvme_formats::{Format, ScaleFormat, f32_of_e2m1, f32_of_e8m0, f32_of_f8_e4m3, value};
use nvme_host::catalog::Dtype;
use nvme_host::{Error, Result};
use rayon::prelude::*;

impl ExpertLayout {
    /// Converts `matrix` of expert `expert`, whose bytes [`ExpertRanges::read`] has written to `memory`, to `out`, row by
    /// row. Gate and up are also those rows of a matrix that has both.
    ///
    /// # Errors
    /// [`Error::Usage`] for an expert or matrix that is not there, memory of another length, and a format with which
    /// nothing computes.
    pub fn unpack(
        &self,
        expert: u32,
        matrix: ExpertMatrix,
        memory: &[u8],
        out: &mut [f32],
    ) -> Result<()> {
        let ranges = self.expert(expert)?;
        let (stored, rows) = self.rows_of(expert, matrix)?;
        let elements = rows.count.checked_mul(stored.columns);
        if memory.len() as u64 != ranges.memory_bytes() || elements != Some(out.len() as u64) {
            return Err(Error::usage(
                format!(
                    "{} bytes and {} elements are given for {} of {} x {}",
                    memory.len(),
                    out.len(),
                    matrix.name(),
                    rows.count,
                    stored.columns
                ),
                format!(
                    "use the {} bytes of the expert, and an element for each",
                    ranges.memory_bytes()
                ),
            ));
        }
        let elements = StoredElements::new(stored, ranges, memory)?;
        let each = out
            .par_chunks_mut(stored.columns.max(1) as usize)
            .enumerate();
        each.for_each(|(row, out)| {
            let row = rows.first + row as u64 * rows.step;
            for (column, out) in (0..).zip(out) {
                *out = elements.value(row, column);
            }
        });
        Ok(())
    }

    /// Returns the rows and columns of a matrix of an expert, as [`unpack`](Self::unpack) writes it.
    ///
    /// # Errors
    /// [`Error::Usage`] for an expert or matrix that is not there.
    pub fn unpacked_shape(&self, expert: u32, matrix: ExpertMatrix) -> Result<(u64, u64)> {
        let (stored, rows) = self.rows_of(expert, matrix)?;
        Ok((rows.count, stored.columns))
    }

    /// Returns the matrix in which `matrix` is stored, and its rows there.
    fn rows_of(&self, expert: u32, matrix: ExpertMatrix) -> Result<(&MatrixLayout, MatrixRows)> {
        let all = self.matrices(expert)?;
        if let Some(found) = all.iter().find(|one| one.matrix == matrix) {
            let rows = MatrixRows {
                first: 0,
                step: 1,
                count: found.rows,
            };
            return Ok((found, rows));
        }
        let both = all.iter().find(|one| one.matrix == ExpertMatrix::GateUp);
        let half = match matrix {
            ExpertMatrix::Gate => Some(0),
            ExpertMatrix::Up => Some(1),
            _ => None,
        };
        let Some((found, half)) = both.zip(half) else {
            let names: Vec<&str> = all.iter().map(|one| one.matrix.name()).collect();
            return Err(Error::usage(
                format!("{} is not a matrix of these experts", matrix.name()),
                format!("use {}", names.join(", ")),
            ));
        };
        let count = found.rows / 2;
        let (first, step) = match found.is_interleaved {
            true => (half, 2),
            false => (half * count, 1),
        };
        Ok((found, MatrixRows { first, step, count }))
    }
}

/// Rows of a stored matrix.
struct MatrixRows {
    first: u64,
    step: u64,
    count: u64,
}

/// Place and factors of an element.
enum ElementDecoder {
    /// Blocks of a format, which lie one after another in the matrix.
    Blocks(Format),
    /// Numbers of four bytes.
    Words,
    /// GGUF's NVFP4.
    Nvfp4Blocks,
    /// E4M3 in blocks of this number of rows and columns, each with a scale.
    Fp8(u64, u64),
    /// E2M1 in groups of this number in a row, each with a scale.
    E2M1(u64),
    /// Numbers of 4 bits from -8 on in groups of this number in a row, each with a scale.
    Int4(u64),
}

/// The elements of a matrix, in the bytes of its parts.
struct StoredElements<'a> {
    decoder: ElementDecoder,
    weight: &'a [u8],
    scales: &'a [u8],
    scale_format: Option<StoredScale>,
    global: GlobalScale,
    rows: u64,
    columns: u64,
    is_transposed: bool,
}

/// The format of a scale.
#[derive(Clone, Copy)]
enum StoredScale {
    Known(ScaleFormat),
    F16,
}

/// The scale of a whole matrix.
#[derive(Clone, Copy)]
enum GlobalScale {
    None,
    Multiplies(f32),
    Divides(f32),
}

impl<'a> StoredElements<'a> {
    fn new(stored: &MatrixLayout, ranges: &ExpertRanges, memory: &'a [u8]) -> Result<Self> {
        let refused = |why: &str| {
            Error::usage(
                format!("{} is stored as {why}", stored.matrix.name()),
                "read its bytes; nothing here computes with them",
            )
        };
        let bytes = |part: &ExpertPart| &memory[part.at as usize..(part.at + part.bytes) as usize];
        let part = |role| ranges.part(stored.matrix, role);
        let decoder = match &stored.format {
            ExpertFormat::Plain(Dtype::F32) => ElementDecoder::Words,
            ExpertFormat::Plain(Dtype::Nvfp4) => ElementDecoder::Nvfp4Blocks,
            ExpertFormat::Plain(dtype) => {
                let format = format_of(*dtype).ok_or_else(|| refused(dtype.name()))?;
                ElementDecoder::Blocks(format)
            }
            ExpertFormat::Fp8 { rows, columns } => ElementDecoder::Fp8(*rows, *columns),
            ExpertFormat::Mxfp4 => ElementDecoder::E2M1(32),
            ExpertFormat::Nvfp4 { .. } => ElementDecoder::E2M1(16),
            ExpertFormat::Int4 { group } => ElementDecoder::Int4(*group),
            unknown @ ExpertFormat::Unknown(_) => return Err(refused(&unknown.to_string())),
        };
        let weight = ranges
            .parts()
            .iter()
            .find(|one| one.matrix == stored.matrix && one.role.is_weight());
        let weight = weight.ok_or_else(|| Error::internal("a matrix without elements"))?;
        let scale = part(TensorRole::Scale);
        let scale_format =
            scale.map(|scale| scale_of(scale.dtype).ok_or_else(|| refused(scale.dtype.name())));
        let number = |part: &ExpertPart| {
            let words = bytes(part).as_chunks().0.first();
            words.map_or(f32::NAN, |word| f32::from_le_bytes(*word))
        };
        let global = match (
            part(TensorRole::GlobalScale),
            part(TensorRole::GlobalDivisor),
        ) {
            (Some(one), _) if one.dtype == Dtype::F32 => GlobalScale::Multiplies(number(one)),
            (_, Some(one)) if one.dtype == Dtype::F32 => GlobalScale::Divides(number(one)),
            (None, None) => GlobalScale::None,
            _ => return Err(refused("a scale that is no float32")),
        };
        if let Some(shape) = part(TensorRole::PackedShape) {
            let lengths: Vec<u64> = bytes(shape)
                .as_chunks()
                .0
                .iter()
                .map(|word| u64::from_le_bytes(*word))
                .collect();
            if lengths != [stored.rows, stored.columns] {
                return Err(Error::usage(
                    format!(
                        "{} says {lengths:?}, and its matrix has {} x {} elements",
                        shape.tensor, stored.rows, stored.columns
                    ),
                    "get the file again",
                ));
            }
        }
        Ok(Self {
            decoder,
            weight: bytes(weight),
            scales: scale.map_or(&[], bytes),
            scale_format: scale_format.transpose()?,
            global,
            rows: stored.rows,
            columns: stored.columns,
            is_transposed: stored.is_transposed,
        })
    }

    /// Returns an element.
    fn value(&self, row: u64, column: u64) -> f32 {
        let index = match self.is_transposed {
            true => column * self.rows + row,
            false => row * self.columns + column,
        };
        match self.decoder {
            ElementDecoder::Words => {
                let at = index as usize * 4;
                let word = |k: usize| self.weight.get(at + k).copied().unwrap_or(0);
                f32::from_le_bytes([word(0), word(1), word(2), word(3)])
            }
            ElementDecoder::Blocks(format) => {
                // Indices in the block, which have 32 bits where those in the matrix may not.
                let block = u64::from(format.block_elements());
                let first = index / block * u64::from(format.block_bytes());
                value(format, (index % block) as u32, |k| {
                    self.byte(first + u64::from(k))
                })
            }
            ElementDecoder::Nvfp4Blocks => {
                let (first, place) = (index / 64 * 36, index % 64);
                let (group, place) = (place / 16, place % 16);
                let byte = self.byte(first + 4 + group * 8 + place % 8);
                let scale = f32_of_ue4m3(self.byte(first + group));
                // ggml's numbers are integers, which have no negative zero.
                let number = match byte >> (place / 8 * 4) & 0xF {
                    8 => 0.0,
                    code => f32_of_e2m1(code),
                };
                self.of_global(number * scale)
            }
            ElementDecoder::Fp8(rows, columns) => {
                let of_row = self.columns.div_ceil(columns);
                let scale = self.scale(row / rows * of_row + column / columns);
                f32_of_f8_e4m3(self.byte(index)) * scale
            }
            ElementDecoder::E2M1(group) => {
                let scale = self.of_global(self.scale(index / group));
                f32_of_e2m1(self.byte(index / 2) >> (index % 2 * 4) & 0xF) * scale
            }
            ElementDecoder::Int4(group) => {
                let number = self.byte(index / 2) >> (index % 2 * 4) & 0xF;
                (f32::from(number) - 8.0) * self.scale(index / group)
            }
        }
    }

    /// Returns a byte of the matrix.
    fn byte(&self, at: u64) -> u8 {
        self.weight.get(at as usize).copied().unwrap_or(0)
    }

    /// Returns the stored scale number `at`.
    fn scale(&self, at: u64) -> f32 {
        let byte = |at: u64| self.scales.get(at as usize).copied().unwrap_or(0);
        match self.scale_format {
            None => 1.0,
            Some(StoredScale::F16) => value(Format::F16, 0, |k| byte(at * 2 + u64::from(k))),
            Some(StoredScale::Known(ScaleFormat::E8M0)) => f32_of_e8m0(byte(at)),
            Some(StoredScale::Known(format)) => {
                let first = at * u64::from(format.bytes());
                format.value(|k| byte(first + u64::from(k)))
            }
        }
    }

    fn of_global(&self, scale: f32) -> f32 {
        match self.global {
            GlobalScale::None => scale,
            GlobalScale::Multiplies(factor) => scale * factor,
            GlobalScale::Divides(factor) => scale / factor,
        }
    }
}

/// Converts the scale of GGUF's NVFP4: E4M3 without a sign, as ggml reads it: the code of NaN is 0, and the sign is left out.
fn f32_of_ue4m3(byte: u8) -> f32 {
    match byte {
        0x7F => 0.0,
        0xFF => 480.0,
        _ => f32_of_f8_e4m3(byte & 0x7F),
    }
}

fn format_of(dtype: Dtype) -> Option<Format> {
    Some(match dtype {
        Dtype::F16 => Format::F16,
        Dtype::Bf16 => Format::Bf16,
        Dtype::Q8_0 => Format::Q8_0,
        Dtype::Q4_0 => Format::Q4_0,
        Dtype::Q4_1 => Format::Q4_1,
        Dtype::Q2K => Format::Q2K,
        Dtype::Q3K => Format::Q3K,
        Dtype::Q4K => Format::Q4K,
        Dtype::Q5K => Format::Q5K,
        Dtype::Q6K => Format::Q6K,
        Dtype::Iq4Nl => Format::Iq4Nl,
        Dtype::Iq4Xs => Format::Iq4Xs,
        Dtype::Mxfp4 => Format::Mxfp4,
        _ => return None,
    })
}

fn scale_of(dtype: Dtype) -> Option<StoredScale> {
    Some(match dtype {
        Dtype::F32 => StoredScale::Known(ScaleFormat::F32),
        Dtype::Bf16 => StoredScale::Known(ScaleFormat::Bf16),
        // Files from before safetensors had the type name it by its size.
        Dtype::F8E8M0 | Dtype::U8 => StoredScale::Known(ScaleFormat::E8M0),
        Dtype::F8E4M3 => StoredScale::Known(ScaleFormat::E4M3),
        Dtype::F16 => StoredScale::F16,
        _ => return None,
    })
}
