//! The admin command set: the function of each command. Abort and Asynchronous Event Request are
//! here; the other commands have separate files.
//!
//! NVMe Base 2.0c, 5 (Admin Command Set).

use crate::command::reply::{CommandError, CommandReply};
use crate::command::{command_effects, create, features, format, identify, logs, sanitize};
use crate::config::fault::Fault;
use crate::device::ControllerState;
use crate::device::control::AdminState;
use crate::memory::Dma;
use core::cmp::Reverse;
use core::sync::atomic::Ordering;
use nvme_spec::admin::opcode;
use nvme_spec::{Psdt, Sqe, Status};

/// Checks and executes `sqe`.
pub(crate) fn execute(
    device: &ControllerState,
    control: &mut AdminState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<CommandReply, CommandError> {
    if !command_effects::is_supported(sqe.opcode()) {
        return Err(Status::INVALID_OPCODE.into());
    }
    // Admin commands of this controller take PRPs only, and none can be fused.
    if sqe.fuse() != 0 || sqe.psdt() != Psdt::Prp {
        return Err(Status::INVALID_FIELD.into());
    }
    sanitize::admits(&device.sanitize, sqe)?;
    let done = |()| CommandReply::Done(0);
    match sqe.opcode() {
        opcode::CREATE_IO_CQ => create::create_cq(device, control, dma, sqe).map(done),
        opcode::CREATE_IO_SQ => create::create_sq(device, control, dma, sqe).map(done),
        opcode::DELETE_IO_CQ => create::delete_cq(device, sqe).map(done),
        opcode::DELETE_IO_SQ => create::delete_sq(device, control, dma, sqe).map(done),
        opcode::IDENTIFY => identify::identify(device, dma, sqe).map(done),
        opcode::GET_LOG_PAGE => logs::get_log_page(device, dma, sqe).map(done),
        opcode::GET_FEATURES => {
            features::get_features(device, control, dma, sqe).map(CommandReply::Done)
        }
        opcode::SET_FEATURES => {
            features::set_features(device, control, dma, sqe).map(CommandReply::Done)
        }
        opcode::ABORT => abort(device, control, sqe).map(CommandReply::Done),
        opcode::ASYNC_EVENT_REQUEST => event_request(device, control, sqe),
        opcode::FORMAT_NVM => format::format(device, control, sqe).map(done),
        opcode::SANITIZE => sanitize::sanitize(device, sqe).map(done),
        opcode::KEEP_ALIVE => Ok(CommandReply::Done(0)),
        _ => Err(Status::INVALID_OPCODE.into()),
    }
}

/// Aborts a command that is delayed or an Asynchronous Event Request. NVMe Base 2.0c, 5.1 (Abort
/// command).
fn abort(
    device: &ControllerState,
    control: &mut AdminState,
    sqe: &Sqe,
) -> Result<u32, CommandError> {
    control.aborts += 1;
    // Abort commands that were fetched in one batch count as outstanding at the same time.
    if control.aborts > device.config.abort_limit {
        return Err(Status::ABORT_LIMIT_EXCEEDED.into());
    }
    const NOT_ABORTED: u32 = 1;
    let (qid, cid) = (sqe.cdw10 as u16, (sqe.cdw10 >> 16) as u16);
    if qid == 0 {
        // Event requests are the only commands of the admin queue that wait, and the specification
        // lets a driver abort them. All others have ended before an Abort is looked at.
        let at = control
            .event_requests
            .iter()
            .position(|waiting| *waiting == cid);
        return Ok(match at {
            Some(at) => {
                let cid = control.event_requests.remove(at);
                control.aborted_events.push(cid);
                device.attention.store(true, Ordering::Relaxed);
                0
            }
            None => NOT_ABORTED,
        });
    }
    let Some(slot) = device.slots.get(usize::from(qid)) else {
        return Err(Status::INVALID_FIELD.into());
    };
    let mut sq = slot.sq.lock();
    let Some(sq) = sq.as_mut() else {
        return Err(Status::INVALID_FIELD.into());
    };
    let mut pending = core::mem::take(&mut sq.pending).into_vec();
    let found = pending
        .iter_mut()
        .filter(|Reverse(one)| !one.fault.is_some_and(Fault::is_late_part))
        .find(|Reverse(one)| one.sqe.cid().0 == cid);
    let result = match found {
        Some(Reverse(one)) if matches!(one.fault, Some(Fault::Stubborn(_))) => 0,
        Some(Reverse(one)) => {
            one.fault = Some(Fault::Status(Status::ABORT_REQUESTED));
            one.due_ns = 0;
            slot.next_due_ns.store(0, Ordering::Relaxed);
            0
        }
        None => NOT_ABORTED,
    };
    sq.pending = pending.into();
    Ok(result)
}

/// Queues an Asynchronous Event Request, which completes with the next event. NVMe Base 2.0c, 5.2.
fn event_request(
    device: &ControllerState,
    control: &mut AdminState,
    sqe: &Sqe,
) -> Result<CommandReply, CommandError> {
    if control.event_requests.len() >= usize::from(device.config.aer_limit) {
        return Err(Status::AER_LIMIT_EXCEEDED.into());
    }
    control.event_requests.push(sqe.cid().0);
    device.attention.store(true, Ordering::Relaxed);
    Ok(CommandReply::Held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::medium::latency::LatencyProfile;
    use crate::testing::{DATA, Driver, config};
    use nvme_auditor::Rule;
    use nvme_spec::{Cid, Lba, Nsid, Qid, admin, nvm};

    #[test]
    fn sgls_fused_and_unknown_commands_are_refused() {
        let mut driver = Driver::new(config());
        driver.breaks(&[Rule::SglDescriptor]);
        let identify = admin::identify(1, Nsid::NONE).with_prps(DATA, 0);
        assert_eq!(
            driver.admin(identify.with_sgl([DATA, 4096])),
            Err(Status::INVALID_FIELD)
        );
        let mut fused = identify;
        fused.cdw0 |= 2 << 8;
        assert_eq!(driver.admin(fused), Err(Status::INVALID_FIELD));
        assert_eq!(
            driver.admin(Sqe::new(0xC7, Nsid::NONE)),
            Err(Status::INVALID_OPCODE)
        );
        assert_eq!(
            driver.admin(identify.with_prps(1 << 44, 0)),
            Err(Status::DATA_TRANSFER_ERROR)
        );
        assert_eq!(driver.admin(identify), Ok(0));
        assert_eq!(driver.admin(admin::keep_alive()), Ok(0));
    }

    #[test]
    fn an_abort_ends_a_waiting_command_and_misses_a_finished_one() {
        let mut config = config();
        config.profile = LatencyProfile {
            read_ns: 1 << 40,
            ..LatencyProfile::NONE
        };
        let mut driver = Driver::with_queue(config);
        let cid = driver.push(1, nvm::read(Nsid(1), Lba(0), 1).with_prps(DATA, 0));
        driver.ring(1);
        driver.step();
        assert_eq!(driver.admin(admin::abort(Qid(1), Cid(cid))), Ok(0));
        driver.step();
        assert_eq!(driver.drain(1), [(cid, Status::ABORT_REQUESTED.code())]);
        assert_eq!(driver.admin(admin::abort(Qid(1), Cid(cid))), Ok(1));
        assert_eq!(
            driver.admin(admin::abort(Qid(3), Cid(0))),
            Err(Status::INVALID_FIELD)
        );
        assert_eq!(
            driver.admin(admin::abort(Qid(9999), Cid(0))),
            Err(Status::INVALID_FIELD)
        );
    }

    #[test]
    fn aborts_and_event_requests_have_their_limits() {
        let mut driver = Driver::with_queue(config());
        for _ in 0..6 {
            driver.push(0, admin::abort(Qid(1), Cid(0)));
        }
        driver.ring(0);
        driver.step();
        let codes = driver.drain(0).into_iter().map(|(_, code)| code);
        let limit = Status::ABORT_LIMIT_EXCEEDED.code();
        assert_eq!(
            codes.collect::<alloc::vec::Vec<_>>(),
            [0, 0, 0, 0, limit, limit]
        );
        let first = driver.push(0, admin::async_event_request());
        for _ in 0..4 {
            driver.push(0, admin::async_event_request());
        }
        driver.ring(0);
        driver.step();
        let refused = driver.drain(0);
        assert_eq!(refused, [(first + 4, Status::AER_LIMIT_EXCEEDED.code())]);
        assert_eq!(driver.admin(admin::abort(Qid(0), Cid(first))), Ok(0));
        driver.step();
        assert_eq!(driver.drain(0), [(first, Status::ABORT_REQUESTED.code())]);
    }
}
