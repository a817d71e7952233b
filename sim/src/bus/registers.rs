//! The controller's properties: their values, and the bits that a driver may change.
//!
//! Values are atomics, so that a register read never waits for a command in execution. The side
//! effects of a write are in `engine`.
//!
//! NVMe Base 2.0c, 3.1.3 (Controller Properties).

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use nvme_spec::register::{Aqa, Cap, Cc, Crto, Csts, Vs, offset};

/// Values of the property registers.
pub(crate) struct PropertyRegisters {
    pub cap: Cap,
    pub crto: Crto,
    vs: u32,
    cc: AtomicU32,
    csts: AtomicU32,
    pub aqa: AtomicU32,
    pub asq: AtomicU64,
    pub acq: AtomicU64,
}

impl PropertyRegisters {
    pub fn new(cap: Cap, ready_units: u16) -> Self {
        let mut crto = Crto(0);
        crto.set_crwmt(ready_units);
        crto.set_crimt(ready_units);
        let mut vs = Vs(0);
        vs.set_mjr(2);
        Self {
            cap,
            crto,
            vs: vs.0,
            cc: AtomicU32::new(0),
            csts: AtomicU32::new(0),
            aqa: AtomicU32::new(0),
            asq: AtomicU64::new(0),
            acq: AtomicU64::new(0),
        }
    }

    pub fn version(&self) -> u32 {
        self.vs
    }

    pub fn cc(&self) -> Cc {
        Cc(self.cc.load(Ordering::Acquire)) // Acquire: pairs with set_cc.
    }

    pub fn set_cc(&self, cc: Cc) {
        self.cc.store(cc.0, Ordering::Release); // Release: pairs with cc.
    }

    pub fn csts(&self) -> Csts {
        Csts(self.csts.load(Ordering::Acquire)) // Acquire: pairs with change_csts.
    }

    /// Changes CSTS. The release order matters to drivers: one that sees RDY = 0 also sees that
    /// every access to its memory is over, and may free or reuse that memory.
    pub fn change_csts(&self, change: impl Fn(&mut Csts)) {
        let mut old = self.csts.load(Ordering::Relaxed);
        loop {
            let mut csts = Csts(old);
            change(&mut csts);
            match self
                .csts
                .compare_exchange(old, csts.0, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }

    pub fn aqa(&self) -> Aqa {
        Aqa(self.aqa.load(Ordering::Relaxed))
    }

    /// Sets every register to its value after power on. The stores are releases as in `change_csts`: a driver
    /// that sees RDY = 0 after a power cut also sees that no access to its memory follows.
    pub fn clear(&self) {
        for word in [&self.cc, &self.csts, &self.aqa] {
            word.store(0, Ordering::Release); // Release: as change_csts.
        }
        self.asq.store(0, Ordering::Relaxed);
        self.acq.store(0, Ordering::Relaxed);
    }

    /// Returns the 32-bit word at `at`. Unknown and reserved offsets read as 0.
    pub fn read(&self, at: u32) -> u32 {
        let half = |value: u64| {
            if at.is_multiple_of(8) {
                value as u32
            } else {
                (value >> 32) as u32
            }
        };
        match at {
            offset::VS => self.vs,
            offset::CC => self.cc().0,
            offset::CSTS => self.csts().0,
            offset::AQA => self.aqa.load(Ordering::Relaxed),
            offset::CRTO => self.crto.0,
            _ => match at & !7 {
                offset::CAP => half(self.cap.0),
                offset::ASQ => half(self.asq.load(Ordering::Relaxed)),
                offset::ACQ => half(self.acq.load(Ordering::Relaxed)),
                _ => 0,
            },
        }
    }

    /// Writes a register without side effects on queues. False for every other offset.
    pub fn write(&self, at: u32, value: u32) -> bool {
        let half = |word: &AtomicU64| {
            let old = word.load(Ordering::Relaxed);
            let new = if at.is_multiple_of(8) {
                old & !0xFFFF_FFFF | u64::from(value & !0xFFF)
            } else {
                old & 0xFFFF_FFFF | u64::from(value) << 32
            };
            word.store(new, Ordering::Relaxed);
        };
        let disabled = self.cc().0 & 1 == 0;
        match at {
            // The specification leaves a change of the admin queue while CC.EN is 1 undefined; here
            // it has no effect.
            offset::AQA if disabled => self.aqa.store(value & 0x0FFF_0FFF, Ordering::Relaxed),
            offset::CSTS if value & 1 << 4 != 0 => self.change_csts(|csts| csts.set_nssro(false)),
            _ => match at & !7 {
                offset::ASQ if disabled => half(&self.asq),
                offset::ACQ if disabled => half(&self.acq),
                _ => return false,
            },
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Driver, config};
    use nvme_auditor::Rule;
    use nvme_spec::admin;
    use nvme_spec::register::{cq_head_doorbell, sq_tail_doorbell};

    #[test]
    fn wide_registers_are_written_by_halves_and_lose_their_page_offset() {
        let registers = PropertyRegisters::new(Cap(0x1234_5678_9ABC_DEF0), 2);
        assert!(registers.write(offset::ASQ + 4, 0x8000_0001));
        assert!(registers.write(offset::ASQ, 0xFFFF_FFFF));
        assert_eq!(registers.asq.load(Ordering::Relaxed), 0x8000_0001_FFFF_F000);
        assert_eq!(registers.read(offset::ASQ + 4), 0x8000_0001);
        assert_eq!(
            (registers.read(0), registers.read(4)),
            (0x9ABC_DEF0, 0x1234_5678)
        );
        assert_eq!(registers.read(0x0F00), 0);
    }

    #[test]
    fn the_admin_queue_does_not_move_while_enabled() {
        let registers = PropertyRegisters::new(Cap(0), 1);
        registers.write(offset::AQA, 0xFFFF_FFFF);
        assert_eq!(registers.aqa().asqs_z(), 0xFFF);
        let mut cc = Cc(0);
        cc.set_en(true);
        registers.set_cc(cc);
        assert!(!registers.write(offset::AQA, 0));
        assert!(!registers.write(offset::ASQ, 0x1000) && !registers.write(offset::ACQ, 0x1000));
        assert_eq!(
            (registers.read(offset::ASQ), registers.read(offset::ACQ)),
            (0, 0)
        );
        assert_eq!(registers.read(offset::AQA), 0x0FFF_0FFF);
        assert_eq!(registers.read(offset::CC), 1);
    }

    /// Only writing 1 to CSTS.NSSRO clears it.
    #[test]
    fn the_bit_of_a_subsystem_reset_goes_when_it_is_written() {
        let registers = PropertyRegisters::new(Cap(0), 1);
        registers.change_csts(|csts| csts.set_nssro(true));
        registers.write(offset::CSTS, 0);
        registers.write(offset::CSTS, !(1 << 4));
        assert!(registers.csts().nssro());
        registers.write(offset::CSTS, 1 << 4);
        assert!(!registers.csts().nssro());
    }

    #[test]
    fn both_ready_timeouts_are_told() {
        let registers = PropertyRegisters::new(Cap(0), 7);
        assert_eq!(registers.read(offset::CRTO), 7 << 16 | 7);
        assert_eq!(registers.read(offset::VS), 0x0002_0000);
    }

    /// NVMe Base 2.0c, "Offset Ch: INTMS" and "Offset 10h: INTMC": both read as the mask.
    #[test]
    fn interrupt_masks_are_set_and_cleared_bit_by_bit() {
        let driver = Driver::new(config());
        let masks = || [offset::INTMS, offset::INTMC].map(|at| driver.controller.read32(at));
        driver.controller.write32(offset::INTMS, 0b0101);
        assert_eq!(masks(), [0b0101; 2]);
        driver.controller.write32(offset::INTMS, 0b0110);
        assert_eq!(masks(), [0b0111; 2]);
        driver.controller.write32(offset::INTMC, 0b1010);
        assert_eq!(masks(), [0b0101; 2]);
    }

    #[test]
    fn a_word_is_read_at_its_own_address_only() {
        let driver = Driver::new(config());
        assert_ne!(driver.controller.read32(offset::CAP), 0);
        assert_ne!(driver.controller.read32(offset::ASQ), 0);
        for at in [1, 2, 5, offset::ASQ + 1, offset::ASQ + 2] {
            assert_eq!(driver.controller.read32(at), 0, "{at:#x}");
        }
    }

    /// A doorbell that a trap brought: the word that a driver could have stored itself.
    #[test]
    fn a_doorbell_written_as_a_register_is_the_word_in_memory() {
        let driver = Driver::with_queue(config());
        let doorbells = driver.controller.doorbells();
        for (qid, is_head, value) in [(0, false, 3), (0, true, 4), (1, false, 5), (1, true, 6)] {
            let (at, word) = if is_head {
                (cq_head_doorbell(qid, 0), doorbells.cq_head(qid))
            } else {
                (sq_tail_doorbell(qid, 0), doorbells.sq_tail(qid))
            };
            driver.controller.write32(at, value);
            assert_eq!(word.load(Ordering::Relaxed), value);
            assert_eq!(driver.controller.read32(at), value);
        }
    }

    /// NVMe Base 2.0c, "Asynchronous Event Information - Error Status": Write to Invalid Doorbell
    /// Register. A controller that is not enabled raises no event.
    #[test]
    fn a_doorbell_of_no_queue_is_an_event() {
        for enabled in [false, true] {
            let mut driver = Driver::cold(config());
            if enabled {
                driver.breaks(&[Rule::DoorbellAbsent]);
                driver.enable();
            }
            let beyond = sq_tail_doorbell(5, 0);
            driver.controller.write32(beyond, 1);
            if !enabled {
                driver.enable();
            }
            driver.push(0, admin::async_event_request());
            driver.ring(0);
            driver.step();
            driver.step();
            let event = driver.pop(0).map(|cqe| cqe.dw0);
            assert_eq!(event, enabled.then_some(0x0001_0000));
        }
    }
}
