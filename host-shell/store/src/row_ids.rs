//! The ids of a request's rows, of 32 or 64 bits.

use std::ops::Range;

/// The ids of rows.
#[derive(Clone, Copy, Debug)]
pub enum RowIds<'a> {
    /// Ids of 32 bits.
    I32(&'a [i32]),
    /// Ids of 64 bits.
    I64(&'a [i64]),
}

impl RowIds<'_> {
    /// Returns the number of ids.
    pub fn len(&self) -> usize {
        match self {
            Self::I32(ids) => ids.len(),
            Self::I64(ids) => ids.len(),
        }
    }

    /// True if there are no ids.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the ids at these places.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::I32(ids) => Self::I32(&ids[range]),
            Self::I64(ids) => Self::I64(&ids[range]),
        }
    }

    /// Returns the id of row `index` of a request.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn get(&self, index: usize) -> i64 {
        match self {
            Self::I32(ids) => i64::from(ids[index]),
            Self::I64(ids) => ids[index],
        }
    }
}

impl<'a> From<&'a [i32]> for RowIds<'a> {
    fn from(ids: &'a [i32]) -> Self {
        Self::I32(ids)
    }
}

impl<'a> From<&'a [i64]> for RowIds<'a> {
    fn from(ids: &'a [i64]) -> Self {
        Self::I64(ids)
    }
}

impl<'a, const N: usize> From<&'a [i32; N]> for RowIds<'a> {
    fn from(ids: &'a [i32; N]) -> Self {
        Self::I32(ids)
    }
}

impl<'a, const N: usize> From<&'a [i64; N]> for RowIds<'a> {
    fn from(ids: &'a [i64; N]) -> Self {
        Self::I64(ids)
    }
}
