//! A queue whose owner's kernel died: after recovery every command has ended, none has two ends, and a completion that
//! a kernel had taken without passing it on is lost.

use crate::shared_cells::Meets;
use nvme_core::group::LoneThread;
use nvme_core::spec::{Nsid, Sqe, Status};
use nvme_core::{CommandData, MemberCommand};
use nvme_tests::hand::{Hand, Rig};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};

const FOREVER: u64 = 1_000_000_000;
const SLOTS: u32 = 7;

fn command(tag: u32) -> MemberCommand<'static> {
    MemberCommand::new(Sqe::new(2, Nsid(1)), CommandData::None, tag)
}

#[test]
fn no_command_has_two_ends_wherever_a_kernel_died() {
    let (mut deaths, mut without_an_end) = (0, 0);
    for meeting in 0..16 {
        let rig = Rig::new(8, SLOTS, 0, 0u32.wrapping_sub(2));
        let mut queue = rig.collective(LoneThread);
        for tag in 0..3 {
            queue.submit(true, |_| command(tag), FOREVER).unwrap();
        }
        queue.ring();
        queue.suspend();
        let mut hand = Hand::new(&rig);
        for _ in 0..2 {
            let cid = hand.fetch().unwrap().cid();
            hand.complete(cid, Status::SUCCESS, 0);
        }
        let left = Cell::new(meeting);
        let group = Meets(|| match left.get() {
            0 => panic_any("the kernel died"),
            more => left.set(more - 1),
        });
        let done = RefCell::new(Vec::new());
        let died = catch_unwind(AssertUnwindSafe(|| {
            let mut queue = rig.collective(group);
            queue
                .reap::<4>(|end| done.borrow_mut().push(end.tag))
                .unwrap();
            queue.suspend();
        }));
        deaths += u32::from(died.is_err());
        let mut ended = Vec::new();
        let queue = rig.collective(LoneThread);
        assert!(queue.recover(&rig.reset(), |tag| ended.push(tag)));
        let done = done.into_inner();
        assert!(ended.contains(&2), "meeting {meeting}: it was in flight");
        for tag in [0, 1] {
            let ends = done.iter().chain(&ended).filter(|one| **one == tag).count();
            assert!(ends <= 1, "meeting {meeting}: tag {tag} has {ends} ends");
            assert!(ends == 1 || died.is_err(), "meeting {meeting}: tag {tag}");
            without_an_end += u32::from(ends == 0);
        }
        // No command is in flight, so every slot can be used.
        let mut queue = rig.collective(LoneThread);
        for tag in 0..SLOTS {
            let placed = queue.submit(true, |_| command(tag), FOREVER);
            assert!(placed.is_ok(), "meeting {meeting}: {placed:?}");
        }
    }
    assert!(deaths >= 6, "only {deaths} kernels died");
    assert!(
        without_an_end > 0,
        "CollectiveQueue::recover says that there are such"
    );
}
