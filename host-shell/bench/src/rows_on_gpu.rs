//! Rows of a table by ids into GPU memory, and back for a check by the host.
// UNSAFETY: a gather is given addresses of GPU memory.
#![allow(unsafe_code)]

use nvme_cuda::{DeviceMemory, RowRequest, Stream};
use nvme_driver::error::{Error, Result};
use nvme_store::{Store, Table};
use std::time::{Duration, Instant};

/// Gathers rows `ids` of `table`, of `store`, into memory of the store's GPU, within `limit`, and copies them into `out`:
/// seconds of the gather.
///
/// # Errors
/// [`Error::Usage`] for a store without a GPU and for another length of `out`; [`Error::Unfinished`] past the limit;
/// [`Error::Device`] when rows failed.
pub fn rows_on_gpu(
    store: &Store,
    table: &Table,
    ids: &[i64],
    out: &mut [u8],
    limit: Duration,
) -> Result<f64> {
    let gpu = store.gpu().ok_or_else(|| {
        Error::usage(
            "the rows are to go into GPU memory, and their store was opened without a GPU",
            "open it with a GPU",
        )
    })?;
    let row = table.row_bytes();
    if ids.len() as u64 * row != out.len() as u64 {
        return Err(Error::usage(
            format!(
                "{} rows of {row} bytes do not fit {} bytes exactly",
                ids.len(),
                out.len()
            ),
            "give room for each row",
        ));
    }
    let asked: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let asked_on_gpu = DeviceMemory::new(gpu, asked.len())?;
    asked_on_gpu.upload(0, &asked)?;
    let rows = DeviceMemory::new(gpu, out.len())?;
    // Overwritten first, so that old data cannot pass for rows that arrive.
    rows.fill(0xA5)?;
    let stream = Stream::new(gpu)?;
    let request = RowRequest {
        ids: asked_on_gpu.address(),
        wide_ids: true,
        count: ids.len() as u64,
        out: rows.address(),
        out_stride: row,
        status: 0,
    };
    let begin = Instant::now();
    // SAFETY: ids and rows lie in our own memory, with room for all; it outlives the gather, which is waited for, or is
    // leaked if the wait fails.
    let pending = unsafe { table.gather_on_gpu(&request, stream.handle())? };
    let ended = pending.wait(limit);
    let seconds = begin.elapsed().as_secs_f64();
    let failures = match ended {
        Ok(gathered) => gathered.failures,
        Err(error @ Error::Unfinished { .. }) => {
            std::mem::forget((asked_on_gpu, rows, stream));
            return Err(error);
        }
        Err(error) => return Err(error),
    };
    stream.finish()?;
    if failures.rows > 0 {
        return Err(Error::device(
            format!("{} of {} rows were not read", failures.rows, ids.len()),
            "read the same range with the CPU: `nvme-gpu read`",
        ));
    }
    rows.download(0, out)?;
    Ok(seconds)
}
