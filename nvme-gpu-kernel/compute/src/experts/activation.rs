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
    /// SiTU: `beta * tanh(gate / beta) * sigmoid(gate) * up`, as in Kimi-K3. Up is `linear_beta * tanh(up / linear_beta)`
    /// unless `linear_beta` is 0.
    Situ {
        /// Largest magnitude of the gate's factor.
        beta: f32,
        /// Largest magnitude of up, or 0 for none.
        linear_beta: f32,
    },
}

impl ExpertActivation {
    /// Returns the activation's number for kernels, its limit or beta, and its factor or second beta; 0 where it has none.
    pub const fn numbers(self) -> (u32, f32, f32) {
        match self {
            Self::SwiGlu => (0, 0.0, 0.0),
            Self::ClampedSwiGlu { limit } => (1, limit, 0.0),
            Self::GptOss { limit, alpha } => (2, limit, alpha),
            Self::Situ { beta, linear_beta } => (3, beta, linear_beta),
        }
    }

    /// Returns the activation with these [`numbers`](Self::numbers).
    #[inline(always)]
    pub const fn of_numbers((number, limit, alpha): (u32, f32, f32)) -> Option<Self> {
        match number {
            0 => Some(Self::SwiGlu),
            1 => Some(Self::ClampedSwiGlu { limit }),
            2 => Some(Self::GptOss { limit, alpha }),
            3 => Some(Self::Situ {
                beta: limit,
                linear_beta: alpha,
            }),
            _ => None,
        }
    }

    /// Returns the activation of one element, with the machine's function `exp`. NaN stays NaN, clamped or not.
    #[inline(always)]
    pub fn value_by(self, gate: f32, up: f32, exp: impl Fn(f32) -> f32) -> f32 {
        let sigmoid = |x: f32| 1.0 / (1.0 + exp(-x));
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
            Self::Situ { beta, linear_beta } => {
                let bounded = |x: f32, bound: f32| bound * tanh_by(x / bound, &exp);
                let up = match linear_beta == 0.0 {
                    true => up,
                    false => bounded(up, linear_beta),
                };
                bounded(gate, beta) * sigmoid(gate) * up
            }
        }
    }

    /// Returns the activation of one element on the CPU.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn value(self, gate: f32, up: f32) -> f32 {
        self.value_by(gate, up, f32::exp)
    }

    /// Replaces each element of `gate` by its activation with that of `up`, as far as both go.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn apply(self, gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = self.value(*gate, *up);
        }
    }
}

/// Returns the hyperbolic tangent, with the machine's function `exp`. Near 0, where the quotient of powers loses its digits,
/// it is the series.
#[inline(always)]
fn tanh_by(x: f32, exp: impl Fn(f32) -> f32) -> f32 {
    let square = x * x;
    if square < 0.04 {
        let higher = square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)));
        return x + x * square * (-1.0 / 3.0 + higher);
    }
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// Limits both, by comparisons with which NaN stays: `f32::min` would return the limit.
#[inline(always)]
fn clamped(gate: f32, up: f32, limit: f32) -> (f32, f32) {
    let at_most = |x: f32| if x > limit { limit } else { x };
    let up = at_most(up);
    (at_most(gate), if up < -limit { -limit } else { up })
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
        let situ = ExpertActivation::Situ {
            beta: 4.0,
            linear_beta: 25.0,
        };
        for activation in [ExpertActivation::SwiGlu, clamped, oss, situ] {
            assert_eq!(
                ExpertActivation::of_numbers(activation.numbers()),
                Some(activation)
            );
            assert!(activation.value(f32::NAN, 1.0).is_nan());
            assert!(activation.value(1.0, f32::NAN).is_nan());
        }
    }

    #[test]
    fn situ_is_that_of_sums_by_f64() {
        for (beta, linear_beta) in [(4.0f32, 25.0f32), (4.0, 0.0), (0.5, 1.0)] {
            let situ = ExpertActivation::Situ { beta, linear_beta };
            let bounded = |x: f64, bound: f64| bound * (x / bound).tanh();
            for number in -400..400 {
                let gate = (number as f32 / 40.0).powi(3) / 30.0;
                let up = 30.0 - gate * 0.7;
                let (x, y) = (f64::from(gate), f64::from(up));
                let up_term = match linear_beta == 0.0 {
                    true => y,
                    false => bounded(y, linear_beta.into()),
                };
                let wanted = bounded(x, beta.into()) / (1.0 + (-x).exp()) * up_term;
                let found = f64::from(situ.value(gate, up));
                let error = (found - wanted).abs();
                assert!(
                    error <= 2e-6 * wanted.abs() + 1e-30,
                    "{gate} {up}: {found} {wanted}"
                );
            }
        }
        let large = ExpertActivation::Situ {
            beta: 4.0,
            linear_beta: 25.0,
        };
        assert_eq!(large.value(1e30, -1e30), -100.0);
        assert_eq!(large.value(-1e30, 1.0), 0.0);
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
