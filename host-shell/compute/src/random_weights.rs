//! Random weights in the formats of files, for tests and measurements.

pub use nvme_formats::StoredFormat;
use nvme_formats::{bf16_of_f32, f16_of_f32};
use nvme_units::SplitMix;

/// Fills `bytes`, which are whole blocks of `stored`, with random weights of about 0.1.
pub fn fill(stored: StoredFormat, seed: u64, bytes: &mut [u8]) {
    let random = &mut SplitMix::new(seed);
    let half = |value: f32| f16_of_f32(value).to_le_bytes();
    match stored {
        StoredFormat::F32 => {
            let numbers = bytes.as_chunks_mut::<4>().0;
            numbers
                .iter_mut()
                .for_each(|to| *to = weight(random).to_le_bytes());
        }
        StoredFormat::F16 => {
            let numbers = bytes.as_chunks_mut::<2>().0;
            numbers.iter_mut().for_each(|to| *to = half(weight(random)));
        }
        StoredFormat::Bf16 => {
            let numbers = bytes.as_chunks_mut::<2>().0;
            let mut number = || bf16_of_f32(weight(random)).to_le_bytes();
            numbers.iter_mut().for_each(|to| *to = number());
        }
        StoredFormat::Mxfp4 => {
            random.fill(bytes);
            // Scales of 2^-6: numbers up to 6 make weights up to 0.1.
            bytes.chunks_exact_mut(17).for_each(|block| block[0] = 121);
        }
        _ => {
            random.fill(bytes);
            // Offsets of the scales and minima of a block, and their values.
            let scales: &[(usize, f32)] = match stored {
                StoredFormat::Q4_0 => &[(0, 0.0125)],
                StoredFormat::Q4_1 => &[(0, 0.0133), (2, -0.1)],
                StoredFormat::Q8_0 => &[(0, 0.000_78)],
                StoredFormat::Q4K => &[(0, 0.000_4), (2, 0.003)],
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

/// Draws a weight from -0.1 to 0.1.
fn weight(random: &mut SplitMix) -> f32 {
    (random.next_word() >> 40) as f32 / (1 << 24) as f32 * 0.2 - 0.1
}
