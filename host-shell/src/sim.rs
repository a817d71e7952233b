//! The embedded simulator as a device: a controller in this process, driven by threads that poll its
//! doorbell memory. Nothing of the driver above knows the difference.

use crate::bar::DoorbellMap;
use crate::device::Device;
use crate::dma::{Pages, SharedPages};
use crate::error::{Error, Result};
use nvme_core::Registers;
use nvme_core::spec::Iova;
use nvme_sim::{Controller, HostMemory, Runner};
use std::io;
use std::sync::Arc;

/// The registers of a simulated controller in this process.
pub struct Bar(pub Arc<Controller<HostMemory>>);

impl Registers for Bar {
    fn read32(&self, offset: u32) -> u32 {
        self.0.read32(offset)
    }

    fn read64(&self, offset: u32) -> u64 {
        self.0.read64(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        self.0.write32(offset, value);
    }

    fn write64(&self, offset: u32, value: u64) {
        self.0.write64(offset, value);
    }
}

/// A simulated controller and its threads.
pub struct Simulator {
    // The threads stop before the memory that they reach goes away.
    _runner: Runner,
    bar: Bar,
    pages: SharedPages,
    name: String,
    threads: usize,
    /// Address and length of each namespace that lies in memory.
    #[cfg(feature = "cuda")]
    images: Vec<(usize, usize)>,
    #[cfg(feature = "cuda")]
    registered: crate::cuda::Images,
}

/// The embedded simulator as a device, and the controller in it.
pub type Embedded = (Arc<dyn Device>, Arc<Controller<HostMemory>>);

/// Opens `PATH[?option=value&...]`, `mem[?...]` or `null[?...]`, the text after `sim:`.
///
/// The options are the simulator's (see [`nvme_sim::config::parse`]), and `threads=N` for the number of
/// threads that serve the queues, 1 without.
///
/// # Errors
/// [`Error::Usage`] for options, [`Error::File`] for an image that cannot be opened.
pub fn open(text: &str) -> Result<Arc<dyn Device>> {
    embed(text).map(|(device, _)| device)
}

/// As [`open`], and the controller in it: for who wants to look behind the driver's back.
///
/// # Errors
/// As [`open`].
pub fn embed(text: &str) -> Result<Embedded> {
    let (config, threads) = config(text)?;
    let pages = SharedPages::new();
    #[cfg(feature = "cuda")]
    let images = config.namespaces.iter().filter_map(|one| one.store.span());
    #[cfg(feature = "cuda")]
    let images = images
        .map(|span| (span.address().addr(), span.len()))
        .collect();
    let controller = Arc::new(Controller::new(config, pages.memory()).map_err(refused)?);
    let runner =
        Runner::try_start(Arc::clone(&controller), threads).map_err(|source| Error::System {
            call: "starting a simulator thread",
            source,
        })?;
    let device = Arc::new(Simulator {
        _runner: runner,
        bar: Bar(Arc::clone(&controller)),
        pages,
        name: format!("sim:{text}"),
        threads,
        #[cfg(feature = "cuda")]
        images,
        #[cfg(feature = "cuda")]
        registered: crate::cuda::Images::default(),
    });
    Ok((device, controller))
}

/// The simulator's configuration in `PATH[?option=value&...]`, `mem[?...]` or `null[?...]`, and the
/// number of threads, 1 to 64.
///
/// # Errors
/// As [`open`].
pub fn config(text: &str) -> Result<(nvme_sim::Config, usize)> {
    let (text, threads) = take_threads(text)?;
    let config = nvme_sim::config::parse(&text).map_err(refused)?;
    Ok((config, threads))
}

/// Takes `threads=N` out of the options.
fn take_threads(text: &str) -> Result<(String, usize)> {
    let Some((place, options)) = text.split_once('?') else {
        return Ok((text.to_owned(), 1));
    };
    let mut threads = 1;
    let mut rest = Vec::new();
    for option in options.split('&') {
        match option.strip_prefix("threads=") {
            Some(value) => {
                threads = value
                    .parse()
                    .ok()
                    .filter(|threads| (1..=64).contains(threads))
                    .ok_or_else(|| {
                        Error::usage(
                            format!("threads={value} is not a number of threads"),
                            "use 1 to 64",
                        )
                    })?;
            }
            None => rest.push(option),
        }
    }
    let text = if rest.is_empty() {
        place.to_owned()
    } else {
        format!("{place}?{}", rest.join("&"))
    };
    Ok((text, threads))
}

/// Prints what the protocol auditor has found, a line each on standard error: with `audit=on` in the
/// device's options, else nothing.
pub fn report(controller: &Controller<HostMemory>) {
    for finding in controller.findings() {
        eprintln!("audit: {finding}");
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        report(&self.bar.0);
    }
}

/// What the command line says to a configuration that the simulator refuses.
pub fn refused(error: nvme_sim::ConfigError) -> Error {
    match error.errno {
        Some(errno) => {
            let source = io::Error::from_raw_os_error(errno);
            Error::File {
                action: crate::error::OPEN_IMAGE,
                path: error.option.into(),
                source,
            }
        }
        None => Error::usage(format!("device option {}", error.option), error.why),
    }
}

impl Device for Simulator {
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

    fn registers(&self) -> &(dyn Registers + Sync) {
        &self.bar
    }

    fn doorbells(&self) -> DoorbellMap {
        DoorbellMap::of_simulator(self.bar.0.doorbells())
    }

    fn map_dma(&self, pages: &Arc<Pages>) -> Result<Iova> {
        self.pages.map(pages)
    }

    #[cfg(feature = "cuda")]
    fn map_gpu(&self, memory: &Arc<crate::cuda::DeviceMemory>) -> Result<Iova> {
        let owner = Arc::clone(&self.bar.0) as _;
        let copier = crate::cuda::Copier::new(memory, &self.registered, &self.images, owner)?;
        self.pages
            .map_peer(memory.address(), memory.len(), Arc::new(copier))
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()> {
        self.pages.unmap(iova, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::take_threads;

    #[test]
    fn threads_are_taken_out_of_the_options() {
        let taken = |text| take_threads(text).unwrap();
        assert_eq!(taken("a.img"), ("a.img".to_owned(), 1));
        assert_eq!(taken("a.img?threads=2"), ("a.img".to_owned(), 2));
        assert_eq!(
            taken("mem?size=1MiB&threads=3&block=512"),
            ("mem?size=1MiB&block=512".to_owned(), 3)
        );
        assert!(take_threads("mem?threads=0").is_err());
    }
}
