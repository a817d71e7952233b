//! The commands of this controller, and the entries of the Commands Supported and Effects log page
//! for them.

use nvme_spec::admin::opcode;
use nvme_spec::log_page::{CommandsSupported, effects};
use nvme_spec::nvm::opcode as nvm_opcode;
use zerocopy::FromZeros;

/// True if `code` is an admin command of this controller.
pub(crate) fn is_supported(code: u8) -> bool {
    matches!(
        code,
        opcode::CREATE_IO_CQ
            | opcode::CREATE_IO_SQ
            | opcode::DELETE_IO_CQ
            | opcode::DELETE_IO_SQ
            | opcode::IDENTIFY
            | opcode::GET_LOG_PAGE
            | opcode::GET_FEATURES
            | opcode::SET_FEATURES
            | opcode::ABORT
            | opcode::ASYNC_EVENT_REQUEST
            | opcode::FORMAT_NVM
            | opcode::SANITIZE
            | opcode::KEEP_ALIVE
    )
}

/// Builds the Commands Supported and Effects log page.
pub(crate) fn commands_supported() -> CommandsSupported {
    let mut commands = CommandsSupported::new_zeroed();
    let alone = 2 << effects::SUBMISSION.trailing_zeros();
    for code in (0..=255u8).filter(|code| is_supported(*code)) {
        let more = match code {
            opcode::FORMAT_NVM => {
                let changes = effects::BLOCK_CONTENT | effects::NAMESPACE_CAPABILITY;
                changes | alone | effects::SCOPE_NAMESPACE
            }
            opcode::SANITIZE => effects::BLOCK_CONTENT | alone | effects::SCOPE_SUBSYSTEM,
            opcode::IDENTIFY | opcode::GET_FEATURES | opcode::SET_FEATURES => {
                effects::SCOPE_NAMESPACE | effects::SCOPE_CONTROLLER
            }
            _ => effects::SCOPE_CONTROLLER,
        };
        commands.acs[usize::from(code)] = effects::SUPPORTED | more;
    }
    let reads = [
        nvm_opcode::FLUSH,
        nvm_opcode::READ,
        nvm_opcode::COMPARE,
        nvm_opcode::VERIFY,
    ];
    for code in reads {
        // I/O commands have no scope, which the specification leaves optional: Linux 6.12 warns of
        // effects of I/O commands that it does not know.
        commands.iocs[usize::from(code)] = effects::SUPPORTED;
    }
    let writes = [
        nvm_opcode::WRITE,
        nvm_opcode::WRITE_UNCORRECTABLE,
        nvm_opcode::WRITE_ZEROES,
        nvm_opcode::DATASET_MANAGEMENT,
    ];
    for code in writes {
        commands.iocs[usize::from(code)] = effects::SUPPORTED | effects::BLOCK_CONTENT;
    }
    commands
}
