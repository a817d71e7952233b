//! Matrices of experts as numbers, by threads of the CPU: the reference of products, and for programs that convert
//! weights. Each element is rounded to `f32` where the format's own program rounds it.

use super::checked::{ExpertLayout, MatrixLayout};
use super::names::{ExpertMatrix, TensorRole};
use super::reads::{ExpertPart, ExpertRanges};
use super::stored::ExpertFormat;
use nvme_compute_kernel::experts::published::{ElementDecoder, PublishedForm, SCALE_F16};
use nvme_formats::{Format, ScaleFormat};
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
        let elements = StoredElements::new(stored, &rows, ranges, memory)?;
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

/// A matrix of an expert, for kernels: its stored form, and the parts that hold it.
pub struct StoredMatrix<'a> {
    /// The stored form, without an arrangement.
    pub source: PublishedForm,
    /// The elements.
    pub weight: &'a ExpertPart,
    /// Their scales.
    pub scale: Option<&'a ExpertPart>,
    /// The scale of the whole matrix.
    pub factor: Option<&'a ExpertPart>,
    /// The rows and columns that the file says a packed matrix has.
    pub packed_shape: Option<&'a ExpertPart>,
    /// The bias.
    pub bias: Option<&'a ExpertPart>,
}

impl ExpertLayout {
    /// Returns how gate, up or down of an expert is stored.
    ///
    /// # Errors
    /// [`Error::Usage`] for an expert or matrix that is not there, and a format with which nothing computes.
    pub fn stored_matrix(&self, expert: u32, matrix: ExpertMatrix) -> Result<StoredMatrix<'_>> {
        let ranges = self.expert(expert)?;
        let (stored, rows) = self.rows_of(expert, matrix)?;
        StoredMatrix::new(stored, &rows, ranges)
    }
}

impl<'a> StoredMatrix<'a> {
    fn new(stored: &MatrixLayout, rows: &MatrixRows, ranges: &'a ExpertRanges) -> Result<Self> {
        let refused = |why: &str| {
            Error::usage(
                format!("{} is stored as {why}", stored.matrix.name()),
                "read its bytes; nothing here computes with them",
            )
        };
        let part = |role| ranges.part(stored.matrix, role);
        let block = |decoder, rows, columns| (decoder, 0, rows, columns);
        let (decoder, format, block_rows, block_columns) = match &stored.format {
            ExpertFormat::Plain(Dtype::F32) => block(ElementDecoder::Words, 1, 1),
            ExpertFormat::Plain(Dtype::Nvfp4) => block(ElementDecoder::Nvfp4Blocks, 1, 1),
            ExpertFormat::Plain(dtype) => {
                let format = format_of(*dtype).ok_or_else(|| refused(dtype.name()))?;
                (ElementDecoder::Blocks, format as u32, 1, 1)
            }
            ExpertFormat::Fp8 { rows, columns } => block(ElementDecoder::Fp8, *rows, *columns),
            ExpertFormat::Mxfp4 => block(ElementDecoder::E2M1, 1, 32),
            ExpertFormat::Nvfp4 { .. } => block(ElementDecoder::E2M1, 1, 16),
            ExpertFormat::Int4 { group } => block(ElementDecoder::Int4, 1, *group),
            unknown @ ExpertFormat::Unknown(_) => return Err(refused(&unknown.to_string())),
        };
        let weight = ranges
            .parts()
            .iter()
            .find(|one| one.matrix == stored.matrix && one.role.is_weight());
        let weight = weight.ok_or_else(|| Error::internal("a matrix without elements"))?;
        let scale = part(TensorRole::Scale);
        let scale_number =
            scale.map(|scale| scale_of(scale.dtype).ok_or_else(|| refused(scale.dtype.name())));
        let (multiplied, divided) = (
            part(TensorRole::GlobalScale),
            part(TensorRole::GlobalDivisor),
        );
        let factor = multiplied.or(divided);
        if factor.is_some_and(|factor| factor.dtype != Dtype::F32) {
            return Err(refused("a scale that is no float32"));
        }
        let short = |number: u64| {
            u32::try_from(number).map_err(|_| refused("a matrix with 2^32 rows or columns"))
        };
        let source = PublishedForm {
            decoder: decoder as u32,
            format,
            scale: scale_number.transpose()?.unwrap_or(0),
            divides: (multiplied.is_none() && divided.is_some()).into(),
            block_rows: short(block_rows)?,
            block_columns: short(block_columns)?,
            rows: short(stored.rows)?,
            columns: short(stored.columns)?,
            first_row: short(rows.first)?,
            row_step: short(rows.step)?,
            is_transposed: stored.is_transposed.into(),
            ..PublishedForm::default()
        };
        Ok(Self {
            source,
            weight,
            scale,
            factor,
            packed_shape: part(TensorRole::PackedShape),
            bias: part(TensorRole::Bias),
        })
    }

    /// Returns the scale of the whole matrix by its bytes.
    pub fn factor_of(bytes: &[u8]) -> f32 {
        let words = bytes.as_chunks().0.first();
        words.map_or(f32::NAN, |word| f32::from_le_bytes(*word))
    }

    /// Checks the lengths that the file says a packed matrix has, by their bytes.
    ///
    /// # Errors
    /// [`Error::Usage`] for other lengths than those of the elements.
    pub fn check_packed_shape(&self, shape: &ExpertPart, bytes: &[u8]) -> Result<()> {
        let words = bytes.as_chunks().0.iter();
        let lengths: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
        let (rows, columns) = (u64::from(self.source.rows), u64::from(self.source.columns));
        match lengths == [rows, columns] {
            true => Ok(()),
            false => Err(Error::usage(
                format!(
                    "{} says {lengths:?}, and its matrix has {rows} x {columns} elements",
                    shape.tensor
                ),
                "get the file again",
            )),
        }
    }
}

/// The elements of a matrix, in the bytes of its parts.
struct StoredElements<'a> {
    source: PublishedForm,
    weight: &'a [u8],
    scales: &'a [u8],
    factor: f32,
}

impl<'a> StoredElements<'a> {
    fn new(
        stored: &MatrixLayout,
        rows: &MatrixRows,
        ranges: &ExpertRanges,
        memory: &'a [u8],
    ) -> Result<Self> {
        let bytes = |part: &ExpertPart| &memory[part.at as usize..(part.at + part.bytes) as usize];
        let found = StoredMatrix::new(stored, rows, ranges)?;
        if let Some(shape) = found.packed_shape {
            found.check_packed_shape(shape, bytes(shape))?;
        }
        Ok(Self {
            source: found.source,
            weight: bytes(found.weight),
            scales: found.scale.map_or(&[], bytes),
            factor: found
                .factor
                .map_or(1.0, |part| StoredMatrix::factor_of(bytes(part))),
        })
    }

    /// Returns an element.
    fn value(&self, row: u64, column: u64) -> f32 {
        let byte = |bytes: &[u8], at: u64| bytes.get(at as usize).copied().unwrap_or(0);
        self.source.value(
            (row, column),
            self.factor,
            |at| byte(self.weight, at),
            |at| byte(self.scales, at),
        )
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

fn scale_of(dtype: Dtype) -> Option<u32> {
    Some(match dtype {
        Dtype::F32 => ScaleFormat::F32 as u32,
        Dtype::Bf16 => ScaleFormat::Bf16 as u32,
        // Files from before safetensors had the type name it by its size.
        Dtype::F8E8M0 | Dtype::U8 => ScaleFormat::E8M0 as u32,
        Dtype::F8E4M3 => ScaleFormat::E4M3 as u32,
        Dtype::F16 => SCALE_F16,
        _ => return None,
    })
}
