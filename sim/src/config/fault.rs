//! Faults on purpose: a plan of what goes wrong, and when.
//!
//! A plan with a seed is deterministic: the n-th matching command decides, not the clock. A test that
//! chooses the moment arms single faults instead ([`Controller::arm`](crate::Controller::arm)).

use alloc::vec::Vec;
use nvme_auditor::Rule;
use nvme_core::spec::Status;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The command is fetched and never completes; an Abort does not find it.
    Drop,
    /// The command executes and completes this many nanoseconds later; an Abort finds it until then.
    Delay(u64),
    /// As `Delay`, but an Abort that finds the command says "aborted" and changes nothing.
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
    /// The completion is posted at once, as a success, and the data move this many nanoseconds (at
    /// least 1) later. Only I/O commands whose data pointer needs no list.
    LateData(u64),
    /// The completion carries the phase tag of the previous pass.
    WrongPhase,
    /// The completion carries this submission queue head.
    BadSqhd(u16),
    /// The command is not executed and completes with this status.
    Status(Status),
    /// The controller stops with CSTS.CFS set.
    Cfs,
    /// The controller leaves the bus: registers read as all ones, and nothing happens any more.
    AllOnes,
    /// CSTS.RDY does not follow the next change of CC.EN. Matches such changes, not commands.
    StuckReady,
    /// The phase tag is visible before dwords 0 and 1 are.
    TornCqe,
    /// The next sanitize operation fails half way. Matches operations, not commands.
    SanitizeFails,
    /// Another host changes the device once the I/O command has been executed; it completes after the event.
    Outside(Change),
}

/// What another host, or a management tool, does to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Formats namespace 1 to blocks of 512 or 4,096 bytes.
    Format(u32),
    /// Makes namespace 1 this many bytes long, if it was longer.
    Shrink(u64),
    /// Deletes namespace 1.
    Detach,
    /// Write-protects namespace 1.
    Protect,
    /// Sanitizes the subsystem (Block Erase).
    Erase,
    /// Activates firmware with this MDTS.
    Firmware(u8),
    /// Puts a drive with another serial number in its place: seen by Identify.
    Replace,
}

/// What a fault can befall.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occasion {
    Command,
    Ready,
    Sanitize,
}

/// Which commands a rule means. With no condition: all of the I/O queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct When {
    /// The submission queue; `None` is every I/O queue, 0 the admin queue.
    pub qid: Option<u16>,
    /// The opcode.
    pub opcode: Option<u8>,
    /// Only the n-th match, from 1.
    pub nth: Option<u64>,
    /// With `nth`: those after it, too, up to this one.
    pub until: Option<u64>,
    /// Every n-th match.
    pub every: Option<u64>,
    /// Matches per million, drawn from the plan's seed.
    pub per_million: Option<u32>,
}

/// One rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Which commands.
    pub when: When,
    /// What happens to them.
    pub what: Fault,
}

/// Rules, the first that fires wins, and the seed for those with a probability.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The rules.
    pub rules: Vec<FaultRule>,
    /// Seed of the probabilities.
    pub seed: u64,
}

impl Fault {
    /// The rule that it breaks, where a wire can show that: silence, time, order and status are a
    /// controller's own affair.
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
            | Self::Outside(_) => None,
        }
    }

    pub(crate) fn occasion(self) -> Occasion {
        match self {
            Self::StuckReady => Occasion::Ready,
            Self::SanitizeFails => Occasion::Sanitize,
            _ => Occasion::Command,
        }
    }

    /// Whether the command has completed, and this is what comes after.
    pub(crate) fn is_afterwards(self) -> bool {
        matches!(self, Self::Echo(0) | Self::LateData(0))
    }
}

impl FaultPlan {
    /// The rules that a controller with this plan breaks, as far as a wire can show them.
    pub fn breaks(&self) -> Vec<Rule> {
        let rules = self.rules.iter();
        rules.filter_map(|rule| rule.what.breaks()).collect()
    }

    /// No rule that ever fires, and room for faults that are armed one by one.
    pub fn on_demand() -> Self {
        let when = When {
            nth: Some(0),
            ..When::default()
        };
        let what = Fault::Drop;
        Self {
            rules: [FaultRule { when, what }].into(),
            seed: 0,
        }
    }
}
