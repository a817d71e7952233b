//! Parameters of launches that gather rows.

use super::request::{RowRequest, RowTable};
use nvme_gpu_kernel::rows::{BLOCK_WARPS, GatherLaunch, WARP_BYTES};
use std::time::Duration;

/// Rows that a warp reads at a time, unless its slots hold fewer.
const FEW: u64 = 4;
/// Bytes that a warp reads at a time, where rows are long.
const FEW_BYTES: u64 = 16 << 10;

/// Parameters of a launch that are common to one drive and to striped drives.
pub(super) struct LaunchParameters {
    /// Bytes of the slot of a row.
    pub slot: u64,
    /// Bytes of a command at most.
    pub max_transfer: u64,
    pub timeout: Duration,
    pub block_shift: u32,
    pub stations: u32,
}

impl LaunchParameters {
    /// Returns the words that the table and the request determine; the words of queues and memory are 0.
    pub fn gather(&self, table: &RowTable, request: &RowRequest) -> GatherLaunch {
        let units =
            table.first_byte | u64::from(table.row_bytes) | request.out | request.out_stride;
        GatherLaunch {
            ids: request.ids,
            out: request.out,
            status: request.status,
            count: request.count,
            first_byte: table.first_byte,
            rows: table.rows,
            out_stride: request.out_stride,
            timeout_ns: self.timeout.as_nanos() as u64,
            row_bytes: table.row_bytes,
            slot_bytes: self.slot as u32,
            run_rows: (self.max_transfer / self.slot).clamp(1, 32) as u32,
            block_shift: self.block_shift,
            unit_shift: units.trailing_zeros().min(4),
            wide_ids: u32::from(request.wide_ids),
            station_count: self.stations,
            lanes: lanes(self.slot, request.count, self.stations),
            ..GatherLaunch::default()
        }
    }
}

/// Returns the number of rows that a warp reads at a time: as many as its slots hold, or fewer if there are warps for
/// all rows. Half the warps are used then, with [`FEW`] rows at least, or [`FEW_BYTES`]: a further round costs a warp
/// more than a further row in a round, but a warp copies 4 KiB at a time. For 32 rows a warp reads two: its queue is
/// shared with few others then.
fn lanes(slot_bytes: u64, count: u64, stations: u32) -> u32 {
    let fit = (WARP_BYTES / slot_bytes).clamp(1, 32);
    let warps = u64::from(stations * BLOCK_WARPS);
    let share = count.div_ceil(warps / 2).next_power_of_two();
    let few = (FEW_BYTES / slot_bytes).clamp(1, FEW);
    let few = if count <= 32 { few.min(2) } else { few };
    1 << fit.ilog2().min(share.max(few).ilog2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_spread_over_the_warps_and_many_fill_them() {
        assert_eq!(lanes(4096, 32, 32), 2);
        assert_eq!(lanes(4096, 33, 32), 4);
        assert_eq!(lanes(16 << 10, 32, 32), 1);
        assert_eq!(lanes(4096, 257, 32), 4);
        assert_eq!(lanes(16 << 10, 257, 32), 4);
        assert_eq!(lanes(4096, 1024, 32), 8);
        assert_eq!(lanes(4096, 2048, 32), 16);
        assert_eq!(lanes(4096, 1 << 20, 32), 32);
        assert_eq!(lanes(64 << 10, 1 << 20, 32), 2);
        assert_eq!(lanes(128 << 10, 1, 1), 1);
        assert_eq!(lanes(8192, 1 << 20, 32), 16);
    }
}
