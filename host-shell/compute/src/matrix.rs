//! A matrix on a store, and its product with a vector. The product by the CPU has the bits of a fixed order of sums,
//! with which the kernels are compared.

use nvme_compute_kernel::reference;
use nvme_formats::{StoredFormat, UNIT, bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use nvme_host::store::RowIds;
use nvme_host::{Error, Result, Store};
use rayon::prelude::*;
use std::sync::Arc;

/// Bytes of rows that the CPU reads at a time, unless one row is longer.
const READ_BYTES: u64 = 4 << 20;
/// Number of rows of a product that a thread takes at a time.
const ROWS: usize = 16;

/// Elements of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfFormat {
    /// The upper half of binary32.
    Bf16,
    /// IEEE 754 binary16.
    F16,
}

impl HalfFormat {
    /// Returns the name that messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Converts a number to a half.
    pub fn of(self, value: f32) -> u16 {
        match self {
            Self::Bf16 => bf16_of_f32(value),
            Self::F16 => f16_of_f32(value),
        }
    }

    /// Converts a half to `f32`.
    pub fn wide(self, half: u16) -> f32 {
        match self {
            Self::Bf16 => f32_of_bf16(half),
            Self::F16 => f32_of_f16(half),
        }
    }

    /// # Errors
    /// [`Error::Usage`] for elements that would lose more than their last bits.
    pub(crate) fn check(self, stored: StoredFormat) -> Result<()> {
        match (self, stored) {
            (_, StoredFormat::F32 | StoredFormat::Mxfp4)
            | (Self::Bf16, StoredFormat::F16)
            | (Self::F16, StoredFormat::Bf16) => Err(Error::usage(
                format!(
                    "a matrix of {} cannot be multiplied by rows of {}",
                    stored.name(),
                    self.name()
                ),
                "use halves of one kind, or a matrix of blocks (q8_0, q4_0, q4_1, q4_k, q6_k)",
            )),
            _ => Ok(()),
        }
    }
}

/// A matrix in its stored format, row after row.
#[derive(Clone, Debug)]
pub struct StoredMatrix {
    pub(crate) store: Arc<Store>,
    pub(crate) offset: u64,
    pub(crate) stored: StoredFormat,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    pub(crate) row_bytes: u64,
}

impl StoredMatrix {
    /// Describes `rows` rows of `columns` elements from byte `offset` of the store on.
    ///
    /// # Errors
    /// [`Error::Usage`] for an odd offset, for no columns or columns that are no whole blocks, and for a matrix that ends
    /// past the store.
    pub fn new(
        store: &Arc<Store>,
        offset: u64,
        stored: StoredFormat,
        rows: u32,
        columns: u32,
    ) -> Result<Self> {
        let (elements, _) = stored.block();
        let row_bytes = stored.row_bytes(columns).filter(|bytes| *bytes > 0);
        let Some(row_bytes) = row_bytes.filter(|_| offset.is_multiple_of(2)) else {
            return Err(Error::usage(
                format!(
                    "{columns} columns of {} at byte {offset} are not whole blocks of the format at an even offset",
                    stored.name()
                ),
                format!(
                    "use a multiple of {} columns, and an even offset",
                    elements.max(UNIT)
                ),
            ));
        };
        // Checks the end.
        store.table(offset, rows.into(), row_bytes)?;
        Ok(Self {
            store: Arc::clone(store),
            offset,
            stored,
            rows,
            columns,
            row_bytes,
        })
    }

    /// Returns its rows.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Returns its columns.
    pub fn columns(&self) -> u32 {
        self.columns
    }

    /// Returns the number of bytes of all rows.
    pub fn bytes(&self) -> u64 {
        self.row_bytes * u64::from(self.rows)
    }

    fn check_vector(&self, x: &[f32]) -> Result<()> {
        if x.len() == self.columns as usize {
            return Ok(());
        }
        Err(Error::usage(
            format!(
                "the vector has {} elements, and one for each column is needed",
                x.len()
            ),
            format!("the matrix has {} columns", self.columns),
        ))
    }

    /// Computes the products of `x` and the rows that `ids` name, by threads of the CPU.
    ///
    /// # Errors
    /// [`Error::Usage`] for a vector of another length; the first row that was not read, or that the matrix does not
    /// have.
    pub fn gathered(&self, ids: &[i64], x: &[f32]) -> Result<Vec<f32>> {
        self.check_vector(x)?;
        let table = self
            .store
            .table(self.offset, self.rows.into(), self.row_bytes)?;
        let step = (READ_BYTES / self.row_bytes).max(1) as usize;
        let mut y = vec![0.0; ids.len()];
        let mut bytes = vec![0; self.row_bytes as usize * step.min(ids.len())];
        for (y, ids) in y.chunks_mut(step).zip(ids.chunks(step)) {
            let bytes = &mut bytes[..ids.len() * self.row_bytes as usize];
            table.gather(RowIds::I64(ids), bytes, None)?.check()?;
            product(self.stored, bytes, x, y);
        }
        Ok(y)
    }

    /// Computes `X W^T` by threads of the CPU: for each row of halves in `x`, which is as long as a
    /// row of the matrix, its products with all rows of the matrix, whose elements are rounded to
    /// halves. Sums are `f64`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a part of a row, and for a matrix of `f32` or of the other kind of halves; the errors of
    /// [`Store::read_at`].
    pub fn products(&self, x: &[u16], half: HalfFormat) -> Result<Vec<f32>> {
        half.check(self.stored)?;
        let columns = self.columns as usize;
        if !x.len().is_multiple_of(columns) {
            return Err(Error::usage(
                format!("{} elements are not whole rows of {columns}", x.len()),
                format!("use rows of {columns}"),
            ));
        }
        let rows = self.rows as usize;
        let x: Vec<f32> = x.iter().map(|bits| half.wide(*bits)).collect();
        let mut y = vec![0.0; x.len() / columns * rows];
        let step = (READ_BYTES / self.row_bytes).max(1) as usize;
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first);
            let mut bytes = vec![0; count * self.row_bytes as usize];
            let at = self.offset + first as u64 * self.row_bytes;
            self.store.read_at(at, &mut bytes)?;
            let row_bytes = self.row_bytes as usize;
            let w: Vec<Vec<f32>> = bytes
                .par_chunks(row_bytes)
                .map(|row| self.halves(row, half))
                .collect();
            let each = y.par_chunks_mut(rows).zip(x.par_chunks(columns));
            each.for_each(|(y, x)| {
                for (y, w) in y[first..].iter_mut().zip(&w) {
                    let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                    *y = terms.sum::<f64>() as f32;
                }
            });
        }
        Ok(y)
    }

    /// Returns the elements of a row, rounded to halves.
    fn halves(&self, row: &[u8], half: HalfFormat) -> Vec<f32> {
        let mut w = vec![0.0; self.columns as usize];
        reference::unpack(self.stored, row, &mut w);
        let rounded = |w: f32| half.wide(half.of(w));
        w.iter_mut().for_each(|w| *w = rounded(*w));
        w
    }

    /// Computes the product with `x`, by threads of the CPU.
    ///
    /// # Errors
    /// [`Error::Usage`] for a vector of another length; the errors of [`Store::read_at`].
    pub fn product(&self, x: &[f32]) -> Result<Vec<f32>> {
        self.check_vector(x)?;
        let row_bytes = self.row_bytes as usize;
        let step = (READ_BYTES / self.row_bytes).max(1);
        let mut y = vec![0.0; self.rows as usize];
        let mut bytes = vec![0; row_bytes * step.min(self.rows.into()) as usize];
        for (y, first) in y
            .chunks_mut(step as usize)
            .zip((0u64..).step_by(step as usize))
        {
            let bytes = &mut bytes[..y.len() * row_bytes];
            self.store
                .read_at(self.offset + first * self.row_bytes, bytes)?;
            product(self.stored, bytes, x, y);
        }
        Ok(y)
    }
}

/// Computes the products of `x` and each row of `bytes`, one for each of `y`.
pub fn product(stored: StoredFormat, bytes: &[u8], x: &[f32], y: &mut [f32]) {
    let row_bytes = bytes.len() / y.len().max(1);
    let parts = y
        .par_chunks_mut(ROWS)
        .zip(bytes.par_chunks((ROWS * row_bytes).max(1)));
    parts.for_each(|(y, rows)| {
        for (y, row) in y.iter_mut().zip(rows.chunks_exact(row_bytes.max(1))) {
            *y = reference::dot(stored, row, x);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random_weights;
    use nvme_host::StoreOptions;

    /// Rows that are read in several parts, against each row alone.
    #[test]
    fn a_product_is_that_of_each_row() {
        let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default()).unwrap();
        let store = Arc::new(store);
        for (stored, rows, columns, offset) in [
            (StoredFormat::F32, 1100, 1024, 6),
            (StoredFormat::Q6K, 33, 512, 0),
            (StoredFormat::Bf16, 0, 32, 4096),
        ] {
            let matrix = StoredMatrix::new(&store, offset, stored, rows, columns).unwrap();
            let mut bytes = vec![0; matrix.bytes() as usize];
            random_weights::fill(stored, 3, &mut bytes);
            store.write_at(offset, &bytes).unwrap();
            let x: Vec<f32> = (0..columns).map(|at| (at % 13) as f32 - 6.0).collect();
            let each = bytes.chunks_exact(matrix.row_bytes as usize);
            let expected: Vec<f32> = each.map(|row| reference::dot(stored, row, &x)).collect();
            assert_eq!(expected.len(), rows as usize);
            assert_eq!(matrix.product(&x).unwrap(), expected);
            assert!(matrix.product(&x[1..]).is_err());
            let ids: Vec<i64> = (0..2 * i64::from(rows))
                .map(|at| at * 7 % i64::from(rows))
                .collect();
            let of_ids = ids.iter().map(|id| expected[*id as usize]);
            let of_ids: Vec<f32> = of_ids.collect();
            assert_eq!(matrix.gathered(&ids, &x).unwrap(), of_ids);
            assert!(matrix.gathered(&[i64::from(rows)], &x).is_err());
        }
        assert!(StoredMatrix::new(&store, 1, StoredFormat::F32, 1, 32).is_err());
        assert!(StoredMatrix::new(&store, 0, StoredFormat::F32, 1, 0).is_err());
        assert!(StoredMatrix::new(&store, store.len() - 4, StoredFormat::F32, 1, 32).is_err());
    }
}
