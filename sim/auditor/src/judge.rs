//! Checks one command against the controller's capabilities: its opcode, its namespace, its blocks,
//! its length, and the memory that its data pointer describes.

use crate::auditor::Auditor;
use crate::finding::Rule;
use crate::lent::Span;
use crate::transfer::{self, Transfer};
use crate::walk::{Memory, Walked};
use nvme_spec::{PageSize, Sqe};

impl Auditor {
    pub(crate) fn transfer(&self, qid: u16, sqe: &Sqe) -> Option<Transfer> {
        transfer::of(self.account.as_ref()?, qid == 0, sqe)
    }

    /// Checks the fields of a command. True if it may be executed, so that its data pointer is
    /// worth following.
    pub(crate) fn judge_fields(&mut self, qid: u16, sqe: &Sqe) -> bool {
        let (is_admin, cid) = (qid == 0, Some(sqe.cid().0));
        let Some(account) = &self.account else {
            return false;
        };
        let opcode = sqe.opcode();
        let namespace = account.find(sqe.nsid).filter(|_| !is_admin);
        let last = u128::from(sqe.cdw10_11()) + u128::from(sqe.cdw12 & 0xFFFF);
        let past_end = transfer::names_blocks(opcode)
            && namespace.is_some_and(|one| last >= u128::from(one.blocks));
        let too_long =
            transfer::of(account, is_admin, sqe).is_some_and(|data| data.bytes > account.max_bytes);
        let (rule, value) = if !account.supports(is_admin, opcode) {
            (Rule::OpcodeUnsupported, u64::from(opcode))
        } else if !account.names_well(is_admin, sqe) {
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

    pub(crate) fn judge(&mut self, qid: u16, sqe: &Sqe, memory: Memory<'_>) -> Walked {
        if !self.judge_fields(qid, sqe) {
            return Walked::default();
        }
        let data = self.transfer(qid, sqe);
        let (Some(data), Some(account)) = (data, &self.account) else {
            return Walked::default();
        };
        let Some(page) = page_of(self.page) else {
            return Walked::default();
        };
        let mut walked = Walked::of(sqe, data.bytes, page, account.sgl && qid != 0, memory);
        if data.metadata != 0 && walked.wrong.is_none() {
            walked.spans.push(Span::new(sqe.mptr, data.metadata));
        }
        walked
    }
}

/// Returns the page size of `bytes` bytes, or `None` for a number that is no page size.
fn page_of(bytes: u64) -> Option<PageSize> {
    PageSize::from_mps(bytes.checked_ilog2()?.checked_sub(12)? as u8)
}
