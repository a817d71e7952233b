//! Reference of attention on the CPU in `f64`, term by term: all implementations are compared with it.

/// A partial result of one query over some keys, in the form in which partial results can be joined.
///
/// Kernels that split the keys store such parts in the workspace; tests compare them as well as the final
/// results.
#[derive(Clone, Debug, PartialEq)]
pub struct PartialResult {
    /// Sum over the keys of the value times `exp(scale (score - largest))`, for each element.
    pub sums: Vec<f64>,
    /// Largest product of the query and a key; minus infinity without a key.
    pub largest: f64,
    /// Sum of the exponentials.
    pub total: f64,
}

impl PartialResult {
    /// Computes the partial result of a query over consecutive keys and values, vectors with as many elements
    /// as the query.
    ///
    /// # Panics
    /// If the query has no elements.
    pub fn of(query: &[f32], keys: &[f32], values: &[f32], scale: f32) -> Self {
        let elements = query.len();
        let scores: Vec<f64> = keys
            .chunks_exact(elements)
            .map(|key| {
                let products = query.iter().zip(key);
                products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            })
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (mut sums, mut total) = (vec![0.0; elements], 0.0);
        for (score, value) in scores.iter().zip(values.chunks_exact(elements)) {
            let share = (f64::from(scale) * (score - largest)).exp();
            total += share;
            for (sum, value) in sums.iter_mut().zip(value) {
                *sum += share * f64::from(*value);
            }
        }
        Self {
            sums,
            largest,
            total,
        }
    }

    /// Returns the result: zeros without a key.
    pub fn result(&self) -> Vec<f64> {
        let by = if self.total == 0.0 {
            0.0
        } else {
            1.0 / self.total
        };
        self.sums.iter().map(|sum| sum * by).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_those_of_the_softmax() {
        // Products 4 and 0, times a half: e^2 to 1.
        let part = PartialResult::of(
            &[4.0, 0.0],
            &[1.0, 0.0, 0.0, 1.0],
            &[10.0, 20.0, 30.0, 40.0],
            0.5,
        );
        let share = 1.0 / (1.0 + 2f64.exp());
        let found = part.result();
        assert!((found[0] - (10.0 + 20.0 * share)).abs() < 1e-12);
        assert!((found[1] - (20.0 + 20.0 * share)).abs() < 1e-12);
        assert_eq!(part.largest, 4.0);
    }

    #[test]
    fn a_query_without_keys_has_zeros() {
        let part = PartialResult::of(&[1.0; 8], &[], &[], 1.0);
        assert_eq!(part.result(), vec![0.0; 8]);
        assert_eq!((part.largest, part.total), (f64::NEG_INFINITY, 0.0));
    }
}
