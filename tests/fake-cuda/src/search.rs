//! The search as a host thread: block after block, warp after warp, with the reads of a round under way together. How a
//! query goes on is the code of the reference.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::kernels::Bus;
use crate::rows::{TURN, claim, finish, gate_of, owner, queue};
use nvme_compute_kernel::search::walk::{Quantised, Walk};
use nvme_compute_kernel::search::{CENTROIDS, NODE_WORDS, Search};
use nvme_core::gate::Gate;
use nvme_core::group::ExecContext;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::sync::{Order, Scope};
use nvme_core::{Command, Data, Outcome, SharedQueue, SubmitError, Token, WaitError};
use nvme_gpu_kernel::rows::{BLOCK_WARPS, Gather, STATION_CELLS, WARP_BYTES, code, worst};
use std::slice::from_raw_parts;

/// All blocks of a launch of `blocks` blocks.
pub fn search(search: &Search, blocks: u32) {
    let rows = &search.rows;
    let (mut failed, mut first) = (0, 0);
    for block in 0..blocks {
        let _turn = TURN.lock();
        let gate = gate_of(rows);
        let station = claim(rows, &gate);
        let mut has_lost = false;
        for warp in 0..BLOCK_WARPS {
            let place = station.unwrap_or(0) * BLOCK_WARPS + warp;
            let mut reads = Reads {
                rows,
                gate,
                queue: station.map(|station| queue(&rows.queues, station)),
                cell: place * (STATION_CELLS / BLOCK_WARPS),
                slots: u64::from(place) * WARP_BYTES,
                ends: match station {
                    Some(_) => code::OK,
                    None if gate.look().is_err() => code::GONE,
                    None => code::NOT_RUN,
                },
                has_lost: false,
            };
            let (mut number, warps) = (block * BLOCK_WARPS + warp, blocks * BLOCK_WARPS);
            while u64::from(number) < rows.count {
                let ended = query(search, number as usize, &mut reads);
                if ended != code::OK {
                    failed += 1;
                    first = worst(number.into(), None, ended).max(first);
                }
                number += warps;
            }
            has_lost |= reads.has_lost;
        }
        if has_lost {
            gate.report_trouble();
        }
        match station {
            Some(station) if has_lost => gate.leave_lost(station),
            Some(station) => {
                gate.leave(station);
                owner(rows, station).store(0, Order::Release, Scope::Gpu);
            }
            None => {}
        }
    }
    finish(rows, failed, first);
}

/// Searches for one query and writes what became of it.
fn query(search: &Search, number: usize, reads: &mut Reads<'_>) -> i32 {
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
    let index = Quantised {
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
        match Walk::new(index, query, search.entry, (search.list, search.results)) {
            Err(why) => ended = why,
            Ok(mut walk) => {
                ended = reads.walk(&mut walk, search.beam);
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

/// A warp's reads.
struct Reads<'r> {
    rows: &'r Gather,
    gate: Gate<'r>,
    queue: Option<SharedQueue<'r>>,
    /// Its first result cell.
    cell: u32,
    slots: u64,
    ends: i32,
    has_lost: bool,
}

impl Reads<'_> {
    /// Reads what `walk` asks for until it has ended; how.
    fn walk(&mut self, walk: &mut Walk<'_>, beam: u32) -> i32 {
        let mut ended = code::OK;
        while ended == code::OK {
            let asked = walk.next(beam);
            if asked.is_empty() {
                break;
            }
            if self.gate.look().is_err() {
                self.ends = code::GONE;
                return self.ends;
            }
            let lanes = (0..).zip(&asked);
            let under_way: Vec<Result<Token, i32>> =
                lanes.map(|(lane, id)| self.submit(lane, *id)).collect();
            for ((lane, id), token) in (0..).zip(&asked).zip(under_way) {
                let code = token.map_or_else(|code| code, |token| self.wait(token));
                if code < 0 {
                    self.has_lost = true;
                    self.ends = code::NOT_RUN;
                }
                if ended == code::OK {
                    ended = code;
                }
                if ended == code::OK {
                    ended = walk
                        .take(*id, &self.words(lane, *id))
                        .err()
                        .unwrap_or(code::OK);
                }
            }
        }
        ended
    }

    fn slot(&self, lane: u32) -> u64 {
        self.slots + u64::from(lane) * u64::from(self.rows.slot_bytes)
    }

    fn submit(&self, lane: u32, id: u32) -> Result<Token, i32> {
        let rows = self.rows;
        let place = rows.place(i64::from(id)).ok_or(code::OUT_OF_RANGE)?;
        let data = Data::Contiguous {
            iova: Iova(rows.slots_iova + self.slot(lane)),
            len: u64::from(place.blocks) << rows.block_shift,
        };
        let read = nvm::read(Nsid(rows.nsid), Lba(place.block), place.blocks);
        let command = Command::new(read, data, self.cell + lane);
        let here = Bus::default();
        let queue = self.queue.as_ref().ok_or(code::GONE)?;
        let ended = queue.submit(&here, command, here.now_ns() + rows.timeout_ns);
        ended.map_err(|why| match why {
            SubmitError::Refused => code::GONE,
            SubmitError::QueueFull => code::TIMED_OUT,
            _ => code::NOT_RUN,
        })
    }

    fn wait(&self, token: Token) -> i32 {
        let here = Bus::default();
        let Some(queue) = &self.queue else {
            return code::GONE;
        };
        match queue.wait(&here, token, here.now_ns() + self.rows.timeout_ns) {
            Ok((Outcome::Completed(status), _)) => i32::from(status.code()),
            Ok((Outcome::Aborted(_), _)) | Err((WaitError::Refused, _)) => code::GONE,
            Err((WaitError::TimedOut, _)) => code::TIMED_OUT,
        }
    }

    /// The node that lane `lane` has read.
    fn words(&self, lane: u32, id: u32) -> [u32; NODE_WORDS] {
        let byte = self.rows.first_byte + u64::from(id) * u64::from(self.rows.row_bytes);
        let in_block = byte & ((1 << self.rows.block_shift) - 1);
        let from = (self.rows.slots + self.slot(lane) + in_block) as usize as *const u32;
        // SAFETY: a slot of the warp, whose read has ended.
        std::array::from_fn(|at| unsafe { from.add(at).read_volatile() })
    }
}
