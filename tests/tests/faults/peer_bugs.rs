//! Mistakes that published GPU queues make (tests/mutants names them) and that no other test would meet:
//! statuses cut short, a late completion for the next user of a slot, LBAs of 32 bits.

use nvme_core::group::LoneThread;
use nvme_core::spec::{Lba, Nsid, Sqe, Status, nvm};
use nvme_core::{CommandData, CommandOutcome, ControllerFault, DrainResult, MemberCommand};
use nvme_tests::hand::{Hand, Rig};

/// One status of each type, with odd and even codes, and every bit set in one of them.
const STATUSES: [u16; 7] = [0x001, 0x080, 0x002, 0x101, 0x281, 0x700, 0x7FFF];

fn command(tag: u32) -> MemberCommand<'static> {
    MemberCommand::new(Sqe::new(2, Nsid(1)), CommandData::None, tag)
}

#[test]
fn a_collective_queue_tells_each_command_its_own_status() {
    let rig = Rig::new(8, 7, 0, 0);
    let mut queue = rig.collective(LoneThread);
    for tag in 0..7 {
        queue.submit(true, |_| command(tag), u64::MAX).unwrap();
    }
    queue.ring();
    let mut hand = Hand::new(&rig);
    let mut fetched: Vec<Sqe> = std::iter::from_fn(|| hand.fetch()).collect();
    fetched.reverse();
    for (sqe, status) in fetched.iter().zip(STATUSES) {
        hand.complete(sqe.cid(), Status(status), 0);
    }
    let mut told = [Status(0); 7];
    let mut count = 0;
    while count < 7 {
        let reaped = queue.reap::<2>(|end| told[end.tag as usize] = end.status);
        count += reaped.unwrap();
    }
    told.reverse();
    assert_eq!(told, STATUSES.map(Status));
}

#[test]
fn a_shared_queue_tells_each_command_its_own_status() {
    let rig = Rig::new(8, 7, 7, 0);
    let queue = rig.shared();
    let place = |tag| queue.place(&LoneThread, command(tag)).unwrap();
    let tokens: Vec<_> = (0..7).map(place).collect();
    queue.ring(&LoneThread);
    let mut hand = Hand::new(&rig);
    let mut fetched: Vec<Sqe> = std::iter::from_fn(|| hand.fetch()).collect();
    fetched.reverse();
    for (sqe, status) in fetched.iter().zip(STATUSES) {
        hand.complete(sqe.cid(), Status(status), 0);
    }
    while queue.drain(&LoneThread) != DrainResult::Took(0) {}
    for (token, status) in tokens.iter().rev().zip(STATUSES) {
        let (outcome, _) = queue.poll(token).expect("it has ended");
        assert_eq!(outcome, CommandOutcome::Completed(Status(status)));
    }
}

#[test]
fn a_late_completion_does_not_end_the_next_command_of_its_slot() {
    let rig = Rig::new(4, 1, 1, 0);
    let queue = rig.shared();
    let mut hand = Hand::new(&rig);
    let first = queue.place(&LoneThread, command(0)).unwrap();
    queue.ring(&LoneThread);
    let late = hand.fetch().unwrap().cid();
    hand.complete(late, Status::SUCCESS, 0);
    assert_eq!(queue.drain(&LoneThread), DrainResult::Took(1));
    assert!(queue.poll(&first).is_some());
    let second = queue.place(&LoneThread, command(0)).unwrap();
    queue.ring(&LoneThread);
    hand.fetch().unwrap();
    hand.complete(late, Status::SUCCESS, 0);
    queue.drain(&LoneThread);
    assert_eq!(queue.poll(&second), None, "it has not ended");
    assert_eq!(queue.fault(), Some(ControllerFault::StaleCid(late)));
}

#[test]
fn commands_name_blocks_beyond_two_tebibytes() {
    let lba = Lba(0x0123_4567_89AB_CDEF);
    let builders = [nvm::read, nvm::write, nvm::compare, nvm::write_zeroes];
    for builder in builders {
        let sqe = builder(Nsid(1), lba, 1);
        assert_eq!((sqe.cdw10, sqe.cdw11), (0x89AB_CDEF, 0x0123_4567));
    }
}
