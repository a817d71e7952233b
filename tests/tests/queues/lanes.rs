//! A shared queue whose users interfere: lanes that want different things, and threads that arrive while another one
//! works on the queue.

use nvme_core::group::BusTraffic::{self, CqLoads};
use nvme_core::group::{ExecContext, GroupOp, LoneThread, ThreadGroup};
use nvme_core::spec::{Cid, Nsid, Sqe, Status};
use nvme_core::trace::TraceEvent;
use nvme_core::{
    AbortReason, CommandData, CommandOutcome, CommandToken, DrainResult, MemberCommand,
    SharedQueue, SubmitError, WaitError,
};
use nvme_tests::hand::{Hand, QID, Rig};
use nvme_tests::team::{Paused, Team};
use nvme_tests::told::{Telling, Told};
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::sync::Mutex;

pub(crate) const FOREVER: u64 = 3_600_000_000_000;

/// Returns a command that carries its cell's number; dword 0 of its completion must be that number.
pub(crate) fn command(cell: u32) -> MemberCommand<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    sqe.cdw10 = cell;
    MemberCommand::new(sqe, CommandData::None, cell).wanting_dw0(true)
}

pub(crate) fn done(cell: u32) -> (CommandOutcome, u32) {
    (CommandOutcome::Completed(Status::SUCCESS), cell)
}

/// A thread that rings does not do so for ever while others keep asking; the waiting threads ring for what is left.
#[test]
fn a_ring_ends_though_others_keep_asking() {
    let rig = Rig::new(256, 255, 255, 0);
    let queue = rig.shared();
    let mut hand = Hand::new(&rig);
    let placed = Cell::new(0);
    // Whenever the one who rings asks for a value, another one places a command and asks for the doorbell.
    let pestered = Told::new(LoneThread, |what| {
        if what == Telling::Broadcast {
            let _placed = queue
                .place(&LoneThread, command(placed.get()))
                .expect("room");
            placed.set(placed.get() + 1);
            queue.ring(&LoneThread);
        }
    });
    queue.ring(&pestered);
    let placed = placed.get();
    let rung = hand.look();
    assert!(rung >= 16, "it looks again for those who came meanwhile");
    assert!(
        rung < placed,
        "{rung} of {placed}: the last one came too late"
    );
    // The lock is free: any thread can ring for the remaining commands.
    let here = Paused::new(|| ());
    assert_eq!(queue.help_out(&here), DrainResult::Took(0));
    assert_eq!(hand.look(), placed);
    assert_eq!(hand.serve(), placed);
    let mut taken = 0;
    while let DrainResult::Took(count @ 1..) = queue.help_out(&here) {
        taken += count;
    }
    assert_eq!((taken, queue.state().in_flight()), (placed, 0));
    assert_eq!(queue.fault(), None);
}

/// A lane of a team that waits together; `work` happens in each of its pauses.
pub(crate) struct Lane<'a, F> {
    team: &'a Team,
    pauses: Cell<u32>,
    work: F,
}

impl<'a, F: Fn(u32)> Lane<'a, F> {
    pub(crate) fn new(team: &'a Team, work: F) -> Self {
        let pauses = Cell::new(0);
        Self { team, pauses, work }
    }
}

impl<F: Fn(u32)> ExecContext for Lane<'_, F> {
    fn now_ns(&self) -> u64 {
        0
    }

    fn pause(&self, _turn: u32) {
        self.pauses.set(self.pauses.get() + 1);
        (self.work)(self.pauses.get());
    }

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(self.team)
    }
}

/// Runs a command from submission to its end, by `SharedQueue::run` or by `submit` and `wait`.
fn run(
    in_one: bool,
    queue: &SharedQueue<'_>,
    here: &impl ExecContext,
    cell: u32,
    limit: u64,
) -> Result<(CommandOutcome, u32), (WaitError, CommandToken)> {
    if in_one {
        let ran = queue.run(here, || command(cell), limit);
        return ran.map(|submitted| submitted.expect("a slot in time"));
    }
    let token = queue.submit(here, command(cell), limit);
    queue.wait(here, token.expect("a slot in time"), limit)
}

/// One slot for four lanes: each gets it in turn, and none submits a second time.
#[test]
fn lanes_that_submit_together_wait_for_a_slot_in_turn() {
    for in_one in [false, true] {
        let rig = Rig::new(2, 1, 4, 0);
        let hand = Mutex::new(Hand::new(&rig));
        let served = Mutex::new(0);
        let ends = Team::run(4, |team| {
            let here = Lane::new(team, |_| {
                if team.leads() {
                    *served.lock().unwrap() += hand.lock().unwrap().serve();
                }
            });
            run(in_one, &rig.shared(), &here, team.rank(), FOREVER).unwrap()
        });
        assert_eq!(ends, [0, 1, 2, 3].map(done));
        assert_eq!(served.into_inner().unwrap(), 4);
    }
}

/// The last command ends long after the others: all lanes return then, each with its own result.
#[test]
fn lanes_that_wait_together_return_together() {
    const LAST: u32 = 2;
    let rig = Rig::new(8, 7, 4, 0);
    let hand = Mutex::new(Hand::new(&rig));
    let all_done = Mutex::new(false);
    let ends = Team::run(3, |team| {
        let queue = rig.shared();
        let token = queue.place(team, command(team.rank())).unwrap();
        queue.ring(team);
        if team.leads() {
            let mut hand = hand.lock().unwrap();
            for _ in 0..LAST {
                let sqe = hand.fetch().unwrap();
                hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
            }
        }
        team.sync();
        let here = Lane::new(team, |pauses| {
            if team.leads() && pauses == 9 {
                *all_done.lock().unwrap() = true;
                assert_eq!(hand.lock().unwrap().serve(), 1);
            }
        });
        let end = queue.wait(&here, token, FOREVER).unwrap();
        assert!(*all_done.lock().unwrap(), "lane {} left alone", team.rank());
        end
    });
    assert_eq!(ends, [0, 1, 2].map(done));
}

/// A lane that records the events of its command; its clock is the number of its pauses.
pub(crate) struct Recorder<'a, F> {
    pub(crate) lane: Lane<'a, F>,
    pub(crate) log: &'a Mutex<Vec<(u32, TraceEvent)>>,
}

impl<F: Fn(u32)> ExecContext for Recorder<'_, F> {
    fn now_ns(&self) -> u64 {
        u64::from(self.lane.pauses.get())
    }

    fn pause(&self, turn: u32) {
        self.lane.pause(turn);
    }

    fn record(&self, event: impl FnOnce() -> TraceEvent) {
        let rank = self.lane.team.rank();
        self.log.lock().unwrap().push((rank, event()));
    }

    fn converged<A: GroupOp>(&self, key: u64, op: A) -> A::Output {
        self.lane.converged(key, op)
    }
}

/// Runs two lanes with a command each until `limit`, and records them: the controller answers the second lane's command
/// at once, and the first lane's when it sees `answers_when` in the log. Returns which of them completed, and the log.
fn recorded(
    in_one: bool,
    limit: u64,
    answers_when: fn(&[(u32, TraceEvent)]) -> bool,
) -> (Vec<bool>, Vec<(u32, TraceEvent)>) {
    let rig = Rig::new(8, 7, 2, 0);
    let hand = Mutex::new((Hand::new(&rig), None));
    let log: Mutex<Vec<_>> = Mutex::default();
    let ends = Team::run(2, |team| {
        let lane = Lane::new(team, |_| {
            if !team.leads() {
                return;
            }
            let (hand, kept) = &mut *hand.lock().unwrap();
            while let Some(sqe) = hand.fetch() {
                match sqe.cdw10 {
                    0 => *kept = Some(sqe.cid()),
                    cell => hand.complete(sqe.cid(), Status::SUCCESS, cell),
                }
            }
            if answers_when(&log.lock().unwrap())
                && let Some(cid) = kept.take()
            {
                hand.complete(cid, Status::SUCCESS, 0);
            }
        });
        let here = Recorder { lane, log: &log };
        let ended = run(in_one, &rig.shared(), &here, team.rank(), limit);
        matches!(ended, Ok((CommandOutcome::Completed(_), _)))
    });
    (ends, log.into_inner().unwrap())
}

/// The end of a lane's command is recorded when the lane sees it, not when the lanes that wait together return: by then
/// the identifier may have been used again.
#[test]
fn an_end_is_recorded_when_it_is_seen() {
    const LIMIT: u64 = 10_000;
    let (qid, cid) = (QID, |rank: u32| Cid(0x1000 | rank as u16));
    let submitted = |rank| (rank, TraceEvent::submitted(qid, cid(rank), 2, 1));
    let completed = |rank| {
        let event = TraceEvent::completed(qid, cid(rank), Status::SUCCESS, 0);
        (rank, event)
    };
    for in_one in [false, true] {
        let after_the_second = |log: &[(u32, TraceEvent)]| log.len() == 3;
        let (ends, mut log) = recorded(in_one, LIMIT, after_the_second);
        assert_eq!(ends, [true, true], "{log:?}");
        log[..2].sort_by_key(|(rank, _)| *rank);
        let placed = [submitted(0), submitted(1)];
        assert_eq!(log, [&placed[..], &[completed(1), completed(0)]].concat());

        let (ends, mut log) = recorded(in_one, 50, |_| false);
        assert_eq!(ends, [false, true]);
        log[..2].sort_by_key(|(rank, _)| *rank);
        assert_eq!(log[..3], [&placed[..], &[completed(1)]].concat());
        let [(0, last)] = log[3..] else {
            panic!("{log:?}")
        };
        let [head, at_ns] = last.to_words();
        assert!((50..LIMIT).contains(&at_ns), "{last}");
        let expired = TraceEvent::expired(qid, cid(0), at_ns);
        assert_eq!(TraceEvent::from_words([head, at_ns]), expired);
    }
}

/// A command that the host ends while a thread waits has another end than a completion or a deadline.
#[test]
fn what_a_reset_ends_is_recorded_as_reclaimed() {
    for in_one in [false, true] {
        let rig = Rig::new(4, 3, 3, 0);
        let queue = rig.shared();
        let team = &Team::of(1)[0];
        let log = Mutex::default();
        let lane = Lane::new(team, |pauses| {
            if pauses == 3 {
                assert_eq!(queue.recover(&rig.reset()), Some(1));
            }
        });
        let here = Recorder { lane, log: &log };
        let (outcome, _) = run(in_one, &queue, &here, 0, FOREVER).unwrap();
        assert_eq!(
            outcome,
            CommandOutcome::Aborted(AbortReason::ControllerReset)
        );
        let cid = Cid(0x1000);
        let events = [
            TraceEvent::submitted(QID, cid, 2, 1),
            TraceEvent::reclaimed(QID, cid),
        ];
        assert_eq!(log.into_inner().unwrap(), events.map(|event| (0, event)));
    }
}

/// All words of free slots but one are empty. A team finds that one from any starting point, and its members get the
/// slots in the order of their ranks.
#[test]
fn a_team_finds_the_last_free_slots() {
    const SLOTS: u32 = 128;
    for first_cell in (0..8).map(|word| 256 + word * 32) {
        for left in [1, 8] {
            let rig = Rig::new(256, SLOTS, 512, 0);
            let queue = rig.shared();
            let token = |cell| queue.place(&LoneThread, command(cell)).expect("room");
            let mut cids: HashSet<_> = (0..SLOTS - left).map(|cell| token(cell).cid()).collect();
            let got = Team::run(8, |team| {
                let queue = rig.shared();
                let placed = queue.place(team, command(first_cell + team.rank()));
                placed.map(|token| token.cid())
            });
            for (rank, got) in (0..).zip(got) {
                match got {
                    Ok(cid) => assert!(rank < left && cids.insert(cid), "member {rank}"),
                    Err(error) => {
                        assert!(rank >= left, "member {rank} of {left} that there are");
                        assert_eq!(error, SubmitError::QueueFull);
                    }
                }
            }
            assert_eq!(cids.len() as u32, SLOTS, "every slot is used once");
        }
    }
}

/// Command slots of a queue that [`leave_free`] fills.
const SLOTS: u32 = 128;

fn slot_of(cid: Cid) -> u32 {
    u32::from(cid.0 & 0xFFF)
}

/// Puts a command into each slot of an unused queue, and ends those in `free`.
fn leave_free<'a>(rig: &'a Rig, free: &[u32]) -> Hand<'a> {
    let queue = rig.shared();
    for cell in 0..SLOTS {
        let _placed = queue.place(&LoneThread, command(cell)).expect("room");
    }
    queue.ring(&LoneThread);
    let mut hand = Hand::new(rig);
    while let Some(sqe) = hand.fetch() {
        if free.contains(&slot_of(sqe.cid())) {
            hand.complete(sqe.cid(), Status::SUCCESS, sqe.cdw10);
        }
    }
    while queue.drain(&LoneThread) != DrainResult::Took(0) {}
    hand
}

/// Half of a team's slots are in one word, half in the next or, after the last, in the first: each
/// member gets one wherever the team begins to look.
#[test]
fn a_team_takes_its_slots_out_of_two_words() {
    for word in 0..4 {
        let bits = [3, 9, 20, 31].map(|bit| word * 32 + bit);
        let mut free: Vec<_> = bits
            .iter()
            .flat_map(|at| [*at, (at + 32) % SLOTS])
            .collect();
        free.sort_unstable();
        for first_cell in (0..8).map(|word| 256 + word * 32) {
            let rig = Rig::new(256, SLOTS, 512, 0);
            let _hand = leave_free(&rig, &free);
            let mut got = Team::run(8, |team| {
                let cell = first_cell + team.rank();
                let token = rig.shared().place(team, command(cell)).expect("a slot");
                slot_of(token.cid())
            });
            got.sort_unstable();
            assert_eq!(got, free, "from cell {first_cell} on");
        }
    }
}

/// One thread gets the only free slot, from any starting point and with any guess.
#[test]
fn a_thread_finds_the_only_free_slot() {
    for slot in [0, 5, 63, 64, 127] {
        let rig = Rig::new(256, SLOTS, 512, 0);
        let mut hand = leave_free(&rig, &[slot]);
        let queue = rig.shared();
        for cell in 256..512 {
            let token = queue.place(&LoneThread, command(cell)).expect("a slot");
            assert_eq!(slot_of(token.cid()), slot);
            queue.ring(&LoneThread);
            assert_eq!(hand.serve(), 1);
            assert_eq!(queue.drain(&LoneThread), DrainResult::Took(1));
        }
    }
}

/// One ring is for all that was published, by whomever, and however much that is.
#[test]
fn one_ring_is_for_everything_published() {
    let rung = |ring: &dyn Fn(&SharedQueue<'_>, &Rig)| {
        let rig = Rig::new(64, 63, 63, 0);
        let queue = rig.shared();
        for cell in 0..63 {
            let _placed = queue.place(&LoneThread, command(cell)).expect("room");
        }
        ring(&queue, &rig);
        Hand::new(&rig).look()
    };
    assert_eq!(rung(&|queue, _| queue.ring(&LoneThread)), 63);
    for size in [1, 2, 8] {
        let by_team = rung(&|_, rig| _ = Team::run(size, |team| rig.shared().ring(team)));
        assert_eq!(by_team, 63, "team of {size}");
    }
}

/// Just what was published is rung, up to the last position before the counters wrap, too: its mark
/// would be 0.
#[test]
fn a_team_rings_nothing_that_was_not_published() {
    let rig = Rig::new(32, 7, 7, 0u32.wrapping_sub(64));
    let queue = rig.shared();
    let mut hand = Hand::new(&rig);
    for count in [3].into_iter().chain([4; 15]) {
        for cell in 0..count {
            let _placed = queue.place(&LoneThread, command(cell)).expect("room");
        }
        Team::run(2, |team| rig.shared().ring(team));
        assert_eq!(hand.look(), count);
        assert_eq!(hand.serve(), count);
        while queue.drain(&LoneThread) != DrainResult::Took(0) {}
    }
}

/// One thread has a position and has not published its command yet: the team does not ring for the positions behind it.
#[test]
fn a_team_rings_nothing_beyond_a_gap() {
    const SLOW: u32 = 62;
    let rig = Rig::new(64, 63, 63, 0);
    let (queue, hand) = (rig.shared(), RefCell::new(Hand::new(&rig)));
    let (placed, fetched) = (Cell::new(0), RefCell::new(Vec::new()));
    let fetch = || {
        let mut hand = hand.borrow_mut();
        let entries = std::iter::from_fn(|| hand.fetch());
        fetched.borrow_mut().extend(entries.map(|sqe| sqe.cdw10));
    };
    let slow = Told::new(LoneThread, |what| {
        if what == Telling::Broadcast {
            let first = placed.replace(placed.get() + 6);
            // Up to the gap, so that the team begins there.
            queue.ring(&LoneThread);
            Team::run(2, |team| {
                let queue = rig.shared();
                for cell in [first, first + 2, first + 4] {
                    let _placed = queue.place(team, command(cell + team.rank())).unwrap();
                }
                queue.ring(team);
            });
            fetch();
        }
    });
    let _placed = queue.place(&slow, command(SLOW)).unwrap();
    let before = fetched.borrow().len() as u32;
    assert!(before < placed.get(), "those behind it wait");
    queue.ring(&LoneThread);
    fetch();
    let mut fetched = fetched.take();
    fetched.sort_unstable();
    let all = (0..placed.get()).chain([SLOW]);
    assert_eq!(fetched, Vec::from_iter(all));
}

/// Any number of completions in one look, in each lap: every command has its own end.
#[test]
fn a_look_at_many_completions_ends_each_command_with_its_own() {
    let rig = Rig::new(128, 31, 31, 0);
    let (queue, mut hand) = (rig.shared(), Hand::new(&rig));
    for count in 1..=31 {
        let place = |cell| queue.place(&LoneThread, command(cell)).expect("room");
        let tokens: Vec<_> = (0..count).map(place).collect();
        queue.ring(&LoneThread);
        assert_eq!(hand.serve(), count);
        while queue.drain(&LoneThread) != DrainResult::Took(0) {}
        for (cell, token) in (0..).zip(&tokens) {
            assert_eq!(queue.poll(token), Some(done(cell)), "of {count}");
        }
    }
    assert_eq!(queue.fault(), None);
}

/// A thread that drains while another one holds the lock gets "busy", not "empty".
#[test]
fn a_drain_beside_another_one_is_busy() {
    let rig = Rig::new(4, 3, 3, 0);
    let busy = Cell::new(0);
    let first = Told::new(LoneThread, |what| {
        if what == Telling::Broadcast {
            assert_eq!(rig.shared().drain(&LoneThread), DrainResult::Busy);
            busy.set(busy.get() + 1);
        }
    });
    assert_eq!(rig.shared().drain(&first), DrainResult::Took(0));
    assert_eq!(busy.get(), 1);
}

/// Counts the queue's accesses to the bus.
struct Counts<'a, G> {
    group: &'a G,
    seen: RefCell<Vec<BusTraffic>>,
}

impl<G: ThreadGroup> ExecContext for Counts<'_, G> {
    fn now_ns(&self) -> u64 {
        0
    }

    fn pause(&self, _turn: u32) {}

    fn on_bus_access(&self, traffic: BusTraffic) {
        self.seen.borrow_mut().push(traffic);
    }

    fn converged<A: GroupOp>(&self, _key: u64, op: A) -> A::Output {
        op.run(self.group)
    }
}

/// A lone lane loads one half of its entries first, and the other half if the first has completions; a member of a team
/// loads once for each look.
#[test]
fn loads_of_completions_are_told() {
    fn loads<G: ThreadGroup>(group: &G) -> [Vec<BusTraffic>; 2] {
        let rig = Rig::new(64, 63, 63, 0);
        let (queue, mut hand) = (rig.shared(), Hand::new(&rig));
        let look = || {
            let seen = RefCell::default();
            let here = Counts { group, seen };
            let _drained = queue.help_out(&here);
            here.seen.take()
        };
        let nothing = look();
        let _placed = queue.place(&LoneThread, command(0)).unwrap();
        queue.ring(&LoneThread);
        assert_eq!(hand.serve(), 1);
        [nothing, look()]
    }
    let all = LoneThread::READS;
    let alone = [vec![CqLoads(all / 2)], vec![CqLoads(all)]];
    assert_eq!(loads(&LoneThread), alone);
    // A team looks again for completions that arrived meanwhile.
    let team = [vec![CqLoads(1)], vec![CqLoads(1), CqLoads(1)]];
    assert_eq!(loads(&Team::of(1)[0]), team);
}

/// The words of a token are enough to wait for its command.
#[test]
fn a_token_comes_back_from_its_words() {
    let rig = Rig::new(4, 3, 3, 0);
    let queue = rig.shared();
    let mut hand = Hand::new(&rig);
    let token = queue.place(&LoneThread, command(2)).unwrap();
    let cid = token.cid();
    let words = token.words();
    let token = CommandToken::from_words(words);
    assert_eq!((token.cell(), token.cid()), (2, cid));
    assert_eq!(queue.poll(&token), None);
    queue.ring(&LoneThread);
    assert_eq!(hand.serve(), 1);
    assert_eq!(queue.drain(&LoneThread), DrainResult::Took(1));
    assert_eq!(queue.poll(&CommandToken::from_words(words)), Some(done(2)));
}
