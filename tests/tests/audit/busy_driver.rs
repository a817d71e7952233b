//! A busy driver, watched by the auditor: commands of every size overlap on two queues and two namespaces. They are
//! slow and out of order, and some are lost, aborted or ended by a reset. Buffers are used again as soon as they are
//! free, so that a buffer that was freed too early is shared.
//!
//! Every planted bug that a wire can show trips the auditor here (`cargo xtask planted`).

use nvme_core::recovery::{AbortAttempt, RecoveryStep};
use nvme_core::spec::{Cid, Lba, Nsid, Qid, nvm};
use nvme_core::transfer;
use nvme_core::{CommandData, CommandOutcome};
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Fault, FaultCondition, FaultRule, LatencyProfile, MemoryStore};
use nvme_tests::{Area, Pair, Setup, with_pair};
use std::collections::HashMap;

const SECOND: u64 = 1_000_000_000;
/// The longest transfer that is asked for; MDTS splits it.
const MOST: u64 = 128 << 10;
/// Number of actions in one run, and of commands that have to end in it.
const ROUNDS: u32 = 5_000;
const COMMANDS: usize = 150;

fn config() -> Config {
    let namespace = |block_bytes| {
        let store = Box::new(MemoryStore::new(4 << 20).unwrap());
        NamespaceConfig::new(block_bytes, store)
    };
    let mut config = Config {
        namespaces: vec![namespace(512), namespace(4096)],
        mdts: 4,
        profile: LatencyProfile {
            read_ns: 20_000,
            write_ns: 50_000,
            jitter_ns: 200_000,
            ..LatencyProfile::NONE
        },
        ..Config::empty()
    };
    let every = |every, what| FaultRule {
        when: FaultCondition {
            every: Some(every),
            ..FaultCondition::default()
        },
        what,
    };
    config.faults.rules = vec![
        every(97, Fault::Drop),
        every(61, Fault::Delay(3 * SECOND)),
        every(7, Fault::Reorder),
    ];
    config
}

/// Free buffers; the one that was freed last is on top.
struct Buffers {
    free: Vec<Area>,
    lent: HashMap<u64, Area>,
    seen: usize,
}

impl Buffers {
    fn take_back(&mut self, pair: &Pair<'_>) {
        for end in &pair.ended[self.seen..] {
            let area = self.lent.remove(&end.id).expect("a command of ours");
            self.free.push(area);
            if let CommandOutcome::Completed(status) = end.outcome {
                assert!(
                    status.is_success() || status.is(nvme_core::spec::Status::ABORT_REQUESTED),
                    "{status}"
                );
            }
        }
        self.seen = pair.ended.len();
    }
}

/// Submits one piece of a random transfer, if there is room.
fn submit(pair: &mut Pair<'_>, buffers: &mut Buffers) {
    let Some(area) = buffers.free.pop() else {
        return;
    };
    let nsid = Nsid(1 + pair.rng.below(2) as u32);
    let limits = pair.limits(nsid);
    let block = u64::from(limits.block_bytes);
    let blocks = 1 + pair.rng.below(MOST / block);
    let lba = Lba(pair.rng.below(limits.blocks - blocks));
    let piece = transfer::split(lba, blocks, limits)
        .expect("a range of it")
        .next();
    let piece = piece.expect("at least one piece");
    let offset = pair.rng.below(1024) * 4;
    let data = CommandData::Contiguous {
        iova: area.iova.offset(offset),
        len: u64::from(piece.blocks) * block,
    };
    let command = [nvm::read, nvm::write][pair.rng.below(2) as usize];
    let queue = pair.rng.below(2) as usize;
    match pair.submit(queue, command(nsid, piece.lba, piece.blocks), data) {
        Ok(id) => drop(buffers.lent.insert(id, area)),
        Err(_) => buffers.free.push(area),
    }
}

/// Aborts a command that is late, and resets the controller if the abort does not end it.
fn recover(pair: &mut Pair<'_>, queue: usize, cid: Cid) {
    let qid = Qid(queue as u16 + 1);
    let mut attempt = AbortAttempt::new(qid, cid, SECOND);
    loop {
        pair.poll(queue).expect("honest completions");
        let in_flight = pair.io[queue].is_in_flight(cid);
        match attempt.step(&mut pair.admin, in_flight, pair.now_ns, |_| {}) {
            RecoveryStep::Wait { until_ns } => pair.sleep_until(until_ns),
            RecoveryStep::Ended => return,
            RecoveryStep::ResetNeeded(_) => {
                return pair.bring_up().expect("a controller that comes back");
            }
        }
    }
}

#[test]
fn a_busy_driver_breaks_no_rule() {
    for (seed, queues) in [(1, [(8, 8), (5, 7)]), (2, [(2, 3), (32, 16)])] {
        let setup = Setup {
            queues: queues.to_vec(),
            slots: 24,
            max_bytes: MOST,
            memory: 32 << 20,
            seed,
            ..Setup::default()
        };
        with_pair(config(), setup, |pair| {
            pair.bring_up().unwrap();
            let mut buffers = Buffers {
                free: (0..40).map(|_| pair.buffer(MOST + 4096)).collect(),
                lent: HashMap::new(),
                seen: 0,
            };
            for _ in 0..ROUNDS {
                let queue = pair.rng.below(2) as usize;
                match pair.rng.below(8) {
                    0..=3 => submit(pair, &mut buffers),
                    4 => pair.io[queue].ring(),
                    5 => drop(pair.sim.step(pair.now_ns)),
                    6 => drop(pair.poll(queue).expect("honest completions")),
                    _ => pair.now_ns += pair.rng.below(100_000),
                }
                if let Some(cid) = pair.io[queue].expire(pair.now_ns) {
                    recover(pair, queue, cid);
                }
                // Nothing can be done but wait.
                if buffers.free.is_empty() || pair.rng.below(200) == 0 {
                    pair.io.iter_mut().for_each(|queue| queue.ring());
                    let later = pair.now_ns + SECOND * 2 / 5;
                    while pair.now_ns < later {
                        pair.sleep_until(later);
                        for queue in 0..2 {
                            pair.poll(queue).expect("honest completions");
                        }
                    }
                }
                buffers.take_back(pair);
            }
            pair.bring_up().unwrap();
            buffers.take_back(pair);
            assert_eq!((pair.outstanding(), buffers.lent.len()), (0, 0));
            let ended = pair.ended.len();
            assert!(ended >= COMMANDS, "{ended} commands are not busy");
            let late = pair.ended.iter().filter(|end| end.late).count();
            let reset = |outcome| matches!(outcome, CommandOutcome::Aborted(_));
            let resets = pair.ended.iter().filter(|end| reset(end.outcome)).count();
            assert!(
                late > 0 && resets > 0,
                "{late} late, {resets} ended by a reset"
            );
        });
    }
}
