//! Linear layers and their gradients: kernels of a GPU, each one step further optimised than the one before, and
//! the same result by threads of the CPU. Weights and inputs are in memory already; products with a matrix on a
//! drive are `StreamedProducts` and `gemm`.

#[cfg(feature = "cuda")]
mod gpu;

#[cfg(feature = "cuda")]
pub use gpu::{BackwardRung, ForwardRung, LinearKernels};
pub use nvme_compute_kernel::linear::reference::ExactLogistic;
pub use nvme_compute_kernel::linear::{ActivationKind, BackwardParameters, ForwardParameters};

use nvme_host::{Error, Result};
use rayon::prelude::*;

/// Rows of inputs, and rows of weights, of one tile of a CPU thread: a tile stays in its cache.
const ROWS: usize = 16;
const WEIGHTS: usize = 64;

/// A layer for threads of the CPU, over `f32`: `y = act(x W^T + b)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostLayer {
    /// Elements of a row of inputs.
    pub inputs: usize,
    /// Elements of a row of outputs.
    pub outputs: usize,
    /// Function that is applied to the sums.
    pub activation: ActivationKind,
}

/// Gradients of a layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostGradients {
    /// Gradients of the inputs.
    pub inputs: Vec<f32>,
    /// Gradients of the weights.
    pub weights: Vec<f32>,
    /// Gradients of the biases.
    pub bias: Vec<f32>,
}

impl HostLayer {
    /// Computes the results, and the sums before the activation.
    ///
    /// # Errors
    /// [`Error::Usage`] for vectors of another length.
    pub fn forward(
        &self,
        x: &[f32],
        weights: &[f32],
        bias: Option<&[f32]>,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let tokens = self.tokens(x, weights)?;
        let of_bias = bias.map_or(self.outputs, <[f32]>::len);
        same("biases", of_bias, self.outputs)?;
        let mut sums = vec![0.0; tokens * self.outputs];
        let width = self.outputs.max(1);
        sums.par_chunks_mut(ROWS * width)
            .enumerate()
            .for_each(|(block, sums)| {
                for first in (0..self.outputs).step_by(WEIGHTS) {
                    let columns = first..self.outputs.min(first + WEIGHTS);
                    for (row, sums) in sums.chunks_exact_mut(width).enumerate() {
                        let x = &x[(block * ROWS + row) * self.inputs..][..self.inputs];
                        for column in columns.clone() {
                            let weights = &weights[column * self.inputs..][..self.inputs];
                            sums[column] = dot(x, weights) + bias.map_or(0.0, |bias| bias[column]);
                        }
                    }
                }
            });
        let y = sums
            .par_iter()
            .map(|sum| self.activation.of::<ExactLogistic>(*sum));
        Ok((y.collect(), sums))
    }

    /// Computes the gradients of inputs, weights and biases from the gradient of the results. `sums` are those of
    /// [`forward`](Self::forward).
    ///
    /// # Errors
    /// [`Error::Usage`] for vectors of another length.
    pub fn backward(
        &self,
        x: &[f32],
        weights: &[f32],
        sums: &[f32],
        dy: &[f32],
    ) -> Result<HostGradients> {
        let tokens = self.tokens(x, weights)?;
        same("sums", sums.len(), tokens * self.outputs)?;
        same("gradients", dy.len(), tokens * self.outputs)?;
        let (inputs, outputs) = (self.inputs, self.outputs);
        let slope = |(sum, dy): (&f32, &f32)| dy * self.activation.slope::<ExactLogistic>(*sum);
        let dsums: Vec<f32> = sums.par_iter().zip(dy).map(slope).collect();
        let mut found = HostGradients {
            inputs: vec![0.0; x.len()],
            weights: vec![0.0; weights.len()],
            bias: vec![0.0; outputs],
        };
        let blocks = found.inputs.par_chunks_mut(ROWS * inputs.max(1));
        blocks.enumerate().for_each(|(block, dx)| {
            for (row, dx) in dx.chunks_exact_mut(inputs.max(1)).enumerate() {
                let dsums = &dsums[(block * ROWS + row) * outputs..][..outputs];
                for (dsum, weights) in dsums.iter().zip(weights.chunks_exact(inputs.max(1))) {
                    add(dx, *dsum, weights);
                }
            }
        });
        let blocks = found.weights.par_chunks_mut(ROWS * inputs.max(1));
        blocks.enumerate().for_each(|(block, dweights)| {
            for (token, x) in x.chunks_exact(inputs.max(1)).enumerate() {
                for (row, dweights) in dweights.chunks_exact_mut(inputs.max(1)).enumerate() {
                    add(dweights, dsums[token * outputs + block * ROWS + row], x);
                }
            }
        });
        for dsums in dsums.chunks_exact(outputs.max(1)) {
            add(&mut found.bias, 1.0, dsums);
        }
        Ok(found)
    }

    /// Returns the number of rows of inputs.
    fn tokens(&self, x: &[f32], weights: &[f32]) -> Result<usize> {
        same("weights", weights.len(), self.inputs * self.outputs)?;
        match x.len().checked_rem(self.inputs) {
            Some(0) => Ok(x.len() / self.inputs),
            _ => Err(Error::usage(
                format!("{} inputs are not whole rows of {}", x.len(), self.inputs),
                "use whole rows of at least one element",
            )),
        }
    }
}

fn same(what: &str, length: usize, wanted: usize) -> Result<()> {
    match length == wanted {
        true => Ok(()),
        false => Err(Error::usage(
            format!("the number of {what} is {length}, and the shape needs {wanted}"),
            format!("use {wanted}"),
        )),
    }
}

/// Computes `to += factor * from`.
fn add(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// Computes a dot product in sixteen partial sums, which a CPU adds with vector instructions.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (wide_a, rest_a) = a.as_chunks::<16>();
    let (wide_b, rest_b) = b.as_chunks::<16>();
    for (a, b) in wide_a.iter().zip(wide_b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_compute_kernel::linear::reference;

    /// Numbers without a pattern, between -1 and 1.
    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        };
        (0..count).map(next).collect()
    }

    fn wide(numbers: &[f32]) -> Vec<f64> {
        numbers.iter().map(|number| f64::from(*number)).collect()
    }

    fn near(what: &str, found: &[f32], wanted: &[f64], terms: usize) {
        assert_eq!(found.len(), wanted.len(), "{what}");
        for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let apart = (f64::from(*found) - wanted).abs();
            assert!(
                apart < 2e-7 * (terms + 8) as f64,
                "{what} {at}: {found}, not {wanted}"
            );
        }
    }

    #[test]
    fn every_shape_has_the_results_and_gradients_of_f64() {
        let shapes = [
            (0, 3, 4),
            (1, 1, 1),
            (2, 5, 3),
            (17, 33, 65),
            (33, 16, 130),
            (5, 100, 1),
        ];
        for (tokens, inputs, outputs) in shapes {
            for activation in ActivationKind::ALL {
                let layer = HostLayer {
                    inputs,
                    outputs,
                    activation,
                };
                let (x, weights) = (numbers(tokens * inputs, 1), numbers(inputs * outputs, 2));
                let (bias, dy) = (numbers(outputs, 3), numbers(tokens * outputs, 4));
                let exact = reference::ReferenceLayer {
                    inputs,
                    outputs,
                    activation,
                };
                let (wide_x, wide_weights) = (wide(&x), wide(&weights));
                let sums = exact.sums(&wide_x, &wide_weights, Some(&wide(&bias)));
                let (y, found_sums) = layer.forward(&x, &weights, Some(&bias)).unwrap();
                near("a result", &y, &exact.results(&sums), inputs);
                near("a sum", &found_sums, &sums, inputs);
                let wanted =
                    exact.gradients(&wide_x, &wide_weights, &exact.of_sums(&sums, &wide(&dy)));
                let found = layer.backward(&x, &weights, &found_sums, &dy).unwrap();
                let terms = inputs + outputs + tokens;
                near("a gradient of inputs", &found.inputs, &wanted.inputs, terms);
                near(
                    "a gradient of weights",
                    &found.weights,
                    &wanted.weights,
                    terms,
                );
                near("a gradient of biases", &found.bias, &wanted.bias, terms);
            }
        }
    }

    #[test]
    fn a_layer_without_biases_has_the_bare_sums() {
        let layer = HostLayer {
            inputs: 2,
            outputs: 1,
            activation: ActivationKind::None,
        };
        let (y, sums) = layer
            .forward(&[1.0, 2.0, 3.0, 4.0], &[10.0, 1.0], None)
            .unwrap();
        assert_eq!((y, sums), (vec![12.0, 34.0], vec![12.0, 34.0]));
    }

    #[test]
    fn vectors_of_other_lengths_are_refused() {
        let layer = HostLayer {
            inputs: 2,
            outputs: 3,
            activation: ActivationKind::Relu,
        };
        let of = |x: usize, weights: usize, bias: usize| {
            let [x, weights, bias] = [x, weights, bias].map(|count| vec![0.0; count]);
            layer
                .forward(&x, &weights, Some(&bias))
                .map(drop)
                .map_err(|error| error.exit_code())
        };
        assert_eq!(of(2, 6, 3), Ok(()));
        assert_eq!([of(3, 6, 3), of(2, 5, 3), of(2, 6, 2)], [Err(2); 3]);
        let none = HostLayer { inputs: 0, ..layer };
        assert!(none.forward(&[], &[], None).is_err());
        assert!(
            layer
                .backward(&[0.0; 2], &[0.0; 6], &[0.0; 2], &[0.0; 3])
                .is_err()
        );
        assert!(
            layer
                .backward(&[0.0; 2], &[0.0; 6], &[0.0; 3], &[0.0; 4])
                .is_err()
        );
    }
}
