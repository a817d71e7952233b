//! Shutdown: the controller writes its caches back and stops using memory. A state machine without IO.
//!
//! The caller makes [`ShutdownMachine`] and calls [`step`](ShutdownMachine::step) until it returns
//! [`ShutdownStep::Done`]. Before a normal shutdown it ends its commands, deletes the I/O queues and disables the host
//! memory buffer.
//!
//! CC.EN is cleared only while CSTS.RDY is 1: "clearing this field to '0' when CSTS.RDY is '0' has undefined
//! results". For a controller that was enabled and is not ready yet, the machine waits until it is.
//!
//! Whatever the registers read, the machine ends: the times for RDY to rise, for the shutdown, and for RDY to
//! fall each bound one wait, and none of these waits begins twice.
//!
//! A controller that reports a fatal error (CSTS.CFS) processes no shutdown: it is reset instead, and
//! [`ShutdownMachine::was_fatal`] returns true.
//!
//! NVMe Base 2.0c, 3.6 (Shutdown Processing), "Offset 14h: CC" (EN), "Offset 1Ch: CSTS" (RDY, CFS).

use crate::bringup::ready_timeout_ms;
use crate::error::BringupError;
use crate::quiesced::{ControllerId, Quiesced};
use crate::registers::RegisterAccess;
use crate::spec::register::{ALL_ONES, Cap, Cc, Csts, offset};

const NS_PER_MS: u64 = 1_000_000;
const POLL_NS: u64 = 100_000;
/// Limit for a controller that reports no RTD3 entry latency, in milliseconds.
const DEFAULT_MS: u32 = 10_000;
/// Least time for CSTS.RDY to follow CC.EN, whatever CAP.TO says, in milliseconds.
const LEAST_READY_MS: u32 = 500;

/// The kind of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownKind {
    /// The controller finishes its work and writes its caches back.
    Normal,
    /// Power is about to fail: the controller saves as much as it can, quickly.
    Abrupt,
}

/// The machine's next request to its caller.
#[derive(Debug)]
pub enum ShutdownStep<'r> {
    /// Call again at `until_ns` or before.
    Wait {
        /// Time on the caller's clock, in nanoseconds.
        until_ns: u64,
    },
    /// The controller is shut down and disabled: all memory is free.
    Done(Quiesced<'r>),
}

/// The phases in their order: none is entered twice, so that their deadlines together bound the whole
/// shutdown.
#[derive(Clone, Copy, Debug)]
enum ShutdownPhase {
    Start,
    WaitReady { deadline_ns: u64 },
    WaitComplete { deadline_ns: u64 },
    WaitDisabled { deadline_ns: u64 },
}

/// The machine: call [`step`](Self::step) until it returns [`ShutdownStep::Done`].
#[derive(Debug)]
pub struct ShutdownMachine {
    kind: ShutdownKind,
    timeout_ms: u32,
    phase: ShutdownPhase,
    /// The controller of the first step.
    controller: Option<ControllerId>,
    fatal: bool,
}

impl ShutdownMachine {
    /// Prepares a shutdown. `timeout_ms` is
    /// [`ControllerInfo::shutdown_timeout_ms`](crate::bringup::ControllerInfo::shutdown_timeout_ms); 0 means 10 s.
    pub fn new(kind: ShutdownKind, timeout_ms: u32) -> Self {
        let timeout_ms = if timeout_ms == 0 {
            DEFAULT_MS
        } else {
            timeout_ms
        };
        Self {
            kind,
            timeout_ms,
            phase: ShutdownPhase::Start,
            controller: None,
            fatal: false,
        }
    }

    /// True if the controller reported a fatal error (CSTS.CFS) and was reset instead of shut down: data that
    /// it had not written to its medium may be lost.
    pub fn was_fatal(&self) -> bool {
        self.fatal
    }

    /// Does what can be done now and returns what the caller has to do next.
    ///
    /// # Errors
    /// [`BringupError::OtherController`] when the registers are not those of the first step;
    /// [`BringupError::DeviceGone`]; [`BringupError::ShutdownTimeout`]; [`BringupError::ReadyTimeout`] when the
    /// controller does not become disabled after its shutdown, or does not become ready so that it can be shut
    /// down. All memory is still the controller's then.
    pub fn step<'r>(
        &mut self,
        registers: &'r dyn RegisterAccess,
        now_ns: u64,
    ) -> Result<ShutdownStep<'r>, BringupError> {
        let controller = registers.identity().id();
        if *self.controller.get_or_insert(controller) != controller {
            return Err(BringupError::OtherController);
        }
        loop {
            let csts = match registers.read32(offset::CSTS) {
                ALL_ONES => return Err(BringupError::DeviceGone),
                csts => Csts(csts),
            };
            let wait = ShutdownStep::Wait {
                until_ns: now_ns.saturating_add(POLL_NS),
            };
            match self.phase {
                ShutdownPhase::Start => {
                    self.phase = ShutdownPhase::WaitReady {
                        deadline_ns: after(now_ns, ready_ms(registers)),
                    };
                }
                ShutdownPhase::WaitReady { deadline_ns } => {
                    let mut cc = Cc(registers.read32(offset::CC));
                    self.phase = if !cc.en() {
                        ShutdownPhase::WaitDisabled {
                            deadline_ns: after(now_ns, ready_ms(registers)),
                        }
                    } else if csts.cfs() {
                        self.give_up(registers, now_ns)
                    } else if csts.rdy() {
                        cc.set_shn(if self.kind == ShutdownKind::Normal {
                            0b01
                        } else {
                            0b10
                        });
                        registers.write32(offset::CC, cc.0);
                        ShutdownPhase::WaitComplete {
                            deadline_ns: after(now_ns, self.timeout_ms),
                        }
                    } else if now_ns >= deadline_ns {
                        let ms = ready_ms(registers);
                        return Err(BringupError::ReadyTimeout { ready: true, ms });
                    } else {
                        return Ok(wait);
                    };
                }
                ShutdownPhase::WaitComplete { .. } if csts.cfs() => {
                    self.phase = self.give_up(registers, now_ns);
                }
                ShutdownPhase::WaitComplete { deadline_ns } => {
                    if csts.shst() != 0b10 {
                        if now_ns >= deadline_ns {
                            return Err(BringupError::ShutdownTimeout {
                                ms: self.timeout_ms,
                            });
                        }
                        return Ok(wait);
                    }
                    // A completed shutdown does not promise that memory is no longer touched; only RDY = 0
                    // does, so a proof may not be made before.
                    self.phase = disable(registers, now_ns);
                }
                ShutdownPhase::WaitDisabled { deadline_ns } => {
                    if !csts.rdy() {
                        return Ok(ShutdownStep::Done(registers.identity().quiesced()));
                    }
                    if now_ns >= deadline_ns {
                        let ms = ready_ms(registers);
                        return Err(BringupError::ReadyTimeout { ready: false, ms });
                    }
                    return Ok(wait);
                }
            }
        }
    }

    /// Resets a controller with a fatal error, which would not answer a shutdown.
    fn give_up(&mut self, registers: &dyn RegisterAccess, now_ns: u64) -> ShutdownPhase {
        self.fatal = true;
        disable(registers, now_ns)
    }
}

fn after(now_ns: u64, ms: u32) -> u64 {
    now_ns.saturating_add(u64::from(ms) * NS_PER_MS)
}

/// Returns the time that CSTS.RDY may take to follow CC.EN, in milliseconds.
fn ready_ms(registers: &dyn RegisterAccess) -> u32 {
    let cap = Cap(registers.read64(offset::CAP));
    ready_timeout_ms(cap, registers).max(LEAST_READY_MS)
}

fn disable(registers: &dyn RegisterAccess, now_ns: u64) -> ShutdownPhase {
    let mut cc = Cc(registers.read32(offset::CC));
    cc.set_en(false);
    registers.write32(offset::CC, cc.0);
    ShutdownPhase::WaitDisabled {
        deadline_ns: after(now_ns, ready_ms(registers)),
    }
}
