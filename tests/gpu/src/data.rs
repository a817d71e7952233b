//! Random sizes and offsets, read and written, compared byte for byte with the image.

use crate::bench::{Bench, Mode, Tier};
use crate::report::Report;
use crate::rig::{CANARY, Rig, Shape};
use crate::sim::{BLOCK, IMAGE_SEED, Model};
use nvme_gpu_kernel::work::{LaunchArguments, data_word};

const QUEUES: u32 = 4;
const IMAGE: usize = 16 << 20;
const DATA: usize = 12 << 20;
const PAGE: usize = 4096;
/// MDTS of the simulator: 4 MiB.
const MOST_BLOCKS: u64 = 8192;
const ROUNDS: u64 = 24;
const READ: u32 = 2;
const WRITE: u32 = 1;

/// Tests every mode, with contiguous and with scattered data.
pub fn all(report: &mut Report, bench: &Bench) {
    for mode in Mode::ALL {
        for (name, scattered) in [("contiguous", false), ("scattered", true)] {
            let name = format!("bytes/{}/{name}", mode.name());
            report.test(&name, |_| run(bench, mode, scattered));
        }
    }
}

/// Numbers that look random and repeat.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 += 1;
        data_word(0xD1CE, self.0) % limit
    }
}

fn run(bench: &Bench, mode: Mode, scattered: bool) -> Result<String, String> {
    let shape = Shape {
        tier: Tier::Pinned,
        queues: QUEUES,
        entries: 64,
        slots: 63,
        start: 0,
        data: DATA,
    };
    let model = Model {
        image: IMAGE as u64,
        dstrd: 0,
        faults: &[],
        threads: 4,
    };
    let mut rig = Rig::new(bench, shape, &model)?;
    let mut image: Vec<u8> = (0..IMAGE as u64 / 8)
        .flat_map(|index| data_word(IMAGE_SEED, index).to_le_bytes())
        .collect();
    let mut order: Vec<u32> = (0..(DATA / PAGE) as u32).collect();
    let mut base = rig.launch()?;
    let mut dice = Dice(u64::from(scattered) << 32 | mode as u64);
    if scattered {
        for last in (1..order.len()).rev() {
            order.swap(last, dice.below(last as u64 + 1) as usize);
        }
        rig.scatter(&order, &mut base)?;
    }
    let mut bytes = 0;
    for round in 0..ROUNDS {
        // Few large commands or many small ones; now and then a single block.
        let most = [1, 9, 300, MOST_BLOCKS][dice.below(4) as usize];
        let blocks = 1 + dice.below(most);
        let each = blocks * u64::from(BLOCK);
        // A command's data may begin anywhere on a dword.
        let offset = dice.below(64 << 10) & !3;
        let room = (DATA as u64 - offset) / each;
        let commands = 1 + dice.below(room.min(200));
        let span = commands * blocks;
        let lba = dice.below(IMAGE as u64 / u64::from(BLOCK) - span + 1);
        let mut launch = LaunchArguments {
            commands,
            units: commands,
            lba,
            blocks: blocks as u32,
            linear: 1,
            timeout_ns: 2_000_000_000 * bench.patience,
            ..base
        };
        let mut place = Place {
            order: &order,
            offset: 0,
        };
        if !scattered {
            place.offset = offset as usize;
            launch.data_iova += offset;
            launch.data_bytes -= offset;
        }
        let at = (lba * u64::from(BLOCK)) as usize;
        let len = (span * u64::from(BLOCK)) as usize;
        let (grid, block) = mode.shape(QUEUES, &mut launch);
        let writes = round % 3 == 2;
        let opcodes: &[u32] = if writes { &[WRITE, READ] } else { &[READ] };
        for &opcode in opcodes {
            launch.opcode = opcode;
            rig.fill();
            if opcode == WRITE {
                for index in 0..len {
                    image[at + index] = (data_word(round, (at + index) as u64) >> 24) as u8;
                    rig.data_mut()[place.of(index)] = image[at + index];
                }
            }
            // Read blocks appear in the data, written blocks stay there, and nothing else changes.
            let mut expected = vec![CANARY; DATA];
            for (index, &byte) in image[at..at + len].iter().enumerate() {
                expected[place.of(index)] = byte;
            }
            let report = rig.run(mode.kernel(), grid, block, launch)?.report;
            let what = format!(
                "round {round}: {commands} x {blocks} blocks at {lba}, offset {offset}, opcode {opcode}"
            );
            if report.completed != commands {
                return Err(format!("{what}: {report:?}"));
            }
            if let Some(wrong) = first_difference(rig.data(), &expected) {
                return Err(format!("{what}: byte {wrong} of the data is wrong"));
            }
            if !rig.guards_hold() {
                return Err(format!("{what}: bytes around the data were overwritten"));
            }
            bytes += len;
        }
    }
    Ok(format!("{ROUNDS} launches, {} MiB compared", bytes >> 20))
}

/// Map from byte `index` of the commands' data to its offset in the data memory.
struct Place<'o> {
    order: &'o [u32],
    offset: usize,
}

impl Place<'_> {
    fn of(&self, index: usize) -> usize {
        let at = self.offset + index;
        match self.offset {
            0 => self.order[at / PAGE] as usize * PAGE + at % PAGE,
            _ => at,
        }
    }
}

fn first_difference(got: &[u8], expected: &[u8]) -> Option<usize> {
    if got == expected {
        return None;
    }
    got.iter()
        .zip(expected)
        .position(|(got, expected)| got != expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dice_stay_below_and_vary() {
        let mut dice = Dice(0);
        let throws: Vec<u64> = (0..100).map(|_| dice.below(6)).collect();
        assert!((0..6).all(|face| throws.contains(&face)));
        assert!(throws.iter().all(|&face| face < 6));
    }

    #[test]
    fn a_wrong_byte_is_found() {
        assert_eq!(first_difference(b"abc", b"abc"), None);
        assert_eq!(first_difference(b"abc", b"axc"), Some(1));
    }
}
