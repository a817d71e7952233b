//! Resets that a user requests: of the controller, and of the whole NVM subsystem. Unlike recovery they have no
//! failed command as their cause, but they end the commands in flight in the same way.

use crate::controller::Controller;
use crate::error::{Error, Result};
use nvme_core::spec::register::{ALL_ONES, Cap, Csts, SUBSYSTEM_RESET, offset};
use std::time::{Duration, Instant};

impl Controller {
    /// Resets the controller (CC.EN to 0 and back), brings it up again and creates its queues again.
    ///
    /// Commands in flight end as aborted by a reset.
    ///
    /// # Errors
    /// [`Error::Gone`] when it does not come back.
    pub fn reset(&self) -> Result<()> {
        self.session().reset("a controller reset was asked for")
    }

    /// Resets the NVM subsystem (NSSR), which resets every controller of it, then brings this one up again.
    ///
    /// NVMe Base 2.0c, "NVM Subsystem Reset".
    ///
    /// # Errors
    /// [`Error::Usage`] when the controller has no such reset (CAP.NSSRS); nothing is written then.
    /// [`Error::Gone`] when it is not seen to happen, or when the controller does not come back.
    pub fn reset_subsystem(&self) -> Result<()> {
        let device = self.device();
        let registers = device.registers();
        let cap = Cap(registers.read64(offset::CAP));
        if !cap.nssrs() {
            return Err(Error::usage(
                format!(
                    "{} has no NVM subsystem reset (CAP.NSSRS is 0)",
                    device.name()
                ),
                "reset the controller alone",
            ));
        }
        let nssro = |value: u32| value != ALL_ONES && Csts(value).nssro();
        if nssro(registers.read32(offset::CSTS)) {
            let mut seen = Csts(0);
            seen.set_nssro(true);
            registers.write32(offset::CSTS, seen.0);
        }
        registers.write32(offset::NSSR, SUBSYSTEM_RESET);
        let limit = Duration::from_millis(500) * u32::from(cap.to()).max(2);
        let start = Instant::now();
        // A PCIe link that goes down with the subsystem reads as all ones for a while.
        while !nssro(registers.read32(offset::CSTS)) {
            if start.elapsed() > limit {
                return Err(Error::Gone {
                    cause: device.gone().unwrap_or_else(|| {
                        format!(
                            "{}: no NVM subsystem reset was seen (CSTS.NSSRO) within {} ms",
                            device.name(),
                            limit.as_millis()
                        )
                    }),
                });
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.session().reset("an NVM subsystem reset was asked for")
    }
}
