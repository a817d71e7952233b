//! I/O queues: doorbells, entries, faults and completions.
//!
//! A warp takes up to a lane's number of entries at once: each lane fetches one, the warp moves the data of one after
//! the other, and each lane posts one completion. One fence comes after all data and all lower words of the batch, and
//! before the upper words. Upper words of one batch become visible in any order; each is single-copy atomic.

use crate::command::Work;
use crate::device::{
    LANES, add32, ballot, below, fence, idle, lane, load32, load32_acquire, load64, now_ns,
    shuffle32, store32, store64, sync_warp,
};
use crate::{Args, Plan, QUEUE_BYTES, fault, transfer};
use nvme_spec::{Cqe, Qid, SQE_BYTES, Sqe, Status, register};

/// Values of warp 0's request to a queue, and of the queue's state.
pub mod order {
    /// The queue is not served, and its memory is left alone.
    pub const REST: u32 = 0;
    /// The warp serves the queue.
    pub const SERVE: u32 = 1;
    /// The warp ends.
    pub const END: u32 = 2;
    /// A fault has stopped the queue: only the queue's warp stores this value.
    pub const STOPPED: u32 = 3;
}

/// Largest number of completions that a queue holds back.
const HELD: u32 = 8;
/// The longest time that a reordered completion waits for others to overtake it.
const REORDER_NS: u64 = 20_000;
/// Looks at a queue between two looks at the clock.
const LOOKS: u32 = 256;

/// The words of one queue, in the controller's memory.
#[repr(C)]
pub struct Words {
    /// Request of warp 0: one of [`order`].
    pub wanted: u32,
    /// The same, by the queue's warp.
    pub state: u32,
    pub sq_entries: u32,
    pub cq_entries: u32,
    pub sq: u64,
    pub cq: u64,
    head: u32,
    /// Place of the next completion; bit 31 is the phase tag that is not posted now.
    tail: u32,
    /// Head of the completion queue as last read.
    seen: u32,
    held: u32,
    /// Time at which each held completion is due, and its upper word.
    due: [[u64; 2]; HELD as usize],
}
const _: () = assert!(size_of::<Words>() <= QUEUE_BYTES);

/// Address of the words of queue `qid`, from 1 on.
#[inline(always)]
pub fn words(args: &Args, qid: u32) -> u64 {
    args.own + u64::from(qid) * QUEUE_BYTES as u64
}

macro_rules! at {
    ($words:expr, $($field:tt)+) => {
        $words + core::mem::offset_of!($crate::io::Words, $($field)+) as u64
    };
}
pub(crate) use at;

macro_rules! shared {
    ($args:expr, $field:ident) => {
        $args.own + core::mem::offset_of!($crate::Shared, $field) as u64
    };
}
pub(crate) use shared;

/// A queue as its warp keeps it in registers.
#[derive(Clone, Copy)]
struct Queue {
    words: u64,
    qid: u32,
    tail_doorbell: u64,
    head_doorbell: u64,
    state: u32,
    sq: u64,
    cq: u64,
    sq_entries: u32,
    cq_entries: u32,
    head: u32,
    tail: u32,
    phase: bool,
    seen: u32,
    held: u32,
}

/// Serves queue `warp` + 1, and every (`args.warps` - 1)th queue after it.
#[inline(always)]
pub fn run(args: &Args, warp: u32, end_ns: u64) {
    let step = args.warps - 1;
    let alone = warp + step >= args.queues;
    let (mut looks, mut qid) = (0u32, warp + 1);
    if qid > args.queues {
        return;
    }
    let mut queue = Queue::new(args, qid);
    loop {
        let wanted = queue.visit(args);
        looks += 1;
        let late = looks.is_multiple_of(LOOKS) && now_ns() > end_ns;
        if wanted == order::END {
            break;
        }
        if shuffle32(u32::from(late), 0) != 0 {
            if lane() == 0 {
                add32(shared!(args, late), 1);
            }
            break;
        }
        if !alone {
            queue.save();
            qid = if qid + step > args.queues {
                warp + 1
            } else {
                qid + step
            };
            queue = Queue::load(args, qid);
        }
    }
    // The warp releases each of its queues.
    sync_warp();
    fence();
    let mut qid = warp + 1;
    while qid <= args.queues && lane() == 0 {
        store32(at!(words(args, qid), state), order::END);
        qid += step;
    }
}

impl Queue {
    #[inline(always)]
    fn new(args: &Args, qid: u32) -> Self {
        let bell = |offset: u32| args.doorbells + u64::from(offset - register::offset::DOORBELLS);
        let dstrd = args.dstrd as u8;
        Self {
            words: words(args, qid),
            qid,
            tail_doorbell: bell(register::sq_tail_doorbell(qid as u16, dstrd)),
            head_doorbell: bell(register::cq_head_doorbell(qid as u16, dstrd)),
            state: order::REST,
            sq: 0,
            cq: 0,
            sq_entries: 0,
            cq_entries: 0,
            head: 0,
            tail: 0,
            phase: true,
            seen: 0,
            held: 0,
        }
    }

    #[inline(always)]
    fn load(args: &Args, qid: u32) -> Self {
        let mut queue = Self::new(args, qid);
        queue.state = load32(at!(queue.words, state));
        queue.rings();
        queue.head = load32(at!(queue.words, head));
        let tail = load32(at!(queue.words, tail));
        (queue.tail, queue.phase) = (tail & !(1 << 31), tail >> 31 == 0);
        queue.seen = load32(at!(queue.words, seen));
        queue.held = load32(at!(queue.words, held));
        queue
    }

    #[inline(always)]
    fn rings(&mut self) {
        self.sq = load64(at!(self.words, sq));
        self.cq = load64(at!(self.words, cq));
        self.sq_entries = load32(at!(self.words, sq_entries));
        self.cq_entries = load32(at!(self.words, cq_entries));
    }

    #[inline(always)]
    fn save(&self) {
        if lane() == 0 {
            store32(at!(self.words, head), self.head);
            store32(
                at!(self.words, tail),
                self.tail | u32::from(!self.phase) << 31,
            );
            store32(at!(self.words, seen), self.seen);
            store32(at!(self.words, held), self.held);
        }
        sync_warp();
    }

    /// Looks at the queue once; returns the request of warp 0.
    #[inline(always)]
    fn visit(&mut self, args: &Args) -> u32 {
        let wanted = shuffle32(load32(at!(self.words, wanted)), 0);
        let stopped = self.state == order::STOPPED && wanted == order::SERVE;
        if wanted != self.state && !stopped {
            self.follow(wanted);
        }
        if self.state != order::SERVE {
            idle();
            return wanted;
        }
        // Acquire: pairs with the fence before the doorbell; by way of lane 0 for all lanes.
        let tail = shuffle32(load32_acquire(self.tail_doorbell), 0);
        sync_warp();
        if self.held != 0 {
            self.let_go(args);
        }
        if tail == self.head {
            idle();
        } else if tail >= self.sq_entries {
            if lane() == 0 {
                add32(shared!(args, bad_doorbells), 1);
            }
        } else {
            self.serve(args, tail);
        }
        wanted
    }

    /// Begins to serve the queue, or releases its memory.
    #[inline(always)]
    fn follow(&mut self, wanted: u32) {
        if wanted == order::SERVE {
            // Acquire: pairs with the fence of warp 0 before its order.
            fence();
            self.rings();
            (self.head, self.tail, self.phase) = (0, 0, true);
            (self.seen, self.held) = (0, 0);
        }
        self.state = wanted;
        // All earlier reads and writes of the queue come before this.
        sync_warp();
        fence();
        if lane() == 0 {
            store32(at!(self.words, state), wanted);
        }
        sync_warp();
    }

    /// Entries of the completion queue that are free.
    #[inline(always)]
    fn free(&self) -> u32 {
        let used = match self.tail >= self.seen {
            true => self.tail - self.seen,
            false => self.tail + self.cq_entries - self.seen,
        };
        self.cq_entries - 1 - used
    }

    /// Returns whether the completion queue has room for `count` more entries; its head doorbell is read when it seems
    /// full.
    #[inline(always)]
    fn room(&mut self, args: &Args, count: u32) -> u32 {
        if self.free() < count {
            // Acquire: pairs with the fence before the doorbell; entries before it were read.
            let head = shuffle32(load32_acquire(self.head_doorbell), 0);
            sync_warp();
            let forward = match head >= self.seen {
                true => head - self.seen,
                false => head.wrapping_add(self.cq_entries).wrapping_sub(self.seen),
            };
            let used = self.cq_entries - 1 - self.free();
            if head < self.cq_entries && forward <= used {
                self.seen = head;
            } else if lane() == 0 {
                add32(shared!(args, bad_doorbells), 1);
            }
            if self.free() < count && lane() == 0 {
                add32(shared!(args, full), 1);
            }
        }
        self.free()
    }

    /// Fetches and completes the waiting commands, as many as have room.
    #[inline(always)]
    fn serve(&mut self, args: &Args, tail: u32) {
        let waiting = match tail >= self.head {
            true => tail - self.head,
            false => tail + self.sq_entries - self.head,
        };
        let count = waiting.min(LANES);
        // A command that completes twice needs two entries.
        let doubles = args.plan.kind == fault::DUPLICATE;
        let count = match doubles {
            true => count
                .min((self.room(args, 2 * count) / 2).max(1))
                .min(self.free()),
            false => count.min(self.room(args, count)),
        };
        if count == 0 {
            idle();
            return;
        }
        let mine = lane() < count;
        let work = match mine {
            true => Work::of(args, &self.fetch()),
            false => Work::NONE,
        };
        self.head += count;
        if self.head >= self.sq_entries {
            self.head -= self.sq_entries;
        }
        self.complete(args, mine, count, work);
    }

    #[inline(always)]
    fn fetch(&self) -> Sqe {
        let mut index = self.head + lane();
        if index >= self.sq_entries {
            index -= self.sq_entries;
        }
        let at = self.sq + u64::from(index) * SQE_BYTES as u64;
        // Each word has a name: an array that is filled in a loop would be placed on a stack.
        let word = |index: u64| load64(at + index * 8);
        Sqe::from_words([
            word(0),
            word(1),
            word(2),
            word(3),
            word(4),
            word(5),
            word(6),
            word(7),
        ])
    }

    /// Moves the data of `count` commands, and completes those that no fault withholds.
    #[inline(always)]
    fn complete(&mut self, args: &Args, mine: bool, count: u32, mut work: Work) {
        let mut struck = false;
        if args.plan.kind != fault::NONE {
            let first = match lane() {
                0 => add32(shared!(args, commands), count),
                _ => 0,
            };
            let number = shuffle32(first, 0).wrapping_add(lane()).wrapping_add(1);
            struck = mine && strikes(&args.plan, number);
        }
        let kind = args.plan.kind;
        if ballot(struck) != 0 && matches!(kind, fault::FATAL | fault::GONE) {
            // Commands that were fetched together with it are lost, too.
            if lane() == 0 {
                store32(at!(self.words, state), order::STOPPED);
                store32(shared!(args, dead), kind);
            }
            self.state = order::STOPPED;
            return;
        }
        if struck && kind == fault::STATUS {
            work.refuse(Status(args.plan.value as u16));
        }
        let status = transfer::all(args, &work);
        let mut post = Post {
            cid: work.cid,
            sqhd: self.head as u16,
            status,
            flip: false,
            torn: false,
        };
        let mut held = false;
        if struck {
            match kind {
                fault::WRONG_CID => post.cid = args.plan.value as u16,
                fault::WRONG_SQHD => post.sqhd = args.plan.value as u16,
                fault::WRONG_PHASE => post.flip = true,
                fault::TORN => post.torn = true,
                fault::DELAY | fault::REORDER => held = true,
                _ => {}
            }
        }
        if matches!(kind, fault::DELAY | fault::REORDER) {
            held = self.hold(args, held, &post);
        }
        let dropped = struck && kind == fault::DROP;
        self.post(args, mine && !held && !dropped, post);
        let again = struck && kind == fault::DUPLICATE;
        if ballot(again) != 0 && self.free() >= ballot(again).count_ones() {
            self.post(args, again, post);
        }
    }

    /// Holds back the completions of lanes with `mine`, as many as there is room for; returns whether this lane's was
    /// held.
    #[inline(always)]
    fn hold(&mut self, args: &Args, mine: bool, post: &Post) -> bool {
        let all = ballot(mine);
        let place = self.held + (all & below()).count_ones();
        let held = mine && place < HELD;
        if held {
            let wait = match args.plan.kind {
                fault::DELAY => args.plan.value,
                _ => REORDER_NS,
            };
            let at = at!(self.words, due) + u64::from(place) * 16;
            store64(at, now_ns() + wait);
            store64(at + 8, post.upper(self.qid, false));
        }
        self.held += ballot(held).count_ones();
        sync_warp();
        held
    }

    /// Posts held completions that are due.
    #[inline(always)]
    fn let_go(&mut self, args: &Args) {
        let count = self.held;
        // A lane for each; with fewer lanes, the last ones come first.
        let place = match count > LANES {
            true => count - LANES + lane(),
            false => lane(),
        };
        let at = at!(self.words, due) + u64::from(place) * 16;
        let (mut due, mut upper) = (u64::MAX, 0);
        if place < count {
            (due, upper) = (load64(at), load64(at + 8));
        }
        let ready = due <= now_ns();
        let all = ballot(ready);
        if all == 0 || self.room(args, all.count_ones()) < all.count_ones() {
            return;
        }
        let cqe = Cqe::from_words(0, upper);
        let post = Post {
            cid: cqe.cid,
            sqhd: self.head as u16,
            status: cqe.status().0,
            flip: false,
            torn: false,
        };
        self.post(args, ready, post);
        // Those that stay close up.
        let stays = place < count && !ready;
        let stay = ballot(stays);
        let base = count - ballot(place < count).count_ones();
        let to = at!(self.words, due) + u64::from(base + (stay & below()).count_ones()) * 16;
        sync_warp();
        if stays {
            store64(to, due);
            store64(to + 8, upper);
        }
        self.held = base + stay.count_ones();
        sync_warp();
    }

    /// Posts the completions of the lanes with `mine`. There is room for them.
    #[inline(always)]
    fn post(&mut self, args: &Args, mine: bool, post: Post) {
        let all = ballot(mine);
        let count = all.count_ones();
        let mut index = self.tail + (all & below()).count_ones();
        let past = index >= self.cq_entries;
        if past {
            index -= self.cq_entries;
        }
        let at = self.cq + u64::from(index) * 16;
        let phase = self.phase != past;
        let upper = post.upper(self.qid, phase != post.flip);
        if mine {
            store64(at, if post.torn { u64::MAX } else { 0 });
        }
        sync_warp();
        // Release: data and lower words of all lanes; pairs with the acquire of the driver.
        fence();
        if mine {
            store64(at + 8, upper);
        }
        if ballot(mine && post.torn) != 0 {
            fence();
            if mine && post.torn {
                store64(at, 0);
            }
        }
        self.tail += count;
        if self.tail >= self.cq_entries {
            self.tail -= self.cq_entries;
            self.phase = !self.phase;
        }
        if lane() == 0 {
            add32(shared!(args, posted), count);
        }
    }
}

/// The fields of a completion to post.
#[derive(Clone, Copy)]
struct Post {
    cid: u16,
    sqhd: u16,
    status: u16,
    /// True if the entry has the wrong phase tag.
    flip: bool,
    torn: bool,
}

impl Post {
    #[inline(always)]
    fn upper(&self, qid: u32, phase: bool) -> u64 {
        let cqe = Cqe {
            dw0: 0,
            dw1: 0,
            sqhd: self.sqhd,
            sqid: Qid(qid as u16).0,
            cid: self.cid,
            phase_status: self.status << 1 | u16::from(phase),
        };
        cqe.to_words()[1]
    }
}

#[inline(always)]
fn strikes(plan: &Plan, number: u32) -> bool {
    let [a, b, c, d] = plan.nth;
    let every = plan.every != 0 && number.is_multiple_of(plan.every);
    every || number == a || number == b || number == c || number == d
}
