//! How a device is reached, beyond its name: options that every command with `--device` has.

use clap::{Args, ValueEnum};
use nvme_host::relay::Relay;
use nvme_host::{Config, Controller, Device, Error, Result, Rings};
use std::sync::Arc;

/// Where rings lie and how doorbells and completions travel.
#[derive(Args)]
pub struct AccessArgs {
    /// Where the rings of I/O queues lie: in this process, or in the controller memory buffer
    #[arg(long, value_enum, default_value_t = RingPlace::Host)]
    rings: RingPlace,
    /// Who rings the controller: the thread that submits, or a thread that passes on what is stored in
    /// memory (tier 0)
    #[arg(long, value_enum, default_value_t = Doorbells::Direct)]
    doorbells: Doorbells,
    /// Sleep until the controller interrupts, instead of polling for completions
    #[arg(long)]
    irq: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum RingPlace {
    Host,
    Cmb,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Doorbells {
    Direct,
    Relay,
}

/// For commands that change what is stored.
#[derive(Args)]
pub struct WriteArgs {
    /// Allow changes on a real device (not needed for the simulator)
    #[arg(long)]
    pub allow_write: bool,
}

impl AccessArgs {
    /// Opens `device` and brings its controller up, as the options say.
    pub fn start(&self, device: Arc<dyn Device>, config: &Config) -> Result<Controller> {
        let config = Config {
            rings: match self.rings {
                RingPlace::Host => Rings::Host,
                RingPlace::Cmb => Rings::Controller,
            },
            interrupts: self.irq,
            ..config.clone()
        };
        let queues = u16::try_from(config.queue_pairs).unwrap_or(u16::MAX);
        let device = match self.doorbells {
            Doorbells::Direct => device,
            Doorbells::Relay => Relay::start(device, queues)?,
        };
        Controller::start(device, &config)
    }
}

impl WriteArgs {
    /// Refuses to change what is stored on a device that guards it, unless that was allowed.
    pub fn check(&self, device: &dyn Device, what: &str) -> Result<()> {
        if self.allow_write || !device.guards_data() {
            return Ok(());
        }
        Err(Error::usage(
            format!("{what} changes what is stored on {}", device.name()),
            "add --allow-write if that is what you want",
        ))
    }
}
