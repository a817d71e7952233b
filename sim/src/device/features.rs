//! The features of the controller: the list of those that it supports, and their current values.
//!
//! A controller level reset restores the saved value of each feature, which is the default until a
//! value is saved (SV); a client that leaves a served controller causes such a reset. Saved values
//! outlive losses of power, but not the process. No feature here is persistent without being saved.
//!
//! NVMe Base 2.0c, "Feature Values".

use crate::config::settings::Config;
use nvme_spec::feature::{AUTONOMOUS_POWER_BYTES, HostBehavior, fid};
use nvme_spec::log_page::effects;
use zerocopy::FromZeros;

/// Number of sensors with thresholds: the composite temperature and one sensor.
pub(crate) const SENSORS: usize = 2;
/// Default over-temperature threshold, in kelvins.
pub(crate) const WARNING_KELVINS: u16 = 343;

/// Properties of one feature.
pub(crate) struct FeatureInfo {
    fid: u8,
    pub saveable: bool,
    /// The part of the subsystem that the feature belongs to, as a bit of [`effects`].
    scope: u32,
}

const fn known(fid: u8, saveable: bool) -> FeatureInfo {
    FeatureInfo {
        fid,
        saveable,
        scope: effects::SCOPE_CONTROLLER,
    }
}

const KNOWN: [FeatureInfo; 15] = [
    known(fid::ARBITRATION, true),
    known(fid::POWER_MANAGEMENT, true),
    known(fid::TEMPERATURE, true),
    FeatureInfo {
        fid: fid::ERROR_RECOVERY,
        saveable: true,
        scope: effects::SCOPE_NAMESPACE,
    },
    known(fid::VOLATILE_WRITE_CACHE, true),
    known(fid::NUMBER_OF_QUEUES, false),
    known(fid::INTERRUPT_COALESCING, true),
    known(fid::INTERRUPT_VECTOR, false),
    known(fid::WRITE_ATOMICITY, true),
    known(fid::ASYNC_EVENT, true),
    known(fid::AUTONOMOUS_POWER, true),
    known(fid::HOST_MEMORY_BUFFER, false),
    known(fid::TIMESTAMP, false),
    known(fid::KEEP_ALIVE, false),
    known(fid::HOST_BEHAVIOR, false),
];

/// Returns the feature, if a controller of this configuration supports it.
pub(crate) fn find(config: &Config, fid: u8) -> Option<&'static FeatureInfo> {
    let has = match fid {
        fid::VOLATILE_WRITE_CACHE => config.write_cache,
        fid::HOST_MEMORY_BUFFER => config.hmpre != 0,
        _ => true,
    };
    KNOWN.iter().find(|one| one.fid == fid).filter(|_| has)
}

/// Returns the dword of a feature in the Feature Identifiers Supported and Effects log page; 0 for
/// an unsupported one.
pub(crate) fn effects_of(config: &Config, fid: u8) -> u32 {
    find(config, fid).map_or(0, |one| effects::SUPPORTED | one.scope)
}

/// Current values of all features.
#[derive(Clone)]
pub(crate) struct FeatureValues {
    pub arbitration: u32,
    pub power: u32,
    /// Over-temperature and under-temperature thresholds of each sensor, in kelvins.
    pub thresholds: [[u16; SENSORS]; 2],
    pub error_recovery: u32,
    pub write_cache: bool,
    /// Submission and completion queues granted (feature 07h).
    pub granted: (u32, u32),
    pub queues_exist: bool,
    pub atomicity: u32,
    pub async_events: u32,
    pub autonomous_power: u32,
    pub power_table: [u8; AUTONOMOUS_POWER_BYTES],
    pub hmb: HostMemoryBuffer,
    /// Milliseconds since 1970 at time `set_at_ns` of the clock, that time, and true if the driver
    /// has set it.
    pub timestamp: (u64, u64, bool),
    pub keep_alive: u32,
    pub coalescing: u32,
    pub host_behavior: HostBehavior,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct HostMemoryBuffer {
    pub dword: u32,
    pub pages: u32,
    pub list: u64,
    pub entries: u32,
}

impl FeatureValues {
    pub fn new(config: &Config) -> Self {
        let all = u32::from(config.max_queues);
        Self {
            arbitration: 7,
            power: 0,
            thresholds: [[WARNING_KELVINS, 0xFFFF], [0, 0]],
            error_recovery: 0,
            write_cache: config.write_cache,
            granted: (all, all),
            queues_exist: false,
            atomicity: 0,
            async_events: 0,
            autonomous_power: 0,
            power_table: [0; AUTONOMOUS_POWER_BYTES],
            hmb: HostMemoryBuffer::default(),
            timestamp: (0, 0, false),
            keep_alive: 0,
            coalescing: 0,
            host_behavior: HostBehavior::new_zeroed(),
        }
    }

    /// Copies the value of feature `fid` from `from`, to save it.
    pub fn save(&mut self, from: &Self, fid: u8) {
        match fid {
            fid::ARBITRATION => self.arbitration = from.arbitration,
            fid::POWER_MANAGEMENT => self.power = from.power,
            fid::TEMPERATURE => self.thresholds = from.thresholds,
            fid::ERROR_RECOVERY => self.error_recovery = from.error_recovery,
            fid::VOLATILE_WRITE_CACHE => self.write_cache = from.write_cache,
            fid::INTERRUPT_COALESCING => self.coalescing = from.coalescing,
            fid::WRITE_ATOMICITY => self.atomicity = from.atomicity,
            fid::ASYNC_EVENT => self.async_events = from.async_events,
            fid::AUTONOMOUS_POWER => {
                self.autonomous_power = from.autonomous_power;
                self.power_table = from.power_table;
            }
            _ => {}
        }
    }

    /// True if writes may stay in the volatile cache.
    pub fn write_cache(&self) -> bool {
        self.write_cache
    }

    /// Returns Interrupt Coalescing (feature 08h).
    pub fn coalescing(&self) -> u32 {
        self.coalescing
    }

    /// Returns the numbers of submission and completion queues that may be created.
    pub fn granted(&self) -> (u32, u32) {
        self.granted
    }

    /// Fixes the numbers of queues until the next reset, since a queue exists.
    pub fn freeze_queues(&mut self, sqs: u32, cqs: u32) {
        self.granted = (sqs, cqs);
        self.queues_exist = true;
    }

    /// True if `kelvins` is outside the thresholds of the composite temperature.
    pub fn is_extreme(&self, kelvins: u16) -> bool {
        kelvins >= self.thresholds[0][0] || kelvins <= self.thresholds[1][0]
    }

    pub fn timestamp_ms(&self, now_ns: u64) -> u64 {
        let (ms, at_ns, _) = self.timestamp;
        ms.wrapping_add(now_ns.saturating_sub(at_ns) / 1_000_000) & 0xFFFF_FFFF_FFFF
    }
}
