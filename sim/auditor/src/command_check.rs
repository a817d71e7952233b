//! Checks one command against the controller's capabilities: its opcode, its namespace, its blocks,
//! its length, and the memory that its data pointer describes.

use crate::auditor::Auditor;
use crate::buffers::AddressRange;
use crate::data_pointer::{Memory, PointerWalk};
use crate::finding::Rule;
use crate::transfer::{self, TransferLength};
use nvme_spec::{PageSize, Sqe};

impl Auditor {
    pub(crate) fn transfer(&self, qid: u16, sqe: &Sqe) -> Option<TransferLength> {
        transfer::of(self.capabilities.as_ref()?, qid == 0, sqe)
    }

    /// Checks the fields of a command. True if it may be executed, so that its data pointer is
    /// worth following.
    pub(crate) fn check_fields(&mut self, qid: u16, sqe: &Sqe) -> bool {
        let (is_admin, cid) = (qid == 0, Some(sqe.cid().0));
        let Some(capabilities) = &self.capabilities else {
            return false;
        };
        let opcode = sqe.opcode();
        let namespace = capabilities.find(sqe.nsid).filter(|_| !is_admin);
        let last = u128::from(sqe.cdw10_11()) + u128::from(sqe.cdw12 & 0xFFFF);
        let past_end = transfer::has_block_range(opcode)
            && namespace.is_some_and(|one| last >= u128::from(one.blocks));
        let too_long = transfer::of(capabilities, is_admin, sqe)
            .is_some_and(|data| data.bytes > capabilities.max_bytes);
        let (rule, value) = if !capabilities.supports(is_admin, opcode) {
            (Rule::OpcodeUnsupported, u64::from(opcode))
        } else if !capabilities.accepts_namespace(is_admin, sqe) {
            (Rule::NamespaceAbsent, u64::from(sqe.nsid))
        } else if past_end {
            (Rule::LbaRange, sqe.cdw10_11())
        } else if too_long {
            (Rule::TooLong, u64::from(sqe.cdw12 & 0xFFFF) + 1)
        } else {
            return true;
        };
        self.find(rule, qid, cid, value);
        // The controller rejects such a command before it reads the data pointer, so no memory is
        // in use.
        false
    }

    pub(crate) fn check_command(&mut self, qid: u16, sqe: &Sqe, memory: Memory<'_>) -> PointerWalk {
        if !self.check_fields(qid, sqe) {
            return PointerWalk::default();
        }
        let data = self.transfer(qid, sqe);
        let (Some(data), Some(capabilities)) = (data, &self.capabilities) else {
            return PointerWalk::default();
        };
        let Some(page) = page_of(self.page) else {
            return PointerWalk::default();
        };
        let mut walk = PointerWalk::of(sqe, data.bytes, page, capabilities.sgl && qid != 0, memory);
        if data.metadata != 0 && walk.violation.is_none() {
            walk.spans.push(AddressRange::new(sqe.mptr, data.metadata));
        }
        walk
    }
}

/// Returns the page size of `bytes` bytes, or `None` for a number that is no page size.
fn page_of(bytes: u64) -> Option<PageSize> {
    PageSize::from_mps(bytes.checked_ilog2()?.checked_sub(12)? as u8)
}
