//! Get Features and Set Features.
//!
//! Values of features live in `device::features`; this file checks what a command may read and set,
//! and moves the data structures of the features that have one.
//!
//! NVMe Base 2.0c, 5.15 (Get Features command) and 5.27 (Set Features command).

use crate::command::data;
use crate::command::reply::CommandError;
use crate::device::ControllerState;
use crate::device::control::AdminState;
use crate::device::features::{FeatureValues, HostMemoryBuffer, SENSORS, find};
use crate::memory::Dma;
use core::sync::atomic::Ordering;
use nvme_spec::feature::{
    AUTONOMOUS_POWER_BYTES, AutonomousPower, Capabilities, ErrorRecovery, HMB_ENABLE,
    HmbDescriptor, HostBehavior, InterruptVector, NumberOfQueues, PowerManagement, SAVE,
    TemperatureThreshold, VolatileWriteCache, fid,
};
use nvme_spec::{Nsid, Sqe, Status};
use zerocopy::{FromBytes, IntoBytes};

/// Returns dword 0 of a feature. A data structure, if the feature has one, is sent by the caller.
fn value(
    features: &FeatureValues,
    sqe: &Sqe,
    device: &ControllerState,
) -> Result<u32, CommandError> {
    // Values that the device keeps outside `features` are 0 by default.
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

fn sensor(dword: u32) -> Result<(usize, usize), CommandError> {
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

/// Returns a feature's value or capabilities. NVMe Base 2.0c, 5.15 (Get Features command).
pub(crate) fn get_features(
    device: &ControllerState,
    control: &mut AdminState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<u32, CommandError> {
    let select = sqe.cdw10 >> 8 & 7;
    let defaults;
    let features = match select {
        0 => &control.features,
        2 => &control.saved,
        1 => {
            defaults = FeatureValues::new(&device.config);
            &defaults
        }
        3 => {
            value(&control.features, sqe, device)?;
            let mut capabilities = Capabilities(0);
            capabilities.set_changeable(true);
            let found = find(&device.config, sqe.cdw10 as u8);
            capabilities.set_saveable(found.is_some_and(|one| one.saveable));
            capabilities.set_namespace_specific(sqe.cdw10 as u8 == fid::ERROR_RECOVERY);
            return Ok(capabilities.0);
        }
        _ => return Err(Status::INVALID_FIELD.into()),
    };
    let dword = value(features, sqe, device)?;
    match sqe.cdw10 as u8 {
        fid::TIMESTAMP => {
            let now_ns = device.clock_ns.load(Ordering::Relaxed);
            let origin = u64::from(features.timestamp.2) << 49;
            let bytes = (features.timestamp_ms(now_ns) | origin).to_le_bytes();
            data::send(device.page(), dma, sqe, &bytes)?;
        }
        fid::AUTONOMOUS_POWER => data::send(device.page(), dma, sqe, &features.power_table)?,
        fid::HOST_BEHAVIOR => {
            data::send(device.page(), dma, sqe, features.host_behavior.as_bytes())?
        }
        fid::HOST_MEMORY_BUFFER => {
            let mut bytes = alloc::vec![0; 4096];
            let HostMemoryBuffer {
                pages,
                list,
                entries,
                ..
            } = features.hmb;
            bytes[..4].copy_from_slice(&pages.to_le_bytes());
            bytes[4..12].copy_from_slice(&list.to_le_bytes());
            bytes[12..16].copy_from_slice(&entries.to_le_bytes());
            data::send(device.page(), dma, sqe, &bytes)?;
        }
        _ => {}
    }
    Ok(dword)
}

/// Sets a feature. NVMe Base 2.0c, 5.27 (Set Features command).
pub(crate) fn set_features(
    device: &ControllerState,
    control: &mut AdminState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<u32, CommandError> {
    let (id, dword) = (sqe.cdw10 as u8, sqe.cdw11);
    // An unknown feature is rejected before the checks of how it is set: the driver learns that the
    // feature is missing (Invalid Field), and not that it cannot be saved.
    value(&control.features, sqe, device)?;
    let save = sqe.cdw10 & SAVE != 0;
    if save && !find(&device.config, id).is_some_and(|one| one.saveable) {
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
            device.logs.lock().check_temperature(features, false);
            device.attention.store(true, Ordering::Relaxed);
        }
        fid::ERROR_RECOVERY => {
            // NSFEAT.DAE is 0: deallocated blocks read as zeroes, so an error for them cannot be
            // enabled.
            if ErrorRecovery(dword).dulbe() {
                return Err(Status::INVALID_FIELD.into());
            }
            features.error_recovery = dword & 0xFFFF;
        }
        fid::VOLATILE_WRITE_CACHE => write_cache(device, features, dword)?,
        fid::NUMBER_OF_QUEUES => return number_of_queues(device, features, dword),
        fid::INTERRUPT_COALESCING => {
            features.coalescing = dword & 0xFFFF;
            device.vectors.set_coalescing(features.coalescing);
        }
        fid::INTERRUPT_VECTOR => {
            let vector = InterruptVector(dword);
            device.vectors.set_uncoalesced(vector.iv(), vector.cd());
        }
        fid::WRITE_ATOMICITY => features.atomicity = dword & 1,
        fid::ASYNC_EVENT => {
            features.async_events = dword;
            device.logs.lock().check_temperature(features, true);
            device.attention.store(true, Ordering::Relaxed);
        }
        fid::AUTONOMOUS_POWER => {
            let mut table = [0; AUTONOMOUS_POWER_BYTES];
            data::receive(device.page(), dma, sqe, &mut table)?;
            features.power_table = table;
            features.autonomous_power = AutonomousPower(dword).apste().into();
        }
        fid::HOST_MEMORY_BUFFER => host_memory_buffer(device, features, dma, sqe)?,
        fid::TIMESTAMP => {
            let mut bytes = [0; 8];
            data::receive(device.page(), dma, sqe, &mut bytes)?;
            let now_ns = device.clock_ns.load(Ordering::Relaxed);
            features.timestamp = (u64::from_le_bytes(bytes) & 0xFFFF_FFFF_FFFF, now_ns, true);
        }
        fid::KEEP_ALIVE => features.keep_alive = dword,
        fid::HOST_BEHAVIOR => features.host_behavior = host_behavior(device, dma, sqe)?,
        _ => return Err(Status::INVALID_FIELD.into()),
    }
    if save {
        control.saved.save(&control.features, id);
    }
    Ok(0)
}

/// Turns the volatile write cache on or off. Turning it off flushes the cache first.
fn write_cache(
    device: &ControllerState,
    features: &mut FeatureValues,
    dword: u32,
) -> Result<(), CommandError> {
    let enabled = VolatileWriteCache(dword).wce();
    device.write_back.store(enabled, Ordering::Relaxed);
    if !enabled {
        device.barrier();
        if device.namespaces.iter().any(|one| one.flush().is_err()) {
            device
                .write_back
                .store(features.write_cache, Ordering::Relaxed);
            return Err(Status::WRITE_FAULT.into());
        }
    }
    features.write_cache = enabled;
    Ok(())
}

/// Reads Host Behavior Support from the driver, and rejects undefined values.
fn host_behavior(
    device: &ControllerState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<HostBehavior, CommandError> {
    let mut bytes = [0; size_of::<HostBehavior>()];
    data::receive(device.page(), dma, sqe, &mut bytes)?;
    let behavior = HostBehavior::read_from_bytes(&bytes).map_err(|_| Status::INTERNAL_ERROR)?;
    let HostBehavior {
        acre,
        etdas,
        lbafee,
        ..
    } = behavior;
    if acre.max(etdas).max(lbafee) > 1 {
        return Err(Status::INVALID_FIELD.into());
    }
    Ok(behavior)
}

fn number_of_queues(
    device: &ControllerState,
    features: &mut FeatureValues,
    dword: u32,
) -> Result<u32, CommandError> {
    let asked = NumberOfQueues(dword);
    if asked.nsq_z() == 0xFFFF || asked.ncq_z() == 0xFFFF {
        return Err(Status::INVALID_FIELD.into());
    }
    if features.queues_exist {
        return Err(Status::COMMAND_SEQUENCE_ERROR.into());
    }
    let most = device.config.max_queues.min(device.external.most_pairs());
    let most = u32::from(most);
    let grant = |asked_z: u16| (u32::from(asked_z) + 1).min(most);
    features.granted = (grant(asked.nsq_z()), grant(asked.ncq_z()));
    Ok(NumberOfQueues::request(
        features.granted.0,
        features.granted.1,
    ))
}

/// Sets up or releases the host memory buffer. The descriptor list and the memory that it describes
/// must be reachable.
fn host_memory_buffer(
    device: &ControllerState,
    features: &mut FeatureValues,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), CommandError> {
    let enabled = features.hmb.dword & HMB_ENABLE != 0;
    if sqe.cdw11 & HMB_ENABLE == 0 {
        features.hmb = HostMemoryBuffer::default();
        return Ok(());
    }
    if enabled {
        return Err(Status::COMMAND_SEQUENCE_ERROR.into());
    }
    let list = u64::from(sqe.cdw13 & !0xF) | u64::from(sqe.cdw14) << 32;
    let hmb = HostMemoryBuffer {
        dword: sqe.cdw11 & 3,
        pages: sqe.cdw12,
        list,
        entries: sqe.cdw15,
    };
    if hmb.pages < hmmin_pages(device) || hmb.entries == 0 || hmb.entries > 4096 {
        return Err(Status::INVALID_FIELD.into());
    }
    let mut pages = 0u64;
    for i in 0..u64::from(hmb.entries) {
        let at = list.wrapping_add(i * size_of::<HmbDescriptor>() as u64);
        let [address, count] = dma
            .words::<2>(at)
            .map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        let count = count & 0xFFFF_FFFF;
        let page = device.page();
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

/// Returns HMMIN, whose unit is 4 KiB, in pages of CC.MPS.
fn hmmin_pages(device: &ControllerState) -> u32 {
    (u64::from(device.config.hmmin) * 4096).div_ceil(device.page().bytes()) as u32
}

#[cfg(test)]
mod tests;
