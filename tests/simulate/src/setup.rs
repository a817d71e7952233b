//! The configuration of the two sides of a seed.

use crate::seed::Rng;
use nvme_sim::LatencyProfile;

/// Deadline of an I/O command, in virtual time.
pub const COMMAND_NS: u64 = 50_000_000;
/// Time limit of an Abort, and then of the aborted command.
pub const GRACE_NS: u64 = 10_000_000;
/// Deadline of an admin command.
pub const ADMIN_NS: u64 = 20_000_000;
/// Blocks of the namespace.
pub const BLOCKS: u32 = 128;
/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 512;
/// The longest transfer, in blocks: four pages and a bit with the largest offset.
pub const MAX_BLOCKS: u32 = 24;

/// Which of the core's drivers a queue has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// `QueuePair`: one owner on the host.
    Pair,
    /// `SharedQueue`: any threads, one lane each.
    Shared,
    /// `Collective`: a group, here of one.
    Collective,
}

/// One I/O queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueSetup {
    /// Driver of the queue.
    pub driver: Driver,
    /// Entries of the submission ring.
    pub sq_entries: u32,
    /// Entries of the completion ring.
    pub cq_entries: u32,
    /// Command slots.
    pub slots: u32,
    /// First position (not for pairs): a little before the counters wrap, or not.
    pub start: u32,
}

/// Both sides.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The I/O queues, identifiers 1 and 2.
    pub queues: [QueueSetup; 2],
    /// Entries of the admin rings.
    pub admin: (u32, u32),
    /// The controller has a volatile write cache of this many bytes; 0 is none.
    pub cache_bytes: usize,
    /// Times that commands take.
    pub profile: LatencyProfile,
    /// Time from a change of CC.EN to the change of CSTS.RDY.
    pub ready_delay_ns: u64,
    /// Time from CC.SHN to the end of the shutdown.
    pub shutdown_delay_ns: u64,
    /// Number of turns that the host lets pass before it reacts to a command past its deadline.
    pub patience: u32,
    /// True if the host tries an Abort before it resets the controller.
    pub aborts: bool,
    /// True if the host looks at CSTS before it sends an Abort.
    pub looks: bool,
    /// Time of the clock at the beginning.
    pub clock_ns: u64,
}

impl Setup {
    /// Draws one.
    pub fn draw(rng: &mut Rng) -> Self {
        let queues = [(); 2].map(|()| draw_queue(rng));
        let profile = match rng.below(3) {
            0 => LatencyProfile::NONE,
            _ => LatencyProfile {
                read_ns: pick(rng, &[0, 5_000, 40_000]),
                write_ns: pick(rng, &[0, 3_000, 60_000]),
                flush_ns: pick(rng, &[0, 100_000]),
                jitter_ns: pick(rng, &[0, 30_000]),
                parallelism: pick(rng, &[0, 1, 8]),
                bytes_per_us: 0,
            },
        };
        Self {
            queues,
            admin: (pick(rng, &[2, 3, 4, 8, 16]), pick(rng, &[2, 3, 8, 16])),
            cache_bytes: pick(rng, &[0, 1, 64 << 10, 1 << 18]),
            profile,
            ready_delay_ns: pick(rng, &[0, 0, 50_000, 3_000_000]),
            shutdown_delay_ns: pick(rng, &[0, 2_000_000]),
            patience: pick(rng, &[0, 4, 20]),
            aborts: rng.below(8) > 0,
            looks: rng.below(2) > 0,
            clock_ns: FIRST_NS,
        }
    }

    /// Returns the setup with a start time that `seed` determines. It is often a little before a wrap of a clock, so
    /// that deadlines lie on both sides of it.
    pub fn with_clock(self, seed: u64) -> Self {
        let rng = &mut Rng::new(seed ^ 0xC10C);
        let wrap = pick(rng, &[0, 0, 1 << 32, 1 << 41, 1 << 42, 3 << 41, 1 << 63]);
        // Up to two deadlines before.
        let before = rng.below(2 * COMMAND_NS);
        Self {
            clock_ns: FIRST_NS.max(wrap - before.min(wrap)),
            ..self
        }
    }
}

/// The clock of a seed without another one.
const FIRST_NS: u64 = 1_000_000;

fn draw_queue(rng: &mut Rng) -> QueueSetup {
    match rng.below(4) {
        0 | 1 => QueueSetup {
            driver: Driver::Pair,
            sq_entries: pick(rng, &[2, 3, 5, 8, 16, 17, 32, 64]),
            cq_entries: pick(rng, &[2, 4, 7, 8, 16, 31, 32, 64]),
            slots: pick(rng, &[1, 4, 20, 32, 40]),
            start: 0,
        },
        kind => {
            let entries = pick(rng, &[2, 4, 8, 16, 32, 64]);
            let slots = match rng.below(4) {
                0 => 1 + rng.below(u64::from(entries) - 1) as u32,
                _ => entries - 1,
            };
            QueueSetup {
                driver: [Driver::Shared, Driver::Collective][kind as usize - 2],
                sq_entries: entries,
                cq_entries: entries,
                slots,
                start: pick(
                    rng,
                    &[
                        0,
                        0x1_0000 - 128,
                        0x1000_0000 - 128,
                        0x8000_0000 - 128,
                        0u32.wrapping_sub(128),
                    ],
                ),
            }
        }
    }
}

/// Returns one of `from`.
pub fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.below(from.len() as u64) as usize]
}
