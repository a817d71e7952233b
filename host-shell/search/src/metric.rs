//! Metrics of vectors, and normalisation to length 1.

use super::source::VectorSet;
use nvme_driver::{Error, Result};
use rayon::prelude::*;
use std::borrow::Cow;

/// Metric by which vectors are compared. An index has one, which its header names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VectorMetric {
    /// The squared Euclidean distance.
    #[default]
    Euclidean,
    /// The angle: vectors and queries are divided by their lengths first. Distances are then the squared Euclidean ones
    /// of vectors of length 1, 2 - 2 cos.
    Cosine,
    /// The inner product: the greatest is the nearest. Vectors are divided by the length of the longest and get one more
    /// element, which makes their lengths 1; queries are divided by their own lengths. Distances are then 2 - 2 p / (l m)
    /// for the inner product p, the query's length l and the longest vector's m.
    InnerProduct,
}

impl VectorMetric {
    /// All metrics, in the order of their numbers in a header.
    pub const ALL: [Self; 3] = [Self::Euclidean, Self::Cosine, Self::InnerProduct];

    /// Returns the name that the command line and Python use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Euclidean => "euclidean",
            Self::Cosine => "cosine",
            Self::InnerProduct => "inner_product",
        }
    }

    /// Returns the metric of this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.name() == name)
    }

    /// Returns how many elements a stored vector has, of vectors of `elements` elements.
    pub const fn stored_elements(self, elements: u32) -> u32 {
        match self {
            Self::Euclidean | Self::Cosine => elements,
            Self::InnerProduct => elements.saturating_add(1),
        }
    }

    /// Returns the length of the longest of `vectors`, for [`Self::InnerProduct`] alone, else 0. If all are 0 it is 1.
    ///
    /// # Errors
    /// [`Error::Usage`] for a vector whose length is no finite `f32`.
    pub fn longest(self, vectors: &VectorSet) -> Result<f32> {
        if self != Self::InnerProduct {
            return Ok(0.0);
        }
        let each = vectors.all().par_chunks(vectors.elements());
        let longest = each.map(length).reduce(|| 0.0, f64::max) as f32;
        if longest == 0.0 {
            return Ok(1.0);
        }
        match longest.is_finite() {
            true => Ok(longest),
            false => Err(Error::usage(
                "the length of the longest vector is above the greatest f32",
                "divide all vectors by one number",
            )),
        }
    }

    /// Returns the vectors that an index of this metric holds; `longest` is the result of [`longest`](Self::longest)
    /// for them.
    ///
    /// # Errors
    /// [`Error::Usage`] for a vector of zeros, which has no direction, if the metric needs one, and for more elements
    /// than a node holds.
    pub fn of_vectors(self, vectors: &VectorSet, longest: f32) -> Result<Cow<'_, VectorSet>> {
        let elements = vectors.elements();
        let numbers = match self {
            Self::Euclidean => return Ok(Cow::Borrowed(vectors)),
            Self::Cosine => {
                let zero = |vector: &[f32]| vector.iter().all(|x| *x == 0.0);
                let each = vectors.all().par_chunks(elements);
                if let Some(at) = each.position_first(zero) {
                    return Err(Error::usage(
                        format!("vector {at} has no direction, since its elements are all 0"),
                        "leave it out, or use the metric euclidean",
                    ));
                }
                self.of_queries(vectors.all(), elements).into_owned()
            }
            Self::InnerProduct => lengthened(vectors.all(), elements, |_| longest.into(), true),
        };
        VectorSet::new(self.stored_elements(elements as u32), numbers).map(Cow::Owned)
    }

    /// Converts queries, of `elements` elements each, for comparison with an index of this metric. A query whose elements
    /// are all 0 becomes NaN for [`Self::Cosine`], which a search refuses with its position.
    pub fn of_queries(self, queries: &[f32], elements: usize) -> Cow<'_, [f32]> {
        let elements = elements.max(1);
        match self {
            Self::Euclidean => Cow::Borrowed(queries),
            Self::Cosine => {
                let mut unit = queries.to_vec();
                unit.par_chunks_mut(elements).for_each(|vector| {
                    let length = length(vector);
                    for x in vector {
                        *x = (f64::from(*x) / length) as f32;
                    }
                });
                Cow::Owned(unit)
            }
            Self::InnerProduct => {
                // All vectors are equally near to a query of zeros.
                let divisor = |query: &[f32]| match length(query) {
                    0.0 => 1.0,
                    length => length,
                };
                Cow::Owned(lengthened(queries, elements, divisor, false))
            }
        }
    }
}

/// Returns the Euclidean length, in `f64`, so that no square of an `f32` is infinite or 0.
fn length(vector: &[f32]) -> f64 {
    let squares = vector.iter().map(|x| f64::from(*x).powi(2));
    squares.sum::<f64>().sqrt()
}

/// Returns vectors divided by their divisors, each with one more element: 0, or with `fills` the number that makes the
/// length 1.
fn lengthened(
    vectors: &[f32],
    elements: usize,
    divisor: impl Fn(&[f32]) -> f64 + Sync,
    fills: bool,
) -> Vec<f32> {
    let mut longer = vec![0.0; vectors.len() / elements * (elements + 1)];
    let each = longer.par_chunks_exact_mut(elements + 1);
    each.zip(vectors.par_chunks_exact(elements))
        .for_each(|(to, vector)| {
            let divisor = divisor(vector);
            for (to, x) in to.iter_mut().zip(vector) {
                *to = (f64::from(*x) / divisor) as f32;
            }
            if fills {
                to[elements] = (1.0 - length(&to[..elements]).powi(2)).max(0.0).sqrt() as f32;
            }
        });
    longer
}
