//! Options of every command that uses a device.

use super::access::{AccessArgs, WriteArgs};
use super::stop::stop_flag;
use super::values::number;
use super::{images, output};
use clap::Args;
use nvme_host::core::spec::Nsid;
use nvme_host::sysfs::CommandScope;
use nvme_host::{Controller, ControllerConfig, Device, Result};
use std::sync::Arc;
use std::time::Duration;

/// The namespace that a command is about.
#[derive(Args)]
pub struct NamespaceId {
    /// Namespace
    #[arg(long, short = 'n', value_name = "NSID", default_value_t = 1, value_parser = number::<u32>(1..=0xFFFF_FFFE))]
    pub namespace_id: u32,
}

impl NamespaceId {
    pub fn nsid(&self) -> Nsid {
        Nsid(self.namespace_id)
    }
}

/// The time that a command of NVMe may take.
#[derive(Args)]
pub struct CommandTimeout {
    /// Time limit of a command, after which it is aborted
    #[arg(long, short = 't', visible_alias = "timeout", value_name = "MS", default_value_t = 5000, value_parser = number::<u64>(1..=3_600_000))]
    pub timeout_ms: u64,
}

impl CommandTimeout {
    pub fn limit(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}

/// The form of results and errors.
#[derive(Args)]
pub struct OutputForm {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The device and how it is used.
#[derive(Args)]
pub struct DeviceArgs {
    /// Device: sim:, vfio:, kmod: or vfio-user: (see `nvme-gpu --help`)
    #[arg(long, short = 'd')]
    pub device: String,
    #[command(flatten)]
    pub timeout: CommandTimeout,
    #[command(flatten)]
    pub form: OutputForm,
    #[command(flatten)]
    pub access: AccessArgs,
}

/// A device and one of its namespaces.
#[derive(Args)]
pub struct NamespaceArgs {
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub id: NamespaceId,
}

impl NamespaceArgs {
    pub fn nsid(&self) -> Nsid {
        self.id.nsid()
    }

    /// Returns the options for a command that changes this namespace alone.
    pub fn config(&self) -> ControllerConfig {
        ControllerConfig {
            changes: Some(CommandScope::Namespace(self.id.namespace_id)),
            ..self.device.config()
        }
    }
}

impl DeviceArgs {
    /// Returns the options for a command that may change anything of the NVM subsystem.
    pub fn config(&self) -> ControllerConfig {
        ControllerConfig {
            timeout: self.timeout.limit(),
            rings: self.access.rings(),
            stop: Some(stop_flag()),
            notify: output::warnings(self.form.json),
            ..ControllerConfig::default()
        }
    }

    /// Returns the options for a command that changes nothing.
    pub fn reading(&self) -> ControllerConfig {
        ControllerConfig {
            changes: None,
            ..self.config()
        }
    }

    /// Starts the device for a command that changes nothing.
    pub fn start(&self) -> Result<Controller> {
        self.start_with(&self.config())
    }

    /// Starts the device as [`start`](Self::start) does, with the other options of `config`.
    pub fn start_with(&self, config: &ControllerConfig) -> Result<Controller> {
        let config = ControllerConfig {
            changes: None,
            ..config.clone()
        };
        self.access.start(self.open()?, &config)
    }

    /// Opens the device for a command that changes nothing: a missing image is not created.
    pub fn open(&self) -> Result<Arc<dyn Device>> {
        images::must_exist(&self.device)?;
        nvme_host::open(&self.device)
    }

    /// Starts the device for a command that only reads blocks: images are shared with other readers.
    pub fn start_reading(&self) -> Result<Controller> {
        images::must_exist(&self.device)?;
        let device = nvme_host::open_reading(&self.device)?;
        self.access.start(device, &self.reading())
    }

    /// Opens the device for `what`, a command that changes data. An image that this creates is removed when the
    /// command fails.
    pub fn open_to_write(&self, write: &WriteArgs, what: &str) -> Result<Arc<dyn Device>> {
        self.open_to_write_as(&self.device, write, what)
    }

    /// Does the same as [`open_to_write`](Self::open_to_write), of this device with other options: `name`.
    pub fn open_to_write_as(
        &self,
        name: &str,
        write: &WriteArgs,
        what: &str,
    ) -> Result<Arc<dyn Device>> {
        let device = nvme_host::open(name)?;
        write.check(&*device, what)?;
        Ok(device)
    }

    /// Starts the device as [`start`](Self::start) does, for the command `what`, which changes data.
    pub fn start_writing(
        &self,
        write: &WriteArgs,
        what: &str,
        config: &ControllerConfig,
    ) -> Result<Controller> {
        self.access.start(self.open_to_write(write, what)?, config)
    }
}
