//! Bring-up: reset, admin queue, enable, identify, queues. A state machine without IO.
//!
//! The caller makes [`BringupMachine`] and calls [`step`](BringupMachine::step) until it returns
//! [`BringupStep::Ready`]; time is an argument. The same machine resets a controller in use. The steps are returned in
//! this order:
//!
//! 1. [`BringupStep::Wait`]: call again, not later than `until_ns`, so that a time-out is reported in time.
//! 2. [`BringupStep::Disabled`]: the controller cannot touch any memory now. Reclaim and restart every queue with
//!    the [`Quiesced`] that the step holds, then return it through [`enable`](BringupMachine::enable).
//! 3. [`BringupStep::HostMemory`]: the controller asks for a host memory buffer; answer with
//!    [`host_memory`](BringupMachine::host_memory).
//! 4. [`BringupStep::Ready`]: [`info`](BringupMachine::info) is complete; the planned queues exist.
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
pub use namespace::{NamespaceInfo, UnusableNamespace};
pub(crate) use plan::ready_timeout_ms;
pub use plan::{
    BringupConfig, BringupStep, ControllerInfo, HostMemoryPages, MAX_NAMESPACES, MAX_WALK,
    QueueCapabilities, QueuePlan,
};

use crate::error::BringupError;
use crate::inflight::CommandSlot;
use crate::mem::DmaWords;
use crate::queue_pair::QueuePair;
use crate::quiesced::{ControllerId, Quiesced};
use crate::registers::RegisterAccess;
use crate::spec::register::{ALL_ONES, Aqa, Cc, Csts, offset};
use plan::{NS_PER_MS, POLL_NS};
use script::BringupScript;

/// The change of CSTS.RDY that a machine in [`BringupStep::Wait`] waits for: see [`BringupMachine::ready_wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyWait {
    /// Value that CSTS.RDY is to take.
    pub ready: bool,
    /// Limit of the whole wait, in milliseconds.
    pub at_most_ms: u32,
}

#[derive(Debug)]
enum BringupPhase {
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
    Script(BringupScript),
    Ready,
    Failed(BringupError),
}

/// The bring-up machine. See the [module](self) for the order of calls.
#[derive(Debug)]
pub struct BringupMachine<'a> {
    config: BringupConfig<'a>,
    page: DmaWords<'a>,
    phase: BringupPhase,
    info: ControllerInfo,
    controller: ControllerId,
}

impl<'a> BringupMachine<'a> {
    /// Returns a machine that brings up the controller behind `registers`, whatever its state.
    ///
    /// `page` is DMA memory of at least 4,096 bytes, page aligned, that the machine uses for Identify
    /// data. After an error the controller may still write to it until the function is reset.
    ///
    /// # Errors
    /// As [`QueueCapabilities::read`]; [`BringupError::AdminRing`] when `page` is too small or not aligned.
    pub fn new(
        registers: &dyn RegisterAccess,
        config: BringupConfig<'a>,
        page: DmaWords<'a>,
    ) -> Result<Self, BringupError> {
        let capabilities = QueueCapabilities::read(registers)?;
        if page.len() < 512 || capabilities.page.offset_of(page.iova()) != 0 {
            return Err(BringupError::AdminRing);
        }
        let info = ControllerInfo::new(capabilities, registers.read32(offset::VS));
        Ok(Self {
            config,
            page,
            phase: BringupPhase::Start,
            info,
            controller: registers.identity().id(),
        })
    }

    /// Returns the state learned so far; complete when [`BringupStep::Ready`] was returned.
    pub fn info(&self) -> &ControllerInfo {
        &self.info
    }

    /// Returns the change of CSTS.RDY that the machine waits for, or `None` when it waits for something else
    /// or does not wait.
    ///
    /// This wait may last as long as CAP.TO or CRTO allow, longer than any command; callers use it to choose
    /// their own watchdog and to explain the delay.
    pub fn ready_wait(&self) -> Option<ReadyWait> {
        let ready = match self.phase {
            BringupPhase::WaitRise { .. } | BringupPhase::WaitEnabled { .. } => true,
            BringupPhase::WaitDisabled { .. } => false,
            _ => return None,
        };
        Some(ReadyWait {
            ready,
            at_most_ms: self.ready_timeout_ms(),
        })
    }

    /// Continues after [`BringupStep::Disabled`].
    ///
    /// Taking the proof by value keeps it from being used once the controller runs again. A proof of another
    /// controller, or one made before this controller was last enabled, fails the machine with
    /// [`BringupError::OtherController`].
    pub fn enable(&mut self, proof: Quiesced<'_>) {
        if matches!(self.phase, BringupPhase::Disabled) {
            self.phase = if proof.holds(self.controller) {
                BringupPhase::Enable
            } else {
                BringupPhase::Failed(BringupError::OtherController)
            };
        }
    }

    /// Answers [`BringupStep::HostMemory`]: `None` to refuse the memory.
    pub fn host_memory(&mut self, memory: Option<HostMemoryPages>) {
        if let BringupPhase::Script(script) = &mut self.phase {
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
    pub fn step<'r, B: Default, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>>(
        &mut self,
        registers: &'r dyn RegisterAccess,
        admin: &mut QueuePair<'_, B, S>,
        now_ns: u64,
    ) -> Result<BringupStep<'r>, BringupError> {
        let result = self.advance(registers, admin, now_ns);
        if let Err(error) = result {
            self.phase = BringupPhase::Failed(error);
        }
        result
    }

    fn advance<'r, B: Default, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>>(
        &mut self,
        registers: &'r dyn RegisterAccess,
        admin: &mut QueuePair<'_, B, S>,
        now_ns: u64,
    ) -> Result<BringupStep<'r>, BringupError> {
        let other = [registers.identity().id(), admin.controller()]
            .into_iter()
            .any(|one| one != self.controller);
        if other {
            return Err(BringupError::OtherController);
        }
        loop {
            let csts = self.status(registers)?;
            match &mut self.phase {
                BringupPhase::Failed(error) => return Err(*error),
                BringupPhase::Ready => return Ok(BringupStep::Ready),
                BringupPhase::Disabled => {
                    return Ok(BringupStep::Wait {
                        until_ns: now_ns.saturating_add(POLL_NS),
                    });
                }
                BringupPhase::Start => {
                    let deadline_ns = self.ready_deadline(now_ns);
                    let cc = Cc(registers.read32(offset::CC));
                    self.phase = if cc.en() && !csts.rdy() && !csts.cfs() {
                        BringupPhase::WaitRise { deadline_ns }
                    } else {
                        clear_enable(registers, cc);
                        BringupPhase::WaitDisabled { deadline_ns }
                    };
                }
                BringupPhase::WaitRise { deadline_ns } => {
                    // A controller whose RDY never rises is disabled all the same at the deadline: clearing
                    // EN is the only way to make it let the memory loose, and waiting longer would hang the
                    // caller.
                    if !csts.rdy() && !csts.cfs() && now_ns < *deadline_ns {
                        return Ok(BringupStep::Wait {
                            until_ns: now_ns.saturating_add(POLL_NS),
                        });
                    }
                    clear_enable(registers, Cc(registers.read32(offset::CC)));
                    self.phase = BringupPhase::WaitDisabled {
                        deadline_ns: self.ready_deadline(now_ns),
                    };
                }
                BringupPhase::WaitDisabled { deadline_ns } => {
                    if csts.rdy() {
                        let deadline_ns = *deadline_ns;
                        return self.wait_ready(false, deadline_ns, now_ns);
                    }
                    self.phase = BringupPhase::Disabled;
                    return Ok(BringupStep::Disabled(registers.identity().quiesced()));
                }
                BringupPhase::Enable => {
                    self.look_again(registers)?;
                    self.program(registers, admin)?;
                    self.phase = BringupPhase::WaitEnabled {
                        deadline_ns: self.ready_deadline(now_ns),
                    };
                }
                BringupPhase::WaitEnabled { deadline_ns } => {
                    if csts.cfs() {
                        return Err(BringupError::FatalStatus);
                    }
                    if !csts.rdy() {
                        let deadline_ns = *deadline_ns;
                        return self.wait_ready(true, deadline_ns, now_ns);
                    }
                    self.phase = BringupPhase::Script(BringupScript::new());
                }
                BringupPhase::Script(script) => {
                    if csts.cfs() {
                        return Err(BringupError::FatalStatus);
                    }
                    let step =
                        script.step(&mut self.info, &self.config, self.page, admin, now_ns)?;
                    if let BringupStep::Ready = step {
                        self.phase = BringupPhase::Ready;
                    }
                    return Ok(step);
                }
            }
        }
    }

    fn status(&self, registers: &dyn RegisterAccess) -> Result<Csts, BringupError> {
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
    ) -> Result<BringupStep<'static>, BringupError> {
        if now_ns >= deadline_ns {
            return Err(BringupError::ReadyTimeout {
                ready,
                ms: self.ready_timeout_ms(),
            });
        }
        Ok(BringupStep::Wait {
            until_ns: deadline_ns.min(now_ns.saturating_add(POLL_NS)),
        })
    }

    /// Reads the capabilities again and refuses a changed page size or doorbell stride.
    ///
    /// A controller may differ after it was disabled (new firmware, or another controller behind the same
    /// address); rings, lists and doorbells that were laid out for the old values would then be read at wrong
    /// addresses.
    fn look_again(&mut self, registers: &dyn RegisterAccess) -> Result<(), BringupError> {
        let now = QueueCapabilities::read(registers)?;
        let made_for = self.config.made_for.unwrap_or(self.info.capabilities);
        let shape = |of: QueueCapabilities| (of.page, of.dstrd);
        if shape(now) != shape(made_for) {
            return Err(BringupError::Changed {
                page: (made_for.page, now.page),
                dstrd: (made_for.dstrd, now.dstrd),
            });
        }
        self.info.capabilities = now;
        Ok(())
    }

    fn program<B, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>>(
        &self,
        registers: &dyn RegisterAccess,
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

/// Clears CC.EN and any shutdown request. The other fields keep their values, since they may not
/// change while RDY is 1. A shutdown request that stayed set would hold again at the next enable.
fn clear_enable(registers: &dyn RegisterAccess, mut cc: Cc) {
    if cc.en() {
        cc.set_en(false);
        cc.set_shn(0);
        registers.write32(offset::CC, cc.0);
    }
}
