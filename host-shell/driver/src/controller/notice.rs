//! Reports of the library besides the results of commands: asynchronous events of the controller, and waits
//! that last longer than a command's deadline.

use nvme_core::spec::Status;
use nvme_core::spec::log_page::{
    AsyncEvent, ErrorEntry, SmartData, critical_warning, event_type, lid,
};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

/// An asynchronous event, and the log page that belongs to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEvent {
    /// Event that the controller reported.
    pub event: AsyncEvent,
    /// The start of its log page, or why that was not read.
    pub page: std::result::Result<Vec<u8>, PageError>,
}

/// Reason why the log page of an event is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// The event names none.
    None,
    /// Get Log Page ended with this status.
    Failed(Status),
    /// Get Log Page was not answered in time, could not be sent, or ended by a controller reset.
    NotRead,
}

impl DeviceEvent {
    /// Returns the namespaces whose attributes changed, where the event is about that. One FFFFFFFFh is too
    /// many to list.
    pub fn changed_namespaces(&self) -> Vec<u32> {
        let page = match &self.page {
            Ok(page) if self.event.log_page() == lid::CHANGED_NAMESPACES => page,
            _ => return Vec::new(),
        };
        let words = page.chunks_exact(4);
        words
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .take_while(|nsid| *nsid != 0)
            .collect()
    }

    /// Returns the text that the log page adds; empty when it adds nothing.
    fn more(&self) -> String {
        let page = match &self.page {
            Ok(page) => page,
            Err(PageError::None) => return String::new(),
            Err(PageError::Failed(status)) => {
                return format!("; the log page could not be read: {status}");
            }
            Err(PageError::NotRead) => return "; the log page could not be read".to_owned(),
        };
        match self.event.log_page() {
            lid::SMART => {
                let Ok((smart, _)) = SmartData::read_from_prefix(page) else {
                    return String::new();
                };
                let celsius = match smart.kelvins() {
                    // Not reported.
                    0 => String::new(),
                    kelvins => format!(" {} C,", i32::from(kelvins) - 273),
                };
                let mut text = format!(
                    ";{celsius} available spare {} %, used {} %",
                    smart.available_spare, smart.percentage_used
                );
                if smart.critical_warning & critical_warning::READ_ONLY != 0 {
                    text.push_str(", the medium is read only");
                }
                text
            }
            lid::CHANGED_NAMESPACES => match self.changed_namespaces().as_slice() {
                [] => String::new(),
                [u32::MAX] => "; more of them than the log page lists".to_owned(),
                some => {
                    let names: Vec<String> = some.iter().take(8).map(u32::to_string).collect();
                    let rest = if some.len() > 8 { ", ..." } else { "" };
                    format!("; namespaces {}{rest}", names.join(", "))
                }
            },
            lid::ERROR if self.event.event_type() == event_type::ERROR => {
                match ErrorEntry::read_from_prefix(page) {
                    Ok((entry, _)) if entry.error_count == 0 => String::new(),
                    // Of no command.
                    Ok((entry, _)) if entry.sqid == u16::MAX => format!("; {}", entry.status()),
                    Ok((entry, _)) => format!("; queue {}, {}", entry.sqid, entry.status()),
                    Err(_) => String::new(),
                }
            }
            _ => String::new(),
        }
    }
}

impl fmt::Display for DeviceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.event, self.more())
    }
}

/// Event during a call that a user may want to know. `Display` is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerNotice {
    /// The controller reported an event.
    Event(DeviceEvent),
    /// The controller needs more host memory (HMMIN) than it gets: it works without any, more slowly.
    HostMemory {
        /// Bytes that it asks for at least.
        minimum: u64,
        /// Bytes that this driver lends at most, or could have.
        most: u64,
    },
    /// A bring-up or a controller reset waits for CSTS.RDY to change.
    Waiting {
        /// Cause of the reset; `None` in the first bring-up.
        cause: Option<String>,
        /// The value of CSTS.RDY that is waited for.
        ready: bool,
        /// Upper bound of the duration, as the controller reports it (CAP.TO or CRTO).
        at_most: Duration,
    },
}

impl fmt::Display for ControllerNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Event(event) => write!(f, "the controller reports an event: {event}"),
            Self::HostMemory { minimum, most } => write!(
                f,
                "the controller asks for {} of host memory at least (HMMIN), this driver lends {} at most: it gets none \
                 and may be slower",
                nvme_units::bytes(*minimum),
                nvme_units::bytes(*most)
            ),
            Self::Waiting {
                cause,
                ready,
                at_most,
            } => {
                match cause {
                    Some(cause) => write!(f, "{cause}; the controller reset waits")?,
                    None => write!(f, "bring-up waits")?,
                }
                write!(
                    f,
                    " until CSTS.RDY is {}, for {:.1} s at most (CAP.TO)",
                    u8::from(*ready),
                    at_most.as_secs_f64()
                )
            }
        }
    }
}

type Listener = dyn Fn(&ControllerNotice) + Send + Sync;

/// A function that is called with each [`ControllerNotice`]; none by default.
///
/// It is called from any thread that uses the controller, with locks held: it must not use the controller.
#[derive(Clone, Default)]
pub struct NoticeListener(Option<Arc<Listener>>);

impl NoticeListener {
    /// Makes a listener that calls `tell` with each notice.
    pub fn new(tell: impl Fn(&ControllerNotice) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(tell)))
    }

    /// Passes `notice` to the user's callback, and to the log.
    pub fn tell(&self, notice: &ControllerNotice) {
        tracing::warn!(target: "nvme_gpu", "{notice}");
        if let Some(tell) = &self.0 {
            tell(notice);
        }
    }
}

impl fmt::Debug for NoticeListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "NoticeListener(..)"
        } else {
            "NoticeListener"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notify_says_whether_it_has_a_reader() {
        assert_eq!(format!("{:?}", NoticeListener::default()), "NoticeListener");
        assert_eq!(
            format!("{:?}", NoticeListener::new(|_| ())),
            "NoticeListener(..)"
        );
    }

    use zerocopy::{FromZeros, IntoBytes};

    fn event(dw0: u32, page: std::result::Result<Vec<u8>, PageError>) -> String {
        let event = AsyncEvent(dw0);
        ControllerNotice::Event(DeviceEvent { event, page }).to_string()
    }

    #[test]
    fn an_event_is_one_line_with_what_its_log_page_says() {
        let mut smart = SmartData::new_zeroed();
        smart.set_kelvins(350);
        (smart.available_spare, smart.percentage_used) = (97, 3);
        smart.critical_warning = critical_warning::READ_ONLY;
        let text = event(0x0002_0101, Ok(smart.as_bytes().to_vec()));
        assert!(
            text.starts_with("the controller reports an event: health"),
            "{text}"
        );
        assert!(
            text.ends_with("; 77 C, available spare 97 %, used 3 %, the medium is read only"),
            "{text}"
        );

        let list = |nsids: &[u32]| nsids.iter().flat_map(|nsid| nsid.to_le_bytes()).collect();
        for (nsids, end) in [
            (&[2, 7, 0, 9][..], "; namespaces 2, 7"),
            (&[u32::MAX, 0], "; more of them than the log page lists"),
            (&[0], "(log page Changed Namespace List)"),
            (
                &[1, 2, 3, 4, 5, 6, 7, 8, 9],
                "; namespaces 1, 2, 3, 4, 5, 6, 7, 8, ...",
            ),
        ] {
            let text = event(0x0004_0002, Ok(list(nsids)));
            assert!(text.ends_with(end), "{text}");
        }

        let mut entry = ErrorEntry::new_zeroed();
        (entry.error_count, entry.sqid, entry.phase_status) = (1, 5, 2 << 1);
        let text = event(0x0001_0100, Ok(entry.as_bytes().to_vec()));
        assert!(
            text.contains("; queue 5, ") && text.contains("Invalid Field"),
            "{text}"
        );
        entry.sqid = u16::MAX;
        let text = event(0x0001_0100, Ok(entry.as_bytes().to_vec()));
        assert!(
            text.contains("; Invalid Field") && !text.contains("queue"),
            "{text}"
        );

        // A log page that is shorter than its structure adds nothing to the text.
        for dw0 in [0x0002_0101, 0x0001_0100, 0x0004_0002] {
            assert!(event(dw0, Ok(vec![0; 3])).ends_with(')'));
        }
        assert!(event(7, Err(PageError::None)).ends_with("information 0x00"));
        let refused = event(
            0x0002_0101,
            Err(PageError::Failed(Status::INVALID_LOG_PAGE)),
        );
        assert!(
            refused.contains("could not be read: Invalid Log Page"),
            "{refused}"
        );
        assert!(event(0x0002_0101, Err(PageError::NotRead)).ends_with("could not be read"));
    }

    #[test]
    fn a_wait_says_what_for_and_how_long() {
        let mut notice = ControllerNotice::Waiting {
            cause: Some("command 0x0001 of queue 1 got no answer".to_owned()),
            ready: false,
            at_most: Duration::from_millis(15_000),
        };
        assert_eq!(
            notice.to_string(),
            "command 0x0001 of queue 1 got no answer; the controller reset waits until CSTS.RDY is 0, for 15.0 s at \
             most (CAP.TO)"
        );
        if let ControllerNotice::Waiting { cause, ready, .. } = &mut notice {
            (*cause, *ready) = (None, true);
        }
        assert_eq!(
            notice.to_string(),
            "bring-up waits until CSTS.RDY is 1, for 15.0 s at most (CAP.TO)"
        );
    }
}
