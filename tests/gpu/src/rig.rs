//! One simulated controller with queues for the GPU, brought up by the core's own machine.
// UNSAFETY: rings, doorbells and data are raw memory that a GPU and a controller share.
#![allow(unsafe_code)]

mod states;

use crate::admin::{self, AdminQueue};
use crate::bench::{Bench, Tier};
use crate::sim::{BLOCK, Model, Sim};
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::words as state_words;
use nvme_core::spec::register;
use nvme_gpu_kernel::QueueArray;
use nvme_gpu_kernel::work::{LaunchArguments, LaunchReport};
use nvme_host::cuda::{DeviceMemory, Kernel, RegisteredMemory};
use nvme_host::relay::DoorbellRelay;
use nvme_host::{Device, DmaPages};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// 64-bit words of list memory for each slot: chained lists for up to 4 MiB.
const LIST_WORDS: usize = 2048;
/// Bytes before and after the data that nothing may touch.
const GUARD: usize = 1 << 16;
/// Content of untouched memory.
pub const CANARY: u8 = 0xC5;
/// The most result cells of a launch, and the most tokens.
const CELLS: usize = 1 << 21;
const TOKENS: usize = CELLS;

/// Queues and memory.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub tier: Tier,
    pub queues: u32,
    pub entries: u32,
    /// Command slots, at most `entries` - 1.
    pub slots: u32,
    /// Position at which the counters start, a multiple of twice `entries`.
    pub start: u32,
    /// Bytes of data memory.
    pub data: usize,
}

/// A controller, queues on it, and data.
pub trait Rigged {
    /// Returns a launch over all queues and the whole data memory, of reads of one block each.
    fn launch(&self) -> Result<LaunchArguments, String>;

    /// Runs a kernel to its end: it bounds its own time.
    fn run(
        &mut self,
        kernel: Kernel,
        grid: u32,
        block: u32,
        launch: LaunchArguments,
    ) -> Result<Outcome, String>;

    /// Resets the controller, ends what is in flight and creates the queues again.
    ///
    /// Returns how many commands were in flight.
    fn recover(&mut self) -> Result<u32, String>;

    /// Returns the number of commands in flight on all queues, by the state.
    fn in_flight(&self) -> Result<u32, String>;

    /// Fills the data and the memory around it with the canary.
    fn fill(&mut self);

    /// Returns the data memory.
    fn data(&self) -> &[u8];

    /// Returns whether everything around the data still holds the canary.
    fn guards_hold(&self) -> bool;
}

/// Results of a launch.
pub struct Outcome {
    pub report: LaunchReport,
    /// The end of each command: see [`nvme_gpu_kernel::work::account`].
    pub accounts: Vec<u32>,
}

/// Memory that the host, the controller and the GPU have.
struct Shared {
    pages: Arc<DmaPages>,
    registered: RegisteredMemory,
}

impl Shared {
    fn new(bench: &Bench, sim: &Sim, bytes: usize) -> Result<Self, String> {
        let pages = Arc::new(DmaPages::shared(bytes).map_err(text)?);
        sim.map_dma(&pages).map_err(text)?;
        let registered = RegisteredMemory::pages(&bench.gpu, &pages).map_err(text)?;
        Ok(Self { pages, registered })
    }

    /// Address on the host, which is the controller's too.
    fn host(&self) -> u64 {
        self.pages.start().addr() as u64
    }
}

/// The controller, its queues and the data.
pub struct Rig<'b> {
    bench: &'b Bench,
    sim: Arc<Sim>,
    _relay: Option<Arc<DoorbellRelay>>,
    _doorbells: RegisteredMemory,
    shape: Shape,
    rings: Shared,
    data: Shared,
    /// The data memory if it is the GPU's; `data` is a copy of it between launches then.
    gpu_data: Option<Arc<DeviceMemory>>,
    admin: Arc<DmaPages>,
    admin_queue: Option<AdminQueue>,
    /// The queues by host addresses; `state` is the GPU's.
    words: Vec<QueueWords>,
    device_words: DeviceMemory,
    states: DeviceMemory,
    cells: DeviceMemory,
    report: DeviceMemory,
    accounts: Option<DeviceMemory>,
    tokens: DeviceMemory,
    pages: Option<DeviceMemory>,
}

fn text(error: nvme_host::Error) -> String {
    error.to_string()
}

impl<'b> Rig<'b> {
    /// Brings the controller up and creates the queues.
    pub fn new(bench: &'b Bench, shape: Shape, model: &Model<'_>) -> Result<Self, String> {
        let sim = Sim::start(model, bench.audited.next())?;
        let device: Arc<dyn Device> = Arc::clone(&sim) as _;
        let queues = shape.queues as u16;
        let (relay, doorbells, bells) = match shape.tier {
            Tier::Relayed => {
                let relay = DoorbellRelay::start(device, queues).map_err(text)?;
                let words = RegisteredMemory::relay(&bench.gpu, &relay).map_err(text)?;
                let address = words.address();
                (Some(relay), words, address)
            }
            Tier::Pinned | Tier::GpuMemory => {
                let registered = RegisteredMemory::doorbells(&bench.gpu, &device).map_err(text)?;
                let address = registered.address();
                (None, registered, address)
            }
        };
        let each = Layout::of(&shape);
        let count = shape.queues as usize;
        let rings = Shared::new(bench, &sim, each.total * count)?;
        let data = Shared::new(bench, &sim, shape.data + 2 * GUARD)?;
        let mut gpu_data = None;
        if shape.tier == Tier::GpuMemory {
            let bytes = shape.data + 2 * GUARD;
            let memory = Arc::new(DeviceMemory::new(&bench.gpu, bytes).map_err(text)?);
            sim.map_gpu_memory(&memory).map_err(text)?;
            gpu_data = Some(memory);
        }
        let admin = Arc::new(DmaPages::new(admin::BYTES).map_err(text)?);
        sim.map_dma(&admin).map_err(text)?;
        let memory = |bytes| DeviceMemory::new(&bench.gpu, bytes).map_err(text);
        let states = memory(state_words(shape.entries) * 4 * count)?;
        let mut rig = Self {
            bench,
            sim,
            _relay: relay,
            _doorbells: doorbells,
            shape,
            rings,
            data,
            gpu_data,
            admin,
            admin_queue: None,
            words: Vec::new(),
            device_words: memory(size_of::<QueueWords>() * count)?,
            states,
            cells: memory(CELLS * 8)?,
            report: memory(size_of::<LaunchReport>())?,
            accounts: None,
            tokens: memory(TOKENS * 12)?,
            pages: None,
        };
        rig.fill();
        rig.describe(bells, model.dstrd)?;
        let admin_queue = rig.bring_up(|_| Ok(()))?;
        rig.admin_queue = Some(admin_queue);
        rig.init_states()?;
        Ok(rig)
    }

    /// Computes the words of every queue, and copies the GPU's words to the GPU.
    fn describe(&mut self, bells: u64, dstrd: u8) -> Result<(), String> {
        let (shape, each) = (self.shape, Layout::of(&self.shape));
        let mut device = Vec::new();
        for index in 0..shape.queues as usize {
            let qid = index as u16 + 1;
            let base = self.rings.host() + (each.total * index) as u64;
            let (tail, head) = (
                register::sq_tail_doorbell(qid, dstrd),
                register::cq_head_doorbell(qid, dstrd),
            );
            let state = self.states.address() + (state_words(shape.entries) * 4 * index) as u64;
            let host = QueueWords {
                sq: base,
                cq: base + each.cq as u64,
                sq_doorbell: self.sim.doorbell(tail),
                cq_doorbell: self.sim.doorbell(head),
                lists: base + each.lists as u64,
                lists_iova: base + each.lists as u64,
                state,
                entries: shape.entries,
                slots: shape.slots,
                list_words: LIST_WORDS as u32,
                page_shift: 12,
                qid: u32::from(qid),
                reserved: 0,
            };
            let gpu = |address| self.rings.registered.translate(address).map_err(text);
            let bell = |offset: u32| bells + u64::from(offset - register::offset::DOORBELLS);
            device.push(QueueWords {
                sq: gpu(host.sq)?,
                cq: gpu(host.cq)?,
                lists: gpu(host.lists)?,
                sq_doorbell: bell(tail),
                cq_doorbell: bell(head),
                ..host
            });
            self.words.push(host);
        }
        self.device_words
            .upload(0, device.as_slice().as_bytes())
            .map_err(text)
    }

    /// Returns the queues and cells, for kernels of users.
    pub fn queues(&self) -> QueueArray {
        QueueArray {
            queues: self.device_words.address(),
            cells: self.cells.address(),
            queue_count: self.shape.queues,
            cell_count: CELLS as u32,
        }
    }

    /// Returns a launch over all queues and the whole data memory, of reads of one block each.
    pub fn launch(&self) -> Result<LaunchArguments, String> {
        let host = self.data.host() + GUARD as u64;
        let (data, data_iova) = match &self.gpu_data {
            Some(memory) => (
                memory.address() + GUARD as u64,
                memory.address() + GUARD as u64,
            ),
            None => (self.data.registered.translate(host).map_err(text)?, host),
        };
        Ok(LaunchArguments {
            queues: self.device_words.address(),
            cells: self.cells.address(),
            report: self.report.address(),
            tokens: self.tokens.address(),
            data,
            data_iova,
            data_bytes: self.shape.data as u64,
            queue_count: self.shape.queues,
            cell_count: CELLS as u32,
            nsid: 1,
            opcode: 2,
            blocks: 1,
            block_shift: BLOCK.trailing_zeros(),
            depth: 1,
            lanes: 32,
            units: (self.shape.data / BLOCK as usize) as u64,
            timeout_ns: 1_000_000_000,
            ..LaunchArguments::default()
        })
    }

    /// Makes the kernel find the data by pages, page i at `order[i]`.
    pub fn scatter(&mut self, order: &[u32], launch: &mut LaunchArguments) -> Result<(), String> {
        let base = self.data.host() + GUARD as u64;
        let table: Vec<u64> = order.iter().map(|&p| base + u64::from(p) * 4096).collect();
        let memory = DeviceMemory::new(&self.bench.gpu, table.len() * 8).map_err(text)?;
        memory
            .upload(0, table.as_slice().as_bytes())
            .map_err(text)?;
        launch.pages = memory.address();
        self.pages = Some(memory);
        Ok(())
    }

    /// Runs a kernel to its end: it bounds its own time.
    pub fn run(
        &mut self,
        kernel: Kernel,
        grid: u32,
        block: u32,
        mut launch: LaunchArguments,
    ) -> Result<Outcome, String> {
        let bytes = launch.commands as usize * 4;
        if self
            .accounts
            .as_ref()
            .is_none_or(|memory| memory.len() < bytes)
        {
            self.accounts = Some(DeviceMemory::new(&self.bench.gpu, bytes).map_err(text)?);
        }
        let accounts = self.accounts.as_ref().ok_or("no accounts")?;
        accounts.zero().map_err(text)?;
        self.report.zero().map_err(text)?;
        launch.accounts = accounts.address();
        if let Some(memory) = &self.gpu_data {
            memory.upload(0, self.whole()).map_err(text)?;
        }
        let bench = self.bench;
        // SAFETY: every address in the launch is memory that this rig owns and outlives the wait; a
        // kernel that does not end ends the program.
        unsafe {
            bench
                .kernels
                .launch(&bench.stream, kernel, grid, block, &launch)
                .map_err(text)?;
        }
        bench.wait();
        if let Some(memory) = self.gpu_data.clone() {
            memory.download(0, self.whole_mut()).map_err(text)?;
        }
        let accounts = self.accounts.as_ref().ok_or("no accounts")?;
        let mut words = vec![0; bytes];
        accounts.download(0, &mut words).map_err(text)?;
        let word = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        Ok(Outcome {
            report: self.report()?,
            accounts: words.chunks_exact(4).map(word).collect(),
        })
    }

    fn report(&self) -> Result<LaunchReport, String> {
        let mut bytes = [0; size_of::<LaunchReport>()];
        self.report.download(0, &mut bytes).map_err(text)?;
        // SAFETY: the slice has as many bytes as the struct, all of whose fields are integers.
        Ok(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }

    /// Returns the data memory and its guards, while no kernel runs.
    fn whole(&self) -> &[u8] {
        let len = self.shape.data + 2 * GUARD;
        // SAFETY: the range is inside the mapping, which lives as long as `self`; no kernel runs between calls, and the
        // tests read bytes that late commands may write only after they were written.
        unsafe { std::slice::from_raw_parts(self.data.pages.start(), len) }
    }

    fn whole_mut(&mut self) -> &mut [u8] {
        let len = self.shape.data + 2 * GUARD;
        // SAFETY: as in `whole`, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.data.pages.start(), len) }
    }

    /// Returns the data memory.
    pub fn data(&self) -> &[u8] {
        &self.whole()[GUARD..GUARD + self.shape.data]
    }

    /// Returns the data memory for writing, while no command is in flight.
    pub fn data_mut(&mut self) -> &mut [u8] {
        let end = GUARD + self.shape.data;
        &mut self.whole_mut()[GUARD..end]
    }

    /// Fills the data and the memory around it with the canary.
    pub fn fill(&mut self) {
        self.whole_mut().fill(CANARY);
    }

    /// Returns whether everything around the data still holds the canary.
    pub fn guards_hold(&self) -> bool {
        let (whole, end) = (self.whole(), GUARD + self.shape.data);
        let mut guards = whole[..GUARD].iter().chain(&whole[end..]);
        guards.all(|&byte| byte == CANARY)
    }
}

/// Offsets of the parts of a queue in its memory.
struct Layout {
    cq: usize,
    lists: usize,
    total: usize,
}

impl Layout {
    fn of(shape: &Shape) -> Self {
        let page = |bytes: usize| bytes.next_multiple_of(4096);
        let cq = page(shape.entries as usize * 64);
        let lists = cq + page(shape.entries as usize * 16);
        let total = lists + page(shape.slots as usize * LIST_WORDS * 8);
        Self { cq, lists, total }
    }
}

impl Rigged for Rig<'_> {
    fn launch(&self) -> Result<LaunchArguments, String> {
        Rig::launch(self)
    }

    fn run(
        &mut self,
        kernel: Kernel,
        grid: u32,
        block: u32,
        launch: LaunchArguments,
    ) -> Result<Outcome, String> {
        Rig::run(self, kernel, grid, block, launch)
    }

    fn recover(&mut self) -> Result<u32, String> {
        Rig::recover(self)
    }

    fn in_flight(&self) -> Result<u32, String> {
        Rig::in_flight(self)
    }

    fn fill(&mut self) {
        Rig::fill(self);
    }

    fn data(&self) -> &[u8] {
        Rig::data(self)
    }

    fn guards_hold(&self) -> bool {
        Rig::guards_hold(self)
    }
}
