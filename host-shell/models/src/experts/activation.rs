//! The activations between the matrices of an expert.

/// Function of gate and up that returns the vector that down multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ExpertActivation {
    /// SwiGLU: `silu(gate) * up`.
    #[default]
    SwiGlu,
    /// SwiGLU of a gate of `limit` at most and an up from `-limit` to `limit`, as in DeepSeek-V4.
    ClampedSwiGlu {
        /// Largest gate, and largest magnitude of up.
        limit: f32,
    },
    /// `(up + 1) * gate * sigmoid(alpha * gate)`, clamped likewise, as in gpt-oss. Biases are added before.
    GptOss {
        /// Largest gate, and largest magnitude of up.
        limit: f32,
        /// Factor of the gate inside of the sigmoid.
        alpha: f32,
    },
}

impl ExpertActivation {
    /// Returns the activation of one element. NaN stays NaN, clamped or not.
    pub fn value(self, gate: f32, up: f32) -> f32 {
        match self {
            Self::SwiGlu => gate * sigmoid(gate) * up,
            Self::ClampedSwiGlu { limit } => {
                let (gate, up) = clamped(gate, up, limit);
                gate * sigmoid(gate) * up
            }
            Self::GptOss { limit, alpha } => {
                let (gate, up) = clamped(gate, up, limit);
                (up + 1.0) * (gate * sigmoid(gate * alpha))
            }
        }
    }

    /// Replaces each element of `gate` by its activation with that of `up`, as far as both go.
    pub fn apply(self, gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = self.value(*gate, *up);
        }
    }
}

/// Limits both, by comparisons with which NaN stays: `f32::min` would return the limit.
fn clamped(gate: f32, up: f32, limit: f32) -> (f32, f32) {
    let at_most = |x: f32| if x > limit { limit } else { x };
    let up = at_most(up);
    (at_most(gate), if up < -limit { -limit } else { up })
}

/// Returns 1 / (1 + e^-x).
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clamps_are_those_of_the_gate_from_above_and_of_up_on_both_sides() {
        let clamped = ExpertActivation::ClampedSwiGlu { limit: 10.0 };
        assert_eq!(clamped.value(50.0, 50.0), clamped.value(10.0, 10.0));
        assert_eq!(clamped.value(1.0, -50.0), clamped.value(1.0, -10.0));
        assert_ne!(clamped.value(-50.0, 1.0), clamped.value(-10.0, 1.0));
        let oss = ExpertActivation::GptOss {
            limit: 7.0,
            alpha: 1.702,
        };
        assert_eq!(oss.value(100.0, 100.0), oss.value(7.0, 7.0));
        assert_eq!(oss.value(0.0, 3.0), 0.0);
        for activation in [ExpertActivation::SwiGlu, clamped, oss] {
            assert!(activation.value(f32::NAN, 1.0).is_nan());
            assert!(activation.value(1.0, f32::NAN).is_nan());
        }
    }

    #[test]
    fn elements_are_activated_in_pairs() {
        let mut gate = [1.0, 0.0, -1.0];
        ExpertActivation::SwiGlu.apply(&mut gate, &[2.0, 2.0, 2.0]);
        let half = 2.0 / (1.0 + (-1f32).exp());
        assert!((gate[0] - half).abs() < 1e-6 && gate[1] == 0.0);
        assert!((gate[2] + 2.0 / (1.0 + 1f32.exp())).abs() < 1e-6);
    }
}
