//! One GPU thread owns a queue of the simulated controller and reads a namespace through it.
//!
//! `owner-read KERNELS.ptx [COMMANDS [BLOCKS [DEPTH]]]`: the controller runs on CPU threads; rings,
//! doorbells and data are pinned host memory. Every byte is checked afterwards. One JSON line.
// UNSAFETY: the CUDA driver API and memory shared with a GPU and a simulated controller.
#![allow(unsafe_code)]

mod cuda;

use nvme_core::bringup::{Bringup, Config, QueuePlan, Step};
use nvme_core::mem::{CqRing, DmaWords, Doorbell, SqRing};
use nvme_core::spec::{Iova, PageSize, Qid, register};
use nvme_core::{ListMemory, QueueMemory, QueuePair, Registers, Slot};
use nvme_sim::{Controller, HostMemory, Memory, NamespaceConfig, Runner};
use std::alloc::{Layout, alloc_zeroed};
use std::sync::Arc;
use std::time::{Duration, Instant};

const ENTRIES: u32 = 256;
const BLOCK: u32 = 512;
const QID: u16 = 1;
const LIST_WORDS: usize = 512;

#[repr(C)]
#[derive(Clone, Copy)]
struct QueueArgs {
    sq: u64,
    sq_iova: u64,
    cq: u64,
    cq_iova: u64,
    sq_doorbell: u64,
    cq_doorbell: u64,
    lists: u64,
    lists_iova: u64,
    slots: u64,
    sq_entries: u32,
    cq_entries: u32,
    slot_count: u32,
    words_per_slot: u32,
    qid: u32,
    nsid: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ReadArgs {
    lba: u64,
    buffer_iova: u64,
    commands: u32,
    blocks: u32,
    block_bytes: u32,
    depth: u32,
    timeout_ns: u64,
}

struct Bar(Arc<Controller<HostMemory>>);

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

/// Zeroed memory for the life of the process, known to the controller at its own address.
fn shared(memory: &HostMemory, bytes: usize) -> *mut u8 {
    let layout = Layout::from_size_align(bytes.next_multiple_of(4096), 1 << 16).expect("a layout");
    // SAFETY: the layout is not empty; the allocation is never freed.
    let start = unsafe { alloc_zeroed(layout) };
    assert!(!start.is_null(), "no memory");
    // SAFETY: the range is allocated, is never freed and is used through atomics or after the run.
    unsafe { memory.map(start as u64, start, layout.size() as u64) }.expect("a free address");
    start
}

/// The byte at `offset` of the namespace.
fn pattern(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        eprintln!("usage: owner-read KERNELS.ptx [COMMANDS [BLOCKS [DEPTH]]]");
        std::process::exit(2);
    };
    let mut number = |default: u32| {
        arguments
            .next()
            .map_or(default, |text| text.parse().expect("a number"))
    };
    let (commands, blocks, depth) = (number(4096), number(8), number(64));
    if let Err(error) = run(&path, commands, blocks, depth) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run(path: &str, commands: u32, blocks: u32, depth: u32) -> Result<(), String> {
    let ptx = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let gpu = cuda::Gpu::open()?;
    let module = gpu.load(&ptx)?;

    let bytes = u64::from(commands) * u64::from(blocks) * u64::from(BLOCK);
    let store = Memory::new(bytes).ok_or("no memory for the namespace")?;
    let image: Vec<u8> = (0..bytes).map(pattern).collect();
    nvme_sim::Store::write_at(&store, 0, &image).map_err(|error| format!("{error:?}"))?;
    let memory = HostMemory::new();
    let mut config = nvme_sim::Config::empty();
    config.namespaces = vec![NamespaceConfig::new(BLOCK, Box::new(store))];
    let controller = Arc::new(Controller::new(config, memory.clone()).map_err(|e| e.to_string())?);
    let runner = Runner::try_start(controller.clone(), 2).map_err(|error| error.to_string())?;

    let sq = shared(&memory, ENTRIES as usize * 64);
    let cq = shared(&memory, ENTRIES as usize * 16);
    let lists = shared(&memory, ENTRIES as usize * LIST_WORDS * 8);
    let buffer = shared(&memory, bytes as usize);
    bring_up(&controller, &memory, sq, cq)?;

    let bells = controller.doorbells().as_ptr() as u64;
    gpu.pin(bells as *mut u8, controller.doorbells().bytes())?;
    for (start, len) in [
        (sq, ENTRIES as usize * 64),
        (cq, ENTRIES as usize * 16),
        (lists, ENTRIES as usize * LIST_WORDS * 8),
        (buffer, bytes as usize),
    ] {
        gpu.pin(start, len)?;
    }
    let dstrd = controller.doorbells().dstrd();
    let at = |offset: u32| bells + u64::from(offset - register::offset::DOORBELLS);
    let slots = gpu.alloc(ENTRIES as usize * 64)?;
    let report = gpu.alloc(16)?;
    let queue = QueueArgs {
        sq: sq as u64,
        sq_iova: sq as u64,
        cq: cq as u64,
        cq_iova: cq as u64,
        sq_doorbell: at(register::sq_tail_doorbell(QID, dstrd)),
        cq_doorbell: at(register::cq_head_doorbell(QID, dstrd)),
        lists: lists as u64,
        lists_iova: lists as u64,
        slots,
        sq_entries: ENTRIES,
        cq_entries: ENTRIES,
        slot_count: ENTRIES - 1,
        words_per_slot: LIST_WORDS as u32,
        qid: u32::from(QID),
        nsid: 1,
    };
    let read = ReadArgs {
        lba: 0,
        buffer_iova: buffer as u64,
        commands,
        blocks,
        block_bytes: BLOCK,
        depth,
        timeout_ns: 5_000_000_000,
    };
    let start = Instant::now();
    gpu.launch_one(&module, "nvme_owner_read", &queue, &read, report)?;
    let elapsed = start.elapsed();
    let [completed, failed, end, status] = gpu.read_words(report)?;
    // SAFETY: the kernel has ended and the controller has completed every read into the buffer.
    let got = unsafe { std::slice::from_raw_parts(buffer, bytes as usize) };
    let wrong = got
        .iter()
        .zip(&image)
        .filter(|(got, want)| got != want)
        .count();
    drop(runner);
    println!(
        "{{\"test\":\"owner_read\",\"gpu\":\"{}\",\"commands\":{commands},\"completed\":{completed},\"failed\":{failed},\"end\":{end},\"status\":{status},\"wrong_bytes\":{wrong},\"depth\":{depth},\"bytes_per_command\":{},\"commands_per_s\":{:.0}}}",
        gpu.name,
        blocks * BLOCK,
        f64::from(completed) / elapsed.as_secs_f64(),
    );
    if completed == commands && wrong == 0 {
        Ok(())
    } else {
        Err("the read did not succeed".into())
    }
}

/// Brings the controller up on the CPU and creates one queue pair for the GPU.
fn bring_up(
    controller: &Arc<Controller<HostMemory>>,
    memory: &HostMemory,
    sq: *mut u8,
    cq: *mut u8,
) -> Result<(), String> {
    let bar = Bar(controller.clone());
    let (asq, acq, page) = (
        shared(memory, 4096),
        shared(memory, 4096),
        shared(memory, 4096),
    );
    let doorbells = controller.doorbells();
    let bell = |offset: u32| {
        let at = doorbells.as_ptr().cast_mut().cast::<u8>();
        // SAFETY: the doorbells of the admin queue lie in the block, which outlives this function.
        unsafe {
            Doorbell::from_raw(
                at.add((offset - register::offset::DOORBELLS) as usize)
                    .cast(),
            )
        }
    };
    let admin = QueueMemory {
        // SAFETY: one page each, never freed, used through the rings alone.
        sq: unsafe { SqRing::from_raw(asq, 64, Iova(asq as u64)) },
        // SAFETY: as above.
        cq: unsafe { CqRing::from_raw(acq, 64, Iova(acq as u64)) },
        sq_doorbell: bell(register::sq_tail_doorbell(0, doorbells.dstrd())),
        cq_doorbell: bell(register::cq_head_doorbell(0, doorbells.dstrd())),
        lists: ListMemory::new(DmaWords::new(&[], Iova(0)), PageSize::KIB4, 0),
    };
    let slots: Vec<Slot<()>> = (0..63).map(|_| Slot::new()).collect();
    let mut pair = QueuePair::new(Qid::ADMIN, admin, slots);
    let plans = [QueuePlan {
        qid: Qid(QID),
        sq_entries: ENTRIES,
        sq_iova: Iova(sq as u64),
        cq_entries: ENTRIES,
        cq_iova: Iova(cq as u64),
        vector: None,
    }];
    let config = Config {
        queue_pairs: 1,
        plans: &plans,
        ..Config::default()
    };
    // SAFETY: one page, never freed, used through the view alone.
    let page = unsafe { DmaWords::from_raw(page, 512, Iova(page as u64)) };
    let mut machine = Bringup::new(&bar, config, page).map_err(|error| error.to_string())?;
    let start = Instant::now();
    loop {
        let now = start.elapsed().as_nanos() as u64;
        match machine
            .step(&bar, &mut pair, now)
            .map_err(|error| error.to_string())?
        {
            Step::Ready => break,
            Step::Wait { .. } => std::thread::sleep(Duration::from_micros(50)),
            Step::Disabled(proof) => {
                pair.restart(&proof);
                machine.enable(proof);
            }
            Step::HostMemory { .. } => machine.host_memory(None),
        }
    }
    if machine.info().created == 1 {
        Ok(())
    } else {
        Err("the queue was not created".into())
    }
}
