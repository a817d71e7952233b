//! Bring-up with properties that the test controls: every state in which a controller may be found, and each wait.

use nvme_core::bringup::{BringupConfig, BringupMachine, BringupStep, QueueCapabilities};
use nvme_core::mem::{CqRing, DmaWords, DoorbellRegister, SqRing};
use nvme_core::spec::admin::{self, opcode};
use nvme_core::spec::register::{Aqa, Cap, Cc, offset};
use nvme_core::spec::{Cid, Iova, PageSize, Status};
use nvme_core::sync::{AtomicU32, AtomicU64};
use nvme_core::{
    BringupError, CommandData, CommandSlot, ControllerFault, ListMemory, QueueMemory, QueuePair,
    RegisterAccess,
};
use nvme_tests::hand::{Hand, QID, Rig};
use nvme_tests::properties::Properties;

const MS: u64 = 1_000_000;
/// An arbitrary time at which the clock stands when bring-up begins.
const START: u64 = 7_000 * MS;
/// CAP.TO of 500 ms or the configured least of 750 ms, whichever is more.
const READY_MS: u64 = 750;

type Admin<'a> = QueuePair<'a, u32, Vec<CommandSlot<u32>>>;

fn config() -> BringupConfig<'static> {
    BringupConfig {
        min_ready_timeout_ms: READY_MS as u32,
        ..BringupConfig::default()
    }
}

/// Runs `test` on a machine for the controller behind `bar`.
fn with_machine(bar: &Properties, test: impl FnOnce(&mut BringupMachine<'_>, &mut Admin<'_>)) {
    let rig = Rig::new(4, 3, 0, 0);
    let mut admin = QueuePair::new(
        bar.identity(),
        QID,
        rig.memory(),
        (0..3).map(|_| CommandSlot::new()).collect(),
    );
    let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    let page = DmaWords::new(&words, Iova(0x8000));
    test(
        &mut BringupMachine::new(bar, config(), page).unwrap(),
        &mut admin,
    );
}

/// Returns the time at which the machine wants to look again: soon, and not in the past.
fn until(step: Result<BringupStep, BringupError>, now_ns: u64) -> u64 {
    let Ok(BringupStep::Wait { until_ns }) = step else {
        panic!("{step:?}")
    };
    assert!(
        until_ns > now_ns && until_ns <= now_ns + MS,
        "{until_ns} at {now_ns}"
    );
    until_ns
}

fn is_disabled(step: &Result<BringupStep, BringupError>) -> bool {
    matches!(step, Ok(BringupStep::Disabled(_)))
}

/// NVMe Base 2.0c, "Offset 0h: CAP" and "Offset 68h: CRTO".
#[test]
fn capabilities_are_what_the_registers_say() {
    let bar = |change: fn(&mut Cap), crto| {
        let bar = Properties::new().with_cap(change);
        bar.crto.set(crto);
        QueueCapabilities::read(&bar)
    };
    let plain = QueueCapabilities {
        max_entries: 64,
        dstrd: 0,
        page: PageSize::KIB4,
        mdts_unit: PageSize::KIB4,
        ready_timeout_ms: 500,
        css: 0,
    };
    let page = |mps| PageSize::from_mps(mps).unwrap();
    assert_eq!(bar(|_| {}, 0), Ok(plain));
    // MQES has 1h as its least value; no queue has one entry.
    let least = QueueCapabilities {
        max_entries: 2,
        ..plain
    };
    for entries in [1, 2] {
        let cap = Properties::new().with_cap(|cap| cap.set_mqes(entries));
        assert_eq!(
            QueueCapabilities::read(&cap),
            Ok(least),
            "{entries} entries"
        );
    }
    let wide = |cap: &mut Cap| {
        cap.set_mqes(65_536);
        cap.set_dstrd(3);
        cap.set_to(255);
    };
    let expected = QueueCapabilities {
        max_entries: 65_536,
        dstrd: 3,
        ready_timeout_ms: 127_500,
        ..plain
    };
    assert_eq!(bar(wide, 0), Ok(expected));

    // Command sets: bit 6 asks for CC.CSS = 110b, bit 0 alone for 000b.
    for (css, selected) in [(1 << 6, 0b110), (1 << 6 | 1, 0b110), (1, 0), (0b11, 0)] {
        let bar = Properties::new().with_cap(|cap| cap.set_css(css));
        assert_eq!(
            QueueCapabilities::read(&bar).unwrap().css,
            selected,
            "{css:#x}"
        );
    }
    for css in [0, 1 << 7, 1 << 1, 1 << 5, 0b1011_1110] {
        let bar = Properties::new().with_cap(|cap| cap.set_css(css));
        let error = QueueCapabilities::read(&bar).unwrap_err();
        assert_eq!(error, BringupError::NoNvmCommandSet(css), "{css:#x}");
    }

    for (mpsmin, mpsmax, found) in [
        (0, 15, Some(0)),
        (1, 1, Some(1)),
        (4, 4, Some(4)),
        (4, 9, Some(4)),
        (5, 9, None),
        (2, 1, None),
        (15, 15, None),
    ] {
        let bar = Properties::new().with_cap(|cap| {
            cap.set_mpsmin(mpsmin);
            cap.set_mpsmax(mpsmax);
        });
        let expected = match found {
            Some(mps) => Ok((page(mps), page(mps))),
            None => Err(BringupError::PageSize { mpsmin, mpsmax }),
        };
        let got = QueueCapabilities::read(&bar).map(|found| (found.page, found.mdts_unit));
        assert_eq!(got, expected);
    }

    // CRTO counts only if CAP.CRMS announces it, and only if it is not 0.
    for (crms, crto, ms) in [(0, 7, 500), (1, 7, 3_500), (1, 9 << 16, 500), (3, 2, 1_000)] {
        let bar = Properties::new().with_cap(|cap| cap.set_crms(crms));
        bar.crto.set(crto);
        assert_eq!(QueueCapabilities::read(&bar).unwrap().ready_timeout_ms, ms);
    }
    let gone = Properties::new().with_cap(|cap| cap.0 = u64::MAX);
    assert_eq!(
        QueueCapabilities::read(&gone),
        Err(BringupError::DeviceGone)
    );
}

#[test]
fn a_page_for_identify_data_is_whole_and_aligned() {
    let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    let bar = Properties::new();
    let try_with = |words, at| {
        let made = BringupMachine::new(&bar, config(), DmaWords::new(words, Iova(at)));
        made.map(|_| ())
    };
    assert_eq!(try_with(&words[..], 0x8000), Ok(()));
    assert_eq!(try_with(&words[1..], 0x8000), Err(BringupError::AdminRing));
    assert_eq!(try_with(&words[..], 0x8008), Err(BringupError::AdminRing));
}

#[test]
fn a_disabled_controller_is_left_alone_until_it_is_enabled() {
    let bar = Properties::new();
    with_machine(&bar, |machine, admin| {
        let Ok(BringupStep::Disabled(proof)) = machine.step(&bar, admin, START) else {
            panic!("it is disabled")
        };
        assert_eq!(bar.written(), []);
        // No step follows before the queues are restarted, however long that takes.
        until(machine.step(&bar, admin, START), START);
        machine.host_memory(None);
        until(machine.step(&bar, admin, START + MS), START + MS);
        assert_eq!(bar.written(), []);
        machine.enable(proof);
        until(machine.step(&bar, admin, START), START);
        assert!(bar.cc.get().en());
    });
}

/// NVMe Base 2.0c, "Controller Level Reset": CC.EN goes from 1 to 0 once CSTS.RDY is 1.
#[test]
fn an_enabled_controller_is_disabled_with_its_shutdown_request_and_nothing_else() {
    let bar = Properties::new();
    let mut before = Cc(0);
    before.set_en(true);
    before.set_shn(1);
    before.set_css(6);
    before.set_mps(3);
    before.set_iosqes(6);
    before.set_iocqes(4);
    bar.cc.set(before);
    bar.set_csts(|csts| csts.set_rdy(true));
    with_machine(&bar, |machine, admin| {
        assert!(is_disabled(&machine.step(&bar, admin, START)));
        let mut after = before;
        after.set_en(false);
        after.set_shn(0);
        assert_eq!(bar.written(), [(offset::CC, u64::from(after.0))]);
    });
}

/// A controller whose RDY has not risen yet: EN stays until it has, the controller has failed, or
/// the time is over.
#[test]
fn a_controller_on_its_way_up_is_disabled_when_it_has_arrived() {
    let deadline = START + READY_MS * MS;
    for case in 0..4 {
        let bar = Properties::new();
        bar.set_cc(|cc| cc.set_en(true));
        if case == 3 {
            bar.set_csts(|csts| csts.set_cfs(true));
        }
        with_machine(&bar, |machine, admin| {
            let mut now = START;
            if case != 3 {
                until(machine.step(&bar, admin, START), START);
                now = deadline - 1;
                until(machine.step(&bar, admin, now), now);
                assert_eq!(bar.written(), [], "EN is cleared too early");
            }
            match case {
                0 => bar.set_csts(|csts| csts.set_rdy(true)),
                1 => bar.set_csts(|csts| csts.set_cfs(true)),
                _ => now = deadline,
            }
            assert!(is_disabled(&machine.step(&bar, admin, now)), "case {case}");
            assert_eq!(bar.written(), [(offset::CC, 0)], "case {case}");
        });
    }
}

#[test]
fn each_wait_for_ready_ends_at_its_deadline() {
    // RDY does not fall: in a controller that is enabled, and in one that is on its way up.
    for rising in [false, true] {
        let bar = Properties::new();
        bar.follows.set(false);
        bar.set_cc(|cc| cc.set_en(true));
        bar.set_csts(|csts| csts.set_rdy(!rising));
        with_machine(&bar, |machine, admin| {
            let mut now = START;
            if rising {
                until(machine.step(&bar, admin, now), now);
                now += 300 * MS;
                bar.set_csts(|csts| csts.set_rdy(true));
            }
            until(machine.step(&bar, admin, now), now);
            let deadline = now + READY_MS * MS;
            let last = until(machine.step(&bar, admin, deadline - 5), deadline - 5);
            assert_eq!(last, deadline, "a caller that sleeps is told in time");
            let late = machine.step(&bar, admin, deadline).unwrap_err();
            let ms = READY_MS as u32;
            assert_eq!(late, BringupError::ReadyTimeout { ready: false, ms });
            // The machine stays failed, whatever the controller does now.
            bar.set_csts(|csts| csts.set_rdy(false));
            assert_eq!(machine.step(&bar, admin, deadline).unwrap_err(), late);
        });
    }
    // RDY that does not rise.
    let bar = Properties::new();
    bar.follows.set(false);
    with_machine(&bar, |machine, admin| {
        let Ok(BringupStep::Disabled(proof)) = machine.step(&bar, admin, 0) else {
            panic!("it is disabled")
        };
        machine.enable(proof);
        until(machine.step(&bar, admin, START), START);
        let deadline = START + READY_MS * MS;
        let last = until(machine.step(&bar, admin, deadline - 5), deadline - 5);
        assert_eq!(last, deadline);
        let ms = READY_MS as u32;
        let error = machine.step(&bar, admin, deadline).unwrap_err();
        assert_eq!(error, BringupError::ReadyTimeout { ready: true, ms });
    });
}

#[test]
fn a_fatal_status_or_an_empty_bus_ends_bring_up_in_each_phase() {
    for ready in [false, true] {
        for gone in [false, true] {
            let bar = Properties::new();
            bar.follows.set(false);
            with_machine(&bar, |machine, admin| {
                let Ok(BringupStep::Disabled(proof)) = machine.step(&bar, admin, 0) else {
                    panic!("it is disabled")
                };
                machine.enable(proof);
                until(machine.step(&bar, admin, START), START);
                if ready {
                    bar.set_csts(|csts| csts.set_rdy(true));
                    until(machine.step(&bar, admin, START), START);
                }
                bar.set_csts(|csts| csts.set_cfs(true));
                let mut expected = BringupError::FatalStatus;
                if gone {
                    bar.set_csts(|csts| csts.0 = u32::MAX);
                    expected = BringupError::DeviceGone;
                }
                let error = machine.step(&bar, admin, START).unwrap_err();
                assert_eq!(error, expected, "ready {ready}");
            });
        }
    }
}

/// Enables a controller whose admin rings have these sizes and addresses.
fn enable_with(bar: &Properties, sq: (u32, u64), cq: (u32, u64)) -> Result<(), BringupError> {
    let (sq_cells, cq_cells) = (
        (0..sq.0).map(|_| Default::default()).collect::<Vec<_>>(),
        (0..cq.0).map(|_| Default::default()).collect::<Vec<_>>(),
    );
    let bells: [AtomicU32; 2] = Default::default();
    let memory = QueueMemory {
        sq: SqRing::new(&sq_cells, Iova(sq.1)),
        cq: CqRing::new(&cq_cells, Iova(cq.1)),
        sq_doorbell: DoorbellRegister::new(&bells[0]),
        cq_doorbell: DoorbellRegister::new(&bells[1]),
        lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
    };
    let mut admin: Admin<'_> = QueuePair::new(
        bar.identity(),
        QID,
        memory,
        (0..2).map(|_| CommandSlot::new()).collect(),
    );
    let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    let page = DmaWords::new(&words, Iova(0x20_0000));
    let mut machine = BringupMachine::new(bar, config(), page)?;
    let BringupStep::Disabled(proof) = machine.step(bar, &mut admin, START)? else {
        panic!("it is disabled")
    };
    machine.enable(proof);
    machine.step(bar, &mut admin, START).map(|_| ())
}

/// NVMe Base 2.0c, 3.5.1: AQA, ASQ and ACQ, then CC, whose fields are valid before EN is set.
#[test]
fn the_admin_queue_is_programmed_before_the_controller_is_enabled() {
    let bar = Properties::new().with_cap(|cap| {
        cap.set_css(1 << 6 | 1);
        cap.set_mpsmin(1);
        cap.set_mpsmax(4);
    });
    enable_with(&bar, (32, 0x12_3456_2000), (4096, 0x98_7654_4000)).unwrap();
    let mut aqa = Aqa(0);
    aqa.set_asqs_z(31);
    aqa.set_acqs_z(4095);
    let mut cc = Cc(0);
    cc.set_css(0b110);
    cc.set_mps(1);
    cc.set_iosqes(6);
    cc.set_iocqes(4);
    let mut enabled = cc;
    enabled.set_en(true);
    let expected = [
        (offset::AQA, u64::from(aqa.0)),
        (offset::ASQ, 0x12_3456_2000),
        (offset::ACQ, 0x98_7654_4000),
        (offset::CC, u64::from(cc.0)),
        (offset::CC, u64::from(enabled.0)),
    ];
    assert_eq!(bar.written(), expected);
}

/// A controller that returns with other pages or doorbells while it was disabled would look for rings, lists and
/// doorbells at wrong addresses, so it is not enabled. Its other properties are read again.
#[test]
fn a_controller_that_comes_back_with_another_shape_is_not_enabled() {
    let page = |mps| PageSize::from_mps(mps).unwrap();
    let refused = |page, dstrd| Err(BringupError::Changed { page, dstrd });
    let larger: fn(&mut Cap) = |cap| {
        cap.set_mpsmin(1);
        cap.set_mpsmax(2);
    };
    let wider: fn(&mut Cap) = |cap| cap.set_dstrd(2);
    let slower: fn(&mut Cap) = |cap| {
        cap.set_to(9);
        cap.set_mqes(2);
    };
    let try_with =
        |before: fn(&mut Cap), made_for: Option<QueueCapabilities>, after: fn(&mut Cap)| {
            let bar = Properties::new().with_cap(before);
            let config = BringupConfig {
                made_for,
                ..config()
            };
            let rig = Rig::new(4, 3, 0, 0);
            let mut admin = Admin::new(
                bar.identity(),
                QID,
                rig.memory(),
                (0..3).map(|_| CommandSlot::new()).collect(),
            );
            let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
            let mut machine =
                BringupMachine::new(&bar, config, DmaWords::new(&words, Iova(0x8000))).unwrap();
            let Ok(BringupStep::Disabled(proof)) = machine.step(&bar, &mut admin, START) else {
                panic!("it is disabled")
            };
            bar.set_cap(after);
            machine.enable(proof);
            bar.written();
            let result = machine.step(&bar, &mut admin, START).map(drop);
            assert_eq!(bar.written().is_empty(), result.is_err());
            assert_eq!(machine.step(&bar, &mut admin, START).map(drop), result);
            result.map(|()| machine.info().capabilities)
        };
    let same: fn(&mut Cap) = |_| {};
    let first = QueueCapabilities::read(&Properties::new()).unwrap();
    let (kib4, kib8) = (page(0), page(1));
    assert_eq!(try_with(same, None, larger), refused((kib4, kib8), (0, 0)));
    assert_eq!(try_with(same, None, wider), refused((kib4, kib4), (0, 2)));
    // The queues were made for the first controller, and that decides, not what the machine found when it was made.
    let made_for = Some(first);
    assert_eq!(
        try_with(larger, made_for, same),
        refused((kib4, kib8), (0, 0))
    );
    assert_eq!(
        try_with(wider, made_for, same),
        refused((kib4, kib4), (0, 2))
    );
    let back: fn(&mut Cap) = |cap| {
        cap.set_mpsmin(0);
        cap.set_dstrd(0);
    };
    assert_eq!(try_with(wider, made_for, back), Ok(first));
    assert_eq!(try_with(larger, made_for, back), Ok(first));
    for made_for in [None, made_for] {
        let now = QueueCapabilities {
            max_entries: 2,
            ready_timeout_ms: 4500,
            ..first
        };
        assert_eq!(try_with(same, made_for, slower), Ok(now));
    }
    let gone = try_with(same, None, |cap| *cap = Cap(u64::MAX));
    assert_eq!(gone, Err(BringupError::DeviceGone));
}

#[test]
fn admin_rings_that_the_controller_cannot_take_are_refused() {
    let bad = Err(BringupError::AdminRing);
    for (sq, cq, expected) in [
        ((2, 0x1000), (2, 0x2000), Ok(())),
        ((4096, 0x1000), (4096, 0x20_0000), Ok(())),
        ((4097, 0x1000), (2, 0x20_0000), bad),
        ((2, 0x1000), (4097, 0x20_0000), bad),
        ((2, 0x1040), (2, 0x2000), bad),
        ((2, 0x1000), (2, 0x2010), bad),
    ] {
        let bar = Properties::new();
        assert_eq!(enable_with(&bar, sq, cq), expected, "{sq:?} {cq:?}");
        assert_eq!(bar.cc.get().en(), expected.is_ok());
    }
}

/// The admin queue also has commands of another caller: their ends are not answers, and their deadlines do not count.
#[test]
fn only_its_own_commands_matter_to_bring_up() {
    let (rig, bar) = (Rig::new(8, 7, 0, 0), Properties::new());
    let mut admin: Admin<'_> = QueuePair::new(
        bar.identity(),
        QID,
        rig.memory(),
        (0..7).map(|_| CommandSlot::new()).collect(),
    );
    let mut hand = Hand::new(&rig);
    let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    let config = BringupConfig {
        command_timeout_ns: 40 * MS,
        ..BringupConfig::default()
    };
    let mut machine =
        BringupMachine::new(&bar, config, DmaWords::new(&words, Iova(0x8000))).unwrap();
    let Ok(BringupStep::Disabled(proof)) = machine.step(&bar, &mut admin, START) else {
        panic!("it is disabled")
    };
    machine.enable(proof);
    assert!(matches!(
        machine.step(&bar, &mut admin, START),
        Ok(BringupStep::Wait { .. })
    ));
    let events: Vec<_> = (0..2u64)
        .map(|n| {
            let deadline = START + (10 + n) * MS;
            let sqe = admin::async_event_request();
            admin.submit(sqe, CommandData::None, 7, deadline).unwrap()
        })
        .collect();
    admin.ring();
    let own = hand.fetch().unwrap();
    assert_eq!(own.opcode(), opcode::IDENTIFY);
    hand.fetch().unwrap();
    hand.fetch().unwrap();
    hand.complete(events[0], Status::INTERNAL_ERROR, 0);
    let waits = |step| matches!(step, Ok(BringupStep::Wait { .. }));
    assert!(waits(machine.step(&bar, &mut admin, START + MS)));
    assert!(hand.fetch().is_none(), "it waits for its own answer");
    // The other one expires; the machine's own command has time until its deadline.
    let deadline = START + 40 * MS;
    assert!(waits(machine.step(&bar, &mut admin, deadline - 1)));
    let error = machine.step(&bar, &mut admin, deadline).unwrap_err();
    assert_eq!(
        error,
        BringupError::CommandTimeout {
            opcode: opcode::IDENTIFY
        }
    );

    // An entry that answers nothing at all is a fault.
    let mut cqe = hand.completion(own.cid(), Status::SUCCESS, 0);
    cqe.cid = 0x7FF;
    let mut machine =
        BringupMachine::new(&bar, config, DmaWords::new(&words, Iova(0x8000))).unwrap();
    let Ok(BringupStep::Disabled(proof)) = machine.step(&bar, &mut admin, START) else {
        panic!("it is disabled")
    };
    machine.enable(proof);
    assert!(waits(machine.step(&bar, &mut admin, START)));
    hand.post(cqe);
    let error = machine.step(&bar, &mut admin, START).unwrap_err();
    let fault = ControllerFault::UnknownCid(Cid(0x7FF));
    assert_eq!(error, BringupError::Fault(fault));
}

/// A time-out of `u64::MAX` is none, and times near the end of the clock are times.
#[test]
fn a_command_without_time_out_is_waited_for() {
    for now in [1, START, u64::MAX - 1] {
        let (rig, bar) = (Rig::new(8, 7, 0, 0), Properties::new());
        let slots = (0..7).map(|_| CommandSlot::new()).collect();
        let mut admin: Admin<'_> = QueuePair::new(bar.identity(), QID, rig.memory(), slots);
        let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
        let config = BringupConfig {
            command_timeout_ns: u64::MAX,
            ..BringupConfig::default()
        };
        let mut machine =
            BringupMachine::new(&bar, config, DmaWords::new(&words, Iova(0x8000))).unwrap();
        let Ok(BringupStep::Disabled(proof)) = machine.step(&bar, &mut admin, now) else {
            panic!("it is disabled")
        };
        machine.enable(proof);
        for _ in 0..3 {
            let step = machine.step(&bar, &mut admin, now);
            assert!(
                matches!(step, Ok(BringupStep::Wait { .. })),
                "at {now}: {step:?}"
            );
        }
    }
}
