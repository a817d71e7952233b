//! A block of threads of a gather, one step at a time: what `nvme_gather` and its stations do, by the same calls of the
//! core. Between any two steps others may act.

use super::drive::At;
use super::{CANARY, LANES, Sabotage, World};
use crate::account::Failure;
use crate::setup::{BLOCK_BYTES, COMMAND_NS};
use nvme_core::group::Alone;
use nvme_core::row_cache::Line;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_core::sync::{Order, Scope};
use nvme_core::{Command, Data, Outcome, SubmitError, Token, WaitError};
use nvme_gpu_kernel::rows::{Place, code};

/// How long a block waits for a station.
const PATIENCE_NS: u64 = 16 * COMMAND_NS;

/// What a block does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Begin,
    Claim,
    Enter,
    Chunk,
    Read,
    Copy,
    Keep,
    Fill,
    Finish,
    Leave,
    Away,
    Free,
    Done,
}

pub(super) struct Block {
    /// Its number among all.
    pub number: u32,
    pub launch: usize,
    pub step: Step,
    pub station: Option<u32>,
    /// Its next chunk of rows, and how many blocks take turns.
    chunk: (usize, usize),
    epoch: u32,
    until_ns: u64,
    ends: i32,
    has_lost: bool,
    lanes: Vec<Row>,
    runs: Vec<Run>,
}

/// The row of a lane.
struct Row {
    index: usize,
    id: i64,
    place: Option<Place>,
    code: i32,
    wants: bool,
    /// Its read was another row's, too.
    is_shared: bool,
    from: From,
    /// The line that it pins.
    pinned: Option<Line>,
    /// The line that it fills.
    filled: Option<Line>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum From {
    Nowhere,
    Slot(u64),
    Line(usize),
}

/// Rows that one command reads.
struct Run {
    head: usize,
    lanes: Vec<usize>,
    first: u64,
    blocks: u32,
    token: Option<Token>,
    deadline_ns: u64,
    ended: Option<i32>,
}

impl Block {
    pub fn new(number: u32, launch: usize, chunk: (usize, usize), now_ns: u64) -> Self {
        Self {
            number,
            launch,
            step: Step::Begin,
            station: None,
            chunk,
            epoch: 0,
            until_ns: now_ns + PATIENCE_NS,
            ends: code::OK,
            has_lost: false,
            lanes: Vec::new(),
            runs: Vec::new(),
        }
    }

    /// It has passed the gate and not left.
    pub fn is_inside(&self) -> bool {
        !matches!(
            self.step,
            Step::Begin | Step::Claim | Step::Enter | Step::Free | Step::Done
        ) && self.station.is_some()
    }
}

impl World<'_> {
    pub(super) fn step(&mut self, block: &mut Block) -> Result<(), Failure> {
        block.step = match block.step {
            Step::Begin => {
                block.epoch = self.written;
                Step::Claim
            }
            Step::Claim => self.claim(block)?,
            Step::Enter => self.enter(block),
            Step::Chunk => self.chunk(block),
            Step::Read => self.read(block),
            Step::Copy => self.copy(block),
            Step::Keep => self.keep(block),
            Step::Fill => self.fill(block),
            Step::Finish => self.finish(block)?,
            Step::Leave => {
                if block.has_lost && self.sabotage != Sabotage::TellsNobody {
                    self.gate.report_trouble();
                }
                Step::Away
            }
            Step::Away => self.away(block),
            Step::Free => {
                if let Some(station) = block.station.take() {
                    self.give_back(station);
                }
                Step::Done
            }
            Step::Done => Step::Done,
        };
        Ok(())
    }

    fn give_back(&mut self, station: u32) {
        self.owners[station as usize] = None;
        self.free[station as usize].store(0, Order::Release, Scope::Gpu);
    }

    fn claim(&mut self, block: &mut Block) -> Result<Step, Failure> {
        let count = self.free.len() as u32;
        for next in 0..count {
            let station = (block.number + next) % count;
            let word = &self.free[station as usize];
            if word.compare_exchange(0, 1, Order::Acquire, Scope::Gpu) != 0 {
                continue;
            }
            let owner = self.owners[station as usize].replace(block.number);
            if owner.is_some() || self.lost[station as usize] {
                let text =
                    format!("station {station} is taken while it belongs to {owner:?}, or is lost");
                return Err(Failure::new("station", text));
            }
            block.station = Some(station);
            return Ok(Step::Enter);
        }
        if self.gate.look().is_err() || self.drive.now_ns >= block.until_ns {
            block.ends = self.why_none();
            return Ok(Step::Chunk);
        }
        Ok(Step::Claim)
    }

    fn why_none(&self) -> i32 {
        match self.gate.look() {
            Ok(()) => code::NOT_RUN,
            Err(_) => code::GONE,
        }
    }

    fn enter(&mut self, block: &mut Block) -> Step {
        let Some(station) = block.station else {
            return Step::Chunk;
        };
        if self.gate.enter(station).is_err() && self.sabotage != Sabotage::PassesAnyway {
            block.station = None;
            block.ends = self.why_none();
            self.give_back(station);
        }
        Step::Chunk
    }

    /// The next rows, and what reads them.
    fn chunk(&mut self, block: &mut Block) -> Step {
        let rows = &self.launches[block.launch].ids;
        let first = block.chunk.0 * LANES;
        if first >= rows.len() {
            return Step::Leave;
        }
        block.chunk.0 += block.chunk.1;
        let ids = rows[first..rows.len().min(first + LANES)].to_vec();
        // Kernels look once a millisecond.
        if block.ends == code::OK && self.rng.below(2) == 0 && self.gate.look().is_err() {
            block.ends = code::GONE;
        }
        let row = |(lane, id): (usize, i64)| {
            let place = self.rows.place(id);
            let code = match place {
                None => code::OUT_OF_RANGE,
                Some(_) => block.ends,
            };
            Row {
                index: first + lane,
                id,
                place,
                code,
                wants: code == code::OK,
                is_shared: false,
                from: From::Nowhere,
                pinned: None,
                filled: None,
            }
        };
        block.lanes = ids.into_iter().enumerate().map(row).collect();
        if block.ends != code::OK {
            return Step::Finish;
        }
        self.find(block);
        block.runs = self.runs(block);
        Step::Read
    }

    /// Rows that the cache has: of lanes with the same row the first one pins the line.
    fn find(&mut self, block: &mut Block) {
        let Some(cache) = self.cache else { return };
        for lane in 0..block.lanes.len() {
            if !block.lanes[lane].wants {
                continue;
            }
            let id = block.lanes[lane].id;
            let leader = block.lanes.iter().position(|row| row.id == id);
            let from = match leader.filter(|leader| *leader < lane) {
                Some(leader) => block.lanes[leader].from,
                None => {
                    let line = cache.find(id as u64, block.epoch);
                    block.lanes[lane].pinned = line;
                    line.map_or(From::Nowhere, |line| From::Line(line.index() as usize))
                }
            };
            if from != From::Nowhere {
                self.counts.hits += 1;
                block.lanes[lane].from = from;
                block.lanes[lane].wants = false;
            }
        }
    }

    /// Lanes with the same first block share a read, and reads of neighbours become one command.
    fn runs(&self, block: &Block) -> Vec<Run> {
        let least = ((self.rows.row_bytes - 1) >> self.rows.block_shift) + 1;
        let mut runs: Vec<Run> = Vec::new();
        let (mut last_begin, mut last_end, mut leaders) = (0, 0, 0);
        for (lane, row) in block.lanes.iter().enumerate() {
            let (true, Some(place)) = (row.wants, row.place) else {
                continue;
            };
            let alike =
                |other: &&Row| other.wants && other.place.map(|of| of.block) == Some(place.block);
            let first = block.lanes.iter().position(|other| alike(&other));
            if first != Some(lane) {
                let of = |run: &&mut Run| run.lanes.contains(&first.unwrap_or(lane));
                if let Some(run) = runs.iter_mut().find(of) {
                    run.lanes.push(lane);
                }
                continue;
            }
            let is_longer = block
                .lanes
                .iter()
                .filter(alike)
                .any(|other| other.place.is_some_and(|place| place.blocks > least));
            let end = place.block + u64::from(least) + u64::from(is_longer);
            let follows = !runs.is_empty()
                && (last_begin..=last_end).contains(&place.block)
                && leaders < self.rows.run_rows;
            (last_begin, last_end) = (place.block, end);
            match runs.last_mut().filter(|_| follows) {
                Some(run) => {
                    leaders += 1;
                    run.lanes.push(lane);
                    run.blocks = (end - run.first) as u32;
                }
                None => {
                    leaders = 1;
                    runs.push(self.run(lane, (place.block, (end - place.block) as u32)));
                }
            }
        }
        runs
    }

    fn run(&self, lane: usize, (first, blocks): (u64, u32)) -> Run {
        Run {
            head: lane,
            lanes: vec![lane],
            first,
            blocks,
            token: None,
            deadline_ns: self.drive.now_ns + COMMAND_NS,
            ended: None,
        }
    }

    /// One look at every read of the chunk.
    fn read(&mut self, block: &mut Block) -> Step {
        let Some(station) = block.station else {
            return Step::Finish;
        };
        for run in &mut block.runs {
            self.look_at(station, run);
        }
        if block.runs.iter().any(|run| run.ended.is_none()) {
            return Step::Read;
        }
        for run in std::mem::take(&mut block.runs) {
            let ended = run.ended.unwrap_or(code::NOT_RUN);
            self.counts.joined += u64::from(run.lanes.len() > 1);
            for lane in &run.lanes {
                let row = &mut block.lanes[*lane];
                row.code = ended;
                row.is_shared = run.lanes.len() > 1;
                if let Some(place) = row.place {
                    let head = match self.sabotage {
                        Sabotage::OwnSlot => *lane,
                        _ => run.head,
                    };
                    let into = place.byte - run.first * BLOCK_BYTES;
                    row.from = From::Slot(self.slot(station, head) + into);
                }
            }
            if ended == code::TIMED_OUT || ended == code::GONE {
                block.has_lost = true;
                block.ends = code::NOT_RUN;
                self.lost[station as usize] = true;
            }
        }
        Step::Copy
    }

    /// The slot of `lane`, in the slot memory.
    fn slot(&self, station: u32, lane: usize) -> u64 {
        (u64::from(station) * LANES as u64 + lane as u64) * u64::from(self.rows.slot_bytes)
    }

    /// Sends the read, or looks whether it has ended.
    fn look_at(&mut self, station: u32, run: &mut Run) {
        let queue = &self.drive.queues[station as usize % 2];
        let now_ns = self.drive.now_ns;
        if run.ended.is_some() {
            return;
        }
        let Some(token) = run.token.take() else {
            let data = Data::Contiguous {
                iova: Iova(self.slots.iova.0 + self.slot(station, run.head)),
                len: u64::from(run.blocks) * BLOCK_BYTES,
            };
            let sqe = nvm::read(Nsid(1), Lba(run.first), run.blocks);
            let cell = station * LANES as u32 + run.head as u32;
            match queue.place(&Alone, Command::new(sqe, data, cell)) {
                Ok(token) => run.token = Some(token),
                Err(SubmitError::QueueFull) if now_ns < run.deadline_ns => {}
                Err(SubmitError::QueueFull) => run.ended = Some(code::TIMED_OUT),
                Err(SubmitError::Refused) => run.ended = Some(code::GONE),
                Err(_) => run.ended = Some(code::NOT_RUN),
            }
            queue.ring(&Alone);
            return;
        };
        if now_ns < run.deadline_ns && queue.fault().is_none() {
            queue.ring(&Alone);
            queue.drain(&Alone);
            match queue.poll(&token) {
                Some((outcome, _)) => run.ended = Some(code_of(outcome)),
                None => run.token = Some(token),
            }
            return;
        }
        let waited = queue.wait(&At(now_ns), token, run.deadline_ns.min(now_ns));
        run.ended = Some(match waited {
            Ok((outcome, _)) => code_of(outcome),
            Err((WaitError::TimedOut, _)) => code::TIMED_OUT,
            Err((WaitError::Refused, _)) => code::GONE,
        });
    }

    /// Copies the rows that are there; reads that failed for several rows are done again for each.
    fn copy(&mut self, block: &mut Block) -> Step {
        let bytes = self.rows.row_bytes as usize;
        for row in block.lanes.iter_mut().filter(|row| row.code == code::OK) {
            let out = &mut self.launches[block.launch].out[row.index * bytes..][..bytes];
            match std::mem::replace(&mut row.from, From::Nowhere) {
                From::Nowhere => {}
                From::Slot(at) => self.drive.memory.read(self.slots.iova.offset(at), out),
                From::Line(line) => out.copy_from_slice(&self.lines[line]),
            }
        }
        let repeats = self.sabotage != Sabotage::RepeatsNothing;
        let mut again = Vec::new();
        for (lane, row) in block.lanes.iter_mut().enumerate() {
            let goes_on = row.wants && row.is_shared && row.code > 0 && repeats;
            let Some(place) = row.place.filter(|_| goes_on) else {
                continue;
            };
            if block.ends == code::OK {
                self.counts.repeated += 1;
                again.push((lane, (place.block, place.blocks)));
            } else {
                // Which of the rows it failed for is not found out any more.
                row.code = block.ends;
            }
        }
        block.runs = again
            .into_iter()
            .map(|(lane, what)| self.run(lane, what))
            .collect();
        match block.runs.is_empty() {
            true => Step::Keep,
            false => Step::Read,
        }
    }

    /// Lets go of lines, and takes others for rows that were read.
    fn keep(&mut self, block: &mut Block) -> Step {
        let Some(cache) = self.cache else {
            return Step::Finish;
        };
        for lane in 0..block.lanes.len() {
            if let Some(line) = block.lanes[lane].pinned.take()
                && self.sabotage != Sabotage::KeepsPins
            {
                cache.release(line);
            }
            let row = &block.lanes[lane];
            let is_read = |row: &Row| row.wants && row.code == code::OK;
            let leads = block.lanes[..lane]
                .iter()
                .all(|other| other.id != row.id || !is_read(other));
            if is_read(row) && leads {
                let hand = self.rng.word() as u32;
                block.lanes[lane].filled = cache.claim(row.id as u64, block.epoch, hand);
            }
        }
        Step::Fill
    }

    fn fill(&mut self, block: &mut Block) -> Step {
        let (Some(cache), bytes) = (self.cache, self.rows.row_bytes as usize) else {
            return Step::Finish;
        };
        for row in &mut block.lanes {
            if let Some(line) = row.filled.take() {
                let out = &self.launches[block.launch].out[row.index * bytes..][..bytes];
                self.lines[line.index() as usize].copy_from_slice(out);
                cache.publish(line, row.id as u64, block.epoch);
            }
        }
        Step::Finish
    }

    /// What became of the rows, which is judged.
    fn finish(&mut self, block: &mut Block) -> Result<Step, Failure> {
        let bytes = self.rows.row_bytes as usize;
        for row in std::mem::take(&mut block.lanes) {
            let launch = &mut self.launches[block.launch];
            let out = &mut launch.out[row.index * bytes..][..bytes];
            if row.code != code::OK && self.sabotage != Sabotage::LeavesBytes {
                out.fill(0);
            }
            let told = launch.codes[row.index].replace(row.code);
            let wrong = |text: String| {
                let text = format!(
                    "row {} of {}: code {}: {text}",
                    row.id, block.launch, row.code
                );
                Failure::new("rows", text)
            };
            if told.is_some() {
                return Err(wrong("it had a code before".to_owned()));
            }
            match (row.code, row.place) {
                (code::OK, Some(place)) => {
                    let (out, floor) = (out.to_vec(), launch.floor.clone());
                    self.table.check(place, &out, &floor).map_err(wrong)?;
                }
                (code::OUT_OF_RANGE, Some(_)) | (code::OK, None) => {
                    return Err(wrong("the table says something else".to_owned()));
                }
                (1.., _) if row.is_shared => {
                    return Err(wrong("its read was another row's, too".to_owned()));
                }
                _ if out.iter().any(|byte| *byte != 0) => {
                    let text = match out.iter().all(|byte| *byte == CANARY) {
                        true => "it was not touched",
                        false => "it has bytes",
                    };
                    return Err(wrong(text.to_owned()));
                }
                (code::GONE, _) => self.counts.gone += 1,
                _ => {}
            }
            self.counts.rows += 1;
            self.tell("row", row.id as u32, row.code);
        }
        Ok(Step::Chunk)
    }

    fn away(&mut self, block: &mut Block) -> Step {
        let Some(station) = block.station else {
            return Step::Done;
        };
        if !block.has_lost || self.sabotage == Sabotage::FreesLost {
            self.gate.leave(station);
            return Step::Free;
        }
        self.counts.lost += 1;
        self.owners[station as usize] = None;
        self.gate.leave_lost(station);
        block.station = None;
        Step::Done
    }
}

/// The code of a command that has ended.
fn code_of(outcome: Outcome) -> i32 {
    match outcome {
        Outcome::Completed(status) => i32::from(status.code()),
        Outcome::Aborted(_) => code::GONE,
    }
}
