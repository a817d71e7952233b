//! Models of random weights, for tests and measurements: a GGUF file of any size that generates meaningless
//! text.

use crate::gguf::{GgufModel, GgufTensor};
use crate::llama::{ExpertMixture, ModelConfig, ModelFamily, YarnScaling};
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
                ..ModelConfig::default()
            },
            stored: StoredFormat::Q8_0,
            stored_head: StoredFormat::Q8_0,
            seed: 11,
        }
    }

    /// Returns a model of a few megabytes with everything in which a family differs from others: heads that are not the
    /// width divided by their number, more positions than a window, and scaled angles.
    pub fn of_family(family: ModelFamily) -> Self {
        let mixture = |count, choices| Some(ExpertMixture { count, choices });
        let config = ModelConfig {
            family,
            layers: 3,
            width: 256,
            hidden: 320,
            heads: 4,
            kv_heads: 2,
            head_elements: 48,
            vocabulary: 400,
            context: 256,
            epsilon: 1e-6,
            rope_base: 1e6,
            ..ModelConfig::default()
        };
        let config = match family {
            ModelFamily::Llama | ModelFamily::Qwen3 => config,
            ModelFamily::Qwen3Moe => ModelConfig {
                experts: mixture(9, 3),
                ..config
            },
            ModelFamily::GptOss => ModelConfig {
                experts: mixture(9, 4),
                rope_base: 150_000.0,
                window: 16,
                yarn: Some(YarnScaling {
                    factor: 8.0,
                    original_positions: 32,
                    fast_turns: 32.0,
                    slow_turns: 1.0,
                    whole_pairs: false,
                }),
                ..config
            },
        };
        Self {
            stored: match family {
                ModelFamily::GptOss => StoredFormat::Mxfp4,
                _ => StoredFormat::Q8_0,
            },
            stored_head: StoredFormat::F16,
            seed: 43,
            config,
        }
    }

    /// Returns the model of a family with angles that are scaled by YaRN, in which some pairs are blended.
    pub fn with_yarn(family: ModelFamily) -> Self {
        let model = Self::of_family(family);
        let yarn = Some(YarnScaling {
            factor: 4.0,
            original_positions: 64,
            fast_turns: 8.0,
            slow_turns: 0.5,
            whole_pairs: family != ModelFamily::GptOss,
        });
        Self {
            config: ModelConfig {
                yarn,
                ..model.config
            },
            ..model
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
            let (bytes, kind) = (tensor.bytes(), VectorKind::of(tensor));
            let (_, block) = tensor.stored.block();
            let most = PIECE / u64::from(block) * u64::from(block);
            let pieces: Vec<(u64, u64)> = (0..bytes)
                .step_by(most as usize)
                .map(|at| (random.next_word(), most.min(bytes - at)))
                .collect();
            for some in pieces.chunks(AT_ONCE) {
                let made = some.par_iter().map(|(seed, len)| {
                    let mut piece = vec![0; *len as usize];
                    match kind {
                        Some(VectorKind::Norm) => {
                            piece.as_chunks_mut::<4>().0.fill(1f32.to_le_bytes());
                        }
                        Some(VectorKind::HeadNorm) => head_norm(*seed, &mut piece),
                        None => fill(tensor.stored, *seed, &mut piece),
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

/// Vectors that are not filled as matrices and biases are.
#[derive(Clone, Copy)]
enum VectorKind {
    /// Factors of 1.
    Norm,
    /// Factors that differ, so that those of queries and keys cannot be taken for each other.
    HeadNorm,
}

impl VectorKind {
    fn of(tensor: &GgufTensor) -> Option<Self> {
        let name = tensor.name.as_str();
        if name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight") {
            return Some(Self::HeadNorm);
        }
        name.ends_with("norm.weight").then_some(Self::Norm)
    }
}

/// Fills `bytes` with factors from 0.5 to 1.5.
fn head_norm(seed: u64, bytes: &mut [u8]) {
    fill(StoredFormat::F32, seed, bytes);
    for number in bytes.as_chunks_mut::<4>().0 {
        *number = (1.0 + 5.0 * f32::from_le_bytes(*number)).to_le_bytes();
    }
}
