//! A rival on the same drive: rows by commands of the CPU, from threads with a queue each.

use crate::measure::side_by_side;
use nvme_core::CommandData;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::{Iova, Lba, Nsid, nvm};
use nvme_driver::controller::Controller;
use nvme_driver::controller::queue::DriverQueue;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use std::sync::Mutex;

/// Commands in flight of each queue.
const DEPTH: u32 = 64;

/// Queues of the CPU beside the GPU's, one for each thread.
pub(super) struct CpuQueues {
    queues: Mutex<Vec<DriverQueue>>,
    info: NamespaceInfo,
    max_transfer: u64,
}

impl CpuQueues {
    /// Creates at most `most` queues, as many as the controller has left.
    pub fn new(controller: &Controller, info: NamespaceInfo, most: usize) -> Self {
        let queues = (0..most).map_while(|_| controller.create_queue_pair(2 * DEPTH).ok());
        Self {
            queues: Mutex::new(queues.collect()),
            info,
            max_transfer: controller.max_transfer(),
        }
    }

    /// Returns the number of queues.
    pub fn len(&self) -> usize {
        lock(&self.queues).len()
    }

    /// True if rows of `row_bytes` bytes are whole blocks that one command can read.
    pub fn reads(&self, row_bytes: u32) -> bool {
        self.len() > 0
            && row_bytes.is_multiple_of(self.info.block_bytes)
            && u64::from(row_bytes) <= self.max_transfer
    }

    /// Reads the rows `ids`, which it [reads](Self::reads), to memory of the drive's from `to` on.
    pub fn read(&self, ids: &[i64], row_bytes: u32, to: Iova) -> Result<()> {
        let (row, blocks) = (u64::from(row_bytes), row_bytes / self.info.block_bytes);
        let mut queues = lock(&self.queues);
        let share = ids.len().div_ceil(queues.len().max(1)).max(1);
        let jobs = queues.iter_mut().zip(ids.chunks(share));
        let jobs = jobs.enumerate().map(|(at, (queue, ids))| {
            let to = to.offset((at * share) as u64 * row);
            let nsid = self.info.nsid;
            move || read(queue, nsid, ids, (to, row), blocks)
        });
        side_by_side(jobs.collect()).map(drop)
    }
}

/// Reads rows of `row` bytes, `blocks` blocks each, into contiguous memory from `to` on.
fn read(
    queue: &mut DriverQueue,
    nsid: Nsid,
    ids: &[i64],
    (to, row): (Iova, u64),
    blocks: u32,
) -> Result<()> {
    let (mut next, mut done) = (0, 0);
    while done < ids.len() {
        while next < ids.len() && queue.in_flight() < DEPTH {
            let data = CommandData::Contiguous {
                iova: to.offset(next as u64 * row),
                len: row,
            };
            let lba = Lba(ids[next] as u64 * u64::from(blocks));
            let refused = queue.submit_data(nvm::read(nsid, lba, blocks), data, None);
            refused.map_err(|refused| {
                refused
                    .error
                    .into_error(|error| Error::internal(error.to_string()))
            })?;
            next += 1;
        }
        queue.ring();
        let mut ended = queue.wait()?;
        while let Some(one) = ended {
            if !one.is_success() {
                return Err(queue.error_of(&one, "a read of a row"));
            }
            done += 1;
            ended = queue.poll()?;
        }
    }
    Ok(())
}
