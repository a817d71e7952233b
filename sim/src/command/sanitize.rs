//! Sanitize: erases every namespace in the background, and restricts the other commands meanwhile.
//!
//! The operation belongs to the NVM subsystem: it survives controller resets and losses of power,
//! and it continues with the clock alone, whether the controller is enabled or not.
//!
//! NVMe Base 2.0c, 5.24 (Sanitize command) and "Sanitize Operations".

use crate::command::reply::CommandError;
use crate::device::ControllerState;
use crate::device::sanitize::{SanitizeOperation, SanitizeRecord, SanitizeState};
use crate::medium::namespace::NamespaceImage;
use crate::medium::store::{BlockStore, StoreError};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use nvme_spec::admin::{SanitizeAction, opcode, sanitize_bits};
use nvme_spec::log_page::{SanitizeStatus, lid, sanitize_state};
use nvme_spec::{Sqe, Status};
use zerocopy::FromZeros;

/// Limit of the bytes erased in one turn: the thread serves no queue during that time.
const TURN_BYTES: u64 = 4 << 20;
/// Bytes of the overwrite pattern written at once.
const PATTERN_BYTES: usize = 64 << 10;
/// Number of steps of a timed operation, for a driver in virtual time that sleeps from step to
/// step.
const STEPS: u64 = 256;

/// Checks that the admin command may be executed while an operation is in progress or has failed.
///
/// NVMe Base 2.0c, "Sanitize Operations", the figure of the admin commands allowed.
pub(crate) fn admits(sanitize: &SanitizeState, sqe: &Sqe) -> Result<(), CommandError> {
    let Some(status) = sanitize.restriction() else {
        return Ok(());
    };
    let allowed = match sqe.opcode() {
        opcode::DELETE_IO_SQ
        | opcode::CREATE_IO_SQ
        | opcode::DELETE_IO_CQ
        | opcode::CREATE_IO_CQ
        | opcode::IDENTIFY
        | opcode::ABORT
        | opcode::SET_FEATURES
        | opcode::GET_FEATURES
        | opcode::ASYNC_EVENT_REQUEST
        | opcode::KEEP_ALIVE
        | opcode::SANITIZE => true,
        opcode::GET_LOG_PAGE => matches!(
            sqe.cdw10 as u8,
            lid::ERROR | lid::SMART | lid::CHANGED_NAMESPACES | lid::SANITIZE
        ),
        _ => false,
    };
    // Do Not Retry stays clear, unlike for other rejected commands: the same command will succeed
    // when the operation has ended, so the driver should try again.
    if allowed {
        Ok(())
    } else {
        Err(CommandError { status, dw0: 0 })
    }
}

/// Starts an operation, or leaves the failure mode. NVMe Base 2.0c, 5.24 (Sanitize command).
pub(crate) fn sanitize(device: &ControllerState, sqe: &Sqe) -> Result<(), CommandError> {
    let Some(action) = SanitizeAction::of(sqe.cdw10) else {
        return Err(Status::INVALID_FIELD.into());
    };
    let sanitize = &device.sanitize;
    let unrestricted = sqe.cdw10 & sanitize_bits::AUSE != 0;
    {
        let mut state = sanitize.state.lock();
        if state.operation.is_some() {
            let status = Status::SANITIZE_IN_PROGRESS;
            return Err(CommandError { status, dw0: 0 });
        }
        let exits = action == SanitizeAction::ExitFailureMode;
        if state.restricted && (exits || unrestricted) {
            return Err(Status::SANITIZE_FAILED.into());
        }
        if exits {
            state.restricted = false;
            sanitize.restrict(None);
            return Ok(());
        }
    }
    if device.namespaces.iter().any(|one| one.is_read_only()) {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.into());
    }
    // The restriction first, then the barrier: a command that has passed the check ends before the barrier
    // returns, and later ones are rejected. The other order would let a write land on erased
    // blocks.
    sanitize.restrict(Some(Status::SANITIZE_IN_PROGRESS));
    device.barrier();
    for namespace in &device.namespaces {
        if let Some(cache) = &namespace.cache {
            cache.flush();
        }
        namespace.repair(0, u64::MAX);
    }
    device.logs.lock().forget_sanitize();
    let now_ns = device.clock_ns.load(Ordering::Relaxed);
    let mut state = sanitize.state.lock();
    *state = SanitizeRecord {
        outcome: sanitize_state::IN_PROGRESS,
        scdw10: sqe.cdw10,
        passes: 0,
        restricted: !unrestricted,
        operation: Some(operation(device, sqe, action, now_ns)),
    };
    sanitize.due_ns.store(now_ns, Ordering::Relaxed);
    Ok(())
}

/// Describes the operation that `sqe` asks for, started at `now_ns`.
fn operation(
    device: &ControllerState,
    sqe: &Sqe,
    action: SanitizeAction,
    now_ns: u64,
) -> SanitizeOperation {
    let passes = match (action, (sqe.cdw10 & sanitize_bits::OWPASS) >> 4) {
        (SanitizeAction::Overwrite, 0) => 16,
        (SanitizeAction::Overwrite, passes) => u64::from(passes),
        _ => 1,
    };
    let kept = device.namespaces.iter().filter(|one| !one.null);
    SanitizeOperation {
        action,
        passes,
        invert: sqe.cdw10 & sanitize_bits::OIPBP != 0,
        pattern: sqe.cdw11,
        no_deallocate: sqe.cdw10 & sanitize_bits::NDAS != 0,
        started_ns: now_ns,
        duration_ns: device.config.sanitize_ns.saturating_mul(passes),
        pass_bytes: kept.map(NamespaceImage::bytes).sum(),
        done: 0,
        fails: device.faults.sanitize_fails(),
    }
}

/// Continues the operation in progress by one turn, if it is due at `now_ns`. True if the next turn
/// is due at once.
pub(crate) fn advance(device: &ControllerState, now_ns: u64) -> bool {
    let sanitize = &device.sanitize;
    if sanitize.due_ns() > now_ns {
        return false;
    }
    let mut state = sanitize.state.lock();
    let Some(operation) = &mut state.operation else {
        return false;
    };
    let erased = erase(device, operation, now_ns);
    let over = operation.is_over(now_ns);
    let failed = erased.is_err()
        || (operation.fails && operation.done >= operation.half())
        || (over && last_pass_done(device, operation).is_err());
    if operation.action == SanitizeAction::Overwrite {
        let passes = operation.done.checked_div(operation.pass_bytes);
        state.passes = passes.unwrap_or(operation.passes) as u16;
    }
    if failed || over {
        end(device, &mut state, !failed);
        return false;
    }
    let Some(operation) = &state.operation else {
        return false;
    };
    let step = (operation.duration_ns / STEPS).max(1);
    let due = match operation.done < operation.allowed(now_ns) {
        true => now_ns,
        false => now_ns.saturating_add(step),
    };
    sanitize.due_ns.store(due, Ordering::Relaxed);
    due <= now_ns
}

/// Erases the next bytes, as many as the clock and the limit of a turn allow.
fn erase(
    device: &ControllerState,
    operation: &mut SanitizeOperation,
    now_ns: u64,
) -> Result<(), StoreError> {
    let last = match operation.fails {
        true => operation.half(),
        false => operation.total(),
    };
    let until = operation
        .allowed(now_ns)
        .min(operation.done + TURN_BYTES)
        .min(last);
    while operation.done < until {
        let (pass, mut at) = (
            operation.done / operation.pass_bytes,
            operation.done % operation.pass_bytes,
        );
        let mut kept = device.namespaces.iter().filter(|one| !one.null);
        let found = kept.find(|one| {
            let here = at < one.bytes();
            at -= if here { 0 } else { one.bytes() };
            here
        });
        let Some(namespace) = found else { break };
        let len = (namespace.bytes() - at).min(until - operation.done);
        match operation.action {
            SanitizeAction::Overwrite => {
                overwrite(namespace, at, len, operation.word(pass))?;
            }
            _ => namespace.store.zero(at, len, !operation.no_deallocate)?,
        }
        operation.done += len;
    }
    Ok(())
}

/// Completes the last pass: deallocates overwritten blocks, clears metadata, flushes the stores.
fn last_pass_done(
    device: &ControllerState,
    operation: &SanitizeOperation,
) -> Result<(), StoreError> {
    for namespace in &device.namespaces {
        if operation.action == SanitizeAction::Overwrite && !operation.no_deallocate {
            namespace.store.zero(0, namespace.bytes(), true)?;
        }
        if let Some(metadata) = &namespace.metadata {
            metadata.zero(0, metadata.bytes(), true)?;
        }
        namespace.store.flush()?;
    }
    Ok(())
}

fn end(device: &ControllerState, state: &mut SanitizeRecord, success: bool) {
    state.operation = None;
    let restriction = if success {
        state.outcome = sanitize_state::SUCCESS;
        state.restricted = false;
        device.sanitize.erased.store(true, Ordering::Relaxed);
        None
    } else {
        state.outcome = sanitize_state::FAILED;
        Some(Status::SANITIZE_FAILED)
    };
    device.sanitize.restrict(restriction);
    device.sanitize.due_ns.store(u64::MAX, Ordering::Relaxed);
    device.logs.lock().sanitize_completed();
    device.attention.store(true, Ordering::Relaxed);
}

/// Builds the Sanitize Status log page.
pub(crate) fn status_page(device: &ControllerState) -> SanitizeStatus {
    let state = device.sanitize.state.lock();
    let now_ns = device.clock_ns.load(Ordering::Relaxed);
    let mut page = SanitizeStatus::new_zeroed();
    let progress = state.operation.as_ref().map(|one| one.progress(now_ns));
    page.sprog = progress.unwrap_or(SanitizeStatus::IDLE);
    page.sstat = state.outcome | state.passes << 3;
    if device.sanitize.erased.load(Ordering::Relaxed) {
        page.sstat |= SanitizeStatus::GLOBAL_DATA_ERASED;
    }
    page.scdw10 = state.scdw10;
    let seconds = |passes: u64| {
        let ns = device.config.sanitize_ns.saturating_mul(passes);
        u32::try_from(ns.div_ceil(1_000_000_000)).unwrap_or(u32::MAX - 1)
    };
    (page.eto, page.etbe, page.etce) = (seconds(16), seconds(1), seconds(1));
    // NODMMAS is 01b: the media is not modified after the operation, so these times are not
    // reported.
    page.etond = SanitizeStatus::NOT_REPORTED;
    page.etbend = SanitizeStatus::NOT_REPORTED;
    page.etcend = SanitizeStatus::NOT_REPORTED;
    page
}

fn overwrite(namespace: &NamespaceImage, at: u64, len: u64, word: u32) -> Result<(), StoreError> {
    let bytes = (len as usize).min(PATTERN_BYTES);
    let pattern: Vec<u8> = word.to_le_bytes().repeat(bytes.div_ceil(4));
    let mut done = 0;
    while done < len {
        let take = (len - done).min(bytes as u64);
        namespace
            .store
            .write_at(at + done, &pattern[..take as usize])?;
        done += take;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
