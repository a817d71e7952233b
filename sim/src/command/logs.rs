//! Get Log Page: builds a log page from the controller's state and sends the requested part of it.
//!
//! NVMe Base 2.0c, 5.16 (Get Log Page command).

use crate::command::command_effects::commands_supported;
use crate::command::identify::FIRMWARE;
use crate::command::reply::CommandError;
use crate::command::{data, sanitize};
use crate::device::ControllerState;
use crate::device::features::effects_of;
use crate::device::logs::ERROR_ENTRIES;
use crate::memory::Dma;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use nvme_spec::admin::log_page_bytes;
use nvme_spec::log_page::{
    ErrorEntry, FeatureEffects, FirmwareSlots, MiEffects, SmartData, SupportedPages, bytes, lid,
};
use nvme_spec::{Nsid, Sqe, Status};
use zerocopy::{FromZeros, IntoBytes};

/// Log pages of this controller. LPA bit 5 requires those of feature effects and of NVMe-MI command
/// effects.
const PAGES: [u8; 9] = [
    lid::SUPPORTED,
    lid::ERROR,
    lid::SMART,
    lid::FIRMWARE,
    lid::CHANGED_NAMESPACES,
    lid::COMMANDS_SUPPORTED,
    lid::FEATURE_EFFECTS,
    lid::MI_EFFECTS,
    lid::SANITIZE,
];
/// Limit of the bytes read by one command when MDTS sets none: the controller allocates that much.
const MAX_LOG_BYTES: u64 = 1 << 20;

/// Sends part of a log page. NVMe Base 2.0c, 5.16 (Get Log Page command).
pub(crate) fn get_log_page(
    device: &ControllerState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), CommandError> {
    let (page, keep) = (sqe.cdw10 as u8, sqe.cdw10 >> 15 & 1 != 0);
    let offset = u64::from(sqe.cdw12) | u64::from(sqe.cdw13) << 32;
    let len = log_page_bytes(sqe);
    let whole = log_page(device, page)?;
    if len > device.max_bytes().min(MAX_LOG_BYTES) {
        return Err(Status::INVALID_FIELD.into());
    }
    // The pages belong to the controller, not to a namespace (LPA bit 0 is 0).
    if !matches!(Nsid(sqe.nsid), Nsid::NONE | Nsid::ALL) {
        return Err(Status::INVALID_FIELD.into());
    }
    if !offset.is_multiple_of(4) || offset > whole.len() as u64 {
        return Err(Status::INVALID_FIELD.into());
    }
    // Bytes past the end of the page are zeroes.
    let mut part = alloc::vec![0; len as usize];
    let rest = &whole[offset as usize..];
    let take = rest.len().min(part.len());
    part[..take].copy_from_slice(&rest[..take]);
    data::send(device.page(), dma, sqe, &part)?;
    if !keep {
        device.logs.lock().unmask(page);
        device.attention.store(true, Ordering::Relaxed);
    }
    Ok(())
}

fn log_page(device: &ControllerState, page: u8) -> Result<Vec<u8>, CommandError> {
    Ok(match page {
        lid::SUPPORTED => {
            let mut pages = SupportedPages::new_zeroed();
            for page in PAGES {
                pages.lids[usize::from(page)] = 1;
            }
            pages.as_bytes().to_vec()
        }
        lid::ERROR => {
            let mut entries: Vec<ErrorEntry> = device.logs.lock().errors.iter().copied().collect();
            // The error log holds LBAs of failed commands. While user data is being erased the
            // specification wants no trace of it reported, so these fields read as zero.
            if device.sanitize.restriction().is_some() {
                entries.iter_mut().for_each(|entry| entry.lba = 0);
            }
            entries.resize(ERROR_ENTRIES, ErrorEntry::new_zeroed());
            entries.as_bytes().to_vec()
        }
        lid::SMART => smart(device).as_bytes().to_vec(),
        lid::FIRMWARE => {
            let mut slots = FirmwareSlots::new_zeroed();
            slots.afi = 1;
            slots.frs[0] = *FIRMWARE;
            slots.as_bytes().to_vec()
        }
        lid::CHANGED_NAMESPACES => {
            let mut list = alloc::vec![0u32; 1024];
            let logs = device.logs.lock();
            list[..logs.changed_namespaces.len()].copy_from_slice(&logs.changed_namespaces);
            list.as_bytes().to_vec()
        }
        lid::COMMANDS_SUPPORTED => commands_supported().as_bytes().to_vec(),
        lid::FEATURE_EFFECTS => {
            let fis = core::array::from_fn(|fid| effects_of(&device.config, fid as u8));
            FeatureEffects { fis }.as_bytes().to_vec()
        }
        // OACS offers no NVMe-MI commands, so none is marked as supported.
        lid::MI_EFFECTS => MiEffects::new_zeroed().as_bytes().to_vec(),
        lid::SANITIZE => sanitize::status_page(device).as_bytes().to_vec(),
        _ => return Err(Status::INVALID_LOG_PAGE.into()),
    })
}

fn smart(device: &ControllerState) -> SmartData {
    let mut smart = SmartData::new_zeroed();
    let (mut reads, mut writes, mut read_bytes, mut written_bytes) = (0, 0, 0u128, 0u128);
    for slot in &device.slots[1..] {
        let stats = slot.stats.get();
        reads += u128::from(stats.reads);
        writes += u128::from(stats.writes);
        read_bytes += u128::from(stats.read_bytes);
        written_bytes += u128::from(stats.written_bytes);
    }
    let unit = u128::from(SmartData::DATA_UNIT_BYTES);
    smart.data_units_read = bytes(read_bytes.div_ceil(unit));
    smart.data_units_written = bytes(written_bytes.div_ceil(unit));
    smart.host_reads = bytes(reads);
    smart.host_writes = bytes(writes);
    smart.available_spare = 100;
    smart.spare_threshold = 10;
    let hours = device.clock_ns.load(Ordering::Relaxed) / 3_600_000_000_000;
    smart.power_on_hours = bytes(u128::from(hours));
    let logs = device.logs.lock();
    smart.critical_warning = logs.critical_warning;
    smart.set_kelvins(logs.kelvins);
    smart.temperature_sensors[0] = logs.kelvins;
    smart.power_cycles = bytes(u128::from(logs.power_cycles));
    smart.unsafe_shutdowns = bytes(u128::from(logs.unsafe_shutdowns));
    smart.media_errors = bytes(u128::from(logs.media_errors));
    smart.error_log_entries = bytes(u128::from(logs.error_count));
    smart
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DATA, Driver, config};
    use nvme_auditor::Rule;
    use nvme_spec::admin::opcode;
    use nvme_spec::log_page::effects;
    use nvme_spec::{Lba, admin, nvm};
    use zerocopy::FromBytes;

    fn page(driver: &mut Driver, lid: u8, len: u32, offset: u64) -> Result<Vec<u8>, Status> {
        driver.fill(DATA, 0xEE, 4096);
        driver.admin(admin::get_log_page(lid, Nsid::ALL, len, offset).with_prps(DATA, 0))?;
        Ok(driver.bytes(DATA, len as usize))
    }

    #[test]
    fn errors_and_counters_add_up() {
        let mut driver = Driver::with_queue(config());
        driver.breaks(&[Rule::LbaRange]);
        let read = |lba| nvm::read(Nsid(1), Lba(lba), 8).with_prps(DATA, 0);
        for _ in 0..3 {
            assert_eq!(driver.io(read(0)), Ok(0));
        }
        assert_eq!(
            driver.io(nvm::write(Nsid(1), Lba(0), 8).with_prps(DATA, 0)),
            Ok(0)
        );
        assert_eq!(driver.io(read(5000)), Err(Status::LBA_OUT_OF_RANGE));
        let smart =
            SmartData::read_from_bytes(&page(&mut driver, lid::SMART, 512, 0).unwrap()).unwrap();
        let number = |bytes: &[u8; 16]| u128::from_le_bytes(*bytes);
        assert_eq!(
            (number(&smart.host_reads), number(&smart.host_writes)),
            (4, 1)
        );
        assert_eq!(
            (
                number(&smart.data_units_read),
                number(&smart.error_log_entries)
            ),
            (1, 1)
        );
        let errors = page(&mut driver, lid::ERROR, 128, 0).unwrap();
        let entry = ErrorEntry::read_from_bytes(&errors[..64]).unwrap();
        assert_eq!(
            (entry.error_count, entry.sqid, entry.lba, entry.nsid),
            (1, 1, 5000, 1)
        );
        assert!(entry.status().is(Status::LBA_OUT_OF_RANGE));
        assert_eq!(errors[64..], [0; 64]);
    }

    #[test]
    fn pages_are_read_in_parts_and_never_past_their_end() {
        let mut driver = Driver::new(config());
        driver.breaks(&[Rule::TooLong]);
        let whole = page(&mut driver, lid::COMMANDS_SUPPORTED, 4096, 0).unwrap();
        assert_eq!(whole[usize::from(opcode::IDENTIFY) * 4], 1);
        assert_eq!(
            page(&mut driver, lid::COMMANDS_SUPPORTED, 64, 1024).unwrap(),
            whole[1024..1088]
        );
        let end = page(&mut driver, lid::FIRMWARE, 16, 504).unwrap();
        assert_eq!(end, [0; 16]);
        let refused = [
            (lid::FIRMWARE, 16, 516, Status::INVALID_FIELD),
            (lid::FIRMWARE, 16, 2, Status::INVALID_FIELD),
            (lid::FIRMWARE, 16, !3, Status::INVALID_FIELD),
            (lid::FIRMWARE, 1 << 20, 0, Status::INVALID_FIELD),
            (0x77, 16, 0, Status::INVALID_LOG_PAGE),
        ];
        for (lid, len, offset, status) in refused {
            assert_eq!(
                page(&mut driver, lid, len, offset),
                Err(status),
                "{lid} {len} {offset}"
            );
        }
        let supported = page(&mut driver, lid::SUPPORTED, 1024, 0).unwrap();
        assert_eq!(supported.iter().filter(|byte| **byte != 0).count(), 9);
    }

    /// Every page that LPA and the Supported Log Pages promise exists, and agrees with Identify, Get Features and the
    /// commands themselves.
    #[test]
    fn every_promised_page_is_served_and_agrees_with_what_the_controller_does() {
        let mut driver = Driver::new(config());
        driver.breaks_anything();
        let supported = page(&mut driver, lid::SUPPORTED, 1024, 0).unwrap();
        for lid in 0..=255u8 {
            let promised = supported[usize::from(lid) * 4] & 1 != 0;
            let served = page(&mut driver, lid, 512, 0);
            match promised {
                true => assert!(served.is_ok(), "{lid:#x}"),
                false => assert_eq!(served, Err(Status::INVALID_LOG_PAGE), "{lid:#x}"),
            }
        }
        let dword = |bytes: &[u8], at: usize| {
            u32::from_le_bytes(bytes[at * 4..][..4].try_into().expect("4 bytes"))
        };
        let features = page(&mut driver, lid::FEATURE_EFFECTS, 1024, 0).unwrap();
        for fid in 0..=255u8 {
            let get = admin::get_features(fid, admin::FeatureSelect::Current, Nsid::NONE, 0);
            let answered = driver.admin(get.with_prps(DATA, 0)).is_ok();
            let effects = dword(&features, fid.into());
            assert_eq!(effects & effects::SUPPORTED != 0, answered, "{fid:#x}");
            assert_eq!(effects >> 20 != 0, answered, "a scope: {fid:#x}");
        }
        assert_eq!(
            page(&mut driver, lid::MI_EFFECTS, 4096, 0).unwrap(),
            [0; 4096]
        );
        let commands = page(&mut driver, lid::COMMANDS_SUPPORTED, 4096, 0).unwrap();
        for code in 0..=255u8 {
            if code == opcode::ASYNC_EVENT_REQUEST {
                continue; // It completes when there is an event.
            }
            // A fused command: a known opcode ends with Invalid Field, before anything else is checked.
            let mut sqe = Sqe::new(code, Nsid(0));
            sqe.cdw0 |= 1 << 8;
            let known = driver.admin(sqe) == Err(Status::INVALID_FIELD);
            let effects = dword(&commands, code.into());
            assert_eq!(effects & effects::SUPPORTED != 0, known, "{code:#x}");
            assert_eq!(effects >> 20 != 0, known, "a scope: {code:#x}");
        }
    }

    #[test]
    fn retaining_an_event_keeps_it_masked() {
        let mut driver = Driver::with_queue(config());
        driver.breaks(&[Rule::DoorbellRange]);
        for _ in 0..2 {
            driver.push(0, admin::async_event_request());
        }
        driver.ring(0);
        driver.step();
        let bad = |driver: &mut Driver, value| {
            driver
                .controller
                .doorbells()
                .sq_tail(1)
                .store(value, Ordering::Release);
            driver.step();
            driver.step();
            driver.pop(0).map(|cqe| cqe.dw0)
        };
        assert_eq!(bad(&mut driver, 1000), Some(0x0001_0100));
        let mut log = admin::get_log_page(lid::ERROR, Nsid::ALL, 64, 0).with_prps(DATA, 0);
        log.cdw10 |= 1 << 15;
        assert_eq!(driver.admin(log), Ok(0));
        assert_eq!(bad(&mut driver, 1001), None);
        assert!(page(&mut driver, lid::ERROR, 64, 0).is_ok());
        assert_eq!(bad(&mut driver, 1002), Some(0x0001_0100));
    }

    #[test]
    fn errors_are_counted_past_the_entries_that_are_kept() {
        let mut driver = Driver::with_queue(config());
        driver.breaks(&[Rule::LbaRange]);
        let count = ERROR_ENTRIES as u64 + 6;
        for _ in 0..count {
            let read = nvm::read(Nsid(1), Lba(5000), 8).with_prps(DATA, 0);
            assert_eq!(driver.io(read), Err(Status::LBA_OUT_OF_RANGE));
        }
        let smart = page(&mut driver, lid::SMART, 512, 0).unwrap();
        let smart = SmartData::read_from_bytes(&smart).unwrap();
        assert_eq!(
            u128::from_le_bytes(smart.error_log_entries),
            u128::from(count)
        );
        let newest = page(&mut driver, lid::ERROR, 64, 0).unwrap();
        let newest = ErrorEntry::read_from_bytes(&newest).unwrap();
        assert_eq!(newest.error_count, count);
    }
}
