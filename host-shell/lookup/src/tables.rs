//! The lookup tables of one model.

use crate::{LookupError, NgramHash};

/// The hashes of a model's tables, in the order of its layers: made by [`engram::tables`](crate::engram::tables) and
/// [`ple::tables`](crate::ple::tables).
#[derive(Clone, Debug)]
pub struct NgramTables {
    layers: Vec<u64>,
    hashes: Vec<NgramHash>,
    columns: u64,
    /// The number of rows of a table in a file is a multiple of this.
    divisor: u64,
}

impl NgramTables {
    pub(crate) fn new(
        layers: Vec<u64>,
        hashes: Vec<NgramHash>,
        columns: u64,
        divisor: u64,
    ) -> Self {
        Self {
            layers,
            hashes,
            columns,
            divisor,
        }
    }

    /// Returns the layers that have a table, with the numbers that names of tensors use.
    pub fn layers(&self) -> &[u64] {
        &self.layers
    }

    /// Returns the number of elements of a row.
    pub fn columns(&self) -> u64 {
        self.columns
    }

    /// Returns the hashes of the tables, in the order of [`layers`](Self::layers).
    pub fn hashes(&self) -> &[NgramHash] {
        &self.hashes
    }

    /// Returns the hashes of the table of `layer`.
    ///
    /// # Errors
    /// [`LookupError::NoSuchLayer`] for a layer without one.
    pub fn of_layer(&self, layer: u64) -> Result<&NgramHash, LookupError> {
        let found = self.layers.iter().position(|known| *known == layer);
        match found {
            Some(at) => Ok(&self.hashes[at]),
            None => Err(LookupError::NoSuchLayer {
                layer,
                known: format!("{:?}", self.layers),
            }),
        }
    }

    /// Returns the number of rows of the table of `layer`, rounded up to the multiple that the configuration asks for.
    ///
    /// # Errors
    /// As [`of_layer`](Self::of_layer).
    pub fn padded_rows(&self, layer: u64) -> Result<u64, LookupError> {
        let rows = self.of_layer(layer)?.rows();
        Ok(rows.div_ceil(self.divisor).saturating_mul(self.divisor))
    }
}
