//! Rows that the GPU writes itself: whole blocks of one drive only, because it shares no lock with the host by
//! which parts of a block could be changed (docs/adr/0014).
// UNSAFETY: launches a kernel over addresses that the caller vouches for.
#![allow(unsafe_code)]

use super::{GpuRows, LaunchSequence, PendingRows, RowDirection, RowRequest, RowTable};
use nvme_core::spec::nvm;
use nvme_driver::error::Result;
use nvme_gpu_kernel::rows::{Batched, BatchedScatter, SCATTER_ROWS, ScatterLaunch};
use std::sync::atomic::Ordering;

/// Limit of the launches of one scatter: each occupies a launch number until it has ended.
const MOST_LAUNCHES: u64 = 256;

impl GpuRows {
    /// True if the GPU itself writes the rows of `request` to `table`: rows of whole blocks which slots hold,
    /// fewer than 2^32 of them in the table, and at most as many as a few launches take.
    pub fn writes(&self, table: &RowTable, request: &RowRequest) -> bool {
        let block = u64::from(self.info.block_bytes);
        let is_whole = (table.first_byte | u64::from(table.row_bytes)).is_multiple_of(block);
        // The kernel compares numbers of rows in 32 bits.
        let is_numbered = table.rows <= u64::from(u32::MAX);
        is_whole
            && is_numbered
            && self.fits(table)
            && request.count.div_ceil(most_rows(request)) <= MOST_LAUNCHES
    }

    /// Enqueues a scatter of rows that the GPU [writes](Self::writes) in `stream`, as [`gather`](Self::gather)
    /// does. The last of several rows with the same id is written; the others have status 0.
    ///
    /// # Safety
    /// As [`gather`](Self::gather).
    ///
    /// # Errors
    /// The errors of [`gather`](Self::gather); if too many launches are in progress, nothing is written. After an error
    /// of the driver some rows may have been written, and no others will be.
    pub unsafe fn scatter(
        &self,
        table: &RowTable,
        request: &RowRequest,
        stream: u64,
    ) -> Result<PendingRows> {
        self.check(table)?;
        let row_bytes = u64::from(table.row_bytes);
        let request = &request.judged(self.gpu(), row_bytes, RowDirection::Write, stream)?;
        self.check_current(nvm::opcode::WRITE)?;
        let most = most_rows(request);
        let written = self.state.written.address();
        let launches = request.count.div_ceil(most) as usize;
        // All launch numbers are reserved, or nothing is written.
        let mut slots = self.state.reserve(launches)?;
        self.state.are_scatters(&mut slots);
        LaunchSequence::run(self.gpu(), stream, |sequence| {
            for (slot, first) in slots.into_iter().zip((0..).step_by(most as usize)) {
                let part = part(request, first, most);
                let launch = self.launch(table, &part).ok_or_else(super::closed)?;
                let slot = (slot.moving(part.count, part.count * row_bytes), None);
                let batched = self.batched(&launch, None);
                let count = match batched {
                    Some(_) => &self.state.counts.owned_scatters,
                    None => &self.state.counts.shared_scatters,
                };
                count.fetch_add(1, Ordering::Relaxed);
                let next = self.start(launch, slot, stream, |kernels, gather, blocks| {
                    // SAFETY: each kernel takes one such structure; the caller vouches for the request's addresses, the
                    // others are ours until the gate is shut for good and nothing is inside.
                    unsafe {
                        match batched {
                            Some((batched, shape)) => {
                                let batched = Batched { gather, ..batched };
                                let scatter = BatchedScatter { batched, written };
                                let size = (shape.blocks, shape.threads);
                                kernels.launch_of(stream, kernels.scatter_batched, size, &scatter)
                            }
                            None => {
                                let scatter = ScatterLaunch { gather, written };
                                kernels.launch(stream, kernels.scatter, blocks, &scatter)
                            }
                        }
                    }
                })?;
                sequence.add(next, first);
            }
            Ok(())
        })
    }
}

/// Returns the number of rows of one launch. Without ids no two are alike, and nothing is compared.
fn most_rows(request: &RowRequest) -> u64 {
    match request.ids {
        0 => request.count.max(1),
        _ => SCATTER_ROWS,
    }
}

/// Returns the request for `most` rows from row `first` on. A request without ids is never divided.
fn part(request: &RowRequest, first: u64, most: u64) -> RowRequest {
    let id_bytes = if request.wide_ids { 8 } else { 4 };
    let status = match request.status {
        0 => 0,
        status => status + first * 4,
    };
    RowRequest {
        ids: match request.ids {
            0 => 0,
            ids => ids + first * id_bytes,
        },
        count: most.min(request.count - first),
        out: request.out + first * request.out_stride,
        status,
        ..*request
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_scatter_is_several_launches_over_the_same_rows() {
        for (wide_ids, id_bytes) in [(true, 8), (false, 4)] {
            let request = RowRequest {
                ids: 1 << 40,
                wide_ids,
                count: 2 * SCATTER_ROWS + 5,
                out: 1 << 41,
                out_stride: 5000,
                status: 1 << 42,
            };
            let most = most_rows(&request);
            let mut first = 0;
            for count in [SCATTER_ROWS, SCATTER_ROWS, 5] {
                let part = part(&request, first, most);
                assert_eq!(part.count, count);
                assert_eq!(part.ids, (1 << 40) + first * id_bytes);
                assert_eq!(part.out, (1 << 41) + first * 5000);
                assert_eq!(part.status, (1 << 42) + first * 4);
                first += count;
            }
            assert_eq!(first, request.count);
            let in_order = RowRequest { ids: 0, ..request };
            assert_eq!(most_rows(&in_order), request.count);
        }
    }
}
