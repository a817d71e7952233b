//! Shutdown: the controller saves its state and lets go of memory. A state machine without IO.
//!
//! For a normal shutdown the caller first ends its commands, deletes the I/O queues and takes the
//! host memory buffer back.
//!
//! NVMe Base 2.0c, 3.6 (Shutdown Processing).

use crate::error::BringupError;
use crate::quiesced::{ControllerId, Quiesced};
use crate::registers::Registers;
use crate::spec::register::{ALL_ONES, Cc, Csts, offset};

const NS_PER_MS: u64 = 1_000_000;
const POLL_NS: u64 = 100_000;
/// Given to a controller that does not tell its RTD3 entry latency.
const DEFAULT_MS: u32 = 10_000;

/// How to shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The controller finishes its work and writes its caches back.
    Normal,
    /// Power is about to fail: the controller saves what it can, fast.
    Abrupt,
}

/// What the machine wants next.
#[derive(Debug)]
pub enum Step<'r> {
    /// Call again at `until_ns` or before.
    Wait {
        /// On the caller's clock.
        until_ns: u64,
    },
    /// The controller is shut down and disabled: all memory is free.
    Done(Quiesced<'r>),
}

#[derive(Debug)]
enum Phase {
    Start,
    WaitComplete,
    WaitDisabled,
}

/// The machine: call [`step`](Self::step) until it says [`Step::Done`].
#[derive(Debug)]
pub struct Shutdown {
    kind: Kind,
    timeout_ms: u32,
    deadline_ns: u64,
    phase: Phase,
    /// The controller of the first step.
    controller: Option<ControllerId>,
}

impl Shutdown {
    /// `timeout_ms` is [`Info::shutdown_timeout_ms`](crate::bringup::Info::shutdown_timeout_ms); 0 is 10 s.
    pub fn new(kind: Kind, timeout_ms: u32) -> Self {
        let timeout_ms = if timeout_ms == 0 {
            DEFAULT_MS
        } else {
            timeout_ms
        };
        Self {
            kind,
            timeout_ms,
            deadline_ns: 0,
            phase: Phase::Start,
            controller: None,
        }
    }

    /// Does what can be done now and says what comes next.
    ///
    /// # Errors
    /// [`BringupError::OtherController`] when the registers are not those of the first step,
    /// [`BringupError::DeviceGone`], [`BringupError::ShutdownTimeout`] and, when the controller does
    /// not become disabled after its shutdown, [`BringupError::ReadyTimeout`].
    pub fn step<'r>(
        &mut self,
        registers: &'r dyn Registers,
        now_ns: u64,
    ) -> Result<Step<'r>, BringupError> {
        let controller = registers.identity().id();
        if *self.controller.get_or_insert(controller) != controller {
            return Err(BringupError::OtherController);
        }
        loop {
            let csts = match registers.read32(offset::CSTS) {
                ALL_ONES => return Err(BringupError::DeviceGone),
                csts => Csts(csts),
            };
            let wait = Step::Wait {
                until_ns: now_ns + POLL_NS,
            };
            match self.phase {
                Phase::Start => {
                    self.deadline_ns = now_ns + u64::from(self.timeout_ms) * NS_PER_MS;
                    let mut cc = Cc(registers.read32(offset::CC));
                    self.phase = if cc.en() && csts.rdy() {
                        cc.set_shn(if self.kind == Kind::Normal {
                            0b01
                        } else {
                            0b10
                        });
                        registers.write32(offset::CC, cc.0);
                        Phase::WaitComplete
                    } else {
                        disable(registers);
                        Phase::WaitDisabled
                    };
                }
                Phase::WaitComplete => {
                    if csts.shst() != 0b10 {
                        if now_ns >= self.deadline_ns {
                            return Err(BringupError::ShutdownTimeout {
                                ms: self.timeout_ms,
                            });
                        }
                        return Ok(wait);
                    }
                    // Shutdown alone does not promise that memory is no longer touched; RDY = 0 does.
                    disable(registers);
                    self.phase = Phase::WaitDisabled;
                }
                Phase::WaitDisabled => {
                    if !csts.rdy() {
                        return Ok(Step::Done(registers.identity().quiesced()));
                    }
                    if now_ns >= self.deadline_ns {
                        return Err(BringupError::ReadyTimeout {
                            ready: false,
                            ms: self.timeout_ms,
                        });
                    }
                    return Ok(wait);
                }
            }
        }
    }
}

fn disable(registers: &dyn Registers) {
    let mut cc = Cc(registers.read32(offset::CC));
    cc.set_en(false);
    registers.write32(offset::CC, cc.0);
}
