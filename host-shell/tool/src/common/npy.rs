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
    let shape = format!("({rows}, {columns})");
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // Head and dictionary are a multiple of 64 bytes, with a line feed at the end.
    let padded = (10 + dict.len() + 1).next_multiple_of(64) - 10;
    out.write(b"\x93NUMPY\x01\x00")?;
    out.write(&(padded as u16).to_le_bytes())?;
    out.write(format!("{dict:<width$}\n", width = padded - 1).as_bytes())?;
    for numbers in numbers.chunks(1 << 16) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|one| bytes(*one)).collect();
        out.write(&bytes)?;
    }
    out.commit()
}
