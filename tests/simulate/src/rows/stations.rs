//! Stations and lines of the cache: none is free too early, and none is taken in the end.

use super::World;
use crate::account::Failure;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::rows::STATION_CELLS;

impl World<'_> {
    /// Checks that no station or queue belongs to a block any more.
    pub(super) fn check_free(&mut self) -> Result<(), Failure> {
        let load = |word: &AtomicU32| word.load(Order::Relaxed, Scope::Gpu);
        if let Some(station) = self.free.iter().position(|word| load(word) != 0) {
            let text = format!("station {station} belongs to nobody, and is not free");
            return Err(Failure::new("station", text));
        }
        // Busy, or with readers: the lowest 14 bits but for the mark of recent use.
        let is_used = |word: &AtomicU32| load(word) & 0x3FFD != 0;
        if self.states.iter().any(is_used) {
            return Err(Failure::new("cache", "a line is in use by nobody"));
        }
        // A check of the id is in the highest 18 bits.
        let holds = self.states.iter().filter(|word| load(word) >> 14 != 0);
        self.counts.hits += holds.count() as u64;
        Ok(())
    }

    /// Checks that a station is not free while one of its commands has no end. Only blocks that pass the gate use the
    /// queue of the first station: while the gate is closed, that station may be free already.
    pub(super) fn check_stations(&self) -> Result<(), Failure> {
        let left = self.drive.queues[1].state().in_flight();
        let is_first_free = self.free[0].load(Order::Relaxed, Scope::Gpu) == 0;
        let is_open = self.gate.look().is_ok();
        if self.owned.queue_count == 1 && is_first_free && is_open && left != 0 {
            let text = format!("station 0 is free, and {left} commands of its queue have no end");
            return Err(Failure::new("station", text));
        }
        for (station, word) in self.free.iter().enumerate() {
            let cells = station as u32 * STATION_CELLS..(station as u32 + 1) * STATION_CELLS;
            let is_free = word.load(Order::Relaxed, Scope::Gpu) == 0;
            let mut cells = cells.filter(|_| is_free);
            let queue = &self.drive.queues[0];
            if let Some(cell) = cells.find(|cell| queue.is_under_way(*cell)) {
                let text =
                    format!("station {station} is free, and the command of cell {cell} has no end");
                return Err(Failure::new("station", text));
            }
        }
        Ok(())
    }
}
