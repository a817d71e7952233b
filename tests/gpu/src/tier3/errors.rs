//! Refusals of a controller, and the effect of each command on the medium.

use super::Stage;
use super::cells::{IMAGE, LAUNCHES};
use super::controller::{Image, Model};
use super::rig::PeerRig;
use crate::bench::{Bench, Mode};
use crate::limits::limit;
use crate::matrix::{accounts_agree, wrong_words};
use crate::report::Report;
use crate::rig::{CANARY, Rigged};
use crate::sim::{BLOCK, IMAGE_SEED};
use gpu_peer::Plan;
use nvme_core::spec::Status;
use nvme_core::spec::nvm::opcode;
use nvme_gpu_kernel::work::{LaunchArguments, data_word};
use nvme_host::cuda::RingShape;

const QUEUES: u32 = 4;
const COMMANDS: u64 = 64;

pub fn all(report: &mut Report, stage: &Stage<'_>) {
    for mode in [Mode::Warp, Mode::Shared] {
        let name = format!("errors/{}", mode.name());
        stage.test(report, &name, |bench, image| refused(bench, image, mode));
        let name = format!("ops/{}", mode.name());
        stage.test(report, &name, |bench, image| ops(bench, image, mode));
        let name = format!("lists/{}", mode.name());
        stage.test(report, &name, |bench, image| lists(bench, image, mode));
    }
}

fn rig<'b>(bench: &'b Bench, image: &'b Image, bytes: usize) -> Result<PeerRig<'b>, String> {
    let shape = RingShape {
        queues: QUEUES,
        entries: 64,
        slots: 63,
        list_words: 512,
        start: 0,
    };
    let model = Model {
        queues: QUEUES,
        dstrd: 0,
        image: IMAGE,
        plan: Plan::default(),
        warps: QUEUES,
        timeout: limit() * LAUNCHES,
    };
    PeerRig::new(bench, image, shape, model, bytes, IMAGE / 512)
}

/// Runs `launch`, of which every command ends with `status`.
fn all_end(
    bench: &Bench,
    rig: &mut PeerRig<'_>,
    mode: Mode,
    mut launch: LaunchArguments,
    status: Status,
) -> Result<(), String> {
    let (grid, block) = mode.shape(QUEUES, &mut launch);
    launch.timeout_ns = 3_000_000_000 * bench.patience;
    let outcome = rig.run(mode.kernel(), grid, block, launch)?;
    accounts_agree(&outcome, rig.in_flight()?)?;
    let report = outcome.report;
    let (completed, failed) = match status.is_success() {
        true => (launch.commands, 0),
        false => (0, launch.commands),
    };
    let same = Status(report.status as u16).is(status);
    match (report.completed, report.failed) == (completed, failed) && same {
        true => Ok(()),
        false => Err(format!("not {status}: {report:?}")),
    }
}

fn refused(bench: &Bench, image: &Image, mode: Mode) -> Result<String, String> {
    let mut rig = rig(bench, image, IMAGE as usize)?;
    let base = LaunchArguments {
        commands: COMMANDS,
        ..rig.launch()?
    };
    let blocks = IMAGE / u64::from(BLOCK);
    let cases = [
        (
            "opcode",
            LaunchArguments {
                opcode: 0x7F,
                ..base
            },
            Status::INVALID_OPCODE,
        ),
        (
            "namespace 2",
            LaunchArguments { nsid: 2, ..base },
            Status::INVALID_NAMESPACE,
        ),
        (
            "namespace 0",
            LaunchArguments { nsid: 0, ..base },
            Status::INVALID_NAMESPACE,
        ),
        (
            "first block past the end",
            LaunchArguments {
                lba: blocks,
                ..base
            },
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "LBA that wraps",
            LaunchArguments {
                lba: u64::MAX - COMMANDS,
                ..base
            },
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "last block past the end",
            LaunchArguments {
                lba: blocks - 7,
                blocks: 8,
                units: 1,
                ..base
            },
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "more than MDTS",
            LaunchArguments {
                blocks: 2049,
                units: 1,
                commands: 4,
                linear: 1,
                ..base
            },
            Status::INVALID_FIELD,
        ),
        (
            "memory that is not the controller's",
            LaunchArguments {
                data_iova: 0x1000,
                ..base
            },
            Status::DATA_TRANSFER_ERROR,
        ),
    ];
    let count = cases.len();
    for (name, launch, status) in cases {
        all_end(bench, &mut rig, mode, launch, status).map_err(|why| format!("{name}: {why}"))?;
    }
    if rig.data().iter().any(|&byte| byte != CANARY) || !rig.guards_hold() {
        return Err("a refused command moved data".to_owned());
    }
    rig.stop()?;
    match wrong_words(&rig.medium()?) {
        0 => Ok(format!("{count} kinds of {COMMANDS} commands")),
        wrong => Err(format!("{wrong} words of the medium were changed")),
    }
}

/// Compare, write zeroes, flush and write, each with the medium compared afterwards.
fn ops(bench: &Bench, image: &Image, mode: Mode) -> Result<String, String> {
    let mut rig = rig(bench, image, IMAGE as usize)?;
    let base = rig.launch()?;
    let every = LaunchArguments {
        commands: IMAGE / u64::from(BLOCK),
        linear: 1,
        ..base
    };
    let pages = LaunchArguments {
        commands: IMAGE / 4096,
        blocks: 8,
        units: IMAGE / 4096,
        linear: 1,
        ..base
    };
    let with = |launch: LaunchArguments, opcode: u8| LaunchArguments {
        opcode: u32::from(opcode),
        ..launch
    };
    let good = Status::SUCCESS;
    all_end(bench, &mut rig, mode, every, good)?;
    if wrong_words(rig.data()) != 0 {
        return Err("the first read is wrong".to_owned());
    }
    all_end(bench, &mut rig, mode, with(pages, opcode::COMPARE), good)?;
    all_end(
        bench,
        &mut rig,
        mode,
        with(
            LaunchArguments {
                commands: 64,
                ..base
            },
            opcode::FLUSH,
        ),
        good,
    )?;
    // One byte of each page differs.
    for page in rig.data_mut().chunks_exact_mut(4096) {
        page[4095] ^= 1;
    }
    all_end(
        bench,
        &mut rig,
        mode,
        with(pages, opcode::COMPARE),
        Status::COMPARE_FAILURE,
    )?;
    // Half of the medium is overwritten, a quarter zeroed.
    let seed = IMAGE_SEED + 1;
    for (index, word) in rig.data_mut().chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&data_word(seed, index as u64).to_le_bytes());
    }
    let half = |launch: LaunchArguments| LaunchArguments {
        commands: launch.commands / 2,
        ..launch
    };
    all_end(
        bench,
        &mut rig,
        mode,
        with(half(pages), opcode::WRITE),
        good,
    )?;
    let zeroed = LaunchArguments {
        commands: 256,
        blocks: (IMAGE / 4 / 256 / 512) as u32,
        units: 256,
        lba: IMAGE * 3 / 4 / 512,
        ..base
    };
    all_end(
        bench,
        &mut rig,
        mode,
        with(zeroed, opcode::WRITE_ZEROES),
        good,
    )?;
    rig.stop()?;
    let words = IMAGE / 8;
    let expected = |index: u64| match index {
        index if index < words / 2 => data_word(seed, index),
        index if index < words * 3 / 4 => data_word(IMAGE_SEED, index),
        _ => 0,
    };
    let medium = rig.medium()?;
    let wrong = medium.chunks_exact(8).enumerate();
    let wrong = wrong.filter(|(index, word)| expected(*index as u64).to_le_bytes() != **word);
    match (wrong.count(), rig.guards_hold()) {
        (0, true) => Ok(format!("{words} words of the medium as expected")),
        (wrong, guards) => Err(format!(
            "{wrong} words of the medium are wrong, guards {guards}"
        )),
    }
}

/// Transfers of 3 to 256 pages, from odd offsets: one PRP, two, and lists.
fn lists(bench: &Bench, image: &Image, mode: Mode) -> Result<String, String> {
    let mut rig = rig(bench, image, IMAGE as usize + 8192)?;
    let mut seen = 0;
    for (blocks, offset) in [
        (1, 0),
        (1, 3840),
        (8, 4),
        (8, 512),
        (16, 0),
        (16, 2048),
        (24, 0),
        (100, 36),
        (1024, 0),
        (2048, 0),
        (2040, 4092),
    ] {
        rig.fill();
        let launch = rig.launch()?;
        let bytes = u64::from(blocks) * u64::from(BLOCK);
        let commands = IMAGE / bytes;
        let read = LaunchArguments {
            blocks,
            commands,
            units: commands,
            linear: 1,
            data_iova: launch.data_iova + offset,
            data_bytes: launch.data_bytes - offset,
            ..launch
        };
        let what = format!("{blocks} blocks at {offset}");
        let ended = all_end(bench, &mut rig, mode, read, Status::SUCCESS);
        ended.map_err(|why| format!("{what}: {why}"))?;
        let (from, to) = (offset as usize, (offset + commands * bytes) as usize);
        if wrong_words(&rig.data()[from..to]) != 0 {
            return Err(format!("{what}: wrong data"));
        }
        let mut around = rig.data()[..from].iter().chain(&rig.data()[to..]);
        if around.any(|&byte| byte != CANARY) || !rig.guards_hold() {
            return Err(format!("{what}: bytes around the data were overwritten"));
        }
        seen += commands;
    }
    Ok(format!("{seen} reads of 11 shapes"))
}
