use super::*;

fn table(first_byte: u64, row_bytes: u32, block_shift: u32) -> GatherLaunch {
    GatherLaunch {
        first_byte,
        rows: 1000,
        row_bytes,
        block_shift,
        ..GatherLaunch::default()
    }
}

#[test]
fn rows_are_found_at_any_alignment() {
    let rows = table(96, 512, 12);
    let at = |id| rows.place(id).unwrap();
    assert_eq!((at(0).byte, at(0).block, at(0).blocks), (96, 0, 1));
    assert_eq!((at(7).byte, at(7).block, at(7).blocks), (3680, 0, 2));
    assert_eq!((at(8).byte, at(8).block, at(8).blocks), (4192, 1, 1));
    assert_eq!(rows.place(-1), None);
    assert_eq!(rows.place(1000), None);
    assert!(rows.place(999).is_some());
}

#[test]
fn a_slot_holds_every_row_and_not_a_block_more_than_one_of_them_needs() {
    for (first_byte, row_bytes) in [
        (0, 4096),
        (0, 512),
        (96, 512),
        (1, 1),
        (4095, 4097),
        (8, 1536),
        (0, 16),
        (152, 65536),
    ] {
        for block_shift in [9, 12] {
            let rows = table(first_byte, row_bytes, block_shift);
            let slot = slot_bytes(first_byte, row_bytes, block_shift);
            let most = (0..1000).map(|id| rows.place(id).unwrap().blocks).max();
            let most = u64::from(most.unwrap()) << block_shift;
            assert!(most <= slot, "{first_byte} {row_bytes} {block_shift}");
            if row_bytes != 65536 {
                assert_eq!(most, slot, "{first_byte} {row_bytes} {block_shift}");
            }
        }
    }
}

#[test]
fn pieces_cover_each_range_once_and_end_at_borders_of_the_drive() {
    let lengths = [1, 4096, 5, 70_000, 4095, 8192, 1 << 20];
    let mut all = RangesLaunch {
        gather: GatherLaunch::default(),
        split: RangeSplit {
            range_count: lengths.len() as u32,
            piece_shift: 12,
        },
        ranges: [RangeTarget::default(); RANGES],
    };
    let mut first = 0;
    for (range, bytes) in all.ranges.iter_mut().zip(lengths) {
        let byte = bytes * 7 % 9000;
        let to = 1 << 40 | bytes << 20;
        *range = RangeTarget {
            byte,
            bytes,
            to,
            first,
        };
        first += range.pieces(12);
    }
    let mut index = 0;
    for (number, range) in all.ranges[..lengths.len()].iter().enumerate() {
        let mut at = 0;
        while at < range.bytes {
            let piece = all.piece(index);
            assert_eq!(piece.range as usize, number);
            assert_eq!((piece.byte, piece.to), (range.byte + at, range.to + at));
            at += u64::from(piece.bytes);
            let ends = piece.byte + u64::from(piece.bytes);
            assert!(piece.bytes > 0 && (ends.is_multiple_of(4096) || at == range.bytes));
            assert_eq!(piece.byte / 4096, (ends - 1) / 4096);
            index += 1;
        }
        assert_eq!(at, range.bytes);
    }
    assert_eq!(index, first);
}

/// The words of this list claim more bytes and pieces than there are: no piece leaves its range, and pieces past the
/// last have no bytes.
#[test]
fn pieces_of_a_list_that_cannot_be_lie_inside_their_ranges() {
    let ranges = [
        [0u64, 16384, 1 << 40, 0],
        [65_536, 16384, 2 << 40, 4],
        [u64::MAX - 5000, u64::MAX, 3 << 40, 8],
        [7, 0, 4 << 40, u64::MAX],
    ];
    let words = ranges.concat();
    for count in 1..=ranges.len() as u32 {
        let split = RangeSplit {
            range_count: count,
            piece_shift: 12,
        };
        for index in (0..20).chain([u64::MAX - 1, u64::MAX, 1 << 52, (1 << 52) - 1]) {
            let piece = split.piece(index, count, |at| words[at as usize / 8]);
            let [byte, bytes, to, _] = ranges[piece.range as usize];
            if piece.bytes == 0 {
                continue;
            }
            assert!(piece.bytes <= 4096, "{index} of {count}: {piece:?}");
            let before = piece.byte - byte;
            assert!(before.checked_add(piece.bytes.into()).unwrap() <= bytes);
            assert_eq!(piece.to, to + before);
        }
        let past = split.piece(4, 1, |at| words[at as usize / 8]);
        assert_eq!(past.bytes, 0, "a piece past the last range");
    }
    let listed = ListedLaunch {
        gather: GatherLaunch {
            count: 8,
            ..GatherLaunch::default()
        },
        most_ranges: 2,
        ..ListedLaunch::default()
    };
    for (range_count, pieces, is_taken) in [
        (2, 8, true),
        (0, 0, true),
        (3, 8, false),
        (2, 9, false),
        (1 << 32, 1, false),
    ] {
        let head = ListHead {
            range_count,
            pieces,
        };
        assert_eq!(listed.takes(&head), is_taken, "{head:?}");
    }
}

#[test]
fn the_first_row_that_failed_is_the_worst() {
    assert!(worst(3, None, code::GONE) > worst(4, Some(31), code::TIMED_OUT));
    for (row, member, code) in [
        (3, None, code::GONE),
        (1 << 38, Some(0), 0x281),
        (0, Some(31), code::NOT_RUN),
    ] {
        assert_eq!(of_worst(worst(row, member, code)), (row, member, code));
    }
    assert_ne!(worst(0, None, -1), 0);
}
