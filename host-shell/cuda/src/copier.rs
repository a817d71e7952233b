//! The simulator's access to GPU memory: the copy engine copies the data before the completion is posted.
//!
//! The simulator's threads put their copies into one stream for each direction and wait for their own: the engine
//! continues with the next copy without a pause between streams. All copies that a thread has at once are passed to the
//! driver in one call, because the engine pauses for about 3 us between two calls' copies.
// UNSAFETY: copies take raw addresses.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::memory::DeviceMemory;
use super::registered::RegisteredMemory;
use super::stream::{Stream, StreamEvent};
use nvme_driver::error::Result;
use nvme_driver::lock::lock;
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Copies between the simulator and one stretch of GPU memory.
pub struct SimulatorCopier {
    memory: Arc<DeviceMemory>,
    into: Mutex<Stream>,
    out: Mutex<Stream>,
    idle: Mutex<Vec<StreamEvent>>,
    lost: AtomicBool,
    _images: Vec<Arc<RegisteredMemory>>,
}

impl std::fmt::Debug for SimulatorCopier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatorCopier")
            .field("address", &self.memory.address())
            .field("lost", &self.lost)
            .finish()
    }
}

/// Largest image in bytes that is registered: pinned memory is a resource of the whole machine.
const MOST_REGISTERED: usize = 1 << 30;

/// Images (address, bytes) that are registered now: the driver takes each once, for all copiers and GPUs.
static REGISTERED: Mutex<BTreeMap<(usize, usize), Weak<RegisteredMemory>>> =
    Mutex::new(BTreeMap::new());

/// Registers `image` (address, bytes), which is mapped as long as `owner` lives, unless it is registered.
fn register(
    gpu: &Arc<Gpu>,
    image: (usize, usize),
    owner: &Arc<dyn Any + Send + Sync>,
) -> Result<Arc<RegisteredMemory>> {
    let mut all = lock(&REGISTERED);
    if let Some(registered) = all.get(&image).and_then(Weak::upgrade) {
        return Ok(registered);
    }
    // SAFETY: the image is mapped as long as its owner lives, and the registration holds the owner, so the GPU
    // never reaches memory that was unmapped or reused.
    let registered = unsafe { RegisteredMemory::image(gpu, image.0, image.1, Arc::clone(owner)) }?;
    let registered = Arc::new(registered);
    all.retain(|_, held| held.strong_count() > 0);
    all.insert(image, Arc::downgrade(&registered));
    Ok(registered)
}

impl SimulatorCopier {
    /// Creates a copier for `memory`. `images` (address, bytes) are the source and destination of the data on
    /// the host, mapped as long as `owner` lives. Images of a GiB at most are registered where the driver
    /// supports that, so that the copy engine accesses them directly; data of other images passes through
    /// bounce buffers of the driver.
    ///
    /// # Errors
    /// [`Error::Environment`](nvme_driver::Error::Environment) without streams.
    pub fn new(
        memory: &Arc<DeviceMemory>,
        images: &[(usize, usize)],
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let gpu = memory.gpu();
        let small = images.iter().filter(|image| image.1 <= MOST_REGISTERED);
        let registered = small.filter_map(|image| register(gpu, *image, &owner).ok());
        // A copy has to lie in one registration, or in none.
        let images = registered.filter(|one| one.is_one_piece()).collect();
        Ok(Self {
            memory: Arc::clone(memory),
            into: Mutex::new(Stream::new(gpu)?),
            out: Mutex::new(Stream::new(gpu)?),
            idle: Mutex::default(),
            lost: AtomicBool::new(false),
            _images: images,
        })
    }

    /// Queues copies in `stream` and waits for their end.
    fn run(&self, stream: &Mutex<Stream>, copy: impl FnOnce(&Stream) -> Result<()>) {
        let queued = || -> Result<StreamEvent> {
            let idle = lock(&self.idle).pop();
            let event = idle.map_or_else(|| StreamEvent::untimed(self.memory.gpu()), Ok)?;
            let stream = lock(stream);
            copy(&stream)?;
            event.record_in(&stream)?;
            Ok(event)
        };
        let done = queued().and_then(|event| {
            event.wait()?;
            lock(&self.idle).push(event);
            Ok(())
        });
        if done.is_err() {
            // Release: pairs with the acquire in `is_lost`. The simulated controller asks for it after each
            // transfer, and must then fail the command rather than complete it with data that was never copied.
            self.lost.store(true, Ordering::Release);
        }
    }
}

impl nvme_sim::PeerAccess for SimulatorCopier {
    unsafe fn write(&self, address: u64, from: *const u8, len: usize) {
        // SAFETY: the caller vouches for both ranges; the copy ends before this returns.
        self.run(&self.into, |stream| unsafe {
            stream.copy_in(address, from, len)
        });
    }

    unsafe fn write_all(&self, copies: &[nvme_sim::PeerCopy]) {
        let copies = copies
            .iter()
            .map(|copy| (copy.address, copy.from, copy.len));
        // SAFETY: as in `write`, for each.
        self.run(&self.into, |stream| unsafe { stream.copy_all_in(copies) });
    }

    unsafe fn read(&self, address: u64, into: *mut u8, len: usize) {
        // SAFETY: as in `write`.
        self.run(&self.out, |stream| unsafe {
            stream.copy_out(into, address, len)
        });
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }
}
