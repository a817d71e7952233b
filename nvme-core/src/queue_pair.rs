//! A submission and a completion queue with one owner.
//!
//! Invariant: each submitted command ends exactly once, with the buffer it was submitted with: completed,
//! failed with a [`Status`], or aborted with a reason. Commands in flight never exceed the smaller ring minus
//! one, so neither ring can overflow.

use crate::cq::CompletionQueue;
use crate::error::{ControllerFault, PointerError, SubmitError};
use crate::inflight::{CommandSlot, InflightTable, MAX_IN_FLIGHT, ReleasedSlot};
use crate::mem::{CqRing, DmaWords, DoorbellRegister, SqRing};
use crate::outcome::CommandOutcome;
use crate::prp;
use crate::quiesced::{ClosedQueue, ControllerId, ControllerIdentity, QueueBinding, Quiesced};
use crate::sgl;
use crate::spec::{Cid, Cqe, Iova, PageSize, Qid, Sqe};
use crate::sq::SubmissionQueue;
use crate::sync::opaque;
use crate::trace::{EventTracer, TraceEvent};

/// The location of a command's data, in I/O addresses.
///
/// Addresses are those of the controller, which the caller has mapped for it; the memory has to stay mapped
/// until the command has ended.
#[derive(Clone, Copy, Debug)]
pub enum CommandData<'d> {
    /// The command moves no data.
    None,
    /// `len` contiguous bytes.
    Contiguous {
        /// First byte, dword aligned.
        iova: Iova,
        /// Bytes, not 0.
        len: u64,
    },
    /// `len` bytes that start `offset` bytes into the first of `pages`.
    Pages {
        /// Bytes into the first page, dword aligned.
        offset: u64,
        /// Bytes, not 0.
        len: u64,
        /// Page-aligned pages of the controller's page size.
        pages: &'d [Iova],
    },
    /// Segments described by an SGL. Only for I/O commands of a controller that supports it; in dwords,
    /// unless [`ListMemory::with_sgl_bytes`] allows any bytes.
    Sgl(&'d [sgl::SglSegment]),
}

/// [`CommandData`] with all fields initialised, whatever its kind: a field that an enum leaves undefined keeps its
/// register allocated for as long as a kernel's loop runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlatData<'d> {
    kind: PointerKind,
    /// First byte, or its offset in the first page.
    start: u64,
    len: u64,
    pages: &'d [Iova],
    segments: &'d [sgl::SglSegment],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PointerKind {
    None,
    Contiguous,
    Pages,
    Sgl,
}

impl<'d> FlatData<'d> {
    #[inline(always)]
    pub const fn of(data: CommandData<'d>) -> Self {
        let (kind, start, len, pages, segments): (_, _, _, &[Iova], &[sgl::SglSegment]) = match data
        {
            CommandData::None => (PointerKind::None, 0, 0, &[], &[]),
            CommandData::Contiguous { iova, len } => {
                (PointerKind::Contiguous, iova.0, len, &[], &[])
            }
            CommandData::Pages { offset, len, pages } => {
                (PointerKind::Pages, offset, len, pages, &[])
            }
            CommandData::Sgl(segments) => (PointerKind::Sgl, 0, 0, &[], segments),
        };
        Self {
            kind,
            start,
            len,
            pages,
            segments,
        }
    }
}

/// The list memory of a queue: an equal share for each slot.
#[derive(Clone, Copy, Debug)]
pub struct ListMemory<'a> {
    words: DmaWords<'a>,
    page: PageSize,
    words_per_slot: usize,
    sgl_bytes: bool,
}

impl<'a> ListMemory<'a> {
    /// Divides `words` into shares of `words_per_slot` words, one for each slot.
    ///
    /// A transfer of `len` bytes, at any offset, can be mapped in every slot whose share has
    /// [`prp::list_words`]`(page, len)` words, or [`share`](Self::share)`(page, len)` words where `words` begins
    /// with a page; see [`max_transfer`](Self::max_transfer).
    ///
    /// # Panics
    /// When `words` is not 8-byte aligned for the controller.
    pub fn new(words: DmaWords<'a>, page: PageSize, words_per_slot: usize) -> Self {
        assert!(
            words.iova().0.is_multiple_of(8),
            "list memory is 8-byte aligned"
        );
        Self {
            words,
            page,
            words_per_slot,
            sgl_bytes: false,
        }
    }

    /// Sets whether data blocks of SGLs may begin at any byte and have any length
    /// ([`ControllerInfo::sgl_bytes`](crate::bringup::ControllerInfo::sgl_bytes)). Otherwise blocks that are not whole
    /// dwords are refused as [`PointerError::Misaligned`].
    pub const fn with_sgl_bytes(mut self, any: bool) -> Self {
        self.sgl_bytes = any;
        self
    }

    /// Returns the words for each slot, in list memory that begins with a page, with which a list takes as
    /// few pages as it can: a power of two, or whole pages.
    pub const fn share(page: PageSize, len: u64) -> usize {
        let words = prp::list_words_from_page(page, len);
        let per_page = page.prp_entries() as usize;
        if words > per_page {
            words.next_multiple_of(per_page)
        } else if words < 2 {
            2
        } else {
            words.next_power_of_two()
        }
    }

    /// Returns the longest transfer that a PRP list in the share of every slot can describe, at any offset.
    pub fn max_transfer(&self) -> u64 {
        let per_page = self.page.prp_entries() as usize;
        let share = self.words_per_slot;
        let within_page = share <= per_page && per_page.is_multiple_of(share.max(1));
        let unit = match (within_page, share.is_multiple_of(per_page)) {
            (true, _) => share,
            (_, true) => per_page,
            _ => 1,
        };
        // Shares that never straddle a page without need add no chain pointer; any other share may
        // need one more word. The worst case is assumed, so that a list never ends outside its
        // share.
        let is_placed = self.words.iova().0.is_multiple_of(unit.max(1) as u64 * 8) && unit > 1;
        let words = match is_placed {
            true => share,
            false => share.saturating_sub(1),
        };
        // A full list page ends with a chain pointer unless it is the last page, so each such page
        // holds one entry less. The last word of a last page that is full stays an address.
        let chained = words.saturating_sub(1) / per_page;
        // A transfer of a page needs no list, whatever its offset.
        ((words - chained).max(1) as u64) << self.page.shift()
    }

    #[inline]
    fn of(&self, slot: usize) -> DmaWords<'a> {
        // A slot without a share gets an empty list: transfers that need none still work.
        self.words
            .share(slot * self.words_per_slot, self.words_per_slot)
    }

    /// Returns `sqe` with its data pointer, and writes the list, if it needs one, into the share of `slot`.
    ///
    /// With an error the entry must not be used.
    #[inline(always)]
    pub(crate) fn map(
        &self,
        sqe: Sqe,
        place: FlatData<'_>,
        slot: usize,
    ) -> (Sqe, Option<PointerError>) {
        let page = self.page.through(opaque);
        let (start, len, list) = (place.start, place.len, self.of(slot));
        let (prps, error) = match place.kind {
            PointerKind::None => return (sqe, None),
            PointerKind::Contiguous => prp::map_contiguous(page, Iova(start), len, list),
            PointerKind::Pages => prp::map_listed(page, start, len, place.pages, list),
            PointerKind::Sgl => {
                if !self.sgl_bytes && !sgl::is_in_dwords(place.segments) {
                    return (sqe, Some(PointerError::Misaligned));
                }
                return match sgl::map(place.segments, list) {
                    Ok(sgl) => (sqe.with_sgl(sgl), None),
                    Err(error) => (sqe, Some(error)),
                };
            }
        };
        (sqe.with_prps(prps.prp1, prps.prp2), error)
    }
}

/// A command that was not submitted, with its buffer.
///
/// The caller keeps the buffer and can submit again, split the transfer or free it; the controller has never
/// seen its address.
#[derive(Debug)]
pub struct RejectedCommand<B> {
    /// Reason of the rejection.
    pub error: SubmitError,
    /// Buffer that the command would have held.
    pub buffer: B,
}

/// The end of a command.
///
/// The buffer is free from here on: either the controller has posted the command's completion, or a proof
/// guarantees that it can no longer access the buffer.
#[derive(Debug)]
pub struct CommandCompletion<B> {
    /// Identifier of the command.
    pub cid: Cid,
    /// Buffer that the command held.
    pub buffer: B,
    /// The command's outcome.
    pub outcome: CommandOutcome,
    /// Command-specific dword 0.
    pub dw0: u32,
    /// Command-specific dword 1.
    pub dw1: u32,
    /// Deadline that the command was submitted with.
    pub deadline_ns: u64,
    /// True if the command had been reported as expired before.
    pub late: bool,
}

impl<B> CommandCompletion<B> {
    /// Returns dword 0 and the buffer of a command that succeeded; otherwise its outcome, and the buffer.
    pub fn result(self) -> Result<(u32, B), (CommandOutcome, B)> {
        match self.outcome.is_success() {
            true => Ok((self.dw0, self.buffer)),
            false => Err((self.outcome, self.buffer)),
        }
    }
}

/// The memory and doorbells of a queue pair.
///
/// The rings and lists stay allocated until the controller was reset or has deleted both queues: until then
/// it may access them at any time.
#[derive(Debug)]
pub struct QueueMemory<'a> {
    /// Submission ring.
    pub sq: SqRing<'a>,
    /// Completion ring.
    pub cq: CqRing<'a>,
    /// Submission queue tail doorbell.
    pub sq_doorbell: DoorbellRegister<'a>,
    /// Completion queue head doorbell.
    pub cq_doorbell: DoorbellRegister<'a>,
    /// Memory for PRP and SGL lists.
    pub lists: ListMemory<'a>,
}

/// A queue pair with one owner. `B` is the buffer that a command holds, `S` the slots.
///
/// The order of calls: [`new`](Self::new) before the queue is created on the controller; then, in a loop,
/// [`submit`](Self::submit), [`ring`](Self::ring) once a batch, [`poll`](Self::poll) until it returns `None`,
/// and [`expire`](Self::expire). After a reset or a deletion: [`reclaim`](Self::reclaim) until it returns
/// `None`, then [`restart`](Self::restart).
#[derive(Debug)]
pub struct QueuePair<'a, B, S = &'a mut [CommandSlot<B>]> {
    qid: Qid,
    sq: SubmissionQueue<'a>,
    cq: CompletionQueue<'a>,
    lists: ListMemory<'a>,
    inflight: InflightTable<B, S>,
    binding: QueueBinding,
    depth: u32,
    /// Limit of the commands in flight now: `depth`, or 0 while the queue is closed.
    limit: u32,
    tracer: EventTracer<'a>,
}

impl<'a, B, S: AsMut<[CommandSlot<B>]> + AsRef<[CommandSlot<B>]>> QueuePair<'a, B, S> {
    /// Makes an empty pair of the controller that `identity` names. The completion ring is zeroed
    /// here: create the queue on the controller afterwards. An old entry with the phase tag of the
    /// first pass would be taken for a completion.
    pub fn new(identity: &ControllerIdentity, qid: Qid, memory: QueueMemory<'a>, slots: S) -> Self {
        let slot_count = slots.as_ref().len() as u32;
        let smaller = memory.sq.entries().min(memory.cq.entries()) - 1;
        let depth = smaller.min(slot_count).min(MAX_IN_FLIGHT);
        Self {
            qid,
            sq: SubmissionQueue::new(memory.sq, memory.sq_doorbell),
            cq: CompletionQueue::new(memory.cq, memory.cq_doorbell),
            lists: memory.lists,
            inflight: InflightTable::new(slots),
            binding: QueueBinding::new(identity),
            depth,
            limit: depth,
            tracer: EventTracer::default(),
        }
    }

    /// Sends this queue's events to `tracer`.
    ///
    /// Events are recorded at submission, completion, expiry and reclaim, and for each fault; recording never
    /// fails and never waits.
    pub fn set_tracer(&mut self, tracer: EventTracer<'a>) {
        self.tracer = tracer;
    }

    /// Returns the queue's identifier.
    pub fn qid(&self) -> Qid {
        self.qid
    }

    pub(crate) fn controller(&self) -> ControllerId {
        self.binding.controller
    }

    /// Returns the submission queue, for its length and address.
    pub fn sq(&self) -> &SubmissionQueue<'a> {
        &self.sq
    }

    /// Returns the completion queue, for its length and address.
    pub fn cq(&self) -> &CompletionQueue<'a> {
        &self.cq
    }

    /// Returns the number of commands whose end has not been returned yet, expired ones included.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.inflight.in_flight()
    }

    /// Returns the limit of commands in flight.
    #[inline]
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// True if `cid` is in flight, expired or not.
    pub fn is_in_flight(&self, cid: Cid) -> bool {
        self.inflight.find(cid).is_ok()
    }

    /// Places a command; the controller sees it after [`ring`](Self::ring).
    ///
    /// `buffer` is the memory that `data` names. It belongs to the command until its [`CommandCompletion`] returns
    /// it; dropping the queue pair leaks it, since the controller may still write there. `deadline_ns` is on
    /// the caller's clock; see [`expire`](Self::expire).
    ///
    /// # Errors
    /// [`SubmitError::QueueFull`], [`SubmitError::Map`] and, after [`close`](Self::close) or
    /// [`reclaim`](Self::reclaim), [`SubmitError::Closed`], with the buffer; nothing is queued then.
    #[inline]
    pub fn submit(
        &mut self,
        sqe: Sqe,
        data: CommandData<'_>,
        buffer: B,
        deadline_ns: u64,
    ) -> Result<Cid, RejectedCommand<B>> {
        let error = match self.limit < self.depth {
            true => SubmitError::Closed,
            false => SubmitError::QueueFull,
        };
        let full = |buffer| RejectedCommand { error, buffer };
        // The limit is below the number of ring entries, so within it the ring has room.
        if self.inflight.in_flight() >= self.limit {
            return Err(full(buffer));
        }
        let Some(slot) = self.inflight.next() else {
            return Err(full(buffer));
        };
        let sqe = match self.lists.map(sqe, FlatData::of(data), usize::from(slot)) {
            (sqe, None) => sqe,
            (_, Some(error)) => {
                return Err(RejectedCommand {
                    error: SubmitError::Map(error),
                    buffer,
                });
            }
        };
        let entry = self.sq.pushed();
        let reserved = self.inflight.reserve(buffer, deadline_ns, entry);
        let cid = reserved.map_err(full)?;
        let pushed = self.sq.push(sqe.with_cid(cid));
        debug_assert!(pushed, "the ring has room within the limit");
        self.tracer
            .record(TraceEvent::submitted(self.qid, cid, sqe.opcode(), sqe.nsid));
        Ok(cid)
    }

    /// Publishes the commands submitted since the last ring: one fence, one doorbell store.
    #[inline]
    pub fn ring(&mut self) {
        self.sq.ring();
    }

    /// Returns the next completion, or `None` when the controller has posted none.
    ///
    /// Releases completion queue entries with one doorbell a batch: when the ring is drained, or when half of
    /// it is unreleased.
    ///
    /// # Errors
    /// [`ControllerFault`]: the entry is consumed and no command is ended by it. Reset the controller.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<CommandCompletion<B>>, ControllerFault> {
        let Some(cqe) = self.cq.pop() else {
            self.cq.ring();
            return Ok(None);
        };
        // Releasing entries while the caller still polls keeps a full ring from stalling the controller;
        // every second half is often enough, and a doorbell for each entry would cost a write to the bus
        // each.
        if self.cq.owed() * 2 >= self.cq.entries() {
            self.cq.ring();
        }
        match self.accept(cqe) {
            Ok(done) => Ok(Some(done)),
            Err(fault) => {
                self.tracer
                    .record(TraceEvent::fault(self.qid, cqe.cid(), cqe.to_words()[1]));
                Err(fault)
            }
        }
    }

    #[inline]
    fn accept(&mut self, cqe: Cqe) -> Result<CommandCompletion<B>, ControllerFault> {
        if cqe.sqid() != self.qid {
            return Err(ControllerFault::SqId(cqe.sqid));
        }
        let slot = self.inflight.find(cqe.cid())?;
        let entry = self.inflight.entry(slot);
        // A completion before the doorbell would be a guess of the controller, or a stale entry: the command
        // may not have been fetched, so its buffer may not be returned.
        if !self.sq.is_published(entry) {
            return Err(ControllerFault::UnknownCid(cqe.cid()));
        }
        if !self.sq.is_head_of(entry, cqe.sqhd) {
            return Err(ControllerFault::SqHead(cqe.sqhd));
        }
        let ReleasedSlot {
            cid,
            lease,
            deadline_ns,
            expired,
        } = self
            .inflight
            .release(slot)
            .ok_or(ControllerFault::UnknownCid(cqe.cid()))?;
        self.sq.end_one();
        self.tracer
            .record(TraceEvent::completed(self.qid, cid, cqe.status(), cqe.sqhd));
        Ok(CommandCompletion {
            cid,
            buffer: lease,
            outcome: CommandOutcome::Completed(cqe.status()),
            dw0: cqe.dw0,
            dw1: cqe.dw1,
            deadline_ns,
            late: expired,
        })
    }

    /// Returns the next command whose deadline has passed, each once. It stays in flight, with its slot and
    /// buffer: abort it or reset the controller (see [`recovery`](crate::recovery)).
    #[inline]
    pub fn expire(&mut self, now_ns: u64) -> Option<Cid> {
        let cid = self.inflight.expire(now_ns)?;
        self.tracer
            .record(TraceEvent::expired(self.qid, cid, now_ns));
        Some(cid)
    }

    /// Returns a lower bound of the deadlines of all commands that are not expired; before it
    /// [`expire`](Self::expire) returns nothing. A caller that waits may sleep until then, and need
    /// not look at every command.
    #[inline]
    pub fn earliest_deadline_ns(&self) -> u64 {
        self.inflight.earliest_ns()
    }

    /// Closes the queue, the first step of its [deletion](crate::recovery::QueueDeletion): it takes no
    /// commands until [`restart`](Self::restart). Commands in flight can still be polled.
    pub fn close(&mut self) -> ClosedQueue {
        self.limit = 0;
        ClosedQueue {
            qid: self.qid,
            binding: self.binding,
        }
    }

    /// Ends any command in flight without its completion; the proof guarantees that its memory is free. The
    /// queue takes no commands until [`restart`](Self::restart).
    ///
    /// Returns `None` when none is left, or when the proof does not cover this queue.
    pub fn reclaim(&mut self, proof: &Quiesced<'_>) -> Option<CommandCompletion<B>> {
        if !proof.covers(self.qid, self.binding) {
            return None;
        }
        self.limit = 0;
        let ReleasedSlot {
            cid,
            lease,
            deadline_ns,
            expired,
        } = self.inflight.reclaim()?;
        self.sq.end_one();
        self.tracer.record(TraceEvent::reclaimed(self.qid, cid));
        Some(CommandCompletion {
            cid,
            buffer: lease,
            outcome: CommandOutcome::Aborted(proof.reason()),
            dw0: 0,
            dw1: 0,
            deadline_ns,
            late: expired,
        })
    }

    /// Empties both rings for the queue to be created again, once every command was reclaimed.
    ///
    /// Returns false, and does nothing, while commands are in flight or when the proof does not cover this
    /// queue. Afterwards no earlier proof covers the queue.
    pub fn restart(&mut self, proof: &Quiesced<'_>) -> bool {
        let may = proof.covers(self.qid, self.binding) && self.in_flight() == 0;
        if may {
            self.sq.restart();
            self.cq.restart();
            self.binding = self.binding.again();
            self.limit = self.depth;
        }
        may
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::mem::{CqCell, SqCell};
    use crate::spec::{Lba, Nsid, nvm};
    use crate::sync::AtomicU32;

    #[test]
    fn a_head_may_be_older_than_one_before_and_not_older_than_its_command() {
        let (sq, cq): ([SqCell; 4], [CqCell; 4]) = Default::default();
        let bells: [AtomicU32; 2] = Default::default();
        let memory = QueueMemory {
            sq: SqRing::new(&sq, Iova(0)),
            cq: CqRing::new(&cq, Iova(0)),
            sq_doorbell: DoorbellRegister::new(&bells[0]),
            cq_doorbell: DoorbellRegister::new(&bells[1]),
            lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
        };
        let mut slots: [CommandSlot<u32>; 3] = Default::default();
        let mut pair = QueuePair::new(&ControllerIdentity::new(), Qid(1), memory, &mut slots[..]);
        let cids = [7, 8].map(|buffer| {
            let sqe = nvm::read(Nsid(1), Lba(0), 1);
            pair.submit(sqe, CommandData::None, buffer, u64::MAX)
                .unwrap()
        });
        pair.ring();
        let post = |index: usize, cid: Cid, sqhd| {
            let phase_status = 1;
            cq[index].post(Cqe {
                dw0: 0,
                dw1: 0,
                sqhd,
                sqid: 1,
                cid: cid.0,
                phase_status,
            });
        };
        // The second is done first; the head in the first one's completion is from before.
        post(0, cids[1], 1);
        assert_eq!(pair.poll().unwrap_err(), ControllerFault::SqHead(1));
        assert_eq!(pair.in_flight(), 2, "the fault ends no command");
        post(1, cids[1], 2);
        assert_eq!(pair.poll().unwrap().unwrap().buffer, 8);
        post(2, cids[0], 1);
        assert_eq!(pair.poll().unwrap().unwrap().buffer, 7);
        assert_eq!(pair.in_flight(), 0);
    }
}
