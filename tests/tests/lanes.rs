//! A shared queue whose users get in each other's way: lanes that want different things, and threads
//! that come while another one is at it.
#![cfg(not(loom))]

use nvme_core::group::{Act, Alone, Group, Here};
use nvme_core::spec::{Nsid, Sqe, Status};
use nvme_core::{Command, Data, Drained, Outcome, SubmitError, Token};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::team::{Paused, Team};
use nvme_tests::told::{Telling, Told};
use std::cell::Cell;
use std::collections::HashSet;
use std::sync::Mutex;

const FOREVER: u64 = 3_600_000_000_000;

/// A command that carries its cell's number, and wants it back as dword 0.
fn command(cell: u32) -> Command<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    sqe.cdw10 = cell;
    Command::new(sqe, Data::None, cell).wanting_dw0(true)
}

fn done(cell: u32) -> (Outcome, u32) {
    (Outcome::Done(Status::SUCCESS), cell)
}

/// Whoever rings does not do so for ever for those who keep coming; what is left is rung by those who
/// wait for it.
#[test]
fn a_ring_ends_though_others_keep_asking() {
    let rig = Rig::new(256, 255, 255, 0);
    let queue = rig.shared();
    let mut hand = Hand::new(&rig);
    let placed = Cell::new(0);
    // Whenever the one who rings asks for a value, another one places a command and asks for the doorbell.
    let pestered = Told::new(Alone, |what| {
        if what == Telling::Broadcast {
            let _placed = queue.place(&Alone, command(placed.get())).expect("room");
            placed.set(placed.get() + 1);
            queue.ring(&Alone);
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
    // The lock is free: anyone can ring for the rest.
    let here = Paused::new(|| ());
    assert_eq!(queue.help_out(&here), Drained::Took(0));
    assert_eq!(hand.look(), placed);
    assert_eq!(hand.serve(), placed);
    let mut taken = 0;
    while let Drained::Took(count @ 1..) = queue.help_out(&here) {
        taken += count;
    }
    assert_eq!((taken, queue.state().in_flight()), (placed, 0));
    assert_eq!(queue.fault(), None);
}

/// A lane of a team that waits together; `work` happens in each of its pauses.
struct Lane<'a, F> {
    team: &'a Team,
    pauses: Cell<u32>,
    work: F,
}

impl<'a, F: Fn(u32)> Lane<'a, F> {
    fn new(team: &'a Team, work: F) -> Self {
        let pauses = Cell::new(0);
        Self { team, pauses, work }
    }
}

impl<F: Fn(u32)> Here for Lane<'_, F> {
    fn now_ns(&self) -> u64 {
        0
    }

    fn pause(&self, _turn: u32) {
        self.pauses.set(self.pauses.get() + 1);
        (self.work)(self.pauses.get());
    }

    fn together<A: Act>(&self, _key: u64, act: A) -> A::Output {
        act.act(self.team)
    }
}

/// One slot for four lanes: each gets it in turn, and none submits a second time.
#[test]
fn lanes_that_submit_together_wait_for_a_slot_in_turn() {
    let rig = Rig::new(2, 1, 4, 0);
    let hand = Mutex::new(Hand::new(&rig));
    let served = Mutex::new(0);
    let ends = Team::run(4, |team| {
        let queue = rig.shared();
        let here = Lane::new(team, |_| {
            if team.leads() {
                *served.lock().unwrap() += hand.lock().unwrap().serve();
            }
        });
        let token = queue.submit(&here, command(team.rank()), FOREVER).unwrap();
        queue.wait(&here, token, FOREVER).unwrap()
    });
    assert_eq!(ends, [0, 1, 2, 3].map(done));
    assert_eq!(served.into_inner().unwrap(), 4);
}

/// The last command ends long after the others: all lanes come back then, each with its own result.
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

/// All words of free slots but one are empty: a team finds that one wherever it begins to look, and
/// its members get what is there in the order of their ranks.
#[test]
fn a_team_finds_the_last_free_slots() {
    const SLOTS: u32 = 128;
    for first_cell in (0..8).map(|word| 256 + word * 32) {
        for left in [1, 8] {
            let rig = Rig::new(256, SLOTS, 512, 0);
            let queue = rig.shared();
            let token = |cell| queue.place(&Alone, command(cell)).expect("room");
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

/// What is kept of a token where Rust values cannot be is enough to wait for its command.
#[test]
fn a_token_comes_back_from_its_words() {
    let rig = Rig::new(4, 3, 3, 0);
    let queue = rig.shared();
    let mut hand = Hand::new(&rig);
    let token = queue.place(&Alone, command(2)).unwrap();
    let cid = token.cid();
    let words = token.words();
    let token = Token::from_words(words);
    assert_eq!((token.cell(), token.cid()), (2, cid));
    assert_eq!(queue.poll(&token), None);
    queue.ring(&Alone);
    assert_eq!(hand.serve(), 1);
    assert_eq!(queue.drain(&Alone), Drained::Took(1));
    assert_eq!(queue.poll(&Token::from_words(words)), Some(done(2)));
}
