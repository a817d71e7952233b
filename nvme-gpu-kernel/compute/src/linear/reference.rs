//! Reference of linear layers on the CPU in `f64`, term by term: all implementations are compared with it.

use super::ActivationKind;

/// The sizes of a layer, and its activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceLayer {
    /// Elements of a row of inputs.
    pub inputs: usize,
    /// Elements of a row of outputs.
    pub outputs: usize,
    /// Activation of the sums.
    pub activation: ActivationKind,
}

/// Gradients of inputs, weights and biases.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReferenceGradients {
    /// Of the inputs.
    pub inputs: Vec<f64>,
    /// Of the weights.
    pub weights: Vec<f64>,
    /// Of the biases.
    pub bias: Vec<f64>,
}

impl ReferenceLayer {
    /// Returns the sums of rows of inputs, biases included; `None` for no bias.
    pub fn sums(&self, x: &[f64], weights: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
        let mut sums = Vec::new();
        for token in 0..x.len().checked_div(self.inputs).unwrap_or(0) {
            let x = &x[token * self.inputs..][..self.inputs];
            for output in 0..self.outputs {
                let row = &weights[output * self.inputs..][..self.inputs];
                let sum: f64 = x.iter().zip(row).map(|(a, b)| a * b).sum();
                sums.push(sum + bias.map_or(0.0, |bias| bias[output]));
            }
        }
        sums
    }

    /// Returns the activations of sums.
    pub fn results(&self, sums: &[f64]) -> Vec<f64> {
        sums.iter()
            .map(|sum| exact(self.activation, *sum))
            .collect()
    }

    /// Returns the gradient of the sums for a gradient of the results.
    pub fn of_sums(&self, sums: &[f64], dy: &[f64]) -> Vec<f64> {
        let pairs = sums.iter().zip(dy);
        pairs
            .map(|(sum, dy)| dy * exact_slope(self.activation, *sum))
            .collect()
    }

    /// Returns all gradients for a gradient of the sums.
    pub fn gradients(&self, x: &[f64], weights: &[f64], dsums: &[f64]) -> ReferenceGradients {
        let (inputs, outputs) = (self.inputs, self.outputs);
        let mut found = ReferenceGradients {
            inputs: vec![0.0; x.len()],
            weights: vec![0.0; weights.len()],
            bias: vec![0.0; outputs],
        };
        for (token, dsums) in dsums.chunks_exact(outputs.max(1)).enumerate() {
            for (output, dsum) in dsums.iter().enumerate() {
                found.bias[output] += dsum;
                for input in 0..inputs {
                    found.inputs[token * inputs + input] += dsum * weights[output * inputs + input];
                    found.weights[output * inputs + input] += dsum * x[token * inputs + input];
                }
            }
        }
        found
    }
}

/// Returns the activation by its definition.
pub fn exact(activation: ActivationKind, sum: f64) -> f64 {
    match activation {
        ActivationKind::None => sum,
        ActivationKind::Relu => sum.max(0.0),
        ActivationKind::Silu => sum / (1.0 + (-sum).exp()),
        ActivationKind::Gelu => 0.5 * sum * (1.0 + inner(sum).tanh()),
    }
}

/// Returns the derivative of the activation by its definition.
pub fn exact_slope(activation: ActivationKind, sum: f64) -> f64 {
    match activation {
        ActivationKind::None => 1.0,
        ActivationKind::Relu => f64::from(u8::from(sum > 0.0)),
        ActivationKind::Silu => {
            let share = 1.0 / (1.0 + (-sum).exp());
            share * (1.0 + sum * (1.0 - share))
        }
        ActivationKind::Gelu => {
            let tanh = inner(sum).tanh();
            let slope = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044_715 * sum * sum);
            0.5 * (1.0 + tanh) + 0.5 * sum * (1.0 - tanh * tanh) * slope
        }
    }
}

fn inner(sum: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (sum + 0.044_715 * sum * sum * sum)
}

/// The logistic function of the CPU.
pub struct ExactLogistic;

impl super::LogisticFunction for ExactLogistic {
    fn of(x: f32) -> f32 {
        1.0 / (1.0 + (-x).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kernels_compute_is_the_definition() {
        for activation in ActivationKind::ALL {
            assert_eq!(ActivationKind::of_number(activation as u32), activation);
            for at in -400..=400 {
                let sum = at as f32 / 40.0;
                let (y, slope) = (
                    activation.of::<ExactLogistic>(sum),
                    activation.slope::<ExactLogistic>(sum),
                );
                let wanted = exact(activation, sum.into());
                let of_slope = exact_slope(activation, sum.into());
                assert!(
                    (f64::from(y) - wanted).abs() < 2e-6,
                    "{activation:?} of {sum}: {y}"
                );
                assert!(
                    (f64::from(slope) - of_slope).abs() < 2e-6,
                    "{activation:?} at {sum}: {slope}"
                );
            }
            assert!(activation.of::<ExactLogistic>(f32::NAN).is_nan());
        }
        assert_eq!(
            ActivationKind::Relu.of::<ExactLogistic>(f32::NEG_INFINITY),
            0.0
        );
        assert_eq!(
            ActivationKind::None.of::<ExactLogistic>(f32::INFINITY),
            f32::INFINITY
        );
    }

    #[test]
    fn slopes_are_those_of_differences() {
        for activation in ActivationKind::ALL {
            for at in -30..=30 {
                // Not at 0, where `Relu` has none.
                let (sum, step) = (f64::from(at) / 7.0 + 0.01, 1e-6);
                let apart = exact(activation, sum + step) - exact(activation, sum - step);
                let slope = apart / (2.0 * step);
                assert!(
                    (slope - exact_slope(activation, sum)).abs() < 1e-8,
                    "{activation:?} at {sum}"
                );
            }
        }
    }

    /// Numbers without a pattern, between -1 and 1.
    fn numbers(count: usize, seed: u64) -> Vec<f64> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        };
        (0..count).map(next).collect()
    }

    /// Every gradient of a random layer against differences of its loss, the sum of results times factors.
    #[test]
    fn gradients_are_those_of_differences() {
        for (seed, (tokens, inputs, outputs)) in
            [(1, 1, 1), (3, 5, 2), (4, 2, 7)].into_iter().enumerate()
        {
            for activation in ActivationKind::ALL {
                let layer = ReferenceLayer {
                    inputs,
                    outputs,
                    activation,
                };
                let numbers = |count, kind| numbers(count, seed as u64 * 8 + kind + 1);
                let (x, weights) = (numbers(tokens * inputs, 0), numbers(outputs * inputs, 1));
                let (bias, dy) = (numbers(outputs, 2), numbers(tokens * outputs, 3));
                let loss = |x: &[f64], weights: &[f64], bias: &[f64]| -> f64 {
                    let y = layer.results(&layer.sums(x, weights, Some(bias)));
                    y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
                };
                let sums = layer.sums(&x, &weights, Some(&bias));
                let found = layer.gradients(&x, &weights, &layer.of_sums(&sums, &dy));
                let step = 1e-6;
                let check = |which: usize, found: &[f64]| {
                    for (at, found) in found.iter().enumerate() {
                        let moved = |by: f64| {
                            let mut all = [x.clone(), weights.clone(), bias.clone()];
                            all[which][at] += by;
                            loss(&all[0], &all[1], &all[2])
                        };
                        let slope = (moved(step) - moved(-step)) / (2.0 * step);
                        assert!(
                            (slope - found).abs() < 1e-7,
                            "{layer:?} {which} {at}: {found}, {slope}"
                        );
                    }
                };
                check(0, &found.inputs);
                check(1, &found.weights);
                check(2, &found.bias);
            }
        }
    }
}
