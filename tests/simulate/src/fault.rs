//! The faults, the states of the driver in which they strike, and the number of times that each pair was seen.

use crate::setup::COMMAND_NS;
use nvme_core::spec::Status;
use nvme_sim::Fault;

/// An enumeration, and a list of its values in their order.
macro_rules! listed {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $value:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$of])* $value,)*
        }

        impl $name {
            /// Every value.
            pub const ALL: [Self; [$(Self::$value),*].len()] = [$(Self::$value),*];
        }
    };
}

listed! {
    /// Kinds of faults.
    Kind {
        /// A command is fetched and never completes.
        Drop,
        /// A command takes longer, and is in time.
        Delay,
        /// A command's data and completion arrive after its deadline; an Abort finds the command.
        Late,
        /// A command is late; an Abort reports that the command was aborted, although it continues.
        Stubborn,
        /// A completion overtakes others.
        Reorder,
        /// A completion comes twice in a row.
        Duplicate,
        /// A completion is posted again later, when its slot may be in use again.
        Echo,
        /// The data move after the completion, when the slot may be in use again.
        LateData,
        /// A completion names a command that does not exist.
        WrongCid,
        /// A completion names an earlier or later command of its slot.
        StaleCid,
        /// A completion has the phase tag of the pass before.
        WrongPhase,
        /// A completion has another submission queue head.
        BadSqhd,
        /// A completion's phase tag is there before its first dwords are.
        TornCqe,
        /// A command ends with any status.
        Status,
        /// The controller stops with CSTS.CFS.
        Cfs,
        /// CSTS.RDY does not follow CC.EN.
        StuckReady,
        /// The controller reads as all ones for a while.
        AllOnes,
        /// The controller is pulled out, and comes back after a loss of power.
        Removal,
        /// The host resets the controller.
        Reset,
        /// The controller restarts without a request; queue memory is not changed.
        Restart,
        /// Power fails and comes back; the write cache is lost.
        PowerCut,
        /// A tail doorbell does not arrive.
        LostTail,
        /// A head doorbell does not arrive.
        LostHead,
    }
}

impl Kind {
    /// Returns the fault of a command, or of a change of CC.EN, that the controller is to execute; `None` for faults of
    /// the controller itself. `value` is any number.
    pub fn armed(self, value: u64) -> Option<Fault> {
        let short = 1_000 + value % 300_000;
        Some(match self {
            Self::Drop => Fault::Drop,
            Self::Delay => Fault::Delay(short),
            Self::Late => Fault::Delay(COMMAND_NS + value % (2 * COMMAND_NS)),
            Self::Stubborn => Fault::Stubborn(COMMAND_NS + value % COMMAND_NS),
            Self::Reorder => Fault::Reorder,
            Self::Duplicate => Fault::Duplicate,
            // Some echoes are so late that every other command has ended or timed out.
            Self::Echo => Fault::Echo(spread(value)),
            Self::LateData => Fault::LateData(spread(value)),
            // A slot that no queue here has: a driver cannot detect the identifier of a command in flight.
            Self::WrongCid => Fault::WrongCid((value as u16 & 0x7FFF) | 0x0800),
            Self::StaleCid => Fault::FlippedCid(((value as u16 % 15) + 1) << 12),
            Self::WrongPhase => Fault::WrongPhase,
            Self::BadSqhd if value.is_multiple_of(4) => Fault::BadSqhd((value >> 8) as u16),
            Self::BadSqhd => Fault::BadSqhd((value >> 8) as u16 % 72),
            Self::TornCqe => Fault::TornCqe,
            Self::Status => Fault::Status(any_status(value)),
            Self::StuckReady => Fault::StuckReady,
            _ => return None,
        })
    }

    /// Returns the kind of a fault that the controller reports as fired. An echo and late data count when they arrive:
    /// their first part is correct behaviour.
    pub fn of(what: Fault) -> Option<Self> {
        Some(match what {
            Fault::Drop => Self::Drop,
            Fault::Delay(ns) if ns >= COMMAND_NS => Self::Late,
            Fault::Delay(_) => Self::Delay,
            Fault::Stubborn(_) => Self::Stubborn,
            Fault::Reorder => Self::Reorder,
            Fault::Duplicate => Self::Duplicate,
            Fault::Echo(0) => Self::Echo,
            Fault::LateData(0) => Self::LateData,
            // No command of the simulation starts a sanitize operation.
            Fault::Echo(_) | Fault::LateData(_) | Fault::SanitizeFails | Fault::External(_) => {
                return None;
            }
            Fault::WrongCid(_) => Self::WrongCid,
            Fault::FlippedCid(_) => Self::StaleCid,
            Fault::WrongPhase => Self::WrongPhase,
            Fault::BadSqhd(_) => Self::BadSqhd,
            Fault::TornCqe => Self::TornCqe,
            Fault::Status(_) => Self::Status,
            Fault::Cfs => Self::Cfs,
            Fault::AllOnes => Self::AllOnes,
            Fault::StuckReady => Self::StuckReady,
        })
    }

    /// Returns whether the fault strikes a command when the controller fetches it.
    pub fn is_of_command(self) -> bool {
        self != Self::StuckReady && self.armed(1).is_some()
    }
}

/// Returns a time of 1 us to 150 ms; short and long ones are about equally likely.
fn spread(value: u64) -> u64 {
    let scale = [10_000, 200_000, 5_000_000, 150_000_000][value as usize % 4];
    1_000 + (value >> 2) % scale
}

/// Returns any status but success, with any retry hints.
fn any_status(value: u64) -> Status {
    let status = Status(value as u16 & 0x7FFF);
    if status.is_success() {
        Status(status.0 | Status::INTERNAL_ERROR.0)
    } else {
        status
    }
}

listed! {
    /// The state of the driver.
    State {
        /// The first bring-up, or one after a shutdown.
        BringUp,
        /// The controller is up, with nothing in flight.
        Idle,
        /// Up, with commands in flight.
        InFlight,
        /// The controller is up, with a queue that takes no more commands.
        Full,
        /// A command is past its deadline, and the host has not reacted yet.
        TimedOut,
        /// A command is being aborted.
        Aborting,
        /// No more commands are taken; the commands in flight end, then the queues are deleted.
        Draining,
        /// The controller is reset and brought up again after trouble.
        Recovering,
        /// The controller is being shut down, or is.
        ShutDown,
    }
}

/// Returns the reason why `kind` cannot happen in `state`; `None` if it can.
pub fn impossible(kind: Kind, state: State) -> Option<&'static str> {
    match (kind, state) {
        (Kind::Echo | Kind::LateData, State::Idle) => None,
        (Kind::LateData, State::BringUp) => {
            Some("nothing was submitted since the reset, and admin data are never late")
        }
        (Kind::LostTail, State::Idle) => Some("a tail doorbell is rung for a command in flight"),
        (Kind::LostTail | Kind::LostHead, State::ShutDown) => {
            Some("nothing is rung once the queues are gone")
        }
        (Kind::StuckReady, State::BringUp | State::Recovering | State::ShutDown) => None,
        (Kind::StuckReady, _) => Some("CC.EN changes only in bring-up, recovery and shutdown"),
        (kind, State::Idle) if kind.is_of_command() => {
            Some("a command is hit when it is fetched, and then it is in flight")
        }
        (kind, State::ShutDown) if kind.is_of_command() => {
            Some("no command is fetched once the queues are gone")
        }
        _ => None,
    }
}

/// Number of times that each kind was seen in each state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage([[u64; State::ALL.len()]; Kind::ALL.len()]);

impl Coverage {
    /// Counts one.
    pub fn hit(&mut self, kind: Kind, state: State) {
        self.0[kind as usize][state as usize] += 1;
    }

    /// Returns the number of times that `kind` was seen in `state`.
    pub fn count(&self, kind: Kind, state: State) -> u64 {
        self.0[kind as usize][state as usize]
    }

    /// Returns the number of faults that were seen.
    pub fn total(&self) -> u64 {
        self.0.iter().flatten().sum()
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.0.iter_mut().flatten().zip(other.0.iter().flatten()) {
            *sum += more;
        }
    }

    /// Returns the pairs that can happen and were never seen.
    pub fn missing(&self) -> Vec<(Kind, State)> {
        self.pairs(|kind, state| impossible(kind, state).is_none() && self.count(kind, state) == 0)
    }

    /// Returns the pairs that were seen although the list says that they are impossible: then the list is wrong. An
    /// echo of the deletion of a queue may arrive after the queues are gone, but no trap can ask for it.
    pub fn surprising(&self) -> Vec<(Kind, State)> {
        let by_chance = (Kind::Echo, State::ShutDown);
        self.pairs(|kind, state| {
            impossible(kind, state).is_some()
                && (kind, state) != by_chance
                && self.count(kind, state) > 0
        })
    }

    fn pairs(&self, wanted: impl Fn(Kind, State) -> bool) -> Vec<(Kind, State)> {
        let all = Kind::ALL
            .into_iter()
            .flat_map(|kind| State::ALL.map(|state| (kind, state)));
        all.filter(|(kind, state)| wanted(*kind, *state)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_armed_fault_is_told_by_its_name() {
        for kind in Kind::ALL {
            for value in [0, 1, 4, 0x8000, 0x7FFF_FFFF, u64::MAX] {
                let Some(fault) = kind.armed(value) else {
                    continue;
                };
                let told = match fault {
                    Fault::Echo(ns) => {
                        assert!(ns > 0);
                        Kind::of(Fault::Echo(0))
                    }
                    Fault::LateData(ns) => {
                        assert!(ns > 0);
                        Kind::of(Fault::LateData(0))
                    }
                    fault => Kind::of(fault),
                };
                assert_eq!(told, Some(kind), "{fault:?}");
            }
        }
    }

    #[test]
    fn what_is_missing_and_what_surprises_is_found() {
        let mut coverage = Coverage::default();
        let possible = coverage.missing().len();
        coverage.hit(Kind::Drop, State::Full);
        assert_eq!(coverage.missing().len(), possible - 1);
        assert_eq!(coverage.surprising(), []);
        coverage.hit(Kind::Drop, State::Idle);
        assert_eq!(coverage.surprising(), [(Kind::Drop, State::Idle)]);
    }
}
