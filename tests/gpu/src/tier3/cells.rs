//! Mode x fault, wraps, sizes of queues, as in the matrix of the other tiers.

use super::Stage;
use super::controller::{Image, Model};
use super::rig::PeerRig;
use crate::bench::{Bench, Mode};
use crate::limits::limit;
use crate::matrix::{Course, Effect};
use crate::report::Report;
use crate::sim::BLOCK;
use gpu_peer::{Plan, fault};
use nvme_host::cuda::RingShape;

const QUEUES: u32 = 8;
/// Least bytes of the medium, and of the data memory.
pub const IMAGE: u64 = 8 << 20;
/// Delay of a late completion, before the factor for slow tools.
const LATE_NS: u64 = 400_000_000;
/// The longest life of a controller, in launches that take as long as one may.
pub const LAUNCHES: u32 = 4;

/// A fault and its effect on the driver. One without `every` strikes three times, or once if the controller dies of it.
struct Fault {
    name: &'static str,
    kind: u32,
    every: u32,
    value: u64,
    effect: Effect,
}

const fn fault(name: &'static str, kind: u32, value: u64, effect: Effect) -> Fault {
    Fault {
        name,
        kind,
        every: 0,
        value,
        effect,
    }
}

const NO_FAULT: Fault = fault("no-fault", fault::NONE, 0, Effect::None);

const FAULTS: [Fault; 12] = [
    NO_FAULT,
    Fault {
        every: 3,
        ..fault("reordered", fault::REORDER, 0, Effect::None)
    },
    Fault {
        every: 7,
        ..fault("torn-cqe", fault::TORN, 0, Effect::None)
    },
    fault("error-status", fault::STATUS, 0x281, Effect::Status(0x281)),
    fault("dropped", fault::DROP, 0, Effect::Late),
    fault("late", fault::DELAY, LATE_NS, Effect::Late),
    fault("wrong-phase", fault::WRONG_PHASE, 0, Effect::Late),
    fault("wrong-cid", fault::WRONG_CID, 0xFFF0, Effect::Refused),
    fault("duplicate", fault::DUPLICATE, 0, Effect::Refused),
    fault("wrong-sqhd", fault::WRONG_SQHD, 0x7777, Effect::Refused),
    fault("dead-cfs", fault::FATAL, 0, Effect::Late),
    fault("dead-gone", fault::GONE, 0, Effect::Gone),
];

impl Fault {
    fn plan(&self, commands: u64, patience: u64) -> Plan {
        let at = |part: u64| (commands * part / 4).max(1) as u32;
        let nth = match (self.kind, self.every) {
            (fault::NONE, _) | (_, 1..) => [0; 4],
            (fault::FATAL | fault::GONE, _) => [at(2), 0, 0, 0],
            _ => [at(1), at(2), at(3), 0],
        };
        Plan {
            kind: self.kind,
            every: self.every,
            nth,
            value: match self.kind {
                fault::DELAY => self.value * patience,
                _ => self.value,
            },
        }
    }
}

/// One cell.
struct Cell {
    mode: Mode,
    queues: u32,
    entries: u32,
    warps: u32,
    dstrd: u8,
    /// Number that the counters pass during the run; without it they start at 0.
    wrap: Option<u32>,
}

impl Cell {
    fn of(mode: Mode) -> Self {
        Self {
            mode,
            queues: QUEUES,
            entries: 256,
            warps: QUEUES,
            dstrd: 0,
            wrap: None,
        }
    }

    fn run(&self, bench: &Bench, peer: &Image, fault: &Fault) -> Result<String, String> {
        // Rings of two entries take a round trip for each command.
        let commands = match self.entries {
            ..32 => bench.commands.min(100_000),
            _ => bench.commands,
        };
        let start = match self.wrap {
            None => 0,
            Some(wrap) => {
                // A multiple of two passes before it, passed after about a quarter of the run.
                let passes = 2 * self.entries;
                let quarter = (commands / 4 / u64::from(self.queues)).min(1 << 15) as u32;
                wrap.wrapping_sub((quarter / passes * passes).max(passes))
            }
        };
        let shape = RingShape {
            queues: self.queues,
            entries: self.entries,
            slots: self.entries - 1,
            list_words: 512,
            start,
        };
        // A block for each thread of the shared mode.
        let image = IMAGE.max(u64::from(self.queues) * 4 * 128 * u64::from(BLOCK));
        let model = Model {
            queues: self.queues,
            dstrd: self.dstrd,
            image,
            plan: fault.plan(commands, bench.patience),
            warps: self.warps,
            timeout: limit() * LAUNCHES,
        };
        let mut rig = PeerRig::new(bench, peer, shape, model, image as usize, commands)?;
        let course = Course {
            mode: self.mode,
            queues: self.queues,
            commands,
            effect: fault.effect,
        };
        let seen = course.run(bench, &mut rig)?;
        let counts = rig.stop()?;
        if counts.bad_doorbells != 0 || counts.late != 0 {
            return Err(format!("{seen}; the controller says {counts:?}"));
        }
        Ok(format!("{seen}, from {start:#x}, {} posted", counts.posted))
    }
}

/// Runs every cell.
pub fn all(report: &mut Report, stage: &Stage<'_>) {
    const WRAPS: [Option<u32>; 3] = [None, Some(1 << 16), Some(0)];
    let mut cell = |name: &str, cell: Cell, fault: &Fault| {
        stage.test(report, name, |bench, image| cell.run(bench, image, fault));
    };
    for (turn, mode) in Mode::ALL.into_iter().enumerate() {
        for (other, fault) in FAULTS.iter().enumerate() {
            let name = format!("matrix/{}/{}", mode.name(), fault.name);
            let wrap = WRAPS[(turn + other) % WRAPS.len()];
            cell(
                &name,
                Cell {
                    wrap,
                    ..Cell::of(mode)
                },
                fault,
            );
        }
        for (name, wrap) in [("2^16", WRAPS[1]), ("2^32", WRAPS[2])] {
            let name = format!("wraps/{}/{name}", mode.name());
            let small = Cell {
                entries: 32,
                wrap,
                ..Cell::of(mode)
            };
            cell(&name, small, &NO_FAULT);
        }
    }
    for (queues, entries, warps) in [
        (1, 2, 1),
        (1, 1024, 1),
        (3, 64, 2),
        (16, 1024, 16),
        (128, 64, 16),
        (128, 128, 128),
    ] {
        for mode in [Mode::Warp, Mode::Shared] {
            let name = format!("size/{}/{queues}x{entries}/{warps}", mode.name());
            let sized = Cell {
                queues,
                entries,
                warps,
                dstrd: 4,
                ..Cell::of(mode)
            };
            cell(&name, sized, &NO_FAULT);
        }
    }
}
