//! Decides whether a command may end as it did, and what its end says about the blocks.

use super::{Accounts, Failure, Record};
use crate::fault::Kind;
use crate::model::{self, BLOCK_WORDS, Effect};
use crate::plan::{Order, Verb};
use nvme_core::CommandOutcome;
use nvme_core::spec::Status;
use nvme_sim::Fault;

impl Accounts<'_> {
    /// Applies the effect of the command on the model of the blocks, or checks the data that it read.
    pub(super) fn take_effect(
        &mut self,
        id: u32,
        record: &Record,
        outcome: CommandOutcome,
    ) -> Result<(), Failure> {
        let Order {
            verb, lba, blocks, ..
        } = record.order;
        let same_power = record.cuts == self.cuts;
        let honest = !matches!(record.fault, Some(Fault::LateData(_)));
        let success = matches!(outcome, CommandOutcome::Completed(status) if status.is_success());
        let refused = match (outcome, record.fault) {
            // The status was made up by the fault: the command was not executed.
            (CommandOutcome::Completed(status), Some(Fault::Status(given))) => status == given,
            _ => false,
        };
        let durable = verb == Verb::WriteThrough;
        let effect = if success && honest && (same_power || durable) {
            Effect::Done { durable }
        } else {
            Effect::Unknown
        };
        match verb {
            Verb::Write | Verb::WriteThrough if !refused => {
                self.model.wrote(lba, blocks, id, effect)
            }
            Verb::Zero if !refused => self.model.wrote(lba, blocks, 0, effect),
            Verb::Flush if success && honest && same_power => self.model.flushed(record.stamp),
            Verb::Read if success && honest && same_power => return self.check_data(id, record),
            _ => {}
        }
        Ok(())
    }

    fn check_data(&mut self, id: u32, record: &Record) -> Result<(), Failure> {
        let Some((buffer, start, _)) = record.buffer else {
            return Ok(());
        };
        for block in 0..record.order.blocks {
            let lba = record.order.lba + block;
            let at = start + block as usize * BLOCK_WORDS;
            let words = self.pool.words(buffer).slice(at, BLOCK_WORDS);
            let found = words.and_then(|words| model::version_of(words, lba));
            let possible = found.is_some_and(|version| self.model.found(lba, version));
            if !possible {
                let may = self.model.possible(lba);
                let text = match found {
                    Some(version) => format!(
                        "command {id} read version {version} of block {lba}, which may be {may:?}"
                    ),
                    None => format!(
                        "command {id} read no version of block {lba} at all, which may be {may:?}"
                    ),
                };
                return Err(Failure::new("data", text));
            }
        }
        Ok(())
    }
}

pub(super) fn is_aborted(status: Status) -> bool {
    status.is(Status::ABORT_REQUESTED) || status.is(Status::ABORTED_SQ_DELETION)
}

/// Checks that a command may end with this status; `cut` says that power was lost meanwhile.
pub(super) fn check_status(
    id: u32,
    record: &Record,
    status: Status,
    cut: bool,
) -> Result<(), Failure> {
    let wrong = |why: &str| {
        let text = format!(
            "command {id} ({:?}) ended with {status:?}: {why}",
            record.order.verb
        );
        Err(Failure::new("account", text))
    };
    // Unless the command was dropped, the controller still had it, so it may end as aborted.
    if is_aborted(status) && record.abortable && record.fault != Some(Fault::Drop) {
        return Ok(());
    }
    match record.fault {
        Some(Fault::Drop | Fault::WrongCid(_) | Fault::FlippedCid(_) | Fault::WrongPhase) => {
            return wrong(&format!(
                "its completion was never to come: {:?}",
                record.fault.and_then(Kind::of)
            ));
        }
        Some(Fault::Status(given)) if status == given => return Ok(()),
        Some(Fault::LateData(_)) if status.is_success() => return Ok(()),
        _ => {}
    }
    let fits = match record.order.verb {
        Verb::OutOfRange => status.is(Status::LBA_OUT_OF_RANGE),
        Verb::Compare | Verb::CompareOther => {
            let same = status.is_success();
            let known = record.same.filter(|_| !cut);
            (same || status.is(Status::COMPARE_FAILURE)) && known.is_none_or(|known| known == same)
        }
        _ => status.is_success(),
    };
    if fits {
        Ok(())
    } else {
        wrong("nothing is wrong with it")
    }
}
