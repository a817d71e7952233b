//! Reads and writes of any range of bytes, and flushes. Whole blocks go to the device as they are; blocks at the
//! ends that a write covers in part are read, changed and written under a lock on their range.

use super::engine::{self, FailureReaction, PieceHandler};
use super::lane::LaneOperation;
use super::space::{MemberPiece, StoreSpace, common};
use nvme_driver::error::{Error, Result};
use std::ops::Range;

/// Returns the indices of `part` in memory that holds `whole`, which contains it.
pub(crate) fn within(part: &Range<u64>, whole: &Range<u64>) -> Range<usize> {
    (part.start - whole.start) as usize..(part.end - whole.start) as usize
}

/// Reads `data.len()` bytes from `offset` on.
pub(crate) fn read(space: &StoreSpace, offset: u64, data: &mut [u8]) -> Result<()> {
    let range = space.check(offset, data.len() as u64)?;
    if range.is_empty() {
        return Ok(());
    }
    let mut pieces = Vec::new();
    let blocks = space.rounded(&range, space.block_bytes);
    space.split(blocks, 0, &mut pieces);
    let mut work = ReadTransfer {
        range,
        data,
        failure: None,
    };
    engine::run(space, LaneOperation::Read, pieces, &mut work);
    work.failure.map_or(Ok(()), Err)
}

/// A read into the caller's memory.
struct ReadTransfer<'a> {
    range: Range<u64>,
    data: &'a mut [u8],
    failure: Option<Error>,
}

impl PieceHandler for ReadTransfer<'_> {
    fn done(&mut self, piece: &MemberPiece, bytes: &[u8]) {
        let part = common(&piece.range(), &self.range);
        let from = &bytes[within(&part, &piece.range())];
        self.data[within(&part, &self.range)].copy_from_slice(from);
    }

    fn failed(&mut self, _piece: &MemberPiece, error: Error) -> FailureReaction {
        self.failure.get_or_insert(error);
        FailureReaction::Stop
    }
}

/// Writes `data` from `offset` on by `op`.
pub(crate) fn write(space: &StoreSpace, offset: u64, data: &[u8], op: LaneOperation) -> Result<()> {
    let range = space.check(offset, data.len() as u64)?;
    space.check_writable()?;
    if range.is_empty() {
        return Ok(());
    }
    let blocks = space.rounded(&range, space.block_bytes);
    let _held = space.locks.hold(std::iter::once(blocks.clone()));
    let edges = edges(space, &range, &blocks)?;
    let mut pieces = Vec::new();
    space.split(blocks, 0, &mut pieces);
    let mut work = WriteTransfer {
        range,
        data,
        edges,
        failure: None,
    };
    engine::run(space, op, pieces, &mut work);
    work.failure.map_or(Ok(()), Err)
}

/// Reads the blocks at the ends of `blocks` that `range` covers in part, as they are now: position
/// and bytes.
fn edges(
    space: &StoreSpace,
    range: &Range<u64>,
    blocks: &Range<u64>,
) -> Result<Vec<(Range<u64>, Vec<u8>)>> {
    let block = u64::from(space.block_bytes);
    let mut places = Vec::new();
    if blocks.start < range.start {
        places.push(blocks.start..blocks.end.min(blocks.start + block));
    }
    // A member of a joined store may end inside a block, which is the block of another member.
    let last = (blocks.end - 1) / block * block;
    if range.end < blocks.end && places.first().is_none_or(|first| first.start != last) {
        places.push(last..blocks.end);
    }
    let read_one = |place: Range<u64>| {
        let mut bytes = vec![0; (place.end - place.start) as usize];
        read(space, place.start, &mut bytes)?;
        Ok((place, bytes))
    };
    places.into_iter().map(read_one).collect()
}

/// A write from the caller's memory.
struct WriteTransfer<'a> {
    range: Range<u64>,
    data: &'a [u8],
    edges: Vec<(Range<u64>, Vec<u8>)>,
    failure: Option<Error>,
}

impl PieceHandler for WriteTransfer<'_> {
    fn fill(&mut self, piece: &MemberPiece, bytes: &mut [u8]) {
        let piece = piece.range();
        for (place, edge) in &self.edges {
            let part = common(&piece, place);
            if !part.is_empty() {
                bytes[within(&part, &piece)].copy_from_slice(&edge[within(&part, place)]);
            }
        }
        let part = common(&piece, &self.range);
        if !part.is_empty() {
            let from = &self.data[within(&part, &self.range)];
            bytes[within(&part, &piece)].copy_from_slice(from);
        }
    }

    fn done(&mut self, _piece: &MemberPiece, _bytes: &[u8]) {}

    fn failed(&mut self, _piece: &MemberPiece, error: Error) -> FailureReaction {
        self.failure.get_or_insert(error);
        FailureReaction::Stop
    }
}

/// Flushes every member.
pub(crate) fn flush(space: &StoreSpace) -> Result<()> {
    let piece = |member| MemberPiece {
        member,
        offset: 0,
        at: 0,
        bytes: 0,
        key: member,
    };
    let pieces = (0..space.members.len()).map(piece).collect();
    let mut work = FlushTransfer(None);
    engine::run(space, LaneOperation::Flush, pieces, &mut work);
    work.0.map_or(Ok(()), Err)
}

struct FlushTransfer(Option<Error>);

impl PieceHandler for FlushTransfer {
    fn done(&mut self, _piece: &MemberPiece, _bytes: &[u8]) {}

    fn failed(&mut self, _piece: &MemberPiece, error: Error) -> FailureReaction {
        self.0.get_or_insert(error);
        FailureReaction::GoOn
    }
}
