//! Completions and data that arrive after a deadline, after a reset and after the slot's next use.

use crate::bench::{Bench, Mode, Tier};
use crate::matrix::accounts_agree;
use crate::report::Report;
use crate::rig::{CANARY, Rig, Shape};
use crate::sim::{BLOCK, IMAGE_SEED, Model};
use nvme_gpu_kernel::work::{account, data_word};
use std::time::Duration;

const COMMANDS: u64 = 256;
const BYTES: usize = BLOCK as usize * COMMANDS as usize;
/// The delayed command, by order of arrival at the controller.
const NTH: u32 = 100;
const DELAY: Duration = Duration::from_millis(500);
const TIMEOUT_NS: u64 = 50_000_000;

/// The event between the deadline and the late completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Between {
    /// Nothing happens: the host takes the completion before the next launch.
    Nothing,
    /// The controller aborts the command; the slot and the buffer are used again.
    Abort,
    /// A controller reset; the slot and the buffer are used again.
    Reset,
}

/// Runs every mode and case.
pub fn all(report: &mut Report, bench: &Bench) {
    for mode in Mode::ALL {
        for (name, between) in [
            ("timeout", Between::Nothing),
            ("abort", Between::Abort),
            ("reset", Between::Reset),
        ] {
            let name = format!("late/{}/after-{name}", mode.name());
            report.test(&name, |_| run(bench, mode, between));
        }
    }
}

fn run(bench: &Bench, mode: Mode, between: Between) -> Result<String, String> {
    let shape = Shape {
        tier: Tier::Pinned,
        queues: 1,
        entries: 512,
        slots: 300,
        start: 0,
        data: BYTES,
    };
    let patience = bench.patience as u32;
    let delay = DELAY * patience;
    let model = Model {
        image: BYTES as u64,
        dstrd: 0,
        faults: &[format!("delay:{}ms@nth={NTH}", delay.as_millis())],
        threads: 1,
    };
    let mut rig = Rig::new(bench, shape, &model)?;
    let mut launch = rig.launch()?;
    let (grid, block) = mode.shape(1, &mut launch);
    launch.commands = COMMANDS;
    launch.linear = 1;
    launch.timeout_ns = TIMEOUT_NS * bench.patience;
    let first = rig.run(mode.kernel(), grid, block, launch)?;
    accounts_agree(&first, rig.in_flight()?)?;
    let late: Vec<usize> = (0..COMMANDS as usize)
        .filter(|&index| first.accounts[index] == account::TIMED_OUT)
        .collect();
    let [late] = late[..] else {
        return Err(format!(
            "not one command timed out, but {late:?}: {:?}",
            first.report
        ));
    };
    let done = first.accounts.iter().filter(|&&word| word == account::DONE);
    let done = done.count() as u64;
    for (index, &word) in first.accounts.iter().enumerate() {
        let holds = match word {
            account::DONE => is_image(rig.data(), index),
            _ => is_canary(rig.data(), index),
        };
        if !holds {
            return Err(format!(
                "the data of command {index} is wrong after the first launch"
            ));
        }
    }
    if rig.in_flight()? != 1 {
        return Err(format!(
            "{} commands are in flight, not 1",
            rig.in_flight()?
        ));
    }
    match between {
        Between::Nothing => {
            std::thread::sleep(delay);
            // The buffer is still that command's.
            if !is_image(rig.data(), late) {
                return Err("the late data did not arrive".to_owned());
            }
            let taken = rig.drain(mode)?;
            if taken != 1 {
                return Err(format!("the host took {taken} completions, not 1"));
            }
        }
        Between::Abort => {
            let aborted = rig.abort()?;
            // The completion of the aborted command is posted before that of the Abort, or soon after.
            std::thread::sleep(delay / 10);
            let taken = rig.drain(mode)?;
            if (aborted, taken) != (1, 1) {
                return Err(format!(
                    "{aborted} aborted, {taken} completions taken, not 1 and 1"
                ));
            }
            rig.fill();
            std::thread::sleep(delay);
            if (0..COMMANDS as usize).any(|index| !is_canary(rig.data(), index)) {
                return Err("data arrived after the abort".to_owned());
            }
        }
        Between::Reset => {
            let ended = rig.recover()?;
            if ended != 1 {
                return Err(format!("recovery ended {ended} commands, not 1"));
            }
            rig.fill();
            std::thread::sleep(delay);
            if (0..COMMANDS as usize).any(|index| !is_canary(rig.data(), index)) {
                return Err("data arrived after the reset".to_owned());
            }
        }
    }
    // All slots are used again.
    for turn in 0..3 {
        rig.fill();
        let next = rig.run(mode.kernel(), grid, block, launch)?;
        accounts_agree(&next, rig.in_flight()?)?;
        let wrong = (0..COMMANDS as usize).find(|&index| !is_image(rig.data(), index));
        if next.report.completed != COMMANDS || next.report.fault != 0 {
            return Err(format!("launch {turn} after it: {:?}", next.report));
        }
        if let Some(index) = wrong {
            return Err(format!(
                "launch {turn} after it: command {index} has wrong data"
            ));
        }
    }
    match (rig.in_flight()?, rig.guards_hold()) {
        (0, true) => Ok(format!("command {late} was late, {done} others were not")),
        (left, guards) => Err(format!("{left} commands are left, guards hold: {guards}")),
    }
}

fn unit(data: &[u8], index: usize) -> &[u8] {
    &data[index * BLOCK as usize..][..BLOCK as usize]
}

fn is_canary(data: &[u8], index: usize) -> bool {
    unit(data, index).iter().all(|&byte| byte == CANARY)
}

fn is_image(data: &[u8], index: usize) -> bool {
    let first = (index * BLOCK as usize / 8) as u64;
    let words = unit(data, index).chunks_exact(8).zip(first..);
    words
        .into_iter()
        .all(|(bytes, at)| bytes == data_word(IMAGE_SEED, at).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_told_apart() {
        let image: Vec<u8> = (0..BYTES as u64 / 8)
            .flat_map(|index| data_word(IMAGE_SEED, index).to_le_bytes())
            .collect();
        assert!(is_image(&image, 3) && !is_canary(&image, 3));
        let mut other = image.clone();
        other[BLOCK as usize * 3] ^= 1;
        assert!(!is_image(&other, 3) && is_image(&other, 2));
        assert!(is_canary(&[CANARY; BLOCK as usize], 0));
    }
}
