//! Options for the access to a device, besides its name; every command with `--device` has them.

use crate::common::say;
use clap::{Args, ValueEnum};
use nvme_host::core::spec::identify::PrintableText;
use nvme_host::relay::DoorbellRelay;
use nvme_host::{Controller, ControllerConfig, Device, Error, Result, RingLocation};
use std::sync::Arc;
use std::time::Instant;

/// Placement of rings, and the way of doorbells and completions.
#[derive(Args)]
pub struct AccessArgs {
    /// Memory of the I/O queues' rings: of this process, or the controller memory buffer
    #[arg(long, value_enum, default_value_t = RingPlace::Host)]
    rings: RingPlace,
    /// Doorbell writes by the thread that submits, or by one that forwards them from memory (tier 0)
    #[arg(long, value_enum, default_value_t = DoorbellAccess::Direct)]
    doorbells: DoorbellAccess,
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
enum DoorbellAccess {
    Direct,
    Relay,
}

/// For commands that change what is stored.
#[derive(Args)]
pub struct WriteArgs {
    /// Allow changes on a device that may hold data: any but the simulator
    #[arg(long)]
    pub allow_write: bool,
}

impl AccessArgs {
    /// Returns the location of the rings of I/O queues.
    pub fn rings(&self) -> RingLocation {
        match self.rings {
            RingPlace::Host => RingLocation::Host,
            RingPlace::Cmb => RingLocation::Controller,
        }
    }

    /// Opens `device` and brings its controller up with these options.
    pub fn start(&self, device: Arc<dyn Device>, config: &ControllerConfig) -> Result<Controller> {
        let config = ControllerConfig {
            rings: self.rings(),
            interrupts: self.irq,
            ..config.clone()
        };
        let queues = u16::try_from(config.queue_pairs).unwrap_or(u16::MAX);
        let device = match self.doorbells {
            DoorbellAccess::Direct => device,
            DoorbellAccess::Relay => DoorbellRelay::start(device, queues)?,
        };
        say::step(|| format!("opened {}: {}", device.name(), device.describe()));
        let start = Instant::now();
        // If bring-up fails, the connection is closed even though its memory may still be in use: a server
        // accepts one client, and the next attempt must be able to connect.
        let controller = Controller::start(Arc::clone(&device), &config);
        let controller = controller.inspect_err(|_| device.leave())?;
        say::step(|| in_words(&controller, start));
        Ok(controller)
    }
}

/// Describes a controller after bring-up.
fn in_words(controller: &Controller, start: Instant) -> String {
    let (identify, info) = (controller.identify(), controller.info());
    let most = match info.max_transfer {
        Some(bytes) => format!("{bytes} bytes"),
        None => "any length".to_owned(),
    };
    format!(
        "controller ready after {} ms: {}, serial {}, firmware {}, NVMe {}.{}.{}, {} queue pairs, transfers of {most}",
        start.elapsed().as_millis(),
        PrintableText(&identify.mn),
        PrintableText(&identify.sn),
        PrintableText(&identify.fr),
        info.version >> 16,
        info.version >> 8 & 0xFF,
        info.version & 0xFF,
        info.queue_pairs,
    )
}

impl WriteArgs {
    /// Refuses to change data on a device that guards it, unless the user allowed it.
    pub fn check(&self, device: &dyn Device, what: &str) -> Result<()> {
        self.check_for(device, format!("{what} changes what is stored on"))
    }

    /// Does the same as [`check`](Self::check), for a command that does something else to the device: `deed` is a
    /// clause that its name ends.
    pub fn check_for(&self, device: &dyn Device, deed: String) -> Result<()> {
        if self.allow_write || !device.guards_data() {
            return Ok(());
        }
        Err(Error::usage(
            format!("{deed} {}, whose data are guarded", device.name()),
            "add --allow-write if that is what you want",
        ))
    }
}
