//! `devices`: the options after `sim:`.

use crate::common::output;
use clap::Args;
use nvme_host::Result;

/// List every option and fault of the simulated device, `sim:`
#[derive(Args)]
pub struct DevicesCommand {}

impl DevicesCommand {
    pub fn run(self) -> Result<()> {
        output::print(&nvme_sim::config::help(100))
    }
}
