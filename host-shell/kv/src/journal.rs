//! The journal: a log of changes of the index, and two checkpoints that take turns.
//!
//! Each half of the journal is a checkpoint with a log behind it. The log of the half in use grows until it is full;
//! then a checkpoint is written to the other half, whose log begins empty. The half in use stays as it is until that
//! checkpoint is durable, so that there is a whole one at every moment.

use crate::area::{LOG_BLOCKS_AT_ONCE, StoreArea};
use crate::error::{KvError, Result};
use crate::format::{
    self, CheckpointHeader, InstanceId, LogBlock, LogRecord, PageRecord, RECORDS_OF_BLOCK,
    RecordKind, UNIT,
};
use crate::index::PageIndex;
use crate::medium::BlockMedium;
use nvme_store::StoreTransfer;

/// Bytes of entries that are written with one call.
const CHUNK: usize = 4 << 20;
/// The most openings of a store: their number is in 24 bits of each generation.
pub(crate) const MOST_EPOCH: u32 = (1 << 24) - 1;

/// The end of the log, where records are appended.
#[derive(Debug)]
pub(crate) struct PageJournal {
    /// The half whose checkpoint is valid and whose log is in use.
    pub half: usize,
    /// Next block of the log.
    pub next: u32,
    /// Number of that block.
    pub sequence: u64,
    /// Checksum of the block before.
    pub previous: u64,
    /// Number of the last checkpoint that was begun.
    pub checkpoint: u64,
    /// Number of this opening.
    pub epoch: u32,
    /// Set when the end of the log on the drive is not known: a checkpoint has to be next.
    pub is_broken: bool,
}

impl PageJournal {
    /// Returns the journal of a store that is being formatted: a checkpoint is next.
    pub fn fresh() -> Self {
        Self {
            half: 1,
            next: 0,
            sequence: 1,
            previous: 0,
            checkpoint: 0,
            epoch: 1,
            is_broken: true,
        }
    }

    /// Begins a new opening, and makes that durable: an owner before this one can change nothing any more.
    pub fn open<M: BlockMedium>(&mut self, area: &StoreArea<M>, index: &PageIndex) -> Result<()> {
        if self.epoch >= MOST_EPOCH {
            return Err(KvError::usage(
                format!("the page store was opened {MOST_EPOCH} times, which is the limit"),
                "format it: the pages are lost then",
            ));
        }
        self.epoch += 1;
        if self.is_broken {
            // The checkpoint before this one is old, or damaged: two new ones stand for each other again.
            self.write_checkpoint(area, &index.snapshot())?;
            return self.write_checkpoint(area, &index.snapshot());
        }
        match self.next >= area.layout.log_blocks {
            true => self.write_checkpoint(area, &index.snapshot()),
            false => self.write(area, &[], true),
        }
    }

    /// True if `records` records can be appended; otherwise a checkpoint has to be first.
    pub fn has_room<M>(&self, area: &StoreArea<M>, records: usize) -> bool {
        let room = (area.layout.log_blocks - self.next) as usize;
        !self.is_broken && records.div_ceil(RECORDS_OF_BLOCK) <= room
    }

    /// Appends what was freed and then `commits`, for which there is room; all of it is durable when this returns.
    ///
    /// After an error none of `commits` counts; some may still be found after a crash, whole as they are.
    pub fn append<M: BlockMedium>(
        &mut self,
        area: &StoreArea<M>,
        freed: &[PageRecord],
        commits: &[PageRecord],
    ) -> Result<()> {
        let of = |kind| move |page: &PageRecord| LogRecord { kind, page: *page };
        let freed = freed.iter().map(of(RecordKind::Free));
        let records: Vec<_> = freed
            .chain(commits.iter().map(of(RecordKind::Commit)))
            .collect();
        match records.is_empty() {
            true => Ok(()),
            false => self.write(area, &records, false),
        }
    }

    /// Writes the blocks of `records`, at least one, at the end of the log.
    fn write<M: BlockMedium>(
        &mut self,
        area: &StoreArea<M>,
        records: &[LogRecord],
        opens: bool,
    ) -> Result<()> {
        let at = area.layout.log_at(self.half, self.next);
        // Set until the write has ended well: a part of it may be on the drive, now or later.
        self.is_broken = true;
        let [first, second, there] = area.read_blocks([0, UNIT, at], "the end of the log")?;
        area.check_instance([first.as_ref(), second.as_ref()], self.epoch)?;
        let there = there.as_ref().and_then(LogBlock::parse);
        self.check_owner(area, there.map(|(block, _)| (block.instance, block.epoch)))?;
        let (mut bytes, mut previous, mut sequence) = (Vec::new(), self.previous, self.sequence);
        let chunks = records.chunks(RECORDS_OF_BLOCK);
        let empty: &[LogRecord] = &[];
        for records in chunks.chain(opens.then_some(empty)) {
            let block = LogBlock {
                instance: area.instance,
                sequence,
                previous,
                epoch: self.epoch,
                opens,
                records: records.to_vec(),
            };
            let block = block.to_block();
            previous = format::sealed(&block).unwrap_or(previous);
            sequence += 1;
            bytes.extend_from_slice(&block);
        }
        area.write_durable(at, &bytes, "the log")?;
        self.next += (sequence - self.sequence) as u32;
        (self.sequence, self.previous) = (sequence, previous);
        self.is_broken = false;
        Ok(())
    }

    /// Fails if a later opening has written to the log behind the end that this one knows.
    fn check_log<M: BlockMedium>(&self, area: &StoreArea<M>) -> Result<()> {
        let mut next = self.next;
        while next < area.layout.log_blocks {
            let count = LOG_BLOCKS_AT_ONCE.min(area.layout.log_blocks - next);
            for block in area.read_log(self.half, next, count)? {
                let block = LogBlock::parse(&block);
                self.check_owner(area, block.map(|(block, _)| (block.instance, block.epoch)))?;
            }
            next += count;
        }
        Ok(())
    }

    /// Fails if a structure that this opening is about to write over is of a later one.
    fn check_owner<M: BlockMedium>(
        &self,
        area: &StoreArea<M>,
        found: Option<(InstanceId, u32)>,
    ) -> Result<()> {
        match found {
            Some((instance, epoch)) if instance == area.instance && epoch > self.epoch => {
                Err(KvError::Superseded {
                    own: self.epoch,
                    by: Some(epoch),
                })
            }
            _ => Ok(()),
        }
    }

    /// Writes a checkpoint of `records` to the half that is not in use, and appends there from now on.
    pub fn write_checkpoint<M: BlockMedium>(
        &mut self,
        area: &StoreArea<M>,
        records: &[PageRecord],
    ) -> Result<()> {
        // Until it succeeds nothing may be appended: this attempt may count after a crash although it failed.
        self.is_broken = true;
        let [zero, one] = [0, 1].map(|half| area.layout.checkpoint_at(half));
        let [first, second, checkpoints @ ..] =
            area.read_blocks([0, UNIT, zero, one], "the checkpoints")?;
        area.check_instance([first.as_ref(), second.as_ref()], self.epoch)?;
        for block in checkpoints {
            let header = block.as_ref().and_then(CheckpointHeader::parse);
            self.check_owner(area, header.map(|one| (one.instance, one.epoch)))?;
        }
        self.check_log(area)?;
        let half = 1 - self.half;
        let at = area.layout.checkpoint_at(half);
        self.checkpoint += 1;
        let entries_checksum = write_entries(area, at + UNIT, records)?;
        area.flush()?;
        let header = CheckpointHeader {
            instance: area.instance,
            sequence: self.checkpoint,
            log_sequence: self.sequence,
            log_previous: self.previous,
            entries_checksum,
            epoch: self.epoch,
            count: records.len() as u32,
        };
        area.write_durable(at, &header.to_block(), "a checkpoint")?;
        (self.half, self.next) = (half, 0);
        self.is_broken = false;
        Ok(())
    }
}

/// Writes the entries of a checkpoint, and returns their checksum.
fn write_entries<M: BlockMedium>(
    area: &StoreArea<M>,
    at: u64,
    records: &[PageRecord],
) -> Result<u64> {
    let mut bytes = Vec::with_capacity(records.len() * format::CHECKPOINT_ENTRY_BYTES);
    for record in records {
        format::write_entry(record, &mut bytes);
    }
    let checksum = format::crc_of([&bytes[..]]);
    // Whole blocks need no read before the write.
    bytes.resize(bytes.len().next_multiple_of(UNIT as usize), 0);
    let mut place = area.offset + at;
    for chunk in bytes.chunks(CHUNK) {
        let written = area
            .medium
            .transfer_all(&mut [StoreTransfer::Write(place, chunk)]);
        let action = format!("writing a checkpoint at byte {place}");
        let written = written.into_iter().collect::<nvme_driver::Result<()>>();
        written.map_err(KvError::drive(action))?;
        place += chunk.len() as u64;
    }
    Ok(checksum)
}
