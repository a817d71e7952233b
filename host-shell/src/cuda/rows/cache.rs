//! Rows of a table that are kept in GPU memory.

use super::request::RowTable;
use super::state::RowsState;
use crate::cuda::memory::DeviceMemory;
use crate::error::{Error, Result};
use nvme_core::row_cache::WAYS;
use nvme_gpu_kernel::rows::{Cached, Gather};
use std::sync::Arc;

/// Bytes of the words of a line.
const WORDS: u64 = 4 + 8 + 4;
/// Lines that a cache has at most.
const MOST: u64 = 1 << 31;

/// A cache of rows of one table: its memory on the GPU.
pub struct TableCache {
    state: Arc<RowsState>,
    words: Option<DeviceMemory>,
    data: Option<DeviceMemory>,
    lines: u32,
    line_bytes: u32,
}

impl TableCache {
    pub(super) fn new(state: &Arc<RowsState>, table: &RowTable, bytes: u64) -> Result<Self> {
        let _guest = state.gpu.enter()?;
        let line_bytes = u64::from(table.row_bytes).next_multiple_of(16);
        let ways = WAYS as u64;
        let lines = (bytes / (line_bytes + WORDS)).min(MOST) / ways * ways;
        if lines == 0 {
            let least = ways * (line_bytes + WORDS);
            return Err(Error::usage(
                format!("a cache of {bytes} bytes holds no set of {ways} rows"),
                format!("use {least} bytes at least"),
            ));
        }
        Ok(Self {
            state: Arc::clone(state),
            words: Some(DeviceMemory::new(&state.gpu, (lines * WORDS) as usize)?),
            data: Some(DeviceMemory::new(
                &state.gpu,
                (lines * line_bytes) as usize,
            )?),
            lines: lines as u32,
            line_bytes: line_bytes as u32,
        })
    }

    /// Rows that it holds at most.
    pub fn rows(&self) -> u32 {
        self.lines
    }

    /// The launch by way of the cache.
    pub(super) fn launch(&self, gather: Gather) -> Cached {
        let lines = u64::from(self.lines);
        let at = |memory: &Option<DeviceMemory>| memory.as_ref().map_or(0, DeviceMemory::address);
        let words = at(&self.words);
        Cached {
            gather,
            ids: words,
            states: words + 8 * lines,
            epochs: words + 12 * lines,
            data: at(&self.data),
            written_by_host: self.state.board.written_address(),
            written_by_gpu: self.state.written.address(),
            lines: self.lines,
            line_bytes: self.line_bytes,
        }
    }
}

impl Drop for TableCache {
    fn drop(&mut self) {
        if !self.state.is_over() {
            // A launch may still name it.
            std::mem::forget(self.words.take());
            std::mem::forget(self.data.take());
        }
    }
}
