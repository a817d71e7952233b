//! Deadlines in virtual time: the clock of the session is moved, the controller answers in its own time.

use super::*;
use crate::controller::{Controller, ControllerConfig};
use nvme_core::spec::{Lba, Nsid, Status, nvm};

const HOUR: Duration = Duration::from_secs(3600);
/// The simulator answers in less.
const ANSWERED: Duration = Duration::from_millis(100);

fn start(device: &str) -> Controller {
    let config = ControllerConfig {
        timeout: HOUR,
        ..ControllerConfig::default()
    };
    Controller::start(crate::open(device).unwrap(), &config).unwrap()
}

fn skip(controller: &Controller, time: Duration) {
    let skipped = &controller.session().skipped_ns;
    skipped.fetch_add(time.as_nanos() as u64, std::sync::atomic::Ordering::Relaxed);
}

fn send(controller: &Controller, queue: &mut DriverQueue, count: u64) {
    for lba in 0..count {
        let buffer = controller.alloc(4096).unwrap();
        let read = nvm::read(Nsid(1), Lba(lba), 1);
        queue.submit(read, Some(buffer)).unwrap();
    }
    queue.ring();
}

#[test]
fn an_answer_that_is_seen_after_the_deadline_is_no_success() {
    let controller = start("sim:mem?size=1MiB");
    let mut queue = controller.create_queue_pair(64).unwrap();
    let mut other = controller.create_queue_pair(64).unwrap();
    for most in [1, 3, 64] {
        send(&controller, &mut queue, 20);
        send(&controller, &mut other, 1);
        std::thread::sleep(ANSWERED);
        skip(&controller, HOUR);
        let mut ended = 0;
        while ended < 20 {
            let mut late = Vec::new();
            ended += queue.poll_batch(most, |done| late.push(done)).unwrap();
            for done in late {
                assert!(done.late && !done.is_success() && !done.may_retry());
                assert_eq!(done.outcome, CommandOutcome::Completed(Status::SUCCESS));
                assert!(done.buffer.is_some());
                let error = queue.error_of(&done, "Read").to_string();
                assert!(error.contains("answer came after the deadline"), "{error}");
            }
        }
        assert!(other.wait().unwrap().unwrap().late);
    }
    assert_eq!(queue.statistics().expired, 60);
    assert_eq!(other.statistics().expired, 3);
    assert_eq!(controller.resets(), 0, "all had ended");
    // Later commands complete in time again.
    send(&controller, &mut queue, 5);
    while let Some(done) = queue.wait().unwrap() {
        assert!(done.is_success());
    }
}

#[test]
fn the_first_poll_after_a_deadline_finds_the_command() {
    let controller = start("sim:mem?size=1MiB&fault=drop@op=read,nth=1");
    let mut queue = controller.create_queue_pair(64).unwrap();
    send(&controller, &mut queue, 1);
    std::thread::sleep(ANSWERED);
    assert!(queue.poll().unwrap().is_none());
    skip(&controller, HOUR);
    assert!(queue.poll().unwrap().is_none(), "it has no completion");
    assert_eq!(queue.statistics().expired, 1, "looked for in one poll");
    assert!(queue.wait().unwrap().unwrap().late);
}

#[test]
fn a_busy_queue_finds_a_command_that_was_lost() {
    let controller = start("sim:mem?size=1MiB&fault=drop@op=read,nth=1");
    let mut queue = controller.create_queue_pair(64).unwrap();
    send(&controller, &mut queue, 1);
    std::thread::sleep(ANSWERED);
    assert!(queue.poll().unwrap().is_none());
    skip(&controller, HOUR);
    // Every poll finds a completion from here on, so the queue must look for lost commands while it is busy.
    let mut late = 0;
    for _ in 0..3 {
        send(&controller, &mut queue, 10);
        std::thread::sleep(ANSWERED);
        for _ in 0..10 {
            late += u32::from(queue.poll().unwrap().unwrap().late);
        }
    }
    assert_eq!((late, queue.statistics().expired), (1, 1));
}

#[test]
fn what_recovery_takes_after_the_deadline_is_late() {
    let controller = start("sim:mem?size=1MiB&fault=drop@op=read,nth=1");
    let mut queue = controller.create_queue_pair(64).unwrap();
    let mut other = controller.create_queue_pair(64).unwrap();
    send(&controller, &mut queue, 1);
    std::thread::sleep(ANSWERED);
    send(&controller, &mut other, 4);
    std::thread::sleep(ANSWERED);
    // Recovery also takes the completions of the other queues that it resets: they count as late here, since the
    // deadline has passed.
    let drained = lock(&other.inner).drain(|| 2 * HOUR.as_nanos() as u64);
    drained.unwrap();
    for _ in 0..4 {
        assert!(other.poll().unwrap().unwrap().late);
    }
    skip(&controller, HOUR);
    assert!(queue.wait().unwrap().unwrap().late);
}

/// A reset holds the queue's lock: a submission that waited for the lock is refused if the reset found a change.
#[test]
fn a_submission_that_waited_for_a_reset_goes_by_what_it_found() {
    let controller = start("sim:mem?size=1MiB&block=4096");
    let info = controller.usable_namespace(Nsid(1)).unwrap();
    let mut queue = controller.create_queue_pair(16).unwrap();
    send(&controller, &mut queue, 1);
    assert!(queue.wait().unwrap().unwrap().is_success());
    let inner = Arc::clone(&queue.inner);
    let held = lock(&inner);
    let refused = std::thread::scope(|scope| {
        let submission = scope.spawn(|| {
            let buffer = controller.alloc(4096).unwrap();
            queue.submit(nvm::write(Nsid(1), Lba(0), 1), Some(buffer))
        });
        // Enough for the thread to wait for the lock; if it does not, the test tries less.
        std::thread::sleep(ANSWERED);
        let facts = &controller.session().facts;
        facts.observe(NamespaceInfo {
            block_bytes: 512,
            ..info
        });
        facts.set_checked(facts.alarm.count());
        drop(held);
        submission.join().unwrap().unwrap_err().error
    });
    assert!(matches!(refused, QueueRefusal::Changed(_)), "{refused}");
}

/// Bring-up lists the first 32 namespaces; kernels that use another one rely on the reset to read its properties.
#[test]
fn a_reset_reads_namespaces_beyond_those_that_bring_up_lists() {
    let controller = start("sim:mem?size=1MiB&block=4096&ns=40");
    let info = controller.usable_namespace(Nsid(40)).unwrap();
    let facts = &controller.session().facts;
    let before = NamespaceInfo {
        block_bytes: 512,
        ..info
    };
    facts.tell(before);
    let mut basis = QueueFacts::new(facts);
    basis.compare(facts, 0);
    basis.check(Nsid(40), nvm::opcode::WRITE).unwrap();
    controller.reset().unwrap();
    basis.compare(facts, 0);
    let changed = basis.check(Nsid(40), nvm::opcode::WRITE).unwrap_err();
    assert!(changed.to_string().contains("512 -> 4096"), "{changed}");
}

#[test]
fn a_queue_whose_submission_side_is_refused_leaves_nothing_behind() {
    let create_sq = nvme_core::spec::admin::opcode::CREATE_IO_SQ;
    let controller = start(&format!(
        "sim:mem?size=1MiB&fault=status:0x101@qid=0,op={create_sq},nth=1"
    ));
    let error = controller.create_queue_pair(8).err().unwrap().to_string();
    assert!(error.contains("Create I/O Submission Queue"), "{error}");
    let mut queue = controller.create_queue_pair(8).unwrap();
    send(&controller, &mut queue, 3);
    for _ in 0..3 {
        assert!(queue.wait().unwrap().unwrap().is_success());
    }
}
