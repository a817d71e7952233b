//! Lanes that submit and wait together, of which some have no command, or need no end.

use crate::lanes::{FOREVER, Lane, Recorder, command, done};
use nvme_core::group::ThreadGroup;
use nvme_core::spec::Status;
use nvme_core::{WaitError, WaitNeed};
use nvme_tests::hand::{Hand, Rig};
use nvme_tests::team::Team;
use std::sync::Mutex;

/// One of three lanes has a command that ends, one has a command that does not, and the first has none: it helps.
#[test]
fn lanes_wait_together_for_what_some_of_them_need() {
    let rig = Rig::new(8, 7, 4, 0);
    let hand = Mutex::new(Hand::new(&rig));
    let kept = Mutex::new(None);
    let ends = Team::run(3, |team| {
        let (rank, queue) = (team.rank(), rig.shared());
        let here = Lane::new(team, |_| {
            if team.leads() {
                let mut hand = hand.lock().unwrap();
                while let Some(sqe) = hand.fetch() {
                    match sqe.cdw10 {
                        1 => hand.complete(sqe.cid(), Status::SUCCESS, 1),
                        _ => *kept.lock().unwrap() = Some(sqe.cid()),
                    }
                }
            }
        });
        let (token, why) = queue.submit_if(&here, rank != 0, command(rank), FOREVER);
        assert_eq!(why, None);
        let need = [WaitNeed::Help, WaitNeed::End, WaitNeed::Look][rank as usize];
        let first = queue.wait_together(&here, &token, need, FOREVER);
        // Nothing is lost of a command whose lane only looked.
        team.sync();
        if team.leads() {
            let cid = kept.lock().unwrap().expect("fetched");
            hand.lock().unwrap().complete(cid, Status::SUCCESS, 2);
        }
        team.sync();
        let need = [WaitNeed::Help, WaitNeed::Help, WaitNeed::End][rank as usize];
        (first, queue.wait_together(&here, &token, need, FOREVER))
    });
    assert_eq!(ends[0], (None, None));
    assert_eq!(ends[1], (Some(Ok(done(1))), None));
    assert_eq!(ends[2], (None, Some(Ok(done(2)))));
}

/// A lane that only looks hears nothing of a deadline.
#[test]
fn a_deadline_is_that_of_lanes_that_need_an_end() {
    let rig = Rig::new(8, 7, 4, 0);
    let ends = Team::run(2, |team| {
        let log = Mutex::default();
        let here = Recorder {
            lane: Lane::new(team, |_| {}),
            log: &log,
        };
        let queue = rig.shared();
        let (token, _) = queue.submit_if(&here, true, command(team.rank()), 9);
        let need = [WaitNeed::Look, WaitNeed::End][team.rank() as usize];
        let end = queue.wait_together(&here, &token, need, 9);
        let log = log.into_inner().unwrap();
        (end, log.len())
    });
    assert_eq!(ends[0], (None, 1), "placed, and still in flight");
    assert_eq!(ends[1], (Some(Err(WaitError::TimedOut)), 2));
}

/// There is one slot, and two of four lanes want it: each gets it in turn, and the others submit nothing.
#[test]
fn lanes_that_want_to_submit_are_helped_by_those_that_do_not() {
    let rig = Rig::new(2, 1, 4, 0);
    let hand = Mutex::new(Hand::new(&rig));
    let served = Mutex::new(0);
    let ends = Team::run(4, |team| {
        let (rank, queue) = (team.rank(), rig.shared());
        let here = Lane::new(team, |_| {
            if team.leads() {
                *served.lock().unwrap() += hand.lock().unwrap().serve();
            }
        });
        let wants = rank % 2 == 1;
        let (token, why) = queue.submit_if(&here, wants, command(rank), FOREVER);
        assert_eq!(why, None);
        let need = if wants { WaitNeed::End } else { WaitNeed::Help };
        queue.wait_together(&here, &token, need, FOREVER)
    });
    let end = |cell| Some(Ok(done(cell)));
    assert_eq!(ends, [None, end(1), None, end(3)]);
    assert_eq!(served.into_inner().unwrap(), 2);
}
