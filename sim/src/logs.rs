//! Log pages, SMART counters and asynchronous events.
//!
//! An event type that was reported is masked until its log page is read without RAE.
//!
//! NVMe Base 2.0c, 5.16 (Get Log Page command) and 5.2 (Asynchronous Event Request command).

use crate::admin::{self, Refusal};
use crate::device::Device;
use crate::features::{Features, effects_of};
use crate::identify::FIRMWARE;
use crate::memory::Dma;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use nvme_core::spec::admin::{log_page_bytes, opcode};
use nvme_core::spec::identify::oaes;
use nvme_core::spec::log_page::{
    AsyncEvent, CommandsSupported, ErrorEntry, FeatureEffects, FirmwareSlots, MiEffects, Smart,
    SupportedPages, bytes, command_set_event, critical_warning, effects, error_event, event_type,
    lid,
};
use nvme_core::spec::nvm::{opcode as nvm_opcode, slba};
use nvme_core::spec::{Nsid, Sqe, Status};
use zerocopy::{FromZeros, IntoBytes};

/// Entries of the error log (ELPE + 1).
pub(crate) const ERROR_ENTRIES: usize = 64;
/// Events that wait for a request; later ones of the same kind are merged, others dropped.
const MAX_EVENTS: usize = 16;
/// The log pages that there are. LPA bit 5 promises the effects of features and of NVMe-MI commands.
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
/// Bytes of the longest log page read at once when MDTS sets no limit.
const MAX_LOG_BYTES: u64 = 1 << 20;

/// What the controller remembers about itself.
pub(crate) struct Logs {
    /// Newest first.
    errors: VecDeque<ErrorEntry>,
    error_count: u64,
    media_errors: u64,
    events: VecDeque<AsyncEvent>,
    /// Bit n: events of type n were reported and their log page was not read since.
    masked: u8,
    changed_namespaces: Vec<u32>,
    kelvins: u16,
    critical_warning: u8,
    power_cycles: u64,
    unsafe_shutdowns: u64,
}

impl Logs {
    pub fn new() -> Self {
        Self {
            errors: VecDeque::with_capacity(ERROR_ENTRIES),
            error_count: 0,
            media_errors: 0,
            events: VecDeque::with_capacity(MAX_EVENTS),
            masked: 0,
            changed_namespaces: Vec::new(),
            kelvins: 313,
            critical_warning: 0,
            power_cycles: 1,
            unsafe_shutdowns: 0,
        }
    }

    /// A controller reset: events that were not reported are forgotten, logs are kept.
    pub fn reset(&mut self) {
        self.events.clear();
        self.masked = 0;
    }

    /// Power was lost and came back.
    pub fn power_cycle(&mut self, clean: bool) {
        self.reset();
        self.errors.clear();
        self.power_cycles += 1;
        self.unsafe_shutdowns += u64::from(!clean);
    }

    /// A command ended with `status`.
    pub fn failed(&mut self, sqid: u16, sqe: &Sqe, status: Status) {
        // Where the parameter is that was wrong is not known here.
        let mut entry = self.entry(sqid, sqe.cid().0);
        entry.phase_status = status.0 << 1;
        entry.nsid = sqe.nsid;
        if sqid != 0 {
            entry.lba = slba(sqe).0;
        }
        self.media_errors += u64::from(status.sct() == 2);
        self.push(entry);
    }

    /// A doorbell of `qid` was written with an impossible value, or does not exist.
    pub fn bad_doorbell(&mut self, qid: u16, exists: bool) {
        let mut entry = self.entry(qid, 0xFFFF);
        entry.phase_status = Status::INVALID_FIELD.0 << 1;
        self.push(entry);
        let info = match exists {
            true => error_event::INVALID_DOORBELL_VALUE,
            false => error_event::INVALID_DOORBELL_REGISTER,
        };
        self.raise(event_type::ERROR, info, lid::ERROR);
    }

    /// The attributes of a namespace changed.
    pub fn namespace_changed(&mut self, nsid: u32, features: &Features) {
        if !self.changed_namespaces.contains(&nsid) && self.changed_namespaces.len() < 1024 {
            self.changed_namespaces.push(nsid);
            self.changed_namespaces.sort_unstable();
        }
        if features.async_events & oaes::NAMESPACE_ATTRIBUTE != 0 {
            self.raise(event_type::NOTICE, 0, lid::CHANGED_NAMESPACES);
        }
    }

    /// A sanitize operation begins: events of an earlier one mean nothing any more.
    pub fn forget_sanitize(&mut self) {
        self.events
            .retain(|event| event.log_page() != lid::SANITIZE);
    }

    /// A sanitize operation has ended, successfully or not.
    pub fn sanitize_completed(&mut self) {
        let info = command_set_event::SANITIZE_COMPLETED;
        self.raise(event_type::COMMAND_SET, info, lid::SANITIZE);
    }

    /// The temperature is now `kelvins`.
    pub fn set_temperature(&mut self, kelvins: u16, features: &Features) {
        self.kelvins = kelvins;
        self.check_temperature(features, false);
    }

    /// Compares the temperature with its thresholds. Being outside is an event when it is new, or
    /// when the driver has just asked for such events.
    pub fn check_temperature(&mut self, features: &Features, asked_now: bool) {
        if !features.is_extreme(self.kelvins) {
            self.critical_warning &= !critical_warning::TEMPERATURE;
            return;
        }
        let known = self.critical_warning & critical_warning::TEMPERATURE != 0;
        self.critical_warning |= critical_warning::TEMPERATURE;
        if known && !asked_now {
            return;
        }
        if features.async_events & u32::from(critical_warning::TEMPERATURE) != 0 {
            self.raise(event_type::SMART, 1, lid::SMART);
        }
    }

    /// The next event that is not masked, as dword 0 of its completion; masks its type.
    pub fn take_event(&mut self) -> Option<u32> {
        let open = |event: &AsyncEvent| self.masked >> event.event_type() & 1 == 0;
        let at = self.events.iter().position(open)?;
        let event = self.events.remove(at)?;
        self.masked |= 1 << event.event_type();
        Some(event.0)
    }

    fn entry(&mut self, sqid: u16, cid: u16) -> ErrorEntry {
        self.error_count += 1;
        let mut entry = ErrorEntry::new_zeroed();
        entry.error_count = self.error_count;
        entry.sqid = sqid;
        entry.cid = cid;
        entry.parameter_error_location = 0xFFFF;
        entry
    }

    fn push(&mut self, entry: ErrorEntry) {
        self.errors.truncate(ERROR_ENTRIES - 1);
        self.errors.push_front(entry);
    }

    fn raise(&mut self, kind: u8, info: u8, page: u8) {
        let mut event = AsyncEvent(0);
        event.set_event_type(kind);
        event.set_info(info);
        event.set_log_page(page);
        if !self.events.contains(&event) && self.events.len() < MAX_EVENTS {
            self.events.push_back(event);
        }
    }

    /// The log page was read: its events may be reported again.
    fn unmask(&mut self, page: u8) {
        let kind = match page {
            lid::ERROR => event_type::ERROR,
            lid::SMART => event_type::SMART,
            lid::CHANGED_NAMESPACES => event_type::NOTICE,
            lid::SANITIZE => event_type::COMMAND_SET,
            _ => return,
        };
        self.masked &= !(1 << kind);
        // What the log page has just told needs no event any more.
        self.events.retain(|event| event.event_type() != kind);
        if page == lid::CHANGED_NAMESPACES {
            self.changed_namespaces.clear();
        }
    }
}

impl Device {
    /// NVMe Base 2.0c, 5.16 (Get Log Page command).
    pub(crate) fn get_log_page(&self, dma: &Dma<'_>, sqe: &Sqe) -> Result<(), Refusal> {
        let (page, keep) = (sqe.cdw10 as u8, sqe.cdw10 >> 15 & 1 != 0);
        let offset = u64::from(sqe.cdw12) | u64::from(sqe.cdw13) << 32;
        let len = log_page_bytes(sqe);
        let whole = self.log_page(page)?;
        if len > self.max_bytes().min(MAX_LOG_BYTES) {
            return Err(Status::INVALID_FIELD.into());
        }
        // The pages belong to the controller; there are none per namespace (LPA bit 0 is 0).
        if !matches!(Nsid(sqe.nsid), Nsid::NONE | Nsid::ALL) {
            return Err(Status::INVALID_FIELD.into());
        }
        if !offset.is_multiple_of(4) || offset > whole.len() as u64 {
            return Err(Status::INVALID_FIELD.into());
        }
        // Past the end of the page, zeroes.
        let mut part = alloc::vec![0; len as usize];
        let rest = &whole[offset as usize..];
        let take = rest.len().min(part.len());
        part[..take].copy_from_slice(&rest[..take]);
        self.send(dma, sqe, &part)?;
        if !keep {
            self.logs.lock().unmask(page);
            self.attention.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn log_page(&self, page: u8) -> Result<Vec<u8>, Refusal> {
        Ok(match page {
            lid::SUPPORTED => {
                let mut pages = SupportedPages::new_zeroed();
                for page in PAGES {
                    pages.lids[usize::from(page)] = 1;
                }
                pages.as_bytes().to_vec()
            }
            lid::ERROR => {
                let mut entries: Vec<ErrorEntry> =
                    self.logs.lock().errors.iter().copied().collect();
                // Addresses of user data are not told while these are erased.
                if self.sanitize.bar().is_some() {
                    entries.iter_mut().for_each(|entry| entry.lba = 0);
                }
                entries.resize(ERROR_ENTRIES, ErrorEntry::new_zeroed());
                entries.as_bytes().to_vec()
            }
            lid::SMART => self.smart().as_bytes().to_vec(),
            lid::FIRMWARE => {
                let mut slots = FirmwareSlots::new_zeroed();
                slots.afi = 1;
                slots.frs[0] = *FIRMWARE;
                slots.as_bytes().to_vec()
            }
            lid::CHANGED_NAMESPACES => {
                let mut list = alloc::vec![0u32; 1024];
                let logs = self.logs.lock();
                list[..logs.changed_namespaces.len()].copy_from_slice(&logs.changed_namespaces);
                list.as_bytes().to_vec()
            }
            lid::COMMANDS_SUPPORTED => commands_supported().as_bytes().to_vec(),
            lid::FEATURE_EFFECTS => {
                let fis = core::array::from_fn(|fid| effects_of(&self.config, fid as u8));
                FeatureEffects { fis }.as_bytes().to_vec()
            }
            // There are no NVMe-MI commands (OACS): none is supported.
            lid::MI_EFFECTS => MiEffects::new_zeroed().as_bytes().to_vec(),
            lid::SANITIZE => self.sanitize_status().as_bytes().to_vec(),
            _ => return Err(Status::INVALID_LOG_PAGE.into()),
        })
    }

    fn smart(&self) -> Smart {
        let mut smart = Smart::new_zeroed();
        let (mut reads, mut writes, mut read_bytes, mut written_bytes) = (0, 0, 0u128, 0u128);
        for slot in &self.slots[1..] {
            let stats = slot.stats.get();
            reads += u128::from(stats.reads);
            writes += u128::from(stats.writes);
            read_bytes += u128::from(stats.read_bytes);
            written_bytes += u128::from(stats.written_bytes);
        }
        let unit = u128::from(Smart::DATA_UNIT_BYTES);
        smart.data_units_read = bytes(read_bytes.div_ceil(unit));
        smart.data_units_written = bytes(written_bytes.div_ceil(unit));
        smart.host_reads = bytes(reads);
        smart.host_writes = bytes(writes);
        smart.available_spare = 100;
        smart.spare_threshold = 10;
        let hours = self.clock_ns.load(Ordering::Relaxed) / 3_600_000_000_000;
        smart.power_on_hours = bytes(u128::from(hours));
        let logs = self.logs.lock();
        smart.critical_warning = logs.critical_warning;
        smart.set_kelvins(logs.kelvins);
        smart.temperature_sensors[0] = logs.kelvins;
        smart.power_cycles = bytes(u128::from(logs.power_cycles));
        smart.unsafe_shutdowns = bytes(u128::from(logs.unsafe_shutdowns));
        smart.media_errors = bytes(u128::from(logs.media_errors));
        smart.error_log_entries = bytes(u128::from(logs.error_count));
        smart
    }
}

/// What the controller's commands change, and which part of the subsystem they concern.
fn commands_supported() -> CommandsSupported {
    let mut commands = CommandsSupported::new_zeroed();
    let alone = 2 << effects::SUBMISSION.trailing_zeros();
    for code in (0..=255u8).filter(|code| admin::is_supported(*code)) {
        let more = match code {
            opcode::FORMAT_NVM => {
                let changes = effects::BLOCK_CONTENT | effects::NAMESPACE_CAPABILITY;
                changes | alone | effects::SCOPE_NAMESPACE
            }
            opcode::SANITIZE => effects::BLOCK_CONTENT | alone | effects::SCOPE_SUBSYSTEM,
            opcode::IDENTIFY | opcode::GET_FEATURES | opcode::SET_FEATURES => {
                effects::SCOPE_NAMESPACE | effects::SCOPE_CONTROLLER
            }
            _ => effects::SCOPE_CONTROLLER,
        };
        commands.acs[usize::from(code)] = effects::SUPPORTED | more;
    }
    let reads = [
        nvm_opcode::FLUSH,
        nvm_opcode::READ,
        nvm_opcode::COMPARE,
        nvm_opcode::VERIFY,
    ];
    for code in reads {
        commands.iocs[usize::from(code)] = effects::SUPPORTED | effects::SCOPE_NAMESPACE;
    }
    let writes = [
        nvm_opcode::WRITE,
        nvm_opcode::WRITE_UNCORRECTABLE,
        nvm_opcode::WRITE_ZEROES,
        nvm_opcode::DATASET_MANAGEMENT,
    ];
    for code in writes {
        commands.iocs[usize::from(code)] =
            effects::SUPPORTED | effects::BLOCK_CONTENT | effects::SCOPE_NAMESPACE;
    }
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_type_is_masked_until_its_page_is_read() {
        let mut logs = Logs::new();
        logs.bad_doorbell(3, true);
        logs.bad_doorbell(3, false);
        assert_eq!(logs.take_event(), Some(0x0001_0100));
        assert_eq!(logs.take_event(), None);
        logs.raise(event_type::NOTICE, 0, lid::CHANGED_NAMESPACES);
        assert_eq!(logs.take_event(), Some(0x0004_0002));
        logs.unmask(lid::ERROR);
        logs.bad_doorbell(3, false);
        assert_eq!(logs.take_event(), Some(0x0001_0000));
    }

    #[test]
    fn the_error_log_keeps_the_newest_and_counts_all() {
        let mut logs = Logs::new();
        for cid in 0..100u16 {
            let sqe = Sqe::new(2, Nsid(1)).with_cid(nvme_core::spec::Cid(cid));
            logs.failed(1, &sqe, Status::LBA_OUT_OF_RANGE);
        }
        assert_eq!(logs.errors.len(), ERROR_ENTRIES);
        assert_eq!((logs.errors[0].error_count, logs.errors[0].cid), (100, 99));
        assert!(logs.errors[0].status().is(Status::LBA_OUT_OF_RANGE));
    }

    use crate::testing::{DATA, Driver, config};
    use nvme_auditor::Rule;
    use nvme_core::spec::{Lba, admin, nvm};
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
            Smart::read_from_bytes(&page(&mut driver, lid::SMART, 512, 0).unwrap()).unwrap();
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

    /// Every page that LPA and the Supported Log Pages promise is there, and says what Identify, Get
    /// Features and the commands themselves say.
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
            let get = admin::get_features(fid, admin::Select::Current, Nsid::NONE, 0);
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
            // An entry that nothing but a check of its opcode comes to.
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
}
