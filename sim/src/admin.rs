//! The admin command set: which command does what, and those that need little for it.
//!
//! NVMe Base 2.0c, 5 (Admin Command Set).

use crate::create;
use crate::data::{Data, Direction, store_status};
use crate::device::{Control, Device};
use crate::fault::Fault;
use crate::memory::Dma;
use crate::namespace::FORMATS;
use core::cmp::Reverse;
use core::sync::atomic::Ordering;
use nvme_core::spec::admin::opcode;
use nvme_core::spec::{Nsid, Psdt, Sqe, Status};

/// What becomes of a command that was not refused.
pub(crate) enum Reply {
    /// Completed, with this dword 0.
    Done(u32),
    /// Completes when there is an event.
    Held,
}

/// A status other than success, and dword 0 beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub status: Status,
    pub dw0: u32,
}

impl From<Status> for Refusal {
    /// Admin refusals say something about the command, so repeating it will not help.
    fn from(status: Status) -> Self {
        Self {
            status: status.with_dnr(),
            dw0: 0,
        }
    }
}

/// Checks and executes `sqe`.
pub(crate) fn execute(
    device: &Device,
    control: &mut Control,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<Reply, Refusal> {
    // Admin commands take PRPs alone, and none can be fused.
    if sqe.fuse() != 0 || sqe.psdt() != Psdt::Prp {
        return Err(Status::INVALID_FIELD.into());
    }
    let done = |()| Reply::Done(0);
    match sqe.opcode() {
        opcode::CREATE_IO_CQ => create::create_cq(device, control, dma, sqe).map(done),
        opcode::CREATE_IO_SQ => create::create_sq(device, control, dma, sqe).map(done),
        opcode::DELETE_IO_CQ => create::delete_cq(device, sqe).map(done),
        opcode::DELETE_IO_SQ => create::delete_sq(device, dma, sqe).map(done),
        opcode::IDENTIFY => device.identify(dma, sqe).map(done),
        opcode::GET_LOG_PAGE => device.get_log_page(control, dma, sqe).map(done),
        opcode::GET_FEATURES => device.get_features(control, dma, sqe).map(Reply::Done),
        opcode::SET_FEATURES => device.set_features(control, dma, sqe).map(Reply::Done),
        opcode::ABORT => abort(device, control, sqe).map(Reply::Done),
        opcode::ASYNC_EVENT_REQUEST => event_request(device, control, sqe),
        opcode::FORMAT_NVM => format(device, sqe).map(done),
        opcode::KEEP_ALIVE => Ok(Reply::Done(0)),
        _ => Err(Status::INVALID_OPCODE.into()),
    }
}

/// Whether `opcode` is an admin command of this controller.
pub(crate) fn is_supported(code: u8) -> bool {
    matches!(
        code,
        opcode::CREATE_IO_CQ
            | opcode::CREATE_IO_SQ
            | opcode::DELETE_IO_CQ
            | opcode::DELETE_IO_SQ
            | opcode::IDENTIFY
            | opcode::GET_LOG_PAGE
            | opcode::GET_FEATURES
            | opcode::SET_FEATURES
            | opcode::ABORT
            | opcode::ASYNC_EVENT_REQUEST
            | opcode::FORMAT_NVM
            | opcode::KEEP_ALIVE
    )
}

impl Device {
    /// Sends `bytes` to where the command's PRPs say.
    pub(crate) fn send(&self, dma: &Dma<'_>, sqe: &Sqe, bytes: &[u8]) -> Result<(), Refusal> {
        let data = Data {
            dma,
            sqe,
            page: self.page(),
            len: bytes.len() as u64,
        };
        data.check(Direction::ToHost)?;
        Ok(data.scatter(bytes)?)
    }

    /// Takes `bytes` from where the command's PRPs say.
    pub(crate) fn receive(
        &self,
        dma: &Dma<'_>,
        sqe: &Sqe,
        bytes: &mut [u8],
    ) -> Result<(), Refusal> {
        let data = Data {
            dma,
            sqe,
            page: self.page(),
            len: bytes.len() as u64,
        };
        Ok(data.gather(bytes)?)
    }
}

/// NVMe Base 2.0c, 5.1 (Abort command).
fn abort(device: &Device, control: &mut Control, sqe: &Sqe) -> Result<u32, Refusal> {
    control.aborts += 1;
    // Aborts of one batch are outstanding together.
    if control.aborts > device.config.abort_limit {
        return Err(Status::ABORT_LIMIT_EXCEEDED.into());
    }
    const NOT_ABORTED: u32 = 1;
    let (qid, cid) = (sqe.cdw10 as u16, (sqe.cdw10 >> 16) as u16);
    if qid == 0 {
        // Nothing of the admin queue waits but event requests, and those the driver may abort.
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
        .find(|Reverse(one)| one.sqe.cid().0 == cid);
    let result = match found {
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

/// NVMe Base 2.0c, 5.2 (Asynchronous Event Request command).
fn event_request(device: &Device, control: &mut Control, sqe: &Sqe) -> Result<Reply, Refusal> {
    if control.event_requests.len() >= usize::from(device.config.aer_limit) {
        return Err(Status::AER_LIMIT_EXCEEDED.into());
    }
    control.event_requests.push(sqe.cid().0);
    device.attention.store(true, Ordering::Relaxed);
    Ok(Reply::Held)
}

/// NVMe Base 2.0c, 5.14 (Format NVM command).
fn format(device: &Device, sqe: &Sqe) -> Result<(), Refusal> {
    let format = (sqe.cdw10 & 0xF | (sqe.cdw10 >> 12 & 3) << 4) as usize;
    let (extended, protection, erase) =
        (sqe.cdw10 >> 4 & 1, sqe.cdw10 >> 5 & 7, sqe.cdw10 >> 9 & 7);
    if format >= FORMATS.len() || protection != 0 {
        return Err(Status::INVALID_FORMAT.into());
    }
    // User data erase is what every format does; there is no cryptographic erase.
    if erase > 1 {
        return Err(Status::INVALID_FIELD.into());
    }
    let all = sqe.nsid == Nsid::ALL.0;
    let chosen = |nsid: u32| all || nsid == sqe.nsid;
    let namespaces = || {
        (1..)
            .zip(device.namespaces.iter())
            .filter(|(nsid, _)| chosen(*nsid))
    };
    if namespaces().next().is_none() {
        return Err(Status::INVALID_NAMESPACE.into());
    }
    for (_, namespace) in namespaces() {
        // The one format with metadata is the one it was made with.
        let other = namespace.metadata.is_some() && namespace.format() != format;
        let uneven = !namespace
            .store
            .bytes()
            .is_multiple_of(u64::from(FORMATS[format]));
        if namespace.read_only {
            return Err(Status::WRITE_TO_READ_ONLY.into());
        }
        if other || uneven || extended != 0 {
            return Err(Status::INVALID_FORMAT.into());
        }
    }
    for (nsid, namespace) in namespaces() {
        namespace.set_formatting(true);
        device.barrier();
        let result = namespace.reformat(format);
        namespace.set_formatting(false);
        result.map_err(|error| store_status(error, Direction::FromHost))?;
        device.logs.lock().namespace_changed(nsid);
    }
    device.attention.store(true, Ordering::Relaxed);
    Ok(())
}
