//! Very many commands against a controller that moves no data.
// UNSAFETY: launches kernels over raw addresses.
#![allow(unsafe_code)]

use crate::bench::{Bench, Mode};
use crate::limits::{finish_within, limit};
use crate::report::{Options, Report};
use nvme_core::ControllerIdentity;
use nvme_core::handoff::QueueWords;
use nvme_core::queue_state::{QueueState, words as state_words};
use nvme_core::spec::{Qid, nvm};
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_gpu_kernel::work::{self, LaunchArguments};
use nvme_host::cuda::null::{NullController, NullShape};
use nvme_host::cuda::{DeviceMemory, RegisteredMemory};
use std::time::Duration;
use zerocopy::IntoBytes;

const QUEUES: u32 = 128;
const DEPTH: u32 = 64;
const ENTRIES: u32 = 128;
/// Blocks of 128 threads for each queue in shared mode.
const BLOCKS: u32 = 4;
const TIMEOUT_NS: u64 = 1_000_000_000;
/// Shortest limit of a run.
const LONGEST: Duration = Duration::from_secs(180);

/// Runs the long tests.
pub fn all(report: &mut Report, bench: &Bench) {
    for mode in [Mode::Warp, Mode::Shared] {
        let name = format!("volume/{}", mode.name());
        report.test(&name, |options| {
            run(bench, mode, options).map_err(|error| error.to_string())
        });
    }
}

fn run(bench: &Bench, mode: Mode, options: &Options) -> nvme_host::Result<String> {
    let shape = NullShape {
        queues: QUEUES,
        entries: ENTRIES,
        dstrd: 0,
        data_bytes: 4096,
    };
    let null = NullController::new(shape)?;
    let registered = RegisteredMemory::pages(&bench.gpu, null.pages())?;
    let words = state_words(ENTRIES);
    let states = DeviceMemory::new(&bench.gpu, words * 4 * QUEUES as usize)?;
    let mut queues = Vec::new();
    for index in 0..QUEUES {
        let host = null.words(index);
        let offset = words * 4 * index as usize;
        queues.push(QueueWords {
            sq: registered.translate(host.sq)?,
            cq: registered.translate(host.cq)?,
            sq_doorbell: registered.translate(host.sq_doorbell)?,
            cq_doorbell: registered.translate(host.cq_doorbell)?,
            // No command here needs a list; the address has to be aligned all the same.
            lists: registered.translate(host.sq)?,
            state: states.address() + offset as u64,
            slots: DEPTH,
            ..host
        });
        let state: Vec<AtomicU32> = (0..words).map(|_| AtomicU32::new(0)).collect();
        if let Some(view) = QueueState::new(&state, Qid(index as u16 + 1), ENTRIES, DEPTH) {
            view.init(&ControllerIdentity::new(), 0);
        }
        let word = |word: &AtomicU32| word.load(Order::Relaxed, Scope::Sys);
        let bytes: Vec<u8> = state.iter().flat_map(|w| word(w).to_le_bytes()).collect();
        states.upload(offset, &bytes)?;
    }
    let device_words = DeviceMemory::new(&bench.gpu, queues.as_slice().as_bytes().len())?;
    device_words.upload(0, queues.as_slice().as_bytes())?;
    let threads = QUEUES * BLOCKS * 128;
    let cells = DeviceMemory::new(&bench.gpu, threads as usize * 8)?;
    let report = DeviceMemory::new(&bench.gpu, size_of::<work::LaunchReport>())?;
    let launch = LaunchArguments {
        queues: device_words.address(),
        cells: cells.address(),
        report: report.address(),
        data_iova: null.data(),
        data_bytes: u64::MAX / 2,
        commands: options.volume,
        units: 1 << 20,
        timeout_ns: TIMEOUT_NS * bench.patience,
        queue_count: QUEUES,
        cell_count: threads,
        nsid: 1,
        opcode: u32::from(nvm::opcode::FLUSH),
        blocks: 1,
        block_shift: 9,
        depth: DEPTH,
        lanes: 32,
        ..LaunchArguments::default()
    };
    let (grid, block) = match mode {
        Mode::Shared => (QUEUES * BLOCKS, 128),
        _ => (QUEUES, 32),
    };
    let controllers = std::thread::available_parallelism().map_or(4, |n| n.get().max(3) - 2);
    let running = null.start(controllers, None)?;
    // SAFETY: every address is memory that lives to the end of this function; when the kernel does not
    // end in time, the program does.
    unsafe {
        bench
            .kernels
            .launch(&bench.stream, mode.kernel(), grid, block, &launch)?;
    }
    finish_within(&bench.stream, limit().max(LONGEST));
    let account = running.stop();
    let mut bytes = [0; size_of::<work::LaunchReport>()];
    report.download(0, &mut bytes)?;
    // SAFETY: the slice has as many bytes as the struct, all of whose fields are integers.
    let counts: work::LaunchReport = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
    let fail = |cause: String| {
        Err(nvme_host::Error::Device {
            cause,
            remedy: String::new(),
        })
    };
    if let Some(fault) = account.fault {
        return fail(format!(
            "the controller refused queue {}: {}",
            fault.qid, fault.what
        ));
    }
    let same = counts.completed == options.volume
        && counts.sqes == options.volume
        && account.commands == options.volume;
    if !same {
        return fail(format!(
            "{counts:?}; the controller counted {}",
            account.commands
        ));
    }
    let rate = options.volume as f64 * 1e3 / counts.elapsed_ns().max(1) as f64;
    Ok(format!(
        "{} commands, {rate:.0} M/s, {} + {} doorbells",
        options.volume, counts.sq_doorbells, counts.cq_doorbells
    ))
}
