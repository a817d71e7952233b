//! The wire types of `nvme_core::spec` against bytes written by hand from the specification's figures.
//!
//! Driver and simulator share these types, so a mistake in them would cancel out in every other test.
//! Expected bytes are therefore literals: nothing here computes them with the code under test.
//! `docs/spec-coverage.md` names the clause behind each test.

mod admin;
mod coverage;
mod entries;
mod identify;
mod logs;
mod namespace;
mod nvm;
mod registers;
mod status;

use nvme_core::spec::Sqe;
use zerocopy::{FromBytes, IntoBytes};

/// Returns the bytes that `text` spells: two hexadecimal digits each, spaces and line ends between.
fn hex(text: &str) -> Vec<u8> {
    text.split_whitespace()
        .map(|byte| {
            assert_eq!(byte.len(), 2, "{byte:?} in {text:?}");
            u8::from_str_radix(byte, 16).unwrap_or_else(|_| panic!("{byte:?} in {text:?}"))
        })
        .collect()
}

/// `len` zero bytes with `pieces` of (offset, hexadecimal bytes) laid over them; pieces may not overlap.
fn page(len: usize, pieces: &[(usize, &str)]) -> Vec<u8> {
    let mut page = vec![0; len];
    let mut free = vec![true; len];
    for &(offset, text) in pieces {
        for (at, byte) in hex(text).into_iter().enumerate() {
            assert!(
                std::mem::take(&mut free[offset + at]),
                "two pieces at {}",
                offset + at
            );
            page[offset + at] = byte;
        }
    }
    page
}

/// Four lines of 16 bytes: dwords 0-3, 4-7 (MPTR, PRP1), 8-11 (PRP2, CDW10, CDW11), 12-15.
#[track_caller]
fn assert_sqe(sqe: Sqe, lines: [&str; 4]) {
    let expected = hex(&lines.join(" "));
    assert_eq!(expected.len(), 64);
    assert_eq!(
        sqe.as_bytes(),
        expected,
        "\n{:02x?}\n{:02x?}",
        sqe.as_bytes(),
        expected
    );
    assert_eq!(Sqe::read_from_bytes(&expected).unwrap(), sqe);
    assert_eq!(Sqe::from_words(sqe.to_words()), sqe);
    assert_eq!(sqe.to_words().as_bytes(), expected);
}

const NONE: &str = "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00";
