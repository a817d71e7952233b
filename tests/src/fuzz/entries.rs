//! Completion entries, right and wrong ones, that a fuzzer posts to a queue.

use crate::hand::{Hand, QID};
use arbitrary::{Arbitrary, Unstructured};
use nvme_core::spec::{Cid, Cqe, Status};

/// Returns the number of entries and of slots of a queue, and the position where it begins: 0, or two passes before the
/// 32-bit wrap.
pub fn sizes(input: &mut Unstructured<'_>) -> arbitrary::Result<[u32; 3]> {
    let (log2, slots, wraps) = <(u8, u8, bool)>::arbitrary(input)?;
    let entries = 2 << (log2 % 5);
    let slots = 1 + u32::from(slots) % (entries - 1);
    let start = if wraps {
        0u32.wrapping_sub(2 * entries)
    } else {
        0
    };
    Ok([entries, slots, start])
}

/// The entry to post.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Entry {
    /// The end of a command that was fetched.
    Right { pick: u8, status: u16, dw0: u32 },
    /// The end of a command that was fetched, with another head or queue.
    Strange {
        pick: u8,
        sqhd: u16,
        sqid: Option<u16>,
    },
    /// Completes once more a command that has ended.
    Twice { pick: u8 },
    /// A command that there may not be.
    Wrong { slot: u8, generation: u8, sqhd: u16 },
    /// Any entry.
    Any { lower: u64, upper: u64 },
}

/// The commands that the controller has fetched, and the entries that it has posted, since the queue was created.
#[derive(Default)]
pub struct Posted {
    waiting: Vec<u16>,
    all: Vec<Cqe>,
}

impl Posted {
    /// Fetches the new commands and posts one entry if the ring has room.
    pub fn post(&mut self, hand: &mut Hand<'_>, entry: Entry) {
        while let Some(sqe) = hand.fetch() {
            self.waiting.push(sqe.cid().0);
        }
        if !hand.has_room() {
            return;
        }
        let take = |waiting: &mut Vec<u16>, pick: u8| match waiting.len() {
            0 => None,
            count => Some(waiting.remove(usize::from(pick) % count)),
        };
        let honest = |cid: u16, status, dw0| hand.completion(Cid(cid), Status(status), dw0);
        let cqe = match entry {
            Entry::Right { pick, status, dw0 } => {
                let cid = take(&mut self.waiting, pick);
                cid.map(|cid| honest(cid, status & 0x7FFF, dw0))
            }
            Entry::Strange { pick, sqhd, sqid } => take(&mut self.waiting, pick).map(|cid| Cqe {
                sqhd,
                sqid: sqid.unwrap_or(QID.0),
                ..honest(cid, 0, 0)
            }),
            Entry::Twice { pick } => {
                let before = self.all.get(usize::from(pick) % self.all.len().max(1));
                before.map(|before| honest(before.cid, 0, u32::from(pick)))
            }
            Entry::Wrong {
                slot,
                generation,
                sqhd,
            } => {
                let cid = u16::from(slot % 40) | u16::from(generation) << 12;
                Some(Cqe {
                    sqhd,
                    ..honest(cid, 0, 0)
                })
            }
            Entry::Any { lower, upper } => {
                let mut cqe = Cqe::from_words(lower, upper);
                let phase = honest(0, 0, 0).phase_status & 1;
                cqe.phase_status = cqe.phase_status & !1 | phase;
                Some(cqe)
            }
        };
        if let Some(cqe) = cqe {
            // The named command ends, whichever one the fuzzer meant.
            self.waiting.retain(|cid| *cid != cqe.cid);
            hand.post(cqe);
            self.all.push(cqe);
        }
    }

    /// Returns the entries after the first `since` that end command `cid` with `status`.
    pub fn told(
        &self,
        cid: Cid,
        status: Status,
        since: usize,
    ) -> impl Iterator<Item = &Cqe> + Clone {
        let after = self.all.iter().skip(since);
        after.filter(move |cqe| cqe.cid() == cid && cqe.status() == status && cqe.sqid() == QID)
    }
}
