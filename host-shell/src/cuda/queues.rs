//! Queue pairs that kernels drive: their words and states in GPU memory, and launches over them.
//!
//! Between two launches the states may be taken to the host, where the same core drains them, and
//! brought back: see [`inspect`](GpuQueues::inspect).
// UNSAFETY: states are viewed as atomics, and queues are attached by the addresses in their words.
#![allow(unsafe_code)]

use super::driver::Gpu;
use super::kernels::{Kernel, Kernels};
use super::memory::DeviceMemory;
use super::stream::{Event, Stream};
use crate::error::{Error, Result};
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::{self, QueueState};
use nvme_core::sync::AtomicU32;
use nvme_core::{Identity, QueueMemory};
use nvme_gpu_kernel::work::{Launch, Report};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// States begin at multiples of this, so that two never share a sector.
const STATE_ALIGN: usize = 256;

/// How many threads a launch has, and which kernel they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The entry point.
    pub kernel: Kernel,
    /// Blocks.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
}

/// What a launch came to.
#[derive(Clone, Debug)]
pub struct LaunchResult {
    /// The kernel's counts.
    pub report: Report,
    /// Seconds from its start to its end, on the GPU's clock.
    pub seconds: f64,
    /// How each command ended, when that was asked for.
    pub accounts: Vec<u32>,
}

/// Queue pairs in the hands of a GPU.
pub struct GpuQueues {
    kernels: Arc<Kernels>,
    stream: Stream,
    host: Vec<QueueWords>,
    words: DeviceMemory,
    states: Arc<DeviceMemory>,
    report: DeviceMemory,
    cells: Option<DeviceMemory>,
    tokens: Option<DeviceMemory>,
    accounts: Option<DeviceMemory>,
    /// Cells in use, as the last launch had them.
    cell_count: u32,
}

impl GpuQueues {
    /// Puts queues, given by host addresses without state, into the GPU's hands. `translate` gives the
    /// GPU's address for each address in them; `identity` is of the controller behind them, the first position is `start` (see
    /// [`QueueState::init`]).
    ///
    /// # Errors
    /// [`Error::Usage`] for rings that a kernel cannot drive, [`Error::Device`] without GPU memory.
    pub fn new(
        kernels: &Arc<Kernels>,
        identity: &Identity,
        host: &[QueueWords],
        start: u32,
        translate: impl Fn(u64) -> Result<u64>,
    ) -> Result<Self> {
        let gpu = kernels.gpu();
        for words in host {
            if !QueueState::possible(words.entries, words.slots) {
                return Err(Error::usage(
                    format!(
                        "a queue of {} entries; kernels need a power of two",
                        words.entries
                    ),
                    "use a --depth of one less than a power of two",
                ));
            }
        }
        let size = host.iter().map(state_bytes).max().unwrap_or(STATE_ALIGN);
        let states = Arc::new(DeviceMemory::new(gpu, size * host.len())?);
        let words = DeviceMemory::new(gpu, size_of_val(host))?;
        let mut queues = Self {
            kernels: Arc::clone(kernels),
            stream: Stream::new(gpu)?,
            host: host.to_vec(),
            words,
            states,
            report: DeviceMemory::new(gpu, size_of::<Report>())?,
            cells: None,
            tokens: None,
            accounts: None,
            cell_count: 0,
        };
        let mut translated = Vec::new();
        for (index, one) in queues.host.iter().enumerate() {
            translated.push(QueueWords {
                sq: translate(one.sq)?,
                cq: translate(one.cq)?,
                sq_doorbell: translate(one.sq_doorbell)?,
                cq_doorbell: translate(one.cq_doorbell)?,
                lists: translate(one.lists)?,
                state: queues.states.address() + (index * size) as u64,
                ..*one
            });
        }
        queues.words.upload(0, translated.as_bytes())?;
        queues.restart(identity, start)?;
        Ok(queues)
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.kernels.gpu()
    }

    /// Number of queues.
    pub fn len(&self) -> usize {
        self.host.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.host.is_empty()
    }

    /// Bytes of GPU memory that the state of one queue takes.
    pub fn state_bytes(&self) -> usize {
        self.host.first().map_or(0, state_bytes)
    }

    /// Makes all queues new ones, for rings that were zeroed. Forgets what was in flight.
    pub fn restart(&mut self, identity: &Identity, start: u32) -> Result<()> {
        let size = self.host.iter().map(state_bytes).max().unwrap_or(0);
        let mut all = Vec::with_capacity(size * self.host.len());
        for one in &self.host {
            let words: Vec<AtomicU32> = (0..size / 4).map(|_| AtomicU32::new(0)).collect();
            let qid = nvme_core::spec::Qid(one.qid as u16);
            if let Some(state) = QueueState::new(&words, qid, one.entries, one.slots) {
                state.init(identity, start);
            }
            all.extend(words.iter().map(load));
        }
        self.states.upload(0, all.as_bytes())?;
        self.clear_cells()
    }

    /// Makes all result cells free.
    pub(super) fn clear_cells(&self) -> Result<()> {
        match &self.cells {
            Some(cells) => cells.zero(),
            None => Ok(()),
        }
    }

    /// Takes queue `index` to the host, shows it to `look` and brings its state back.
    ///
    /// The doorbells that `look` rings are the controller's. No kernel may use the queue meanwhile,
    /// which `&mut self` says.
    pub fn inspect<R>(
        &mut self,
        index: usize,
        look: impl FnOnce(QueueMemory<'_>, QueueState<'_>) -> R,
    ) -> Result<R> {
        inspect(&self.states, &self.host, index, look)
    }

    /// What a hook needs to do the same without `self`, while no kernel runs.
    pub(super) fn remote(&self, index: usize) -> Remote {
        Remote {
            states: Arc::clone(&self.states),
            host: self.host.clone(),
            index,
        }
    }

    /// Runs a kernel over the queues and waits for it. The queues, cells, tokens, accounts and report of
    /// `launch` are filled in here; `accounts` says whether each command's end is kept. `watch` runs
    /// now and then meanwhile.
    ///
    /// # Safety
    /// `launch` names data memory that stays valid for the controller and the GPU until every command
    /// has ended, and nothing else uses the queues.
    ///
    /// # Errors
    /// [`Error::Gone`] when the kernel has not ended within `limit`, [`Error::Device`] when it died.
    pub unsafe fn run(
        &mut self,
        grid: Grid,
        launch: Launch,
        accounts: bool,
        limit: Duration,
        watch: impl FnMut() -> Result<()>,
    ) -> Result<LaunchResult> {
        let threads = u64::from(grid.blocks) * u64::from(grid.threads);
        let held = match grid.kernel {
            Kernel::Tokens => threads * u64::from(launch.depth),
            _ => threads,
        };
        let launch = self.prepare(grid, launch, held, accounts)?;
        let begin = Event::record(&self.stream)?;
        // SAFETY: the caller vouches for the data; everything else is ours and outlives the
        // kernel.
        unsafe {
            self.kernels.launch(
                &self.stream,
                grid.kernel,
                grid.blocks,
                grid.threads,
                &launch,
            )?;
        }
        let end = Event::record(&self.stream)?;
        // After a wait in vain nothing of the GPU's is freed any more: see `Gpu::lose`.
        self.stream.wait(limit, watch)?;
        let seconds = end.seconds_since(&begin)?;
        let mut words = [0u64; size_of::<Report>() / 8];
        self.report.download(0, words.as_mut_bytes())?;
        let mut ends = Vec::new();
        if let Some(memory) = self.accounts.as_ref().filter(|_| accounts) {
            ends = vec![0u32; launch.commands as usize];
            memory.download(0, ends.as_mut_bytes())?;
        }
        Ok(LaunchResult {
            report: report_of(words),
            seconds,
            accounts: ends,
        })
    }

    /// Fills in what lies in this struct's memory, making it larger where the launch needs that.
    fn prepare(&mut self, grid: Grid, launch: Launch, held: u64, accounts: bool) -> Result<Launch> {
        let gpu = Arc::clone(self.gpu());
        let shared = grid.kernel.shares();
        if shared {
            let bytes = held as usize * 8;
            grow(&gpu, &mut self.cells, bytes)?;
            self.cell_count = held as u32;
        }
        if grid.kernel == Kernel::Tokens {
            grow(&gpu, &mut self.tokens, held as usize * 12)?;
        }
        if accounts {
            grow(&gpu, &mut self.accounts, launch.commands as usize * 4)?;
            self.accounts
                .as_ref()
                .map_or(Ok(()), |memory| memory.zero())?;
        }
        self.report.zero()?;
        let address = |memory: &Option<DeviceMemory>| memory.as_ref().map_or(0, |m| m.address());
        Ok(Launch {
            queues: self.words.address(),
            queue_count: self.host.len() as u32,
            cells: if shared { address(&self.cells) } else { 0 },
            cell_count: if shared { self.cell_count } else { 0 },
            tokens: address(&self.tokens),
            accounts: if accounts { address(&self.accounts) } else { 0 },
            report: self.report.address(),
            ..launch
        })
    }
}

/// Makes `memory` at least `bytes` bytes large; what it held is kept only when it was.
fn grow(gpu: &Arc<Gpu>, memory: &mut Option<DeviceMemory>, bytes: usize) -> Result<()> {
    if memory.as_ref().is_none_or(|memory| memory.len() < bytes) {
        *memory = Some(DeviceMemory::new(gpu, bytes)?);
    }
    Ok(())
}

/// A queue's state in GPU memory and its rings, without the kernels.
pub(super) struct Remote {
    states: Arc<DeviceMemory>,
    host: Vec<QueueWords>,
    index: usize,
}

impl Remote {
    /// As [`GpuQueues::inspect`]. No kernel may use the queue.
    pub fn inspect<R>(&self, look: impl FnOnce(QueueMemory<'_>, QueueState<'_>) -> R) -> Result<R> {
        inspect(&self.states, &self.host, self.index, look)
    }
}

fn state_bytes(words: &QueueWords) -> usize {
    (queue_state::words(words.entries) * 4).next_multiple_of(STATE_ALIGN)
}

fn inspect<R>(
    states: &DeviceMemory,
    host: &[QueueWords],
    index: usize,
    look: impl FnOnce(QueueMemory<'_>, QueueState<'_>) -> R,
) -> Result<R> {
    let size = host.iter().map(state_bytes).max().unwrap_or(STATE_ALIGN);
    let one = host
        .get(index)
        .ok_or_else(|| Error::internal(format!("no queue {index}")))?;
    let mut bytes = vec![0u32; size / 4];
    states.download(index * size, bytes.as_mut_bytes())?;
    let copy: Vec<AtomicU32> = bytes.iter().copied().map(AtomicU32::new).collect();
    let words = QueueWords {
        state: copy.as_ptr().addr() as u64,
        ..*one
    };
    // SAFETY: host addresses of rings, lists and doorbells that the owner of `host` keeps; the state is
    // the copy, which outlives `look`.
    let attached = unsafe { words.attach() };
    let (memory, state) = attached.ok_or_else(|| Error::internal("impossible queue sizes"))?;
    let result = look(memory, state);
    for (to, from) in bytes.iter_mut().zip(&copy) {
        *to = load(from);
    }
    states.upload(index * size, bytes.as_bytes())?;
    Ok(result)
}

fn load(word: &AtomicU32) -> u32 {
    word.load(nvme_core::sync::Order::Relaxed, nvme_core::sync::Scope::Sys)
}

/// The report's words, in the order of its fields.
fn report_of(words: [u64; size_of::<Report>() / 8]) -> Report {
    // SAFETY: `Report` is `repr(C)` and nothing but `u64` fields, so any words are one.
    unsafe { std::mem::transmute(words) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_back_field_by_field() {
        let mut words = [0; size_of::<Report>() / 8];
        for (index, word) in words.iter_mut().enumerate() {
            *word = index as u64 + 1;
        }
        let report = report_of(words);
        assert_eq!(report.completed, 1);
        assert_eq!(report.failed, 2);
        assert_eq!(report.wrong_at + 1, words.len() as u64);
        assert_eq!(report.late, words.len() as u64);
    }

    #[test]
    fn states_are_small_and_apart() {
        let words = QueueWords {
            entries: 1024,
            slots: 1023,
            ..QueueWords::default()
        };
        assert!(state_bytes(&words) <= 64 << 10);
        assert!(state_bytes(&words).is_multiple_of(STATE_ALIGN));
    }
}
