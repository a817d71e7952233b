//! The embedded simulator as a device: a controller in this process, driven by threads that poll its doorbell memory.
//! The driver above uses it like any other device.

use crate::device::Device;
use crate::device::bar::DoorbellMap;
use crate::device::peer::PeerMemory;
use crate::dma::{DmaPages, SharedPages};
use crate::error::{Error, Result};
use crate::lock::lock;
use nvme_core::spec::Iova;
use nvme_core::spec::register::ALL_ONES;
use nvme_core::{ControllerIdentity, RegisterAccess};
use nvme_sim::config::ImageAccess;
use nvme_sim::{Config, Controller, CreatedImage, HostMemory, Runner};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The registers of a simulated controller in this process. The flag says that this process left it:
/// they read as all ones then, and writes are lost.
pub struct SimulatorBar(
    pub Arc<Controller<HostMemory>>,
    ControllerIdentity,
    AtomicBool,
);

impl SimulatorBar {
    /// Creates the registers of `controller`: one `SimulatorBar` for each.
    pub fn new(controller: Arc<Controller<HostMemory>>) -> Self {
        Self(
            controller,
            ControllerIdentity::new(),
            AtomicBool::new(false),
        )
    }

    fn left(&self) -> bool {
        // Acquire: pairs with the release store of the thread that left. From then on every register reads as
        // ones, as those of an unplugged device do, and no write may reach a controller that another process
        // could open.
        self.2.load(Ordering::Acquire)
    }
}

impl RegisterAccess for SimulatorBar {
    fn identity(&self) -> &ControllerIdentity {
        &self.1
    }

    fn read32(&self, offset: u32) -> u32 {
        match self.left() {
            true => ALL_ONES,
            false => self.0.read32(offset),
        }
    }

    fn read64(&self, offset: u32) -> u64 {
        match self.left() {
            true => u64::MAX,
            false => self.0.read64(offset),
        }
    }

    fn write32(&self, offset: u32, value: u32) {
        if !self.left() {
            self.0.write32(offset, value);
        }
    }

    fn write64(&self, offset: u32, value: u64) {
        if !self.left() {
            self.0.write64(offset, value);
        }
    }
}

/// A simulated controller and its threads.
pub struct SimulatedDevice {
    // The threads stop before the memory that they reach goes away.
    runner: Mutex<Option<Runner>>,
    bar: SimulatorBar,
    pages: SharedPages,
    name: String,
    threads: usize,
    /// Address and length of each namespace that lies in memory.
    images: Vec<(usize, usize)>,
}

/// Images that were created, until [`take_created`] is called.
static CREATED: Mutex<Vec<CreatedImage>> = Mutex::new(Vec::new());

/// The embedded simulator as a device, and the controller in it.
pub type Embedded = (Arc<dyn Device>, Arc<Controller<HostMemory>>);

/// Opens `PATH[?option=value&...]`, `mem[?...]` or `null[?...]`, the text after `sim:`.
///
/// The options are the simulator's: see [`nvme_sim::config::parse`].
///
/// # Errors
/// [`Error::Usage`] for options, [`Error::File`] for an image that cannot be opened.
pub fn open(text: &str) -> Result<Arc<dyn Device>> {
    embed(text).map(|(device, _)| device)
}

/// Does the same as [`open`], for reading only: images are opened for reading, are shared with other readers, and
/// none is created.
///
/// # Errors
/// As [`open`].
pub fn open_reading(text: &str) -> Result<Arc<dyn Device>> {
    let config = nvme_sim::config::parse_for(text, ImageAccess::Read).map_err(refused)?;
    start(text, config).map(|(device, _)| device)
}

/// Opens the simulator as [`open`] does, and returns its controller, too: for tests that look at both sides.
///
/// # Errors
/// As [`open`].
pub fn embed(text: &str) -> Result<Embedded> {
    start(text, config(text)?)
}

fn start(text: &str, config: Config) -> Result<Embedded> {
    let threads = config.threads;
    let pages = SharedPages::new();
    let images = config.namespaces.iter().filter_map(|one| one.store.span());
    let images = images
        .map(|span| (span.address().addr(), span.len()))
        .collect();
    let created = config.created.clone();
    let started = Controller::new(config, pages.memory())
        .map_err(refused)
        .and_then(|controller| {
            let controller = Arc::new(controller);
            let call = "starting a simulator thread";
            let runner = Runner::try_start(Arc::clone(&controller), threads);
            let runner = runner.map_err(|source| Error::System { call, source })?;
            Ok((controller, runner))
        });
    let (controller, runner) = started.inspect_err(|_| {
        // Images that were made for a controller that there is not.
        created.iter().for_each(CreatedImage::remove);
    })?;
    lock(&CREATED).extend(created);
    let device = Arc::new(SimulatedDevice {
        runner: Mutex::new(Some(runner)),
        bar: SimulatorBar::new(Arc::clone(&controller)),
        pages,
        name: format!("sim:{text}"),
        threads,
        images,
    });
    Ok((device, controller))
}

/// Returns the simulator's configuration in `PATH[?option=value&...]`, `mem[?...]` or `null[?...]`.
///
/// # Errors
/// As [`open`].
pub fn config(text: &str) -> Result<Config> {
    nvme_sim::config::parse(text).map_err(refused)
}

/// Returns the image files that `PATH[?option=value&...]` names, whether they exist or not: none for `mem`, for
/// `null`, and for text that is refused when it is opened.
pub fn images(text: &str) -> Vec<PathBuf> {
    nvme_sim::config::image_paths(text).unwrap_or_default()
}

/// Returns the images that this process has created by opening devices since the last call: for a program that removes
/// them if it fails. An image that another process made while the device was being opened is not among them.
pub fn take_created() -> Vec<CreatedImage> {
    std::mem::take(&mut *lock(&CREATED))
}

/// Prints the findings of the protocol auditor, a line each on standard error: with `audit=on` in the device's
/// options, else nothing.
pub fn report(controller: &Controller<HostMemory>) {
    for finding in controller.findings() {
        eprintln!("audit: {finding}");
    }
}

impl Drop for SimulatedDevice {
    fn drop(&mut self) {
        report(&self.bar.0);
    }
}

/// Translates the error of a configuration that the simulator rejects.
pub fn refused(error: nvme_sim::ConfigError) -> Error {
    match error.errno {
        Some(errno) => {
            let source = match errno {
                libc::EBUSY => io::Error::new(io::ErrorKind::ResourceBusy, error.why),
                _ => io::Error::from_raw_os_error(errno),
            };
            Error::File {
                action: crate::error::OPEN_IMAGE,
                path: error.option.into(),
                source,
            }
        }
        None => Error::usage(
            format!("the device option {} is not usable", error.option),
            error.why,
        ),
    }
}

impl Device for SimulatedDevice {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn describe(&self) -> String {
        let threads = if self.threads == 1 {
            "thread"
        } else {
            "threads"
        };
        format!("embedded simulator on {} CPU {threads}", self.threads)
    }

    fn registers(&self) -> &(dyn RegisterAccess + Sync) {
        &self.bar
    }

    fn doorbells(&self) -> DoorbellMap {
        DoorbellMap::of_simulator(self.bar.0.doorbells())
    }

    fn map_dma(&self, pages: &Arc<DmaPages>) -> Result<Iova> {
        match self.gone() {
            Some(cause) => Err(Error::Gone { cause }),
            None => self.pages.map(pages),
        }
    }

    fn map_peer(&self, memory: PeerMemory) -> Result<Iova> {
        let copier = (memory.copier)(&self.images, Arc::clone(&self.bar.0) as _)?;
        self.pages.map_peer(memory.address, memory.bytes, copier)
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()> {
        self.pages.unmap(iova, bytes)
    }

    fn gone(&self) -> Option<String> {
        let cause = || format!("{}: this process left the controller", self.name);
        self.bar.left().then(cause)
    }

    /// Stops the threads, then closes the images, so that they can be opened again. The flag is set first:
    /// users of the registers must see all ones before the controller behind them is gone.
    fn leave(&self) {
        self.bar.2.store(true, Ordering::Release);
        let mut runner = lock(&self.runner);
        drop(runner.take());
        self.bar.0.close_images();
    }
}
