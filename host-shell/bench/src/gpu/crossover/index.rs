//! Index of the CPU's cache: the row of each line. The lines lie in GPU memory, the index in host memory.
//!
//! Lines are assigned in round-robin order, the oldest first, so that those of one chunk of a batch are
//! contiguous. A line carries the number of its chunk: its bytes are valid for chunks after that one.
//!
//! Threads look up and claim lines of a chunk concurrently. Lookups of the next chunk begin when all of them have
//! ended.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The index, for as many threads as there are.
pub(super) struct RowIndex {
    /// The number of each row's chunk, and its line plus one; 0 if it has none.
    rows: Vec<AtomicU64>,
    /// The row of each line plus one; 0 if it has none.
    lines: Vec<AtomicU64>,
    /// Lines given out so far.
    next: AtomicU64,
    /// Chunks before this one are forgotten.
    first_chunk: AtomicU32,
}

impl RowIndex {
    pub fn new(rows: u64, lines: u32) -> Self {
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            rows: zeros(rows as usize),
            lines: zeros(lines.max(1) as usize),
            next: AtomicU64::new(0),
            first_chunk: AtomicU32::new(0),
        }
    }

    /// Forgets all rows of chunks before `chunk`. Nothing else uses it meanwhile.
    pub fn clear(&self, chunk: u32) {
        self.first_chunk.store(chunk, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
    }

    pub fn lines(&self) -> u64 {
        self.lines.len() as u64
    }

    /// Finds the line of row `id`, if a chunk before `chunk` brought it.
    #[inline]
    pub fn find(&self, id: i64, chunk: u32) -> Option<u64> {
        let word = self.rows.get(id as usize)?.load(Ordering::Relaxed);
        let (of, line) = ((word >> 32) as u32, word & u64::from(u32::MAX));
        let is_there = line != 0 && of != chunk && of >= self.first_chunk.load(Ordering::Relaxed);
        is_there.then(|| line - 1)
    }

    /// Reserves `count` consecutive lines and returns the first of them. The index of a line is its number modulo
    /// [`lines`](Self::lines).
    pub fn give(&self, count: u64) -> u64 {
        self.next.fetch_add(count, Ordering::Relaxed)
    }

    /// Assigns line `number` to row `id` from chunk `chunk` on, and returns the line.
    #[inline]
    pub fn claim(&self, number: u64, id: i64, chunk: u32) -> u64 {
        let line = number % self.lines();
        let was = self.lines[line as usize].swap(id as u64 + 1, Ordering::Relaxed);
        if let Some(row) = was
            .checked_sub(1)
            .and_then(|row| self.rows.get(row as usize))
        {
            let word = row.load(Ordering::Relaxed);
            if word & u64::from(u32::MAX) == line + 1 {
                // Where another thread gives the row a line just now, that one stays.
                let _ = row.compare_exchange(word, 0, Ordering::Relaxed, Ordering::Relaxed);
            }
        }
        if let Some(row) = self.rows.get(id as usize) {
            row.store(u64::from(chunk) << 32 | (line + 1), Ordering::Relaxed);
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_found_by_later_chunks_until_its_line_is_given_out_again() {
        let index = RowIndex::new(100, 4);
        let first = index.give(2);
        assert_eq!(index.claim(first, 7, 1), 0);
        assert_eq!(index.claim(first + 1, 9, 1), 1);
        assert_eq!(index.find(7, 1), None, "its bytes are under way");
        assert_eq!((index.find(7, 2), index.find(9, 2)), (Some(0), Some(1)));
        assert_eq!((index.find(8, 2), index.find(1000, 2)), (None, None));
        let next = index.give(3);
        for (number, id) in (next..).zip([1, 2, 3]) {
            index.claim(number, id, 2);
        }
        assert_eq!((index.find(7, 3), index.find(9, 3)), (None, Some(1)));
        assert_eq!((index.find(3, 3), index.give(0)), (Some(0), 5));
        // A row that was read twice is found in its last line; the other line is reused without harm.
        let again = index.give(1);
        assert_eq!(index.claim(again, 9, 3), 1);
        let other = index.give(1);
        assert_eq!(index.claim(other, 3, 3), 2);
        let over = index.give(2);
        index.claim(over, 50, 4);
        index.claim(over + 1, 51, 4);
        assert_eq!(index.find(3, 5), Some(2));
        index.clear(4);
        assert_eq!((index.find(3, 5), index.find(50, 5)), (None, Some(3)));
        assert_eq!(index.give(1), 0);
    }
}
