//! The time that commands take, in virtual nanoseconds: a model of a drive.
//!
//! A command completes after its latency, but not before the drive had capacity for it. Two rates
//! limit the capacity: `parallelism` commands in service at once, and `bytes_per_us` over all of
//! them.

use core::sync::atomic::{AtomicU64, Ordering};
use nvme_units::SplitMix;

/// Timing of a drive. With zeroes everywhere, every command completes at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyProfile {
    /// Latency of Read, Compare and Verify.
    pub read_ns: u64,
    /// Latency of Write and everything else that changes blocks.
    pub write_ns: u64,
    /// Latency of Flush.
    pub flush_ns: u64,
    /// Random addition to the latency, up to this many nanoseconds.
    pub jitter_ns: u64,
    /// Number of commands in service at the same time; 0 for no limit.
    pub parallelism: u32,
    /// Bytes moved per microsecond (1000 is 1 GB/s); 0 for no limit.
    pub bytes_per_us: u32,
}

impl LatencyProfile {
    /// Every command completes at once.
    pub const NONE: Self = Self {
        read_ns: 0,
        write_ns: 0,
        flush_ns: 0,
        jitter_ns: 0,
        parallelism: 0,
        bytes_per_us: 0,
    };
    /// A drive like Optane: 10 us, 500 thousand commands per second, 2.4 GB/s.
    pub const OPTANE: Self = Self {
        read_ns: 10_000,
        write_ns: 10_000,
        flush_ns: 1_000,
        jitter_ns: 1_000,
        parallelism: 5,
        bytes_per_us: 2_400,
    };
    /// A PCIe 5 flash drive: reads 70 us, 3.86 million per second, 14 GB/s.
    pub const NVME_GEN5: Self = Self {
        read_ns: 70_000,
        write_ns: 15_000,
        flush_ns: 200_000,
        jitter_ns: 10_000,
        parallelism: 270,
        bytes_per_us: 14_000,
    };

    /// Returns a profile with another latency of reads and the same rates of commands and bytes.
    pub fn with_latency(self, read_ns: u64) -> Self {
        let parallelism = match (self.read_ns, self.parallelism) {
            (0, most) | (_, most @ 0) => most,
            (now_ns, most) => {
                let most = u128::from(most) * u128::from(read_ns) / u128::from(now_ns);
                u32::try_from(most).unwrap_or(u32::MAX).max(1)
            }
        };
        Self {
            read_ns,
            parallelism,
            ..self
        }
    }

    /// Returns the profile of that name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "none" => Some(Self::NONE),
            "optane" => Some(Self::OPTANE),
            "nvme-gen5" => Some(Self::NVME_GEN5),
            _ => None,
        }
    }
}

/// The kind of work of a command, which selects its latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkKind {
    Read,
    Write,
    Flush,
}

/// State of the latency model: when the drive has capacity again.
pub(crate) struct LatencyModel {
    profile: LatencyProfile,
    seed: u64,
    /// Time until which the drive is busy with the commands that it has accepted.
    busy_until_ns: AtomicU64,
    count: AtomicU64,
}

impl LatencyModel {
    pub fn new(profile: LatencyProfile, seed: u64) -> Self {
        Self {
            profile,
            seed,
            busy_until_ns: AtomicU64::new(0),
            count: AtomicU64::new(0),
        }
    }

    /// Forgets the accepted commands, since a controller reset ends them.
    pub fn reset(&self) {
        self.busy_until_ns.store(0, Ordering::Relaxed);
    }

    /// True if commands take no time.
    pub fn is_none(&self) -> bool {
        self.profile == LatencyProfile::NONE
    }

    /// Returns the completion time of a command accepted now.
    pub fn due_ns(&self, now_ns: u64, work: WorkKind, bytes: u64) -> u64 {
        let LatencyProfile {
            read_ns,
            write_ns,
            flush_ns,
            jitter_ns,
            parallelism,
            bytes_per_us,
        } = self.profile;
        let base = match work {
            WorkKind::Read => read_ns,
            WorkKind::Write => write_ns,
            WorkKind::Flush => flush_ns,
        };
        let jitter = match jitter_ns {
            0 => 0,
            _ => {
                SplitMix::new(self.seed ^ self.count.fetch_add(1, Ordering::Relaxed)).next_word()
                    % jitter_ns
            }
        };
        let share = base.checked_div(u64::from(parallelism)).unwrap_or(0);
        let moving = (bytes * 1000)
            .checked_div(u64::from(bytes_per_us))
            .unwrap_or(0);
        let step = share.max(moving);
        if step == 0 {
            // Without a rate there is no shared capacity: threads need not agree on anything.
            return now_ns.saturating_add(base + jitter);
        }
        let mut busy = self.busy_until_ns.load(Ordering::Relaxed);
        loop {
            let until = busy.max(now_ns).saturating_add(step);
            match self.busy_until_ns.compare_exchange_weak(
                busy,
                until,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    // The command's own share of the capacity is part of its latency, so it is not
                    // added again.
                    let queued = until - step;
                    return queued.saturating_add((base + jitter).max(step));
                }
                Err(now) => busy = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_command_takes_its_latency_and_many_are_rate_limited() {
        let profile = LatencyProfile {
            read_ns: 1000,
            parallelism: 10,
            ..LatencyProfile::NONE
        };
        let pacing = LatencyModel::new(profile, 1);
        assert_eq!(pacing.due_ns(5000, WorkKind::Read, 4096), 6000);
        let last = (1..1000)
            .map(|_| pacing.due_ns(5000, WorkKind::Read, 4096))
            .last();
        // 1000 commands at 10 per 1000 ns: the last starts after 999 shares of 100 ns.
        assert_eq!(last, Some(5000 + 99_900 + 1000));
    }

    #[test]
    fn bytes_are_limited_apart_from_commands() {
        let pacing = LatencyModel::new(
            LatencyProfile {
                bytes_per_us: 1000,
                ..LatencyProfile::NONE
            },
            1,
        );
        assert_eq!(pacing.due_ns(0, WorkKind::Write, 1 << 20), 1 << 20);
        assert_eq!(pacing.due_ns(0, WorkKind::Write, 1 << 20), 2 << 20);
    }
}
