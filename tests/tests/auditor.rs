//! The protocol auditor over the simulator: every fault that a wire can show trips its rule, and only
//! that; the others trip none.
#![cfg(not(loom))]

use nvme_core::Data;
use nvme_core::spec::{Lba, Nsid, nvm};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Fault, FaultRule, Finding, Memory, Party, When};
use nvme_tests::{Setup, with_pair};

const NS: Nsid = Nsid(1);

fn config() -> Config {
    let store = Box::new(Memory::new(1 << 20).unwrap());
    Config {
        namespaces: vec![NamespaceConfig::new(512, store)],
        ..Config::empty()
    }
}

/// What the auditor finds while twenty reads meet `fault` at the fifth, and the recovery after it.
fn found(fault: Fault) -> Vec<Finding> {
    let mut config = config();
    let (qid, nth) = (Some(1), Some(5));
    let when = When {
        qid,
        nth,
        ..When::default()
    };
    config.faults.rules.push(FaultRule { when, what: fault });
    let mut findings = Vec::new();
    with_pair(config, Setup::default(), |pair| {
        pair.bring_up().unwrap();
        for i in 0..20 {
            let area = pair.buffer(4096);
            let (iova, len) = (area.iova, 512);
            let data = Data::Contiguous { iova, len };
            let id = pair.submit(0, nvm::read(NS, Lba(i), 1), data).unwrap();
            let ended = pair.wait(0, id).is_ok_and(|end| end.is_some());
            pair.now_ns += 1_000;
            if !ended {
                // As after a deadline or a completion that nobody understands.
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
        assert_eq!(rule.party(), Party::Controller);
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

/// The observer is no part of the fast path: it has to see what that path does all the same.
#[test]
fn the_fast_path_is_watched_too() {
    with_pair(config(), Setup::default(), |pair| {
        pair.bring_up().unwrap();
        let before = pair.sim.audited();
        let area = pair.buffer(4096);
        for i in 0..40 {
            let (iova, len) = (area.iova, 512);
            let data = Data::Contiguous { iova, len };
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
            let data = Data::Contiguous { iova, len };
            pair.submit(0, nvm::read(NS, Lba(i), 1), data).unwrap();
        }
        pair.io[0].ring();
        pair.sim.step(pair.now_ns);
    });
}
