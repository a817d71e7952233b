//! Rings of every size, wrapped many times, by a random schedule.

use nvme_core::spec::{Lba, Nsid, nvm};
use nvme_core::{CommandData, CommandOutcome, SubmitError};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, MemoryStore};
use nvme_tests::{Setup, with_pair};

const NS: Nsid = Nsid(1);

fn config() -> Config {
    let store = Box::new(MemoryStore::new(1 << 20).unwrap());
    Config {
        namespaces: vec![NamespaceConfig::new(512, store)],
        mqes: 65_536,
        ..Config::empty()
    }
}

/// Each command reads a block that holds its own number into its own buffer.
fn wrap(entries: (u32, u32), slots: usize, commands: u64, seed: u64) {
    const BLOCKS: u64 = 256;
    let setup = Setup {
        queues: vec![entries],
        slots,
        max_bytes: BLOCKS * 512,
        memory: 64 << 20,
        seed,
        ..Setup::default()
    };
    with_pair(config(), setup, |pair| {
        pair.bring_up().unwrap();
        let image = pair.buffer(BLOCKS * 512);
        for block in 0..BLOCKS {
            pair.memory
                .write(image.iova.offset(block * 512), &[block as u8; 512]);
        }
        assert!(
            pair.transfer(nvm::write, NS, Lba(0), BLOCKS, image.iova)
                .is_success()
        );
        let depth = u64::from(pair.io[0].depth());
        assert_eq!(
            depth,
            u64::from(entries.0.min(entries.1) - 1).min(slots as u64)
        );

        let buffers = pair.buffer(depth * 512);
        let mut free: Vec<u64> = (0..depth).collect();
        let mut holders = std::collections::HashMap::new();
        let (mut submitted, mut seen, mut full) = (0, pair.ended.len(), 0);
        let first = seen as u64;
        while (pair.ended.len() as u64) < first + commands {
            match pair.rng.below(4) {
                0 | 1 if submitted < commands => {
                    let block = pair.rng.below(BLOCKS);
                    // Without a free buffer the queue is full: the core refuses every command.
                    let buffer = free.pop();
                    let iova = buffers.iova.offset(buffer.unwrap_or(0) * 512);
                    let data = CommandData::Contiguous { iova, len: 512 };
                    match (pair.submit(0, nvm::read(NS, Lba(block), 1), data), buffer) {
                        (Ok(id), Some(buffer)) => {
                            holders.insert(id, (buffer, block));
                            submitted += 1;
                        }
                        (Err(error), buffer) => {
                            assert_eq!(error, SubmitError::QueueFull);
                            free.extend(buffer);
                            full += 1;
                            continue_schedule(pair);
                        }
                        (Ok(_), None) => panic!("more in flight than the depth"),
                    }
                }
                2 => pair.io[0].ring(),
                _ => continue_schedule(pair),
            }
            for end in &pair.ended[seen..] {
                let (buffer, block) = holders.remove(&end.id).expect("a command of ours");
                assert!(
                    matches!(end.outcome, CommandOutcome::Completed(status) if status.is_success())
                );
                let mut got = [0; 512];
                pair.memory
                    .read(buffers.iova.offset(buffer * 512), &mut got);
                assert_eq!(
                    got, [block as u8; 512],
                    "command {} got another's data",
                    end.id
                );
                free.push(buffer);
            }
            seen = pair.ended.len();
        }
        assert!(holders.is_empty() && pair.outstanding() == 0);
        assert_eq!(pair.memory.refused(), [0; 0]);
        assert!(full > 0 || depth > 16, "the queue was never full");
    });
}

fn continue_schedule(pair: &mut nvme_tests::Pair<'_>) {
    pair.io[0].ring();
    pair.sim.step(pair.now_ns);
    pair.now_ns += 1000;
    pair.poll(0).unwrap();
}

#[test]
fn rings_of_two_wrap_ten_thousand_times() {
    wrap((2, 2), 8, 20_000, 1);
}

#[test]
fn sizes_that_are_no_power_of_two_wrap() {
    for (seed, entries) in [(3, 3), (5, 5), (7, 3), (3, 7), (17, 11), (63, 65)]
        .into_iter()
        .enumerate()
    {
        wrap(entries, 64, 5_000, seed as u64);
    }
}

#[test]
fn fewer_slots_than_entries_reuse_every_identifier() {
    wrap((64, 64), 3, 5_000, 11);
}

#[test]
fn a_long_ring_wraps_its_sixteen_bit_head() {
    wrap((65_536, 65_536), 512, 140_000, 5);
}

#[test]
fn the_largest_number_of_commands_in_flight() {
    wrap((4096, 4100), 5000, 12_000, 6);
}
