//! Tables whose rows lie in several ranges of a namespace, one after the other: tensors of several files, and files of
//! several extents.

use crate::rows::{GatherLaunch, RowBlocks};
use core::mem::offset_of;

/// A range of a table's bytes that are contiguous in the namespace. It ends where the next one begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct TableExtent {
    /// First byte of the range, counted from the first byte of row 0, without the bytes between the ranges.
    pub first: u64,
    /// First byte of the range in the namespace.
    pub byte: u64,
}

/// Words of a map from the rows of a table to ranges of the namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ExtentMap {
    /// Address of [`TableExtent`]s in GPU memory, in the order of the table. They hold all bytes of all rows.
    pub extents: u64,
    /// Number of extents, at least 1.
    pub count: u32,
    /// 0.
    pub reserved: u32,
}

/// Parameters of a launch that gathers rows of a table in several ranges: of the entry points whose names end with
/// `_mapped`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct MappedLaunch<T> {
    /// Parameters of the same launch for a table in one range. The first byte of its gather is not used.
    pub launch: T,
    /// The ranges.
    pub map: ExtentMap,
}

/// Bytes of a row that are contiguous in the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSpan {
    /// The blocks that hold the bytes.
    pub place: RowBlocks,
    /// Number of bytes, at least 1.
    pub bytes: u32,
}

impl ExtentMap {
    /// Returns the part of row `id` that begins at byte `done` of the row, if the table has the row; `word` returns the
    /// `u64` at a byte offset in the extents. `done` is below the bytes of a row.
    #[inline(always)]
    pub fn part(
        &self,
        rows: &GatherLaunch,
        (id, done): (i64, u32),
        word: impl Fn(u64) -> u64,
    ) -> Option<RowSpan> {
        if id < 0 || id as u64 >= rows.rows {
            return None;
        }
        let of = |extent: u32, field: usize| {
            word(u64::from(extent) * size_of::<TableExtent>() as u64 + field as u64)
        };
        let first = |extent| of(extent, offset_of!(TableExtent, first));
        let row = (id as u64).wrapping_mul(u64::from(rows.row_bytes));
        let begin = row.wrapping_add(u64::from(done));
        // A binary search for the last extent that begins at the byte or before it. The first one begins at 0.
        let mut at = 0;
        let mut step = self.count.next_power_of_two() / 2;
        while step != 0 {
            let next = at + step;
            if next < self.count && first(next) <= begin {
                at = next;
            }
            step /= 2;
        }
        let next = at + 1;
        let end = match next < self.count {
            true => first(next),
            false => u64::MAX,
        };
        let left = u64::from(rows.row_bytes - done);
        let bytes = left.min(end.wrapping_sub(begin)) as u32;
        let byte =
            of(at, offset_of!(TableExtent, byte)).wrapping_add(begin.wrapping_sub(first(at)));
        let place = rows.blocks_of(byte, bytes);
        Some(RowSpan { place, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Extents of three tensors of two rows of 100 bytes; the second one is cut at byte 250 of the table.
    const EXTENTS: [TableExtent; 4] = [
        TableExtent {
            first: 0,
            byte: 4000,
        },
        TableExtent {
            first: 200,
            byte: 974,
        },
        TableExtent {
            first: 250,
            byte: 1 << 33,
        },
        TableExtent {
            first: 400,
            byte: 8,
        },
    ];

    fn rows() -> GatherLaunch {
        GatherLaunch {
            rows: 6,
            row_bytes: 100,
            block_shift: 9,
            ..GatherLaunch::default()
        }
    }

    fn part_among(
        extents: &[TableExtent],
        rows: &GatherLaunch,
        at: (i64, u32),
    ) -> Option<(u64, u32)> {
        let map = ExtentMap {
            count: extents.len() as u32,
            ..ExtentMap::default()
        };
        let word = |byte: u64| {
            let extent = extents[byte as usize / size_of::<TableExtent>()];
            match byte % 16 {
                0 => extent.first,
                _ => extent.byte,
            }
        };
        let part = map.part(rows, at, word)?;
        assert_eq!(part.place, rows.blocks_of(part.place.byte, part.bytes));
        Some((part.place.byte, part.bytes))
    }

    #[test]
    fn rows_lie_in_their_extents_and_some_in_two() {
        let part = |id, done| part_among(&EXTENTS, &rows(), (id, done));
        assert_eq!(part(0, 0), Some((4000, 100)));
        assert_eq!(part(1, 0), Some((4100, 100)));
        assert_eq!(part(2, 0), Some((974, 50)));
        assert_eq!(part(2, 50), Some((1 << 33, 50)));
        assert_eq!(part(3, 0), Some(((1 << 33) + 50, 100)));
        assert_eq!(part(4, 0), Some((8, 100)));
        assert_eq!(part(5, 99), Some((207, 1)));
        assert_eq!(
            (part(6, 0), part(-1, 0), part(i64::MIN, 0)),
            (None, None, None)
        );
    }

    /// A row may be longer than several extents.
    #[test]
    fn each_number_of_extents_is_searched_to_its_last_one() {
        for count in 1..70u64 {
            let extents: Vec<TableExtent> = (0..count)
                .map(|number| TableExtent {
                    first: number * 10,
                    byte: (count - number) * 1000,
                })
                .collect();
            let launch = GatherLaunch {
                rows: 1,
                row_bytes: count as u32 * 10,
                ..rows()
            };
            for number in 0..count {
                let found = part_among(&extents, &launch, (0, number as u32 * 10 + 3));
                assert_eq!(
                    found,
                    Some(((count - number) * 1000 + 3, 7)),
                    "{number} of {count}"
                );
            }
        }
    }

    #[test]
    fn numbers_past_32_bits_keep_their_upper_halves() {
        let launch = GatherLaunch {
            rows: 3 << 32,
            row_bytes: 256,
            ..rows()
        };
        let extents = [
            TableExtent { first: 0, byte: 40 },
            TableExtent {
                first: 1 << 40,
                byte: 1 << 42,
            },
        ];
        for (id, byte) in [
            ((1 << 31) - 1, ((1 << 31) - 1) * 256 + 40),
            (1 << 31, (1 << 39) + 40),
            ((1 << 32) - 1, (1 << 40) - 256 + 40),
            (1 << 32, 1 << 42),
            ((3 << 32) - 1, (1 << 42) + (2 << 40) - 256),
        ] {
            let found = part_among(&extents, &launch, (id, 0));
            assert_eq!(found, Some((byte, 256)), "{id}");
        }
        assert_eq!(part_among(&extents, &launch, (3 << 32, 0)), None);
    }
}
