//! Queues that a group owns: the loop in which a group drives one queue, from its first command to its last.
// UNSAFETY: kernel parameters hold addresses that the host vouches for.
#![allow(unsafe_code)]

use crate::arch;
use crate::assignment::{AssignedWork, ThreadTally, queue_words};
use crate::work::LaunchArguments;
use nvme_core::group::ThreadGroup;
use nvme_core::spec::{Cid, Qid};
use nvme_core::trace::TraceEvent;
use nvme_core::{CollectiveQueue, CommandOutcome, TaggedCompletion};

/// Turns of a busy queue between two checks of deadlines.
const ROUNDS: u32 = 64;

/// Drives queue `number` of the launch by a group: command i belongs to queue i mod `queue_count`.
#[allow(
    clippy::manual_is_multiple_of,
    reason = "the committed PTX is of this form"
)]
#[inline(always)]
pub fn drive<G: ThreadGroup, const FEW: usize, const MANY: usize, const TRACED: bool>(
    launch: &LaunchArguments,
    group: G,
    number: u32,
) {
    let began_ns = arch::now_ns();
    let Some(words) = queue_words(launch, number) else {
        return;
    };
    // SAFETY: the host vouches for the words, and only this group uses the queue.
    let Some((memory, state)) = (unsafe { words.attach() }) else {
        return;
    };
    let (work, qid) = (
        AssignedWork::new(launch, words.page_shift),
        Qid(words.qid as u16),
    );
    let mut tally = ThreadTally::default();
    let queues = u64::from(launch.queue_count);
    let mine = u64::from(number);
    let total = (launch.commands + queues - 1 - mine) / queues;
    let mut queue = CollectiveQueue::resume(group, memory, state);
    let depth = launch.depth.clamp(1, queue.depth());
    let slots = u64::from(queue.depth());
    let size = queue.group().size();
    let ahead = size.min(queue.depth() - depth);
    // Whole warps write whole lines of memory, if that leaves enough commands in flight.
    let even = if size >= 32 && depth >= 256 { 32 } else { 1 };
    // Wide reads are for queues deep enough to fill them.
    let wide = depth > 2 * MANY as u32 * size;
    let (mut next, mut ended, mut expired) = (0u64, 0u64, 0u64);
    let (mut busy, mut turn, mut loads) = (false, 0, 0);
    let mut look_ns = began_ns + launch.timeout_ns;
    let mut rounds = 0u32;
    let nth = |sequence: u64| sequence * queues + mine;
    while ended + expired < total {
        let now_ns = arch::now_ns();
        queue.ring_within(depth);
        // One command a member is prepared while earlier ones are in flight.
        while next < total && queue.in_flight() + even <= depth + ahead {
            let room = (depth + ahead - queue.in_flight()) & !(even - 1);
            let first = if even > 1 { queue.misaligned_by() } else { 0 };
            let room = if first != 0 { first } else { room };
            let room = u64::from(room).min(total - next);
            let rank = queue.group().rank();
            let wants = u64::from(rank) < room;
            let sequence = next + u64::from(rank);
            let index = nth(sequence);
            let placed = queue.submit(
                wants,
                |slot| work.command(index, mine * slots + u64::from(slot), sequence as u32),
                now_ns + launch.timeout_ns,
            );
            if TRACED && let Ok(Some(cid)) = placed {
                let (opcode, nsid) = (launch.opcode as u8, launch.nsid);
                work.record(index, TraceEvent::submitted(qid, cid, opcode, nsid));
            }
            let lost = placed.is_err();
            tally.sqes += u32::from(wants && !lost);
            if let Err(error) = placed {
                work.refuse(index, error);
            }
            let lost = u64::from(queue.group().vote(wants && lost).total);
            ended += lost;
            next += room.min(u64::from(size));
            if lost != 0 {
                break;
            }
        }
        // A wide read that finds completions publishes by its own fence.
        if !busy || MANY == 1 {
            queue.publish();
            queue.ring_within(depth);
        }
        // Wide reads only after a full one: an empty wide read costs the bus as much as a full one.
        let mut late = 0;
        let took = |done: TaggedCompletion| {
            let index = nth(restore(u64::from(done.tag), next));
            tally.end(&work, index, CommandOutcome::Completed(done.status));
            if TRACED {
                work.record(index, TraceEvent::completed(qid, done.cid, done.status, 0));
            }
            if done.late {
                work.came_late();
                late += 1;
            }
        };
        let result = match (busy, wide) {
            (false, _) => queue.reap::<1>(took),
            (true, false) => queue.reap::<FEW>(took),
            (true, true) => queue.reap::<MANY>(took),
        };
        loads += match (busy, wide) {
            (false, _) => 1,
            (true, false) => FEW as u32,
            (true, true) => MANY as u32,
        };
        // A queue that is never idle has to check its deadlines, too.
        rounds = rounds.wrapping_add(1);
        let idle = matches!(result, Ok(0));
        // The leader's clock decides for all: members of a block read different times, and must not diverge.
        if (idle || rounds % ROUNDS == 0)
            && queue.group().broadcast(u32::from(now_ns >= look_ns)) != 0
        {
            expired += u64::from(queue.expire(now_ns, |tag| {
                let index = nth(restore(u64::from(tag), next));
                work.timed_out(index);
                if TRACED {
                    work.record(index, TraceEvent::expired(qid, Cid(u16::MAX), now_ns));
                }
            }));
            look_ns = now_ns + launch.timeout_ns / 8;
            // Every slot belongs to a command without an answer, so the remaining commands cannot be
            // submitted.
            if idle && expired >= u64::from(queue.in_flight()) {
                break;
            }
        }
        match result {
            Ok(0) => {
                busy = false;
                if turn >= 4 {
                    arch::sleep_ns(64);
                }
                turn += 1;
            }
            Ok(found) => {
                ended += u64::from(found);
                // A command that completed late has ended and no longer counts as expired.
                while expired != 0 {
                    let several = u64::from(queue.group().vote(late > 0).total);
                    if several == 0 {
                        break;
                    }
                    expired -= several.min(expired);
                    late -= i32::from(late > 0);
                }
                busy = found >= size;
                turn = 0;
            }
            Err(fault) => {
                work.fault(fault);
                break;
            }
        }
    }
    let [sq, cq] = queue.doorbells();
    let leads = queue.group().leads();
    let per_warp = queue.group().rank() % 32 == 0;
    queue.suspend();
    let bus = [
        if leads { sq } else { 0 },
        if leads { cq } else { 0 },
        if per_warp { loads } else { 0 },
    ];
    work.report(&tally, bus, began_ns);
}

/// Returns the sequence number whose lower bits a tag holds: the last one below `next` with these bits.
#[inline(always)]
fn restore(tag: u64, next: u64) -> u64 {
    let range = u64::from(nvme_core::queue_state::MAX_TAGS);
    let base = next & !(range - 1);
    let near = base | tag & (range - 1);
    if near < next {
        near
    } else {
        near.wrapping_sub(range)
    }
}
