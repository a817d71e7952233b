use super::*;
use nvme_core::spec::nvm;

const NS: Nsid = Nsid(1);

fn info(block_bytes: u32, blocks: u64) -> NamespaceInfo {
    NamespaceInfo {
        block_bytes,
        blocks,
        ..NamespaceInfo::unknown(NS, Status::SUCCESS)
    }
}

fn refusal(basis: &QueueFacts, opcode: u8) -> String {
    let refusal = basis.refusal(NS.0, opcode);
    refusal.map_or(String::new(), |error| error.to_string())
}

#[test]
fn a_queue_goes_by_what_its_maker_was_told() {
    let facts = DeviceFacts::default();
    facts.tell(info(4096, 10));
    let mut old = QueueFacts::new(&facts);
    old.compare(&facts, 0);
    assert!(old.is_current(&facts.alarm));
    facts.observe(info(512, 80));
    assert!(!old.is_current(&facts.alarm), "the alarm was raised");
    old.compare(&facts, 1);
    let cause = refusal(&old, nvm::opcode::READ);
    assert_eq!(
        cause,
        "namespace 1 was formatted (4096 -> 512 bytes a block)"
    );
    assert!(
        old.refusal(2, nvm::opcode::READ).is_none(),
        "another namespace"
    );
    // A queue made before the change was reported relies on the old facts, too.
    let mut young = QueueFacts::new(&facts);
    young.compare(&facts, 1);
    assert!(!refusal(&young, nvm::opcode::WRITE).is_empty());
    facts.tell(info(512, 80));
    let mut new = QueueFacts::new(&facts);
    new.compare(&facts, 1);
    assert!(new.is_current(&facts.alarm));
    // A caller that names the facts on which it relies is refused if they are not the current ones.
    new.goes_by(info(4096, 10));
    new.compare(&facts, 1);
    assert!(!refusal(&new, nvm::opcode::READ).is_empty());
}

#[test]
fn each_change_has_its_words_and_more_blocks_are_none() {
    let before = info(512, 80);
    let cases = [
        (info(512, 90), ""),
        (
            NamespaceInfo {
                boundary_blocks: 8,
                ..before
            },
            "",
        ),
        (info(512, 79), "has become smaller (80 -> 79 blocks)"),
        (
            NamespaceInfo::unknown(NS, Status::SUCCESS),
            "was deleted or detached",
        ),
        (
            NamespaceInfo {
                metadata_bytes: 8,
                ..before
            },
            "was formatted (0 -> 8 bytes of metadata a block)",
        ),
        (
            NamespaceInfo {
                protection: 1,
                ..before
            },
            "was formatted with other protection information",
        ),
        (
            NamespaceInfo {
                nguid: [1; 16],
                ..before
            },
            "is another one than before (NGUID or EUI-64 differ)",
        ),
        (
            NamespaceInfo {
                write_protected: true,
                ..before
            },
            "has become write protected",
        ),
    ];
    for (now, words) in cases {
        let change = before
            .change(&now)
            .map_or(String::new(), |change| change.to_string());
        assert_eq!(change, words);
    }
    let gone = before.change(&NamespaceInfo::unknown(NS, Status::INVALID_NAMESPACE));
    assert!(gone.unwrap().to_string().contains("Invalid Namespace"));
    let protected = before.change(&cases[7].0).unwrap();
    let allowed = |opcode| protected.allows(opcode);
    assert!(allowed(nvm::opcode::READ) && allowed(nvm::opcode::FLUSH));
    assert!(!allowed(nvm::opcode::WRITE) && !allowed(nvm::opcode::DATASET_MANAGEMENT));
}

#[test]
fn another_controller_and_an_erased_one_are_refused_as_a_whole() {
    let facts = DeviceFacts::default();
    facts.tell(info(512, 80));
    let basis = QueueFacts::new(&facts);
    let says = |facts: &DeviceFacts| {
        let mut basis = basis.clone();
        basis.compare(facts, 0);
        refusal(&basis, nvm::opcode::READ)
    };
    facts.observe_controller(*b"OTHER               ", 0);
    assert!(says(&facts).starts_with("another controller answers: its serial number is OTHER"));
    facts.observe_controller([0; 20], 0);
    assert_eq!(says(&facts), "");
    facts.alarm.see(Status::UNRECOVERED_READ_ERROR);
    assert_eq!(facts.alarm.count(), 0);
    facts.alarm.see(Status::SANITIZE_IN_PROGRESS);
    assert!(says(&facts).contains("was sanitized"));
    facts.tell(info(512, 80));
    let mut again = QueueFacts::new(&facts);
    again.compare(&facts, 1);
    assert!(again.is_current(&facts.alarm), "opened again");
}

#[test]
fn an_error_of_the_look_stays_what_it_is_until_the_next_one() {
    let facts = DeviceFacts::default();
    facts.tell(info(512, 80));
    let mut basis = QueueFacts::new(&facts);
    for error in [
        Error::Interrupted,
        Error::Gone { cause: "x".into() },
        Error::device("x", "y"),
    ] {
        basis.could_not_look(&error);
        assert!(!basis.is_current(&facts.alarm), "it looks again");
        let said = basis.check(NS, nvm::opcode::READ).unwrap_err();
        assert_eq!((said.code(), said.remedy()), (error.code(), error.remedy()));
    }
    basis.compare(&facts, 0);
    basis.check(NS, nvm::opcode::READ).unwrap();
}

#[test]
fn what_this_process_erased_is_refused_though_its_facts_are_the_same() {
    let facts = DeviceFacts::default();
    let other = NamespaceInfo {
        nsid: Nsid(2),
        ..info(512, 80)
    };
    facts.tell(info(512, 80));
    facts.tell(other);
    let old = QueueFacts::new(&facts);
    let says = |nsid: u32| {
        let mut basis = old.clone();
        basis.compare(&facts, facts.alarm.count());
        let refusal = basis.refusal(nsid, nvm::opcode::READ);
        refusal.map_or(String::new(), |error| error.to_string())
    };
    facts.erase(NS);
    assert_eq!(facts.checked(), facts.alarm.count(), "nothing to be read");
    let erased = "namespace 1 was formatted or deleted: its data are gone";
    assert_eq!((&says(1)[..], &says(2)[..]), (erased, ""));
    facts.was_not_erased(NS);
    assert_eq!(says(1), "");
    facts.erase(NS);
    // A report of one change does not report the other.
    facts.tell(info(512, 80));
    facts.erase(Nsid::ALL);
    facts.tell(info(512, 80));
    let mut new = QueueFacts::new(&facts);
    new.compare(&facts, facts.alarm.count());
    assert!(new.check(NS, nvm::opcode::READ).is_ok());
    assert!(new.check(Nsid(2), nvm::opcode::READ).is_err());
    facts.alarm.erase();
    assert!(says(1).contains("was sanitized"));
}

/// A change that no event reported may be reported by the status of any command.
#[test]
fn each_status_and_notice_that_tells_of_a_change_raises_the_alarm() {
    let raised = |tell: &dyn Fn(&FactsAlarm)| {
        let alarm = FactsAlarm::default();
        tell(&alarm);
        alarm.count()
    };
    let telling = [
        Status::INVALID_NAMESPACE,
        Status::LBA_OUT_OF_RANGE,
        Status::NAMESPACE_WRITE_PROTECTED,
        Status::WRITE_TO_READ_ONLY,
        Status::FORMAT_IN_PROGRESS,
        Status::SANITIZE_IN_PROGRESS,
        Status::SANITIZE_FAILED,
    ];
    for status in telling {
        assert_eq!(raised(&|alarm| alarm.see(status)), 1, "{status}");
    }
    for status in [Status::SUCCESS, Status::COMPARE_FAILURE] {
        assert_eq!(raised(&|alarm| alarm.see(status)), 0, "{status}");
    }
    let (attribute, activation) = (
        notice_event::NAMESPACE_ATTRIBUTE,
        notice_event::FIRMWARE_ACTIVATION,
    );
    let sanitized = command_set_event::SANITIZE_COMPLETED;
    let events = [
        (event_type::NOTICE, attribute, lid::CHANGED_NAMESPACES, 1),
        (event_type::NOTICE, activation, lid::FIRMWARE, 1),
        (event_type::COMMAND_SET, sanitized, lid::SANITIZE, 1),
        (event_type::SMART, 1, lid::SMART, 0),
    ];
    for (kind, info, page, count) in events {
        let mut event = AsyncEvent(0);
        event.set_event_type(kind);
        event.set_info(info);
        event.set_log_page(page);
        assert_eq!(raised(&|alarm| alarm.hear(event)), count, "{event}");
    }
}

#[test]
fn the_largest_transfer_may_grow_and_may_not_fall() {
    let facts = DeviceFacts::default();
    facts.observe_controller([0; 20], 65_536);
    facts.tell(info(512, 80));
    let says = |bytes| {
        facts.observe_controller([0; 20], bytes);
        let mut basis = QueueFacts::new(&facts);
        basis.compare(&facts, 0);
        refusal(&basis, nvm::opcode::READ)
    };
    assert_eq!(says(65_536), "");
    assert_eq!(says(131_072), "");
    assert_eq!(
        says(32_768),
        "the controller's largest transfer (MDTS) fell from 65536 bytes to 32768 bytes"
    );
}

/// Every namespace on which a queue relies is compared, in any position of the list.
#[test]
fn a_change_of_any_namespace_is_found() {
    for changed in 1..=3 {
        let facts = DeviceFacts::default();
        let of = |nsid, blocks| NamespaceInfo {
            nsid: Nsid(nsid),
            ..info(512, blocks)
        };
        (1..=3).for_each(|nsid| facts.tell(of(nsid, 80)));
        let mut basis = QueueFacts::new(&facts);
        facts.observe(of(changed, 8));
        basis.compare(&facts, 1);
        for nsid in 1..=3 {
            let is_refused = basis.refusal(nsid, nvm::opcode::READ).is_some();
            assert_eq!(is_refused, nsid == changed, "{nsid} of {changed}");
        }
    }
}
