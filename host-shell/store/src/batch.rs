//! Many reads and writes of one call: the commands of all reads are in flight together, then those of the writes.
//! Writes that overlap are sent one after the other, since a drive may execute commands in flight in any order.

use super::engine::{self, FailureReaction, PieceHandler};
use super::lane::LaneOperation;
use super::space::{MemberPiece, StoreSpace, common};
use super::transfer::{self, within};
use nvme_driver::error::{Error, Result};
use std::ops::Range;

/// One read or write of [`Store::transfer_all`](super::Store::transfer_all).
#[derive(Debug)]
pub enum StoreTransfer<'a> {
    /// Reads bytes from this offset into the slice.
    Read(u64, &'a mut [u8]),
    /// Writes these bytes from this place on.
    Write(u64, &'a [u8]),
}

impl StoreTransfer<'_> {
    fn range(&self, space: &StoreSpace) -> Result<Range<u64>> {
        match self {
            Self::Read(offset, data) => space.check(*offset, data.len() as u64),
            Self::Write(offset, data) => {
                let range = space.check(*offset, data.len() as u64)?;
                space.check_writable().map(|()| range)
            }
        }
    }
}

/// Executes all transfers, and returns the outcome of each.
pub(crate) fn run(space: &StoreSpace, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>> {
    let mut batch = TransferBatch {
        ranges: Vec::with_capacity(transfers.len()),
        results: Vec::with_capacity(transfers.len()),
        transfers,
    };
    for one in &*batch.transfers {
        let checked = one.range(space);
        let range = checked.as_ref().map_or(0..0, Clone::clone);
        batch.ranges.push(range);
        batch.results.push(checked.map(drop));
    }
    let (mut reads, mut whole, mut partial) = (Vec::new(), Vec::new(), Vec::new());
    for (key, range) in batch.ranges.iter().enumerate() {
        let block = u64::from(space.block_bytes);
        match &batch.transfers[key] {
            _ if range.is_empty() => {}
            StoreTransfer::Read(..) => reads.push(key),
            StoreTransfer::Write(..) if (range.start | range.end) & (block - 1) == 0 => {
                whole.push(key)
            }
            StoreTransfer::Write(..) => partial.push(key),
        }
    }
    let pieces = |keys: &[usize], ranges: &[Range<u64>]| {
        let mut pieces = Vec::new();
        for &key in keys {
            let blocks = space.rounded(&ranges[key], space.block_bytes);
            space.split(blocks, key, &mut pieces);
        }
        pieces
    };
    if !reads.is_empty() {
        let pieces = pieces(&reads, &batch.ranges);
        engine::run(space, LaneOperation::Read, pieces, &mut batch);
    }
    whole.sort_unstable_by_key(|&key| batch.ranges[key].start);
    let are_apart = |pair: &[usize]| batch.ranges[pair[0]].end <= batch.ranges[pair[1]].start;
    if whole.windows(2).all(are_apart) && !whole.is_empty() {
        let _held = space
            .locks
            .hold(whole.iter().map(|&key| batch.ranges[key].clone()));
        let pieces = pieces(&whole, &batch.ranges);
        engine::run(space, LaneOperation::Write, pieces, &mut batch);
    } else {
        partial.append(&mut whole);
    }
    // They read the blocks that they change, or write over each other.
    partial.sort_unstable();
    for key in partial {
        if let StoreTransfer::Write(offset, data) = &batch.transfers[key] {
            batch.results[key] = transfer::write(space, *offset, data, LaneOperation::Write);
        }
    }
    batch.results
}

struct TransferBatch<'a, 'd> {
    transfers: &'a mut [StoreTransfer<'d>],
    ranges: Vec<Range<u64>>,
    results: Vec<Result<()>>,
}

impl PieceHandler for TransferBatch<'_, '_> {
    fn fill(&mut self, piece: &MemberPiece, bytes: &mut [u8]) {
        if let StoreTransfer::Write(_, data) = &self.transfers[piece.key] {
            bytes.copy_from_slice(&data[within(&piece.range(), &self.ranges[piece.key])]);
        }
    }

    fn done(&mut self, piece: &MemberPiece, bytes: &[u8]) {
        if let StoreTransfer::Read(_, data) = &mut self.transfers[piece.key] {
            let range = &self.ranges[piece.key];
            let part = common(&piece.range(), range);
            data[within(&part, range)].copy_from_slice(&bytes[within(&part, &piece.range())]);
        }
    }

    fn failed(&mut self, piece: &MemberPiece, error: Error) -> FailureReaction {
        let result = &mut self.results[piece.key];
        if result.is_ok() {
            *result = Err(error);
        }
        FailureReaction::GoOn
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::super::testing::{every_kind, of_sim};
    use super::*;

    #[test]
    fn a_batch_reads_and_writes_what_single_calls_would() {
        for (name, store, _file) in every_kind() {
            let block = u64::from(store.block_bytes()).max(512);
            let (a, b, c) = (vec![1; block as usize], vec![2; 700], vec![3; 70_000]);
            let mut nothing = [];
            let mut writes = [
                StoreTransfer::Write(0, &a),
                StoreTransfer::Write(4 * block + 5, &b),
                StoreTransfer::Write(128 * block, &a),
                StoreTransfer::Write(200_003, &c),
                StoreTransfer::Read(0, &mut nothing),
            ];
            let results = store.transfer_all(&mut writes);
            assert!(results.iter().all(Result::is_ok), "{name}: {results:?}");
            let (mut d, mut e) = (vec![0; 700], vec![0; 70_002]);
            let mut f = vec![9; 4];
            let past = store.len() - 1;
            let mut reads = [
                StoreTransfer::Read(4 * block + 5, &mut d),
                StoreTransfer::Read(past, &mut f),
                StoreTransfer::Read(200_002, &mut e),
            ];
            let results = store.transfer_all(&mut reads);
            assert!(matches!(&results[1], Err(Error::Usage { .. })), "{name}");
            assert!(results[0].is_ok() && results[2].is_ok());
            assert!(d == b && e[1..70_001] == c && e[0] == 0 && e[70_001] == 0);
            assert_eq!(f, [9; 4]);
            let mut g = vec![0; 2 * block as usize];
            store.read_at(128 * block, &mut g).unwrap();
            assert!(g[..block as usize] == a && g[block as usize..].iter().all(|&one| one == 0));
        }
    }

    #[test]
    fn writes_over_each_other_leave_one_of_them() {
        for (name, store, _file) in every_kind() {
            let block = u64::from(store.block_bytes()).max(512) as usize;
            let (a, b) = (vec![1; 3 * block], vec![2; 2 * block]);
            let mut writes = [
                StoreTransfer::Write(0, &a),
                StoreTransfer::Write(block as u64, &b),
            ];
            let results = store.transfer_all(&mut writes);
            assert!(results.iter().all(Result::is_ok));
            let mut all = vec![0; 3 * block];
            store.read_at(0, &mut all).unwrap();
            assert!(all[..block] == a[..block] && all[block..] == b, "{name}");
        }
    }

    /// A controller may execute commands in flight in any order, so overlapping writes are sent in sequence.
    #[test]
    fn writes_over_each_other_are_not_in_flight_together() {
        let store = of_sim("size=4MiB&block=512&queues=3");
        let (a, b, c) = (vec![1; 3 * 512], vec![2; 2 * 512], vec![3; 512]);
        let passes = |writes: &mut [StoreTransfer<'_>]| {
            let before = store.space.writes();
            let results = store.transfer_all(writes);
            assert!(results.iter().all(Result::is_ok));
            store.space.writes() - before
        };
        let apart = &mut [StoreTransfer::Write(0, &a), StoreTransfer::Write(2048, &b)];
        assert_eq!(passes(apart), 1);
        for (first, second, third) in [(0, 512, 4096), (512, 0, 1024), (0, 0, 0), (4096, 0, 512)] {
            let writes = &mut [
                StoreTransfer::Write(first, &a),
                StoreTransfer::Write(second, &b),
                StoreTransfer::Write(third, &c),
            ];
            assert_eq!(passes(writes), 3, "{first} {second} {third}");
            let mut all = vec![0; 6144];
            store.read_at(0, &mut all).unwrap();
            assert!(all[third as usize..][..512] == c, "the last one wins");
        }
    }

    #[test]
    fn an_entry_that_fails_spares_the_others() {
        let store = of_sim("size=4MiB&block=512&queues=1&fault=status:0x281@op=read,nth=1");
        let (mut a, mut b) = (vec![0; 512], vec![0; 512]);
        let mut reads = [
            StoreTransfer::Read(8 * 512, &mut a),
            StoreTransfer::Read(9 * 512, &mut b),
        ];
        let results = store.transfer_all(&mut reads);
        assert!(
            matches!(&results[0], Err(Error::Command { .. })),
            "{results:?}"
        );
        assert!(results[1].is_ok());
    }
}
