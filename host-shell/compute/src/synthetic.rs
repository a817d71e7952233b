//! Models of random weights, for tests and measurements: a GGUF file of any size that generates meaningless
//! text.

use crate::gguf::Model;
use crate::llama::{Config, Mixture};
pub use nvme_formats::Stored;
use nvme_formats::{bf16_of_f32, f16_of_f32};
use nvme_units::SplitMix;
use rayon::prelude::*;
use std::io::{self, Write};

/// Bytes of random weights that a thread makes at a time.
const PIECE: u64 = 1 << 20;
/// Pieces that are made before the first of them is written.
const AT_ONCE: usize = 64;

/// A model to be written.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// Its sizes.
    pub config: Config,
    /// Format of its matrices.
    pub stored: Stored,
    /// Format of its embeddings and of the last matrix.
    pub stored_head: Stored,
    /// Other weights for another number.
    pub seed: u64,
}

impl Synthetic {
    /// Returns a model of 14 MB with 8 experts a layer, of 4 MB without.
    pub fn small(experts: Option<Mixture>) -> Self {
        Self {
            config: Config {
                layers: 4,
                width: 256,
                hidden: 512,
                heads: 8,
                kv_heads: 2,
                head_elements: 32,
                vocabulary: 512,
                context: 256,
                epsilon: 1e-5,
                rope_base: 10_000.0,
                experts,
            },
            stored: Stored::Q8_0,
            stored_head: Stored::Q8_0,
            seed: 11,
        }
    }

    /// Writes it as a GGUF file of version 3; `progress` hears of the bytes.
    ///
    /// # Errors
    /// Those of `out`; `InvalidInput` for rows that end inside a block.
    pub fn write(&self, out: &mut impl Write, progress: &mut dyn FnMut(u64)) -> io::Result<()> {
        let model = Model {
            config: &self.config,
            stored: self.stored,
            stored_head: self.stored_head,
        };
        let mut random = SplitMix::new(self.seed);
        model.write(out, |tensor, out| {
            let (bytes, is_vector) = (tensor.bytes(), tensor.shape.len() == 1);
            let (_, block) = tensor.stored.block();
            let most = PIECE / u64::from(block) * u64::from(block);
            let pieces: Vec<(u64, u64)> = (0..bytes)
                .step_by(most as usize)
                .map(|at| (random.next_word(), most.min(bytes - at)))
                .collect();
            for some in pieces.chunks(AT_ONCE) {
                let made = some.par_iter().map(|(seed, len)| {
                    let mut piece = vec![0; *len as usize];
                    match is_vector {
                        true => piece.as_chunks_mut::<4>().0.fill(1f32.to_le_bytes()),
                        false => fill_weights(&mut SplitMix::new(*seed), tensor.stored, &mut piece),
                    }
                    piece
                });
                for piece in made.collect::<Vec<_>>() {
                    out.write_all(&piece)?;
                    progress(piece.len() as u64);
                }
            }
            Ok(())
        })
    }
}

/// Fills `bytes`, which are whole blocks of `stored`, with random weights of about 0.1.
pub fn fill(stored: Stored, seed: u64, bytes: &mut [u8]) {
    fill_weights(&mut SplitMix::new(seed), stored, bytes);
}

/// Draws a weight from -0.1 to 0.1.
fn weight(random: &mut SplitMix) -> f32 {
    (random.next_word() >> 40) as f32 / (1 << 24) as f32 * 0.2 - 0.1
}

/// Fills `bytes` with weights of about that size, as `stored` has them.
fn fill_weights(random: &mut SplitMix, stored: Stored, bytes: &mut [u8]) {
    let half = |value: f32| f16_of_f32(value).to_le_bytes();
    match stored {
        Stored::F32 => {
            let numbers = bytes.as_chunks_mut::<4>().0;
            numbers
                .iter_mut()
                .for_each(|to| *to = weight(random).to_le_bytes());
        }
        Stored::F16 => {
            let numbers = bytes.as_chunks_mut::<2>().0;
            numbers.iter_mut().for_each(|to| *to = half(weight(random)));
        }
        Stored::Bf16 => {
            let numbers = bytes.as_chunks_mut::<2>().0;
            let mut number = || bf16_of_f32(weight(random)).to_le_bytes();
            numbers.iter_mut().for_each(|to| *to = number());
        }
        _ => {
            random.fill(bytes);
            // Offsets of the scales and minima of a block, and their values.
            let scales: &[(usize, f32)] = match stored {
                Stored::Q4_0 => &[(0, 0.0125)],
                Stored::Q4_1 => &[(0, 0.0133), (2, -0.1)],
                Stored::Q8_0 => &[(0, 0.000_78)],
                Stored::Q4K => &[(0, 0.000_4), (2, 0.003)],
                _ => &[(208, 0.000_05)],
            };
            let (_, block) = stored.block();
            for block in bytes.chunks_exact_mut(block as usize) {
                for (at, value) in scales {
                    block[*at..at + 2].copy_from_slice(&half(*value));
                }
            }
        }
    }
}
