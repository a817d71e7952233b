//! The index as the journal on the drive says it: the newest checkpoint that is whole, and the log behind it.

use crate::area::{LOG_BLOCKS_AT_ONCE, StoreArea, is_of_place};
use crate::error::{KvError, Result};
use crate::format::{
    CHECKPOINT_ENTRY_BYTES, CheckpointHeader, LogBlock, RecordKind, StructureBlock, UNIT, crc_of,
    read_entry,
};
use crate::index::PageIndex;
use crate::journal::{MOST_EPOCH, PageJournal};
use crate::medium::BlockMedium;

/// More checkpoints, or blocks of the log, than any store writes.
const MOST_SEQUENCE: u64 = 1 << 62;

/// An account of what opening a store found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Pages that are found.
    pub pages: u64,
    /// Blocks of the log behind the checkpoint.
    pub log_blocks: u64,
    /// True if the newest checkpoint was damaged: the one before it was used, with its log.
    pub fell_back: bool,
    /// Blocks of the log that are whole and lie behind one that is not: what they committed is not found.
    pub lost_blocks: u64,
}

/// Reads the journal of an area.
///
/// # Errors
/// [`KvError::Damaged`] if no checkpoint is whole, or a record contradicts those before it; [`KvError::Drive`] if the
/// drive answers nothing at all, or no checkpoint is whole, and one cannot be read.
pub(crate) fn recover<M: BlockMedium>(
    area: &StoreArea<M>,
) -> Result<(PageIndex, PageJournal, RecoveryReport)> {
    let mut headers = Vec::new();
    let places = [0, 1].map(|half| area.layout.checkpoint_at(half));
    // A checkpoint that the drive could not read may be whole.
    let mut unreadable = None;
    for (half, block) in area
        .try_blocks(places, "a checkpoint")?
        .into_iter()
        .enumerate()
    {
        let header = match block {
            Ok(block) => CheckpointHeader::parse(&block),
            Err(error) => {
                unreadable = Some(error);
                None
            }
        };
        headers.extend(
            header
                .filter(|header| header.instance == area.instance && is_countable(header))
                .map(|header| (half, header)),
        );
    }
    // A header that is lost completely is not missed here: its half is the one that was not in use, or the log of
    // the other half leads to it.
    headers.sort_by_key(|(_, header)| std::cmp::Reverse(header.sequence));
    let newest = headers.first().map_or(0, |(_, header)| header.sequence);
    let mut cause = "no checkpoint of this store is there";
    for (half, header) in headers {
        let mut index = match read_checkpoint(area, half, &header) {
            Ok(Ok(index)) => index,
            Ok(Err(rule)) => {
                cause = rule;
                continue;
            }
            Err(KvError::Drive { action, source }) if is_of_place(&source) => {
                unreadable = Some(KvError::Drive { action, source });
                continue;
            }
            Err(error) => return Err(error),
        };
        let mut journal = PageJournal {
            half,
            next: 0,
            sequence: header.log_sequence,
            previous: header.log_previous,
            checkpoint: newest,
            epoch: header.epoch,
            is_broken: header.sequence != newest,
        };
        let mut report = RecoveryReport {
            fell_back: journal.is_broken,
            ..RecoveryReport::default()
        };
        replay(area, half, &mut index, &mut journal, &mut report)?;
        let end = journal.next;
        journal.next = 0;
        // The log of a damaged checkpoint continues at the end of this one.
        replay(area, 1 - half, &mut index, &mut journal, &mut report)?;
        if journal.next > 0 {
            journal.is_broken = true;
            report.fell_back = true;
        } else {
            report.lost_blocks = lost_blocks(area, half, end, &journal)?;
        }
        journal.next = end;
        index.restored();
        report.pages = index.pages() as u64;
        return Ok((index, journal, report));
    }
    let at = area.offset + area.layout.checkpoint_at(0);
    Err(unreadable.unwrap_or_else(|| KvError::damaged("the journal", at, cause)))
}

/// True if numbers that follow those of a checkpoint do not overflow.
fn is_countable(header: &CheckpointHeader) -> bool {
    header.sequence < MOST_SEQUENCE && header.log_sequence < MOST_SEQUENCE
}

/// Reads the entries of a checkpoint; the inner error is the rule that they break.
fn read_checkpoint<M: BlockMedium>(
    area: &StoreArea<M>,
    half: usize,
    header: &CheckpointHeader,
) -> Result<std::result::Result<PageIndex, &'static str>> {
    if header.count > area.layout.slots {
        return Ok(Err("a checkpoint has more entries than there are slots"));
    }
    if !(1..=MOST_EPOCH).contains(&header.epoch) {
        return Ok(Err("a checkpoint has an opening out of range"));
    }
    let mut bytes = vec![0; header.count as usize * CHECKPOINT_ENTRY_BYTES];
    let at = area.layout.checkpoint_at(half) + UNIT;
    area.read(at, &mut bytes, "the entries of a checkpoint")?;
    if crc_of([&bytes[..]]) != header.entries_checksum {
        return Ok(Err(
            "the entries of a checkpoint do not have the checksum that it names",
        ));
    }
    let mut index = PageIndex::new(area.layout.slots, header.count as usize);
    for entry in bytes.as_chunks::<CHECKPOINT_ENTRY_BYTES>().0 {
        if let Err(rule) = index.restore(&read_entry(entry), area.layout.page_bytes) {
            return Ok(Err(rule));
        }
    }
    Ok(Ok(index))
}

/// Applies the blocks of the log of `half` that continue `journal`, and moves its end behind them.
fn replay<M: BlockMedium>(
    area: &StoreArea<M>,
    half: usize,
    index: &mut PageIndex,
    journal: &mut PageJournal,
    report: &mut RecoveryReport,
) -> Result<()> {
    while journal.next < area.layout.log_blocks {
        let count = LOG_BLOCKS_AT_ONCE.min(area.layout.log_blocks - journal.next);
        let blocks = area.read_log(half, journal.next, count)?;
        let is_readable = blocks.len() == count as usize;
        for block in blocks {
            let parsed = LogBlock::parse(&block);
            let Some((block, sum)) = parsed.filter(|(block, _)| continues(area, journal, block))
            else {
                return Ok(());
            };
            let at = area.offset + area.layout.log_at(half, journal.next);
            apply(area, index, &block).map_err(|rule| KvError::damaged("the log", at, rule))?;
            journal.next += 1;
            journal.sequence += 1;
            journal.previous = sum;
            journal.epoch = block.epoch;
            report.log_blocks += 1;
        }
        if !is_readable {
            return Ok(());
        }
    }
    Ok(())
}

/// True if a block is the next one of the log. Without the checksum of the block before, a block of an append that
/// failed could follow a new one that was written in front of it.
fn continues<M>(area: &StoreArea<M>, journal: &PageJournal, block: &LogBlock) -> bool {
    let is_of_epoch = match block.opens {
        true => block.epoch > journal.epoch && block.epoch <= MOST_EPOCH,
        false => block.epoch == journal.epoch,
    };
    block.instance == area.instance
        && block.sequence == journal.sequence
        && block.previous == journal.previous
        && is_of_epoch
}

fn apply<M>(
    area: &StoreArea<M>,
    index: &mut PageIndex,
    block: &LogBlock,
) -> std::result::Result<(), &'static str> {
    for record in &block.records {
        match record.kind {
            RecordKind::Commit => index.restore(&record.page, area.layout.page_bytes)?,
            RecordKind::Free => index.restore_free(&record.page)?,
        }
    }
    Ok(())
}

/// Counts the blocks of this log behind its end that belong to it: the block at the end was damaged later.
fn lost_blocks<M: BlockMedium>(
    area: &StoreArea<M>,
    half: usize,
    end: u32,
    journal: &PageJournal,
) -> Result<u64> {
    let first = end + 1;
    if first >= area.layout.log_blocks {
        return Ok(0);
    }
    let count = LOG_BLOCKS_AT_ONCE.min(area.layout.log_blocks - first);
    let blocks = area.read_log(half, first, count)?;
    let expected = journal.sequence + 1..;
    let is_next = |(block, sequence): &(StructureBlock, u64)| {
        LogBlock::parse(block).is_some_and(|(block, _)| {
            // Those of an earlier opening were found to be lost before.
            block.instance == area.instance
                && block.sequence == *sequence
                && block.epoch >= journal.epoch
        })
    };
    Ok(blocks.into_iter().zip(expected).take_while(is_next).count() as u64)
}
