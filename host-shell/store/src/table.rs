//! Rows of one size in a store, and their gather by ids. Each row has its own status, so that one bad block costs
//! the rows in it and no others.

use super::background::BackgroundOperation;
use super::counters::StoreCounter;
use super::engine::{self, FailureReaction, PieceHandler};
use super::extents::{StoreExtent, TableRanges};
use super::lane::LARGE_BYTES;
use super::parallel;
use super::row_ids::RowIds;
use super::space::{MemberPiece, StoreSpace, common};
use super::status::{self, RowStatus};
use super::transfer::within;
use nvme_driver::error::{Error, Result};
use nvme_driver::widen::FailedContent;
use std::ops::Range;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::Weak;

/// Reads of neighbouring rows are joined up to this length.
const JOINED_BYTES: u64 = LARGE_BYTES as u64;

/// The first row that failed.
#[derive(Debug)]
pub struct FailedRow {
    /// Index of the row in the request.
    pub row: usize,
    /// Id of the row.
    pub id: i64,
    /// Status of the row: [`status::describe`] returns it in words.
    pub status: i32,
    /// Error of the command that failed, if one did.
    pub error: Option<Error>,
}

/// Outcome of a gather or scatter.
#[derive(Debug, Default)]
#[must_use = "rows may have failed"]
pub struct RowReport {
    /// Rows asked for.
    pub rows: usize,
    /// Rows whose status is not 0.
    pub failed: usize,
    /// The failed row that comes first in the request.
    pub first: Option<FailedRow>,
    /// Error number of the first command of a file that failed.
    pub errno: Option<i32>,
}

impl RowReport {
    /// Adds the report of the rows from `begin` on, which follow the rows of this report.
    fn add(&mut self, begin: usize, next: Self) {
        self.rows += next.rows;
        self.failed += next.failed;
        self.errno = self.errno.or(next.errno);
        if self.first.is_none() {
            self.first = next.first;
            if let Some(first) = &mut self.first {
                first.row += begin;
            }
        }
    }

    /// Returns the report as an error unless every row was moved.
    ///
    /// # Errors
    /// [`Error::Usage`] when the first row that failed has an id out of range, else what its command ended with.
    pub fn check(self) -> Result<()> {
        let Some(first) = self.first else {
            return Ok(());
        };
        let (name, remedy) = status::describe(first.status);
        let which = format!(
            "row {} (id {}): {name}; {} of {} rows failed",
            first.row, first.id, self.failed, self.rows
        );
        match first.error {
            Some(error) => Err(error),
            None if first.status == RowStatus::OutOfRange.code() => {
                Err(Error::usage(which, remedy))
            }
            None => Err(Error::device(which, remedy)),
        }
    }
}

/// Rows of one size in a store. Shares the store's queues; any number of threads may use it at once.
///
/// ```
/// use nvme_store::{Store, StoreOptions};
///
/// # fn main() -> nvme_driver::Result<()> {
/// # #[cfg(feature = "sim")] {
/// let store = Store::open("sim:mem?size=16MiB", &StoreOptions::default())?;
/// // 1000 rows of 100 bytes that begin at byte 96.
/// let table = store.table(96, 1000, 100)?;
/// for id in 0..1000u64 {
///     store.write_at(96 + id * 100, &[id as u8; 100])?;
/// }
/// let ids = [7i64, 3, 7, -1];
/// let (mut out, mut status) = (vec![0xFF; 4 * 100], [0; 4]);
/// let report = table.gather((&ids).into(), &mut out, Some(&mut status))?;
/// assert_eq!(status, [0, 0, 0, -1]);
/// assert_eq!((out[0], out[100], out[200], out[300]), (7, 3, 7, 0));
/// assert_eq!(report.failed, 1);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Table {
    pub(super) space: Arc<StoreSpace>,
    /// Ranges of a table that lies in several; its `offset` is 0 then, and bytes count from row 0 without those between.
    pub(super) ranges: Option<TableRanges>,
    offset: u64,
    rows: u64,
    row_bytes: u64,
    /// Content of rows that cannot be read.
    pub(super) failed: FailedContent,
    /// Rows that a GPU keeps.
    #[cfg(feature = "cuda")]
    pub(super) cache: Option<Arc<nvme_cuda::TableCache>>,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table")
            .field("offset", &self.offset)
            .field("rows", &self.rows)
            .field("row_bytes", &self.row_bytes)
            .finish()
    }
}

/// A table that does not keep its store open, for work that runs later.
#[cfg(feature = "cuda")]
pub(super) struct LaterTable {
    space: Weak<StoreSpace>,
    ranges: Option<TableRanges>,
    offset: u64,
    rows: u64,
    row_bytes: u64,
    failed: FailedContent,
    cache: Option<Arc<nvme_cuda::TableCache>>,
}

#[cfg(feature = "cuda")]
impl LaterTable {
    pub fn of(table: &Table) -> Self {
        Self {
            space: Arc::downgrade(&table.space),
            ranges: table.ranges.clone(),
            offset: table.offset,
            rows: table.rows,
            row_bytes: table.row_bytes,
            failed: table.failed,
            cache: table.cache.clone(),
        }
    }

    /// Does the same as [`of`](Self::of), without memory of a GPU, for threads that call no driver.
    pub fn of_host(table: &Table) -> Self {
        Self {
            ranges: table.ranges.as_ref().map(TableRanges::of_host),
            cache: None,
            ..Self::of(table)
        }
    }

    /// # Errors
    /// [`Error::Gone`] once the store was closed.
    pub fn table(&self) -> Result<Table> {
        let space = self.space.upgrade().ok_or_else(|| Error::Gone {
            cause: "the store was closed".to_owned(),
        })?;
        Ok(Table {
            space,
            ranges: self.ranges.clone(),
            offset: self.offset,
            rows: self.rows,
            row_bytes: self.row_bytes,
            failed: self.failed,
            cache: self.cache.clone(),
        })
    }
}

impl Table {
    pub(super) fn new(
        space: Arc<StoreSpace>,
        offset: u64,
        rows: u64,
        row_bytes: u64,
    ) -> Result<Self> {
        if row_bytes == 0 {
            return Err(Error::usage("the rows have no bytes", "use 1 or more"));
        }
        let bytes = rows.checked_mul(row_bytes).ok_or_else(|| {
            Error::usage(
                format!("{rows} rows of {row_bytes} bytes are more than 2^64 bytes"),
                "use fewer rows",
            )
        })?;
        space.check(offset, bytes)?;
        Ok(Self {
            space,
            ranges: None,
            offset,
            rows,
            row_bytes,
            failed: FailedContent::Zeros,
            #[cfg(feature = "cuda")]
            cache: None,
        })
    }

    pub(super) fn of_ranges(space: Arc<StoreSpace>, ranges: &TableRanges) -> Self {
        Self {
            space,
            rows: ranges.rows(),
            row_bytes: ranges.row_bytes(),
            ranges: Some(ranges.clone()),
            offset: 0,
            failed: FailedContent::Zeros,
            #[cfg(feature = "cuda")]
            cache: None,
        }
    }

    /// Returns this table with `failed` as the content of rows that gathers cannot read, by the CPU and by a GPU. The
    /// status of such a row does not change.
    #[must_use]
    pub fn with_failed_rows(mut self, failed: FailedContent) -> Self {
        self.failed = failed;
        self
    }

    /// Returns the offset of the first row in the store.
    pub fn offset(&self) -> u64 {
        match &self.ranges {
            Some(ranges) => ranges.offset(),
            None => self.offset,
        }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the number of bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Copies row `ids[i]` to place `i` of `out`, for every `i`. Rows that lie in the same blocks share a read, except
    /// where several threads share the rows, as in large gathers from files, or a row lies in two ranges.
    ///
    /// Each row has a status, which is stored to `status` if that is given: 0, or the reason why it was not read
    /// ([`status::describe`]). A row that was not read is zero in `out`, or has the content that
    /// [`with_failed_rows`](Self::with_failed_rows) chose: a row with an id that is negative or too large, or a row
    /// that needed a command that failed. All other rows are correct;
    /// [`StoreStats::failed_rows`](super::StoreStats::failed_rows) counts the failed ones. Ids may repeat.
    ///
    /// # Errors
    /// [`Error::Usage`] when `out` or `status` have another length than `ids` asks for; nothing is read then.
    /// Rows that fail are no error of this call: [`RowReport::check`] makes one of them.
    pub fn gather(
        &self,
        ids: RowIds<'_>,
        out: &mut [u8],
        status: Option<&mut [i32]>,
    ) -> Result<RowReport> {
        self.check_lengths(ids, out.len(), status.as_deref())?;
        let threads = parallel::threads(&self.space, ids.len(), self.row_bytes);
        if threads > 1 {
            return Ok(self.gather_by_threads(ids, out, status, threads));
        }
        Ok(self.gather_checked(engine::read, ids, out, status))
    }

    /// Gathers by several threads. The lengths were checked.
    pub(super) fn gather_by_threads(
        &self,
        ids: RowIds<'_>,
        out: &mut [u8],
        status: Option<&mut [i32]>,
        threads: usize,
    ) -> RowReport {
        let share = |rows, out: &mut [u8], status: Option<&mut [i32]>| {
            self.gather_checked(engine::read_beside_others, ids.part(rows), out, status)
        };
        let mut all = RowReport::default();
        for (begin, report) in parallel::gather(ids.len(), out, status, threads, share) {
            all.add(begin, report);
        }
        all
    }

    /// Gathers by `read`, which carries out the reads. The lengths were checked.
    pub(super) fn gather_checked(
        &self,
        read: fn(&StoreSpace, Vec<MemberPiece>, &mut dyn PieceHandler),
        ids: RowIds<'_>,
        out: &mut [u8],
        status: Option<&mut [i32]>,
    ) -> RowReport {
        let mut outcome = RowOutcome::new(ids.len());
        let order = self.order(ids, &mut outcome);
        let (reads, pieces) = self.plan(&order);
        let mut work = TableGather {
            table: self,
            order: &order,
            reads: &reads,
            left: vec![self.row_bytes; ids.len()],
            out,
            outcome,
        };
        read(&self.space, pieces, &mut work);
        let TableGather { outcome, out, .. } = work;
        let row = self.row_bytes as usize;
        for (index, code) in outcome.status.iter().enumerate() {
            if *code != status::OK {
                out[index * row..][..row].fill(self.failed.byte());
            }
        }
        let report = outcome.report(ids, status);
        let counters = &self.space.counters;
        counters.add(StoreCounter::RowsRead, ids.len() as u64);
        counters.add(StoreCounter::FailedRows, report.failed as u64);
        let copies = order.windows(2).filter(|pair| pair[0].0 == pair[1].0);
        counters.add(StoreCounter::DuplicatesSaved, copies.count() as u64);
        report
    }

    /// Does the same as [`Store::in_background`](super::Store::in_background), for gathers and scatters.
    ///
    /// # Errors
    /// [`Error::System`] when no thread can be started.
    pub fn in_background<T, J>(&self, job: J) -> Result<BackgroundOperation<T>>
    where
        T: Send + 'static,
        J: FnOnce(&Self) -> T + Send + 'static,
    {
        self.space.background.start(self.clone(), job)
    }

    /// # Errors
    /// [`Error::Usage`].
    pub(super) fn check_lengths(
        &self,
        ids: RowIds<'_>,
        bytes: usize,
        status: Option<&[i32]>,
    ) -> Result<()> {
        let row = self.row_bytes;
        let wanted = usize::try_from(row).ok();
        let wanted = wanted.and_then(|row| row.checked_mul(ids.len()));
        if wanted != Some(bytes) {
            return Err(Error::usage(
                format!(
                    "a buffer of {bytes} bytes does not fit {} rows of {row} bytes exactly",
                    ids.len()
                ),
                "give as many bytes as the rows have",
            ));
        }
        match status {
            Some(status) if status.len() != ids.len() => Err(Error::usage(
                format!(
                    "a status array of {} elements does not fit {} rows",
                    status.len(),
                    ids.len()
                ),
                "give one place for each row",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the rows whose ids are in range, sorted by id and then by position in the request; the others
    /// receive their status.
    pub(super) fn order(&self, ids: RowIds<'_>, outcome: &mut RowOutcome) -> Vec<(u64, usize)> {
        let mut order = Vec::with_capacity(ids.len());
        for row in 0..ids.len() {
            match u64::try_from(ids.get(row)) {
                Ok(id) if id < self.rows => order.push((id, row)),
                _ => outcome.status[row] = RowStatus::OutOfRange.code(),
            }
        }
        order.sort_unstable();
        order
    }

    /// Returns the bytes of a row that is in range: in the store, or in the [ranges](TableRanges) of the table.
    pub(super) fn place(&self, id: u64) -> Range<u64> {
        let start = self.offset + id * self.row_bytes;
        start..start + self.row_bytes
    }

    /// Joins rows to reads, and splits those into commands.
    fn plan(&self, order: &[(u64, usize)]) -> (Vec<RowRead>, Vec<MemberPiece>) {
        let space = &self.space;
        let mut reads: Vec<RowRead> = Vec::new();
        let mut add = |index: usize, extent: &StoreExtent, place: &Range<u64>| {
            let blocks = space.rounded(&extent.in_store(place), space.read_bytes);
            if let Some(read) = reads.last_mut().filter(|read| read.extent == *extent) {
                let end = read.blocks.end.max(blocks.end);
                if blocks.start <= read.blocks.end && end - read.blocks.start <= JOINED_BYTES
                    || end == read.blocks.end
                {
                    read.blocks.end = end;
                    read.rows.end = index + 1;
                    return;
                }
            }
            reads.push(RowRead {
                blocks,
                rows: index..index + 1,
                extent: *extent,
            });
        };
        for (index, (id, _)) in order.iter().enumerate() {
            let place = self.place(*id);
            match &self.ranges {
                None => add(index, &StoreExtent::STORE, &place),
                Some(ranges) => ranges
                    .of(place.clone())
                    .for_each(|extent| add(index, extent, &place)),
            }
        }
        let mut pieces = Vec::with_capacity(reads.len());
        for (key, read) in reads.iter().enumerate() {
            space.split(read.blocks.clone(), key, &mut pieces);
        }
        (reads, pieces)
    }
}

/// Blocks that are read, and the rows that lie in them.
struct RowRead {
    blocks: Range<u64>,
    /// Range of the sorted rows.
    rows: Range<usize>,
    /// Extent of the table that the read is for; its blocks may begin before it and end after it.
    extent: StoreExtent,
}

/// The status of each row, and the first failure.
pub(super) struct RowOutcome {
    pub status: Vec<i32>,
    /// The first errors, each with the status that it caused.
    errors: Vec<(i32, Error)>,
    errno: Option<i32>,
}

impl RowOutcome {
    /// Creates the state before any row was moved.
    pub fn new(rows: usize) -> Self {
        Self {
            status: vec![RowStatus::NotRun.code(); rows],
            errors: Vec::new(),
            errno: None,
        }
    }

    /// Keeps `error`, if it is the first with its status, and returns the status.
    pub fn note(&mut self, error: Error) -> i32 {
        let code = status::of_error(&error);
        if let Error::File { source, .. } | Error::System { source, .. } = &error {
            self.errno = self.errno.or(source.raw_os_error());
        }
        if self.errors.iter().all(|(known, _)| *known != code) {
            self.errors.push((code, error));
        }
        code
    }

    /// Returns the report; copies every status to `status`.
    pub fn report(self, ids: RowIds<'_>, status: Option<&mut [i32]>) -> RowReport {
        let first = self.status.iter().position(|code| *code != status::OK);
        self.report_from(first, ids, status)
    }

    /// Returns the report of a call that moved no row because of an id out of range: the first one is the
    /// cause.
    pub fn refused(self, ids: RowIds<'_>, status: Option<&mut [i32]>) -> RowReport {
        let wrong = RowStatus::OutOfRange.code();
        let first = self.status.iter().position(|code| *code == wrong);
        self.report_from(first, ids, status)
    }

    fn report_from(
        mut self,
        first: Option<usize>,
        ids: RowIds<'_>,
        status: Option<&mut [i32]>,
    ) -> RowReport {
        if let Some(status) = status {
            status.copy_from_slice(&self.status);
        }
        let is_bad = |code: &&i32| **code != status::OK;
        let failed = self.status.iter().filter(is_bad).count();
        let first = first.map(|row| (row, self.status[row]));
        let first = first.map(|(row, status)| {
            let known = self.errors.iter().position(|(code, _)| *code == status);
            FailedRow {
                row,
                id: ids.get(row),
                status,
                error: known.map(|at| self.errors.swap_remove(at).1),
            }
        });
        RowReport {
            rows: ids.len(),
            failed,
            first,
            errno: self.errno,
        }
    }
}

/// A gather under way.
struct TableGather<'a> {
    table: &'a Table,
    order: &'a [(u64, usize)],
    reads: &'a [RowRead],
    /// Number of missing bytes of each row: a row is complete when all of them were read.
    left: Vec<u64>,
    out: &'a mut [u8],
    outcome: RowOutcome,
}

impl TableGather<'_> {
    /// Returns the bytes of the table that `piece` is read for.
    fn in_table(&self, piece: &MemberPiece) -> Range<u64> {
        self.reads[piece.key].extent.in_table(&piece.range())
    }

    /// Returns the rows that need bytes of `piece`.
    fn rows_of(&self, piece: &MemberPiece) -> &[(u64, usize)] {
        let rows = &self.order[self.reads[piece.key].rows.clone()];
        let range = self.in_table(piece);
        let first = rows.partition_point(|(id, _)| self.table.place(*id).end <= range.start);
        let rows = &rows[first..];
        let end = rows.partition_point(|(id, _)| self.table.place(*id).start < range.end);
        &rows[..end]
    }
}

impl PieceHandler for TableGather<'_> {
    fn done(&mut self, piece: &MemberPiece, bytes: &[u8]) {
        let (range, extent) = (self.in_table(piece), self.reads[piece.key].extent);
        let of_read = self.reads[piece.key].rows.clone();
        let needed = self.rows_of(piece).len();
        let skipped = self.order[of_read.clone()]
            .partition_point(|(id, _)| self.table.place(*id).end <= range.start);
        let first = of_read.start + skipped;
        let row_bytes = self.table.row_bytes as usize;
        for (id, row) in &self.order[first..first + needed] {
            let place = self.table.place(*id);
            let part = common(&range, &place);
            let to = &mut self.out[row * row_bytes..][..row_bytes];
            let from = within(&extent.in_store(&part), &piece.range());
            to[within(&part, &place)].copy_from_slice(&bytes[from]);
            self.left[*row] -= part.end - part.start;
            if self.left[*row] == 0 {
                self.outcome.status[*row] = status::OK;
            }
        }
    }

    fn failed(&mut self, piece: &MemberPiece, error: Error) -> FailureReaction {
        let unit = self.table.space.read_bytes;
        let rows = self.rows_of(piece);
        let several = rows.first().map(|one| one.0) != rows.last().map(|one| one.0);
        // A status, or an error of the file, may be of one block only. A time-out has cost its time
        // already. Only the former two are tried again block by block.
        let is_local = matches!(error, Error::Command { .. } | Error::File { .. });
        if several && piece.bytes > unit && is_local {
            return FailureReaction::Split(unit);
        }
        let rows: Vec<usize> = rows.iter().map(|(_, row)| *row).collect();
        let code = self.outcome.note(error);
        for row in rows {
            self.outcome.status[row] = code;
        }
        FailureReaction::GoOn
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
