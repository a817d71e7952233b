//! The litmus cases: each shape with its variants, the memory of its words, and the threads that run it.

use gpu_litmus::{Flavour, Shape, Within};

/// The memory that holds the words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The GPU's memory.
    Device,
    /// Registered host memory.
    Pinned,
}

/// The threads that play the roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Players {
    /// Blocks of one GPU.
    Gpu,
    /// The CPU has role 0.
    CpuFirst,
    /// The CPU has the last role.
    CpuLast,
}

/// One case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub shape: Shape,
    pub flavour: Flavour,
    pub within: Within,
    pub memory: Memory,
    pub players: Players,
}

impl Case {
    /// Returns whether forbidden outcomes are to be expected.
    pub fn weak(&self) -> bool {
        matches!(
            self.flavour,
            Flavour::AcqRel
                | Flavour::Relaxed
                | Flavour::Plain
                | Flavour::CopyRelaxed
                | Flavour::CopyCached
        )
    }

    /// Returns a name such as `litmus/message/fence/gpu/device/gpu-gpu`.
    pub fn name(&self) -> String {
        let shape = match self.shape {
            Shape::Message => "message",
            Shape::Buffering => "buffering",
            Shape::Completion => "completion",
            Shape::Ring => "ring",
            Shape::Doorbell => "doorbell",
            Shape::Lanes => "lanes",
            Shape::Relay => "relay",
            Shape::Barrier => "barrier",
            Shape::Turns => "turns",
        };
        let flavour = match self.flavour {
            Flavour::Fence => "fence",
            Flavour::Order => "order",
            Flavour::Exchange => "exchange",
            Flavour::Batch => "batch",
            Flavour::Warp => "warp",
            Flavour::Block => "block",
            Flavour::AcqRel => "weak-acq-rel",
            Flavour::Relaxed => "weak-relaxed",
            Flavour::Plain => "weak-plain",
            Flavour::Copy => "copy",
            Flavour::CopyRelaxed => "weak-copy-relaxed",
            Flavour::CopyCached => "weak-copy-cached",
        };
        let within = match self.within {
            _ if self.shape == Shape::Barrier => "cta",
            Within::Gpu => "gpu",
            Within::Sys => "sys",
        };
        let memory = match self.memory {
            Memory::Device => "device",
            Memory::Pinned => "pinned",
        };
        let players = match (self.players, self.shape) {
            (Players::Gpu, Shape::Barrier) => "gpu",
            (Players::Gpu, Shape::Relay) => "gpu-gpu-gpu",
            (Players::Gpu, _) => "gpu-gpu",
            (Players::CpuFirst, Shape::Relay) => "cpu-gpu-gpu",
            (Players::CpuFirst, _) => "cpu-gpu",
            (Players::CpuLast, _) => "gpu-cpu",
        };
        format!("litmus/{shape}/{flavour}/{within}/{memory}/{players}")
    }
}

/// Returns every case: each shape with its orders, in each memory and among each set of threads that it supports.
pub fn all() -> Vec<Case> {
    use Flavour::{AcqRel, Batch, Block, Exchange, Fence, Order, Plain, Relaxed, Warp};
    use Memory::{Device, Pinned};
    use Players::{CpuFirst, CpuLast, Gpu};
    let mut cases = Vec::new();
    let mut add = |shape, flavours: &[Flavour], within: &[Within], places: &[(Memory, Players)]| {
        for &(memory, players) in places {
            for &within in within {
                cases.extend(flavours.iter().map(|&flavour| Case {
                    shape,
                    flavour,
                    within,
                    memory,
                    players,
                }));
            }
        }
    };
    let both = [Within::Gpu, Within::Sys];
    let sys = [Within::Sys];
    let on_gpu = [(Device, Gpu), (Pinned, Gpu)];
    let from_cpu = [(Device, Gpu), (Pinned, Gpu), (Pinned, CpuFirst)];
    let to_cpu = [(Device, Gpu), (Pinned, Gpu), (Pinned, CpuLast)];
    add(
        Shape::Message,
        &[Fence, Order, Relaxed, Plain],
        &both,
        &on_gpu,
    );
    add(Shape::Message, &[Exchange], &both, &[(Device, Gpu)]);
    let copies = [Flavour::Copy, Flavour::CopyRelaxed, Flavour::CopyCached];
    add(Shape::Message, &copies, &both, &[(Device, Gpu)]);
    let of_dma = [(Pinned, Gpu), (Pinned, CpuFirst)];
    add(Shape::Message, &copies, &sys, &of_dma);
    let across = [Fence, Order, Relaxed, Plain];
    add(Shape::Message, &across, &sys, &[(Pinned, CpuFirst)]);
    add(Shape::Message, &across[..3], &sys, &[(Pinned, CpuLast)]);
    add(Shape::Buffering, &[Fence, AcqRel, Relaxed], &both, &on_gpu);
    add(
        Shape::Buffering,
        &[Fence, AcqRel, Relaxed],
        &sys,
        &[(Pinned, CpuLast)],
    );
    let reads = [Fence, Order, Batch, Relaxed, Plain];
    add(Shape::Completion, &reads, &sys, &from_cpu);
    add(Shape::Ring, &[Fence, Relaxed], &sys, &from_cpu);
    add(Shape::Doorbell, &[Fence, Relaxed], &sys, &to_cpu);
    add(Shape::Lanes, &[Warp, Block, Relaxed], &sys, &to_cpu);
    add(Shape::Relay, &reads[1..], &sys, &from_cpu);
    add(Shape::Barrier, &[Warp, Block, Relaxed], &sys, &on_gpu[..1]);
    let turns = [Fence, Relaxed, Plain];
    add(Shape::Turns, &turns, &sys, &[(Pinned, CpuLast)]);
    cases
}

#[cfg(test)]
mod tests {
    use super::all;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn every_ordered_case_has_a_weak_one_beside_it() {
        let mut beside = BTreeMap::new();
        let mut names = BTreeSet::new();
        for case in all() {
            assert!(names.insert(case.name()), "{} twice", case.name());
            let place = case
                .name()
                .replace(case.name().split('/').nth(2).unwrap(), "");
            let (strong, weak) = beside.entry(place).or_insert((0, 0));
            *strong += u32::from(!case.weak());
            *weak += u32::from(case.weak());
        }
        for (place, (strong, weak)) in beside {
            assert!(strong > 0 && weak > 0, "{place}");
        }
    }
}
