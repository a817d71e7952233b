//! Ring sizes, positions, clocks and counts at their edges, for every kind of queue.

use nvme_core::group::LoneThread;
use nvme_core::spec::nvm;
use nvme_core::spec::{Lba, Nsid, Sqe, Status};
use nvme_core::{
    AbortReason, CommandData, CommandOutcome, CommandSlot, DrainResult, MemberCommand, QueuePair,
};
use nvme_tests::hand::{Hand, QID, Rig};

/// Sizes at both ends, and the smallest one that has quarters.
const SIZES: [u32; 4] = [2, 4, 8, 65_536];
/// Positions at which a counter loses a bit: in 16 bits, in the drain word, in signed and in unsigned comparisons.
const WRAPS: [u64; 4] = [1 << 16, 1 << 28, 1 << 31, 1 << 32];
/// Clocks, in ticks of 1,024 ns: their lower 32 bits are 0 or change their sign here (37 and 73 minutes).
const TICKS: [u64; 4] = [1 << 31, 1 << 32, 3 << 31, 1 << 40];
const TICK_NS: u64 = 1 << 10;

fn sqe(number: u32) -> Sqe {
    let mut sqe = Sqe::new(2, Nsid(1));
    (sqe.cdw10, sqe.cdw15) = (number, !number);
    sqe
}

fn command(number: u32, tag: u32) -> MemberCommand<'static> {
    MemberCommand::new(sqe(number), CommandData::None, tag).wanting_dw0(true)
}

/// Every size with a beginning two passes before every wrap; the largest one only at the ends.
fn sizes_and_starts() -> impl Iterator<Item = (u32, u32)> {
    SIZES.into_iter().flat_map(|entries| {
        let lap = 2 * u64::from(entries);
        let before = WRAPS.map(move |wrap| wrap.saturating_sub(lap) as u32);
        let all = entries < 65_536;
        let starts = before.into_iter().enumerate();
        let starts = starts.filter(move |(at, _)| all || matches!(at, 1 | 3));
        starts.map(move |(_, start)| (entries, start))
    })
}

/// Returns the most commands that a queue of `entries` entries has in flight.
fn slots(entries: u32) -> u32 {
    (entries - 1).min(nvme_core::MAX_IN_FLIGHT)
}

/// Returns the number of commands of two passes and a little more, past the wrap.
fn commands(entries: u32) -> u32 {
    2 * entries + 5
}

#[test]
fn a_queue_pair_goes_round_rings_of_every_size() {
    for entries in SIZES {
        let rig = Rig::new(entries, slots(entries), 0, 0);
        let table: Vec<CommandSlot<u32>> =
            (0..slots(entries)).map(|_| CommandSlot::new()).collect();
        let mut pair = QueuePair::new(rig.identity(), QID, rig.memory(), table);
        let mut hand = Hand::new(&rig);
        let (mut next, mut ended) = (0, 0);
        while ended < commands(entries) {
            while pair.in_flight() < pair.depth() {
                assert!(
                    pair.submit(sqe(next), CommandData::None, next, u64::MAX)
                        .is_ok()
                );
                next += 1;
            }
            pair.ring();
            hand.serve();
            while let Some(end) = pair.poll().expect("an honest controller") {
                assert_eq!((end.buffer, end.dw0), (ended, ended), "{entries} entries");
                ended += 1;
            }
        }
    }
}

#[test]
fn a_collective_goes_round_rings_of_every_size_at_every_position() {
    for (entries, start) in sizes_and_starts() {
        let rig = Rig::new(entries, slots(entries), 0, start);
        let mut queue = rig.collective(LoneThread);
        let mut hand = Hand::new(&rig);
        let (mut next, mut ended) = (0, 0);
        while ended < commands(entries) {
            while queue.in_flight() < queue.depth() {
                let placed = queue.submit(true, |_| command(next, next), u64::MAX >> 1);
                assert!(placed.is_ok_and(|cid| cid.is_some()));
                next += 1;
            }
            queue.ring();
            hand.serve();
            while queue.in_flight() > 0 {
                let found = queue.reap::<4>(|end| {
                    assert_eq!((end.tag, end.dw0), (ended, ended), "{entries} from {start}");
                    ended += 1;
                });
                let found = found.expect("an honest controller");
                assert_ne!(
                    found, 0,
                    "{entries} entries from {start}: a completion is not seen"
                );
            }
        }
    }
}

#[test]
fn a_shared_queue_goes_round_rings_of_every_size_at_every_position() {
    for (entries, start) in sizes_and_starts() {
        let depth = slots(entries);
        let rig = Rig::new(entries, depth, depth as usize, start);
        let queue = rig.shared();
        let mut hand = Hand::new(&rig);
        let (mut next, mut ended) = (0, 0);
        while ended < commands(entries) {
            let place = |cell| {
                let number = next + cell;
                queue
                    .place(&LoneThread, command(number, cell))
                    .expect("room")
            };
            let tokens: Vec<_> = (0..depth).map(place).collect();
            next += depth;
            queue.ring(&LoneThread);
            assert_eq!(hand.look(), depth, "{entries} from {start}: all were rung");
            for token in tokens {
                let mut turns = 0;
                let end = loop {
                    if let Some(end) = queue.poll(&token) {
                        break end;
                    }
                    turns += 1;
                    assert!(
                        turns < 1_000,
                        "{entries} from {start}: command {ended} does not end"
                    );
                    // Completes as many commands as the ring has room for: completions are freed by quarters of the
                    // ring.
                    let mut posted = 0;
                    while hand.has_room() {
                        let Some(sqe) = hand.fetch() else { break };
                        hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
                        posted += 1;
                    }
                    let drained = queue.drain(&LoneThread);
                    assert_eq!(queue.fault(), None, "{entries} entries from {start}");
                    assert!(
                        drained != DrainResult::Took(0) || posted == 0,
                        "{entries} entries from {start}: a completion is not seen"
                    );
                    assert!(
                        drained != DrainResult::Took(0) || hand.has_room(),
                        "{entries} entries from {start}: completions are not given back"
                    );
                };
                assert_eq!(end, (CommandOutcome::Completed(Status::SUCCESS), ended));
                ended += 1;
            }
        }
    }
}

#[test]
fn a_deadline_of_a_collective_passes_once_on_every_clock() {
    for ticks in TICKS {
        // Deadlines before, at and after the tick; the clock is looked at before and after each.
        for (early, late) in [
            (-3, -1),
            (-1, 1),
            (0, 1),
            (1, 3),
            (-1, 1 << 20),
            (-(1 << 20), 1),
        ] {
            let at = |offset: i64| ticks.wrapping_add_signed(offset) * TICK_NS;
            let rig = Rig::new(4, 3, 0, 0);
            let mut queue = rig.collective(LoneThread);
            let placed = queue.submit(true, |_| command(0, 9), at(late));
            assert!(placed.is_ok());
            let what = format!("tick {ticks:#x}, deadline {late:+}");
            assert_eq!(queue.expire(at(early), |_| ()), 0, "{what}, at {early:+}");
            assert_eq!(
                queue.expire(at(late) - TICK_NS, |_| ()),
                0,
                "{what}, a tick before"
            );
            let mut told = Vec::new();
            assert_eq!(queue.expire(at(late), |tag| told.push(tag)), 1, "{what}");
            assert_eq!(told, [9]);
            assert_eq!(queue.expire(at(late) + TICK_NS, |_| ()), 0, "{what}, once");
        }
    }
}

#[test]
fn a_collective_without_deadlines_expires_nothing() {
    let rig = Rig::new(4, 3, 0, 0);
    let mut queue = rig.collective(LoneThread);
    let placed = queue.submit(true, |_| command(0, 9), u64::MAX);
    assert!(placed.is_ok());
    let clocks = TICKS.into_iter().chain([1, 1 << 20, (1 << 54) - 1]);
    for now in clocks.flat_map(|ticks| [ticks - 1, ticks, ticks + 1]) {
        let now_ns = now.saturating_mul(TICK_NS);
        assert_eq!(queue.expire(now_ns, |_| ()), 0, "at {now_ns:#x} ns");
    }
    assert_eq!(queue.expire(u64::MAX, |_| ()), 0);
    // This tick means "no deadline", yet such a deadline passes, too.
    let at = (1 << 32) * TICK_NS;
    assert!(queue.submit(true, |_| command(1, 8), at).is_ok());
    assert_eq!(queue.expire(at - 1, |_| ()), 0);
    assert_eq!(queue.expire(at + TICK_NS, |tag| assert_eq!(tag, 8)), 1);
}

#[test]
fn a_deadline_of_a_queue_pair_passes_once_on_every_clock() {
    for at in [1, 1 << 32, 1 << 42, 1 << 63, u64::MAX - 1, u64::MAX] {
        let rig = Rig::new(4, 3, 0, 0);
        let table: Vec<CommandSlot<u32>> = (0..3).map(|_| CommandSlot::new()).collect();
        let mut pair = QueuePair::new(rig.identity(), QID, rig.memory(), table);
        assert!(pair.submit(sqe(0), CommandData::None, 0, at).is_ok());
        let mut expired = |now| std::iter::from_fn(|| pair.expire(now)).count();
        assert_eq!((expired(0), expired(at - 1)), (0, 0), "before {at:#x}");
        assert_eq!((expired(at), expired(u64::MAX)), (1, 0), "at {at:#x}");
    }
}

#[test]
fn commands_name_one_block_and_65_536() {
    type Builder = fn(Nsid, Lba, u32) -> Sqe;
    let builders: [(&str, Builder); 5] = [
        ("read", nvm::read),
        ("write", nvm::write),
        ("compare", nvm::compare),
        ("write zeroes", nvm::write_zeroes),
        ("verify", nvm::verify),
    ];
    for (name, build) in builders {
        for blocks in [1, 2, 65_535, 65_536] {
            for lba in [0, u64::from(u32::MAX), 1 << 32, u64::MAX - 65_536] {
                let sqe = build(Nsid(3), Lba(lba), blocks);
                assert_eq!(sqe.cdw12 & 0xFFFF, blocks - 1, "{name} of {blocks} blocks");
                assert_eq!(sqe.cdw12 >> 16, 0, "{name} of {blocks} blocks: no flags");
                let named = u64::from(sqe.cdw10) | u64::from(sqe.cdw11) << 32;
                assert_eq!((named, sqe.nsid), (lba, 3), "{name}");
            }
        }
    }
}

#[test]
fn a_recovery_ends_the_command_of_every_slot() {
    let aborted = CommandOutcome::Aborted(AbortReason::ControllerReset);
    for entries in [2, 4, 64] {
        let depth = slots(entries);
        let rig = Rig::new(entries, depth, depth as usize, 0);
        let queue = rig.shared();
        let place = |cell| queue.place(&LoneThread, command(cell, cell)).expect("room");
        let tokens: Vec<_> = (0..depth).map(place).collect();
        assert_eq!(queue.recover(&rig.reset()), Some(depth));
        for token in tokens {
            assert_eq!(queue.poll(&token), Some((aborted, 0)));
        }

        let rig = Rig::new(entries, depth, 0, 0);
        let mut queue = rig.collective(LoneThread);
        for tag in 0..depth {
            assert!(queue.submit(true, |_| command(tag, tag), 0).is_ok());
        }
        let mut ended = Vec::new();
        assert!(queue.recover(&rig.reset(), |tag| ended.push(tag)));
        ended.sort_unstable();
        assert_eq!(ended, (0..depth).collect::<Vec<_>>());
    }
}
