//! YaRN: the frequencies of rotary position embedding for texts that are longer than those of the first training
//! (Peng et al., arXiv 2309.00071, section 3.2), with the constants of gpt-oss.

use nvme_compute_kernel::reference;
use std::f64::consts::TAU;

/// Scaling of frequencies by YaRN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct YarnScaling {
    /// Number by which texts are longer.
    pub factor: f64,
    /// Positions of a text of the first training.
    pub original_positions: u32,
    /// Turns within those positions from which on a frequency stays as it is.
    pub fast_turns: f64,
    /// Turns up to which a frequency is divided by `factor`.
    pub slow_turns: f64,
}

impl YarnScaling {
    /// Returns the angle of each pair from one position to the next. Between both numbers of turns frequencies are
    /// blended; the borders are not rounded to whole pairs, as gpt-oss prescribes.
    pub fn frequencies(&self, head_elements: u32, base: f64) -> Vec<f64> {
        let pair_with = |turns: f64| {
            let positions = f64::from(self.original_positions);
            f64::from(head_elements) * (positions / (turns * TAU)).ln() / (2.0 * base.ln())
        };
        let first = pair_with(self.fast_turns).max(0.0);
        let last = pair_with(self.slow_turns).min(f64::from(head_elements) - 1.0);
        let length = if first == last { 0.001 } else { last - first };
        let plain = reference::frequencies(head_elements, base);
        let blended = plain.into_iter().zip(0u32..).map(|(frequency, pair)| {
            let share = ((f64::from(pair) - first) / length).clamp(0.0, 1.0);
            frequency / self.factor * share + frequency * (1.0 - share)
        });
        blended.collect()
    }

    /// Returns the factor of cosines and sines.
    pub fn magnitude(&self) -> f64 {
        match self.factor > 1.0 {
            true => 0.1 * self.factor.ln() + 1.0,
            false => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fast_pairs_stay_and_slow_ones_are_divided() {
        let yarn = YarnScaling {
            factor: 32.0,
            original_positions: 4096,
            fast_turns: 32.0,
            slow_turns: 1.0,
        };
        let plain = reference::frequencies(64, 150_000.0);
        let scaled = yarn.frequencies(64, 150_000.0);
        // Pair 8.09 makes 32 turns in 4,096 positions, and pair 17.4 one.
        for pair in 0..32 {
            let ratio = scaled[pair] / plain[pair];
            match pair {
                0..=8 => assert!((ratio - 1.0).abs() < 1e-12, "{pair} {ratio}"),
                18.. => assert!((ratio - 1.0 / 32.0).abs() < 1e-12, "{pair} {ratio}"),
                _ => assert!(ratio < 1.0 && ratio > 1.0 / 32.0, "{pair} {ratio}"),
            }
        }
        assert!((yarn.magnitude() - 1.346_573_59).abs() < 1e-8);
    }
}
