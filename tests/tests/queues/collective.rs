//! A queue that a group owns, on host threads: one thread, and teams that act in step as warps do.

use nvme_core::group::{Alone, Group, Vote};
use nvme_core::mem::Doorbell;
use nvme_core::spec::{Cid, Iova, Nsid, Sqe, Status};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::{Collective, Command, ControllerFault, Data, Finished, MapError, SubmitError};
use nvme_tests::Rng;
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::team::Team;
use std::collections::HashSet;
use std::sync::Mutex;

const FOREVER: u64 = 1_000_000_000;

/// Sizes of teams: one thread, a pair, an tile, a warp.
const SIZES: [usize; 4] = [1, 2, 8, 32];

/// First positions: the beginning, and a little before the wrap of 16, 31 and 32 bits.
const STARTS: [u32; 4] = [0, 0x1_0000 - 256, 0x8000_0000 - 256, 0u32.wrapping_sub(256)];

/// A command that carries `number`, which is also its tag.
fn command(number: u32) -> Command<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    (sqe.cdw10, sqe.cdw15, sqe.mptr) = (number, !number, u64::from(number) << 32);
    Command::new(sqe, Data::None, number).wanting_dw0(number.is_multiple_of(3))
}

/// Fetches what is there and completes some of it in any order: at least one, if there is any.
fn serve(hand: &mut Hand<'_>, held: &mut Vec<Sqe>, rng: &mut Rng) {
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

fn check(end: Finished) -> u32 {
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
            (memory.sq_doorbell, memory.cq_doorbell) =
                (Doorbell::new(&bells[0]), Doorbell::new(&bells[1]));
        }
        let mut queue = Collective::resume(team.clone(), memory, rig.state());
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

/// With gaps between them, what a member read ahead in the free ring is another's.
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
    let mut queue = rig.collective(Alone);
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
    let mut queue = rig.collective(Alone);
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

/// A queue with commands 1 and 2 in flight, fetched and not completed.
fn two_in_flight(rig: &Rig) -> (Hand<'_>, [Sqe; 2]) {
    let mut queue = rig.collective(Alone);
    for number in [1, 2] {
        queue.submit(true, |_| command(number), FOREVER).unwrap();
    }
    queue.ring();
    queue.suspend();
    let mut hand = Hand::new(rig);
    let entries = [hand.fetch().unwrap(), hand.fetch().unwrap()];
    (hand, entries)
}

#[test]
fn violations_refuses_the_queue_and_the_honest_completions_with_it_count() {
    for size in SIZES {
        for case in 0..6 {
            let rig = Rig::new(8, 7, 0, 0);
            let (mut hand, [first, second]) = two_in_flight(&rig);
            let mut cqe = hand.completion(first.cid(), Status::SUCCESS, 0);
            let fault = [
                ControllerFault::UnknownCid(Cid(5)),
                ControllerFault::UnknownCid(Cid(0x123)),
                // Modulo the entries it is in flight.
                ControllerFault::UnknownCid(Cid(first.cid().0 | 0x100)),
                ControllerFault::StaleCid(Cid(first.cid().0 ^ 0x1000)),
                ControllerFault::SqHead(4096),
                ControllerFault::SqId(7),
            ][case];
            match fault {
                ControllerFault::UnknownCid(cid) | ControllerFault::StaleCid(cid) => {
                    cqe.cid = cid.0;
                }
                ControllerFault::SqHead(head) => cqe.sqhd = head,
                ControllerFault::SqId(qid) => cqe.sqid = qid,
            }
            hand.post(cqe);
            hand.complete(second.cid(), Status::SUCCESS, 2);
            let told = Mutex::new(Vec::new());
            Team::run(size, |team| {
                let mut queue = rig.collective(team.clone());
                let reaped = queue.reap::<2>(|end| told.lock().unwrap().push(end.tag));
                assert_eq!(reaped, Err(fault), "team of {size}");
                let refused = queue.submit(true, |_| command(9), FOREVER);
                assert_eq!(refused, Err(SubmitError::Refused));
                assert_eq!(queue.in_flight(), 1);
                queue.suspend();
            });
            let told = told.into_inner().unwrap();
            assert!(told.contains(&2), "{fault:?}, team of {size}: {told:?}");
            let queue = rig.collective(Alone);
            let proof = rig.reset();
            let mut aborted = Vec::new();
            assert!(queue.recover(&proof, |tag| aborted.push(tag)));
            assert_eq!(aborted.len() + told.len(), 2, "{fault:?}");
            assert_eq!(rig.state().fault(), None);
            keep_serving(&rig);
        }
    }
}

/// NVMe Base 2.0c, "SQ Head Pointer": the head when the completion was made, which may be before another was posted.
#[test]
fn a_head_may_be_older_than_one_before() {
    for size in SIZES {
        let rig = Rig::new(8, 7, 0, 0);
        let (mut hand, [first, second]) = two_in_flight(&rig);
        for (sqe, head) in [(second, 2), (first, 1)] {
            let mut cqe = hand.completion(sqe.cid(), Status::SUCCESS, 0);
            cqe.sqhd = head;
            hand.post(cqe);
        }
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            let mut left = 2;
            while left > 0 {
                left -= queue.reap::<2>(|_| {}).expect("nothing is wrong");
            }
            assert_eq!(queue.in_flight(), 0);
        });
    }
}

/// The entry of such a command is in the ring, and may still reach the controller: its buffer stays lent.
#[test]
fn a_command_that_was_not_published_does_not_end() {
    let rig = Rig::new(8, 7, 0, 0);
    let (mut queue, mut hand) = (rig.collective(Alone), Hand::new(&rig));
    let submit = |queue: &mut Collective<'_, Alone>, number| {
        let cid = queue.submit(true, |_| command(number), FOREVER).unwrap();
        cid.expect("it was wanted")
    };
    let (first, second) = (submit(&mut queue, 0), submit(&mut queue, 1));
    queue.ring();
    let late = submit(&mut queue, 2);
    assert_eq!(hand.serve(), 2);
    hand.complete(late, Status::SUCCESS, 2);
    let mut told = Vec::new();
    let reaped = queue.reap::<4>(|end| told.push(end.cid));
    assert_eq!(reaped, Err(ControllerFault::UnknownCid(late)));
    assert_eq!((told, queue.in_flight()), (vec![first, second], 1));
}

/// The queue works from its beginning.
fn keep_serving(rig: &Rig) {
    let mut queue = rig.collective(Alone);
    let mut hand = Hand::new(rig);
    for number in 0..30 {
        queue.submit(true, |_| command(number), FOREVER).unwrap();
        queue.ring();
        assert_eq!(hand.serve(), 1);
        let mut tags = Vec::new();
        assert_eq!(queue.reap::<4>(|end| tags.push(check(end))), Ok(1));
        assert_eq!(tags, [number]);
    }
}

#[test]
fn a_late_completion_does_not_end_the_next_command_of_its_slot() {
    let rig = Rig::new(4, 1, 0, 0);
    let (mut queue, mut hand) = (rig.collective(Alone), Hand::new(&rig));
    let mut cids = HashSet::new();
    for number in 0..15 {
        let cid = queue.submit(true, |_| command(number), FOREVER).unwrap();
        queue.ring();
        hand.serve();
        assert_eq!(queue.reap::<1>(|end| assert_eq!(Some(end.cid), cid)), Ok(1));
        assert!(cids.insert(cid.unwrap()), "{cid:?} again");
        if number % 4 == 3 {
            queue.suspend();
            queue = rig.collective(Alone);
        }
    }
    queue.submit(true, |_| command(15), FOREVER).unwrap();
    queue.ring();
    assert!(!cids.contains(&hand.fetch().unwrap().cid()));
    let late = cids.into_iter().next().unwrap();
    hand.complete(late, Status::SUCCESS, 0);
    assert_eq!(
        queue.reap::<1>(|end| panic!("{end:?}")),
        Err(ControllerFault::StaleCid(late))
    );
}

#[test]
fn doorbells_are_counted() {
    let rig = Rig::new(16, 15, 0, 0);
    let (mut queue, mut hand) = (rig.collective(Alone), Hand::new(&rig));
    for round in 1..=9 {
        queue.submit(true, |_| command(round), FOREVER).unwrap();
        queue.ring();
        hand.serve();
        assert_eq!(queue.reap::<2>(|_| ()), Ok(1));
        // The head's only once for each quarter of the ring.
        assert_eq!(queue.doorbells(), [round, round / 4]);
    }
}

#[test]
fn the_same_completion_twice_in_one_pass_ends_one_command() {
    for size in SIZES {
        let rig = Rig::new(8, 7, 0, 0);
        let (mut hand, [first, _]) = two_in_flight(&rig);
        hand.complete(first.cid(), Status::SUCCESS, 0);
        hand.complete(first.cid(), Status::SUCCESS, 0);
        let told = Mutex::new(Vec::new());
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            let reaped = queue.reap::<2>(|end| told.lock().unwrap().push(end.tag));
            assert_eq!(reaped, Err(ControllerFault::UnknownCid(first.cid())));
            assert_eq!(queue.in_flight(), 1);
        });
        assert_eq!(told.into_inner().unwrap(), [1], "team of {size}");
    }
}

#[test]
fn a_late_command_is_reported_once_and_still_ends() {
    for size in SIZES {
        let rig = Rig::new(64, 63, 0, 0);
        let hand = Mutex::new(Hand::new(&rig));
        let late = Mutex::new(HashSet::new());
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            let deadline = 1_000_000 * u64::from(1 + team.rank() % 2);
            queue
                .submit(true, |_| command(team.rank()), deadline)
                .unwrap();
            queue.ring();
            assert_eq!(queue.expire(500_000, |_| panic!("not yet")), 0);
            let early = (size as u32).div_ceil(2);
            let told = |tag| assert!(late.lock().unwrap().insert(tag));
            assert_eq!(queue.expire(1_500_000, told), early);
            assert_eq!(queue.expire(1_500_000, |_| panic!("twice")), 0);
            if team.leads() {
                hand.lock().unwrap().serve();
            }
            team.sync();
            let mut count = 0;
            while count < size as u32 {
                count += queue
                    .reap::<1>(|end| assert_eq!(end.late, end.tag % 2 == 0))
                    .unwrap();
            }
            assert_eq!(queue.expire(9_000_000, |_| panic!("it has ended")), 0);
        });
        let even = (0..size as u32).step_by(2);
        assert_eq!(late.into_inner().unwrap(), even.collect());
    }
}

/// A member who acts before the others do.
struct Fifth;

impl Group for Fifth {
    fn size(&self) -> u32 {
        8
    }

    fn rank(&self) -> u32 {
        4
    }

    fn sync(&self) {}

    fn vote(&self, mine: bool) -> Vote {
        Alone.vote(mine)
    }

    fn broadcast(&self, value: u32) -> u32 {
        value
    }
}

#[test]
fn members_beyond_the_slots_report_nothing_late() {
    let rig = Rig::new(4, 3, 0, 0);
    let mut queue = rig.collective(Alone);
    for number in 0..3 {
        queue.submit(true, |_| command(number), 0).unwrap();
    }
    queue.suspend();
    // Modulo the entries it would look at the first slot.
    let late = rig.collective(Fifth).expire(FOREVER, |tag| panic!("{tag}"));
    assert_eq!(late, 0);
    let mut tags = Vec::new();
    let late = rig.collective(Alone).expire(FOREVER, |tag| tags.push(tag));
    assert_eq!((late, tags), (3, vec![0, 1, 2]));
}

#[test]
fn a_bad_buffer_costs_nothing_and_the_others_go_on() {
    for size in SIZES {
        // As many slots as members: a lost one would be missed at once.
        let rig = Rig::new(64, size as u32, 0, STARTS[3]);
        let hand = Mutex::new(Hand::new(&rig));
        Team::run(size, |team| {
            let mut queue = rig.collective(team.clone());
            for round in 0..12 {
                let bad = team.rank() % 3 == round % 3;
                let mut one = command(team.rank());
                if bad {
                    let iova = Iova(0x1000);
                    one = one.with_data(Data::Contiguous { iova, len: 0 });
                }
                let result = queue.submit(true, |_| one, FOREVER);
                match result {
                    Ok(_) => assert!(!bad),
                    Err(error) => assert_eq!(error, SubmitError::Map(MapError::Empty)),
                }
                let placed = team.vote(!bad).total;
                assert_eq!(queue.in_flight(), placed);
                queue.ring();
                if team.leads() {
                    assert_eq!(hand.lock().unwrap().serve(), placed);
                }
                team.sync();
                while queue.in_flight() > 0 {
                    queue.reap::<2>(|end| _ = check(end)).unwrap();
                }
            }
        });
    }
}

/// Teams of every size hand the queue to each other, with commands in flight.
#[test]
fn what_is_in_flight_survives_a_change_of_owner() {
    for start in STARTS {
        let rig = Rig::new(32, 31, 0, start);
        let hand = Mutex::new(Hand::new(&rig));
        let mut open: HashSet<u32> = HashSet::new();
        for turn in 0..24 {
            let size = SIZES[turn % 4];
            let told = Mutex::new(Vec::new());
            let placed = Team::run(size, |team| {
                let mut queue = rig.collective(team.clone());
                assert_eq!(queue.in_flight() as usize, open.len());
                let number = turn as u32 * 100 + team.rank();
                let placed = queue.submit(true, |_| command(number), FOREVER).is_ok();
                queue.ring();
                queue
                    .reap::<2>(|end| told.lock().unwrap().push(check(end)))
                    .unwrap();
                queue.suspend();
                placed.then_some(number)
            });
            open.extend(placed.into_iter().flatten());
            for tag in told.into_inner().unwrap() {
                assert!(open.remove(&tag));
            }
            hand.lock().unwrap().serve();
        }
        assert!(!open.is_empty());
        let mut queue = rig.collective(Alone);
        while queue.in_flight() > 0 {
            queue
                .reap::<8>(|end| assert!(open.remove(&check(end))))
                .unwrap();
        }
        assert!(open.is_empty());
    }
}
