//! The protocol auditor over the simulator: every fault that is visible on the bus breaks its rule and no other; the
//! remaining faults break none.

use nvme_auditor::{Auditor, Rule};
use nvme_core::CommandData;
use nvme_core::spec::{Cid, Cqe, Lba, Nsid, nvm};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Fault, FaultCondition, FaultRule, Finding, MemoryStore, ProtocolSide};
use nvme_tests::{Setup, with_pair};

const NS: Nsid = Nsid(1);

fn config() -> Config {
    let store = Box::new(MemoryStore::new(1 << 20).unwrap());
    Config {
        namespaces: vec![NamespaceConfig::new(512, store)],
        ..Config::empty()
    }
}

/// Returns the auditor's findings while twenty reads meet `fault` at the fifth, and the driver recovers.
fn found(fault: Fault) -> Vec<Finding> {
    let mut config = config();
    let (qid, nth) = (Some(1), Some(5));
    let when = FaultCondition {
        qid,
        nth,
        ..FaultCondition::default()
    };
    config.faults.rules.push(FaultRule { when, what: fault });
    let mut findings = Vec::new();
    with_pair(config, Setup::default(), |pair| {
        pair.bring_up().unwrap();
        for i in 0..20 {
            let area = pair.buffer(4096);
            let (iova, len) = (area.iova, 512);
            let data = CommandData::Contiguous { iova, len };
            let id = pair.submit(0, nvm::read(NS, Lba(i), 1), data).unwrap();
            let ended = pair.wait(0, id).is_ok_and(|end| end.is_some());
            pair.now_ns += 1_000;
            if !ended {
                // As after a deadline or a completion that fits no command.
                pair.sim.power_cut();
                pair.bring_up().unwrap();
            }
        }
        let (commands, completions) = pair.sim.audited();
        assert!(commands >= 20 && completions >= 19, "{commands} commands");
        findings = pair.sim.findings();
    });
    findings
}

#[test]
fn each_fault_that_a_wire_can_show_trips_its_rule_and_no_other() {
    let shown = [
        Fault::Duplicate,
        Fault::Echo(1),
        Fault::WrongCid(0xABC),
        Fault::FlippedCid(0x8000),
        Fault::LateData(1),
        Fault::WrongPhase,
        Fault::BadSqhd(11),
        Fault::TornCqe,
    ];
    for fault in shown {
        let findings = found(fault);
        assert_eq!(findings.len(), 1, "{fault:?}: {findings:?}");
        let Finding { rule, qid, .. } = findings[0];
        assert_eq!((Some(rule), qid), (fault.breaks(), 1), "{fault:?}");
        assert_eq!(rule.side(), ProtocolSide::Controller);
    }
}

#[test]
fn faults_that_break_no_rule_trip_none() {
    let silent = [
        Fault::Drop,
        Fault::Delay(1_000),
        Fault::Stubborn(1_000),
        Fault::Reorder,
        Fault::Status(nvme_core::spec::Status::WRITE_FAULT),
        Fault::Cfs,
        Fault::AllOnes,
    ];
    for fault in silent {
        assert_eq!(fault.breaks(), None);
        assert_eq!(found(fault), [], "{fault:?}");
    }
}

/// The fast path does not pass through the observer, which must see its accesses all the same.
#[test]
fn the_fast_path_is_watched_too() {
    with_pair(config(), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let before = pair.sim.audited();
        let area = pair.buffer(4096);
        for i in 0..40 {
            let (iova, len) = (area.iova, 512);
            let data = CommandData::Contiguous { iova, len };
            assert!(pair.run(0, nvm::read(NS, Lba(i), 1), data).is_success());
        }
        let after = pair.sim.audited();
        assert_eq!((after.0 - before.0, after.1 - before.1), (40, 40));
    });
}

#[test]
#[should_panic(expected = "BufferShared")]
fn a_buffer_that_is_lent_twice_fails_the_test() {
    with_pair(config(), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let area = pair.buffer(4096);
        for i in 0..2 {
            let (iova, len) = (area.iova, 512);
            let data = CommandData::Contiguous { iova, len };
            pair.submit(0, nvm::read(NS, Lba(i), 1), data).unwrap();
        }
        pair.io[0].ring();
        pair.sim.step(pair.now_ns);
    });
}

/// Returns an auditor of queue 1 with four entries in rings that it is not shown.
fn of_one_queue() -> Auditor {
    let mut auditor = Auditor::new();
    auditor.add_pair(1, (None, 4), (None, 4));
    auditor
}

/// Lets the controller fetch a command from entry `index`.
fn fetch(auditor: &mut Auditor, index: u32, cid: u16) {
    let sqe = nvm::read(NS, Lba(0), 1).with_cid(Cid(cid));
    auditor.fetched(1, index, &sqe, &|_| None);
}

/// Lets the controller post to entry `index` of the first pass.
fn post(auditor: &mut Auditor, index: u32, cid: u16, sqhd: u16) {
    let cqe = Cqe {
        dw0: 0,
        dw1: 0,
        sqhd,
        sqid: 1,
        cid,
        phase_status: 1,
    };
    auditor.posted(1, Some(index), &cqe, true, &|_| None);
}

fn rules(auditor: &Auditor) -> Vec<Rule> {
    auditor.findings().iter().map(|one| one.rule).collect()
}

/// The device reads a head doorbell repeatedly: a head that was too far becomes right when as many completions were
/// posted.
#[test]
fn a_head_that_was_too_far_counts_once_it_is_reached() {
    let mut auditor = of_one_queue();
    auditor.sq_doorbell(1, 3, &|_| None);
    (0..3).for_each(|index| fetch(&mut auditor, index, index as u16));
    post(&mut auditor, 0, 0, 3);
    auditor.cq_doorbell(1, 2);
    auditor.cq_doorbell(1, 2);
    assert_eq!(rules(&auditor), [Rule::HeadDoorbell]);
    post(&mut auditor, 1, 1, 3);
    auditor.cq_doorbell(1, 2);
    auditor.sq_doorbell(1, 1, &|_| None);
    fetch(&mut auditor, 3, 3);
    fetch(&mut auditor, 0, 0);
    post(&mut auditor, 2, 2, 1);
    post(&mut auditor, 3, 3, 1);
    assert_eq!(rules(&auditor), [Rule::HeadDoorbell], "there was room");
}

#[test]
fn of_commands_with_one_identifier_it_is_unknown_which_has_ended() {
    let mut auditor = of_one_queue();
    auditor.sq_doorbell(1, 2, &|_| None);
    fetch(&mut auditor, 0, 7);
    fetch(&mut auditor, 1, 7);
    // Two commands have this identifier, so the auditor must accept a completion of either.
    post(&mut auditor, 0, 7, 2);
    post(&mut auditor, 1, 7, 2);
    assert_eq!(rules(&auditor), [Rule::CidReused]);
    auditor.reset();
    auditor.add_pair(1, (None, 4), (None, 4));
    post(&mut auditor, 0, 7, 0);
    let again = [Rule::CidReused, Rule::UnknownCommand];
    assert_eq!(rules(&auditor), again, "a new queue, a new account");
}

#[test]
fn what_a_driver_does_wrong_leaves_room_for_the_controller() {
    let mut auditor = of_one_queue();
    for value in 0..1000 {
        auditor.sq_doorbell(1, 4 + value % 2, &|_| None);
    }
    post(&mut auditor, 0, 0, 0);
    assert_eq!((auditor.found(), auditor.findings().len()), (1001, 257));
    assert_eq!(rules(&auditor).last(), Some(&Rule::UnknownCommand));
}
