//! Asynchronous events: dword 0 of the completion of an Asynchronous Event Request, and its text.
//!
//! NVMe Base 2.0c, 5.2 (Asynchronous Event Request command).

use super::log_page;
use bitfield::bitfield;
use core::fmt;

bitfield! {
    /// Dword 0 of the completion of an Asynchronous Event Request. `Display` describes it in words.
    ///
    /// NVMe Base 2.0c, 5.2.1 (Command Completion), "Asynchronous Event Request".
    ///
    /// A host answers an event in two steps: it reads the log page that the event names, which enables
    /// further events of this type, and it sends another Asynchronous Event Request, since each request
    /// reports one event.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub struct AsyncEvent(u32);
    impl Debug;
    u8;
    /// Event type: one of [`event_type`].
    pub event_type, set_event_type: 2, 0;
    /// Asynchronous event information, by event type.
    pub info, set_info: 15, 8;
    /// Log page to read; reading it enables further events of this type.
    pub log_page, set_log_page: 23, 16;
}

/// Asynchronous event types.
pub mod event_type {
    /// Error status.
    pub const ERROR: u8 = 0;
    /// SMART / health status.
    pub const SMART: u8 = 1;
    /// Notice.
    pub const NOTICE: u8 = 2;
    /// I/O command set specific status.
    pub const COMMAND_SET: u8 = 6;
    /// Vendor specific.
    pub const VENDOR: u8 = 7;
}

/// Information of events of type [`event_type::ERROR`].
pub mod error_event {
    /// A doorbell of a queue that does not exist was written.
    pub const INVALID_DOORBELL_REGISTER: u8 = 0;
    /// A doorbell was written with a value out of range, or with the value that it had.
    pub const INVALID_DOORBELL_VALUE: u8 = 1;
    /// Diagnostic failure.
    pub const DIAGNOSTIC_FAILURE: u8 = 2;
    /// Persistent internal error.
    pub const PERSISTENT_INTERNAL: u8 = 3;
    /// Transient internal error.
    pub const TRANSIENT_INTERNAL: u8 = 4;
    /// Firmware image load error.
    pub const FIRMWARE_LOAD: u8 = 5;
}

/// Information of events of type [`event_type::SMART`].
pub mod smart_event {
    /// The subsystem's reliability is degraded.
    pub const RELIABILITY: u8 = 0;
    /// A temperature is over or under its threshold.
    pub const TEMPERATURE: u8 = 1;
    /// Available spare has fallen below its threshold.
    pub const SPARE: u8 = 2;
}

/// Information of events of type [`event_type::NOTICE`].
pub mod notice_event {
    /// Attributes of namespaces changed; the Changed Namespace List names them.
    pub const NAMESPACE_ATTRIBUTE: u8 = 0x00;
    /// A firmware activation begins: commands pause.
    pub const FIRMWARE_ACTIVATION: u8 = 0x01;
    /// Controller-initiated telemetry data is available.
    pub const TELEMETRY: u8 = 0x02;
    /// The asymmetric namespace access state of a group changed.
    pub const ANA_CHANGE: u8 = 0x03;
}

/// Information of events of type [`event_type::COMMAND_SET`].
///
/// NVM Command Set 1.0c, "Asynchronous Event Information".
pub mod command_set_event {
    /// A reservation notification log page is available.
    pub const RESERVATION: u8 = 0;
    /// A sanitize operation completed, successfully or not.
    pub const SANITIZE_COMPLETED: u8 = 1;
    /// A sanitize operation completed with unrequested deallocation.
    pub const SANITIZE_DEALLOCATED: u8 = 2;
}

impl AsyncEvent {
    /// Returns the event's type and information in words; `None` for values without a name.
    const fn words(self) -> Option<&'static str> {
        Some(match (self.0 & 7, (self.0 >> 8 & 0xFF) as u8) {
            (0, error_event::INVALID_DOORBELL_REGISTER) => {
                "error: a doorbell of a queue that does not exist was written"
            }
            (0, error_event::INVALID_DOORBELL_VALUE) => {
                "error: a doorbell was written with an invalid value"
            }
            (0, error_event::DIAGNOSTIC_FAILURE) => "error: diagnostic failure",
            (0, error_event::PERSISTENT_INTERNAL) => "error: persistent internal error",
            (0, error_event::TRANSIENT_INTERNAL) => "error: transient internal error",
            (0, error_event::FIRMWARE_LOAD) => "error: the firmware image could not be loaded",
            (1, smart_event::RELIABILITY) => "health: the reliability of the subsystem is degraded",
            (1, smart_event::TEMPERATURE) => "health: a temperature is over or under its threshold",
            (1, smart_event::SPARE) => "health: available spare is below its threshold",
            (2, notice_event::NAMESPACE_ATTRIBUTE) => "notice: attributes of namespaces changed",
            (2, notice_event::FIRMWARE_ACTIVATION) => {
                "notice: a firmware activation begins, commands pause"
            }
            (2, notice_event::TELEMETRY) => "notice: telemetry data of the controller is there",
            (2, notice_event::ANA_CHANGE) => "notice: asymmetric namespace access changed",
            (6, command_set_event::RESERVATION) => "reservation: a notification is there",
            (6, command_set_event::SANITIZE_COMPLETED) => "sanitize: the operation has ended",
            (6, command_set_event::SANITIZE_DEALLOCATED) => {
                "sanitize: the operation has ended and deallocated blocks unasked"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.words() {
            Some(words) => f.write_str(words)?,
            None => write!(
                f,
                "event of type {}, information {:#04x}",
                self.event_type(),
                self.info()
            )?,
        }
        match (self.log_page(), log_page::name(self.log_page())) {
            (0, _) => Ok(()),
            (_, Some(name)) => write!(f, " (log page {name})"),
            (lid, None) => write!(f, " (log page {lid:#04x})"),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::string::ToString;

    #[test]
    fn an_event_says_what_happened_and_where_to_read_on() {
        for (dw0, text) in [
            (
                0x0002_0101,
                "health: a temperature is over or under its threshold (log page SMART / Health Information)",
            ),
            (
                0x0004_0002,
                "notice: attributes of namespaces changed (log page Changed Namespace List)",
            ),
            (
                0x0001_0100,
                "error: a doorbell was written with an invalid value (log page Error Information)",
            ),
            (
                0x0081_0106,
                "sanitize: the operation has ended (log page Sanitize Status)",
            ),
            (
                0x00C5_4207,
                "event of type 7, information 0x42 (log page 0xc5)",
            ),
            (0x0000_0003, "event of type 3, information 0x00"),
        ] {
            assert_eq!(AsyncEvent(dw0).to_string(), text);
        }
    }

    #[test]
    fn no_two_events_with_words_read_the_same() {
        let named: std::vec::Vec<_> = (0..8u32)
            .flat_map(|kind| (0..256u32).map(move |info| AsyncEvent(info << 8 | kind)))
            .filter(|event| event.words().is_some())
            .collect();
        assert_eq!(named.len(), 16);
        let texts: BTreeSet<_> = named.iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), named.len());
    }
}
