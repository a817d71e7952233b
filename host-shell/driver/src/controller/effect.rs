//! The effects of this process's admin commands on the facts that handles rely on. No event reports them to the host
//! that sent the command.
//!
//! NVMe Base 2.0c, 5 (Admin Command Set): a controller need not report Namespace Attribute Changed to the host whose
//! command changed the attribute.

use nvme_core::spec::admin::opcode;
use nvme_core::spec::identify::fna;
use nvme_core::spec::{Nsid, Sqe};

/// SEL of Namespace Management: delete.
const DELETE: u32 = 1;
/// SANACT of Sanitize: Exit Failure Mode, which erases nothing.
const EXIT_FAILURE_MODE: u32 = 1;

/// Effect of an admin command on the known facts of controller and namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandEffect {
    /// The command changes no fact on which a handle relies.
    Nothing,
    /// Facts may have changed: they are read again.
    Facts,
    /// The command has the effect of `Facts`, and the data of a namespace are erased, of all namespaces for
    /// [`Nsid::ALL`].
    Erased(Nsid),
    /// The command has the effect of `Erased` for every namespace; the controller continues a sanitize operation after
    /// the command has completed.
    Sanitized,
}

impl CommandEffect {
    /// Returns the effect of `sqe`, an admin command of a controller with Format NVM Attributes
    /// `attributes`. An opcode that is not known to leave everything unchanged counts as a change.
    pub fn of(sqe: &Sqe, attributes: u8) -> Self {
        match sqe.opcode() {
            opcode::GET_LOG_PAGE
            | opcode::IDENTIFY
            | opcode::GET_FEATURES
            | opcode::KEEP_ALIVE
            | opcode::GET_LBA_STATUS
            | opcode::ABORT
            | opcode::ASYNC_EVENT_REQUEST
            | opcode::CREATE_IO_CQ
            | opcode::CREATE_IO_SQ
            | opcode::DELETE_IO_CQ
            | opcode::DELETE_IO_SQ
            | opcode::FIRMWARE_DOWNLOAD => Self::Nothing,
            opcode::FORMAT_NVM => {
                // Bits 11:9 of dword 10 are the secure erase settings.
                let is_erase = sqe.cdw10 >> 9 & 7 != 0;
                let is_all = attributes & fna::FORMAT_ALL != 0
                    || is_erase && attributes & fna::ERASE_ALL != 0;
                Self::Erased(if is_all { Nsid::ALL } else { Nsid(sqe.nsid) })
            }
            opcode::SANITIZE if sqe.cdw10 & 7 != EXIT_FAILURE_MODE => Self::Sanitized,
            opcode::NAMESPACE_MANAGEMENT if sqe.cdw10 & 0xF == DELETE => {
                Self::Erased(Nsid(sqe.nsid))
            }
            _ => Self::Facts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_core::spec::admin::{self, Format, SanitizeAction, SanitizeFields};

    #[test]
    fn each_command_has_the_effect_that_the_specification_gives_it() {
        let dwords = |code, cdw10| {
            let mut sqe = Sqe::new(code, Nsid(3));
            sqe.cdw10 = cdw10;
            sqe
        };
        let one = CommandEffect::Erased(Nsid(3));
        let all = CommandEffect::Erased(Nsid::ALL);
        for (sqe, attributes, effect) in [
            (admin::identify(0, Nsid(1)), 0, CommandEffect::Nothing),
            (admin::async_event_request(), 0, CommandEffect::Nothing),
            (Format::new(0, 0).command(Nsid(3)), 0, one),
            (Format::new(0, 1).command(Nsid(3)), fna::ERASE_ALL, all),
            (Format::new(0, 0).command(Nsid(3)), fna::ERASE_ALL, one),
            (Format::new(0, 0).command(Nsid(3)), fna::FORMAT_ALL, all),
            (Format::new(0, 0).command(Nsid::ALL), 0, all),
            (
                admin::sanitize(SanitizeFields::new(SanitizeAction::BlockErase)),
                0,
                CommandEffect::Sanitized,
            ),
            (
                admin::sanitize(SanitizeFields::new(SanitizeAction::ExitFailureMode)),
                0,
                CommandEffect::Facts,
            ),
            (dwords(opcode::NAMESPACE_MANAGEMENT, 1), 0, one),
            (
                dwords(opcode::NAMESPACE_MANAGEMENT, 0),
                0,
                CommandEffect::Facts,
            ),
            (
                dwords(opcode::NAMESPACE_ATTACHMENT, 1),
                0,
                CommandEffect::Facts,
            ),
            (dwords(opcode::FIRMWARE_COMMIT, 0), 0, CommandEffect::Facts),
            (dwords(opcode::SET_FEATURES, 0x84), 0, CommandEffect::Facts),
            (dwords(opcode::SECURITY_SEND, 0), 0, CommandEffect::Facts),
            (dwords(0xC0, 0), 0, CommandEffect::Facts),
        ] {
            assert_eq!(
                CommandEffect::of(&sqe, attributes),
                effect,
                "{:#x}",
                sqe.opcode()
            );
        }
    }
}
