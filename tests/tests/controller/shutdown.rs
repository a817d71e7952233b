//! Shutdown with properties that the test controls: the order of the writes, and every wait to its deadline.

use nvme_core::shutdown::{ShutdownKind, ShutdownMachine, ShutdownStep};
use nvme_core::spec::Qid;
use nvme_core::spec::register::{Cc, offset};
use nvme_core::{BringupError, ControllerIdentity, RegisterAccess};
use nvme_tests::hand::Rig;
use nvme_tests::properties::Properties;
use std::cell::Cell;

const MS: u64 = 1_000_000;
const START: u64 = 7_000 * MS;

/// Returns an enabled controller whose CSTS changes only when the test says so.
fn enabled() -> (Properties, Cc) {
    let bar = Properties::new();
    bar.follows.set(false);
    bar.set_cc(|cc| {
        cc.set_en(true);
        cc.set_iosqes(6);
        cc.set_iocqes(4);
    });
    bar.set_csts(|csts| csts.set_rdy(true));
    let cc = bar.cc.get();
    (bar, cc)
}

/// True if the machine wants to look again soon.
fn is_wait(step: Result<ShutdownStep, BringupError>, now_ns: u64) -> bool {
    let Ok(ShutdownStep::Wait { until_ns }) = step else {
        return false;
    };
    until_ns > now_ns && until_ns <= now_ns + MS
}

/// Returns the one value of CC that was written since the last look.
fn written(bar: &Properties) -> Cc {
    let [(offset::CC, value)] = bar.written()[..] else {
        panic!("one write of CC")
    };
    Cc(value as u32)
}

/// NVMe Base 2.0c, 3.6 (Shutdown Processing): SHN while enabled, SHST = 10b, then EN = 0 and RDY = 0,
/// because a shutdown alone does not end the controller's accesses to memory.
#[test]
fn a_controller_is_shut_down_and_then_disabled() {
    for (kind, shn) in [(ShutdownKind::Normal, 0b01), (ShutdownKind::Abrupt, 0b10)] {
        let (bar, cc) = enabled();
        let queues = [Qid(0), Qid(9)].map(|qid| Rig::of(qid, 4, 3, 0, 0));
        for queue in &queues {
            queue.state().init(bar.identity(), 0);
        }
        let mut machine = ShutdownMachine::new(kind, 50);
        assert!(is_wait(machine.step(&bar, START), START));
        let mut asked = cc;
        asked.set_shn(shn);
        assert_eq!(written(&bar), asked);
        bar.set_csts(|csts| csts.set_shst(1));
        assert!(is_wait(machine.step(&bar, START + MS), START + MS));
        assert_eq!(bar.written(), [], "it is asked once");
        bar.set_csts(|csts| csts.set_shst(2));
        assert!(is_wait(machine.step(&bar, START + MS), START + MS));
        let mut disabled = asked;
        disabled.set_en(false);
        assert_eq!(written(&bar), disabled);
        bar.set_csts(|csts| csts.set_rdy(false));
        let Ok(ShutdownStep::Done(proof)) = machine.step(&bar, START + MS) else {
            panic!("it is done")
        };
        for queue in queues {
            assert_eq!(queue.shared().recover(&proof), Some(0), "of all queues");
        }
    }
}

/// A controller that is disabled, or being disabled, needs no shutdown.
#[test]
fn a_controller_that_is_not_enabled_is_only_waited_for() {
    for rdy in [true, false] {
        let (bar, _) = enabled();
        bar.set_cc(|cc| cc.set_en(false));
        bar.set_csts(|csts| csts.set_rdy(rdy));
        let mut machine = ShutdownMachine::new(ShutdownKind::Normal, 50);
        let step = machine.step(&bar, START);
        assert_eq!(bar.written(), [], "RDY {rdy}");
        if rdy {
            assert!(is_wait(step, START));
            bar.set_csts(|csts| csts.set_rdy(false));
            assert!(matches!(
                machine.step(&bar, START),
                Ok(ShutdownStep::Done(_))
            ));
        } else {
            assert!(matches!(step, Ok(ShutdownStep::Done(_))));
        }
    }
}

/// NVMe Base 2.0c, "Offset 14h: CC", EN: "clearing this field to '0' when CSTS.RDY is '0' has undefined
/// results". A controller that becomes ready is shut down as any other.
#[test]
fn enable_is_not_cleared_before_the_controller_is_ready() {
    let (bar, cc) = enabled();
    bar.set_csts(|csts| csts.set_rdy(false));
    let mut machine = ShutdownMachine::new(ShutdownKind::Normal, 50);
    for now in [START, START + 499 * MS] {
        assert!(is_wait(machine.step(&bar, now), now));
        assert_eq!(bar.written(), []);
    }
    bar.set_csts(|csts| csts.set_rdy(true));
    let now = START + 499 * MS;
    assert!(is_wait(machine.step(&bar, now), now));
    let mut asked = cc;
    asked.set_shn(1);
    assert_eq!(written(&bar), asked);
    // The shutdown has its whole time, from here on.
    assert!(is_wait(machine.step(&bar, now + 49 * MS), now + 49 * MS));
    assert_eq!(
        machine.step(&bar, now + 50 * MS).unwrap_err(),
        BringupError::ShutdownTimeout { ms: 50 }
    );
}

/// CAP.TO, at least 500 ms, is what RDY has to rise in. After that there is no proof that memory is free.
#[test]
fn a_controller_that_never_becomes_ready_is_not_given_for_shut_down() {
    for (to, ms) in [(0, 500), (1, 500), (3, 1500)] {
        let (bar, _) = enabled();
        bar.set_cap(|cap| cap.set_to(to));
        bar.set_csts(|csts| csts.set_rdy(false));
        let mut machine = ShutdownMachine::new(ShutdownKind::Normal, 50);
        assert!(is_wait(machine.step(&bar, START), START));
        let deadline = START + u64::from(ms) * MS;
        assert!(is_wait(machine.step(&bar, deadline - 1), deadline - 1));
        let expected = BringupError::ReadyTimeout { ready: true, ms };
        for now in [deadline, deadline + MS] {
            assert_eq!(machine.step(&bar, now).unwrap_err(), expected);
        }
        assert_eq!(bar.written(), []);
    }
}

/// Properties whose CSTS.RDY changes every `period` reads of CSTS.
struct Flickering {
    bar: Properties,
    period: u32,
    reads: Cell<u32>,
}

impl RegisterAccess for Flickering {
    fn identity(&self) -> &ControllerIdentity {
        self.bar.identity()
    }

    fn read32(&self, at: u32) -> u32 {
        if at == offset::CSTS {
            let reads = self.reads.get();
            assert!(reads < 100_000, "a shutdown has no end");
            self.reads.set(reads + 1);
            self.bar
                .set_csts(|csts| csts.set_rdy((reads / self.period) % 2 == 1));
        }
        self.bar.read32(at)
    }

    fn read64(&self, at: u32) -> u64 {
        self.bar.read64(at)
    }

    fn write32(&self, at: u32, value: u32) {
        self.bar.write32(at, value);
    }

    fn write64(&self, at: u32, value: u64) {
        self.bar.write64(at, value);
    }
}

/// A device may say anything: RDY that rises and falls renews no deadline, and no wait is entered twice.
#[test]
fn a_ready_bit_that_flickers_does_not_keep_a_shutdown_from_its_end() {
    for period in 1..=64 {
        for shuts_down in [false, true] {
            let (bar, _) = enabled();
            bar.set_csts(|csts| csts.set_shst(if shuts_down { 2 } else { 0 }));
            let bar = Flickering {
                bar,
                period,
                reads: Cell::new(0),
            };
            let (mut machine, mut now) = (ShutdownMachine::new(ShutdownKind::Normal, 50), START);
            let end = loop {
                match machine.step(&bar, now) {
                    Ok(ShutdownStep::Wait { until_ns }) => now = until_ns,
                    Ok(ShutdownStep::Done(_)) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            let expected = match shuts_down {
                true => Ok(()),
                false => Err(BringupError::ShutdownTimeout { ms: 50 }),
            };
            assert_eq!(end, expected, "every {period} reads");
            assert!(now <= START + (500 + 50 + 500) * MS, "{now}");
        }
    }
}

/// NVMe Base 2.0c, "Offset 1Ch: CSTS", CFS: such a controller answers no shutdown; a reset ends its accesses to
/// memory, and only RDY = 0 proves that.
#[test]
fn a_controller_with_a_fatal_error_is_reset_in_place_of_a_shutdown() {
    // The cases: before the shutdown, while the controller becomes ready, and in the middle of the shutdown.
    for (rdy, steps_before) in [(true, 0), (false, 1), (true, 1)] {
        let (bar, cc) = enabled();
        bar.set_csts(|csts| csts.set_rdy(rdy));
        let mut machine = ShutdownMachine::new(ShutdownKind::Normal, 50);
        for _ in 0..steps_before {
            assert!(is_wait(machine.step(&bar, START), START));
        }
        let shn = if bar.written().is_empty() { 0 } else { 1 };
        assert!(!machine.was_fatal());
        bar.set_csts(|csts| {
            csts.set_cfs(true);
            csts.set_rdy(true);
        });
        assert!(is_wait(machine.step(&bar, START), START), "RDY is 1");
        let mut reset = cc;
        reset.set_shn(shn);
        reset.set_en(false);
        assert_eq!(written(&bar), reset, "no shutdown is asked for");
        let late = START + 499 * MS;
        assert!(is_wait(machine.step(&bar, late), late));
        bar.set_csts(|csts| csts.set_rdy(false));
        assert!(matches!(
            machine.step(&bar, late),
            Ok(ShutdownStep::Done(_))
        ));
        assert!(machine.was_fatal());
    }
    // A controller that does not become disabled keeps its memory.
    let (bar, _) = enabled();
    bar.set_csts(|csts| csts.set_cfs(true));
    let mut machine = ShutdownMachine::new(ShutdownKind::Abrupt, 50);
    assert!(is_wait(machine.step(&bar, START), START));
    assert_eq!(
        machine.step(&bar, START + 500 * MS).unwrap_err(),
        BringupError::ReadyTimeout {
            ready: false,
            ms: 500
        }
    );
}

/// The time limit of the shutdown is the controller's (RTD3E), or 10 s if it names none; RDY must fall within CAP.TO.
#[test]
fn a_shutdown_that_takes_too_long_is_an_error_at_its_deadline() {
    for (given_ms, ms) in [(50, 50), (0, 10_000)] {
        for shuts_down in [false, true] {
            let (bar, _) = enabled();
            let mut machine = ShutdownMachine::new(ShutdownKind::Normal, given_ms);
            assert!(is_wait(machine.step(&bar, START), START));
            let (deadline, expected) = if shuts_down {
                bar.set_csts(|csts| csts.set_shst(2));
                let now = START + 5 * MS;
                assert!(is_wait(machine.step(&bar, now), now));
                let ready = BringupError::ReadyTimeout {
                    ready: false,
                    ms: 500,
                };
                (now + 500 * MS, ready)
            } else {
                let deadline = START + u64::from(ms) * MS;
                (deadline, BringupError::ShutdownTimeout { ms })
            };
            assert!(is_wait(machine.step(&bar, deadline - 1), deadline - 1));
            assert_eq!(machine.step(&bar, deadline).unwrap_err(), expected);
        }
    }
}

#[test]
fn a_controller_that_left_the_bus_cannot_be_shut_down() {
    let (bar, _) = enabled();
    let mut machine = ShutdownMachine::new(ShutdownKind::Normal, 50);
    assert!(is_wait(machine.step(&bar, START), START));
    bar.set_csts(|csts| csts.0 = u32::MAX);
    assert_eq!(
        machine.step(&bar, START).unwrap_err(),
        BringupError::DeviceGone
    );
}
