//! Checks that only CSTS.RDY = 0 proves that memory belongs to the driver again, whatever else the controller says.

use nvme_core::bringup::{self, BringupMachine};
use nvme_core::mem::DmaWords;
use nvme_core::shutdown::{self, ShutdownKind, ShutdownMachine};
use nvme_core::spec::Iova;
use nvme_core::spec::register::{Cap, Cc, Csts, offset};
use nvme_core::sync::AtomicU64;
use nvme_core::{CommandSlot, ControllerIdentity, QueuePair, RegisterAccess};
use nvme_tests::hand::{QID, Rig};
use std::cell::{Cell, RefCell};

/// A controller whose status follows a list; the last value is repeated.
struct Moody {
    statuses: RefCell<Vec<Csts>>,
    cc: Cell<u32>,
    /// The value that was read last.
    read: Cell<Csts>,
    identity: ControllerIdentity,
}

impl RegisterAccess for Moody {
    fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    fn read32(&self, at: u32) -> u32 {
        match at {
            offset::CSTS => {
                let mut statuses = self.statuses.borrow_mut();
                let next = match statuses[..] {
                    [last] => last,
                    _ => statuses.remove(0),
                };
                self.read.set(next);
                next.0
            }
            offset::CC => self.cc.get(),
            _ => 0,
        }
    }

    fn read64(&self, _at: u32) -> u64 {
        let mut cap = Cap(0);
        cap.set_mqes(64);
        cap.set_css(1);
        cap.set_to(1);
        cap.0
    }

    fn write32(&self, at: u32, value: u32) {
        if at == offset::CC {
            self.cc.set(value);
        }
    }

    fn write64(&self, _at: u32, _value: u64) {}
}

/// Returns every combination of RDY, CFS and SHST.
fn every_status() -> impl Iterator<Item = Csts> {
    (0..16).map(|bits| {
        let mut csts = Csts(0);
        csts.set_rdy(bits & 1 != 0);
        csts.set_cfs(bits & 2 != 0);
        csts.set_shst(bits as u8 >> 2);
        csts
    })
}

/// Calls `run` with a controller of every sequence of three statuses, enabled or not, shut down or not.
fn with_every_controller(run: impl Fn(&Moody)) {
    for (first, second, third) in every_status().flat_map(|first| {
        every_status()
            .flat_map(move |second| every_status().map(move |third| (first, second, third)))
    }) {
        for (en, shn) in [(false, 0), (true, 0), (true, 1), (true, 2)] {
            let mut cc = Cc(0);
            cc.set_en(en);
            cc.set_shn(shn);
            run(&Moody {
                statuses: RefCell::new(vec![first, second, third]),
                cc: Cell::new(cc.0),
                read: Cell::new(first),
                identity: ControllerIdentity::new(),
            });
        }
    }
}

/// Fails unless the status that the machine has just read allows a proof.
fn may_prove(controller: &Moody) {
    let csts = controller.read.get();
    assert!(!csts.rdy(), "a proof while CSTS.RDY is 1: {csts:?}");
    let enabled = Cc(controller.cc.get()).en();
    assert!(!enabled, "a proof while CC.EN is 1: {csts:?}");
}

const STEPS: u64 = 12;
const STEP_NS: u64 = 200_000_000;

#[test]
fn a_shutdown_proves_nothing_while_the_controller_is_ready() {
    let proofs = Cell::new(0);
    for kind in [ShutdownKind::Normal, ShutdownKind::Abrupt] {
        with_every_controller(|controller| {
            let mut machine = ShutdownMachine::new(kind, 1000);
            for turn in 0..STEPS {
                match machine.step(controller, turn * STEP_NS) {
                    Ok(shutdown::ShutdownStep::Done(_)) => {
                        may_prove(controller);
                        proofs.set(proofs.get() + 1);
                        return;
                    }
                    Ok(shutdown::ShutdownStep::Wait { .. }) => {}
                    Err(_) => return,
                }
            }
            panic!("no end after {STEPS} steps of {STEP_NS} ns");
        });
    }
    assert!(proofs.get() > 1000, "only {} proofs", proofs.get());
}

#[test]
fn bring_up_proves_nothing_while_the_controller_is_ready() {
    let proofs = Cell::new(0);
    with_every_controller(|controller| {
        let rig = Rig::new(4, 3, 0, 0);
        let slots: Vec<CommandSlot<u32>> = (0..3).map(|_| CommandSlot::new()).collect();
        let mut admin = QueuePair::new(controller.identity(), QID, rig.memory(), slots);
        let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
        let page = DmaWords::new(&words, Iova(0x8000));
        let config = bringup::BringupConfig::default();
        let mut machine = BringupMachine::new(controller, config, page).expect("capabilities");
        for turn in 0..STEPS {
            match machine.step(controller, &mut admin, turn * STEP_NS) {
                Ok(bringup::BringupStep::Disabled(_)) => {
                    may_prove(controller);
                    proofs.set(proofs.get() + 1);
                    return;
                }
                Ok(_) => {}
                Err(_) => return,
            }
        }
        panic!("no end after {STEPS} steps of {STEP_NS} ns");
    });
    assert!(proofs.get() > 1000, "only {} proofs", proofs.get());
}
