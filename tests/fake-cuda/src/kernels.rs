//! The kernels that drive queues: the lanes of a launch run their own source in the host thread of the stream.
// UNSAFETY: launches hold addresses that the host vouches for, as on a GPU.
#![allow(unsafe_code)]

use crate::rows::{self, LaunchShape};
use crate::{fault, idle};
use nvme_core::handoff::QueueWords;
use nvme_core::spec::Iova;
use nvme_core::sync::{AtomicU32, Order, Scope};
use nvme_core::trace::TraceEvent;
use nvme_gpu_kernel::Kernel;
use nvme_gpu_kernel::entries;
use nvme_gpu_kernel::lanes::LaunchTurn;
use nvme_gpu_kernel::work::{LaunchArguments, LaunchReport, TracedEvent, data_word};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Runs `kernel`.
pub fn run(kernel: Kernel, launch: &LaunchArguments, shape: LaunchShape) {
    let mut launch = *launch;
    let pages = match fault("onebuffer") && launch.linear == 0 {
        true => pages_of_one_buffer(&launch),
        false => Vec::new(),
    };
    if !pages.is_empty() {
        launch.pages = pages.as_ptr().expose_provenance() as u64;
    }
    // SAFETY: the host vouches for the addresses in the parameter; the pages outlive the launch.
    let entry = move || unsafe { call(kernel, launch) };
    match kernel {
        Kernel::SqeWrites if launch.depth != 0 => run_heeding(&launch, shape, entry),
        // It looks for its answer without a pause.
        Kernel::PingPong => rows::run_with(shape, entry, || {
            std::thread::yield_now();
            now_ns()
        }),
        _ => rows::run(shape, entry),
    }
    if fault("badtrace") && launch.trace != 0 {
        write_bad_trace(&launch);
    }
}

/// Calls the entry point of `kernel`.
///
/// # Safety
/// The host vouches for the addresses in the launch.
unsafe fn call(kernel: Kernel, launch: LaunchArguments) {
    let entry = match kernel {
        Kernel::Owner => entries::nvme_owner,
        Kernel::Warp => entries::nvme_warp,
        Kernel::Block => entries::nvme_block,
        Kernel::OwnerTraced => entries::nvme_owner_traced,
        Kernel::WarpTraced => entries::nvme_warp_traced,
        Kernel::BlockTraced => entries::nvme_block_traced,
        Kernel::Shared => entries::nvme_shared,
        Kernel::SharedNarrow => entries::nvme_shared_narrow,
        Kernel::SharedTraced => entries::nvme_shared_traced,
        Kernel::Tokens => entries::nvme_tokens,
        Kernel::Verify => entries::nvme_verify,
        Kernel::PingPong => entries::nvme_pingpong,
        Kernel::SqeWrites => entries::nvme_sqe_writes,
    };
    // SAFETY: this function's caller vouches for the launch.
    unsafe { entry(launch) }
}

/// Runs a kernel that rings without heed of completions: between its turns the controller is waited for, as a GPU need not.
fn run_heeding(launch: &LaunchArguments, shape: LaunchShape, entry: impl Fn() + 'static) {
    let mut running = rows::launch(shape, now_ns, entry);
    let mut rung = vec![0u64; launch.queue_count as usize];
    let (wait, mut turns) = (idle::of_lanes(rows::lanes_of(shape)), 0);
    loop {
        turns += 1;
        match running.turn(1, &mut |most| turns % most) {
            LaunchTurn::Ran => {
                for (rung, number) in rung.iter_mut().zip(0..) {
                    wait_until_served(words(launch, number), rung);
                }
            }
            LaunchTurn::Asleep => {
                wait();
                running.wake();
            }
            LaunchTurn::Ended => return,
        }
    }
}

/// Waits until a queue's entries are served up to its doorbell; `rung` counts them.
fn wait_until_served(words: &QueueWords, rung: &mut u64) {
    // SAFETY: the host gives the doorbell of each queue, a word that is used through atomics alone.
    let tail = unsafe { &*(words.sq_doorbell as usize as *const AtomicU32) };
    let mask = u64::from(words.entries - 1);
    let new = u64::from(tail.load(Order::Relaxed, Scope::Sys)).wrapping_sub(*rung) & mask;
    if new == 0 {
        return;
    }
    *rung += new;
    let last = *rung - 1;
    // SAFETY: the host vouches for the words.
    let (memory, _) = unsafe { words.attach() }.expect("possible sizes");
    let lap = last / u64::from(words.entries);
    let (begin, mut turn) = (Instant::now(), 0);
    while memory.cq.upper(last as u32, Order::Acquire) >> 48 & 1 == lap & 1 {
        assert!(
            begin.elapsed() < Duration::from_secs(600),
            "entry {last} is not served"
        );
        idle::pause(turn);
        turn += 1;
    }
}

fn words(launch: &LaunchArguments, number: u32) -> &QueueWords {
    let words = launch.queues as usize as *const QueueWords;
    // SAFETY: the host gives `queue_count` queues.
    unsafe { &*words.add(number as usize) }
}

/// Returns pages of the data memory by which all commands have the first one's.
fn pages_of_one_buffer(launch: &LaunchArguments) -> Vec<Iova> {
    let page = 1u64 << words(launch, 0).page_shift;
    let of_command = u64::from(launch.blocks) << launch.block_shift;
    let repeats = of_command.div_ceil(page);
    let place = |index: u64| Iova(launch.data_iova + index % repeats * page);
    (0..launch.data_bytes.div_ceil(page)).map(place).collect()
}

/// Fills the launch's trace with nonsense, and counts more of it than there can be.
fn write_bad_trace(launch: &LaunchArguments) {
    let records = launch.trace as usize as *mut TracedEvent;
    for at in 0..u64::from(launch.trace_records) {
        let word = |number| data_word(1, 4 * at + number);
        let record = TracedEvent {
            event: TraceEvent::from_words([word(0), word(1)]).to_words(),
            index: word(2),
            now_ns: word(3),
        };
        // SAFETY: the host gives `trace_records` records.
        unsafe { records.add(at as usize).write(record) };
    }
    // SAFETY: the host gives the report, and reads it when the kernel has ended.
    unsafe { (*(launch.report as usize as *mut LaunchReport)).traced = u64::MAX };
}

/// The GPU's clock: it goes on from launch to launch.
pub fn now_ns() -> u64 {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    BEGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1_000_000
}
