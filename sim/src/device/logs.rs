//! The contents of the log pages: errors, SMART counters, asynchronous events.
//!
//! A reported event type is masked until the driver reads its log page without RAE. Without the
//! mask, one lasting condition would complete every outstanding request.
//!
//! NVMe Base 2.0c, 5.2 (Asynchronous Event Request command) and 5.16 (Get Log Page command).

use crate::device::features::FeatureValues;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use nvme_spec::identify::oaes;
use nvme_spec::log_page::{
    AsyncEvent, ErrorEntry, command_set_event, critical_warning, error_event, event_type, lid,
    notice_event,
};
use nvme_spec::nvm::slba;
use nvme_spec::{Sqe, Status};
use zerocopy::FromZeros;

/// Number of entries of the error log (ELPE + 1).
pub(crate) const ERROR_ENTRIES: usize = 64;
/// Limit of the events that wait for a request. An event that waits already is not added again;
/// others beyond the limit are dropped.
const MAX_EVENTS: usize = 16;
/// Contents of the log pages.
pub(crate) struct LogPages {
    /// Error log, newest entry first.
    pub errors: VecDeque<ErrorEntry>,
    pub error_count: u64,
    pub media_errors: u64,
    pub events: VecDeque<AsyncEvent>,
    /// Bit n is set if events of type n were reported and their log page has not been read since.
    pub masked: u8,
    pub changed_namespaces: Vec<u32>,
    pub kelvins: u16,
    pub critical_warning: u8,
    pub power_cycles: u64,
    pub unsafe_shutdowns: u64,
}

impl LogPages {
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

    /// Forgets the events that were not reported, as a controller reset does. Logs are kept.
    pub fn reset(&mut self) {
        self.events.clear();
        self.masked = 0;
    }

    /// Counts a loss of power; `clean` is true after a completed shutdown.
    pub fn power_cycle(&mut self, clean: bool) {
        self.reset();
        self.errors.clear();
        self.power_cycles += 1;
        self.unsafe_shutdowns += u64::from(!clean);
    }

    /// Adds a command that ended with `status` to the error log.
    pub fn failed(&mut self, sqid: u16, sqe: &Sqe, status: Status) {
        // The location of the invalid parameter is not known here: FFFFh in the entry means that.
        let mut entry = self.entry(sqid, sqe.cid().0);
        entry.phase_status = status.0 << 1;
        entry.nsid = sqe.nsid;
        if sqid != 0 {
            entry.lba = slba(sqe).0;
        }
        self.media_errors += u64::from(status.sct() == 2);
        self.push(entry);
    }

    /// Adds a doorbell write to the error log: an invalid value, or a doorbell that does not exist.
    ///
    /// NVMe Base 2.0c, "Error Information": SQID and CID are FFFFh for an error that belongs to no
    /// command.
    pub fn bad_doorbell(&mut self, exists: bool) {
        let mut entry = self.entry(0xFFFF, 0xFFFF);
        entry.phase_status = Status::INVALID_FIELD.0 << 1;
        self.push(entry);
        let info = match exists {
            true => error_event::INVALID_DOORBELL_VALUE,
            false => error_event::INVALID_DOORBELL_REGISTER,
        };
        self.raise(event_type::ERROR, info, lid::ERROR);
    }

    /// Reports that the attributes of a namespace changed.
    pub fn namespace_changed(&mut self, nsid: u32, features: &FeatureValues) {
        if !self.changed_namespaces.contains(&nsid) && self.changed_namespaces.len() < 1024 {
            self.changed_namespaces.push(nsid);
            self.changed_namespaces.sort_unstable();
        }
        if features.async_events & oaes::NAMESPACE_ATTRIBUTE != 0 {
            self.raise(event_type::NOTICE, 0, lid::CHANGED_NAMESPACES);
        }
    }

    /// Reports that firmware was activated without a reset.
    pub fn firmware_activated(&mut self, features: &FeatureValues) {
        if features.async_events & oaes::FIRMWARE_ACTIVATION != 0 {
            self.raise(
                event_type::NOTICE,
                notice_event::FIRMWARE_ACTIVATION,
                lid::FIRMWARE,
            );
        }
    }

    /// Removes the events of an earlier sanitize operation, because a new one begins.
    pub fn forget_sanitize(&mut self) {
        self.events
            .retain(|event| event.log_page() != lid::SANITIZE);
    }

    /// Reports the end of a sanitize operation, successful or not.
    pub fn sanitize_completed(&mut self) {
        let info = command_set_event::SANITIZE_COMPLETED;
        self.raise(event_type::COMMAND_SET, info, lid::SANITIZE);
    }

    /// Sets the temperature in kelvins and compares it with the thresholds.
    pub fn set_temperature(&mut self, kelvins: u16, features: &FeatureValues) {
        self.kelvins = kelvins;
        self.check_temperature(features, false);
    }

    /// Compares the temperature with its thresholds. A temperature outside them is an event if it
    /// was inside before, or if the driver has just enabled such events.
    pub fn check_temperature(&mut self, features: &FeatureValues, asked_now: bool) {
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

    /// Takes the next event whose type is not masked and masks that type. Returns it as dword 0 of
    /// its completion.
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

    /// Allows events of a log page again, because the driver has read that page.
    pub fn unmask(&mut self, page: u8) {
        let kind = match page {
            lid::ERROR => event_type::ERROR,
            lid::SMART => event_type::SMART,
            lid::CHANGED_NAMESPACES | lid::FIRMWARE => event_type::NOTICE,
            lid::SANITIZE => event_type::COMMAND_SET,
            _ => return,
        };
        self.masked &= !(1 << kind);
        // The page has just reported these conditions: an event for them would be sent twice.
        self.events.retain(|event| event.log_page() != page);
        if page == lid::CHANGED_NAMESPACES {
            self.changed_namespaces.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_spec::Nsid;

    #[test]
    fn an_event_type_is_masked_until_its_page_is_read() {
        let mut logs = LogPages::new();
        logs.bad_doorbell(true);
        logs.bad_doorbell(false);
        assert_eq!(logs.take_event(), Some(0x0001_0100));
        assert_eq!(logs.take_event(), None);
        logs.raise(event_type::NOTICE, 0, lid::CHANGED_NAMESPACES);
        assert_eq!(logs.take_event(), Some(0x0004_0002));
        logs.unmask(lid::ERROR);
        logs.bad_doorbell(false);
        assert_eq!(logs.take_event(), Some(0x0001_0000));
    }

    /// NVMe Base 2.0c, "Error Information".
    #[test]
    fn a_bad_doorbell_is_an_error_of_no_command() {
        for exists in [false, true] {
            let mut logs = LogPages::new();
            logs.bad_doorbell(exists);
            let entry = logs.errors[0];
            assert_eq!((entry.sqid, entry.cid), (0xFFFF, 0xFFFF));
            assert_eq!(entry.parameter_error_location, 0xFFFF);
            assert_eq!((entry.nsid, entry.lba), (0, 0));
        }
    }

    #[test]
    fn the_error_log_keeps_the_newest_and_counts_all() {
        let mut logs = LogPages::new();
        for cid in 0..100u16 {
            let sqe = Sqe::new(2, Nsid(1)).with_cid(nvme_spec::Cid(cid));
            logs.failed(1, &sqe, Status::LBA_OUT_OF_RANGE);
        }
        assert_eq!(logs.errors.len(), ERROR_ENTRIES);
        assert_eq!((logs.errors[0].error_count, logs.errors[0].cid), (100, 99));
        assert!(logs.errors[0].status().is(Status::LBA_OUT_OF_RANGE));
    }

    /// Two pages belong to notices: reading one page unmasks the event of the other, also if that event was raised
    /// meanwhile.
    #[test]
    fn an_event_that_comes_while_its_type_is_masked_is_kept() {
        let mut logs = LogPages::new();
        logs.raise(event_type::NOTICE, 0, lid::CHANGED_NAMESPACES);
        assert_eq!(logs.take_event(), Some(0x0004_0002));
        let activation = notice_event::FIRMWARE_ACTIVATION;
        logs.raise(event_type::NOTICE, activation, lid::FIRMWARE);
        assert_eq!(logs.take_event(), None);
        logs.unmask(lid::CHANGED_NAMESPACES);
        assert_eq!(logs.take_event(), Some(0x0003_0102));
    }
}
