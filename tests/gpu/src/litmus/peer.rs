//! The shapes between two GPUs: rings and data in the driver's memory, doorbells in the controller's.
//!
//! Each GPU runs its roles in a separate launch, over the same locations.
// UNSAFETY: launches a kernel over raw addresses.
#![allow(unsafe_code)]

use super::cases::{Case, Memory, Players};
use super::launch::{Chance, STEPS, STRESS, TIMEOUT_NS, size};
use super::{LONGEST, SHOWN, verdict};
use crate::bench::Bench;
use crate::limits::finish;
use crate::report::Options;
use gpu_litmus::{Args, Counts, Flavour, Shape, Within};
use nvme_gpu_kernel::work::data_word;
use nvme_host::Result;
use nvme_host::cuda::{DeviceMemory, Gpu, KernelFunction, Module, Stream};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of each location.
const BYTES: usize = super::ground::BYTES;

/// Returns every case between two GPUs: `tier3/two/litmus/...` without the first two words.
pub fn cases() -> impl Iterator<Item = Case> {
    use Flavour::{Batch, Block, Fence, Order, Plain, Relaxed, Warp};
    let all: [(Shape, &[Flavour]); 6] = [
        (Shape::Message, &[Fence, Order, Relaxed, Plain]),
        (Shape::Doorbell, &[Fence, Relaxed]),
        (Shape::Lanes, &[Warp, Block, Relaxed]),
        (Shape::Completion, &[Fence, Order, Batch, Relaxed, Plain]),
        (Shape::Ring, &[Fence, Relaxed]),
        (Shape::Relay, &[Order, Batch, Relaxed, Plain]),
    ];
    let case = |shape, flavour| Case {
        shape,
        flavour,
        within: Within::Sys,
        memory: Memory::Device,
        players: Players::Gpu,
    };
    all.into_iter().flat_map(move |(shape, flavours)| {
        flavours.iter().map(move |&flavour| case(shape, flavour))
    })
}

/// One GPU's kernel and memory.
struct Side {
    module: Module,
    function: KernelFunction,
    stream: Stream,
    places: DeviceMemory,
    stress: DeviceMemory,
    counts: DeviceMemory,
}

impl Side {
    fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = Module::embedded(gpu, gpu_litmus::PTX.as_bytes())?;
        Ok(Self {
            function: module.function("nvme_litmus")?,
            module,
            stream: Stream::new(gpu)?,
            places: DeviceMemory::new(gpu, 3 * BYTES)?,
            stress: DeviceMemory::new(gpu, STRESS)?,
            counts: DeviceMemory::new(gpu, size_of::<Counts>())?,
        })
    }

    fn place(&self, index: usize, offset: usize) -> u64 {
        self.places.address() + (index * BYTES + offset) as u64
    }

    fn clear(&self) -> Result<()> {
        self.places.zero()?;
        self.counts.zero()
    }

    /// Puts the roles of `args` into the stream.
    fn launch(&self, args: &Args, threads: u32, stress: u32) -> Result<()> {
        let args = Args {
            stress: self.stress.address(),
            counts: self.counts.address(),
            ..*args
        };
        let grid = args.blocks * args.roles.count_ones() + stress;
        // SAFETY: the kernel takes one `Args`; its addresses are memory of both sides, which outlives the wait.
        unsafe {
            self.module
                .launch(&self.stream, self.function, grid, threads, &args)
        }
    }

    fn counted(&self) -> Result<Counts> {
        let mut bytes = [0; size_of::<Counts>()];
        self.counts.download(0, &mut bytes)?;
        // SAFETY: the slice has as many bytes as the struct, all of whose fields are integers.
        Ok(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }
}

/// The driver's GPU and the controller's.
pub struct Pair {
    driver: Side,
    controller: Side,
}

impl Pair {
    pub fn new(driver: &Arc<Gpu>, controller: &Arc<Gpu>) -> std::result::Result<Self, String> {
        let new = |gpu| Side::new(gpu).map_err(|error| error.to_string());
        Ok(Self {
            driver: new(driver)?,
            controller: new(controller)?,
        })
    }

    /// Launches until the case has seen the number of messages in `options`.
    pub fn run(
        &self,
        bench: &Bench,
        case: &Case,
        options: &Options,
    ) -> std::result::Result<String, String> {
        let began = Instant::now();
        let (mut sum, mut launches) = (Counts::default(), 0);
        while sum.fresh < options.litmus && began.elapsed() < LONGEST * bench.patience as u32 {
            let counts = self.launch(bench, case, launches, options.litmus);
            let counts = counts.map_err(|error| error.to_string())?;
            sum.reads += counts.reads;
            sum.fresh += counts.fresh;
            sum.forbidden += counts.forbidden;
            sum.late += counts.late;
            launches += 1;
            if case.weak() && sum.forbidden >= SHOWN {
                break;
            }
        }
        verdict(case.weak(), &sum, launches, options.litmus)
    }

    fn launch(&self, bench: &Bench, case: &Case, number: u64, wanted: u64) -> Result<Counts> {
        let mut chance = Chance::new(data_word(number, case.name().len() as u64 + 1));
        let steps = STEPS.min(wanted.next_power_of_two().max(1024));
        let size = size(case, &mut chance, steps);
        let offset = chance.of(&[0, 64, 256]);
        // Doorbells lie with the controller, everything else with the driver.
        let rings = matches!(case.shape, Shape::Doorbell | Shape::Lanes | Shape::Ring);
        let x = match rings {
            true => self.controller.place(0, 0),
            false => self.driver.place(0, 0),
        };
        let args = Args {
            x,
            y: self.driver.place(1, offset),
            z: self.driver.place(2, 2 * offset),
            timeout_ns: TIMEOUT_NS * bench.patience,
            seed: chance.next(),
            iterations: size.iterations,
            instances: size.instances,
            stride: chance.of(&[64, 128, 256, 1024]),
            shape: case.shape as u32,
            flavour: case.flavour as u32,
            within: case.within as u32,
            blocks: size.blocks,
            pause: chance.of(&[0, 0, 7, 63, 511]),
            ..Args::default()
        };
        self.driver.clear()?;
        self.controller.clear()?;
        let submits = matches!(case.shape, Shape::Doorbell | Shape::Lanes);
        let (first, later, rest) = match (submits, case.shape) {
            (true, _) => (&self.driver, &self.controller, 2),
            (false, Shape::Relay) => (&self.controller, &self.driver, 6),
            (false, _) => (&self.controller, &self.driver, 2),
        };
        // The readers are launched first: they wait for the writers' words.
        later.launch(
            &Args {
                roles: rest,
                ..args
            },
            size.threads,
            size.stress,
        )?;
        first.launch(&Args { roles: 1, ..args }, size.threads, size.stress)?;
        finish(&first.stream);
        finish(&later.stream);
        let (a, b) = (first.counted()?, later.counted()?);
        Ok(Counts {
            reads: a.reads + b.reads,
            fresh: a.fresh + b.fresh,
            forbidden: a.forbidden + b.forbidden,
            late: a.late + b.late,
            finished: 0,
        })
    }
}
