//! Bring-up: reset, admin queue, enable, identify, queues. A state machine without IO.
//!
//! The caller makes [`Bringup`] and calls [`step`](Bringup::step) until it returns [`Step::Ready`]; time is
//! an argument. The same machine resets a controller in use. The steps are returned in this order:
//!
//! 1. [`Step::Wait`]: call again, not later than `until_ns`, so that a time-out is reported in time.
//! 2. [`Step::Disabled`]: the controller cannot touch any memory now. Reclaim and restart every queue with
//!    the [`Quiesced`] that the step holds, then return it through [`enable`](Bringup::enable).
//! 3. [`Step::HostMemory`]: the controller asks for a host memory buffer; answer with
//!    [`host_memory`](Bringup::host_memory).
//! 4. [`Step::Ready`]: [`info`](Bringup::info) is complete; the planned queues exist.
//!
//! The module sends admin commands and writes CC, AQA, ASQ and ACQ. It allocates nothing and maps nothing:
//! rings, pages and queues are the caller's.
//!
//! NVMe Base 2.0c, 3.5.1 (Memory-based Controller Initialization).

mod change;
mod namespace;
mod plan;
mod script;

pub use change::NamespaceChange;
pub use namespace::{NamespaceInfo, Unusable};
pub(crate) use plan::ready_timeout_ms;
pub use plan::{Capabilities, Config, HostMemory, Info, MAX_NAMESPACES, MAX_WALK, QueuePlan, Step};

use crate::error::BringupError;
use crate::inflight::Slot;
use crate::mem::DmaWords;
use crate::queue_pair::QueuePair;
use crate::quiesced::{ControllerId, Quiesced};
use crate::registers::Registers;
use crate::spec::register::{ALL_ONES, Aqa, Cc, Csts, offset};
use plan::{NS_PER_MS, POLL_NS};
use script::Script;

/// The change of CSTS.RDY that a machine in [`Step::Wait`] waits for: see [`Bringup::ready_wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyWait {
    /// Value that CSTS.RDY is to take.
    pub ready: bool,
    /// Limit of the whole wait, in milliseconds.
    pub at_most_ms: u32,
}

#[derive(Debug)]
enum Phase {
    Start,
    /// CC.EN was 1 while CSTS.RDY was 0. Clearing EN before RDY has risen has undefined results (NVMe Base
    /// 2.0c, CC.EN), so RDY is waited for first.
    WaitRise {
        deadline_ns: u64,
    },
    WaitDisabled {
        deadline_ns: u64,
    },
    Disabled,
    Enable,
    WaitEnabled {
        deadline_ns: u64,
    },
    Script(Script),
    Ready,
    Failed(BringupError),
}

/// The bring-up machine. See the [module](self) for the order of calls.
#[derive(Debug)]
pub struct Bringup<'a> {
    config: Config<'a>,
    page: DmaWords<'a>,
    phase: Phase,
    info: Info,
    controller: ControllerId,
}

impl<'a> Bringup<'a> {
    /// A machine that brings up the controller behind `registers`, whatever its state.
    ///
    /// `page` is DMA memory of at least 4,096 bytes, page aligned, that the machine uses for Identify
    /// data. After an error the controller may still write to it until the function is reset.
    ///
    /// # Errors
    /// As [`Capabilities::read`]; [`BringupError::AdminRing`] when `page` is too small or not aligned.
    pub fn new(
        registers: &dyn Registers,
        config: Config<'a>,
        page: DmaWords<'a>,
    ) -> Result<Self, BringupError> {
        let capabilities = Capabilities::read(registers)?;
        if page.len() < 512 || capabilities.page.offset_of(page.iova()) != 0 {
            return Err(BringupError::AdminRing);
        }
        let info = Info::new(capabilities, registers.read32(offset::VS));
        Ok(Self {
            config,
            page,
            phase: Phase::Start,
            info,
            controller: registers.identity().id(),
        })
    }

    /// Returns the state learned so far; complete when [`Step::Ready`] was returned.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Returns the change of CSTS.RDY that the machine waits for, or `None` when it waits for something else
    /// or does not wait.
    ///
    /// This wait may last as long as CAP.TO or CRTO allow, longer than any command; callers use it to choose
    /// their own watchdog and to explain the delay.
    pub fn ready_wait(&self) -> Option<ReadyWait> {
        let ready = match self.phase {
            Phase::WaitRise { .. } | Phase::WaitEnabled { .. } => true,
            Phase::WaitDisabled { .. } => false,
            _ => return None,
        };
        Some(ReadyWait {
            ready,
            at_most_ms: self.ready_timeout_ms(),
        })
    }

    /// Continues after [`Step::Disabled`].
    ///
    /// Taking the proof by value keeps it from being used once the controller runs again. A proof of another
    /// controller, or one made before this controller was last enabled, fails the machine with
    /// [`BringupError::OtherController`].
    pub fn enable(&mut self, proof: Quiesced<'_>) {
        if matches!(self.phase, Phase::Disabled) {
            self.phase = if proof.holds(self.controller) {
                Phase::Enable
            } else {
                Phase::Failed(BringupError::OtherController)
            };
        }
    }

    /// Answers [`Step::HostMemory`]: `None` to refuse the memory.
    pub fn host_memory(&mut self, memory: Option<HostMemory>) {
        if let Phase::Script(script) = &mut self.phase {
            script.give(memory);
        }
    }

    /// Does what can be done now and returns what the caller has to do next.
    ///
    /// `registers` and `admin` are those of one controller in every step, and `admin` is restarted (or new)
    /// when it is disabled. Completions of commands that this machine did not send are dropped.
    ///
    /// # Errors
    /// See [`BringupError`]; the machine stays failed and repeats the error.
    pub fn step<'r, B: Default, S: AsMut<[Slot<B>]> + AsRef<[Slot<B>]>>(
        &mut self,
        registers: &'r dyn Registers,
        admin: &mut QueuePair<'_, B, S>,
        now_ns: u64,
    ) -> Result<Step<'r>, BringupError> {
        let result = self.advance(registers, admin, now_ns);
        if let Err(error) = result {
            self.phase = Phase::Failed(error);
        }
        result
    }

    fn advance<'r, B: Default, S: AsMut<[Slot<B>]> + AsRef<[Slot<B>]>>(
        &mut self,
        registers: &'r dyn Registers,
        admin: &mut QueuePair<'_, B, S>,
        now_ns: u64,
    ) -> Result<Step<'r>, BringupError> {
        let other = [registers.identity().id(), admin.controller()]
            .into_iter()
            .any(|one| one != self.controller);
        if other {
            return Err(BringupError::OtherController);
        }
        loop {
            let csts = self.status(registers)?;
            match &mut self.phase {
                Phase::Failed(error) => return Err(*error),
                Phase::Ready => return Ok(Step::Ready),
                Phase::Disabled => {
                    return Ok(Step::Wait {
                        until_ns: now_ns.saturating_add(POLL_NS),
                    });
                }
                Phase::Start => {
                    let deadline_ns = self.ready_deadline(now_ns);
                    let cc = Cc(registers.read32(offset::CC));
                    self.phase = if cc.en() && !csts.rdy() && !csts.cfs() {
                        Phase::WaitRise { deadline_ns }
                    } else {
                        clear_enable(registers, cc);
                        Phase::WaitDisabled { deadline_ns }
                    };
                }
                Phase::WaitRise { deadline_ns } => {
                    // A controller whose RDY never rises is disabled all the same at the deadline: clearing
                    // EN is the only way to make it let the memory loose, and waiting longer would hang the
                    // caller.
                    if !csts.rdy() && !csts.cfs() && now_ns < *deadline_ns {
                        return Ok(Step::Wait {
                            until_ns: now_ns.saturating_add(POLL_NS),
                        });
                    }
                    clear_enable(registers, Cc(registers.read32(offset::CC)));
                    self.phase = Phase::WaitDisabled {
                        deadline_ns: self.ready_deadline(now_ns),
                    };
                }
                Phase::WaitDisabled { deadline_ns } => {
                    if csts.rdy() {
                        let deadline_ns = *deadline_ns;
                        return self.wait_ready(false, deadline_ns, now_ns);
                    }
                    self.phase = Phase::Disabled;
                    return Ok(Step::Disabled(registers.identity().quiesced()));
                }
                Phase::Enable => {
                    self.look_again(registers)?;
                    self.program(registers, admin)?;
                    self.phase = Phase::WaitEnabled {
                        deadline_ns: self.ready_deadline(now_ns),
                    };
                }
                Phase::WaitEnabled { deadline_ns } => {
                    if csts.cfs() {
                        return Err(BringupError::FatalStatus);
                    }
                    if !csts.rdy() {
                        let deadline_ns = *deadline_ns;
                        return self.wait_ready(true, deadline_ns, now_ns);
                    }
                    self.phase = Phase::Script(Script::new());
                }
                Phase::Script(script) => {
                    if csts.cfs() {
                        return Err(BringupError::FatalStatus);
                    }
                    let step =
                        script.step(&mut self.info, &self.config, self.page, admin, now_ns)?;
                    if let Step::Ready = step {
                        self.phase = Phase::Ready;
                    }
                    return Ok(step);
                }
            }
        }
    }

    fn status(&self, registers: &dyn Registers) -> Result<Csts, BringupError> {
        match registers.read32(offset::CSTS) {
            ALL_ONES => Err(BringupError::DeviceGone),
            csts => Ok(Csts(csts)),
        }
    }

    fn ready_timeout_ms(&self) -> u32 {
        self.info
            .capabilities
            .ready_timeout_ms
            .max(self.config.min_ready_timeout_ms)
    }

    fn ready_deadline(&self, now_ns: u64) -> u64 {
        now_ns.saturating_add(u64::from(self.ready_timeout_ms()) * NS_PER_MS)
    }

    fn wait_ready(
        &self,
        ready: bool,
        deadline_ns: u64,
        now_ns: u64,
    ) -> Result<Step<'static>, BringupError> {
        if now_ns >= deadline_ns {
            return Err(BringupError::ReadyTimeout {
                ready,
                ms: self.ready_timeout_ms(),
            });
        }
        Ok(Step::Wait {
            until_ns: deadline_ns.min(now_ns.saturating_add(POLL_NS)),
        })
    }

    /// Reads the capabilities again and refuses a changed page size or doorbell stride.
    ///
    /// A controller may differ after it was disabled (new firmware, or another controller behind the same
    /// address); rings, lists and doorbells that were laid out for the old values would then be read at wrong
    /// addresses.
    fn look_again(&mut self, registers: &dyn Registers) -> Result<(), BringupError> {
        let now = Capabilities::read(registers)?;
        let made_for = self.config.made_for.unwrap_or(self.info.capabilities);
        let shape = |of: Capabilities| (of.page, of.dstrd);
        if shape(now) != shape(made_for) {
            return Err(BringupError::Changed {
                page: (made_for.page, now.page),
                dstrd: (made_for.dstrd, now.dstrd),
            });
        }
        self.info.capabilities = now;
        Ok(())
    }

    fn program<B, S: AsMut<[Slot<B>]> + AsRef<[Slot<B>]>>(
        &self,
        registers: &dyn Registers,
        admin: &QueuePair<'_, B, S>,
    ) -> Result<(), BringupError> {
        let page = self.info.capabilities.page;
        let (sq, cq) = (admin.sq(), admin.cq());
        let fits = |entries: u32, iova| entries <= 4096 && page.offset_of(iova) == 0;
        if !fits(sq.entries(), sq.iova()) || !fits(cq.entries(), cq.iova()) {
            return Err(BringupError::AdminRing);
        }
        let mut aqa = Aqa(0);
        aqa.set_asqs_z((sq.entries() - 1) as u16);
        aqa.set_acqs_z((cq.entries() - 1) as u16);
        registers.write32(offset::AQA, aqa.0);
        registers.write64(offset::ASQ, sq.iova().0);
        registers.write64(offset::ACQ, cq.iova().0);

        let mut cc = Cc(0);
        cc.set_css(self.info.capabilities.css);
        cc.set_mps(page.mps());
        cc.set_iosqes(6);
        cc.set_iocqes(4);
        registers.write32(offset::CC, cc.0);
        cc.set_en(true);
        registers.identity().enabling();
        registers.write32(offset::CC, cc.0);
        Ok(())
    }
}

/// Clears CC.EN and any shutdown request. The other fields keep their values, since they may not change while
/// RDY is 1.
fn clear_enable(registers: &dyn Registers, mut cc: Cc) {
    if cc.en() {
        cc.set_en(false);
        cc.set_shn(0);
        registers.write32(offset::CC, cc.0);
    }
}
