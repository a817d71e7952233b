//! Rows written by ids, and added to. Rows that share a block are changed in one copy of it, which is written once:
//! a read, change and write for each row would lose one of two changes, or write the block many times.

use super::counters::StoreCounter;
use super::element::RowElement;
use super::engine::{self, FailureReaction, PieceHandler};
use super::lane::LaneOperation;
use super::row_ids::RowIds;
use super::space::{MemberPiece, StoreSpace, common};
use super::status::{self, RowStatus};
use super::table::{RowOutcome, RowReport, Table};
use super::transfer::within;
use nvme_driver::error::{Error, Result};
use std::iter::once;
use std::ops::Range;

/// Bytes that are changed under one lock, unless one row is longer.
const CHUNK_BYTES: u64 = 4 << 20;

/// Treatment of an id that a scatter names more than once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DuplicateIds {
    /// The last row with the id is written.
    #[default]
    Last,
    /// No row is written, and the call ends with an error.
    Error,
}

/// Treatment of ids that are out of range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WrongIds {
    /// No row is sent.
    Refused,
    /// Their rows fail, and the others are written.
    #[cfg(feature = "cuda")]
    Fail,
}

/// Operation on the rows of an id.
#[derive(Clone, Copy)]
enum RowChange {
    Write,
    Add(RowElement),
}

impl Table {
    /// Writes place `i` of `src` to row `ids[i]`, for every `i`. Bytes beside the rows do not change.
    ///
    /// Each row has a status as in [`gather`](Self::gather). All ids are checked first: if one is negative or too
    /// large, nothing is sent, and the other rows have the status [`RowStatus::NotRun`]. A row that failed later may
    /// have been written in part. Rows of one call are not written in the order of `ids`; a scatter or write that
    /// begins after this call has returned comes after it.
    ///
    /// # Errors
    /// [`Error::Usage`] for lengths that do not fit, for a store that is for reading only, and for a repeated id with
    /// [`DuplicateIds::Error`]; nothing is written then.
    pub fn scatter(
        &self,
        ids: RowIds<'_>,
        src: &[u8],
        duplicates: DuplicateIds,
        status: Option<&mut [i32]>,
    ) -> Result<RowReport> {
        self.change(
            ids,
            src,
            RowChange::Write,
            (duplicates, WrongIds::Refused),
            status,
        )
    }

    /// Does the same as [`scatter`](Self::scatter), for a stream, whose ids could not be checked before: rows with ids
    /// out of range fail, and the others are written; of equal ids the last.
    #[cfg(feature = "cuda")]
    pub(super) fn scatter_others(
        &self,
        ids: RowIds<'_>,
        src: &[u8],
        status: Option<&mut [i32]>,
    ) -> Result<RowReport> {
        let (last, fail) = (DuplicateIds::Last, WrongIds::Fail);
        self.change(ids, src, RowChange::Write, (last, fail), status)
    }

    /// Does the same as [`scatter_add`](Self::scatter_add), likewise.
    #[cfg(feature = "cuda")]
    pub(super) fn add_others(
        &self,
        ids: RowIds<'_>,
        src: &[u8],
        element: RowElement,
        status: Option<&mut [i32]>,
    ) -> Result<RowReport> {
        let (last, fail) = (DuplicateIds::Last, WrongIds::Fail);
        self.change(ids, src, RowChange::Add(element), (last, fail), status)
    }

    /// Adds place `i` of `src` to row `ids[i]`, for every `i`. Rows with the same id are summed, in the order of
    /// `ids`.
    ///
    /// Additions of several threads to one row are all counted, through one store: several stores on one file have a
    /// lock each.
    ///
    /// # Errors
    /// As [`scatter`](Self::scatter); [`Error::Usage`] when a row is not a whole number of elements.
    pub fn scatter_add(
        &self,
        ids: RowIds<'_>,
        src: &[u8],
        element: RowElement,
        status: Option<&mut [i32]>,
    ) -> Result<RowReport> {
        self.check_elements(element)?;
        let change = RowChange::Add(element);
        self.change(
            ids,
            src,
            change,
            (DuplicateIds::Last, WrongIds::Refused),
            status,
        )
    }

    /// # Errors
    /// [`Error::Usage`] for a store that is for reading only, and for a table in several ranges.
    pub(super) fn check_changeable(&self) -> Result<()> {
        self.space.check_writable()?;
        match &self.ranges {
            None => Ok(()),
            Some(_) => Err(Error::usage(
                "rows of a table in several ranges are not written",
                "write bytes of the store, or rows of a table in one range",
            )),
        }
    }

    /// # Errors
    /// [`Error::Usage`] when a row is not a whole number of elements.
    pub(super) fn check_elements(&self, element: RowElement) -> Result<()> {
        let size = element.bytes() as u64;
        if !self.row_bytes().is_multiple_of(size) {
            return Err(Error::usage(
                format!(
                    "rows of {} bytes are not a whole number of elements of {size} bytes",
                    self.row_bytes()
                ),
                "use another type of element",
            ));
        }
        Ok(())
    }

    fn change(
        &self,
        ids: RowIds<'_>,
        src: &[u8],
        change: RowChange,
        (duplicates, wrong): (DuplicateIds, WrongIds),
        status: Option<&mut [i32]>,
    ) -> Result<RowReport> {
        self.check_lengths(ids, src.len(), status.as_deref())?;
        self.check_changeable()?;
        let mut outcome = RowOutcome::new(ids.len());
        let order = self.order(ids, &mut outcome);
        if order.len() < ids.len() && wrong == WrongIds::Refused {
            return Ok(outcome.refused(ids, status));
        }
        let twice = order.windows(2).find(|pair| pair[0].0 == pair[1].0);
        if let Some(pair) = twice.filter(|_| duplicates == DuplicateIds::Error) {
            let (id, first, second) = (pair[0].0, pair[0].1, pair[1].1);
            return Err(Error::usage(
                format!("rows {first} and {second} have the same id {id}"),
                "name each id once, or let the last one win",
            ));
        }
        let request = ScatterRequest {
            table: self,
            order: &order,
            src,
            change,
        };
        let mut next = 0;
        while next < order.len() {
            let (runs, end) = request.runs(next);
            next = end;
            request.carry_out(runs, &mut outcome);
        }
        let report = outcome.report(ids, status);
        let counters = &self.space.counters;
        counters.add(StoreCounter::RowsWritten, ids.len() as u64);
        counters.add(StoreCounter::FailedRows, report.failed as u64);
        Ok(report)
    }
}

/// Rows to change, with their new bytes.
struct ScatterRequest<'a> {
    table: &'a Table,
    order: &'a [(u64, usize)],
    src: &'a [u8],
    change: RowChange,
}

/// Blocks that are read as far as needed, changed in memory and written.
struct BlockRun {
    blocks: Range<u64>,
    /// Range of the sorted rows.
    rows: Range<usize>,
    bytes: Vec<u8>,
    /// Ranges that could not be read or written, each with the status of its failure.
    bad: Vec<(Range<u64>, i32)>,
    /// Bytes that were neither written nor failed.
    left: u64,
}

impl ScatterRequest<'_> {
    fn place(&self, index: usize) -> Range<u64> {
        self.table.place(self.order[index].0)
    }

    /// Returns the runs of the next rows, from `first` on, and the first row after them. No two
    /// runs share a block.
    fn runs(&self, first: usize) -> (Vec<BlockRun>, usize) {
        let space = &self.table.space;
        let mut runs: Vec<BlockRun> = Vec::new();
        let mut total = 0;
        for index in first..self.order.len() {
            let same = index > first && self.order[index].0 == self.order[index - 1].0;
            if total >= CHUNK_BYTES && !same {
                return (runs, index);
            }
            let blocks = space.rounded(&self.place(index), space.block_bytes);
            match runs.last_mut().filter(|run| blocks.start <= run.blocks.end) {
                Some(run) => {
                    total += blocks.end.saturating_sub(run.blocks.end);
                    run.blocks.end = run.blocks.end.max(blocks.end);
                    run.rows.end = index + 1;
                }
                None => {
                    total += blocks.end - blocks.start;
                    runs.push(BlockRun {
                        blocks,
                        rows: index..index + 1,
                        bytes: Vec::new(),
                        bad: Vec::new(),
                        left: 0,
                    });
                }
            }
        }
        (runs, self.order.len())
    }

    /// Reads, changes and writes the blocks; the rows have their status afterwards.
    fn carry_out(&self, mut runs: Vec<BlockRun>, outcome: &mut RowOutcome) {
        let space = &self.table.space;
        let _held = space.locks.hold(runs.iter().map(|run| run.blocks.clone()));
        let mut pieces = Vec::new();
        for (key, run) in runs.iter_mut().enumerate() {
            run.bytes
                .resize((run.blocks.end - run.blocks.start) as usize, 0);
            for gap in self.needed(run) {
                space.split(gap, key, &mut pieces);
            }
        }
        let mut work = RunTransfer {
            space,
            runs: &mut runs,
            outcome,
        };
        engine::run(space, LaneOperation::Read, pieces, &mut work);
        let mut pieces = Vec::new();
        for (key, run) in runs.iter_mut().enumerate() {
            self.apply(run);
            let before = pieces.len();
            for good in good(run) {
                space.split(good, key, &mut pieces);
            }
            run.left = pieces[before..]
                .iter()
                .map(|one| u64::from(one.bytes))
                .sum();
        }
        let mut work = RunTransfer {
            space,
            runs: &mut runs,
            outcome,
        };
        engine::run(space, LaneOperation::Write, pieces, &mut work);
        for run in &runs {
            self.conclude(run, outcome);
        }
    }

    /// Returns the blocks that must be read first: all blocks that rows are added to, else those that rows
    /// cover in part.
    fn needed(&self, run: &BlockRun) -> Vec<Range<u64>> {
        if matches!(self.change, RowChange::Add(_)) {
            return once(run.blocks.clone()).collect();
        }
        let space = &self.table.space;
        let mut needed: Vec<Range<u64>> = Vec::new();
        let mut covered = run.blocks.start;
        let ends = run.rows.clone().map(|index| self.place(index));
        for place in ends.chain(once(run.blocks.end..run.blocks.end)) {
            if covered < place.start {
                let gap = space.rounded(&(covered..place.start), space.block_bytes);
                match needed.last_mut().filter(|last| gap.start <= last.end) {
                    Some(last) => last.end = gap.end,
                    None => needed.push(gap),
                }
            }
            covered = covered.max(place.end);
        }
        needed
    }

    /// Changes the bytes of a run in memory.
    fn apply(&self, run: &mut BlockRun) {
        let bytes = self.table.row_bytes() as usize;
        let row = |index: usize| &self.src[self.order[index].1 * bytes..][..bytes];
        let mut index = run.rows.start;
        while index < run.rows.end {
            let id = self.order[index].0;
            let same = self.order[index..run.rows.end].partition_point(|one| one.0 == id);
            let rows = index..index + same;
            let to = &mut run.bytes[within(&self.place(index), &run.blocks)];
            match self.change {
                RowChange::Write => to.copy_from_slice(row(rows.end - 1)),
                RowChange::Add(element) => {
                    let terms: Vec<&[u8]> = rows.clone().map(row).collect();
                    element.add(to, &terms);
                }
            }
            index = rows.end;
        }
    }

    /// Gives the rows of a run their status.
    fn conclude(&self, run: &BlockRun, outcome: &mut RowOutcome) {
        for index in run.rows.clone() {
            let place = self.place(index);
            let mut bad = run.bad.iter();
            let bad = bad.find(|(blocks, _)| !common(blocks, &place).is_empty());
            outcome.status[self.order[index].1] = match bad {
                Some((_, code)) => *code,
                None if run.left > 0 => RowStatus::NotRun.code(),
                None => status::OK,
            };
        }
    }
}

/// Returns the blocks of a run that could be read, as far as they had to be.
fn good(run: &BlockRun) -> Vec<Range<u64>> {
    let mut bad: Vec<Range<u64>> = run.bad.iter().map(|(blocks, _)| blocks.clone()).collect();
    bad.sort_unstable_by_key(|blocks| blocks.start);
    let mut good = Vec::new();
    let mut at = run.blocks.start;
    for blocks in bad.into_iter().chain(once(run.blocks.end..run.blocks.end)) {
        if at < blocks.start {
            good.push(at..blocks.start);
        }
        at = at.max(blocks.end);
    }
    good
}

/// Reads into the memory of runs, or writes from it.
struct RunTransfer<'a> {
    space: &'a StoreSpace,
    runs: &'a mut [BlockRun],
    outcome: &'a mut RowOutcome,
}

impl PieceHandler for RunTransfer<'_> {
    fn fill(&mut self, piece: &MemberPiece, bytes: &mut [u8]) {
        let run = &self.runs[piece.key];
        bytes.copy_from_slice(&run.bytes[within(&piece.range(), &run.blocks)]);
    }

    fn done(&mut self, piece: &MemberPiece, bytes: &[u8]) {
        let run = &mut self.runs[piece.key];
        if bytes.is_empty() {
            run.left -= u64::from(piece.bytes);
        } else {
            run.bytes[within(&piece.range(), &run.blocks)].copy_from_slice(bytes);
        }
    }

    fn failed(&mut self, piece: &MemberPiece, error: Error) -> FailureReaction {
        let unit = self.space.block_bytes.max(512);
        let is_local = matches!(error, Error::Command { .. });
        if is_local && piece.bytes > unit {
            return FailureReaction::Split(unit);
        }
        let run = &mut self.runs[piece.key];
        run.left = run.left.saturating_sub(u64::from(piece.bytes));
        let code = self.outcome.note(error);
        run.bad.push((piece.range(), code));
        FailureReaction::GoOn
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
