//! Reference of the experts' kernels on the CPU, and measures of the balance between experts.

use super::{ChosenExpert, NO_SLOT};
use crate::{index_of, ranked};

/// Selects the `choices` experts with the largest logits, as [`RouteParameters`](super::RouteParameters) does, with
/// their weights.
pub fn route(logits: &[f32], choices: usize, over_all: bool) -> Vec<ChosenExpert> {
    let mut ranks: Vec<u64> = logits
        .iter()
        .zip(0..)
        .map(|(logit, expert)| ranked(*logit, expert))
        .collect();
    ranks.sort_unstable_by(|a, b| b.cmp(a));
    ranks.truncate(choices);
    let experts: Vec<usize> = ranks.iter().map(|rank| index_of(*rank) as usize).collect();
    let largest = experts.first().map_or(0.0, |expert| logits[*expert]);
    let share = |logit: f32| (logit - largest).exp();
    let total: f32 = match over_all {
        true => logits.iter().map(|logit| share(*logit)).sum(),
        false => experts.iter().map(|expert| share(logits[*expert])).sum(),
    };
    let chosen = experts.into_iter().map(|expert| ChosenExpert {
        expert: expert as u32,
        slot: NO_SLOT,
        weight: share(logits[expert]) / total,
        reserved: 0,
    });
    chosen.collect()
}

/// Returns the softmax of `logits`.
pub fn probabilities(logits: &[f32]) -> Vec<f32> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shares: Vec<f32> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let total: f32 = shares.iter().sum();
    shares.iter().map(|share| share / total).collect()
}

/// The balance between the experts of a layer.
///
/// Training tries to keep these near their ideal values, since a few overused experts leave the others
/// untrained, and a cache of experts gains from choices that repeat.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertBalance {
    /// Largest number of choices of an expert, relative to the mean: 1 if all are chosen equally often.
    pub most_to_mean: f64,
    /// Standard deviation of the numbers of choices, relative to the mean.
    pub variation: f64,
    /// Entropy of the choices, relative to its maximum: 1 if all are chosen equally often.
    pub entropy: f64,
    /// Experts that were never chosen.
    pub unused: u32,
    /// Load-balancing loss of the Switch Transformer (Fedus et al., 2021, equation 4) without its factor: the
    /// number of experts times the sum over them of the share of choices and the mean probability; 1 for a
    /// perfect balance. `None` without probabilities.
    pub loss: Option<f64>,
}

/// Computes the metrics of `moe_load_balance` from `counts`, the choices of each expert, and the softmax over
/// all experts of each token, if any.
pub fn balance(counts: &[u64], probabilities: &[f32]) -> ExpertBalance {
    let experts = counts.len();
    let total: u64 = counts.iter().sum();
    let mean = total as f64 / experts.max(1) as f64;
    let share = |count: u64| count as f64 / total.max(1) as f64;
    let entropy: f64 = counts
        .iter()
        .filter(|count| **count > 0)
        .map(|count| -share(*count) * share(*count).ln())
        .sum();
    let variance = counts.iter().map(|count| (*count as f64 - mean).powi(2));
    let variance = variance.sum::<f64>() / experts.max(1) as f64;
    let most = counts.iter().copied().max().unwrap_or(0) as f64;
    let tokens = probabilities.len() / experts.max(1);
    let loss = (tokens > 0).then(|| {
        let of = |expert: usize| -> f64 {
            let each = probabilities.iter().skip(expert).step_by(experts);
            each.map(|p| f64::from(*p)).sum::<f64>() / tokens as f64
        };
        let terms = counts.iter().enumerate();
        experts as f64
            * terms
                .map(|(expert, count)| share(*count) * of(expert))
                .sum::<f64>()
    });
    ExpertBalance {
        most_to_mean: if mean > 0.0 { most / mean } else { 0.0 },
        variation: if mean > 0.0 {
            variance.sqrt() / mean
        } else {
            0.0
        },
        entropy: if experts > 1 {
            entropy / (experts as f64).ln()
        } else {
            1.0
        },
        unused: counts.iter().filter(|count| **count == 0).count() as u32,
        loss,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logits_are_chosen_and_of_equal_ones_the_first() {
        let logits = [1.0, 3.0, 3.0, -1.0, 3.0];
        let chosen = route(&logits, 3, false);
        let experts: Vec<u32> = chosen.iter().map(|one| one.expert).collect();
        assert_eq!(experts, [1, 2, 4]);
        assert!(
            chosen
                .iter()
                .all(|one| (one.weight - 1.0 / 3.0).abs() < 1e-6)
        );
        let over_all = route(&logits, 2, true);
        let all = probabilities(&logits);
        assert!((over_all[0].weight - all[1]).abs() < 1e-6);
        assert!((all.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn balance_is_1_where_all_are_alike_and_worse_where_one_has_all() {
        let even = balance(&[5; 8], &[0.125; 16]);
        assert!((even.most_to_mean - 1.0).abs() < 1e-12);
        assert!(even.variation.abs() < 1e-12 && (even.entropy - 1.0).abs() < 1e-12);
        assert_eq!(
            (even.unused, even.loss.map(|loss| loss.round())),
            (0, Some(1.0))
        );
        let mut counts = [0; 8];
        counts[3] = 40;
        let one = balance(&counts, &[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!((one.most_to_mean, one.entropy, one.unused), (8.0, 0.0, 7));
        assert_eq!(one.loss, Some(8.0));
        assert_eq!(balance(&[], &[]).loss, None);
    }
}
