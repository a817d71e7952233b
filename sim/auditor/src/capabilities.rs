//! The limits, commands and namespaces that a controller reports about itself: the auditor checks a command only by
//! these, so that a command which the controller never offered is the driver's fault.

use alloc::collections::BTreeMap;
use nvme_spec::admin::{cns, opcode as admin};
use nvme_spec::identify::{IdentifyController, IdentifyNamespace, oacs, oncs, sgls, vwc};
use nvme_spec::nvm::opcode as nvm;
use nvme_spec::register::Cap;
use nvme_spec::{Nsid, Sqe};

/// Opcodes without a name in `spec`, with the bit of OACS or ONCS that offers them.
const OTHER_ADMIN: [(u8, u16); 7] = [
    (0x81, oacs::SECURITY),
    (0x82, oacs::SECURITY),
    (0x19, oacs::DIRECTIVES),
    (0x1A, oacs::DIRECTIVES),
    (0x1C, oacs::VIRTUALIZATION),
    (0x1D, oacs::NVME_MI),
    (0x1E, oacs::NVME_MI),
];
const OTHER_NVM: [(u8, u16); 5] = [
    (0x0D, oncs::RESERVATIONS),
    (0x0E, oncs::RESERVATIONS),
    (0x11, oncs::RESERVATIONS),
    (0x15, oncs::RESERVATIONS),
    (0x19, oncs::COPY),
];

/// Size and format of one namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamespaceFormat {
    pub blocks: u64,
    pub block_bytes: u64,
    /// Metadata bytes per block: interleaved with the data (inline), or in the buffer of MPTR
    /// (apart).
    pub inline_bytes: u64,
    pub apart_bytes: u64,
}

/// Capabilities and Identify data of a controller, known before it is enabled.
#[derive(Clone, Debug)]
pub struct ControllerCapabilities {
    pub(crate) mqes: u32,
    pub(crate) sgl: bool,
    /// Limit of the bytes that one command moves (MDTS); `u64::MAX` without a limit.
    pub(crate) max_bytes: u64,
    oacs: u16,
    oncs: u16,
    sanitize: bool,
    flush_all: bool,
    /// Highest possible namespace identifier (NN).
    nn: u32,
    namespaces: BTreeMap<u32, NamespaceFormat>,
}

impl ControllerCapabilities {
    /// Takes CAP and Identify Controller; namespaces are added with [`add_namespace`](Self::add_namespace).
    pub fn new(cap: Cap, identify: &IdentifyController) -> Self {
        let max_bytes = match identify.mdts {
            0 => u64::MAX,
            mdts => 1u64
                .checked_shl(12 + u32::from(cap.mpsmin()) + u32::from(mdts))
                .unwrap_or(u64::MAX),
        };
        Self {
            mqes: cap.mqes(),
            sgl: identify.sgls & sgls::SUPPORT != 0,
            max_bytes,
            oacs: identify.oacs,
            oncs: identify.oncs,
            sanitize: identify.sanicap & 7 != 0,
            flush_all: identify.vwc & vwc::BROADCAST != vwc::BROADCAST_NOT_SUPPORTED,
            nn: identify.nn,
            namespaces: BTreeMap::new(),
        }
    }

    /// Returns a controller that supports every command and transfer size, with these namespaces of
    /// unlimited size.
    pub fn unrestricted(namespaces: &[u32]) -> Self {
        let whole = NamespaceFormat {
            blocks: u64::MAX,
            block_bytes: 512,
            inline_bytes: 0,
            apart_bytes: 0,
        };
        Self {
            mqes: 1 << 16,
            sgl: true,
            max_bytes: u64::MAX,
            oacs: u16::MAX,
            oncs: u16::MAX,
            sanitize: true,
            flush_all: true,
            nn: u32::MAX,
            namespaces: namespaces.iter().map(|nsid| (*nsid, whole)).collect(),
        }
    }

    /// Adds namespace `nsid`, or gives it a new format.
    pub fn add_namespace(&mut self, nsid: u32, identify: &IdentifyNamespace) {
        let format = identify.lba_format();
        let inline = identify.flbas & IdentifyNamespace::EXTENDED_METADATA != 0;
        let metadata = u64::from(format.ms);
        self.namespaces.insert(
            nsid,
            NamespaceFormat {
                blocks: identify.nsze,
                block_bytes: u64::from(format.block_bytes().unwrap_or(512)),
                inline_bytes: if inline { metadata } else { 0 },
                apart_bytes: if inline { 0 } else { metadata },
            },
        );
    }

    /// Returns the namespace that an I/O command names, if it exists.
    pub(crate) fn find(&self, nsid: u32) -> Option<&NamespaceFormat> {
        self.namespaces.get(&nsid)
    }

    /// True if the command may carry the namespace identifier that it carries.
    pub(crate) fn accepts_namespace(&self, is_admin: bool, sqe: &Sqe) -> bool {
        let one = self.namespaces.contains_key(&sqe.nsid);
        let all = sqe.nsid == Nsid::ALL.0;
        let none = sqe.nsid == Nsid::NONE.0;
        match (is_admin, sqe.opcode()) {
            (false, nvm::FLUSH) => one || (all && self.flush_all),
            (false, _) => one,
            (true, admin::IDENTIFY) => match sqe.cdw10 as u8 {
                // Identify may ask for an identifier that is valid but not active: the controller
                // answers with zeroes.
                cns::NAMESPACE
                | cns::NAMESPACE_DESCRIPTORS
                | cns::CSI_NAMESPACE
                | cns::INDEPENDENT_NAMESPACE
                | cns::ALLOCATED_NAMESPACE => all || (!none && sqe.nsid <= self.nn),
                _ => true,
            },
            (true, admin::FORMAT_NVM) => one || all,
            (true, admin::GET_LOG_PAGE | admin::GET_FEATURES | admin::SET_FEATURES) => {
                one || all || none
            }
            (true, _) => true,
        }
    }

    /// True if the controller has reported support for the command.
    pub(crate) fn supports(&self, is_admin: bool, opcode: u8) -> bool {
        // Vendor specific commands are outside the specification, so that they cannot be checked.
        let vendor = if is_admin { 0xC0 } else { 0x80 };
        if opcode >= vendor {
            return true;
        }
        let (needed, others) = match is_admin {
            true => (admin_needs(opcode), &OTHER_ADMIN[..]),
            false => (nvm_needs(opcode), &OTHER_NVM[..]),
        };
        if is_admin && opcode == admin::SANITIZE {
            return self.sanitize;
        }
        let has = if is_admin { self.oacs } else { self.oncs };
        match needed {
            Some(bit) => bit == 0 || has & bit != 0,
            None => others
                .iter()
                .any(|(code, bit)| *code == opcode && has & bit != 0),
        }
    }
}

/// Returns the bit of OACS that offers the command, 0 for a mandatory one, `None` for an unknown
/// one.
fn admin_needs(opcode: u8) -> Option<u16> {
    Some(match opcode {
        admin::DELETE_IO_SQ
        | admin::CREATE_IO_SQ
        | admin::GET_LOG_PAGE
        | admin::DELETE_IO_CQ
        | admin::CREATE_IO_CQ
        | admin::IDENTIFY
        | admin::ABORT
        | admin::SET_FEATURES
        | admin::GET_FEATURES
        | admin::ASYNC_EVENT_REQUEST
        | admin::KEEP_ALIVE => 0,
        admin::FORMAT_NVM => oacs::FORMAT,
        admin::FIRMWARE_COMMIT | admin::FIRMWARE_DOWNLOAD => oacs::FIRMWARE,
        admin::NAMESPACE_MANAGEMENT | admin::NAMESPACE_ATTACHMENT => oacs::NS_MANAGEMENT,
        admin::DEVICE_SELF_TEST => oacs::SELF_TEST,
        admin::DOORBELL_BUFFER_CONFIG => oacs::DOORBELL_BUFFER,
        _ => return None,
    })
}

/// Returns the bit of ONCS that offers the command, 0 for a mandatory one, `None` for an unknown
/// one.
fn nvm_needs(opcode: u8) -> Option<u16> {
    Some(match opcode {
        nvm::FLUSH | nvm::WRITE | nvm::READ => 0,
        nvm::WRITE_UNCORRECTABLE => oncs::WRITE_UNCORRECTABLE,
        nvm::COMPARE => oncs::COMPARE,
        nvm::WRITE_ZEROES => oncs::WRITE_ZEROES,
        nvm::DATASET_MANAGEMENT => oncs::DATASET_MANAGEMENT,
        nvm::VERIFY => oncs::VERIFY,
        _ => return None,
    })
}
