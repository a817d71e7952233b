//! YaRN: the frequencies of rotary position embedding for texts that are longer than those of the first training
//! (Peng et al., arXiv 2309.00071, section 3.2), as gpt-oss and Qwen3 use it.

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
    /// True if both borders are rounded to whole pairs, away from each other, as for Qwen3; gpt-oss prescribes that they are
    /// not.
    pub whole_pairs: bool,
}

impl YarnScaling {
    /// Returns the angle of each pair from one position to the next. Between both numbers of turns frequencies are
    /// blended.
    pub fn frequencies(&self, head_elements: u32, base: f64) -> Vec<f64> {
        let pair_with = |turns: f64| {
            let positions = f64::from(self.original_positions);
            f64::from(head_elements) * (positions / (turns * TAU)).ln() / (2.0 * base.ln())
        };
        let borders = (pair_with(self.fast_turns), pair_with(self.slow_turns));
        let (first, last) = match self.whole_pairs {
            true => (borders.0.floor(), borders.1.ceil()),
            false => borders,
        };
        let (first, last) = (first.max(0.0), last.min(f64::from(head_elements) - 1.0));
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
            whole_pairs: false,
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

    #[test]
    fn borders_of_whole_pairs_lie_outside_of_those_that_are_not_rounded() {
        let yarn = YarnScaling {
            factor: 4.0,
            original_positions: 32_768,
            fast_turns: 32.0,
            slow_turns: 1.0,
            whole_pairs: true,
        };
        let plain = reference::frequencies(128, 1e6);
        let scaled = yarn.frequencies(128, 1e6);
        // Pair 23.6 makes 32 turns in 32,768 positions, and pair 39.65 one: 23 and 40 are the borders.
        for pair in 0..64 {
            let share = (f64::from(pair) - 23.0) / 17.0;
            let share = share.clamp(0.0, 1.0);
            let wanted = plain[pair as usize] * (1.0 - share + share / 4.0);
            assert!(
                (scaled[pair as usize] / wanted - 1.0).abs() < 1e-12,
                "{pair}"
            );
        }
    }
}
