//! Lanes over queues of our own driver. Each command moves one buffer of DMA memory, from or into which the
//! caller's bytes are copied, because a drive can only reach memory that is mapped for it.

use super::lane::{
    Ended, LARGE_BYTES, LARGE_SLOTS, LaneCommand, LaneFailure, LaneOperation, LanePool,
    SMALL_BYTES, StoreLane,
};
use super::member::StoreMember;
use super::options::{DataPath, StoreOptions};
#[cfg(feature = "cuda")]
use super::with_gpu;
use nvme_core::SubmitError;
use nvme_core::bringup::NamespaceInfo;
use nvme_core::spec::{Lba, Nsid, Sqe, nvm};
use nvme_driver::controller::Controller;
use nvme_driver::controller::config::ControllerConfig;
use nvme_driver::controller::queue::DriverQueue;
use nvme_driver::controller::queue_inner::QueueCompletion;
use nvme_driver::device::Device;
use nvme_driver::dma::DmaBuffer;
use nvme_driver::error::{Error, Result};
use nvme_driver::lock::lock;
use nvme_driver::sysfs::CommandScope;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Brings up the controller behind `device` and makes its lanes.
///
/// # Errors
/// The errors of [`Controller::start`]; [`Error::Usage`] for an unknown namespace, or without any queue.
pub(crate) fn open(device: Arc<dyn Device>, options: &StoreOptions) -> Result<StoreMember> {
    let read_only = read_only(&*device, options);
    #[cfg(feature = "cuda")]
    with_gpu::check_drive(options)?;
    #[cfg(feature = "cuda")]
    let reached = with_gpu::reach(&device, options)?;
    #[cfg(feature = "cuda")]
    let access = reached.access.clone();
    #[cfg(feature = "cuda")]
    let device = access
        .as_ref()
        .map_or(device, |access| Arc::clone(access.device()));
    let config = ControllerConfig {
        queue_pairs: [
            gpu_queues(options),
            owned_queues(options),
            kernel_queues(options),
        ]
        .into_iter()
        .fold(options.queues, u32::saturating_add),
        timeout: options.timeout,
        changes: read_only
            .is_none()
            .then_some(CommandScope::Namespace(options.nsid)),
        ..ControllerConfig::default()
    };
    let controller = Controller::start(device, &config)?;
    let info = controller.usable_namespace(Nsid(options.nsid))?;
    let controller = Arc::new(controller);
    let shares = shares(controller.info().queue_pairs, options)?;
    #[cfg(feature = "cuda")]
    let rows = with_gpu::rows(
        access.as_ref(),
        &controller,
        info,
        (shares.of_gpu, shares.of_cpu + shares.of_kernels),
        options,
    )?;
    let gone = Arc::new(Mutex::new(None));
    let lane = |_| -> Result<Box<dyn StoreLane>> {
        let lane = DriveLane::new(&controller, info, options.depth, &gone)?;
        Ok(Box::new(lane))
    };
    let lanes = (0..shares.of_cpu).map(lane).collect::<Result<Vec<_>>>()?;
    let pool = LanePool::new(lanes, options.depth);
    let block = info.block_bytes;
    #[cfg(feature = "cuda")]
    let path = with_gpu::path(&reached, path(&controller, shares.of_cpu));
    #[cfg(not(feature = "cuda"))]
    let path = path(&controller, shares.of_cpu);
    Ok(StoreMember {
        #[cfg(feature = "cuda")]
        rows,
        #[cfg(feature = "cuda")]
        gpu: reached.host_rows(),
        #[cfg(feature = "cuda")]
        gds: None,
        #[cfg(feature = "cuda")]
        kernels: access.map(|access| with_gpu::ForKernels {
            access,
            info,
            reserve: nvme_cuda::QueueReserve::new(shares.of_kernels),
            timeout: options.timeout,
        }),
        pool,
        is_regular_file: false,
        len: info.blocks * u64::from(block),
        block_bytes: block,
        read_bytes: block,
        most_bytes: large_bytes(&controller, block),
        boundary_bytes: u64::from(info.boundary_blocks) * u64::from(block),
        read_only,
        path,
        timeout: options.timeout,
        controller: Some(controller),
        changes: None,
    })
}

/// Distribution of a controller's queue pairs.
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "without a GPU those of the CPU alone are used")
)]
struct QueueShares {
    of_cpu: u32,
    of_gpu: u32,
    of_kernels: u32,
}

fn shares(granted: u32, options: &StoreOptions) -> Result<QueueShares> {
    let of_kernels = kernel_queues(options);
    // One queue of the CPU at least.
    let left = granted.saturating_sub(1);
    if of_kernels > 0 && of_kernels >= left {
        return Err(Error::usage(
            format!(
                "{of_kernels} queue pairs for kernels are too many: the controller grants {granted} in all"
            ),
            "ask for fewer, or use a controller with more (simulator: queues=32)",
        ));
    }
    let of_gpu = gpu_queues(options).min(left - of_kernels);
    let of_cpu = granted.saturating_sub(of_gpu + of_kernels);
    let of_cpu = of_cpu.min(options.queues).max(1);
    Ok(QueueShares {
        of_cpu,
        of_gpu,
        of_kernels,
    })
}

/// Returns the number of queues that a GPU gets.
fn gpu_queues(options: &StoreOptions) -> u32 {
    #[cfg(feature = "cuda")]
    let queues = options.gpu.map_or(0, |gpu| gpu.rows.queues);
    #[cfg(not(feature = "cuda"))]
    let queues = {
        let _ = options;
        0
    };
    queues
}

/// Returns the number of queues that blocks on a GPU own.
fn owned_queues(options: &StoreOptions) -> u32 {
    #[cfg(feature = "cuda")]
    let queues = options
        .gpu
        .map_or(0, |gpu| gpu.rows.owned.min(gpu.rows.stations));
    #[cfg(not(feature = "cuda"))]
    let queues = {
        let _ = options;
        0
    };
    queues
}

/// Returns the number of queues that are kept for kernels of the caller's.
fn kernel_queues(options: &StoreOptions) -> u32 {
    #[cfg(feature = "cuda")]
    let queues = options.kernel_queues;
    #[cfg(not(feature = "cuda"))]
    let queues = {
        let _ = options;
        0
    };
    queues
}

fn read_only(device: &dyn Device, options: &StoreOptions) -> Option<(String, &'static str)> {
    let name = device.name();
    if options.read_only {
        let cause = format!("{name} was opened for reading only");
        return Some((cause, "open it without read_only"));
    }
    let guarded = device.guards_data() && !options.allow_write;
    guarded.then(|| {
        let cause = format!("{name} is a real device, which is opened for reading only");
        (cause, "open it with allow_write if its data may change")
    })
}

fn path(controller: &Controller, queues: u32) -> DataPath {
    let device = controller.device();
    DataPath {
        device: device.name(),
        data: "host",
        tier: None,
        path: format!("{queues} queues of this process to {}", device.describe()),
        why: "no GPU was asked for: commands come from CPU threads, data pass through host memory"
            .to_owned(),
    }
}

/// Returns the most bytes of one command: whole blocks, one at least.
fn large_bytes(controller: &Controller, block: u32) -> u32 {
    let most = controller.max_transfer().min(u64::from(LARGE_BYTES)) as u32;
    (most / block * block).max(block)
}

struct CommandState {
    /// `None` once the call that sent the command has ended.
    tag: Option<u32>,
    is_large: bool,
    command: LaneCommand,
}

struct DriveLane {
    queue: DriverQueue,
    controller: Arc<Controller>,
    info: NamespaceInfo,
    /// Commands in flight by their identifier.
    placed: HashMap<u16, CommandState>,
    /// Commands that ended, until `StoreLane::poll` reports them.
    ends: VecDeque<QueueCompletion>,
    /// Commands with a tag.
    in_flight: usize,
    small: Vec<DmaBuffer>,
    large: Vec<DmaBuffer>,
    small_bytes: u32,
    large_bytes: u32,
    is_made: bool,
    /// Reason why all lanes of this controller are unusable, once they are.
    gone: Arc<Mutex<Option<String>>>,
}

impl DriveLane {
    fn new(
        controller: &Arc<Controller>,
        info: NamespaceInfo,
        depth: u32,
        gone: &Arc<Mutex<Option<String>>>,
    ) -> Result<Self> {
        // One entry of a ring stays empty.
        let mut queue = controller.create_queue_pair(depth + 1)?;
        queue.goes_by(info);
        let large_bytes = large_bytes(controller, info.block_bytes);
        let small_bytes = SMALL_BYTES.max(info.block_bytes).min(large_bytes);
        Ok(Self {
            queue,
            controller: Arc::clone(controller),
            info,
            placed: HashMap::new(),
            ends: VecDeque::new(),
            in_flight: 0,
            small: Vec::new(),
            large: Vec::new(),
            small_bytes: small_bytes / info.block_bytes * info.block_bytes,
            large_bytes,
            is_made: false,
            gone: Arc::clone(gone),
        })
    }

    /// Allocates the buffers on first use.
    fn make(&mut self) -> Result<()> {
        let device = self.controller.device();
        let (small, large) = (self.small_bytes as usize, self.large_bytes as usize);
        let depth = self.queue.depth() as usize;
        self.small = DmaBuffer::several(device, small, depth)?;
        self.large = DmaBuffer::several(device, large, LARGE_SLOTS.min(depth))?;
        self.is_made = true;
        Ok(())
    }

    fn give_back(&mut self, buffer: Option<DmaBuffer>, is_large: bool) {
        match is_large {
            true => self.large.extend(buffer),
            false => self.small.extend(buffer),
        }
    }

    fn sqe(&self, command: &LaneCommand) -> Sqe {
        let nsid = self.info.nsid;
        let lba = Lba(command.offset / u64::from(self.info.block_bytes));
        let blocks = command.bytes / self.info.block_bytes;
        match command.op {
            LaneOperation::Read => nvm::read(nsid, lba, blocks),
            LaneOperation::Write => nvm::write(nsid, lba, blocks),
            LaneOperation::WriteFua => {
                let mut sqe = nvm::write(nsid, lba, blocks);
                sqe.cdw12 |= nvm::FUA;
                sqe
            }
            LaneOperation::Flush => nvm::flush(nsid),
        }
    }

    fn in_words(&self, command: &LaneCommand) -> String {
        let what = match command.op {
            LaneOperation::Read => "Read",
            LaneOperation::Write => "Write",
            LaneOperation::WriteFua => "Write (FUA)",
            LaneOperation::Flush => return "Flush".to_owned(),
        };
        let block = u64::from(self.info.block_bytes);
        let (lba, blocks) = (command.offset / block, u64::from(command.bytes) / block);
        match blocks {
            1 => format!("{what} of LBA {lba}"),
            _ => format!("{what} of {blocks} blocks from LBA {lba}"),
        }
    }

    fn check_there(&self) -> Result<()> {
        match &*lock(&self.gone) {
            Some(cause) => Err(Error::Gone {
                cause: cause.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Waits for a buffer or slot. If there is none although this call has no command in flight,
    /// commands that an earlier call abandoned still own them: reaps those.
    fn wait_for_a_buffer(&mut self) -> Result<()> {
        if self.in_flight > 0 {
            return Ok(());
        }
        if self.placed.is_empty() {
            return Err(Error::internal("the buffers of a queue were lost"));
        }
        self.poll(&mut |_, _| ())
    }

    /// Records for all lanes that the controller is gone.
    fn note(&self, error: Error) -> Error {
        if let Error::Gone { cause } = &error {
            lock(&self.gone).get_or_insert_with(|| cause.clone());
        }
        error
    }
}

impl StoreLane for DriveLane {
    fn begin(&mut self) -> Result<()> {
        self.check_there()?;
        self.queue.check_current(self.info.nsid)?;
        if !self.is_made {
            self.make()?;
        }
        Ok(())
    }

    fn submit(
        &mut self,
        command: &LaneCommand,
        tag: u32,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        let is_large = command.bytes > self.small_bytes;
        let free = match is_large {
            true => &mut self.large,
            false => &mut self.small,
        };
        let mut buffer = None;
        if command.op != LaneOperation::Flush {
            let Some(mut free) = free.pop() else {
                return self.wait_for_a_buffer().map(|()| false);
            };
            free.resize(command.bytes as usize);
            if command.op.is_write() {
                fill(free.as_mut_slice());
            }
            buffer = Some(free);
        }
        match self.queue.submit(self.sqe(command), buffer) {
            Ok(cid) => {
                let placed = CommandState {
                    tag: Some(tag),
                    is_large,
                    command: *command,
                };
                self.placed.insert(cid.0, placed);
                self.in_flight += 1;
                Ok(true)
            }
            Err(rejected) => {
                self.give_back(rejected.buffer, is_large);
                if rejected.error == SubmitError::QueueFull {
                    return self.wait_for_a_buffer().map(|()| false);
                }
                self.check_there()?;
                let what = self.in_words(command);
                Err(rejected.error.into_error(|error| {
                    let cause = format!("{what} could not be queued: {error}");
                    Error::device(cause, "open the device again")
                }))
            }
        }
    }

    fn ring(&mut self) -> Result<()> {
        self.queue.ring();
        Ok(())
    }

    fn poll(&mut self, ended: Ended<'_>) -> Result<()> {
        let most = self.placed.len();
        let ends = &mut self.ends;
        let polled = self.queue.poll_batch(most, |done| ends.push_back(done));
        // A command that ended after a change of the namespace may have used other blocks than were meant.
        let changed = match self.ends.is_empty() {
            true => None,
            false => self.queue.check_current(self.info.nsid).err(),
        };
        while let Some(done) = self.ends.pop_front() {
            let Some(placed) = self.placed.remove(&done.cid.0) else {
                continue;
            };
            if let Some(tag) = placed.tag {
                self.in_flight -= 1;
                if let Some(changed) = &changed {
                    let error = changed.with_context(&self.in_words(&placed.command));
                    ended(
                        tag,
                        Err(LaneFailure {
                            error,
                            retry: false,
                        }),
                    );
                } else if done.is_success() {
                    let read = done.buffer.as_ref();
                    let read = read.filter(|_| placed.command.op == LaneOperation::Read);
                    ended(tag, Ok(read.map_or(&[], DmaBuffer::as_slice)));
                } else {
                    let what = self.in_words(&placed.command);
                    let error = self.queue.error_of(&done, &what);
                    let opcode = self.sqe(&placed.command).opcode();
                    let error = self.queue.cause_of(self.info.nsid, opcode, error);
                    let retry = done.may_retry();
                    ended(tag, Err(LaneFailure { error, retry }));
                }
            }
            self.give_back(done.buffer, placed.is_large);
        }
        polled.map(drop).map_err(|error| self.note(error))
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn pause(&mut self, spins: u32) {
        self.queue.pause(spins);
    }

    fn abandon(&mut self) {
        for placed in self.placed.values_mut() {
            placed.tag = None;
        }
        self.in_flight = 0;
    }
}
