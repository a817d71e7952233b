//! The kernels over pages of many lengths, whose pieces lie at any addresses.
// UNSAFETY: launches hold addresses of vectors, which outlive them.
#![allow(unsafe_code)]

use super::{nvme_check_pages, nvme_copy_pages};
use crate::lanes::{HostGrid, RunningLaunch};
use crate::pages::{
    CheckPages, CopyPages, HEADER_BYTES, PageArrival, PagePiece, PageStaging, page_code,
};
use std::rc::Rc;
use xxhash_rust::xxh3::xxh3_64;

const HEADER: usize = HEADER_BYTES as usize;
/// Lengths of payloads: each case of the hash, parts of a block, several blocks.
const LENGTHS: [usize; 13] = [
    1, 7, 16, 100, 240, 241, 1024, 4095, 4096, 4097, 8192, 9001, 70_272,
];

fn run(blocks: u32, threads: u32, kernel: impl Fn() + 'static) {
    let grid = HostGrid {
        blocks,
        threads,
        at_once: 2,
        clock: Rc::new(|| 0),
    };
    RunningLaunch::new(grid, kernel).run(|| {});
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        (state >> 56) as u8
    });
    words.take(count).collect()
}

/// Memory at a multiple of 4,096.
struct Aligned(Vec<[u64; 512]>);

impl Aligned {
    fn new(bytes: usize, fill: u8) -> Self {
        let word = u64::from_ne_bytes([fill; 8]);
        // A vector of blocks is aligned to 8: one more block has room for the rest.
        Self(vec![[word; 512]; bytes.div_ceil(HEADER) + 1])
    }

    fn address(&self) -> u64 {
        (self.0.as_ptr().expose_provenance() as u64).next_multiple_of(HEADER as u64)
    }

    fn all(&mut self) -> &mut [u8] {
        let skipped = self.address() - self.0.as_ptr().addr() as u64;
        let bytes = self.0.len() * HEADER - skipped as usize;
        let start = self
            .0
            .as_mut_ptr()
            .cast::<u8>()
            .wrapping_add(skipped as usize);
        // SAFETY: the rest of the vector, which is borrowed.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }
}

/// Pages in a staging memory, and their pieces in another one.
struct Case {
    staging: Aligned,
    tensors: Aligned,
    payloads: Vec<Vec<u8>>,
    headers: Vec<Vec<u8>>,
    /// Offsets of the pieces of each page in the tensors, with their lengths.
    places: Vec<Vec<(usize, usize)>>,
    pieces: Vec<Vec<PagePiece>>,
    pages: Vec<PageStaging>,
}

/// Makes a case with pieces of about `piece` bytes, `gap` bytes apart.
fn case(piece: usize, gap: usize, first: usize) -> Case {
    let total: usize = LENGTHS.iter().map(|bytes| bytes + 2 * HEADER).sum();
    let (staging, tensors) = (
        Aligned::new(total, 0xEE),
        Aligned::new(2 * total * (1 + gap), 0xAA),
    );
    let (mut staged, mut at) = (0, first);
    let mut case = Case {
        staging,
        tensors,
        payloads: Vec::new(),
        headers: Vec::new(),
        places: Vec::new(),
        pieces: Vec::new(),
        pages: Vec::new(),
    };
    for (number, length) in LENGTHS.into_iter().enumerate() {
        let (payload, header) = (
            bytes(length, number as u64),
            bytes(HEADER, 99 + number as u64),
        );
        let (mut places, mut pieces, mut done) = (Vec::new(), Vec::new(), 0);
        while done < length {
            let bytes = (piece + done % 3).clamp(1, length - done);
            places.push((at, bytes));
            pieces.push(PagePiece {
                address: case.tensors.address() + at as u64,
                first: done as u32,
                bytes: bytes as u32,
            });
            done += bytes;
            at += bytes + gap;
        }
        case.pages.push(PageStaging {
            staged: case.staging.address() + staged as u64,
            pieces: pieces.as_ptr().expose_provenance() as u64,
            checksum: xxh3_64(&payload),
            header_checksum: xxh3_64(&header),
            piece_count: pieces.len() as u32,
            bytes: length as u32,
            first_read: number as u32 * 40,
            reads: 40,
        });
        staged += HEADER + length.next_multiple_of(HEADER);
        case.payloads.push(payload);
        case.headers.push(header);
        case.places.push(places);
        case.pieces.push(pieces);
    }
    case
}

impl Case {
    fn of_pieces(&mut self, page: usize) -> Vec<u8> {
        let places = self.places[page].clone();
        let all = self.tensors.all();
        let piece = |(at, bytes): (usize, usize)| all[at..at + bytes].to_vec();
        places.into_iter().flat_map(piece).collect()
    }

    fn copy(&self, codes: Option<&[i32]>, stages: bool) {
        let job = CopyPages {
            pages: self.pages.as_ptr().expose_provenance() as u64,
            codes: codes.map_or(0, |codes| codes.as_ptr().expose_provenance() as u64),
            count: self.pages.len() as u64,
            stages: stages.into(),
            reserved: 0,
        };
        // SAFETY: the addresses are those of vectors that live.
        run(3, 64, move || unsafe { nvme_copy_pages(job) });
    }
}

#[test]
fn pages_are_staged_from_any_pieces_and_come_back() {
    for (piece, gap, first) in [
        (70_272, 0, 0),
        (4096, 0, 0),
        (1152, 128, 16),
        (333, 5, 3),
        (1, 1, 1),
    ] {
        let mut case = case(piece, gap, first);
        let payloads = case.payloads.clone();
        for (page, payload) in payloads.iter().enumerate() {
            let mut from = 0;
            for (at, bytes) in case.places[page].clone() {
                case.tensors.all()[at..at + bytes].copy_from_slice(&payload[from..from + bytes]);
                from += bytes;
            }
        }
        case.copy(None, true);
        let start = case.staging.address();
        let pages = case.pages.clone();
        for (page, payload) in pages.iter().zip(&payloads) {
            let at = (page.staged - start) as usize + HEADER;
            let past = at + payload.len().next_multiple_of(HEADER);
            let staged = &case.staging.all()[at - HEADER..past];
            assert!(
                staged[..HEADER].iter().all(|byte| *byte == 0xEE),
                "the header is not the kernel's"
            );
            assert_eq!(&staged[HEADER..HEADER + payload.len()], payload);
            assert!(
                staged[HEADER + payload.len()..]
                    .iter()
                    .all(|byte| *byte == 0)
            );
        }
        let before = case.tensors.all().to_vec();
        for page in 0..payloads.len() {
            for (at, bytes) in case.places[page].clone() {
                case.tensors.all()[at..at + bytes].fill(0x55);
            }
        }
        let mut codes = vec![0; payloads.len()];
        (codes[2], codes[10]) = (-17, 0x281);
        case.copy(Some(&codes), false);
        for page in [2, 10] {
            assert!(case.of_pieces(page).iter().all(|byte| *byte == 0));
            let mut from = 0;
            for (at, bytes) in case.places[page].clone() {
                case.tensors.all()[at..at + bytes]
                    .copy_from_slice(&payloads[page][from..from + bytes]);
                from += bytes;
            }
        }
        assert!(
            case.tensors.all() == before,
            "other bytes are as they were: {piece} {gap} {first}"
        );
    }
}

#[test]
fn a_page_is_right_only_with_its_header_its_payload_and_all_reads() {
    let mut case = case(4096, 0, 0);
    let (start, pages) = (case.staging.address(), case.pages.clone());
    for (number, page) in pages.iter().enumerate() {
        let at = (page.staged - start) as usize;
        let (header, payload) = (case.headers[number].clone(), case.payloads[number].clone());
        case.staging.all()[at..at + HEADER].copy_from_slice(&header);
        case.staging.all()[at + HEADER..at + HEADER + payload.len()].copy_from_slice(&payload);
    }
    let mut reads = vec![0i32; 40 * pages.len()];
    // A last read, and one whose page is wrong as well.
    (reads[40 + 39], reads[3 * 40 + 7], reads[3 * 40 + 9]) = (0x281, -2, 0x281);
    let flip = |case: &mut Case, page: usize, byte: usize| {
        let at = (pages[page].staged - start) as usize + byte;
        case.staging.all()[at] ^= 0x10;
    };
    flip(&mut case, 3, HEADER);
    flip(&mut case, 5, HEADER + 240);
    flip(&mut case, 7, HEADER - 1);
    flip(&mut case, 9, 0);
    flip(&mut case, 9, HEADER + 4);
    flip(&mut case, 12, HEADER + 70_271);
    let mut codes = vec![99i32; pages.len()];
    let mut arrivals = vec![PageArrival::default(); pages.len()];
    let mut headers = vec![0u8; pages.len() * HEADER];
    let job = CheckPages {
        pages: case.pages.as_ptr().expose_provenance() as u64,
        reads: reads.as_ptr().expose_provenance() as u64,
        codes: codes.as_mut_ptr().expose_provenance() as u64,
        arrivals: arrivals.as_mut_ptr().expose_provenance() as u64,
        headers: headers.as_mut_ptr().expose_provenance() as u64,
        count: pages.len() as u64,
    };
    // SAFETY: the addresses are those of vectors that live.
    run(2, 64, move || unsafe { nvme_check_pages(job) });
    let wrong = |page: usize| match page {
        1 => 0x281,
        3 => -2,
        5 | 12 => page_code::PAYLOAD,
        7 | 9 => page_code::HEADER,
        _ => 0,
    };
    for page in 0..pages.len() {
        let (code, arrival) = (wrong(page), arrivals[page]);
        assert_eq!((codes[page], arrival.code), (code, code), "page {page}");
        let at = (pages[page].staged - start) as usize;
        let length = case.payloads[page].len();
        let staged = case.staging.all()[at..at + HEADER + length].to_vec();
        let hash = xxh3_64(&staged[HEADER..]);
        let found = match code {
            0 | page_code::PAYLOAD => hash,
            _ => 0,
        };
        assert_eq!(arrival.checksum, found, "page {page}");
        let header = &headers[page * HEADER..][..HEADER];
        match code {
            page_code::HEADER | page_code::PAYLOAD => assert_eq!(header, &staged[..HEADER]),
            _ => assert!(header.iter().all(|byte| *byte == 0)),
        }
    }
}
