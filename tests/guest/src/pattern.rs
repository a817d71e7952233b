//! Bytes that say where they belong: every word depends on a seed and on its position.

/// Bytes whose words an addition computes one from the other: fast in a guest, whose processor is
/// emulated.
const RUN: u64 = 512;

/// Fills `bytes` with the pattern of `seed` from byte `place` (a multiple of 8) on.
pub fn fill(seed: u64, place: u64, bytes: &mut [u8]) {
    let mut at = place;
    let mut rest = bytes;
    while !rest.is_empty() {
        let (run, more) = rest.split_at_mut(to_next_run(at).min(rest.len()));
        let mut word = first(seed, at);
        let mut words = run.chunks_exact_mut(8);
        for eight in &mut words {
            eight.copy_from_slice(&word.to_le_bytes());
            word = word.wrapping_add(STEP);
        }
        let last = words.into_remainder();
        last.copy_from_slice(&word.to_le_bytes()[..last.len()]);
        at += run.len() as u64;
        rest = more;
    }
}

/// Returns the place of the first byte that is not the pattern's.
pub fn difference(seed: u64, place: u64, bytes: &[u8]) -> Option<u64> {
    let mut expected = [0; RUN as usize];
    let mut at = place;
    let mut rest = bytes;
    while !rest.is_empty() {
        let (run, more) = rest.split_at(to_next_run(at).min(rest.len()));
        let expected = &mut expected[..run.len()];
        fill(seed, at, expected);
        if expected != run {
            let wrong = expected.iter().zip(run).position(|(a, b)| a != b);
            return wrong.map(|wrong| at + wrong as u64);
        }
        at += run.len() as u64;
        rest = more;
    }
    None
}

/// Difference between a word and the one before it in its run: odd, so that all words differ.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// Returns the number of bytes from `place` to the end of its run.
fn to_next_run(place: u64) -> usize {
    (RUN - place % RUN) as usize
}

/// Returns the word at `place`.
fn first(seed: u64, place: u64) -> u64 {
    let (run, word) = (place / RUN, place % RUN / 8);
    let mut z = seed
        .wrapping_mul(0xD6E8_FEB8_6659_FD93)
        .wrapping_add(run.wrapping_mul(STEP));
    z = (z ^ (z >> 32)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (z ^ (z >> 29)).wrapping_add(word.wrapping_mul(STEP))
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
        // A check that starts anywhere gives the same result.
        assert_eq!(difference(7, 4096 + 1_000, &bytes[1_000..5_001]), None);
        bytes.swap(800, 808);
        assert_eq!(difference(7, 4096, &bytes), Some(4096 + 800));
        bytes.swap(800, 808);
        bytes[9_999] ^= 1;
        assert_eq!(difference(7, 4096, &bytes), Some(4096 + 9_999));
    }
}
