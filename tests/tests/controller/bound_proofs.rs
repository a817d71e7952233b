//! Proofs that a controller has stopped using memory are bound: to a controller, to a creation of
//! which queue, and no longer than until the controller is enabled again.

use nvme_core::bringup::{self, BringupMachine, BringupStep};
use nvme_core::group::LoneThread;
use nvme_core::mem::DmaWords;
use nvme_core::recovery::{DeletionStep, QueueDeletion, ResetCause};
use nvme_core::shutdown::{self, ShutdownKind, ShutdownMachine};
use nvme_core::spec::{Iova, Lba, Nsid, Qid, Sqe, nvm};
use nvme_core::sync::AtomicU64;
use nvme_core::{
    AbortReason, BringupError, CommandData, CommandOutcome, CommandSlot, CommandToken,
    ControllerIdentity, MemberCommand, QueuePair, Quiesced, RegisterAccess, SubmitError,
};
use nvme_tests::hand::{Hand, QID, Rig, deleted};
use nvme_tests::properties::Properties;

type Pair<'a> = QueuePair<'a, u32, Vec<CommandSlot<u32>>>;

fn read() -> Sqe {
    nvm::read(Nsid(1), Lba(0), 1)
}

fn pair<'a>(identity: &ControllerIdentity, rig: &'a Rig, qid: Qid) -> Pair<'a> {
    let slots = (0..3).map(|_| CommandSlot::new()).collect();
    QueuePair::new(identity, qid, rig.memory(), slots)
}

/// Returns a command of a shared queue that the controller works on.
fn placed(rig: &Rig) -> CommandToken {
    let command = MemberCommand::new(read(), CommandData::None, 0);
    let token = rig.shared().place(&LoneThread, command).unwrap();
    rig.shared().ring(&LoneThread);
    token
}

/// Brings the controller behind `bar` up to the point where it is enabled.
fn enable(bar: &Properties, admin: &mut Pair<'_>) {
    let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    let page = DmaWords::new(&words, Iova(0x8000));
    let mut machine = BringupMachine::new(bar, bringup::BringupConfig::default(), page).unwrap();
    for _ in 0..10 {
        if bar.cc.get().en() && bar.csts.get().rdy() && admin.in_flight() > 0 {
            return;
        }
        match machine.step(bar, admin, 0).unwrap() {
            BringupStep::Disabled(proof) => {
                while admin.reclaim(&proof).is_some() {}
                assert!(admin.restart(&proof));
                machine.enable(proof);
            }
            BringupStep::Wait { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    panic!("not enabled");
}

fn shut_down(bar: &Properties) -> Quiesced<'_> {
    match ShutdownMachine::new(ShutdownKind::Normal, 1).step(bar, 0) {
        Ok(shutdown::ShutdownStep::Done(proof)) => proof,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_proof_of_another_controller_ends_nothing() {
    let (a, b) = (Rig::new(4, 3, 4, 0), Rig::new(4, 3, 4, 0));
    let token = placed(&a);
    let mut of_a = pair(a.identity(), &b, QID);
    of_a.submit(read(), CommandData::None, 7, u64::MAX).unwrap();
    assert_eq!(a.shared().recover(&b.reset()), None);
    assert!(!a.collective(LoneThread).recover(&b.reset(), |_| {}));
    assert!(of_a.reclaim(&b.reset()).is_none() && !of_a.restart(&b.reset()));
    assert_eq!(a.shared().poll(&token), None);
    let of_b = b.state();
    let other = deleted(b.identity(), of_b.close());
    assert_eq!(a.shared().recover(&other), None, "queue 1 of B");
    assert!(of_a.reclaim(&other).is_none());
    // A proof of the queue's controller is accepted.
    assert!(of_a.reclaim(&a.reset()).is_some());
    assert_eq!(a.shared().recover(&a.reset()), Some(1));
    let reset = CommandOutcome::Aborted(AbortReason::ControllerReset);
    assert_eq!(a.shared().poll(&token), Some((reset, 0)));
}

#[test]
fn a_proof_from_before_a_queue_was_made_ends_none_of_its_commands() {
    let rig = Rig::new(4, 3, 4, 0);
    let old = rig.reset();
    rig.state().init(rig.identity(), 0);
    let token = placed(&rig);
    let mut later = pair(rig.identity(), &rig, QID);
    later
        .submit(read(), CommandData::None, 7, u64::MAX)
        .unwrap();
    assert!(later.reclaim(&old).is_none() && !later.restart(&old));
    assert_eq!(rig.shared().recover(&old), None);
    assert!(!rig.collective(LoneThread).recover(&old, |_| {}));
    assert_eq!(rig.shared().poll(&token), None);
    assert!(later.reclaim(&rig.reset()).is_some());
}

/// The queue was not restarted: the proof accepts it as the same queue, but the controller runs again.
#[test]
fn a_proof_ends_nothing_once_the_controller_was_enabled() {
    let bar = Properties::new();
    let (admin_rig, rig) = (Rig::of(Qid::ADMIN, 4, 3, 0, 0), Rig::new(4, 3, 4, 0));
    let mut admin = pair(bar.identity(), &admin_rig, Qid::ADMIN);
    let mut io = pair(bar.identity(), &rig, QID);
    rig.state().init(bar.identity(), 0);
    enable(&bar, &mut admin);
    let old = shut_down(&bar);
    enable(&bar, &mut admin);
    io.submit(read(), CommandData::None, 7, u64::MAX).unwrap();
    let token = placed(&rig);
    assert!(io.reclaim(&old).is_none() && !io.restart(&old));
    assert_eq!(rig.shared().recover(&old), None);
    assert_eq!(rig.shared().poll(&token), None);
    let now = shut_down(&bar);
    assert!(io.reclaim(&now).is_some() && io.restart(&now));
    assert_eq!(rig.shared().recover(&now), Some(1));
}

#[test]
fn a_proof_of_a_deletion_ends_nothing_of_the_queue_that_is_created_after_it() {
    let rig = Rig::new(4, 3, 4, 0);
    let mut io = pair(rig.identity(), &rig, QID);
    let old = deleted(rig.identity(), io.close());
    assert!(io.restart(&old));
    io.submit(read(), CommandData::None, 7, u64::MAX).unwrap();
    assert!(io.reclaim(&old).is_none() && !io.restart(&old));
    let mut another = pair(rig.identity(), &rig, QID);
    another
        .submit(read(), CommandData::None, 8, u64::MAX)
        .unwrap();
    assert!(another.reclaim(&old).is_none());

    let rig = Rig::new(4, 3, 4, 0);
    let old = deleted(rig.identity(), rig.state().close());
    assert_eq!(rig.shared().recover(&old), Some(0));
    let token = placed(&rig);
    assert_eq!(rig.shared().recover(&old), None);
    assert!(!rig.collective(LoneThread).recover(&old, |_| {}));
    assert_eq!(rig.shared().poll(&token), None);
    let now = deleted(rig.identity(), rig.state().close());
    assert_eq!(rig.shared().recover(&now), Some(1));
    let gone = CommandOutcome::Aborted(AbortReason::QueueDeleted);
    assert_eq!(rig.shared().poll(&token), Some((gone, 0)));
}

/// Between the start of a deletion and the restart no command is taken that the proof would end.
#[test]
fn a_closed_queue_takes_no_commands() {
    let rig = Rig::new(4, 3, 4, 0);
    let mut io = pair(rig.identity(), &rig, QID);
    let closed = io.close();
    let rejected = io
        .submit(read(), CommandData::None, 7, u64::MAX)
        .unwrap_err();
    assert_eq!((rejected.error, rejected.buffer), (SubmitError::Closed, 7));
    assert_eq!((io.depth(), io.in_flight()), (3, 0));
    assert!(io.restart(&deleted(rig.identity(), closed)));
    assert!(io.submit(read(), CommandData::None, 7, u64::MAX).is_ok());

    let command = MemberCommand::new(read(), CommandData::None, 0);
    let closed = rig.state().close();
    assert_eq!(
        rig.shared().place(&LoneThread, command).unwrap_err(),
        SubmitError::Refused
    );
    let mut owned = rig.collective(LoneThread);
    assert_eq!(
        owned.submit(true, |_| command, 0),
        Err(SubmitError::Refused)
    );
    owned.suspend();
    assert_eq!(
        rig.state().fault(),
        None,
        "the controller did nothing wrong"
    );
    assert_eq!(
        rig.shared().recover(&deleted(rig.identity(), closed)),
        Some(0)
    );
    assert!(rig.shared().place(&LoneThread, command).is_ok());
}

/// The queue's rings did not move: without a restart the command would never reach the controller.
#[test]
fn a_reclaimed_queue_takes_no_commands_until_it_is_restarted() {
    let rig = Rig::new(2, 1, 0, 0);
    let mut io = pair(rig.identity(), &rig, QID);
    io.submit(read(), CommandData::None, 1, u64::MAX).unwrap();
    io.ring();
    let proof = rig.reset();
    assert_eq!(io.reclaim(&proof).unwrap().buffer, 1);
    let rejected = io
        .submit(read(), CommandData::None, 2, u64::MAX)
        .unwrap_err();
    assert_eq!((rejected.error, rejected.buffer), (SubmitError::Closed, 2));
    assert!(io.restart(&proof));
    let cid = io.submit(read(), CommandData::None, 2, u64::MAX).unwrap();
    io.ring();
    assert_eq!(Hand::new(&rig).serve(), 1);
    assert_eq!(io.poll().unwrap().unwrap().cid, cid);
}

/// Delete I/O Submission Queue has the opcode of Flush, which any I/O queue completes with success.
#[test]
fn only_the_admin_queue_of_the_same_controller_deletes_a_queue() {
    let (rig, admin_rig) = (Rig::new(4, 3, 0, 0), Rig::of(Qid::ADMIN, 4, 3, 0, 0));
    let mut admins = [
        pair(rig.identity(), &admin_rig, Qid(2)),
        pair(admin_rig.identity(), &admin_rig, Qid::ADMIN),
    ];
    for admin in &mut admins {
        let mut deletion = QueueDeletion::new(rig.state().close(), 1);
        for _ in 0..2 {
            let step = deletion.step(admin, 0, |_| {});
            assert!(
                matches!(step, DeletionStep::ResetNeeded(ResetCause::OtherAdmin)),
                "{step:?}"
            );
        }
        assert_eq!(admin.in_flight(), 0);
    }
}

/// Registers, the admin queue and the proof must all belong to the machine's controller.
#[test]
fn a_machine_works_with_one_controller() {
    let (bar, other) = (Properties::new(), Properties::new());
    let rig = Rig::of(Qid::ADMIN, 4, 3, 0, 0);
    let mut admin = pair(bar.identity(), &rig, Qid::ADMIN);
    let mut admin_of_other = pair(other.identity(), &rig, Qid::ADMIN);
    let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    let page = DmaWords::new(&words, Iova(0x8000));
    let machine = || BringupMachine::new(&bar, bringup::BringupConfig::default(), page).unwrap();
    let refused = Err(BringupError::OtherController);

    let step = machine().step(&other, &mut admin, 0).map(|_| ());
    assert_eq!(step, refused);
    let step = machine().step(&bar, &mut admin_of_other, 0).map(|_| ());
    assert_eq!(step, refused);
    assert!(bar.written().is_empty() && other.written().is_empty());

    let mut first = machine();
    assert!(matches!(
        first.step(&bar, &mut admin, 0),
        Ok(BringupStep::Disabled(_))
    ));
    first.enable(shut_down(&other));
    assert_eq!(first.step(&bar, &mut admin, 0).map(|_| ()), refused);

    // A proof that another machine has used up meanwhile.
    let mut second = machine();
    let Ok(BringupStep::Disabled(proof)) = second.step(&bar, &mut admin, 0) else {
        panic!("it is disabled")
    };
    enable(&bar, &mut admin);
    second.enable(proof);
    assert_eq!(second.step(&bar, &mut admin, 0).map(|_| ()), refused);

    bar.follows.set(false);
    bar.set_csts(|csts| csts.set_rdy(true));
    bar.set_cc(|cc| cc.set_en(true));
    let mut shutdown = ShutdownMachine::new(ShutdownKind::Normal, 1);
    assert!(matches!(
        shutdown.step(&bar, 0),
        Ok(shutdown::ShutdownStep::Wait { .. })
    ));
    assert_eq!(shutdown.step(&other, 0).map(|_| ()), refused);
}
