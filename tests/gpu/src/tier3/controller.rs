//! The controller kernel: its memory, its launch, its properties, and its end.
// UNSAFETY: launches a kernel over raw addresses; the properties are raw memory that it shares.
#![allow(unsafe_code)]

use crate::admin::{self, AdminQueue};
use crate::limits::{finish, give_up, limit};
use crate::sim::{BLOCK, IMAGE_SEED};
use gpu_peer::{Args, BAR_BYTES, Plan, QUEUE_BYTES, STOP, Shared, Window};
use nvme_core::bringup::QueuePlan;
use nvme_core::spec::{Iova, register};
use nvme_core::{Quiesced, RegisterAccess, RegisterBlock};
use nvme_gpu_kernel::work::data_word;
use nvme_host::DmaPages;
use nvme_host::cuda::{DeviceMemory, Gpu, KernelFunction, Module, RegisteredMemory, Stream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The kernel, loaded for the GPU that plays the controller.
pub struct Image {
    pub gpu: Arc<Gpu>,
    module: Module,
    function: KernelFunction,
}

impl Image {
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self, String> {
        let module = Module::embedded(gpu, gpu_peer::PTX.as_bytes()).map_err(text)?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            function: module.function("nvme_peer").map_err(text)?,
            module,
        })
    }
}

/// The controller to make.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub queues: u32,
    pub dstrd: u8,
    /// Bytes of the medium; word i holds `data_word(IMAGE_SEED, i)`.
    pub image: u64,
    pub plan: Plan,
    /// Warps that serve I/O queues, 1 to `queues`.
    pub warps: u32,
    /// Time after which the kernel ends in any case.
    pub timeout: Duration,
}

/// Pages of the host that the kernel reaches.
struct Reached {
    registered: RegisteredMemory,
    pages: Arc<DmaPages>,
}

impl Reached {
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, String> {
        let pages = Arc::new(DmaPages::new(bytes).map_err(text)?);
        Ok(Self {
            registered: RegisteredMemory::pages(gpu, &pages).map_err(text)?,
            pages,
        })
    }

    fn window(&self) -> Window {
        Window {
            start: self.registered.address(),
            bytes: self.pages.len() as u64,
        }
    }
}

/// A controller that runs, or is to run, as a kernel.
pub struct Controller<'i> {
    image: &'i Image,
    model: Model,
    stream: Stream,
    registers: RegisterBlock<'static>,
    bar: Reached,
    admin: Reached,
    admin_queue: Option<AdminQueue>,
    doorbells: DeviceMemory,
    own: DeviceMemory,
    medium: DeviceMemory,
    runs: bool,
}

fn text(error: nvme_host::Error) -> String {
    error.to_string()
}

impl<'i> Controller<'i> {
    /// Allocates the controller's memory. [`start`](Self::start) launches it.
    pub fn new(image: &'i Image, model: Model) -> Result<Self, String> {
        let gpu = &image.gpu;
        let memory = |bytes| DeviceMemory::new(gpu, bytes).map_err(text);
        let bar = Reached::new(gpu, BAR_BYTES)?;
        // SAFETY: the block is the first of the two pages, which live as long as the registers; nothing else accesses
        // it.
        let registers = unsafe { RegisterBlock::from_raw(bar.pages.start(), 4096) };
        let medium = memory(model.image as usize)?;
        let words = (0..model.image / 8).map(|index| data_word(IMAGE_SEED, index));
        let image_bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        medium.upload(0, &image_bytes).map_err(text)?;
        let stride = 4usize << model.dstrd;
        Ok(Self {
            image,
            model,
            stream: Stream::new(gpu).map_err(text)?,
            registers,
            bar,
            admin: Reached::new(gpu, admin::BYTES)?,
            admin_queue: None,
            doorbells: memory(2 * (model.queues as usize + 1) * stride)?,
            own: memory(QUEUE_BYTES * (model.queues as usize + 1))?,
            medium,
            runs: false,
        })
    }

    /// Returns the GPU's address of the doorbell at register `offset`: of an I/O queue.
    pub fn doorbell(&self, offset: u32) -> u64 {
        self.doorbells.address() + u64::from(offset - register::offset::DOORBELLS)
    }

    pub fn registers(&self) -> &(dyn RegisterAccess + Sync) {
        &self.registers
    }

    /// Launches the kernel, which may access `memories` besides its own, and waits until it runs.
    pub fn start(&mut self, memories: [Window; 2]) -> Result<(), String> {
        let model = &self.model;
        let args = Args {
            bar: self.bar.registered.address(),
            doorbells: self.doorbells.address(),
            own: self.own.address(),
            medium: self.medium.address(),
            blocks: model.image / u64::from(BLOCK),
            timeout_ns: model.timeout.as_nanos() as u64,
            windows: [
                memories[0],
                memories[1],
                self.admin.window(),
                Window::default(),
            ],
            plan: model.plan,
            block_shift: BLOCK.trailing_zeros(),
            queues: model.queues,
            dstrd: u32::from(model.dstrd),
            warps: model.warps + 1,
        };
        // SAFETY: the kernel takes one `Args`; its addresses are memory of this controller, which outlives it, and
        // of the caller, who stops it first.
        let launched = unsafe {
            self.image
                .module
                .launch(&self.stream, self.image.function, args.warps, 32, &args)
        };
        launched.map_err(text)?;
        self.runs = true;
        let began = Instant::now();
        while self.registers.read32(register::offset::VS) == 0 {
            if began.elapsed() > limit() {
                give_up("the controller kernel does not begin");
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Brings it up with the queues of `plans`; `disabled` runs while it touches no memory.
    pub fn bring_up(
        &mut self,
        plans: &[QueuePlan],
        disabled: impl FnMut(&Quiesced<'_>) -> Result<(), String>,
    ) -> Result<(), String> {
        let bell = self.bar.pages.start().wrapping_add(4096).addr() as u64;
        let place = admin::Place {
            registers: &self.registers,
            doorbells: [bell, bell + 4],
            pages: &self.admin.pages,
            iova: Iova(self.admin.registered.address()),
        };
        self.admin_queue = Some(admin::bring_up(&place, plans, disabled)?);
        Ok(())
    }

    /// Ends the kernel; returns the counts of its warps.
    pub fn stop(&mut self) -> Result<Shared, String> {
        if self.runs {
            let stop = self.bar.pages.start().wrapping_add(STOP).cast::<u32>();
            // SAFETY: the word is inside our own pages; the kernel only reads it.
            unsafe { stop.write_volatile(1) };
            finish(&self.stream);
            self.runs = false;
        }
        let mut bytes = [0; size_of::<Shared>()];
        self.own.download(0, &mut bytes).map_err(text)?;
        // SAFETY: the slice has as many bytes as the struct, all of whose fields are integers.
        Ok(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }

    /// Returns the medium, while the kernel does not run.
    pub fn medium(&self) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; self.model.image as usize];
        self.medium.download(0, &mut bytes).map_err(text)?;
        Ok(bytes)
    }
}

impl Drop for Controller<'_> {
    fn drop(&mut self) {
        // The counts are not needed here.
        let _ = self.stop();
    }
}
