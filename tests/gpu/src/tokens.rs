//! Tokens under scarcity: four slots, twice as many blocks as fit on the GPU, three tokens a thread, waited for in the
//! reverse order. A protocol in which a thread waits for its turn while it holds a slot would deadlock here.

use crate::bench::{Bench, Tier};
use crate::matrix::accounts_agree;
use crate::report::Report;
use crate::rig::{Rig, Shape};
use crate::sim::Model;
use nvme_host::cuda::Kernel;

const SLOTS: u32 = 4;
const TOKENS: u32 = 3;

/// One active lane of each warp, full warps, and full warps whose lanes are on different queues.
pub fn all(report: &mut Report, bench: &Bench) {
    for (name, lanes, queues) in [
        ("one-lane", 1, 1),
        ("full-warps", 32, 1),
        ("mixed-warps", 32, 5),
    ] {
        report.test(&format!("tokens/{name}"), |_| run(bench, lanes, queues));
    }
}

fn run(bench: &Bench, lanes: u32, queues: u32) -> Result<String, String> {
    let shape = Shape {
        tier: Tier::Pinned,
        queues,
        entries: 8,
        slots: SLOTS,
        start: 0,
        data: 1 << 20,
    };
    let model = Model {
        image: 0,
        dstrd: 0,
        faults: &[],
        threads: 1,
    };
    let mut rig = Rig::new(bench, shape, &model)?;
    let (grid, block) = (2 * bench.resident_warps()?, 32);
    let mut launch = rig.launch()?;
    launch.commands = u64::from(grid) * u64::from(lanes * TOKENS);
    launch.opcode = u32::from(nvme_core::spec::nvm::opcode::FLUSH);
    launch.depth = TOKENS;
    launch.lanes = lanes;
    launch.mixed = u32::from(queues > 1);
    launch.timeout_ns = 10_000_000_000;
    let outcome = rig.run(Kernel::Tokens, grid, block, launch)?;
    accounts_agree(&outcome, rig.in_flight()?)?;
    match outcome.report.completed == launch.commands {
        true => Ok(format!(
            "{} commands of {grid} blocks through {SLOTS} slots of each of {queues} queues",
            launch.commands
        )),
        false => Err(format!("{:?}", outcome.report)),
    }
}
