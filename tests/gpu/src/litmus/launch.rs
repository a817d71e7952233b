//! One launch of a case: its random size, the GPU's roles and the CPU's, and their counts.
// UNSAFETY: launches a kernel over raw addresses.
#![allow(unsafe_code)]

use super::cases::{Case, Memory, Players};
use super::cpu::Role;
use super::ground::Ground;
use crate::bench::Bench;
use gpu_litmus::{Args, Counts, Flavour, Shape};
use nvme_gpu_kernel::work::data_word;
use nvme_host::Result;
use nvme_host::cuda::{DeviceMemory, KernelFunction, Module};
use std::sync::atomic::{AtomicBool, Ordering};

/// Largest number of iterations of all instances of a launch together.
pub const STEPS: u64 = 1 << 18;
/// Bytes of the memory for traffic.
pub const STRESS: usize = 65_536 * 4;
pub const TIMEOUT_NS: u64 = 3_000_000_000;
/// Warps that ring one doorbell.
const WARPS: u32 = 128;

/// The kernel and its memory.
pub struct Litmus {
    module: Module,
    function: KernelFunction,
    ground: Ground,
    logs: [DeviceMemory; 2],
    stress: DeviceMemory,
    counts: DeviceMemory,
}

/// The size of a launch.
pub struct Size {
    pub instances: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks of each role, and blocks that only make traffic.
    pub blocks: u32,
    pub stress: u32,
    pub iterations: u32,
}

impl Litmus {
    pub fn new(bench: &Bench) -> Result<Self> {
        let module = Module::embedded(&bench.gpu, gpu_litmus::PTX.as_bytes())?;
        let log = || DeviceMemory::new(&bench.gpu, STEPS as usize * 4);
        Ok(Self {
            function: module.function("nvme_litmus")?,
            module,
            ground: Ground::new(&bench.gpu)?,
            logs: [log()?, log()?],
            stress: DeviceMemory::new(&bench.gpu, STRESS)?,
            counts: DeviceMemory::new(&bench.gpu, size_of::<Counts>())?,
        })
    }

    /// Runs launch `number` of a case that has to see `wanted` messages in all.
    pub fn launch(
        &self,
        bench: &Bench,
        case: &Case,
        number: u64,
        wanted: u64,
    ) -> std::result::Result<Counts, String> {
        self.try_launch(bench, case, number, wanted)
            .map_err(|error| error.to_string())
    }

    fn try_launch(&self, bench: &Bench, case: &Case, number: u64, wanted: u64) -> Result<Counts> {
        let mut chance = Chance::new(data_word(number, case.name().len() as u64));
        let steps = STEPS.min(wanted.next_power_of_two().max(1024));
        let size = size(case, &mut chance, steps);
        let offset = chance.of(&[0, 64, 256]);
        let place = |index: usize| {
            // The GPU's own business is in its own memory.
            let own = match case.shape {
                Shape::Relay => index == 2,
                Shape::Turns => index > 0,
                _ => false,
            };
            let memory = if own { Memory::Device } else { case.memory };
            self.ground.place(memory, index, index * offset)
        };
        let (x, y, z) = (place(0), place(1), place(2));
        let every = if case.shape == Shape::Relay { 7 } else { 3 };
        let mut args = Args {
            x: x.gpu,
            y: y.gpu,
            z: z.gpu,
            logs: [self.logs[0].address(), self.logs[1].address()],
            stress: self.stress.address(),
            counts: self.counts.address(),
            timeout_ns: TIMEOUT_NS * bench.patience,
            seed: chance.next(),
            iterations: size.iterations,
            instances: size.instances,
            stride: chance.of(&[64, 128, 256, 1024]),
            shape: case.shape as u32,
            flavour: case.flavour as u32,
            within: case.within as u32,
            roles: match (case.shape, case.players) {
                (Shape::Barrier, _) => 1,
                (_, Players::Gpu) => every,
                (_, Players::CpuFirst) => every & !1,
                (_, Players::CpuLast) => 1,
            },
            blocks: size.blocks,
            pause: chance.of(&[0, 0, 7, 63, 511]),
            reserved: 0,
        };
        if case.shape == Shape::Barrier {
            // Every thread has a word, and they follow each other.
            args.stride = 64;
        }
        self.ground.clear()?;
        self.counts.zero()?;
        for log in &self.logs {
            log.zero()?;
        }
        let grid = size.blocks * args.roles.count_ones() + size.stress;
        // SAFETY: the kernel takes one `Args`; its addresses are memory that lives as long as this
        // program, which ends when the kernel does not.
        unsafe {
            self.module
                .launch(&bench.stream, self.function, grid, size.threads, &args)?;
        }
        let over = AtomicBool::new(false);
        let role = Role {
            case,
            args: &args,
            x: x.host,
            y: y.host,
            z: z.host,
            over: &over,
        };
        let cpu = match case.players {
            Players::Gpu => None,
            _ => Some(role),
        };
        let (mut counts, log) = std::thread::scope(|scope| {
            let players: Vec<_> = cpu
                .iter()
                .flat_map(|role| parts(args.instances).map(move |part| (role, part)))
                .map(|(role, part)| scope.spawn(move || role.play(part)))
                .collect();
            bench.wait();
            // Release: what the kernel did is over for who sees this.
            over.store(true, Ordering::Release);
            let mut sum = Counts::default();
            let mut logs = Vec::new();
            for player in players {
                // The message of a thread that panicked was printed; its counts are ignored.
                let (counts, log) = player.join().unwrap_or_default();
                sum.reads += counts.reads;
                sum.fresh += counts.fresh;
                sum.forbidden += counts.forbidden;
                logs.push(log);
            }
            (sum, logs)
        });
        let gpu = self.counts()?;
        counts.reads += gpu.reads;
        counts.fresh += gpu.fresh;
        counts.forbidden += gpu.forbidden;
        counts.late += gpu.late;
        if case.shape == Shape::Buffering {
            let instances = args.instances as usize;
            let first = download(&self.logs[0])?;
            let second = match case.players {
                Players::Gpu => download(&self.logs[1])?,
                _ => interleaved(&log, instances, args.iterations as usize),
            };
            counts.forbidden += buffered(&first, &second, instances, args.iterations as usize);
        }
        Ok(counts)
    }

    fn counts(&self) -> Result<Counts> {
        let mut bytes = [0; size_of::<Counts>()];
        self.counts.download(0, &mut bytes)?;
        // SAFETY: the slice has as many bytes as the struct, all of whose fields are integers.
        Ok(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }
}

/// Returns a random number of instances and size of blocks.
pub fn size(case: &Case, chance: &mut Chance, steps: u64) -> Size {
    let together = matches!(case.shape, Shape::Lanes | Shape::Barrier);
    let threads = match (case.flavour, together) {
        (_, false) => chance.of(&[1, 32, 64]),
        (Flavour::Warp, _) => 32,
        _ => chance.of(&[64, 128, 256]),
    };
    let instances: u32 = match (case.players, case.shape) {
        (_, Shape::Turns) => chance.of(&[1, 4]),
        _ if steps < 1 << 14 => 64,
        (_, Shape::Lanes | Shape::Barrier) => chance.of(&[64, 128]),
        (Players::Gpu, _) => chance.of(&[64, 256, 1024]),
        // Few instances, so that the CPU returns to each often enough to act between two operations of the GPU.
        (_, Shape::Buffering) => chance.of(&[4, 16, 64]),
        _ => chance.of(&[64, 256]),
    };
    let threads = match case.shape {
        Shape::Turns => threads.min(32),
        _ if together => threads,
        _ => threads.min(instances),
    };
    let blocks = match case.shape {
        Shape::Turns => WARPS,
        _ if together => instances,
        _ => instances / threads,
    };
    let players = match case.shape {
        Shape::Turns => WARPS * threads,
        _ => instances,
    };
    Size {
        instances,
        threads,
        blocks,
        stress: chance.of(&[0, 0, 16, 64]),
        iterations: (steps / u64::from(players)).max(1) as u32,
    }
}

/// Divides `instances` among a few threads of the CPU.
fn parts(instances: u32) -> impl Iterator<Item = std::ops::Range<u32>> {
    let cores = std::thread::available_parallelism().map_or(2, |n| n.get() as u32);
    let threads = (cores / 2).clamp(1, 4).min(instances);
    (0..threads).map(move |k| instances * k / threads..instances * (k + 1) / threads)
}

/// Returns the logs of the CPU's threads as one: by iteration, then by instance.
fn interleaved(logs: &[Vec<u32>], instances: usize, iterations: usize) -> Vec<u32> {
    let mut whole = Vec::with_capacity(instances * iterations);
    for number in 0..iterations {
        for log in logs {
            let width = log.len() / iterations.max(1);
            whole.extend_from_slice(&log[number * width..(number + 1) * width]);
        }
    }
    whole
}

fn download(log: &DeviceMemory) -> Result<Vec<u32>> {
    let mut bytes = vec![0; log.len()];
    log.download(0, &mut bytes)?;
    let words = bytes.chunks_exact(4);
    Ok(words
        .map(|word| word.iter().rev().fold(0, |sum, &b| sum << 8 | u32::from(b)))
        .collect())
}

/// Returns the forbidden outcomes of store buffering in two logs (one plus the value read, by iteration, then by
/// instance): in its iteration i one role did not see the other one's store j, and the other one in its iteration j did
/// not see store i.
fn buffered(first: &[u32], second: &[u32], instances: usize, iterations: usize) -> u64 {
    let mut forbidden = 0;
    for k in 0..instances {
        for i in 1..=iterations {
            let Some(read) = first[(i - 1) * instances + k].checked_sub(1) else {
                break;
            };
            // The first store of the other role that it did not see.
            let j = read as usize + 1;
            if j > iterations {
                break;
            }
            let Some(other) = second[(j - 1) * instances + k].checked_sub(1) else {
                break;
            };
            forbidden += u64::from((other as usize) < i);
        }
    }
    forbidden
}

/// Numbers by chance, the same for the same case and launch.
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = data_word(self.0, 1);
        self.0
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[(self.next() % choices.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_buffering_is_found_in_the_logs() {
        // One instance, two iterations. Logs hold one plus the value read.
        assert_eq!(
            buffered(&[1, 1], &[3, 3], 1, 2),
            0,
            "the second role saw both"
        );
        assert_eq!(buffered(&[1, 3], &[1, 3], 1, 2), 1, "neither saw the first");
        assert_eq!(
            buffered(&[1, 2], &[2, 2], 1, 2),
            1,
            "neither saw the second"
        );
        assert_eq!(
            buffered(&[3, 3], &[1, 1], 1, 2),
            0,
            "the first role saw all"
        );
        assert_eq!(buffered(&[1, 0], &[0, 0], 1, 2), 0, "not reached");
        // Two instances side by side.
        assert_eq!(buffered(&[2, 1], &[1, 1], 2, 1), 1);
    }

    #[test]
    fn logs_of_threads_become_one() {
        let logs = [vec![1, 2, 5, 6], vec![3, 7]];
        assert_eq!(interleaved(&logs, 3, 2), [1, 2, 3, 5, 6, 7]);
    }

    #[test]
    fn every_instance_is_played_once() {
        for instances in [1, 4, 64, 255] {
            let all: Vec<u32> = parts(instances).flatten().collect();
            assert_eq!(all, (0..instances).collect::<Vec<_>>());
        }
    }
}
