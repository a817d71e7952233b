//! Result cells of a shared queue: a token sees the end of its own command and no other, and a recovery ends every
//! command, wherever a kernel died.

use nvme_core::group::{GroupVote, LoneThread, ThreadGroup};
use nvme_core::spec::{Cid, Nsid, Sqe, Status};
use nvme_core::{
    AbortReason, CommandData, CommandOutcome, CommandToken, DrainResult, MemberCommand, SubmitError,
};
use nvme_tests::hand::{Hand, Rig, deleted};
use nvme_tests::team::Team;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::mpsc;
use std::time::Duration;

fn command(tag: u32, wants_dw0: bool) -> MemberCommand<'static> {
    MemberCommand::new(Sqe::new(2, Nsid(1)), CommandData::None, tag).wanting_dw0(wants_dw0)
}

/// A lone member that calls a function at each meeting of its group.
pub struct Meets<F>(pub F);

impl<F: Fn()> ThreadGroup for Meets<F> {
    fn size(&self) -> u32 {
        1
    }

    fn rank(&self) -> u32 {
        0
    }

    fn sync(&self) {
        self.0();
    }

    fn vote(&self, mine: bool) -> GroupVote {
        self.0();
        LoneThread.vote(mine)
    }

    fn broadcast(&self, value: u32) -> u32 {
        value
    }
}

/// Drains as a kernel that dies at its meeting number `left`; returns whether it died.
fn dies(rig: &Rig, left: u32) -> bool {
    let left = Cell::new(left);
    let group = Meets(|| match left.get() {
        0 => panic_any("the kernel died"),
        more => left.set(more - 1),
    });
    catch_unwind(AssertUnwindSafe(|| rig.shared().drain(&group))).is_err()
}

#[test]
fn recovery_ends_every_command_wherever_a_kernel_died() {
    let mut deaths = 0;
    for meeting in 0..12 {
        for (wants_dw0, deletes) in [(false, false), (true, true)] {
            let rig = Rig::new(8, 7, 3, 0);
            let queue = rig.shared();
            let place = |tag| queue.place(&LoneThread, command(tag, wants_dw0)).unwrap();
            let (first, second, unfinished) = (place(0), place(1), place(2));
            queue.ring(&LoneThread);
            let mut hand = Hand::new(&rig);
            for token in [&first, &second] {
                hand.fetch().unwrap();
                hand.complete(token.cid(), Status::SUCCESS, 0);
            }
            let died = dies(&rig, meeting);
            deaths += u32::from(died);
            let told = [&first, &second].map(|token| queue.poll(token));
            let aborted = if deletes {
                let proof = deleted(rig.identity(), rig.state().close());
                assert!(queue.recover(&proof).is_some());
                AbortReason::QueueDeleted
            } else {
                assert!(queue.recover(&rig.reset()).is_some());
                AbortReason::ControllerReset
            };
            let aborted = Some((CommandOutcome::Aborted(aborted), 0));
            assert_eq!(queue.poll(&unfinished), aborted, "meeting {meeting}");
            for (token, told) in [&first, &second].into_iter().zip(told) {
                let what = format!("meeting {meeting}, died {died}: the command has no end");
                assert_eq!(queue.poll(token), told.or(aborted), "{what}");
            }
            for tag in 0..3 {
                assert!(
                    queue.place(&LoneThread, command(tag, false)).is_ok(),
                    "cell {tag}"
                );
            }
        }
    }
    assert!(deaths >= 6, "only {deaths} kernels died");
}

/// A slot that a kernel had claimed when it died still names the cell of the command that it had before.
#[test]
fn recovery_leaves_cells_that_are_of_no_command_alone() {
    let rig = Rig::new(4, 1, 2, 0);
    let queue = rig.shared();
    let token = queue.place(&LoneThread, command(0, false)).unwrap();
    queue.ring(&LoneThread);
    Hand::new(&rig).serve();
    assert_eq!(queue.drain(&LoneThread), DrainResult::Took(1));
    let meetings = Cell::new(2);
    let group = Meets(|| match meetings.get() {
        0 => panic_any("the kernel died"),
        more => meetings.set(more - 1),
    });
    let placed = catch_unwind(AssertUnwindSafe(|| {
        let _ = rig.shared().place(&group, command(1, false));
    }));
    assert!(placed.is_err(), "it dies between claim and submission");
    assert_eq!(queue.recover(&rig.reset()), Some(0));
    let done = CommandOutcome::Completed(Status::SUCCESS);
    assert_eq!(
        queue.poll(&token),
        Some((done, 0)),
        "its end stays what it was"
    );
    assert!(queue.place(&LoneThread, command(1, false)).is_ok());
}

#[test]
fn two_commands_with_one_cell_never_pass_for_each_other() {
    let rig = Rig::new(8, 7, 8, 0);
    let tokens = Team::run(2, |team| {
        let token = rig.shared().place(team, command(5, false));
        token.map(CommandToken::words)
    });
    let words: Vec<_> = tokens
        .into_iter()
        .map(|token| token.expect("at once"))
        .collect();
    let queue = rig.shared();
    queue.ring(&LoneThread);
    let mut hand = Hand::new(&rig);
    let cids = [(); 2].map(|()| hand.fetch().unwrap().cid());
    let token_of = |cid: Cid| {
        let words = words.iter().find(|words| words[2] == u32::from(cid.0));
        CommandToken::from_words(*words.unwrap())
    };
    let ends = |cid: Cid| queue.poll(&token_of(cid)).map(|(outcome, _)| outcome);
    let [first, second] = cids;
    let busy = queue
        .place(&LoneThread, command(5, false))
        .map(CommandToken::words);
    assert_eq!(busy, Err(SubmitError::CellBusy));
    let failed = CommandOutcome::Completed(Status::INTERNAL_ERROR);
    for (cid, other) in [(first, second), (second, first)] {
        hand.complete(cid, Status::INTERNAL_ERROR, 0);
        while queue.drain(&LoneThread) != DrainResult::Took(0) {}
        assert_eq!((ends(cid), ends(other)), (Some(failed), None));
    }
}

/// A member whose command is refused for a busy cell leaves that cell to the command that has it.
#[test]
fn a_command_whose_cell_another_one_asked_for_has_its_end() {
    let rig = Rig::new(8, 7, 8, 0);
    let queue = rig.shared();
    let token = queue.place(&LoneThread, command(5, false)).unwrap();
    let placed = Team::run(2, |team| {
        let tag = 5 + team.rank();
        let placed = rig.shared().place(team, command(tag, false));
        placed.map(CommandToken::words)
    });
    let (refused, other) = (&placed[0], &placed[1]);
    assert_eq!(*refused, Err(SubmitError::CellBusy));
    let other = CommandToken::from_words(*other.as_ref().expect("its cell is free"));
    assert_eq!(queue.recover(&rig.reset()), Some(2));
    let aborted = Some((CommandOutcome::Aborted(AbortReason::ControllerReset), 0));
    assert_eq!([queue.poll(&token), queue.poll(&other)], [aborted; 2]);
}

/// Dword 1 of a completion belongs to the command set: no result contains it.
#[test]
fn a_controller_that_sets_dword_1_changes_no_result() {
    let rig = Rig::new(8, 7, 8, 0);
    let queue = rig.shared();
    let token = queue.place(&LoneThread, command(0, true)).unwrap();
    queue.ring(&LoneThread);
    let mut hand = Hand::new(&rig);
    let cid = hand.fetch().unwrap().cid();
    hand.complete(cid, Status::SUCCESS, 7);
    while queue.drain(&LoneThread) != DrainResult::Took(0) {}
    let done = CommandOutcome::Completed(Status::SUCCESS);
    assert_eq!(queue.poll(&token), Some((done, 7)));
}

/// A thread that takes a slot waits for the count of its last command. So the slot must be free after the count, not
/// before: otherwise one thread in the middle of a drain makes all others wait.
#[test]
fn a_slot_is_not_free_before_its_command_was_counted() {
    for wants_dw0 in [false, true] {
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let rig = Rig::new(2, 1, 2, 0);
            let queue = rig.shared();
            let token = queue.place(&LoneThread, command(0, wants_dw0)).unwrap();
            queue.ring(&LoneThread);
            Hand::new(&rig).serve();
            let placed = RefCell::new(Vec::new());
            let group = Meets(|| {
                let result = rig.shared().place(&LoneThread, command(1, wants_dw0));
                let ended = queue.poll(&token).is_some();
                placed
                    .borrow_mut()
                    .push((ended, result.map(CommandToken::words).err()));
            });
            assert_eq!(queue.drain(&group), DrainResult::Took(1));
            assert!(queue.poll(&token).is_some());
            send.send(placed.into_inner()).unwrap();
        });
        let placed = receive.recv_timeout(Duration::from_secs(20));
        let placed = placed.expect("a command in the middle of a drain waits for its end");
        assert!(
            placed.len() > 3 && placed[0] == (false, Some(SubmitError::QueueFull)),
            "{placed:?}"
        );
        let full = Some(SubmitError::QueueFull);
        assert!(
            placed.iter().all(|(ended, error)| *ended || *error == full),
            "{placed:?}"
        );
    }
}
