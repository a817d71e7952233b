//! Parts that steps share: the device, the plan, and the bring-up of a controller for one step.

use super::plan::WitnessPlan;
use super::record::{RecordTier, TimedPass, VerifiedBytes};
use crate::common::output;
use nvme_host::core::spec::Nsid;
use nvme_host::sysfs::CommandScope;
use nvme_host::{
    Controller, ControllerConfig, Device, Error, Namespace, Result, Store, StoreOptions,
};
use std::sync::Arc;
use std::time::Duration;

/// The longest command, whatever MDTS allows: lists of more than a page are chained.
const MOST: u64 = 4 << 20;
/// Limit in bytes of a write step, which keeps its data in memory three times.
const MOST_WRITTEN: u64 = 256 << 20;

/// Result of a step.
pub struct StepResult {
    pub measured: TimedPass,
    pub verified: VerifiedBytes,
    pub tier: Option<RecordTier>,
}

impl StepResult {
    pub fn new(measured: TimedPass, verified: VerifiedBytes) -> Self {
        Self {
            measured,
            verified,
            tier: None,
        }
    }
}

/// Blocks that the user allows to be overwritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WritableBlocks {
    pub lba: u64,
    pub blocks: u64,
}

/// LBA:BLOCKS
impl std::str::FromStr for WritableBlocks {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parse = |text: &str| nvme_host::units::parse_in(text, &(0..=u64::MAX));
        let wrong = || format!("'{text}' is no range: write LBA:BLOCKS, as 1000000:256");
        let (lba, blocks) = text.split_once(':').ok_or_else(wrong)?;
        let (lba, blocks) = (parse(lba)?, parse(blocks)?);
        match blocks {
            0 => Err(wrong()),
            blocks => Ok(Self { lba, blocks }),
        }
    }
}

/// The device and the work to do with it.
pub struct RunContext {
    pub timeout: Duration,
    pub plan: WitnessPlan,
    /// Salt of the sums of this run; it is not stored.
    pub salt: u64,
    pub writable: Option<WritableBlocks>,
    pub as_json: bool,
    pub opened: OpenedDevice,
}

/// The device, which stays open from step to step: a simulated one in memory keeps its bytes.
pub struct OpenedDevice {
    name: String,
    writes: bool,
    device: Option<Arc<dyn Device>>,
}

impl OpenedDevice {
    /// Wraps `device` with the name `name`; `writes` is true if steps change it.
    pub fn new(name: &str, writes: bool, device: Arc<dyn Device>) -> Self {
        Self {
            name: name.to_owned(),
            writes,
            device: Some(device),
        }
    }

    /// Returns the device, which is opened again if it is gone.
    ///
    /// # Errors
    /// The errors of opening the device.
    pub fn get(&mut self) -> Result<Arc<dyn Device>> {
        if let Some(device) = &self.device
            && device.gone().is_none()
        {
            return Ok(Arc::clone(device));
        }
        self.device = None;
        let device = open(&self.name, self.writes)?;
        self.device = Some(Arc::clone(&device));
        Ok(device)
    }

    /// Closes the device; the next step opens it again.
    pub fn close(&mut self) {
        self.device = None;
    }
}

/// Opens the device called `name`. An image that nothing writes is shared with other readers.
pub fn open(name: &str, writes: bool) -> Result<Arc<dyn Device>> {
    crate::common::images::must_exist(name)?;
    match writes {
        true => nvme_host::open(name),
        false => nvme_host::open_reading(name),
    }
}

/// Returns the options of bring-up. The steps check for Ctrl-C themselves, so that a write step can restore the
/// data that it has changed. `changes` is the namespace whose range is overwritten.
pub fn config(timeout: Duration, as_json: bool, changes: Option<Nsid>) -> ControllerConfig {
    ControllerConfig {
        timeout,
        changes: changes.map(|nsid| CommandScope::Namespace(nsid.0)),
        max_transfer: MOST,
        notify: output::warnings(as_json),
        ..ControllerConfig::default()
    }
}

impl RunContext {
    pub fn config(&self) -> ControllerConfig {
        config(
            self.timeout,
            self.as_json,
            self.writable.map(|_| self.plan.nsid),
        )
    }

    pub fn start(&mut self) -> Result<Controller> {
        let device = self.opened.get()?;
        Controller::start(device, &self.config())
    }

    pub fn namespace(&self, controller: &Controller) -> Result<Namespace> {
        controller.namespace(self.plan.nsid)
    }

    /// Returns a store over the device, for reading, with a GPU or without.
    pub fn store(&mut self, gpu: Option<u32>) -> Result<Store> {
        let options = StoreOptions {
            nsid: self.plan.nsid.0,
            timeout: self.timeout,
            #[cfg(feature = "cuda")]
            gpu: gpu.map(|index| nvme_host::store::GpuOptions {
                index,
                ..Default::default()
            }),
            ..StoreOptions::default()
        };
        #[cfg(not(feature = "cuda"))]
        let _ = gpu;
        Store::over(self.opened.get()?, &options)
    }

    /// Returns the range that may be overwritten.
    ///
    /// # Errors
    /// [`Error::Usage`] for one that is too long.
    pub fn writable(&self) -> Result<WritableBlocks> {
        let range = self
            .writable
            .ok_or_else(|| Error::internal("no range to write"))?;
        match range.blocks.checked_mul(self.plan.block) {
            Some(bytes) if bytes <= MOST_WRITTEN => Ok(range),
            _ => Err(Error::usage(
                format!(
                    "{} blocks are more than a write step keeps in memory",
                    range.blocks
                ),
                format!("use at most {}", MOST_WRITTEN / self.plan.block),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_to_write_is_named_by_its_first_block_and_its_length() {
        let range = |text: &str| text.parse::<WritableBlocks>();
        assert_eq!(range("0x10:8"), Ok(WritableBlocks { lba: 16, blocks: 8 }));
        for text in ["", "8", "8:0", "a:1", "1:b", "1:2:3"] {
            assert!(range(text).is_err(), "{text}");
        }
    }
}
