//! A cache of rows in GPU memory. Every write of the store makes all of it stale, by a count that the kernel
//! compares: it is meant for tables that are read many times between writes.

use super::request::RowTable;
use super::slot::Named;
use super::state::RowsState;
use crate::leftovers;
use crate::memory::DeviceMemory;
use nvme_driver::error::{Error, Result};
use nvme_gpu_kernel::row_cache::WAYS;
use nvme_gpu_kernel::rows::CacheWords;
use std::sync::Arc;

/// Bytes of the words of a line.
const WORDS: u64 = 8 + 8 + 4;
/// Lines that a cache has at most.
const MOST: u64 = (1 << 31) - WAYS as u64;

/// A cache of rows of one table: its memory on the GPU. Launches that name it keep it until they have ended, and graphs for
/// as long as they may run one.
pub struct TableCache {
    state: Arc<RowsState>,
    memory: Arc<CacheMemory>,
    lines: u32,
    line_bytes: u32,
}

struct CacheMemory {
    words: DeviceMemory,
    data: DeviceMemory,
}

impl TableCache {
    pub(super) fn new(state: &Arc<RowsState>, table: &RowTable, bytes: u64) -> Result<Self> {
        leftovers::reap();
        let _guest = state.gpu.enter()?;
        let line_bytes = u64::from(table.row_bytes).next_multiple_of(16);
        let ways = WAYS as u64;
        let lines = (bytes / (line_bytes + WORDS)).min(MOST) / ways * ways;
        if lines == 0 {
            let least = ways * (line_bytes + WORDS);
            return Err(Error::usage(
                format!("a cache of {bytes} bytes is smaller than one set of {ways} rows"),
                format!("use {least} bytes at least"),
            ));
        }
        let memory = CacheMemory {
            words: DeviceMemory::new(&state.gpu, (lines * WORDS) as usize)?,
            data: DeviceMemory::new(&state.gpu, (lines * line_bytes) as usize)?,
        };
        Ok(Self {
            state: Arc::clone(state),
            memory: Arc::new(memory),
            lines: lines as u32,
            line_bytes: line_bytes as u32,
        })
    }

    /// Returns the largest number of rows that the cache holds.
    pub fn rows(&self) -> u32 {
        self.lines
    }

    /// Returns the keep-alive of the cache for a launch that uses it.
    pub(super) fn named(&self) -> Named {
        Some(Arc::clone(&self.memory) as _)
    }

    /// Returns the words of the cache for a launch.
    pub(super) fn words(&self) -> CacheWords {
        let lines = u64::from(self.lines);
        let words = self.memory.words.address();
        CacheWords {
            ids: words,
            epochs: words + 8 * lines,
            states: words + 16 * lines,
            data: self.memory.data.address(),
            written_by_host: self.state.memory.board.written_address(),
            written_by_gpu: self.state.written.address(),
            lines: self.lines,
            line_bytes: self.line_bytes,
        }
    }
}
