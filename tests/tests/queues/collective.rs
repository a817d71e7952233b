//! A queue that a group owns, on host threads: one thread, and teams that act in step as warps do.

use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::mem::DoorbellRegister;
use nvme_core::spec::{Nsid, Sqe, Status};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::{CollectiveQueue, CommandData, MemberCommand, SubmitError, TaggedCompletion};
use nvme_tests::Rng;
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::team::Team;
use std::collections::HashSet;
use std::sync::Mutex;

pub const FOREVER: u64 = 1_000_000_000;

/// Sizes of teams: one thread, a pair, a tile, a warp.
pub const SIZES: [usize; 4] = [1, 2, 8, 32];

/// First positions: the beginning, and a little before the wrap of 16, 31 and 32 bits.
pub const STARTS: [u32; 4] = [0, 0x1_0000 - 256, 0x8000_0000 - 256, 0u32.wrapping_sub(256)];

/// Returns a command that carries `number`, which is also its tag.
pub fn command(number: u32) -> MemberCommand<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    (sqe.cdw10, sqe.cdw15, sqe.mptr) = (number, !number, u64::from(number) << 32);
    MemberCommand::new(sqe, CommandData::None, number).wanting_dw0(number.is_multiple_of(3))
}

/// Fetches new commands and completes some of them in any order: at least one, if there is any.
pub fn serve(hand: &mut Hand<'_>, held: &mut Vec<Sqe>, rng: &mut Rng) {
    while let Some(sqe) = hand.fetch() {
        let number = sqe.cdw10;
        assert_eq!((sqe.cdw15, sqe.mptr), (!number, u64::from(number) << 32));
        held.push(sqe);
    }
    let mut left = 1 + rng.below(held.len() as u64 + 1);
    while left > 0 && !held.is_empty() && hand.has_room() {
        let sqe = held.swap_remove(rng.below(held.len() as u64) as usize);
        hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
        left -= 1;
    }
}

pub fn check(end: TaggedCompletion) -> u32 {
    assert_eq!(end.status, Status::SUCCESS);
    let dw0 = if end.tag.is_multiple_of(3) {
        end.tag
    } else {
        0
    };
    assert_eq!(end.dw0, dw0);
    end.tag
}

/// Keeps the queue full and reaps in any order until `commands` have been submitted and ended.
fn keep_full<const ENTRIES: usize>(size: usize, entries: u32, slots: u32, start: u32, most: u32) {
    let rig = Rig::new(entries, slots, 0, start);
    let side = Mutex::new((Hand::new(&rig), Vec::new(), Rng::new(u64::from(start) + 1)));
    let ended = Mutex::new(HashSet::new());
    Team::run(size, |team| {
        let mut queue = rig.collective(team.clone());
        let (mut submitted, mut count) = (0, 0);
        while count < submitted || submitted < most {
            let number = submitted + team.rank();
            let mut mine = submitted < most;
            match queue.submit(mine, |_| command(number), FOREVER) {
                Ok(cid) => assert_eq!(cid.is_some(), mine),
                Err(error) => {
                    assert_eq!(error, SubmitError::QueueFull);
                    mine = false;
                }
            }
            submitted += team.vote(mine).total;
            assert_eq!(queue.in_flight(), submitted - count);
            queue.ring();
            if team.leads() {
                let (hand, held, rng) = &mut *side.lock().unwrap();
                serve(hand, held, rng);
            }
            team.sync();
            count += queue
                .reap::<ENTRIES>(|end| {
                    let fresh = ended.lock().unwrap().insert(check(end));
                    assert!(fresh, "{} ended twice", end.tag);
                })
                .unwrap();
        }
        assert_eq!(queue.in_flight(), 0);
    });
    let ended = ended.into_inner().unwrap();
    assert!(ended.len() as u32 >= most);
    assert!((0..most).all(|number| ended.contains(&number)));
}

#[test]
fn each_command_ends_once_with_its_own_tag() {
    for start in STARTS {
        keep_full::<4>(1, 64, 63, start, 700);
        keep_full::<1>(1, 8, 7, start, 400);
        keep_full::<4>(2, 64, 40, start, 500);
        keep_full::<1>(2, 8, 7, start, 300);
        keep_full::<8>(8, 64, 63, start, 500);
    }
    keep_full::<1>(32, 64, 63, STARTS[3], 400);
    keep_full::<2>(32, 16, 15, STARTS[1], 300);
}

/// Tiles read from the start of a line of memory on. A full ring's entries just before the head may have
/// been posted again, a lap ahead; that once stopped the queue.
#[test]
fn a_full_ring_is_read_from_the_middle_of_a_line() {
    keep_full::<1>(8, 8, 7, STARTS[0], 400);
    keep_full::<2>(8, 16, 15, STARTS[2], 400);
    keep_full::<1>(32, 32, 31, STARTS[1], 400);
    keep_full::<4>(8, 16, 11, STARTS[3], 400);
    keep_full::<1>(8, 32, 31, STARTS[1], 400);
}

#[test]
fn commands_submitted_between_two_reaps_have_slots_of_their_own() {
    for size in SIZES {
        let rig = Rig::new(128, 127, 0, 0);
        let hand = Mutex::new(Hand::new(&rig));
        let cids = Mutex::new(HashSet::new());
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            for _ in 0..3 {
                for _ in 0..3 {
                    let cid = queue.submit(true, |_| command(team.rank()), FOREVER);
                    assert!(cids.lock().unwrap().insert(cid.unwrap().unwrap()));
                }
                queue.ring();
                if team.leads() {
                    assert_eq!(hand.lock().unwrap().serve(), 3 * size as u32);
                }
                team.sync();
                while queue.in_flight() > 0 {
                    queue
                        .reap::<2>(|end| assert!(cids.lock().unwrap().remove(&end.cid)))
                        .unwrap();
                }
            }
        });
    }
}

/// A doorbell that is written with the value it has is an error to a controller.
#[test]
fn only_the_leader_rings() {
    const SILENT: u32 = u32::MAX;
    let rig = Rig::new(4, 3, 0, 0);
    let hand = Mutex::new(Hand::new(&rig));
    Team::run(2, |team| {
        let bells = [AtomicU32::new(SILENT), AtomicU32::new(SILENT)];
        let mut memory = rig.memory();
        if !team.leads() {
            (memory.sq_doorbell, memory.cq_doorbell) = (
                DoorbellRegister::new(&bells[0]),
                DoorbellRegister::new(&bells[1]),
            );
        }
        let mut queue = CollectiveQueue::resume(team.clone(), memory, rig.state());
        for round in 0..4 {
            let tag = 2 * round + team.rank();
            queue.submit(true, |_| command(tag), FOREVER).unwrap();
            queue.ring();
            if team.leads() {
                assert_eq!(hand.lock().unwrap().serve(), 2);
            }
            team.sync();
            assert_eq!(queue.reap::<1>(|_| ()), Ok(2));
        }
        assert_eq!(queue.doorbells(), [4, 4]);
        for bell in bells {
            assert_eq!(bell.load(Order::Relaxed, Scope::Sys), SILENT);
        }
    });
}

/// The submitting members have gaps between them, so a value that one member read ahead in the free ring belongs to
/// another member.
#[test]
fn members_that_submit_need_not_be_neighbours() {
    let wants = |rank: u32, round: u32| (rank * 5 + round).is_multiple_of(3);
    let rig = Rig::new(64, 63, 0, 0);
    let side = Mutex::new((Hand::new(&rig), Vec::new(), Rng::new(1)));
    let ended = Mutex::new(HashSet::new());
    Team::run(8, |team| {
        let mut queue = rig.collective(team.clone());
        let mut round = 0;
        while round < 60 || queue.in_flight() > 0 {
            let mine = round < 60 && wants(team.rank(), round);
            let number = round * 8 + team.rank();
            let cid = queue.submit(mine, |_| command(number), FOREVER).unwrap();
            assert_eq!(cid.is_some(), mine);
            queue.ring();
            if team.leads() {
                let (hand, held, rng) = &mut *side.lock().unwrap();
                serve(hand, held, rng);
            }
            team.sync();
            queue
                .reap::<2>(|end| assert!(ended.lock().unwrap().insert(check(end))))
                .unwrap();
            round += 1;
        }
    });
    let all = (0..60).flat_map(|round| (0..8).map(move |rank| (rank, round)));
    let expected = all.filter(|(rank, round)| wants(*rank, *round));
    let expected: HashSet<u32> = expected.map(|(rank, round)| round * 8 + rank).collect();
    assert_eq!(ended.into_inner().unwrap(), expected);
}

#[test]
fn a_queue_tells_its_depth_and_how_far_a_line_is() {
    let rig = Rig::new(16, 11, 0, 0);
    let mut queue = rig.collective(LoneThread);
    assert_eq!(queue.depth(), 11);
    for left in [0, 3, 2, 1, 0, 3] {
        assert_eq!((queue.misaligned_by(), queue.group().size()), (left, 1));
        let number = queue.in_flight();
        queue.submit(true, |_| command(number), FOREVER).unwrap();
    }
}

#[test]
fn the_smallest_queue_works_for_every_team() {
    for size in SIZES {
        keep_full::<1>(size, 2, 1, STARTS[3], 20);
    }
}

#[test]
fn a_full_queue_serves_the_lower_ranks() {
    for size in [2, 8, 32] {
        let rig = Rig::new(4, 3, 0, 0);
        let results = Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            let first = queue.submit(true, |_| command(team.rank()), FOREVER);
            let second = queue.submit(true, |_| command(99), FOREVER);
            (first.err(), second.err(), queue.in_flight())
        });
        let full = Some(SubmitError::QueueFull);
        for (rank, result) in results.into_iter().enumerate() {
            let first = if rank < 3 { None } else { full };
            let second = if size < 3 && rank == 0 { None } else { full };
            assert_eq!(result, (first, second, 3), "member {rank} of {size}");
        }
    }
}

#[test]
fn members_without_a_command_take_no_place() {
    let rig = Rig::new(16, 15, 0, 0);
    let cids = Team::run(8, |team| {
        let mut queue = rig.collective(team.clone());
        let wants = team.rank() % 2 == 1;
        let cid = queue.submit(wants, |_| command(team.rank()), FOREVER);
        queue.ring();
        assert_eq!(queue.in_flight(), 4);
        cid.unwrap()
    });
    let mut hand = Hand::new(&rig);
    for (rank, cid) in cids.into_iter().enumerate() {
        assert_eq!(cid.is_some(), rank % 2 == 1);
        if let Some(cid) = cid {
            let sqe = hand.fetch().unwrap();
            assert_eq!((sqe.cid(), sqe.cdw10), (cid, rank as u32));
        }
    }
    assert_eq!(hand.look(), 0);
}

#[test]
fn nothing_is_seen_before_the_doorbell_and_no_more_than_was_asked_for() {
    let rig = Rig::new(16, 15, 0, 0);
    let mut hand = Hand::new(&rig);
    let mut queue = rig.collective(LoneThread);
    for number in 0..6 {
        queue.submit(true, |_| command(number), FOREVER).unwrap();
    }
    assert_eq!(hand.look(), 0);
    queue.publish();
    assert_eq!(hand.look(), 0);
    queue.ring_within(4);
    assert_eq!(hand.look(), 4);
    queue.ring_within(4);
    assert_eq!(hand.look(), 4);
    assert_eq!(hand.serve(), 4);
    assert_eq!(queue.reap::<2>(|_| ()), Ok(2));
    queue.ring_within(4);
    assert_eq!(hand.look(), 2);
    assert_eq!(queue.doorbells()[0], 2);
}
