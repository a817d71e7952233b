//! The long run: random reads and writes with verification. Queues and controllers are created again all the time, and
//! the test checks what must not grow.

use crate::{Outcome, config, pattern, said};
use nvme_host::core::spec::{Lba, Nsid, nvm};
use nvme_host::{Controller, DmaBuffer, DriverQueue};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Blocks that are used, in units of the longest command.
const UNITS: usize = 256;
const UNIT_BLOCKS: u32 = 32;
/// Time of one bring-up.
const ROUND: Duration = Duration::from_secs(5);
/// Queues at once.
const QUEUES: usize = 4;
const DEPTH: usize = 24;
/// Memory that the process may gain after the first rounds.
const SLACK_KIB: u64 = 2048;
/// Largest distance between the addresses of two buffers that are mapped at different times.
const ADDRESSES: u64 = 64 << 20;

/// Runs for `seconds` with the given seed.
pub fn run(device: &str, nsid: Nsid, seconds: u64, seed: u64) -> Outcome {
    let start = Instant::now();
    let mut random = seed | 1;
    // Seed of the last write of each unit, as the driver reported it.
    let mut model: Vec<Option<u64>> = vec![None; UNITS];
    let mut rounds = 0u64;
    let mut commands = 0u64;
    let mut settled = None;
    while start.elapsed() < Duration::from_secs(seconds) {
        commands += round(device, nsid, &mut random, &mut model)
            .map_err(|cause| format!("seed {seed}, round {rounds}: {cause}"))?;
        rounds += 1;
        let now = Footprint::now()?;
        match settled {
            None if rounds >= 3 => settled = Some(now),
            Some(before) => now.compare(before)?,
            None => {}
        }
    }
    println!(
        "{rounds} rounds, {commands} commands, {:?}",
        Footprint::now()?
    );
    Ok(())
}

fn round(
    device: &str,
    nsid: Nsid,
    random: &mut u64,
    model: &mut [Option<u64>],
) -> Result<u64, String> {
    let device = nvme_host::open(device).map_err(said)?;
    let controller = Controller::start(device, &config()).map_err(said)?;
    let block = controller.namespace(nsid).map_err(said)?.block_bytes();
    let began = Instant::now();
    let mut commands = 0;
    let first = address(&controller)?;
    while began.elapsed() < ROUND {
        let mut queues = Vec::new();
        let granted = QUEUES.min(controller.info().queue_pairs as usize);
        for _ in 0..granted {
            let entries = 2 + below(random, 64) as u32;
            queues.push(controller.create_queue_pair(entries).map_err(said)?);
        }
        commands += burst(&controller, &mut queues, nsid, block, random, model)?;
        for (qid, counts) in controller.statistics() {
            if counts.submitted != counts.completed {
                return Err(format!("queue {qid} lost commands: {counts:?}"));
            }
        }
        drop(queues);
        let now = address(&controller)?;
        if now.abs_diff(first) > ADDRESSES {
            return Err(format!("DMA addresses wander from {first:#x} to {now:#x}"));
        }
    }
    if controller.resets() > 0 {
        return Err(format!("{} controller resets", controller.resets()));
    }
    controller.shut_down().map_err(said)?;
    Ok(commands)
}

/// Address of new memory for the controller, when all other buffers have been freed.
fn address(controller: &Controller) -> Result<u64, String> {
    Ok(controller.alloc(4096).map_err(said)?.iova().0)
}

/// Sends some thousand commands over all queues; a unit is in one command at a time.
fn burst(
    controller: &Controller,
    queues: &mut [DriverQueue],
    nsid: Nsid,
    block: u32,
    random: &mut u64,
    model: &mut [Option<u64>],
) -> Result<u64, String> {
    let bytes = (UNIT_BLOCKS * block) as usize;
    let mut free = DmaBuffer::several(controller.device(), bytes, DEPTH).map_err(said)?;
    let mut pending: BTreeMap<(usize, u16), (usize, Option<u64>)> = BTreeMap::new();
    let mut left = 4000u64;
    let total = left;
    while left > 0 || !pending.is_empty() {
        while left > 0 && !free.is_empty() {
            let at = below(random, queues.len() as u64) as usize;
            let unit = below(random, UNITS as u64) as usize;
            if pending.values().any(|(busy, _)| *busy == unit)
                || queues[at].in_flight() >= queues[at].depth()
            {
                break;
            }
            let Some(mut buffer) = free.pop() else { break };
            let lba = Lba(unit as u64 * u64::from(UNIT_BLOCKS));
            let write = (model[unit].is_none() || below(random, 2) == 0).then(|| next(random));
            let sqe = match write {
                Some(seed) => {
                    pattern::fill(seed, 0, buffer.as_mut_slice());
                    nvm::write(nsid, lba, UNIT_BLOCKS)
                }
                None => nvm::read(nsid, lba, UNIT_BLOCKS),
            };
            let submitted = queues[at].submit(sqe, Some(buffer));
            let cid = submitted.map_err(|refused| refused.error.to_string())?;
            pending.insert((at, cid.0), (unit, write));
            left -= 1;
        }
        for (at, queue) in queues.iter_mut().enumerate() {
            queue.ring();
            while let Some(done) = queue.poll().map_err(said)? {
                let (unit, write) = pending
                    .remove(&(at, done.cid.0))
                    .ok_or("an unknown command ended")?;
                if !done.is_success() {
                    return Err(said(queue.error_of(&done, "the command")));
                }
                let buffer = done.buffer.ok_or("no buffer came back")?;
                match write {
                    Some(seed) => model[unit] = Some(seed),
                    None => {
                        let seed = model[unit].ok_or("read before it was written")?;
                        if let Some(at) = pattern::difference(seed, 0, buffer.as_slice()) {
                            return Err(format!("unit {unit} differs at byte {at}"));
                        }
                    }
                }
                free.push(buffer);
            }
        }
    }
    Ok(total)
}

/// Quantities that a leak would increase.
#[derive(Clone, Copy, Debug)]
struct Footprint {
    resident_kib: u64,
    /// Memory that VFIO has pinned for a device; 0 between two rounds.
    locked_kib: u64,
    mappings: usize,
    descriptors: usize,
}

impl Footprint {
    fn now() -> Result<Self, String> {
        let read = |path: &str| std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"));
        let status = read("/proc/self/status")?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            number.ok_or_else(|| format!("no {name} in /proc/self/status"))
        };
        let descriptors = std::fs::read_dir("/proc/self/fd").map_err(|e| e.to_string())?;
        Ok(Self {
            resident_kib: field("VmRSS:")?,
            locked_kib: field("VmLck:")?,
            mappings: read("/proc/self/maps")?.lines().count(),
            descriptors: descriptors.count(),
        })
    }

    fn compare(self, before: Self) -> Outcome {
        if self.resident_kib > before.resident_kib + SLACK_KIB
            || self.locked_kib > 0
            || self.mappings > before.mappings + 4
            || self.descriptors > before.descriptors
        {
            return Err(format!("a leak: {before:?}, then {self:?}"));
        }
        Ok(())
    }
}

fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn below(state: &mut u64, bound: u64) -> u64 {
    (next(state) >> 16) % bound
}
