//! A lane is a queue with the buffers of its commands, used by one call at a time; the pool lends lanes to calls. A
//! call gets at most half of them, so that a long call cannot keep all others waiting.

use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// Bytes of a small slot: one for each command in flight.
pub(crate) const SMALL_BYTES: u32 = 16 << 10;
/// Bytes of a large slot: the most that one command moves.
pub(crate) const LARGE_BYTES: u32 = 256 << 10;
/// Large slots of a lane.
pub(crate) const LARGE_SLOTS: usize = 8;

/// Operation of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneOperation {
    Read,
    Write,
    /// A write that is durable when it is complete.
    WriteFua,
    /// Everything written before becomes durable; moves no bytes.
    Flush,
}

impl LaneOperation {
    pub fn is_write(self) -> bool {
        matches!(self, Self::Write | Self::WriteFua)
    }
}

/// One command: `bytes` bytes of a member from `offset` on, both multiples of its block size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneCommand {
    pub op: LaneOperation,
    pub offset: u64,
    pub bytes: u32,
}

/// A command that failed.
pub(crate) struct LaneFailure {
    pub error: Error,
    /// True if the failure had another cause than the command, which can be sent again.
    pub retry: bool,
}

/// Callback with the tag of each command that ended, and the bytes that it read.
pub(crate) type Ended<'a> = &'a mut dyn FnMut(u32, std::result::Result<&[u8], LaneFailure>);

/// A queue of one owner. A slot's memory belongs to its command from `submit` until the command has ended, also if the
/// call that sent it fails.
pub(crate) trait StoreLane: Send {
    /// Called before the first command of each call.
    fn begin(&mut self) -> Result<()>;

    /// Places a command; for a write, `fill` stores the bytes. Returns false while no slot is free.
    fn submit(
        &mut self,
        command: &LaneCommand,
        tag: u32,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool>;

    /// Starts everything submitted since the last time.
    fn ring(&mut self) -> Result<()>;

    /// Reports commands that have ended, without waiting for more.
    ///
    /// # Errors
    /// The lane is unusable for the rest of this call; commands in flight are not reported.
    fn poll(&mut self, ended: Ended<'_>) -> Result<()>;

    /// Returns the number of commands whose end was not reported yet.
    fn in_flight(&self) -> usize;

    /// Waits a little after `spins` empty polls in a row. Nothing else is waited for.
    fn pause(&mut self, spins: u32);

    /// Abandons the commands in flight: their ends are not reported, and the lane keeps their memory until they have
    /// ended.
    fn abandon(&mut self);
}

/// The lanes of a member.
pub(crate) struct LanePool {
    free: Mutex<Vec<Box<dyn StoreLane>>>,
    returned: Condvar,
    /// Commands of a lane.
    depth: usize,
    /// Largest number of lanes of one call, so that other calls find some.
    per_call: usize,
}

/// Lanes of one call, returned to the pool on drop.
pub(crate) struct CallLanes<'a> {
    pool: &'a LanePool,
    pub lanes: Vec<Box<dyn StoreLane>>,
}

impl LanePool {
    pub fn new(lanes: Vec<Box<dyn StoreLane>>, depth: u32) -> Self {
        Self {
            per_call: lanes.len().div_ceil(2),
            free: Mutex::new(lanes),
            returned: Condvar::new(),
            depth: depth as usize,
        }
    }

    /// Returns the largest number of lanes of one call, so that other calls find some.
    pub fn per_call(&self) -> usize {
        self.per_call
    }

    /// Lanes for `commands` commands of `bytes` bytes together: 1 to `most`. Waits for the first.
    pub fn take(&self, commands: usize, bytes: u64, most: usize) -> CallLanes<'_> {
        let large = u64::from(LARGE_BYTES) * LARGE_SLOTS as u64;
        let by_bytes = usize::try_from(bytes.div_ceil(large)).unwrap_or(usize::MAX);
        let wanted = commands.div_ceil(self.depth).max(by_bytes);
        let wanted = wanted.min(most).clamp(1, self.per_call);
        let mut free = lock(&self.free);
        while free.is_empty() {
            free = self
                .returned
                .wait(free)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let rest = free.len().saturating_sub(wanted);
        let lanes = free.split_off(rest);
        CallLanes { pool: self, lanes }
    }
}

impl Drop for CallLanes<'_> {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            if lane.in_flight() > 0 {
                lane.abandon();
            }
        }
        lock(&self.pool.free).append(&mut self.lanes);
        self.pool.returned.notify_all();
    }
}
