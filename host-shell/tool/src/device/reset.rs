//! `reset`: of the controller, or of the NVM subsystem.

use crate::common::{DeviceArgs, WriteArgs, output, say};
use clap::Args;
use nvme_host::Result;
use serde_json::json;
use std::time::Instant;

/// Reset the controller, or the whole NVM subsystem
#[derive(Args)]
pub struct ResetCommand {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// Reset the NVM subsystem (NSSR) instead, and with it every controller that it has
    #[arg(long, short = 's')]
    subsystem: bool,
}

impl ResetCommand {
    pub fn run(self) -> Result<()> {
        let what = match self.subsystem {
            true => "NVM subsystem reset",
            false => "controller reset",
        };
        let device = self.device.open()?;
        self.write
            .check_for(&*device, format!("a {what} interrupts the work of"))?;
        // A reset of this controller does not affect other controllers, a reset of the subsystem
        // does.
        let config = match self.subsystem {
            true => self.device.config(),
            false => self.device.reading(),
        };
        let controller = self.device.access.start(device, &config)?;
        say::step(|| format!("{what}: begins"));
        let start = Instant::now();
        match self.subsystem {
            true => controller.reset_subsystem()?,
            false => controller.reset()?,
        }
        let ms = start.elapsed().as_millis() as u64;
        controller.shut_down()?;
        if self.device.form.json {
            return output::json(&json!({ "reset": what, "milliseconds": ms }));
        }
        output::print(&format!("{what}: success, ready again after {ms} ms"))
    }
}
