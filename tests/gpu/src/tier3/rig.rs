//! A controller kernel, queues in GPU memory, and data there.
// UNSAFETY: launches kernels over raw addresses.
#![allow(unsafe_code)]

use super::controller::{Controller, Image, Model};
use crate::bench::Bench;
use crate::rig::{CANARY, Outcome, Rigged};
use crate::sim::BLOCK;
use gpu_peer::{Shared, Window};
use nvme_core::spec::{Iova, register};
use nvme_gpu_kernel::work::{LaunchArguments, LaunchReport};
use nvme_host::cuda::{DeviceMemory, GpuRings, Kernel, RingShape};

/// Bytes before and after the data that nothing may touch.
const GUARD: usize = 1 << 16;
/// The most result cells of a launch, and the most tokens.
const CELLS: usize = 1 << 19;

/// The driver's side is the GPU of `bench`; the controller's is that of the image.
pub struct PeerRig<'b> {
    bench: &'b Bench,
    // Dropped first: the controller must be stopped before the memory that it uses is freed.
    controller: Controller<'b>,
    queues: u32,
    rings: GpuRings,
    data: DeviceMemory,
    /// The data memory between launches.
    copy: Vec<u8>,
    cells: DeviceMemory,
    report: DeviceMemory,
    accounts: DeviceMemory,
    tokens: DeviceMemory,
}

fn text(error: nvme_host::Error) -> String {
    error.to_string()
}

impl<'b> PeerRig<'b> {
    /// Brings a controller up with queues of `shape` and `bytes` bytes of data memory, for launches of up to
    /// `commands` commands.
    pub fn new(
        bench: &'b Bench,
        image: &'b Image,
        shape: RingShape,
        model: Model,
        bytes: usize,
        commands: u64,
    ) -> Result<Self, String> {
        let controller = Controller::new(image, model)?;
        let bells = |qid: nvme_core::spec::Qid| {
            [
                controller.doorbell(register::sq_tail_doorbell(qid.0, model.dstrd)),
                controller.doorbell(register::cq_head_doorbell(qid.0, model.dstrd)),
            ]
        };
        let gpu = &bench.gpu;
        // The controller uses the same addresses for the other GPU's memory as that GPU does.
        let rings = GpuRings::new(gpu, shape, |memory| Ok(Iova(memory.address())), bells);
        let memory = |bytes| DeviceMemory::new(gpu, bytes).map_err(text);
        let mut rig = Self {
            bench,
            controller,
            queues: shape.queues,
            rings: rings.map_err(text)?,
            data: memory(bytes + 2 * GUARD)?,
            copy: vec![CANARY; bytes + 2 * GUARD],
            cells: memory(CELLS * 8)?,
            report: memory(size_of::<LaunchReport>())?,
            accounts: memory(commands.max(bytes as u64 / 512) as usize * 4)?,
            tokens: memory(CELLS * 12)?,
        };
        let window = |memory: &DeviceMemory| Window {
            start: memory.address(),
            bytes: memory.len() as u64,
        };
        let windows = [window(rig.rings.memory()), window(&rig.data)];
        rig.controller.start(windows)?;
        let identity = rig.controller.registers().identity();
        rig.rings.init(identity).map_err(text)?;
        let plans = rig.rings.plans();
        rig.controller.bring_up(&plans, |_| Ok(()))?;
        Ok(rig)
    }

    /// Ends the controller; returns its counts.
    pub fn stop(&mut self) -> Result<Shared, String> {
        self.controller.stop()
    }

    /// Returns every byte of the medium, once the controller has ended.
    pub fn medium(&self) -> Result<Vec<u8>, String> {
        self.controller.medium()
    }

    pub fn data_mut(&mut self) -> &mut [u8] {
        let end = self.copy.len() - GUARD;
        &mut self.copy[GUARD..end]
    }
}

impl Rigged for PeerRig<'_> {
    fn launch(&self) -> Result<LaunchArguments, String> {
        let data = self.data.address() + GUARD as u64;
        let bytes = self.copy.len() - 2 * GUARD;
        Ok(LaunchArguments {
            queues: self.rings.address(),
            cells: self.cells.address(),
            report: self.report.address(),
            tokens: self.tokens.address(),
            data,
            data_iova: data,
            data_bytes: bytes as u64,
            queue_count: self.queues,
            cell_count: CELLS as u32,
            nsid: 1,
            opcode: 2,
            blocks: 1,
            block_shift: BLOCK.trailing_zeros(),
            depth: 1,
            lanes: 32,
            units: (bytes / BLOCK as usize) as u64,
            timeout_ns: 1_000_000_000,
            ..LaunchArguments::default()
        })
    }

    fn run(
        &mut self,
        kernel: Kernel,
        grid: u32,
        block: u32,
        mut launch: LaunchArguments,
    ) -> Result<Outcome, String> {
        let bytes = launch.commands as usize * 4;
        if bytes > self.accounts.len() {
            return Err(format!("{} commands are too many", launch.commands));
        }
        self.accounts.zero().map_err(text)?;
        self.report.zero().map_err(text)?;
        launch.accounts = self.accounts.address();
        self.data.upload(0, &self.copy).map_err(text)?;
        // SAFETY: every address in the launch is memory that this rig owns and outlives the wait; a
        // kernel that does not end ends the program.
        unsafe {
            self.bench
                .kernels
                .launch(&self.bench.stream, kernel, grid, block, &launch)
                .map_err(text)?;
        }
        self.bench.wait();
        self.data.download(0, &mut self.copy).map_err(text)?;
        let mut words = vec![0; bytes];
        self.accounts.download(0, &mut words).map_err(text)?;
        let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let mut report = [0; size_of::<LaunchReport>()];
        self.report.download(0, &mut report).map_err(text)?;
        Ok(Outcome {
            // SAFETY: the slice has as many bytes as the struct, all of whose fields are integers.
            report: unsafe { std::ptr::read_unaligned(report.as_ptr().cast()) },
            accounts: words.chunks_exact(4).map(word).collect(),
        })
    }

    fn recover(&mut self) -> Result<u32, String> {
        let (rings, mut ended) = (&self.rings, 0);
        self.controller.bring_up(&rings.plans(), |proof| {
            ended = rings.recover(proof).map_err(text)?;
            Ok(())
        })?;
        self.cells.zero().map_err(text)?;
        Ok(ended)
    }

    fn in_flight(&self) -> Result<u32, String> {
        self.rings.in_flight().map_err(text)
    }

    fn fill(&mut self) {
        self.copy.fill(CANARY);
    }

    fn data(&self) -> &[u8] {
        &self.copy[GUARD..self.copy.len() - GUARD]
    }

    fn guards_hold(&self) -> bool {
        let end = self.copy.len() - GUARD;
        let mut guards = self.copy[..GUARD].iter().chain(&self.copy[end..]);
        guards.all(|&byte| byte == CANARY)
    }
}
