//! Sanitize: erases every namespace in the background, and what the controller answers meanwhile.
//!
//! The operation belongs to the NVM subsystem: it outlives controller resets and losses of power, and
//! goes on by the clock alone, whether the controller is enabled or not.
//!
//! Lock order: the control lock, the state of this module, the logs. A thread that executes I/O
//! commands takes none of them; it reads `bar` once per batch.
//!
//! NVMe Base 2.0c, 5.24 (Sanitize command) and "Sanitize Operations".

use crate::admin::Refusal;
use crate::device::Device;
use crate::memory::Lock;
use crate::namespace::Namespace;
use crate::store::{Store, StoreError};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use nvme_core::spec::admin::{SanitizeAction, opcode, sanitize_bits};
use nvme_core::spec::log_page::{SanitizeStatus, lid, sanitize_state};
use nvme_core::spec::{Sqe, Status};
use zerocopy::FromZeros;

/// Bytes erased in one turn: a thread that also serves queues is away for no longer than that.
const TURN_BYTES: u64 = 4 << 20;
/// Bytes of the overwrite pattern that are written at once.
const PATTERN_BYTES: usize = 64 << 10;
/// Steps into which a timed operation is divided, for a driver of virtual time.
const STEPS: u64 = 256;

/// The sanitize state of the subsystem.
pub(crate) struct Sanitize {
    state: Lock<State>,
    /// The status code that commands meet that may not be executed now, or 0.
    bar: AtomicU16,
    /// When there is something to do; `u64::MAX` for never.
    due_ns: AtomicU64,
    /// No user data was written since the last successful operation.
    pub erased: AtomicBool,
}

#[derive(Default)]
struct State {
    /// [`sanitize_state`] of the most recent operation.
    outcome: u16,
    scdw10: u32,
    /// Passes of the most recent overwrite that are complete.
    passes: u16,
    /// After a failure, nothing but a successful operation makes the drive usable again.
    restricted: bool,
    operation: Option<Operation>,
}

/// An operation in progress.
struct Operation {
    action: SanitizeAction,
    passes: u64,
    invert: bool,
    pattern: u32,
    no_deallocate: bool,
    started_ns: u64,
    duration_ns: u64,
    /// Bytes of one pass over all namespaces.
    pass_bytes: u64,
    /// Bytes erased, over all passes.
    done: u64,
    /// A fault: it fails half way.
    fails: bool,
}

impl Operation {
    fn total(&self) -> u64 {
        self.pass_bytes.saturating_mul(self.passes)
    }

    fn elapsed(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.started_ns).min(self.duration_ns)
    }

    /// Bytes that may be erased by now, so that the operation takes its time.
    fn allowed(&self, now_ns: u64) -> u64 {
        match self.duration_ns {
            0 => self.total(),
            all => scaled(self.total(), self.elapsed(now_ns), all),
        }
    }

    fn is_over(&self, now_ns: u64) -> bool {
        self.done >= self.total() && self.elapsed(now_ns) >= self.duration_ns
    }

    /// The part that is complete, of 65,536; never FFFFh, which means that there is none.
    fn progress(&self, now_ns: u64) -> u16 {
        let by_bytes = match self.total() {
            0 => 0xFFFE,
            total => scaled(0x1_0000, self.done, total),
        };
        let by_time = match self.duration_ns {
            0 => by_bytes,
            all => scaled(0x1_0000, self.elapsed(now_ns), all),
        };
        by_bytes.min(by_time).min(0xFFFE) as u16
    }

    /// Bytes after which a fault ends it.
    fn half(&self) -> u64 {
        self.total().div_ceil(2)
    }

    /// What pass number `pass` (from 0) writes. The last pass leaves the pattern as it was given.
    fn word(&self, pass: u64) -> u32 {
        let inverted = self.invert && (self.passes - 1 - pass) % 2 == 1;
        if inverted {
            !self.pattern
        } else {
            self.pattern
        }
    }
}

/// `whole * part / all`, where `part <= all` and `all` is not 0.
fn scaled(whole: u64, part: u64, all: u64) -> u64 {
    (u128::from(whole) * u128::from(part) / u128::from(all)) as u64
}

impl Sanitize {
    pub fn new() -> Self {
        Self {
            state: Lock::new(State::default()),
            bar: AtomicU16::new(0),
            due_ns: AtomicU64::new(u64::MAX),
            erased: AtomicBool::new(false),
        }
    }

    /// What I/O commands other than Flush, and most admin commands, are answered with now.
    #[inline]
    pub fn bar(&self) -> Option<Status> {
        // Acquire: pairs with the release in `raise`: who sees no bar sees the erased blocks.
        match self.bar.load(Ordering::Acquire) {
            0 => None,
            code => Some(Status(code)),
        }
    }

    fn raise(&self, status: Option<Status>) {
        let code = status.map_or(0, Status::code);
        self.bar.store(code, Ordering::Release); // Release: pairs with `bar`.
    }

    /// When the operation in progress goes on.
    pub fn due_ns(&self) -> u64 {
        self.due_ns.load(Ordering::Relaxed)
    }

    /// Whether the admin command may be executed while an operation is in progress or has failed.
    ///
    /// NVMe Base 2.0c, "Sanitize Operations", the figure of the admin commands allowed.
    pub fn admits(&self, sqe: &Sqe) -> Result<(), Refusal> {
        let Some(status) = self.bar() else {
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
        // Without Do Not Retry: the same command succeeds later.
        if allowed {
            Ok(())
        } else {
            Err(Refusal { status, dw0: 0 })
        }
    }
}

impl Device {
    /// NVMe Base 2.0c, 5.24 (Sanitize command).
    pub(crate) fn sanitize(&self, sqe: &Sqe) -> Result<(), Refusal> {
        let Some(action) = SanitizeAction::of(sqe.cdw10) else {
            return Err(Status::INVALID_FIELD.into());
        };
        let sanitize = &self.sanitize;
        let unrestricted = sqe.cdw10 & sanitize_bits::AUSE != 0;
        {
            let mut state = sanitize.state.lock();
            if state.operation.is_some() {
                let status = Status::SANITIZE_IN_PROGRESS;
                return Err(Refusal { status, dw0: 0 });
            }
            let exits = action == SanitizeAction::ExitFailureMode;
            if state.restricted && (exits || unrestricted) {
                return Err(Status::SANITIZE_FAILED.into());
            }
            if exits {
                state.restricted = false;
                sanitize.raise(None);
                return Ok(());
            }
        }
        if self.namespaces.iter().any(|one| one.read_only) {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.into());
        }
        // Nothing that was fetched before is executed any more when the first block is erased.
        sanitize.raise(Some(Status::SANITIZE_IN_PROGRESS));
        self.barrier();
        for namespace in &self.namespaces {
            if let Some(cache) = &namespace.cache {
                cache.flush();
            }
            namespace.repair(0, u64::MAX);
        }
        self.logs.lock().forget_sanitize();
        let passes = match (action, (sqe.cdw10 & sanitize_bits::OWPASS) >> 4) {
            (SanitizeAction::Overwrite, 0) => 16,
            (SanitizeAction::Overwrite, passes) => u64::from(passes),
            _ => 1,
        };
        let kept = |one: &&Namespace| !one.null;
        let now_ns = self.clock_ns.load(Ordering::Relaxed);
        let mut state = sanitize.state.lock();
        *state = State {
            outcome: sanitize_state::IN_PROGRESS,
            scdw10: sqe.cdw10,
            passes: 0,
            restricted: !unrestricted,
            operation: Some(Operation {
                action,
                passes,
                invert: sqe.cdw10 & sanitize_bits::OIPBP != 0,
                pattern: sqe.cdw11,
                no_deallocate: sqe.cdw10 & sanitize_bits::NDAS != 0,
                started_ns: now_ns,
                duration_ns: self.config.sanitize_ns.saturating_mul(passes),
                pass_bytes: self
                    .namespaces
                    .iter()
                    .filter(kept)
                    .map(Namespace::bytes)
                    .sum(),
                done: 0,
                fails: self.faults.sanitize_fails(),
            }),
        };
        sanitize.due_ns.store(now_ns, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the operation in progress one turn further, when it is due at `now_ns`. Whether it is due
    /// again at once.
    pub(crate) fn sanitize_turn(&self, now_ns: u64) -> bool {
        let sanitize = &self.sanitize;
        if sanitize.due_ns() > now_ns {
            return false;
        }
        let mut state = sanitize.state.lock();
        let Some(operation) = &mut state.operation else {
            return false;
        };
        let turn = self.erase(operation, now_ns);
        let over = operation.is_over(now_ns);
        let failed = turn.is_err()
            || (operation.fails && operation.done >= operation.half())
            || (over && self.last_pass_done(operation).is_err());
        if operation.action == SanitizeAction::Overwrite {
            let passes = operation.done.checked_div(operation.pass_bytes);
            state.passes = passes.unwrap_or(operation.passes) as u16;
        }
        if failed || over {
            self.sanitize_ends(&mut state, !failed);
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

    /// Erases the next bytes.
    fn erase(&self, operation: &mut Operation, now_ns: u64) -> Result<(), StoreError> {
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
            let mut kept = self.namespaces.iter().filter(|one| !one.null);
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

    /// What comes after the last pass.
    fn last_pass_done(&self, operation: &Operation) -> Result<(), StoreError> {
        for namespace in &self.namespaces {
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

    fn sanitize_ends(&self, state: &mut State, success: bool) {
        state.operation = None;
        let bar = if success {
            state.outcome = sanitize_state::SUCCESS;
            state.restricted = false;
            self.sanitize.erased.store(true, Ordering::Relaxed);
            None
        } else {
            state.outcome = sanitize_state::FAILED;
            Some(Status::SANITIZE_FAILED)
        };
        self.sanitize.raise(bar);
        self.sanitize.due_ns.store(u64::MAX, Ordering::Relaxed);
        self.logs.lock().sanitize_completed();
        self.attention.store(true, Ordering::Relaxed);
    }

    /// The Sanitize Status log page.
    pub(crate) fn sanitize_status(&self) -> SanitizeStatus {
        let state = self.sanitize.state.lock();
        let now_ns = self.clock_ns.load(Ordering::Relaxed);
        let mut page = SanitizeStatus::new_zeroed();
        let progress = state.operation.as_ref().map(|one| one.progress(now_ns));
        page.sprog = progress.unwrap_or(SanitizeStatus::IDLE);
        page.sstat = state.outcome | state.passes << 3;
        if self.sanitize.erased.load(Ordering::Relaxed) {
            page.sstat |= SanitizeStatus::GLOBAL_DATA_ERASED;
        }
        page.scdw10 = state.scdw10;
        let seconds = |passes: u64| {
            let ns = self.config.sanitize_ns.saturating_mul(passes);
            u32::try_from(ns.div_ceil(1_000_000_000)).unwrap_or(u32::MAX - 1)
        };
        (page.eto, page.etbe, page.etce) = (seconds(16), seconds(1), seconds(1));
        // The media is not modified further (NODMMAS is 01b): these times do not exist.
        page.etond = SanitizeStatus::NOT_REPORTED;
        page.etbend = SanitizeStatus::NOT_REPORTED;
        page.etcend = SanitizeStatus::NOT_REPORTED;
        page
    }
}

fn overwrite(namespace: &Namespace, at: u64, len: u64, word: u32) -> Result<(), StoreError> {
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
