//! Models of random weights, for tests and measurements: a GGUF file of any size that generates meaningless
//! text.

use crate::gguf::GgufModel;
use crate::llama::{ExpertMixture, ModelConfig};
use nvme_compute::random_weights::fill;
pub use nvme_formats::StoredFormat;
use nvme_units::SplitMix;
use rayon::prelude::*;
use std::io::{self, Write};

/// Bytes of random weights that a thread makes at a time.
const PIECE: u64 = 1 << 20;
/// Number of pieces that are made before the first of them is written.
const AT_ONCE: usize = 64;

/// A model to be written.
#[derive(Clone, Debug)]
pub struct SyntheticModel {
    /// Sizes of the model.
    pub config: ModelConfig,
    /// Format of its matrices.
    pub stored: StoredFormat,
    /// Format of the embeddings and of the last matrix.
    pub stored_head: StoredFormat,
    /// Seed of the weights: another number gives other weights.
    pub seed: u64,
}

impl SyntheticModel {
    /// Returns a model of 14 MB with 8 experts a layer, of 4 MB without.
    pub fn small(experts: Option<ExpertMixture>) -> Self {
        Self {
            config: ModelConfig {
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
            stored: StoredFormat::Q8_0,
            stored_head: StoredFormat::Q8_0,
            seed: 11,
        }
    }

    /// Writes the model as a GGUF file of version 3; `progress` is called with the number of bytes written.
    ///
    /// # Errors
    /// The errors of `out`; `InvalidInput` for rows that end inside a block.
    pub fn write(&self, out: &mut impl Write, progress: &mut dyn FnMut(u64)) -> io::Result<()> {
        let model = GgufModel {
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
                        false => fill(tensor.stored, *seed, &mut piece),
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
