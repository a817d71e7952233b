//! Features: their values, Get Features and Set Features.
//!
//! A controller level reset, and so a client of a served controller that leaves, brings back the saved
//! value of a feature, which is the default until a value is saved (SV). Saved values outlive losses of
//! power, but not the process. No feature here is persistent without being saved.
//!
//! NVMe Base 2.0c, 5.27 (Set Features command) and "Feature Values".

use crate::admin::Refusal;
use crate::config::Config;
use crate::device::{Control, Device};
use crate::memory::Dma;
use core::sync::atomic::Ordering;
use nvme_core::spec::feature::{
    AUTONOMOUS_POWER_BYTES, AutonomousPower, Capabilities, ErrorRecovery, HMB_ENABLE,
    HmbDescriptor, HostBehavior, InterruptVector, NumberOfQueues, PowerManagement, SAVE,
    TemperatureThreshold, VolatileWriteCache, fid,
};
use nvme_core::spec::log_page::effects;
use nvme_core::spec::{Nsid, Sqe, Status};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Sensors that a threshold can be set for: the composite temperature and one sensor.
const SENSORS: usize = 2;
/// The default over-temperature threshold, in kelvins.
pub(crate) const WARNING_KELVINS: u16 = 343;

/// What the controller says about a feature.
struct Known {
    fid: u8,
    saveable: bool,
    /// [`effects`]: which part of the subsystem it belongs to.
    scope: u32,
}

const fn known(fid: u8, saveable: bool) -> Known {
    Known {
        fid,
        saveable,
        scope: effects::SCOPE_CONTROLLER,
    }
}

const KNOWN: [Known; 15] = [
    known(fid::ARBITRATION, true),
    known(fid::POWER_MANAGEMENT, true),
    known(fid::TEMPERATURE, true),
    Known {
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

/// The feature, where a controller of this configuration has it.
fn find(config: &Config, fid: u8) -> Option<&'static Known> {
    let has = match fid {
        fid::VOLATILE_WRITE_CACHE => config.write_cache,
        fid::HOST_MEMORY_BUFFER => config.hmpre != 0,
        _ => true,
    };
    KNOWN.iter().find(|one| one.fid == fid).filter(|_| has)
}

/// The dword of a feature in the Feature Identifiers Supported and Effects log page; 0 for one that
/// there is not.
pub(crate) fn effects_of(config: &Config, fid: u8) -> u32 {
    find(config, fid).map_or(0, |one| effects::SUPPORTED | one.scope)
}

/// The values of all features.
#[derive(Clone)]
pub(crate) struct Features {
    arbitration: u32,
    power: u32,
    /// Over and under thresholds per sensor, in kelvins.
    thresholds: [[u16; SENSORS]; 2],
    error_recovery: u32,
    write_cache: bool,
    granted: (u32, u32),
    queues_exist: bool,
    atomicity: u32,
    pub async_events: u32,
    autonomous_power: u32,
    power_table: [u8; AUTONOMOUS_POWER_BYTES],
    hmb: Hmb,
    /// Milliseconds since 1970 at `set_at_ns` of the clock; whether the driver has set it.
    timestamp: (u64, u64, bool),
    keep_alive: u32,
    coalescing: u32,
    host_behavior: HostBehavior,
}

#[derive(Clone, Copy, Default)]
struct Hmb {
    dword: u32,
    pages: u32,
    list: u64,
    entries: u32,
}

impl Features {
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
            hmb: Hmb::default(),
            timestamp: (0, 0, false),
            keep_alive: 0,
            coalescing: 0,
            host_behavior: HostBehavior::new_zeroed(),
        }
    }

    /// Takes the value of feature `fid` from `from`: it is saved.
    fn save(&mut self, from: &Self, fid: u8) {
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

    /// Whether writes may stay in the volatile cache.
    pub fn write_cache(&self) -> bool {
        self.write_cache
    }

    /// Interrupt Coalescing (feature 08h).
    pub fn coalescing(&self) -> u32 {
        self.coalescing
    }

    /// Submission and completion queues that may be created.
    pub fn granted(&self) -> (u32, u32) {
        self.granted
    }

    /// A queue exists: its number is settled until the next reset.
    pub fn freeze_queues(&mut self, sqs: u32, cqs: u32) {
        self.granted = (sqs, cqs);
        self.queues_exist = true;
    }

    /// Whether `kelvins` is outside the thresholds of the composite temperature.
    pub fn is_extreme(&self, kelvins: u16) -> bool {
        kelvins >= self.thresholds[0][0] || kelvins <= self.thresholds[1][0]
    }

    fn timestamp_ms(&self, now_ns: u64) -> u64 {
        let (ms, at_ns, _) = self.timestamp;
        ms.wrapping_add(now_ns.saturating_sub(at_ns) / 1_000_000) & 0xFFFF_FFFF_FFFF
    }
}

/// Dword 0 of a feature; the data of those that have some is sent apart.
fn value(features: &Features, sqe: &Sqe, device: &Device) -> Result<u32, Refusal> {
    // What the device keeps itself is 0 by default.
    let is_default = matches!(sqe.cdw10 >> 8 & 7, 1 | 2);
    let current = |value: u32| if is_default { 0 } else { value };
    let fid = sqe.cdw10 as u8;
    if find(&device.config, fid).is_none() {
        return Err(Status::INVALID_FIELD.into());
    }
    Ok(match fid {
        fid::ARBITRATION => features.arbitration,
        fid::POWER_MANAGEMENT => features.power,
        fid::TEMPERATURE => {
            let (sensor, kind) = sensor(sqe.cdw11)?;
            let mut threshold = TemperatureThreshold(sqe.cdw11 & 0x003F_0000);
            threshold.set_tmpth(features.thresholds[kind][sensor]);
            threshold.0
        }
        fid::ERROR_RECOVERY => features.error_recovery,
        fid::VOLATILE_WRITE_CACHE => features.write_cache.into(),
        fid::NUMBER_OF_QUEUES => NumberOfQueues::request(features.granted.0, features.granted.1),
        fid::INTERRUPT_COALESCING => features.coalescing,
        fid::INTERRUPT_VECTOR => {
            let mut vector = InterruptVector(sqe.cdw11 & 0xFFFF);
            let disabled = device.vectors.is_uncoalesced(vector.iv());
            vector.set_cd(current(disabled.ok_or(Status::INVALID_FIELD)?.into()) != 0);
            vector.0
        }
        fid::WRITE_ATOMICITY => features.atomicity,
        fid::ASYNC_EVENT => features.async_events,
        fid::AUTONOMOUS_POWER => features.autonomous_power,
        fid::HOST_MEMORY_BUFFER => features.hmb.dword,
        fid::TIMESTAMP | fid::HOST_BEHAVIOR => 0,
        fid::KEEP_ALIVE => features.keep_alive,
        _ => return Err(Status::INVALID_FIELD.into()),
    })
}

fn sensor(dword: u32) -> Result<(usize, usize), Refusal> {
    let threshold = TemperatureThreshold(dword);
    let (sensor, kind) = (
        usize::from(threshold.tmpsel()),
        usize::from(threshold.thsel()),
    );
    if sensor >= SENSORS || kind > 1 {
        return Err(Status::INVALID_FIELD.into());
    }
    Ok((sensor, kind))
}

impl Device {
    /// NVMe Base 2.0c, 5.15 (Get Features command).
    pub(crate) fn get_features(
        &self,
        control: &mut Control,
        dma: &Dma<'_>,
        sqe: &Sqe,
    ) -> Result<u32, Refusal> {
        let select = sqe.cdw10 >> 8 & 7;
        let defaults;
        let features = match select {
            0 => &control.features,
            2 => &control.saved,
            1 => {
                defaults = Features::new(&self.config);
                &defaults
            }
            3 => {
                value(&control.features, sqe, self)?;
                let mut capabilities = Capabilities(0);
                capabilities.set_changeable(true);
                let found = find(&self.config, sqe.cdw10 as u8);
                capabilities.set_saveable(found.is_some_and(|one| one.saveable));
                capabilities.set_namespace_specific(sqe.cdw10 as u8 == fid::ERROR_RECOVERY);
                return Ok(capabilities.0);
            }
            _ => return Err(Status::INVALID_FIELD.into()),
        };
        let dword = value(features, sqe, self)?;
        match sqe.cdw10 as u8 {
            fid::TIMESTAMP => {
                let now_ns = self.clock_ns.load(Ordering::Relaxed);
                let origin = u64::from(features.timestamp.2) << 49;
                let bytes = (features.timestamp_ms(now_ns) | origin).to_le_bytes();
                self.send(dma, sqe, &bytes)?;
            }
            fid::AUTONOMOUS_POWER => self.send(dma, sqe, &features.power_table)?,
            fid::HOST_BEHAVIOR => self.send(dma, sqe, features.host_behavior.as_bytes())?,
            fid::HOST_MEMORY_BUFFER => {
                let mut bytes = alloc::vec![0; 4096];
                let Hmb {
                    pages,
                    list,
                    entries,
                    ..
                } = features.hmb;
                bytes[..4].copy_from_slice(&pages.to_le_bytes());
                bytes[4..12].copy_from_slice(&list.to_le_bytes());
                bytes[12..16].copy_from_slice(&entries.to_le_bytes());
                self.send(dma, sqe, &bytes)?;
            }
            _ => {}
        }
        Ok(dword)
    }

    /// NVMe Base 2.0c, 5.27 (Set Features command).
    pub(crate) fn set_features(
        &self,
        control: &mut Control,
        dma: &Dma<'_>,
        sqe: &Sqe,
    ) -> Result<u32, Refusal> {
        let (id, dword) = (sqe.cdw10 as u8, sqe.cdw11);
        // Unknown ones are refused as such, before anything is said about how they are set.
        value(&control.features, sqe, self)?;
        let save = sqe.cdw10 & SAVE != 0;
        if save && !find(&self.config, id).is_some_and(|one| one.saveable) {
            return Err(Status::FEATURE_NOT_SAVEABLE.into());
        }
        if id != fid::ERROR_RECOVERY && !matches!(Nsid(sqe.nsid), Nsid::NONE | Nsid::ALL) {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.into());
        }
        let features = &mut control.features;
        match id {
            fid::ARBITRATION => features.arbitration = dword,
            fid::POWER_MANAGEMENT => {
                if PowerManagement(dword).ps() != 0 {
                    return Err(Status::INVALID_FIELD.into());
                }
                features.power = dword & 0xFF;
            }
            fid::TEMPERATURE => {
                let (sensor, kind) = sensor(dword)?;
                features.thresholds[kind][sensor] = TemperatureThreshold(dword).tmpth();
                self.logs.lock().check_temperature(features, false);
                self.attention.store(true, Ordering::Relaxed);
            }
            fid::ERROR_RECOVERY => {
                // Deallocated blocks read as zero here, never as an error (NSFEAT.DAE = 0).
                if ErrorRecovery(dword).dulbe() {
                    return Err(Status::INVALID_FIELD.into());
                }
                features.error_recovery = dword & 0xFFFF;
            }
            fid::VOLATILE_WRITE_CACHE => {
                let write_cache = VolatileWriteCache(dword).wce();
                self.write_back.store(write_cache, Ordering::Relaxed);
                if !write_cache {
                    self.barrier();
                    if self.namespaces.iter().any(|one| one.flush().is_err()) {
                        self.write_back
                            .store(features.write_cache, Ordering::Relaxed);
                        return Err(Status::WRITE_FAULT.into());
                    }
                }
                features.write_cache = write_cache;
            }
            fid::NUMBER_OF_QUEUES => return self.number_of_queues(features, dword),
            fid::INTERRUPT_COALESCING => {
                features.coalescing = dword & 0xFFFF;
                self.vectors.set_coalescing(features.coalescing);
            }
            fid::INTERRUPT_VECTOR => {
                let vector = InterruptVector(dword);
                self.vectors.set_uncoalesced(vector.iv(), vector.cd());
            }
            fid::WRITE_ATOMICITY => features.atomicity = dword & 1,
            fid::ASYNC_EVENT => {
                features.async_events = dword;
                self.logs.lock().check_temperature(features, true);
                self.attention.store(true, Ordering::Relaxed);
            }
            fid::AUTONOMOUS_POWER => {
                let mut table = [0; AUTONOMOUS_POWER_BYTES];
                self.receive(dma, sqe, &mut table)?;
                features.power_table = table;
                features.autonomous_power = AutonomousPower(dword).apste().into();
            }
            fid::HOST_MEMORY_BUFFER => self.host_memory_buffer(features, dma, sqe)?,
            fid::TIMESTAMP => {
                let mut bytes = [0; 8];
                self.receive(dma, sqe, &mut bytes)?;
                let now_ns = self.clock_ns.load(Ordering::Relaxed);
                features.timestamp = (u64::from_le_bytes(bytes) & 0xFFFF_FFFF_FFFF, now_ns, true);
            }
            fid::KEEP_ALIVE => features.keep_alive = dword,
            fid::HOST_BEHAVIOR => {
                let mut bytes = [0; size_of::<HostBehavior>()];
                self.receive(dma, sqe, &mut bytes)?;
                let behavior =
                    HostBehavior::read_from_bytes(&bytes).map_err(|_| Status::INTERNAL_ERROR)?;
                let HostBehavior {
                    acre,
                    etdas,
                    lbafee,
                    ..
                } = behavior;
                if acre.max(etdas).max(lbafee) > 1 {
                    return Err(Status::INVALID_FIELD.into());
                }
                features.host_behavior = behavior;
            }
            _ => return Err(Status::INVALID_FIELD.into()),
        }
        if save {
            control.saved.save(&control.features, id);
        }
        Ok(0)
    }

    fn number_of_queues(&self, features: &mut Features, dword: u32) -> Result<u32, Refusal> {
        let asked = NumberOfQueues(dword);
        if asked.nsq_z() == 0xFFFF || asked.ncq_z() == 0xFFFF {
            return Err(Status::INVALID_FIELD.into());
        }
        if features.queues_exist {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        let most = u32::from(self.config.max_queues);
        let grant = |asked_z: u16| (u32::from(asked_z) + 1).min(most);
        features.granted = (grant(asked.nsq_z()), grant(asked.ncq_z()));
        Ok(NumberOfQueues::request(
            features.granted.0,
            features.granted.1,
        ))
    }

    /// Takes or gives back the host's memory: the list and the memory itself must be reachable.
    fn host_memory_buffer(
        &self,
        features: &mut Features,
        dma: &Dma<'_>,
        sqe: &Sqe,
    ) -> Result<(), Refusal> {
        let enabled = features.hmb.dword & HMB_ENABLE != 0;
        if sqe.cdw11 & HMB_ENABLE == 0 {
            features.hmb = Hmb::default();
            return Ok(());
        }
        if enabled {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        let list = u64::from(sqe.cdw13 & !0xF) | u64::from(sqe.cdw14) << 32;
        let hmb = Hmb {
            dword: sqe.cdw11 & 3,
            pages: sqe.cdw12,
            list,
            entries: sqe.cdw15,
        };
        if hmb.pages < self.hmmin_pages() || hmb.entries == 0 || hmb.entries > 4096 {
            return Err(Status::INVALID_FIELD.into());
        }
        let mut pages = 0u64;
        for i in 0..u64::from(hmb.entries) {
            let at = list.wrapping_add(i * size_of::<HmbDescriptor>() as u64);
            let [address, count] = dma
                .words::<2>(at)
                .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            let count = count & 0xFFFF_FFFF;
            let page = self.page();
            if !address.is_multiple_of(page.bytes()) || count == 0 {
                return Err(Status::INVALID_FIELD.into());
            }
            let bytes = usize::try_from(count * page.bytes()).unwrap_or(usize::MAX);
            dma.check(address, bytes)
                .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            pages += count;
        }
        if pages < u64::from(hmb.pages) {
            return Err(Status::INVALID_FIELD.into());
        }
        features.hmb = hmb;
        Ok(())
    }

    /// HMMIN, which counts 4 KiB, in pages of CC.MPS.
    fn hmmin_pages(&self) -> u32 {
        (u64::from(self.config.hmmin) * 4096).div_ceil(self.page().bytes()) as u32
    }
}

#[cfg(test)]
mod tests;
