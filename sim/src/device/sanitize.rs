//! The sanitize state of the NVM subsystem, and the operation in progress.
//!
//! Lock order: the control lock, the state of this module, the logs. A thread that executes I/O
//! commands takes none of these locks: it reads the atomic `restriction` once per batch, so that a running
//! sanitize operation costs ordinary commands nothing.
//!
//! NVMe Base 2.0c, "Sanitize Operations".

use crate::memory::SpinLock;
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use nvme_spec::Status;
use nvme_spec::admin::SanitizeAction;

/// Sanitize state of the NVM subsystem.
pub(crate) struct SanitizeState {
    pub state: SpinLock<SanitizeRecord>,
    /// Status of the commands that must not be executed now, or 0 if all may be.
    restriction: AtomicU16,
    /// Time of the next turn; `u64::MAX` for never.
    pub due_ns: AtomicU64,
    /// True if no user data was written since the last successful operation.
    pub erased: AtomicBool,
}

#[derive(Default)]
pub(crate) struct SanitizeRecord {
    /// [`sanitize_state`] of the most recent operation.
    pub outcome: u16,
    pub scdw10: u32,
    /// Number of complete passes of the most recent overwrite.
    pub passes: u16,
    /// True if a failed operation leaves the drive unusable until another one succeeds (restricted
    /// completion mode).
    pub restricted: bool,
    pub operation: Option<SanitizeOperation>,
}

/// A sanitize operation in progress.
pub(crate) struct SanitizeOperation {
    pub action: SanitizeAction,
    pub passes: u64,
    pub invert: bool,
    pub pattern: u32,
    pub no_deallocate: bool,
    pub started_ns: u64,
    pub duration_ns: u64,
    /// Bytes of one pass over all namespaces.
    pub pass_bytes: u64,
    /// Bytes erased so far, over all passes.
    pub done: u64,
    /// True if an injected fault makes the operation fail half way.
    pub fails: bool,
}

impl SanitizeOperation {
    pub fn total(&self) -> u64 {
        self.pass_bytes.saturating_mul(self.passes)
    }

    pub fn elapsed(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.started_ns).min(self.duration_ns)
    }

    /// Returns the bytes that may be erased by now. The limit spreads the work over the configured
    /// duration.
    pub fn allowed(&self, now_ns: u64) -> u64 {
        match self.duration_ns {
            0 => self.total(),
            all => scaled(self.total(), self.elapsed(now_ns), all),
        }
    }

    pub fn is_over(&self, now_ns: u64) -> bool {
        self.done >= self.total() && self.elapsed(now_ns) >= self.duration_ns
    }

    /// Returns the completed part in units of 1/65,536. FFFFh is excluded: it means that no
    /// operation is in progress.
    pub fn progress(&self, now_ns: u64) -> u16 {
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

    /// Returns the number of bytes after which an injected fault ends it.
    pub fn half(&self) -> u64 {
        self.total().div_ceil(2)
    }

    /// Returns the pattern of pass `pass` (from 0). With inversion, passes alternate so that the
    /// last one leaves the pattern as it was given.
    pub fn word(&self, pass: u64) -> u32 {
        let inverted = self.invert && (self.passes - 1 - pass) % 2 == 1;
        if inverted {
            !self.pattern
        } else {
            self.pattern
        }
    }
}

/// Returns `whole * part / all`, where `part <= all` and `all` is not 0.
fn scaled(whole: u64, part: u64, all: u64) -> u64 {
    (u128::from(whole) * u128::from(part) / u128::from(all)) as u64
}

impl SanitizeState {
    pub fn new() -> Self {
        Self {
            state: SpinLock::new(SanitizeRecord::default()),
            restriction: AtomicU16::new(0),
            due_ns: AtomicU64::new(u64::MAX),
            erased: AtomicBool::new(false),
        }
    }

    /// Returns the status of I/O commands other than Flush, and of most admin commands, while an
    /// operation forbids them.
    #[inline]
    pub fn restriction(&self) -> Option<Status> {
        // Acquire: pairs with the release in `restrict`. A thread that sees it lifted must also
        // see the erased blocks; otherwise a read could return data from before the operation.
        match self.restriction.load(Ordering::Acquire) {
            0 => None,
            code => Some(Status(code)),
        }
    }

    pub fn restrict(&self, status: Option<Status>) {
        let code = status.map_or(0, Status::code);
        self.restriction.store(code, Ordering::Release); // Release: pairs with `restriction`.
    }

    /// Returns the time at which the operation in progress continues.
    pub fn due_ns(&self) -> u64 {
        self.due_ns.load(Ordering::Relaxed)
    }
}
