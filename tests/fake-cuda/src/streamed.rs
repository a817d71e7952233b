//! The pieces that a warp reads, as a host thread: the ring of a warp is worked out by the code of the kernel; the lanes
//! of a warp are one.

use crate::warps::Reads;
use nvme_core::CommandToken;
use nvme_gpu_kernel::ring::RangePieces;
use nvme_gpu_kernel::rows::code;

/// The pieces of a warp.
pub struct Stream<'s, 'r> {
    reads: &'s mut Reads<'r>,
    /// The read under way at each stage, or the code of the last one.
    stages: Vec<Result<CommandToken, i32>>,
    fetched: u64,
    due: u64,
}

impl<'s, 'r> Stream<'s, 'r> {
    pub fn new(reads: &'s mut Reads<'r>) -> Self {
        Self {
            reads,
            stages: Vec::new(),
            fetched: 0,
            due: 0,
        }
    }

    /// As `nvme_gpu_kernel::RangeStream::piece`.
    pub fn piece(&mut self, pieces: &impl RangePieces, number: u64) -> i32 {
        if self.reads.ends == code::OK && self.reads.gate.look().is_err() {
            self.reads.ends = code::GONE;
        }
        if self.stages.is_empty() {
            self.stages
                .resize_with(pieces.stages() as usize, || Err(code::OK));
        }
        if number >= self.due {
            for stage in 0..pieces.stages() {
                let next = pieces.next_at(stage, number);
                let is_new = next >= self.fetched && next <= pieces.last();
                if is_new && self.reads.ends == code::OK && pieces.is_read(next) {
                    self.stages[stage as usize] = self.submit(pieces, next);
                }
            }
            self.fetched = number + u64::from(pieces.stages());
            self.due = number + pieces.batch();
        }
        if self.reads.ends != code::OK {
            let all = (0..self.stages.len()).map(|stage| self.wait(stage)).min();
            self.reads.has_lost |= all.is_some_and(|code| code < 0);
            return self.reads.ends;
        }
        let ended = self.wait(pieces.stage(number) as usize);
        if ended < 0 {
            self.reads.has_lost = true;
            self.reads.ends = code::NOT_RUN;
        }
        ended
    }

    /// As `nvme_gpu_kernel::RangeStream::begin`.
    pub fn begin(&mut self) {
        self.fetched = 0;
        self.due = 0;
    }

    /// As `nvme_gpu_kernel::RangeStream::rest`.
    pub fn rest(&self) -> i32 {
        self.reads.ends
    }

    /// As `nvme_gpu_kernel::RangeStream::address_in`.
    pub fn address_in(&self, pieces: &impl RangePieces, number: u64, byte: u64) -> u64 {
        let shift = self.reads.rows.block_shift;
        let block = pieces.piece(number).0 >> shift << shift;
        let slot = self.reads.slots + pieces.slot(number, block);
        (self.reads.rows.slots + slot).wrapping_add(byte.wrapping_sub(block))
    }

    fn submit(&self, pieces: &impl RangePieces, number: u64) -> Result<CommandToken, i32> {
        let rows = self.reads.rows;
        let (begin, end) = pieces.piece(number);
        let place = rows.blocks_of(begin, (end - begin) as u32);
        let slot = self.reads.slots + pieces.slot(number, place.block << rows.block_shift);
        self.reads.submit(place, slot, pieces.stage(number))
    }

    /// How the last read of a stage ended.
    fn wait(&mut self, stage: usize) -> i32 {
        let Some(of) = self.stages.get_mut(stage) else {
            return code::OK;
        };
        let code = match std::mem::replace(of, Err(code::OK)) {
            Err(code) => code,
            Ok(token) => self.reads.wait(token),
        };
        *of = Err(code);
        code
    }
}
