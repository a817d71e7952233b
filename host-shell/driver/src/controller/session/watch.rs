//! Queries that run while a long admin command is under way: an Identify command every half second, such as for the
//! progress of a format. Their answers are for information only, so a query that cannot be sent is skipped.

use crate::device::Device;
use crate::dma::{DmaBuffer, Lease, OwnedPair};
use nvme_core::spec::identify::IDENTIFY_BYTES;
use nvme_core::spec::{Cid, Sqe};
use nvme_core::{CommandCompletion, CommandData};
use std::sync::Arc;

/// Interval of the queries in ns, from the start of the command or from the last answer.
const PAUSE_NS: u64 = 500_000_000;

/// A query, which is an Identify command, and the function that receives its answers.
///
/// The last one may be under way when the watched command ends. Its answer is dropped by the next admin command, or
/// by a reset.
pub(crate) struct IdentifyWatch<'a> {
    sqe: Sqe,
    seen: &'a mut dyn FnMut(&[u8]),
    asked: Option<Cid>,
    next_ns: Option<u64>,
}

impl<'a> IdentifyWatch<'a> {
    pub fn new(sqe: Sqe, seen: &'a mut dyn FnMut(&[u8])) -> Self {
        Self {
            sqe,
            seen,
            asked: None,
            next_ns: None,
        }
    }

    /// Sends the query when it is due. One that cannot be sent is skipped: the answers are for information.
    pub(super) fn ask(&mut self, device: &Arc<dyn Device>, now_ns: u64, admin: &mut OwnedPair) {
        let next_ns = *self.next_ns.get_or_insert(now_ns.saturating_add(PAUSE_NS));
        if self.asked.is_some() || now_ns < next_ns {
            return;
        }
        self.next_ns = None;
        let Ok(buffer) = DmaBuffer::new(device, IDENTIFY_BYTES) else {
            return;
        };
        let data = CommandData::Contiguous {
            iova: buffer.iova(),
            len: buffer.len() as u64,
        };
        let queue = admin.queue();
        self.asked = queue.submit(self.sqe, data, Some(buffer), u64::MAX).ok();
        queue.ring();
    }

    /// Takes the completion of its query, and returns any other completion.
    pub(super) fn take(
        &mut self,
        done: CommandCompletion<Lease>,
    ) -> Option<CommandCompletion<Lease>> {
        if self.asked != Some(done.cid) {
            return Some(done);
        }
        self.asked = None;
        if done.outcome.is_success()
            && let Some(buffer) = &done.buffer
        {
            (self.seen)(buffer.as_slice());
        }
        None
    }
}
