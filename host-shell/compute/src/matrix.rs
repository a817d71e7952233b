//! A matrix on a store, and its product with a vector.

use nvme_compute_kernel::reference;
use nvme_formats::{Stored, UNIT};
use nvme_host::{Error, Result, Store};
use rayon::prelude::*;
use std::sync::Arc;

/// Bytes of rows that the CPU reads at a time, unless one row is longer.
const READ_BYTES: u64 = 4 << 20;
/// Rows of a product that a thread takes at a time.
const ROWS: usize = 16;

/// A matrix as it is stored, row after row.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub(crate) store: Arc<Store>,
    pub(crate) offset: u64,
    pub(crate) stored: Stored,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    pub(crate) row_bytes: u64,
}

impl Matrix {
    /// `rows` rows of `columns` elements from byte `offset` of the store on.
    ///
    /// # Errors
    /// [`Error::Usage`] for an odd offset, for no columns or columns that are no whole blocks, and for a matrix that ends
    /// past the store.
    pub fn new(
        store: &Arc<Store>,
        offset: u64,
        stored: Stored,
        rows: u32,
        columns: u32,
    ) -> Result<Self> {
        let (elements, _) = stored.block();
        let row_bytes = stored.row_bytes(columns).filter(|bytes| *bytes > 0);
        let Some(row_bytes) = row_bytes.filter(|_| offset.is_multiple_of(2)) else {
            return Err(Error::usage(
                format!("a matrix of {columns} columns of {stored:?} at byte {offset}"),
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

    /// Its rows.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Its columns.
    pub fn columns(&self) -> u32 {
        self.columns
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        self.row_bytes * u64::from(self.rows)
    }

    /// The product with `x`, by threads of the CPU.
    ///
    /// # Errors
    /// [`Error::Usage`] for a vector of another length; those of [`Store::read_at`].
    pub fn product(&self, x: &[f32]) -> Result<Vec<f32>> {
        if x.len() != self.columns as usize {
            return Err(Error::usage(
                format!("a vector of {} elements", x.len()),
                format!("the matrix has {} columns", self.columns),
            ));
        }
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

/// The products of `x` and each row of `bytes`, one for each of `y`.
pub(crate) fn product(stored: Stored, bytes: &[u8], x: &[f32], y: &mut [f32]) {
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
    use crate::synthetic;
    use nvme_host::StoreOptions;

    /// Rows that are read in several parts, against each row by itself.
    #[test]
    fn a_product_is_that_of_each_row() {
        let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default()).unwrap();
        let store = Arc::new(store);
        for (stored, rows, columns, offset) in [
            (Stored::F32, 1100, 1024, 6),
            (Stored::Q6K, 33, 512, 0),
            (Stored::Bf16, 0, 32, 4096),
        ] {
            let matrix = Matrix::new(&store, offset, stored, rows, columns).unwrap();
            let mut bytes = vec![0; matrix.bytes() as usize];
            synthetic::fill(stored, 3, &mut bytes);
            store.write_at(offset, &bytes).unwrap();
            let x: Vec<f32> = (0..columns).map(|at| (at % 13) as f32 - 6.0).collect();
            let each = bytes.chunks_exact(matrix.row_bytes as usize);
            let expected: Vec<f32> = each.map(|row| reference::dot(stored, row, &x)).collect();
            assert_eq!(expected.len(), rows as usize);
            assert_eq!(matrix.product(&x).unwrap(), expected);
            assert!(matrix.product(&x[1..]).is_err());
        }
        assert!(Matrix::new(&store, 1, Stored::F32, 1, 32).is_err());
        assert!(Matrix::new(&store, 0, Stored::F32, 1, 0).is_err());
        assert!(Matrix::new(&store, store.len() - 4, Stored::F32, 1, 32).is_err());
    }
}
