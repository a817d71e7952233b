//! Reads back the units that a run wrote, at the depth of the run.

use super::shared::RunState;
use super::unit_states::UnitStates;
use super::worker::check_unit;
use nvme_core::spec::{Lba, nvm};
use nvme_driver::controller::Controller;
use nvme_driver::dma::DmaBuffer;
use nvme_driver::error::{Error, Result};

/// Limit of resets in a row, without a success between them, after which commands are no longer sent again: one
/// of them probably causes the resets.
const MOST_LOST: usize = 3;

/// Reads every unit of known content and checks it. Checked units are removed from `states`, so that after an error the
/// next call continues with the remaining ones; `checked` counts their bytes.
///
/// # Errors
/// The first error. No command is in flight then, or the controller is gone.
pub(super) fn read_back(
    controller: &Controller,
    shared: &RunState<'_>,
    states: &UnitStates,
    checked: &mut u64,
) -> Result<()> {
    let job = shared.job;
    let mut queue = controller.create_queue_pair(job.depth + 1)?;
    queue.goes_by(shared.info);
    let depth = job.depth.min(queue.depth()) as usize;
    let device = &controller.session().device;
    let mut free = DmaBuffer::several(device, job.bytes as usize, depth)?;
    // For each buffer, the unit that is read into it.
    let mut pending = vec![0; depth];
    let mut units = states.known();
    // Commands that a reset aborted, and the number of resets since the last success.
    let (mut again, mut lost) = (Vec::new(), 0);
    let mut failure: Option<Error> = None;
    loop {
        let mut batch = queue.batch();
        let before = free.len();
        while failure.is_none()
            && let Some(buffer) = free.pop()
        {
            let Some(unit) = again.pop().or_else(|| units.next()) else {
                free.push(buffer);
                break;
            };
            pending[buffer.index()] = unit;
            let lba = Lba(unit * shared.blocks_per_io);
            let read = nvm::read(job.nsid, lba, shared.blocks_per_io as u32);
            if let Err(refused) = batch.submit(read, Some(buffer)) {
                failure = Some(refused.error.into_error(|error| {
                    let cause = format!("a read could not be queued: {error}");
                    Error::device(cause, "report this")
                }));
            }
        }
        if free.len() < before {
            batch.ring();
        } else {
            drop(batch);
        }
        let Some(done) = queue.wait()? else {
            return failure.map_or(Ok(()), Err);
        };
        let may_retry = done.may_retry() && lost < MOST_LOST * depth;
        if !done.is_success() && !may_retry {
            let error = queue.error_of(&done, "a read of what was written");
            failure.get_or_insert(error);
        }
        let success = done.is_success();
        let Some(buffer) = done.buffer else { continue };
        let unit = pending[buffer.index()];
        if success {
            lost = 0;
            let Some(content) = states.content(unit) else {
                return Err(Error::internal("a unit was written while it was read back"));
            };
            match check_unit(shared, unit, content, buffer.as_slice()) {
                Ok(()) => {
                    states.forget(unit);
                    *checked += buffer.len() as u64;
                }
                Err(wrong) => drop(failure.get_or_insert(wrong)),
            }
        } else if may_retry {
            lost += 1;
            again.push(unit);
        }
        free.push(buffer);
    }
}
