//! Errors of a page store.

use crate::key::PageKey;
use std::fmt;

/// Result with this crate's [`KvError`].
pub type Result<T> = std::result::Result<T, KvError>;

/// Every failure of a page store. `Display` is the cause in one sentence; [`remedy`](Self::remedy) stands apart.
#[derive(Debug, thiserror::Error)]
pub enum KvError {
    /// An argument that cannot be obeyed; nothing was sent to the drive.
    #[error("{cause}")]
    Usage {
        /// Subject, broken rule and value.
        cause: String,
        /// The value to use instead.
        remedy: String,
    },
    /// The area is blank, or formatting it was interrupted.
    #[error(
        "the area at byte {offset} holds no page store: it is blank, or formatting it was interrupted"
    )]
    Blank {
        /// First byte of the area.
        offset: u64,
    },
    /// The area holds something else.
    #[error("the area at byte {offset} begins with data that are no page store")]
    Foreign {
        /// First byte of the area.
        offset: u64,
    },
    /// A format of another version.
    #[error(
        "the page store at byte {offset} has format {found}, and this program reads format {known}"
    )]
    Version {
        /// First byte of the area.
        offset: u64,
        /// Version in the superblock.
        found: u32,
        /// Version of this program.
        known: u32,
    },
    /// The structures of the store contradict their checksums or each other.
    #[error("{structure} at byte {offset} is damaged: {cause}")]
    Damaged {
        /// The structure.
        structure: &'static str,
        /// Its place on the medium.
        offset: u64,
        /// The rule that is broken.
        cause: String,
    },
    /// The pages were computed under another fingerprint.
    #[error("the pages are of {field} '{found}', and '{given}' was asked for")]
    OtherModel {
        /// Field of the fingerprint.
        field: &'static str,
        /// Its value on the drive.
        found: String,
        /// Its value of the caller.
        given: String,
    },
    /// The area or its pages have another size.
    #[error("the page store has {field} {found}, and {given} was asked for")]
    OtherSize {
        /// The size.
        field: &'static str,
        /// Its value on the drive.
        found: u64,
        /// Its value of the caller.
        given: u64,
    },
    /// Another owner has opened or formatted the area since: this one changes nothing any more.
    #[error("{}", superseded(*own, *by))]
    Superseded {
        /// Number of this opening.
        own: u32,
        /// Number of the later one; `None` if the area was formatted, and holds another store.
        by: Option<u32>,
    },
    /// The page is not there: it was never stored, made room for another one, or was not committed.
    #[error("no page has the key {key}")]
    Missing {
        /// Key that was asked for.
        key: PageKey,
    },
    /// The page was there and is not what was stored. It was dropped, and is not found again.
    #[error("page {slot} of key {key} at byte {offset} is lost: {fault}")]
    Lost {
        /// Key that was asked for.
        key: PageKey,
        /// Number of the page's slot.
        slot: u32,
        /// Its place on the medium.
        offset: u64,
        /// The check that failed.
        fault: PageFault,
    },
    /// The process that owns a shared area answered with an error, or did not answer.
    #[error("{cause}")]
    Owner {
        /// Kind of the error: one of [`nvme_driver::Error::code`].
        code: &'static str,
        /// Subject, broken rule and value.
        cause: String,
        /// The remedy that the owner names.
        remedy: String,
    },
    /// The drive failed.
    #[error("{action} failed: {source}")]
    Drive {
        /// The step, with its place.
        action: String,
        /// Error of the drive.
        source: nvme_driver::Error,
    },
}

/// The check that a page has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageFault {
    /// The header is torn, or something else was written over it.
    Header,
    /// The header is that of another page: a misdirected write, or a late one.
    OtherPage,
    /// The header has another generation: a write of an earlier page of this slot came late.
    Generation,
    /// The payload has another checksum than was committed.
    Payload,
    /// The drive could not read it.
    Unreadable,
}

impl fmt::Display for PageFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Header => "its header does not have the checksum that it names",
            Self::OtherPage => "its header is that of another page",
            Self::Generation => "its header has another generation than was committed",
            Self::Payload => "its payload has another checksum than was committed",
            Self::Unreadable => "the drive could not read it",
        })
    }
}

impl KvError {
    pub(crate) fn usage(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Usage {
            cause: cause.into(),
            remedy: remedy.into(),
        }
    }

    pub(crate) fn damaged(structure: &'static str, offset: u64, cause: impl Into<String>) -> Self {
        Self::Damaged {
            structure,
            offset,
            cause: cause.into(),
        }
    }

    /// Returns a closure for `map_err` that names the step that the drive failed.
    pub(crate) fn drive(action: impl Into<String>) -> impl FnOnce(nvme_driver::Error) -> Self {
        let action = action.into();
        move |source| Self::Drive { action, source }
    }

    /// Returns the same error once more, for another page of the same call.
    pub fn again(&self) -> Self {
        match self {
            Self::Superseded { own, by } => Self::Superseded { own: *own, by: *by },
            Self::Owner {
                code,
                cause,
                remedy,
            } => Self::Owner {
                code,
                cause: cause.clone(),
                remedy: remedy.clone(),
            },
            Self::Drive { action, source } => Self::Drive {
                action: action.clone(),
                source: source.again(),
            },
            other => Self::Usage {
                cause: other.to_string(),
                remedy: other.remedy(),
            },
        }
    }

    /// Returns one word for the kind of error, for programs: those of [`nvme_driver::Error::code`], and `missing` and
    /// `lost` for a page that should be computed.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Usage { .. } => "usage",
            Self::Blank { .. }
            | Self::Foreign { .. }
            | Self::Version { .. }
            | Self::Damaged { .. }
            | Self::OtherModel { .. }
            | Self::OtherSize { .. } => "mismatch",
            Self::Superseded { .. } => "changed",
            Self::Missing { .. } => "missing",
            Self::Lost { .. } => "lost",
            Self::Owner { code, .. } => code,
            Self::Drive { source, .. } => source.code(),
        }
    }

    /// True if the caller should compute the page, because the store does not have it.
    pub fn is_miss(&self) -> bool {
        matches!(self, Self::Missing { .. } | Self::Lost { .. })
    }

    /// Returns the remedy: one clause without a full stop.
    pub fn remedy(&self) -> String {
        match self {
            Self::Usage { remedy, .. } | Self::Owner { remedy, .. } => remedy.clone(),
            Self::Blank { .. } => "format it first".to_owned(),
            Self::Foreign { .. } => {
                "name the area of the page store, or format it if its data may go".to_owned()
            }
            Self::Version { .. } => {
                "use the program that made it, or format it: the pages are lost then".to_owned()
            }
            Self::Damaged { .. } => "format it: the pages are lost then".to_owned(),
            Self::OtherModel { .. } => {
                "give each model an area of its own, or format this one: its pages are lost then"
                    .to_owned()
            }
            Self::OtherSize { .. } => {
                "ask for the sizes that it was formatted with, or format it: its pages are lost then"
                    .to_owned()
            }
            Self::Superseded { by: Some(_), .. } => "open it again, in one process only".to_owned(),
            Self::Superseded { by: None, .. } => {
                "open it again, in one process only, and give each model an area of its own".to_owned()
            }
            Self::Missing { .. } => "compute the page, and store it".to_owned(),
            Self::Lost { .. } => "compute the page again, and store it".to_owned(),
            Self::Drive { source, .. } => source.remedy(),
        }
    }
}

fn superseded(own: u32, by: Option<u32>) -> String {
    match by {
        Some(by) => format!(
            "the page store was opened again, as number {by}, after this process opened it as number {own}"
        ),
        None => format!(
            "the area of the page store was formatted, and holds another one, after this process opened it as number \
             {own}"
        ),
    }
}
