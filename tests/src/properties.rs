//! Controller properties that tests control: they choose the values that are read, and see the
//! values that are written.

use nvme_core::spec::register::{Cap, Cc, Csts, offset};
use nvme_core::{ControllerIdentity, RegisterAccess};
use std::cell::{Cell, RefCell};

/// The properties. By default CSTS follows CC at once.
#[derive(Debug)]
pub struct Properties {
    /// CAP.
    pub cap: Cell<Cap>,
    /// CRTO.
    pub crto: Cell<u32>,
    /// CSTS.
    pub csts: Cell<Csts>,
    /// CC as last written.
    pub cc: Cell<Cc>,
    /// True if CSTS.RDY follows CC.EN, and CSTS.SHST follows CC.SHN.
    pub follows: Cell<bool>,
    written: RefCell<Vec<(u32, u64)>>,
    identity: ControllerIdentity,
}

impl Properties {
    /// Returns a disabled controller with the NVM command set, 4 KiB pages, 64 entries and TO of 500 ms.
    pub fn new() -> Self {
        let mut cap = Cap(0);
        cap.set_mqes(64);
        cap.set_css(1);
        cap.set_to(1);
        Self {
            cap: Cell::new(cap),
            crto: Cell::new(0),
            csts: Cell::new(Csts(0)),
            cc: Cell::new(Cc(0)),
            follows: Cell::new(true),
            written: RefCell::default(),
            identity: ControllerIdentity::new(),
        }
    }

    /// Returns properties with another CAP.
    pub fn with_cap(self, change: impl FnOnce(&mut Cap)) -> Self {
        self.set_cap(change);
        self
    }

    /// Changes CAP.
    pub fn set_cap(&self, change: impl FnOnce(&mut Cap)) {
        let mut cap = self.cap.get();
        change(&mut cap);
        self.cap.set(cap);
    }

    /// Changes CSTS.
    pub fn set_csts(&self, change: impl FnOnce(&mut Csts)) {
        let mut csts = self.csts.get();
        change(&mut csts);
        self.csts.set(csts);
    }

    /// Changes CC behind the driver's back, without effect on CSTS.
    pub fn set_cc(&self, change: impl FnOnce(&mut Cc)) {
        let mut cc = self.cc.get();
        change(&mut cc);
        self.cc.set(cc);
    }

    /// Returns everything written since the last look, as (offset, value).
    pub fn written(&self) -> Vec<(u32, u64)> {
        self.written.take()
    }
}

impl Default for Properties {
    fn default() -> Self {
        Self::new()
    }
}

impl RegisterAccess for Properties {
    fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    fn read32(&self, at: u32) -> u32 {
        match at {
            offset::VS => 0x0002_0000,
            offset::CC => self.cc.get().0,
            offset::CSTS => self.csts.get().0,
            offset::CRTO => self.crto.get(),
            _ => panic!("a read of {at:#x}"),
        }
    }

    fn read64(&self, at: u32) -> u64 {
        assert_eq!(at, offset::CAP);
        self.cap.get().0
    }

    fn write32(&self, at: u32, value: u32) {
        self.written.borrow_mut().push((at, u64::from(value)));
        if at != offset::CC {
            return;
        }
        let cc = Cc(value);
        self.cc.set(cc);
        if self.follows.get() {
            self.set_csts(|csts| {
                csts.set_rdy(cc.en());
                csts.set_shst(if cc.shn() == 0 { 0 } else { 2 });
            });
        }
    }

    fn write64(&self, at: u32, value: u64) {
        self.written.borrow_mut().push((at, value));
    }
}
