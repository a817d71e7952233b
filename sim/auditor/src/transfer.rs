//! The number of bytes that a command moves, computed from its fields and from the format of its
//! namespace, as the specification defines it for each opcode.

use crate::capabilities::ControllerCapabilities;
use nvme_spec::Sqe;
use nvme_spec::admin::{self, opcode as admin_op};
use nvme_spec::feature::{AUTONOMOUS_POWER_BYTES, HostBehavior, fid};
use nvme_spec::identify::IDENTIFY_BYTES;
use nvme_spec::nvm::{self, DsmRange, opcode as nvm_op};

/// Lengths of the data of one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferLength {
    /// Bytes at the data pointer.
    pub bytes: u64,
    /// Bytes at the metadata pointer.
    pub metadata: u64,
}

fn plain(bytes: u64) -> Option<TransferLength> {
    Some(TransferLength { bytes, metadata: 0 })
}

/// Returns the lengths that `sqe` moves; `None` for a command without data, and for commands whose
/// length is not known here.
pub fn of(
    capabilities: &ControllerCapabilities,
    is_admin: bool,
    sqe: &Sqe,
) -> Option<TransferLength> {
    if is_admin {
        of_admin(sqe)
    } else {
        of_nvm(capabilities, sqe)
    }
}

fn of_admin(sqe: &Sqe) -> Option<TransferLength> {
    match sqe.opcode() {
        admin_op::IDENTIFY => plain(IDENTIFY_BYTES as u64),
        admin_op::GET_LOG_PAGE => plain(admin::log_page_bytes(sqe)),
        // Select 3 asks for the feature's capabilities, which dword 0 of the completion carries.
        admin_op::GET_FEATURES if sqe.cdw10 >> 8 & 7 == 3 => None,
        admin_op::GET_FEATURES => plain(feature_bytes(sqe)?),
        admin_op::SET_FEATURES => plain(feature_bytes(sqe)?),
        admin_op::FIRMWARE_DOWNLOAD => plain((u64::from(sqe.cdw10) + 1) * 4),
        _ => None,
    }
}

/// Returns the bytes of a feature's data structure.
fn feature_bytes(sqe: &Sqe) -> Option<u64> {
    match sqe.cdw10 as u8 {
        fid::LBA_RANGE_TYPE => Some(4096),
        fid::AUTONOMOUS_POWER => Some(AUTONOMOUS_POWER_BYTES as u64),
        fid::TIMESTAMP => Some(8),
        fid::HOST_BEHAVIOR => Some(size_of::<HostBehavior>() as u64),
        _ => None,
    }
}

fn of_nvm(capabilities: &ControllerCapabilities, sqe: &Sqe) -> Option<TransferLength> {
    let namespace = capabilities.find(sqe.nsid)?;
    let blocks = u64::from(nvm::blocks(sqe));
    let moved = TransferLength {
        bytes: blocks * (namespace.block_bytes + namespace.inline_bytes),
        metadata: blocks * namespace.apart_bytes,
    };
    match sqe.opcode() {
        nvm_op::READ | nvm_op::WRITE | nvm_op::COMPARE => Some(moved),
        nvm_op::DATASET_MANAGEMENT => {
            let ranges = u64::from(sqe.cdw10 & 0xFF) + 1;
            plain(ranges * size_of::<DsmRange>() as u64)
        }
        _ => None,
    }
}

/// True if the command names a range of blocks.
pub fn has_block_range(opcode: u8) -> bool {
    matches!(
        opcode,
        nvm_op::READ
            | nvm_op::WRITE
            | nvm_op::COMPARE
            | nvm_op::WRITE_ZEROES
            | nvm_op::WRITE_UNCORRECTABLE
            | nvm_op::VERIFY
    )
}
