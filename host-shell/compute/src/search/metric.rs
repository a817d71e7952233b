//! Metrics of vectors, and normalisation to length 1.

use super::source::Vectors;
use nvme_host::{Error, Result};
use rayon::prelude::*;
use std::borrow::Cow;

/// Metric by which vectors are compared. An index has one, which its header names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Metric {
    /// The squared Euclidean distance.
    #[default]
    Euclidean,
    /// The angle: vectors and queries are divided by their lengths first. Distances are then the squared Euclidean ones
    /// of vectors of length 1, 2 - 2 cos.
    Cosine,
}

impl Metric {
    /// All, by their numbers in a header.
    pub const ALL: [Self; 2] = [Self::Euclidean, Self::Cosine];

    /// As the command line and Python have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Euclidean => "euclidean",
            Self::Cosine => "cosine",
        }
    }

    /// Returns the metric of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// Returns the vectors that an index of this metric holds.
    ///
    /// # Errors
    /// [`Error::Usage`] for a vector without a direction: all of its elements are 0.
    pub fn of_vectors(self, vectors: &Vectors) -> Result<Cow<'_, Vectors>> {
        if self == Self::Euclidean {
            return Ok(Cow::Borrowed(vectors));
        }
        let elements = vectors.elements();
        let zero = |vector: &[f32]| vector.iter().all(|x| *x == 0.0);
        let each = vectors.all().par_chunks(elements);
        if let Some(at) = each.position_first(zero) {
            return Err(Error::usage(
                format!("vector {at} has no direction, since its elements are all 0"),
                "leave it out, or use the metric euclidean",
            ));
        }
        let numbers = self.of_queries(vectors.all(), elements).into_owned();
        Vectors::new(elements as u32, numbers).map(Cow::Owned)
    }

    /// Converts queries, of `elements` elements each, for comparison with an index of this metric. A query
    /// whose elements are all 0 becomes NaN, which a search refuses with its position.
    pub fn of_queries(self, queries: &[f32], elements: usize) -> Cow<'_, [f32]> {
        if self == Self::Euclidean {
            return Cow::Borrowed(queries);
        }
        let mut unit = queries.to_vec();
        unit.par_chunks_mut(elements.max(1)).for_each(|vector| {
            // In f64, where no square of an f32 is infinite or 0.
            let squares = vector.iter().map(|x| f64::from(*x).powi(2));
            let length = squares.sum::<f64>().sqrt();
            for x in vector {
                *x = (f64::from(*x) / length) as f32;
            }
        });
        Cow::Owned(unit)
    }
}
