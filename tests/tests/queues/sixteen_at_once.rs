//! A collective whose members read sixteen completions at once: each of the sixteen is checked in the same way.

use nvme_core::group::{LoneThread, ThreadGroup};
use nvme_core::spec::{Cid, Nsid, Qid, Sqe, Status};
use nvme_core::{CommandData, ControllerFault, MemberCommand};
use nvme_tests::hand::{Hand, QID, Rig, deleted};
use nvme_tests::team::Team;
use std::sync::Mutex;

const FOREVER: u64 = 1_000_000_000;

/// Returns a command that carries its tag; every third wants dword 0.
fn command(tag: u32) -> MemberCommand<'static> {
    let mut sqe = Sqe::new(2, Nsid(1));
    sqe.cdw10 = tag;
    MemberCommand::new(sqe, CommandData::None, tag).wanting_dw0(tag.is_multiple_of(3))
}

/// Returns dword 0 of the completion of `tag`, and of the command's end.
fn dw0(tag: u32) -> [u32; 2] {
    let sent = tag + 1000;
    [sent, if tag.is_multiple_of(3) { sent } else { 0 }]
}

/// Returns the controller's side of `count` commands that one thread has submitted, fetched in order.
fn in_flight(rig: &Rig, count: u32) -> (Hand<'_>, Vec<Cid>) {
    let mut queue = rig.collective(LoneThread);
    for tag in 0..count {
        queue.submit(true, |_| command(tag), FOREVER).unwrap();
    }
    queue.ring();
    queue.suspend();
    let mut hand = Hand::new(rig);
    let fetched = std::iter::from_fn(|| hand.fetch()).map(|sqe| sqe.cid());
    let cids: Vec<Cid> = fetched.collect();
    assert_eq!(cids.len() as u32, count);
    (hand, cids)
}

#[test]
fn a_pass_takes_as_many_as_are_there() {
    for size in [1, 2] {
        for count in [1, 15, 16, 17, 31, 32, 33] {
            let rig = Rig::new(64, 63, 0, 0);
            let (mut hand, cids) = in_flight(&rig, count);
            for (tag, cid) in (0..).zip(&cids) {
                hand.complete(*cid, Status::SUCCESS, dw0(tag)[0]);
            }
            let ended = Mutex::new(Vec::new());
            Team::run(size, |team| {
                let mut queue = rig.collective(team.clone());
                assert_eq!(queue.group().size(), size as u32);
                assert_eq!(queue.in_flight(), count);
                let reap = |queue: &mut nvme_core::CollectiveQueue<'_, Team>| {
                    queue.reap::<16>(|end| {
                        assert_eq!((end.status, end.late), (Status::SUCCESS, false));
                        ended.lock().unwrap().push((end.tag, end.cid, end.dw0));
                    })
                };
                let most = 16 * size as u32;
                let mut left = count;
                while left > 0 {
                    let found = left.min(most);
                    assert_eq!(reap(&mut queue), Ok(found));
                    left -= found;
                }
                assert_eq!((reap(&mut queue), queue.in_flight()), (Ok(0), 0));
            });
            let mut ended = ended.into_inner().unwrap();
            ended.sort_by_key(|end| end.0);
            let expected = (0..).zip(cids).map(|(tag, cid)| (tag, cid, dw0(tag)[1]));
            assert_eq!(
                ended,
                expected.collect::<Vec<_>>(),
                "{count}, team of {size}"
            );
        }
    }
}

/// Any one of the sixteen is a protocol violation: the queue is refused, and the other fifteen commands have ended, not
/// this one.
#[test]
fn violations_is_found_in_every_place() {
    for place in 0..16 {
        for wrong_head in [false, true] {
            let rig = Rig::new(32, 31, 0, 0);
            let (mut hand, cids) = in_flight(&rig, 16);
            for (index, cid) in cids.iter().enumerate() {
                let mut cqe = hand.completion(*cid, Status::SUCCESS, 0);
                if index == place && wrong_head {
                    cqe.sqhd = 32;
                } else if index == place {
                    cqe.cid = 0x1E;
                }
                hand.post(cqe);
            }
            let fault = match wrong_head {
                true => ControllerFault::SqHead(32),
                false => ControllerFault::UnknownCid(Cid(0x1E)),
            };
            let mut queue = rig.collective(LoneThread);
            let mut told = Vec::new();
            assert_eq!(queue.reap::<16>(|end| told.push(end.tag)), Err(fault));
            let ends = |tag: &u32| *tag as usize != place;
            assert_eq!(told, (0..16).filter(ends).collect::<Vec<_>>());
            assert_eq!(queue.in_flight(), 1);
            assert_eq!(rig.state().fault(), Some(fault));
        }
    }
}

#[test]
fn a_proof_of_another_queue_recovers_nothing() {
    let rig = Rig::new(8, 7, 2, 0);
    let _ = in_flight(&rig, 3);
    let beside = Rig::of(Qid(QID.0 + 1), 8, 7, 0, 0);
    beside.state().init(rig.identity(), 0);
    let other = deleted(rig.identity(), beside.state().close());
    assert!(
        !rig.collective(LoneThread)
            .recover(&other, |tag| panic!("{tag}"))
    );
    assert_eq!(rig.shared().recover(&other), None);
    assert_eq!(rig.state().in_flight(), 3, "nothing has changed");
    let mut aborted = Vec::new();
    let own = deleted(rig.identity(), rig.state().close());
    assert!(
        rig.collective(LoneThread)
            .recover(&own, |tag| aborted.push(tag))
    );
    assert_eq!((aborted, rig.state().in_flight()), (vec![0, 1, 2], 0));
}
