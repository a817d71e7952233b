//! The host: its watch, which recovers the controller, and writes beside the gathers.

use super::drive::At;
use super::{STATION_CELLS, Sabotage, World};
use crate::account::Failure;
use crate::memory::Area;
use crate::setup::{BLOCKS, COMMAND_NS};
use nvme_core::group::LoneThread;
use nvme_core::spec::{Lba, Nsid, nvm};
use nvme_core::sync::{Order, Scope};
use nvme_core::{
    CommandData, CommandOutcome, CommandToken, DrainResult, MemberCommand, SubmitError, WaitError,
};

/// Time that the blocks inside may need to leave.
pub(super) const PATIENCE_NS: u64 = 3 * COMMAND_NS + 2_000_000_000;

/// The state of the host's watch.
#[derive(Clone, Copy)]
pub(super) enum Host {
    /// The host looks for trouble.
    Watches,
    /// The gate is closed; the host waits until all blocks have left.
    Waits { since_ns: u64 },
}

/// Writes of one block at a time.
pub(super) struct Writer {
    area: Area,
    write: Option<Write>,
    /// A write has no end: the host resets the controller.
    has_lost: bool,
}

struct Write {
    lba: u32,
    version: u32,
    token: CommandToken,
    deadline_ns: u64,
}

impl Writer {
    pub fn new(area: Area) -> Self {
        Self {
            area,
            write: None,
            has_lost: false,
        }
    }

    /// Lets the next look reset the controller.
    pub fn ask_for_reset(&mut self) {
        self.has_lost = true;
    }

    pub fn is_idle(&self) -> bool {
        self.write.is_none() && !self.has_lost
    }
}

impl World<'_> {
    /// Looks for trouble, or takes the next step of a recovery.
    pub(super) fn watch(&mut self) -> Result<(), Failure> {
        match self.host {
            Host::Watches if self.gate.has_trouble() || self.writer.has_lost => {
                self.gate.close();
                let since_ns = self.drive.now_ns;
                self.host = Host::Waits { since_ns };
            }
            Host::Watches => {}
            Host::Waits { .. } if self.gate.is_idle() => self.recover()?,
            Host::Waits { since_ns } if self.drive.now_ns - since_ns > PATIENCE_NS => {
                return Err(Failure::new("recovery", "blocks do not leave the gate"));
            }
            Host::Waits { .. } => {}
        }
        Ok(())
    }

    /// Resets the controller, gives stations back and opens the gate.
    fn recover(&mut self) -> Result<(), Failure> {
        let lost: Vec<u32> = std::iter::from_fn(|| self.gate.take_lost()).collect();
        self.check_idle(&lost)?;
        self.tell("recovery", self.counts.recoveries as u32, 0);
        self.drive.reset()?;
        self.end_write();
        for station in lost {
            let cells = (station * STATION_CELLS) as usize;
            for cell in &self.cells[cells..cells + STATION_CELLS as usize] {
                cell.store(0, Order::Relaxed, Scope::Gpu);
            }
            self.free[station as usize].store(0, Order::Release, Scope::Gpu);
        }
        self.table.settle();
        // Writes without an end may have taken place until now.
        self.count_write();
        self.counts.recoveries += 1;
        self.gate.open();
        self.host = Host::Watches;
        Ok(())
    }

    /// Checks an idle gate: only commands of stations that a block left with `leave_lost` may have no end.
    fn check_idle(&self, lost: &[u32]) -> Result<(), Failure> {
        let queue = &self.drive.queues[0];
        for station in 0..self.free.len() as u32 {
            let cells = station * STATION_CELLS..(station + 1) * STATION_CELLS;
            let has_left = lost.contains(&station);
            let mut under_way = cells.filter(|cell| !has_left && queue.is_under_way(*cell));
            if let Some(cell) = under_way.next() {
                let text =
                    format!("the gate is idle, and station {station} has cell {cell} under way");
                return Err(Failure::new("gate", text));
            }
        }
        Ok(())
    }

    fn count_write(&self) {
        // The schedule is one thread.
        self.written.ended();
    }

    /// Ends the writer's command, if it had one under way, because of the reset.
    fn end_write(&mut self) {
        self.writer.has_lost = false;
        if let Some(write) = self.writer.write.take()
            && let Some((outcome, _)) = self.drive.queues[0].poll(&write.token)
        {
            self.settle_write(write.lba, write.version, outcome);
        }
        let cell = &self.cells[self.cells.len() - 1];
        cell.store(0, Order::Relaxed, Scope::Gpu);
    }

    fn settle_write(&mut self, lba: u32, version: u32, outcome: CommandOutcome) {
        // The end of one that a reset ended is counted by the recovery, as that of a kernel's writes is.
        let CommandOutcome::Completed(status) = outcome else {
            return;
        };
        if status.is_success() {
            self.table.commit(lba, version);
        }
        self.counts.writes += 1;
        if self.sabotage != Sabotage::KeepsStale {
            self.count_write();
        }
        self.tell("written", lba, version as i32);
    }

    /// Sends a write, or looks whether the last one has ended.
    pub(super) fn write(&mut self) {
        let queue = &self.drive.queues[0];
        let now_ns = self.drive.now_ns;
        let Some(write) = self.writer.write.take() else {
            let writes = |index: &usize| self.launches[*index].work.is_write();
            let may = matches!(self.host, Host::Watches)
                && !self.writer.has_lost
                && !self.gate.has_trouble()
                && !self.under_way().iter().any(writes);
            if may && self.faults_may_come() {
                self.send_write();
            }
            return;
        };
        queue.ring(&LoneThread);
        // A lane that was paused inside a drain continues only after this turn, so waiting here would never end.
        let is_busy = queue.drain(&LoneThread) == DrainResult::Busy;
        let is_due = (now_ns >= write.deadline_ns && !is_busy) || queue.fault().is_some();
        if self.writer.has_lost || !is_due {
            match queue.poll(&write.token) {
                Some((outcome, _)) => self.settle_write(write.lba, write.version, outcome),
                None => self.writer.write = Some(write),
            }
            return;
        }
        let deadline_ns = write.deadline_ns.min(now_ns);
        match queue.wait(&At(now_ns), write.token, deadline_ns) {
            Ok((outcome, _)) => self.settle_write(write.lba, write.version, outcome),
            Err((WaitError::TimedOut | WaitError::Refused, token)) => {
                self.writer.has_lost = true;
                self.writer.write = Some(Write { token, ..write });
            }
        }
    }

    /// Returns whether the schedule still runs: after it nothing is written.
    fn faults_may_come(&self) -> bool {
        self.launches.len() < super::LAUNCHES
    }

    fn send_write(&mut self) {
        let lba = self.rng.below(u64::from(BLOCKS.min(24))) as u32;
        let (version, words) = self.table.issue(lba);
        let to = self.drive.memory.words(self.writer.area);
        for (at, word) in words.into_iter().enumerate() {
            to.set(at, word);
        }
        let data = CommandData::Contiguous {
            iova: self.writer.area.iova,
            len: crate::setup::BLOCK_BYTES,
        };
        let cell = (self.cells.len() - 1) as u32;
        let sqe = nvm::write(Nsid(1), Lba(u64::from(lba)), 1);
        match self.drive.queues[0].place(&LoneThread, MemberCommand::new(sqe, data, cell)) {
            Ok(token) => {
                self.drive.queues[0].ring(&LoneThread);
                self.writer.write = Some(Write {
                    lba,
                    version,
                    token,
                    deadline_ns: self.drive.now_ns + COMMAND_NS,
                });
            }
            Err(SubmitError::Refused) => self.writer.has_lost = true,
            Err(_) => {}
        }
    }
}
