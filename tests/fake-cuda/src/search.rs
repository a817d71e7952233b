//! The search as a host thread: block after block, warp after warp, with the reads of a round under way together. How a
//! query goes on is the code of the reference.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::warps::{Reads, all_warps};
use nvme_compute_kernel::search::walk::{GraphWalk, IndexQuantisation};
use nvme_compute_kernel::search::{CENTROIDS, SearchLaunch};
use nvme_core::CommandToken;
use nvme_gpu_kernel::rows::code;
use std::slice::from_raw_parts;

/// All blocks of a launch of `blocks` blocks.
pub fn search(search: &SearchLaunch, blocks: u32) {
    all_warps(&search.rows, blocks, |(warp, warps), reads, fail| {
        for number in (u64::from(warp)..search.rows.count).step_by(warps as usize) {
            let ended = query(search, number as usize, reads);
            if ended != code::OK {
                fail(number, ended);
            }
        }
    });
}

/// Searches for one query and writes what became of it.
fn query(search: &SearchLaunch, number: usize, reads: &mut Reads<'_>) -> i32 {
    let elements = search.elements as usize;
    let nodes = search.rows.rows as usize;
    // SAFETY: the host gives what the launch says.
    let (query, centroids, codes) = unsafe {
        let queries = (search.queries as usize as *const f32).add(number * elements);
        let centroids = search.centroids as usize as *const f32;
        let codes = search.codes as usize as *const u8;
        (
            from_raw_parts(queries, elements),
            from_raw_parts(centroids, elements * CENTROIDS as usize),
            from_raw_parts(codes, nodes * search.code_bytes as usize),
        )
    };
    let index = IndexQuantisation {
        centroids,
        codes,
        elements,
        sub_elements: search.sub_elements as usize,
        code_bytes: search.code_bytes as usize,
        nodes: nodes as u32,
        tag: search.tag,
    };
    assert_eq!(index.subspaces(), search.subspaces as usize);
    let (mut ended, mut asked, mut found) = (reads.ends, 0, Vec::new());
    if ended == code::OK {
        match GraphWalk::new(index, query, search.entry, (search.list, search.results)) {
            Err(why) => ended = why,
            Ok(mut walk) => {
                ended = follow(reads, &mut walk, search.beam);
                asked = walk.reads;
                found = walk.results().collect();
            }
        }
    }
    if ended != code::OK {
        found.clear();
    }
    let results = search.results as usize;
    for at in 0..results {
        let (id, far) = match found.get(at) {
            Some((id, far)) => (i64::from(*id), *far),
            None => (-1, f32::INFINITY),
        };
        // SAFETY: the host gives a place for each result.
        unsafe {
            let place = number * results + at;
            (search.ids as usize as *mut i64).add(place).write(id);
            (search.distances as usize as *mut f32)
                .add(place)
                .write(far);
        }
    }
    // SAFETY: the host gives a word for each query.
    unsafe {
        (search.status as usize as *mut i32)
            .add(number)
            .write(ended);
        (search.reads as usize as *mut u32).add(number).write(asked);
    }
    ended
}

/// Reads what `walk` asks for until it has ended; how.
fn follow(reads: &mut Reads<'_>, walk: &mut GraphWalk<'_>, beam: u32) -> i32 {
    let mut ended = code::OK;
    while ended == code::OK {
        let asked = walk.next(beam);
        if asked.is_empty() {
            break;
        }
        if reads.gate.look().is_err() {
            reads.ends = code::GONE;
            return reads.ends;
        }
        let lanes = (0..).zip(&asked);
        let under_way: Vec<Result<CommandToken, i32>> =
            lanes.map(|(lane, id)| submit(reads, lane, *id)).collect();
        for ((lane, id), token) in (0..).zip(&asked).zip(under_way) {
            let code = token.map_or_else(|code| code, |token| reads.wait(token));
            if code < 0 {
                reads.has_lost = true;
                reads.ends = code::NOT_RUN;
            }
            if ended == code::OK {
                ended = code;
            }
            if ended == code::OK {
                ended = walk
                    .take(*id, &words(reads, lane, *id))
                    .err()
                    .unwrap_or(code::OK);
            }
        }
    }
    ended
}

fn slot(reads: &Reads<'_>, lane: u32) -> u64 {
    reads.slots + u64::from(lane) * u64::from(reads.rows.slot_bytes)
}

fn submit(reads: &Reads<'_>, lane: u32, id: u32) -> Result<CommandToken, i32> {
    let place = reads.rows.place(i64::from(id)).ok_or(code::OUT_OF_RANGE)?;
    reads.submit(place, slot(reads, lane), lane)
}

/// The node that lane `lane` has read.
fn words(reads: &Reads<'_>, lane: u32, id: u32) -> Vec<u32> {
    let rows = reads.rows;
    let byte = rows.first_byte + u64::from(id) * u64::from(rows.row_bytes);
    let in_block = byte & ((1 << rows.block_shift) - 1);
    let from = (rows.slots + slot(reads, lane) + in_block) as usize as *const u32;
    // SAFETY: a slot of the warp, whose read has ended.
    let word = |at: u32| unsafe { from.add(at as usize).read_volatile() };
    (0..rows.row_bytes / 4).map(word).collect()
}
