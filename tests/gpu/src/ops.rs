//! Commands other than reads: their effect is in the image afterwards, and nothing else changed.
//!
//! Completions are lost, too: a command that is accounted as done has been done; the others may have been, and are done
//! after the controller's reset and a second attempt.

use crate::bench::{Bench, Mode, Tier};
use crate::matrix::accounts_agree;
use crate::report::{Options, Report};
use crate::rig::{Outcome, Rig, Shape};
use crate::sim::{BLOCK, IMAGE_SEED, Model};
use nvme_core::spec::Status;
use nvme_core::spec::nvm::opcode;
use nvme_gpu_kernel::work::{LaunchArguments, account, data_word};

const QUEUES: u32 = 8;
const SIZE: usize = BLOCK as usize;
/// Bytes of the image, and of the data memory.
const IMAGE: usize = 4 << 20;
/// Blocks that the commands name, one each: those from `FIRST` on.
const UNITS: usize = 4096;
const FIRST: usize = 1024;
/// One block in this number is compared with other data.
const ODD: usize = 97;
const TIMEOUT_NS: u64 = 150_000_000;

/// The command of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Write,
    WriteZeroes,
    Compare,
    Deallocate,
    Flush,
}

impl Op {
    const ALL: [Self; 5] = [
        Self::Write,
        Self::WriteZeroes,
        Self::Compare,
        Self::Deallocate,
        Self::Flush,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::WriteZeroes => "write-zeroes",
            Self::Compare => "compare",
            Self::Deallocate => "deallocate",
            Self::Flush => "flush",
        }
    }

    fn opcode(self) -> u8 {
        match self {
            Self::Write => opcode::WRITE,
            Self::WriteZeroes => opcode::WRITE_ZEROES,
            Self::Compare => opcode::COMPARE,
            Self::Deallocate => opcode::DATASET_MANAGEMENT,
            Self::Flush => opcode::FLUSH,
        }
    }

    /// Returns the block of the region that command `index` is about.
    fn unit(self, index: usize) -> usize {
        match self {
            // Ranges are read from memory, here in reverse order.
            Self::Deallocate => UNITS - 1 - index,
            _ => index,
        }
    }

    /// Returns the status with which command `index` ends.
    fn status(self, index: usize) -> Status {
        match self {
            Self::Compare if index.is_multiple_of(ODD) => Status::COMPARE_FAILURE,
            _ => Status::SUCCESS,
        }
    }

    /// Fills the data memory for a launch over `image`, and applies the launch's effect to `image`.
    fn prepare(self, round: u64, data: &mut [u8], image: &mut [u8]) {
        let region = &mut image[FIRST * SIZE..][..UNITS * SIZE];
        match self {
            Self::Write => {
                for (index, word) in region.chunks_exact_mut(8).enumerate() {
                    let fresh = data_word(round + 1, index as u64);
                    word.copy_from_slice(&fresh.to_le_bytes());
                }
                data[..region.len()].copy_from_slice(region);
            }
            Self::Compare => {
                data[..region.len()].copy_from_slice(region);
                for block in data[..region.len()].chunks_exact_mut(SIZE).step_by(ODD) {
                    block[SIZE - 1] ^= 1;
                }
            }
            Self::Deallocate => {
                for (index, range) in data.chunks_exact_mut(16).take(UNITS).enumerate() {
                    let block = (FIRST + self.unit(index)) as u64;
                    range[..4].fill(0);
                    range[4..8].copy_from_slice(&1u32.to_le_bytes());
                    range[8..].copy_from_slice(&block.to_le_bytes());
                }
                region.fill(0);
            }
            Self::WriteZeroes => region.fill(0),
            Self::Flush => {}
        }
    }
}

/// Tests every mode and tier, and lost completions in tier 1.
pub fn all(report: &mut Report, bench: &Bench) {
    for tier in Tier::ALL {
        for mode in Mode::ALL {
            for op in Op::ALL {
                let cell = Cell { mode, tier, op };
                let name = format!("ops/{}/{}/{}", mode.name(), tier.name(), op.name());
                report.test(&name, |options| cell.run(bench, options, &[]));
                if tier == Tier::Pinned {
                    let drops = [1, 2, 3].map(|k| format!("drop@nth={}", UNITS * k / 4));
                    let name = format!("{name}/dropped");
                    report.test(&name, |options| cell.run(bench, options, &drops));
                }
            }
        }
    }
}

struct Cell {
    mode: Mode,
    tier: Tier,
    op: Op,
}

impl Cell {
    /// A tenth of a cell's commands of the matrix, since each launch waits for the host to look at it.
    fn run(&self, bench: &Bench, options: &Options, faults: &[String]) -> Result<String, String> {
        let shape = Shape {
            tier: self.tier,
            queues: QUEUES,
            entries: 256,
            slots: 255,
            start: 0,
            data: IMAGE,
        };
        let model = Model {
            image: IMAGE as u64,
            dstrd: 0,
            faults,
            threads: 6,
        };
        let mut rig = Rig::new(bench, shape, &model)?;
        let mut image: Vec<u8> = (0..IMAGE as u64 / 8)
            .flat_map(|index| data_word(IMAGE_SEED, index).to_le_bytes())
            .collect();
        let rounds = (options.commands / 10).div_ceil(UNITS as u64).max(2);
        let mut lost = 0;
        for round in 0..rounds {
            let last = round + 1 == rounds;
            if last && matches!(self.op, Op::WriteZeroes | Op::Deallocate) {
                // Blocks that were zero already would prove nothing.
                self.go(bench, &mut rig, Op::Write, round, &mut image)?;
            }
            let before = image.clone();
            let outcome = self.launch(bench, &mut rig, self.op, round, &mut image)?;
            let missing = self.missing(self.op, &outcome)?;
            if missing > 0 {
                lost += missing;
                let count = rig
                    .recover()
                    .map_err(|error| format!("recovery: {error}"))?;
                if faults.is_empty() {
                    return Err(format!(
                        "{missing} commands got no answer, {count} recovered"
                    ));
                }
                self.read(bench, &mut rig)?;
                truthful(self.op, &outcome, rig.data(), &before, &image)?;
                image = before;
                self.go(bench, &mut rig, self.op, round, &mut image)?;
            }
            if round == 0 || last {
                self.read(bench, &mut rig)?;
                let differs = |(have, want): (&[u8], &[u8])| have != want;
                let mut blocks = rig.data().chunks(SIZE).zip(image.chunks(SIZE));
                if let Some(block) = blocks.position(differs) {
                    return Err(format!(
                        "round {round}: block {block} of the image is wrong"
                    ));
                }
            }
            if !rig.guards_hold() {
                return Err("bytes around the data were overwritten".to_owned());
            }
        }
        if lost == 0 && !faults.is_empty() {
            return Err("no completion was lost".to_owned());
        }
        Ok(format!("{rounds} launches of {UNITS}, {lost} done again"))
    }

    /// A launch in which nothing may be lost.
    fn go(
        &self,
        bench: &Bench,
        rig: &mut Rig<'_>,
        op: Op,
        round: u64,
        image: &mut [u8],
    ) -> Result<(), String> {
        let outcome = self.launch(bench, rig, op, round, image)?;
        match self.missing(op, &outcome)? {
            0 => Ok(()),
            missing => Err(format!("{missing} commands of {} got no answer", op.name())),
        }
    }

    fn launch(
        &self,
        bench: &Bench,
        rig: &mut Rig<'_>,
        op: Op,
        round: u64,
        image: &mut [u8],
    ) -> Result<Outcome, String> {
        rig.fill();
        op.prepare(round, rig.data_mut(), image);
        let mut launch = LaunchArguments {
            opcode: u32::from(op.opcode()),
            lba: FIRST as u64,
            commands: UNITS as u64,
            units: UNITS as u64,
            linear: 1,
            timeout_ns: TIMEOUT_NS * bench.patience,
            ..rig.launch()?
        };
        let (grid, block) = self.mode.shape(QUEUES, &mut launch);
        let outcome = rig.run(self.mode.kernel(), grid, block, launch)?;
        accounts_agree(&outcome, rig.in_flight()?)?;
        Ok(outcome)
    }

    /// Returns how many commands did not end; an error if one ended with a wrong outcome.
    fn missing(&self, op: Op, outcome: &Outcome) -> Result<usize, String> {
        let mut missing = 0;
        for (index, word) in outcome.accounts.iter().enumerate() {
            let expected = op.status(index);
            if word & account::DONE == 0 {
                missing += 1;
            } else if word & 0x7FFF != u32::from(expected.0) {
                return Err(format!(
                    "{} {index}: status {:#x}, expected {:#x}",
                    op.name(),
                    word & 0x7FFF,
                    expected.0
                ));
            }
        }
        Ok(missing)
    }

    /// Reads the whole image into the data memory.
    fn read(&self, bench: &Bench, rig: &mut Rig<'_>) -> Result<(), String> {
        rig.fill();
        let commands = (IMAGE / SIZE / 8) as u64;
        let mut launch = LaunchArguments {
            blocks: 8,
            commands,
            units: commands,
            linear: 1,
            timeout_ns: TIMEOUT_NS * 10 * bench.patience,
            ..rig.launch()?
        };
        let (grid, block) = self.mode.shape(QUEUES, &mut launch);
        let report = rig.run(self.mode.kernel(), grid, block, launch)?.report;
        match report.completed == commands {
            true => Ok(()),
            false => Err(format!("reading the image did not succeed: {report:?}")),
        }
    }
}

/// Checks that the image agrees with the accounts: a done command has its effect, another one may have it or not.
fn truthful(
    op: Op,
    outcome: &Outcome,
    have: &[u8],
    before: &[u8],
    after: &[u8],
) -> Result<(), String> {
    let mut done = vec![None; IMAGE / SIZE];
    for (index, word) in outcome.accounts.iter().enumerate() {
        done[FIRST + op.unit(index)] = Some(word & account::DONE != 0);
    }
    for (number, done) in done.into_iter().enumerate() {
        let [have, before, after] = [have, before, after].map(|all| &all[number * SIZE..][..SIZE]);
        let good = match done {
            None | Some(true) => have == after,
            Some(false) => have == before || have == after,
        };
        if !good {
            return Err(format!(
                "block {number} is not what its account ({done:?}) says"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_gpu_kernel::work::LaunchReport as Counts;

    #[test]
    fn an_account_that_lies_is_found() {
        let before = vec![1; IMAGE];
        let mut after = before.clone();
        Op::WriteZeroes.prepare(0, &mut [], &mut after);
        let mut outcome = Outcome {
            report: Counts::default(),
            accounts: vec![account::DONE; UNITS],
        };
        let check = |outcome: &Outcome, have: &[u8]| {
            truthful(Op::WriteZeroes, outcome, have, &before, &after).is_ok()
        };
        assert!(check(&outcome, &after));
        let mut have = after.clone();
        have[FIRST * SIZE..][..SIZE].fill(1);
        assert!(!check(&outcome, &have), "accounted, but not done");
        outcome.accounts[0] = account::TIMED_OUT;
        assert!(check(&outcome, &have) && check(&outcome, &after));
        have[FIRST * SIZE] = 7;
        assert!(!check(&outcome, &have), "neither the old nor the new");
        have[FIRST * SIZE] = 1;
        have[0] = 0;
        assert!(!check(&outcome, &have), "a block that no command named");
    }

    #[test]
    fn ranges_name_each_block_of_the_region_once() {
        let mut data = vec![0xC5; UNITS * 16 + 1];
        let mut image = vec![1; IMAGE];
        Op::Deallocate.prepare(0, &mut data, &mut image);
        let last = &data[(UNITS - 1) * 16..][..16];
        assert_eq!(last[4..8], 1u32.to_le_bytes());
        assert_eq!(last[8..], (FIRST as u64).to_le_bytes());
        assert_eq!(data[UNITS * 16], 0xC5);
        let zeroes = image.iter().filter(|byte| **byte == 0).count();
        assert_eq!(zeroes, UNITS * SIZE);
    }
}
