//! Fault injection: a plan of faults and of the commands that they apply to.
//!
//! A plan with a seed is deterministic: the count of matching commands decides, not the clock. A
//! test that has to choose the moment arms single faults instead
//! ([`Controller::arm`](crate::Controller::arm)).

use alloc::vec::Vec;
use nvme_auditor::Rule;
use nvme_spec::Status;

/// A fault to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The command is fetched and never completes. An Abort does not find it.
    Drop,
    /// The command executes and completes this many nanoseconds later. An Abort finds it until
    /// then.
    Delay(u64),
    /// As `Delay`, but an Abort that finds the command reports it as aborted and has no effect.
    Stubborn(u64),
    /// The command completes after those that are fetched in the same batch.
    Reorder,
    /// The completion is posted twice.
    Duplicate,
    /// The completion carries this command identifier.
    WrongCid(u16),
    /// The completion carries the command's identifier with these bits flipped.
    FlippedCid(u16),
    /// The completion is posted again this many nanoseconds (at least 1) later.
    Echo(u64),
    /// The completion is posted at once, as a success, and the data moves this many nanoseconds (at
    /// least 1) later. Applies only to I/O commands whose data pointer needs no list.
    LateData(u64),
    /// The completion carries the phase tag of the previous pass.
    WrongPhase,
    /// The completion carries this submission queue head.
    BadSqhd(u16),
    /// The command is not executed and completes with this status.
    Status(Status),
    /// The controller stops with CSTS.CFS set.
    Cfs,
    /// The controller leaves the bus: registers read as all ones, and no command is executed.
    AllOnes,
    /// CSTS.RDY does not follow the next change of CC.EN. Applies to such changes, not to commands.
    StuckReady,
    /// The phase tag is visible before dwords 0 and 1 are.
    TornCqe,
    /// The next sanitize operation fails half way. Applies to operations, not to commands.
    SanitizeFails,
    /// Another host changes the device after the I/O command has been executed. The command
    /// completes after the change's event.
    External(ExternalChange),
}

/// A change that another host, or a management tool, makes to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExternalChange {
    /// Formats namespace 1 to blocks of 512 or 4,096 bytes.
    Format(u32),
    /// Shortens namespace 1 to this many bytes, if it was longer.
    Shrink(u64),
    /// Deletes namespace 1.
    Detach,
    /// Write-protects namespace 1.
    Protect,
    /// Sanitizes the subsystem (Block Erase).
    Erase,
    /// Activates firmware with this MDTS.
    Firmware(u8),
    /// Replaces the drive by one with another serial number, as Identify reports it.
    Replace,
    /// Leaves this controller at most this number of I/O queue pairs from its next reset on, as a manager
    /// of flexible resources does.
    Grant(u16),
}

/// The kind of event that a fault applies to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultOccasion {
    Command,
    Ready,
    Sanitize,
}

/// Condition of a rule: the commands that it applies to. Without any condition it applies to all commands of the I/O
/// queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCondition {
    /// The submission queue; `None` is every I/O queue, 0 the admin queue.
    pub qid: Option<u16>,
    /// The opcode.
    pub opcode: Option<u8>,
    /// Limits the rule to the n-th match, from 1.
    pub nth: Option<u64>,
    /// With `nth`: extends it to all matches up to this one.
    pub until: Option<u64>,
    /// Limits the rule to every n-th match.
    pub every: Option<u64>,
    /// Probability in matches per million, drawn from the plan's seed.
    pub per_million: Option<u32>,
}

/// A rule of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// The commands that it applies to.
    pub when: FaultCondition,
    /// The fault to inject into them.
    pub what: Fault,
}

/// Rules and the seed of those with a probability. Of several rules that match a command, the first
/// that fires applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The rules.
    pub rules: Vec<FaultRule>,
    /// Seed of the probabilities.
    pub seed: u64,
}

impl Fault {
    /// Returns the protocol rule that the fault violates, if it can be seen on the wire. Silence,
    /// delay, order and status violate none: a controller may do all of these.
    pub fn breaks(self) -> Option<Rule> {
        match self {
            Self::Duplicate | Self::Echo(_) | Self::WrongCid(_) | Self::FlippedCid(_) => {
                Some(Rule::UnknownCommand)
            }
            Self::LateData(_) => Some(Rule::DataLate),
            Self::WrongPhase => Some(Rule::PhaseTag),
            Self::BadSqhd(_) => Some(Rule::SqHead),
            Self::TornCqe => Some(Rule::TornEntry),
            Self::Drop
            | Self::Delay(_)
            | Self::Stubborn(_)
            | Self::Reorder
            | Self::Status(_)
            | Self::Cfs
            | Self::AllOnes
            | Self::StuckReady
            | Self::SanitizeFails
            | Self::External(_) => None,
        }
    }

    pub(crate) fn occasion(self) -> FaultOccasion {
        match self {
            Self::StuckReady => FaultOccasion::Ready,
            Self::SanitizeFails => FaultOccasion::Sanitize,
            _ => FaultOccasion::Command,
        }
    }

    /// True for the later part of a fault whose command has completed already.
    pub(crate) fn is_late_part(self) -> bool {
        matches!(self, Self::Echo(0) | Self::LateData(0))
    }
}

impl FaultPlan {
    /// Returns the protocol rules that a controller with this plan may violate, as far as they can
    /// be seen on the wire.
    pub fn breaks(&self) -> Vec<Rule> {
        let rules = self.rules.iter();
        rules.filter_map(|rule| rule.what.breaks()).collect()
    }

    /// Makes a plan with a rule that never fires, which prepares a controller for faults that are
    /// armed one by one.
    pub fn on_demand() -> Self {
        let when = FaultCondition {
            nth: Some(0),
            ..FaultCondition::default()
        };
        let what = Fault::Drop;
        Self {
            rules: [FaultRule { when, what }].into(),
            seed: 0,
        }
    }
}
