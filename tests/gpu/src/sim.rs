//! The simulated controller as a device of the host shell, with chosen faults and image.
// UNSAFETY: gives the simulator memory that others use too.
#![allow(unsafe_code)]

use crate::audit;
use nvme_core::RegisterAccess;
use nvme_core::spec::Iova;
use nvme_gpu_kernel::work::data_word;
use nvme_host::cuda::{DeviceMemory, SimulatorCopier};
use nvme_host::sim::SimulatorBar;
use nvme_host::{Device, DmaPages, DoorbellMap, Error, Result};
use nvme_sim::{BlockStore, Controller, HostMemory, MemoryStore, NamespaceConfig, Rule, Runner};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a block of the namespace.
pub const BLOCK: u32 = 512;
/// Seed of the image's words: see [`data_word`].
pub const IMAGE_SEED: u64 = 0x5EED;

/// The controller to make.
#[derive(Clone, Copy, Debug)]
pub struct Model<'a> {
    /// Bytes of the image; 0 for a namespace that keeps nothing.
    pub image: u64,
    /// CAP.DSTRD.
    pub dstrd: u8,
    /// Faults in the simulator's words, as `drop@op=read,nth=5`.
    pub faults: &'a [String],
    /// Threads that serve the queues.
    pub threads: usize,
}

/// A controller and its threads. What is mapped stays mapped.
pub struct Sim {
    // The threads stop before the memory that they reach goes away.
    _runner: Runner,
    bar: SimulatorBar,
    memory: HostMemory,
    kept: Mutex<Vec<Arc<DmaPages>>>,
    /// Address and length of the image.
    image: Option<(usize, usize)>,
    /// Address and length of the GPU memory that the controller reaches.
    gpu_memory: Mutex<Option<(u64, u64)>>,
    /// The rules that its faults break.
    explained: Vec<Rule>,
}

impl Sim {
    /// Starts it, watched by the protocol auditor or not; word i of the image is
    /// `data_word(IMAGE_SEED, i)`.
    pub fn start(model: &Model<'_>, is_audited: bool) -> std::result::Result<Arc<Self>, String> {
        let faults: String = model.faults.iter().map(|f| format!("&fault={f}")).collect();
        let text = format!(
            "null?block={BLOCK}&dstrd={}&queues=128&mqes=4096&mdts=10{faults}",
            model.dstrd
        );
        let mut config = nvme_sim::config::parse(&text).map_err(|error| error.to_string())?;
        config.audit = is_audited;
        let explained = config.faults.breaks();
        let mut place = None;
        if model.image != 0 {
            let store = MemoryStore::new(model.image).ok_or("no memory for the image")?;
            let words = (0..model.image / 8).map(|index| data_word(IMAGE_SEED, index));
            let image: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            store
                .write_at(0, &image)
                .map_err(|error| error.to_string())?;
            let words = store.span().and_then(|span| span.as_words());
            place = words.map(|words| (words.as_ptr().addr(), size_of_val(words)));
            config.namespaces = vec![NamespaceConfig::new(BLOCK, Box::new(store))];
        }
        let memory = HostMemory::new();
        let controller = Controller::new(config, memory.clone()).map_err(|e| e.to_string())?;
        let controller = Arc::new(controller);
        let runner = Runner::try_start(Arc::clone(&controller), model.threads)
            .map_err(|error| format!("a simulator thread: {error}"))?;
        Ok(Arc::new(Self {
            _runner: runner,
            bar: SimulatorBar::new(controller),
            memory,
            kept: Mutex::default(),
            image: place,
            gpu_memory: Mutex::default(),
            explained,
        }))
    }

    /// Lets the controller reach GPU memory, at the GPU's own addresses, by copies.
    pub fn map_gpu_memory(&self, memory: &Arc<DeviceMemory>) -> Result<()> {
        let owner = Arc::clone(&self.bar.0);
        let copier = Arc::new(SimulatorCopier::new(memory, self.image.as_slice(), owner)?);
        let address = memory.address();
        let mapped = self
            .memory
            .map_peer(address, address, memory.len() as u64, copier);
        mapped.map_err(|error| Error::Device {
            cause: error.to_string(),
            remedy: "report this".to_owned(),
        })?;
        let mut known = self
            .gpu_memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *known = Some((address, memory.len() as u64));
        Ok(())
    }

    /// Returns CAP.DSTRD.
    pub fn dstrd(&self) -> u8 {
        self.bar.0.doorbells().dstrd()
    }

    /// Address of the doorbell at register `offset`.
    pub fn doorbell(&self, offset: u32) -> u64 {
        let start = self.bar.0.doorbells().as_ptr().addr() as u64;
        start + u64::from(offset - nvme_core::spec::register::offset::DOORBELLS)
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        audit::keep(&self.bar.0, &self.explained);
        // The copier keeps the controller, and the controller's memory the copier.
        let known = self
            .gpu_memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((address, bytes)) = *known {
            self.memory.unmap(address, bytes);
        }
    }
}

impl Device for Sim {
    fn name(&self) -> String {
        "sim".to_owned()
    }

    fn describe(&self) -> String {
        "simulator of the GPU tests".to_owned()
    }

    fn registers(&self) -> &(dyn RegisterAccess + Sync) {
        &self.bar
    }

    fn doorbells(&self) -> DoorbellMap {
        let doorbells = self.bar.0.doorbells();
        let start = doorbells.as_ptr().cast_mut().cast::<u32>();
        // SAFETY: the words are page-aligned atomics of that many bytes, which live as long as the controller.
        unsafe { DoorbellMap::new(start, doorbells.bytes()) }
    }

    fn map_dma(&self, pages: &Arc<DmaPages>) -> Result<Iova> {
        let address = pages.start().addr() as u64;
        // SAFETY: the pages are kept as long as this device, which owns the controller's threads; both
        // sides use them through atomics, or while no command is in flight.
        let mapped = unsafe { self.memory.map(address, pages.start(), pages.len() as u64) };
        mapped.map_err(|error| Error::Device {
            cause: error.to_string(),
            remedy: "report this".to_owned(),
        })?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push(Arc::clone(pages));
        Ok(Iova(address))
    }

    fn unmap_dma(&self, iova: Iova, bytes: usize) -> Result<()> {
        self.memory.unmap(iova.0, bytes as u64);
        Ok(())
    }
}
