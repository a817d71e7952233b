//! Arrays of two lengths as `.npy`, the file of one array of numpy.

use super::file::OutputFile;
use super::images::CommandFiles;
use nvme_host::{Error, Result};
use std::path::Path;

/// Opens the file of an array. A command does that before it begins, since an array that cannot be written at the end is
/// lost.
pub fn create(path: &Path, files: &CommandFiles) -> Result<OutputFile> {
    if path == Path::new("-") {
        return Err(Error::usage(
            "an array cannot go to standard output, where the results are printed",
            "name a file",
        ));
    }
    OutputFile::create(Some(path), files)
}

/// Writes `numbers`, of the type `descr`, in `rows` rows of equal length; `bytes` are those of an element.
pub fn write<T: Copy, const N: usize>(
    mut out: OutputFile,
    (descr, rows): (&str, usize),
    numbers: &[T],
    bytes: impl Fn(T) -> [u8; N],
) -> Result<()> {
    let columns = numbers.len() / rows.max(1);
    out.write(&head(descr, rows, columns))?;
    for numbers in numbers.chunks(1 << 16) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|one| bytes(*one)).collect();
        out.write(&bytes)?;
    }
    out.commit()
}

/// An array of `f32` whose rows come one after another, and whose number of rows is known at the end.
pub struct ArrayRows {
    out: OutputFile,
    rows: usize,
    columns: usize,
    /// Rows for a pipe or device, whose head cannot be written after them.
    held: Vec<u8>,
}

impl ArrayRows {
    pub fn new(out: OutputFile) -> Self {
        Self {
            out,
            rows: 0,
            columns: 0,
            held: Vec::new(),
        }
    }

    /// Appends a row, which has the length of the first one.
    pub fn push(&mut self, row: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = row.iter().flat_map(|one| one.to_le_bytes()).collect();
        if self.out.can_go_back() {
            if self.rows == 0 {
                self.out.write(&head("<f4", 0, row.len()))?;
            }
            self.out.write(&bytes)?;
        } else {
            self.held.try_reserve(bytes.len()).map_err(|_| {
                let held = nvme_host::units::bytes(self.held.len() as u64);
                Error::usage(
                    format!("there is no memory for more than {held} of an array for a pipe"),
                    "write the array to a file, which gets each row at once",
                )
            })?;
            self.held.extend(bytes);
        }
        (self.rows, self.columns) = (self.rows + 1, row.len());
        Ok(())
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Ends the array after the rows that were appended without an error.
    pub fn commit(mut self) -> Result<()> {
        let head = head("<f4", self.rows, self.columns);
        if self.out.can_go_back() {
            let end = head.len() + self.rows * self.columns * size_of::<f32>();
            self.out.replace_head(&head, end as u64)?;
        } else {
            self.out.write(&head)?;
            self.out.write(&self.held)?;
        }
        self.out.commit()
    }
}

/// Returns the bytes before the elements. With a type of three letters their number depends on neither length: 128.
fn head(descr: &str, rows: usize, columns: usize) -> Vec<u8> {
    let shape = format!("({rows}, {columns})");
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // Head and dictionary are a multiple of 64 bytes, with a line feed at the end.
    let padded = (10 + dict.len() + 1).next_multiple_of(64) - 10;
    let mut head = b"\x93NUMPY\x01\x00".to_vec();
    head.extend((padded as u16).to_le_bytes());
    head.extend(format!("{dict:<width$}\n", width = padded - 1).as_bytes());
    head
}

#[cfg(test)]
mod tests {
    use super::head;

    #[test]
    fn the_head_is_as_long_for_any_number_of_rows() {
        for (rows, columns) in [(0, 1), (1_000_000, 300), (usize::MAX, usize::MAX)] {
            let head = head("<f4", rows, columns);
            assert_eq!((head.len(), head.last()), (128, Some(&b'\n')));
        }
    }
}
