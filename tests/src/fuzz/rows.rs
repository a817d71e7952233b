//! Checks that rows and bytes of a store equal those of a plain array of bytes, whatever the order of the calls.

use super::Input;
use nvme_core::stripes::StripeLayout;
use nvme_driver::Error;
use nvme_gpu_kernel::rows::{
    GatherLaunch, RANGES, RangeSplit, RangeTarget, RangesLaunch, code, slot_bytes,
};
use nvme_store::{
    DuplicateIds, Format, RowElement, RowIds, RowWidening, Store, StoreOptions, Table, WideFormat,
};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

const BYTES: usize = 64 << 10;
const DEVICES: [&str; 3] = [
    "sim:mem?size=64KiB&threads=1&queues=2",
    "sim:mem?size=64KiB&block=4096&threads=1&queues=2",
    "stripe:sim:mem?size=32KiB&threads=1&queues=2|sim:mem?size=32KiB&threads=1&queues=2?stripe=4KiB",
];

/// Returns one of the stores, which all inputs share.
fn store(which: u8) -> MutexGuard<'static, Store> {
    static STORES: [OnceLock<Mutex<Store>>; 3] = [const { OnceLock::new() }; 3];
    let which = usize::from(which) % STORES.len();
    let open = || {
        let options = StoreOptions {
            queues: 1,
            ..StoreOptions::default()
        };
        Mutex::new(Store::open(DEVICES[which], &options).expect("the simulator"))
    };
    let store = STORES[which].get_or_init(open);
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A table, and the store that holds it.
struct Scene<'a> {
    store: &'a Store,
    table: Table,
    image: Vec<u8>,
}

/// Carries out the operations that `bytes` encode, on a store and on an array.
pub fn rows(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let store = store(input.byte());
    let (offset, row) = (u64::from(input.half()), u64::from(input.half() % 9000));
    let rows = u64::from(input.byte());
    let ends = offset + row * rows;
    let table = match store.table(offset, rows, row) {
        Ok(table) => table,
        Err(Error::Usage { .. }) => {
            assert!(row == 0 || ends > BYTES as u64, "{offset} {rows} {row}");
            return;
        }
        Err(other) => panic!("{other}"),
    };
    let image: Vec<u8> = (0..BYTES).map(|at| (at * 37 + at / 256) as u8).collect();
    store.write_at(0, &image).expect("a write");
    let mut scene = Scene {
        store: &store,
        table,
        image,
    };
    for _ in 0..12 {
        if input.is_empty() {
            break;
        }
        scene.step(&mut input);
    }
    let mut all = vec![0; BYTES];
    store.read_at(0, &mut all).expect("a read");
    assert_eq!(first_difference(&all, &scene.image), None);
}

fn first_difference(have: &[u8], expected: &[u8]) -> Option<usize> {
    let same = have.len() == expected.len();
    assert!(same, "{} bytes for {}", have.len(), expected.len());
    match have == expected {
        true => None,
        false => have.iter().zip(expected).position(|(a, b)| a != b),
    }
}

/// Checks that kernels read each byte of ranges once, by pieces that end at borders of the drive.
fn judge_pieces(offset: u64, length: u64) {
    let shift = 9 + (offset % 8) as u32;
    let lengths = [length, 1, length / 2 + 1].map(|bytes| bytes.max(1));
    let mut ranges = [RangeTarget::default(); RANGES];
    let mut first = 0;
    for (range, (bytes, number)) in ranges.iter_mut().zip(lengths.into_iter().zip(1..)) {
        let (byte, to) = (offset * number, number << 40);
        *range = RangeTarget {
            byte,
            bytes,
            to,
            first,
        };
        first += range.pieces(shift);
    }
    let all = RangesLaunch {
        gather: GatherLaunch::default(),
        split: RangeSplit {
            range_count: lengths.len() as u32,
            piece_shift: shift,
        },
        ranges,
    };
    let mut index = 0;
    for (range, number) in ranges.iter().zip(0..lengths.len() as u32) {
        let mut done = 0;
        while done < range.bytes {
            let piece = all.piece(index);
            assert_eq!((piece.range, piece.byte), (number, range.byte + done));
            assert_eq!(piece.to, range.to + done);
            let last = piece.byte + u64::from(piece.bytes) - 1;
            assert_eq!(piece.byte >> shift, last >> shift);
            done += u64::from(piece.bytes);
            index += 1;
        }
        assert_eq!(done, range.bytes);
    }
    assert_eq!(index, first);
}

impl Scene<'_> {
    fn step(&mut self, input: &mut Input<'_>) {
        let operation = input.byte();
        if operation % 6 >= 4 {
            return self.bytes(operation % 6 == 4, input);
        }
        let count = usize::from(input.byte() % 24);
        let ids: Vec<i64> = (0..count).map(|_| i64::from(input.byte() as i8)).collect();
        let narrow: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let asked = match operation & 0x80 {
            0 => RowIds::I64(&ids),
            _ => RowIds::I32(&narrow),
        };
        match operation % 6 {
            0 => self.gather(asked),
            1 => self.gather_as(asked, input.byte()),
            2 => self.scatter(asked, input),
            _ => self.add(asked, input),
        }
    }

    /// Returns the bytes of row `id`.
    fn place(&self, id: i64) -> Option<std::ops::Range<usize>> {
        let row = self.table.row_bytes() as usize;
        let id = usize::try_from(id).ok()?;
        if id >= self.table.rows() as usize {
            return None;
        }
        let begin = self.table.offset() as usize + id * row;
        Some(begin..begin + row)
    }

    /// Checks that kernels compute the right place of a row, and slots that hold it. Ids may be any content of GPU
    /// memory.
    fn judge_place(&self, id: i64) {
        let (first_byte, row_bytes) = (self.table.offset(), self.table.row_bytes() as u32);
        for block_shift in [9, 12] {
            let rows = GatherLaunch {
                first_byte,
                row_bytes,
                rows: self.table.rows(),
                block_shift,
                ..GatherLaunch::default()
            };
            let wanted = self.place(id);
            let place = rows.place(id);
            assert_eq!(place.is_some(), wanted.is_some(), "{id}");
            let (Some(place), Some(wanted)) = (place, wanted) else {
                continue;
            };
            let (first, last) = (wanted.start as u64, wanted.end as u64 - 1);
            assert_eq!((place.byte, place.block), (first, first >> block_shift));
            let blocks = (last >> block_shift) - place.block + 1;
            assert_eq!(u64::from(place.blocks), blocks);
            assert!(blocks << block_shift <= slot_bytes(first_byte, row_bytes, block_shift));
            let stripes = [
                StripeLayout::shifted(block_shift, 3),
                StripeLayout::new(1 << block_shift, 3),
            ];
            let [shifts, divides] = stripes.map(|stripes| stripes.expect("three members"));
            assert_eq!(shifts.spot(first), divides.spot(first));
            assert_eq!(shifts.spot(last), divides.spot(last));
        }
    }

    /// Returns whether an id is out of range: then no row of the call is written.
    fn is_refused(&self, ids: RowIds<'_>) -> bool {
        (0..ids.len()).any(|row| self.place(ids.get(row)).is_none())
    }

    /// Checks the status of each row; the others have `good`.
    fn judge(&self, ids: RowIds<'_>, good: i32, status: &[i32], failed: usize) {
        let wanted = (0..ids.len()).map(|row| match self.place(ids.get(row)) {
            Some(_) => good,
            None => -1,
        });
        assert!(wanted.eq(status.iter().copied()), "{status:?}");
        let of_table = self.table.rows() as i64;
        let edges = [i64::MIN, -1, of_table - 1, of_table, i64::MAX];
        let asked = (0..ids.len()).map(|row| ids.get(row));
        asked.chain(edges).for_each(|id| self.judge_place(id));
        assert_eq!(status.iter().filter(|code| **code != 0).count(), failed);
    }

    fn gather(&self, ids: RowIds<'_>) {
        let row = self.table.row_bytes() as usize;
        let (mut out, mut status) = (vec![0xA5; ids.len() * row], vec![9; ids.len()]);
        let report = self.table.gather(ids, &mut out, Some(&mut status));
        self.judge(ids, 0, &status, report.expect("lengths that fit").failed);
        for (index, have) in out.chunks_exact(row).enumerate() {
            match self.place(ids.get(index)) {
                Some(place) => assert_eq!(first_difference(have, &self.image[place]), None),
                None => assert!(have.iter().all(|byte| *byte == 0)),
            }
        }
    }

    fn gather_as(&self, ids: RowIds<'_>, choice: u8) {
        let widen = RowWidening {
            from: Format::ALL[usize::from(choice >> 1) % Format::ALL.len()],
            to: if choice & 1 == 0 {
                WideFormat::F16
            } else {
                WideFormat::F32
            },
        };
        let Ok(wide) = widen.row_bytes(self.table.row_bytes()) else {
            let refused = self.table.gather_as(ids, widen, &mut [], None);
            assert!(matches!(refused, Err(Error::Usage { .. })));
            return;
        };
        let wide = wide as usize;
        let (mut out, mut status) = (vec![0xA5; ids.len() * wide], vec![9; ids.len()]);
        let report = self
            .table
            .gather_as(ids, widen, &mut out, Some(&mut status));
        self.judge(ids, 0, &status, report.expect("lengths that fit").failed);
        let mut expected = vec![0; wide];
        for (index, have) in out.chunks_exact(wide).enumerate() {
            expected.fill(0);
            if let Some(place) = self.place(ids.get(index)) {
                let stored = &self.image[place];
                assert!(nvme_formats::widen(
                    widen.from,
                    widen.to,
                    stored,
                    &mut expected
                ));
            }
            assert_eq!(first_difference(have, &expected), None);
        }
    }

    fn scatter(&mut self, ids: RowIds<'_>, input: &mut Input<'_>) {
        let row = self.table.row_bytes() as usize;
        let (first, refuses) = (input.byte(), input.byte() & 1 == 1);
        let src: Vec<u8> = (0..ids.len() * row)
            .map(|at| first.wrapping_add((at / 3) as u8))
            .collect();
        let duplicates = match refuses {
            true => DuplicateIds::Error,
            false => DuplicateIds::Last,
        };
        let mut status = vec![9; ids.len()];
        let mut seen = Vec::new();
        let twice = (0..ids.len()).any(|index| {
            let id = ids.get(index);
            let again = self.place(id).is_some() && seen.contains(&id);
            seen.push(id);
            again
        });
        match self.table.scatter(ids, &src, duplicates, Some(&mut status)) {
            Ok(report) => {
                let is_refused = self.is_refused(ids);
                assert!(is_refused || !(twice && refuses), "an id that comes twice");
                let good = if is_refused { code::NOT_RUN } else { 0 };
                self.judge(ids, good, &status, report.failed);
                if is_refused {
                    return;
                }
                for (index, from) in src.chunks_exact(row).enumerate() {
                    if let Some(place) = self.place(ids.get(index)) {
                        self.image[place].copy_from_slice(from);
                    }
                }
            }
            Err(Error::Usage { .. }) => assert!(twice && refuses),
            Err(other) => panic!("{other}"),
        }
    }

    fn add(&mut self, ids: RowIds<'_>, input: &mut Input<'_>) {
        let row = self.table.row_bytes() as usize;
        let first = input.word();
        let words = (0..ids.len() * row / 4).map(|at| first.wrapping_mul(at as u32 + 1));
        let mut src: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        src.resize(ids.len() * row, 0);
        let mut status = vec![9; ids.len()];
        let added = self
            .table
            .scatter_add(ids, &src, RowElement::I32, Some(&mut status));
        if !row.is_multiple_of(4) {
            assert!(matches!(added, Err(Error::Usage { .. })));
            return;
        }
        let is_refused = self.is_refused(ids);
        let good = if is_refused { code::NOT_RUN } else { 0 };
        self.judge(ids, good, &status, added.expect("lengths that fit").failed);
        if is_refused {
            return;
        }
        for (index, from) in src.chunks_exact(row).enumerate() {
            let Some(place) = self.place(ids.get(index)) else {
                continue;
            };
            for (to, term) in self.image[place]
                .chunks_exact_mut(4)
                .zip(from.chunks_exact(4))
            {
                let number =
                    |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
                let sum = number(to).wrapping_add(number(term));
                to.copy_from_slice(&sum.to_le_bytes());
            }
        }
    }

    /// Bytes of any place and length, also past the end.
    fn bytes(&mut self, writes: bool, input: &mut Input<'_>) {
        let (offset, length) = (
            usize::from(input.half()) + 100,
            usize::from(input.half()) / 4,
        );
        judge_pieces(offset as u64, length as u64);
        let fits = offset + length <= BYTES;
        let mut data = vec![input.byte(); length];
        let done = match writes {
            true => self.store.write_at(offset as u64, &data),
            false => self.store.read_at(offset as u64, &mut data),
        };
        match (done, fits) {
            (Ok(()), true) if writes => self.image[offset..offset + length].copy_from_slice(&data),
            (Ok(()), true) => {
                let expected = &self.image[offset..offset + length];
                assert_eq!(first_difference(&data, expected), None);
            }
            (Err(Error::Usage { .. }), false) => {}
            (done, _) => panic!("{length} bytes at {offset}: {done:?}"),
        }
    }
}
