//! Bytes that say where they belong: every word depends on a seed and on its place.

/// Fills `bytes` with the pattern of `seed` from byte `place` (a multiple of 8) on.
pub fn fill(seed: u64, place: u64, bytes: &mut [u8]) {
    for (word, chunk) in (place / 8..).zip(bytes.chunks_mut(8)) {
        let value = mixed(seed, word).to_le_bytes();
        chunk.copy_from_slice(&value[..chunk.len()]);
    }
}

/// The place of the first byte that is not the pattern's.
pub fn difference(seed: u64, place: u64, bytes: &[u8]) -> Option<u64> {
    let mut expected = [0; 4096];
    for (number, chunk) in bytes.chunks(4096).enumerate() {
        let start = place + 4096 * number as u64;
        let expected = &mut expected[..chunk.len()];
        fill(seed, start, expected);
        if expected != chunk {
            let at = expected.iter().zip(chunk).position(|(a, b)| a != b);
            return at.map(|at| start + at as u64);
        }
    }
    None
}

fn mixed(seed: u64, word: u64) -> u64 {
    let mut z = seed
        .wrapping_mul(0xD6E8_FEB8_6659_FD93)
        .wrapping_add(word.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 32)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^ (z >> 29)
}

#[cfg(test)]
mod tests {
    use super::{difference, fill};

    #[test]
    fn a_changed_byte_is_found_and_a_moved_block_too() {
        let mut bytes = vec![0; 10_000];
        fill(7, 4096, &mut bytes);
        assert_eq!(difference(7, 4096, &bytes), None);
        assert!(difference(8, 4096, &bytes).is_some());
        assert!(difference(7, 4608, &bytes).is_some());
        bytes[9_999] ^= 1;
        assert_eq!(difference(7, 4096, &bytes), Some(4096 + 9_999));
    }
}
