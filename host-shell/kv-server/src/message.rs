//! Messages between the owner of an area and its clients: one request, one reply, each in one datagram.
//!
//! A message is [`MAGIC`], then a [`PacketHeader`] and the body, encoded by `postcard`. Nothing in a message is
//! trusted: its length, its numbers and the order of messages are checked by the side that receives it.

use nvme_kv::{AreaLayout, KvError, KvStats, PageFault, PageKey, RecoveryReport};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of these messages. A client of another version is refused.
pub const VERSION: u32 = 1;
/// First bytes of each message; the version is behind them, so that every later version can read it.
pub const MAGIC: [u8; 8] = *b"NVMEKVMS";
/// The most bytes of a message.
pub const MOST_MESSAGE: usize = 64 << 10;
/// The most keys of a request.
pub const MOST_KEYS: usize = 1024;
/// The most pages of a load or a store.
pub const MOST_PAGES: usize = 256;
/// The most bytes of a text in an error.
const MOST_TEXT: usize = 500;
/// The most errors that a reply tells apart.
const MOST_ERRORS: usize = 16;
/// Kinds of errors that cross the socket: [`nvme_driver::Error::code`].
const CODES: [&str; 14] = [
    "usage",
    "file",
    "system",
    "device",
    "environment",
    "internal",
    "command",
    "unsupported",
    "unfinished",
    "mismatch",
    "timeout",
    "gone",
    "changed",
    "interrupted",
];

/// Key of a page as it is sent.
pub type KeyBytes = [u8; PageKey::BYTES];

/// The first part of each message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketHeader {
    /// Number of the owner's opening; 0 in [`PageRequest::Hello`]. An owner answers only requests of this opening.
    pub epoch: u32,
    /// Number of the request on its connection; the reply repeats it.
    pub sequence: u64,
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageRequest {
    /// The first request: the pages that the client asks for.
    Hello(AreaHello),
    /// Lengths of the pages of these keys.
    Lengths(Vec<KeyBytes>),
    /// These pages count as used.
    Touch(Vec<KeyBytes>),
    /// Pins the pages of the first keys, up to the first key without a page.
    Pin(Vec<KeyBytes>),
    /// Ends a pin.
    Unpin(u64),
    /// Loads pages into the window: page N begins at N times its stride.
    Load(Vec<KeyBytes>),
    /// Stores the pages that lie in the window.
    Store(Vec<PageOffer>),
    /// Removes pages.
    Remove(Vec<KeyBytes>),
    /// Removes all pages.
    Clear,
    /// Writes a checkpoint.
    Checkpoint,
    /// Counts of the owner.
    Stats,
}

/// The area and the pages that a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaHello {
    /// Bytes of the area; `None` for those up to the end of the device.
    pub bytes: Option<u64>,
    /// The most bytes of a page.
    pub page_bytes: u32,
    /// The fingerprint in its stored form, [`nvme_kv::ModelFingerprint::encode`].
    pub fingerprint: Vec<u8>,
}

/// A page in the window that is to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageOffer {
    /// Its key.
    pub key: KeyBytes,
    /// Its bytes.
    pub length: u32,
    /// Its checksum, [`nvme_kv::format::payload_checksum`], as the client computed it.
    pub checksum: u64,
}

/// A reply of the owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageReply {
    /// To [`PageRequest::Hello`]; the descriptor of the window comes with it.
    Welcome(OwnerWelcome),
    /// The request is not obeyed.
    Refused(RemoteError),
    /// Length of each page in bytes; 0 for one that is not found.
    Lengths(Vec<u32>),
    /// A pin, and the number of its pages.
    Pinned {
        /// The pin's number on this connection.
        pin: u64,
        /// Pages that stay.
        pages: u32,
    },
    /// Outcomes of loads, and the errors that they refer to.
    Loaded(Vec<RemoteLoad>, Vec<RemoteError>),
    /// Outcomes of stores, and the errors that they refer to.
    Stored(Vec<RemoteStore>, Vec<RemoteError>),
    /// Pages that were removed.
    Removed(u64),
    /// Done, with nothing to say.
    Done,
    /// Counts.
    Stats(RemoteStats),
}

/// What a client learns of the owner and its area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerWelcome {
    /// Number of the owner's opening.
    pub epoch: u32,
    /// Pages that fit into the window.
    pub window_pages: u32,
    /// Bytes of the area.
    pub area_bytes: u64,
    /// The most bytes of a page.
    pub page_bytes: u32,
    /// Pages that fit into the area.
    pub slots: u32,
    /// Blocks of each log.
    pub log_blocks: u32,
    /// What the owner's opening found: pages, log blocks, lost blocks.
    pub recovered: (u64, u64, u64),
    /// True if it found a damaged checkpoint.
    pub fell_back: bool,
}

impl OwnerWelcome {
    /// Returns the sizes of the area.
    pub fn layout(&self) -> AreaLayout {
        AreaLayout {
            area_bytes: self.area_bytes,
            page_bytes: self.page_bytes,
            slots: self.slots,
            log_blocks: self.log_blocks,
        }
    }

    /// Returns what the owner's opening found.
    pub fn recovery(&self) -> RecoveryReport {
        let (pages, log_blocks, lost_blocks) = self.recovered;
        RecoveryReport {
            pages,
            log_blocks,
            fell_back: self.fell_back,
            lost_blocks,
        }
    }
}

/// The outcome of loading a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemoteLoad {
    /// It lies in the window.
    Loaded {
        /// Its bytes.
        length: u32,
        /// Its checksum, which the client compares with what it has copied.
        checksum: u64,
    },
    /// No page has the key.
    Missing,
    /// The page is not what was stored.
    Lost {
        /// Number of its slot.
        slot: u32,
        /// Its place on the medium.
        offset: u64,
        /// The check that failed, a place in `FAULTS`.
        fault: u8,
    },
    /// Another error: its place among the errors of the reply.
    Failed(u8),
}

/// The outcome of storing a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemoteStore {
    /// [`nvme_kv::StoreOutcome::Stored`].
    Stored,
    /// [`nvme_kv::StoreOutcome::Present`].
    Present,
    /// [`nvme_kv::StoreOutcome::InProgress`].
    InProgress,
    /// [`nvme_kv::StoreOutcome::NoRoom`].
    NoRoom,
    /// An error: its place among the errors of the reply.
    Failed(u8),
}

/// An error of the owner as it is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteError {
    /// Place of its kind in `CODES`.
    code: u8,
    cause: String,
    remedy: String,
}

/// [`KvStats`] as they are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteStats([u64; 9]);

impl From<KvStats> for RemoteStats {
    fn from(stats: KvStats) -> Self {
        Self([
            stats.pages,
            stats.slots,
            stats.loaded,
            stats.missed,
            stats.stored,
            stats.evicted,
            stats.lost,
            stats.failed,
            stats.checkpoints,
        ])
    }
}

impl From<RemoteStats> for KvStats {
    fn from(sent: RemoteStats) -> Self {
        let [
            pages,
            slots,
            loaded,
            missed,
            stored,
            evicted,
            lost,
            failed,
            checkpoints,
        ] = sent.0;
        Self {
            pages,
            slots,
            loaded,
            missed,
            stored,
            evicted,
            lost,
            failed,
            checkpoints,
        }
    }
}

/// Checks of a page, in the order of their numbers.
const FAULTS: [PageFault; 5] = [
    PageFault::Header,
    PageFault::OtherPage,
    PageFault::Generation,
    PageFault::Payload,
    PageFault::Unreadable,
];

impl RemoteLoad {
    /// Returns the form of an outcome in which it is sent; errors are added to `errors`.
    pub fn of(
        outcome: &nvme_kv::Result<nvme_kv::LoadedPage>,
        errors: &mut Vec<RemoteError>,
    ) -> Self {
        match outcome {
            Ok(page) => Self::Loaded {
                length: page.length as u32,
                checksum: page.checksum,
            },
            Err(KvError::Missing { .. }) => Self::Missing,
            Err(KvError::Lost {
                slot,
                offset,
                fault,
                ..
            }) => Self::Lost {
                slot: *slot,
                offset: *offset,
                fault: FAULTS.iter().position(|one| one == fault).unwrap_or(0) as u8,
            },
            Err(error) => Self::Failed(RemoteError::add(error, errors)),
        }
    }

    /// Returns the error of the page of `key`; `None` if it was loaded, and for numbers that mean nothing.
    pub fn error(&self, key: PageKey, errors: &[RemoteError]) -> Option<KvError> {
        match *self {
            Self::Loaded { .. } => None,
            Self::Missing => Some(KvError::Missing { key }),
            Self::Lost {
                slot,
                offset,
                fault,
            } => Some(KvError::Lost {
                key,
                slot,
                offset,
                fault: *FAULTS.get(usize::from(fault))?,
            }),
            Self::Failed(place) => Some(errors.get(usize::from(place))?.to_error()),
        }
    }
}

impl RemoteError {
    /// Returns the form of an error in which it is sent.
    pub fn of(error: &KvError) -> Self {
        let code = CODES.iter().position(|code| *code == error.code());
        Self {
            // A miss is no error of a whole request: it is sent as an internal one.
            code: code.unwrap_or(5) as u8,
            cause: cut(&error.to_string()),
            remedy: cut(&error.remedy()),
        }
    }

    /// Adds an error to those of a reply, and returns its place. Behind the most that a reply has, the last one stands
    /// for the others.
    pub fn add(error: &KvError, errors: &mut Vec<Self>) -> u8 {
        let sent = Self::of(error);
        let place = errors.iter().position(|one| *one == sent);
        let place = place.unwrap_or_else(|| {
            if errors.len() < MOST_ERRORS {
                errors.push(sent);
            }
            errors.len() - 1
        });
        place as u8
    }

    /// Returns the error at the client.
    pub fn to_error(&self) -> KvError {
        KvError::Owner {
            code: CODES.get(usize::from(self.code)).unwrap_or(&"internal"),
            cause: self.cause.clone(),
            remedy: self.remedy.clone(),
        }
    }
}

/// Returns the first bytes of a text, whole characters.
fn cut(text: &str) -> String {
    let mut end = text.len().min(MOST_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Reason why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageFault {
    /// They do not begin like one.
    Magic,
    /// A message of another version.
    Version(u32),
    /// The body is cut off, too long, or has numbers that mean nothing.
    Body,
}

/// Encodes a message.
pub fn encode<T: Serialize>(header: PacketHeader, body: &T) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
    // Writing to memory does not fail.
    bytes = postcard::to_extend(&(header, body), bytes).unwrap_or_default();
    bytes
}

/// Decodes a message.
///
/// # Errors
/// The rule that the bytes break.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<(PacketHeader, T), MessageFault> {
    let (magic, rest) = bytes.split_first_chunk().ok_or(MessageFault::Magic)?;
    let (version, body) = rest.split_first_chunk().ok_or(MessageFault::Magic)?;
    if *magic != MAGIC {
        return Err(MessageFault::Magic);
    }
    let version = u32::from_le_bytes(*version);
    if version != VERSION {
        return Err(MessageFault::Version(version));
    }
    if bytes.len() > MOST_MESSAGE {
        return Err(MessageFault::Body);
    }
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(MessageFault::Body),
    }
}

impl PageRequest {
    /// True if the lists of the request are within the limits of this protocol, and a window of `window_pages` pages of
    /// up to `page_bytes` bytes holds its pages.
    pub fn is_sound(&self, window_pages: usize, page_bytes: u32) -> bool {
        match self {
            Self::Lengths(keys) | Self::Touch(keys) | Self::Pin(keys) | Self::Remove(keys) => {
                keys.len() <= MOST_KEYS
            }
            Self::Load(keys) => keys.len() <= window_pages,
            Self::Store(pages) => {
                let fits = |page: &PageOffer| page.length <= page_bytes;
                pages.len() <= window_pages && pages.iter().all(fits)
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: PacketHeader = PacketHeader {
        epoch: 7,
        sequence: u64::MAX,
    };

    #[test]
    fn the_longest_messages_fit() {
        let offer = PageOffer {
            key: [0xFF; 16],
            length: u32::MAX,
            checksum: u64::MAX,
        };
        let lost = RemoteLoad::Lost {
            slot: u32::MAX,
            offset: u64::MAX,
            fault: 255,
        };
        let text = "x".repeat(2 * MOST_TEXT);
        let mut errors = Vec::new();
        for number in 0..2 * MOST_ERRORS {
            let error = KvError::Owner {
                code: "timeout",
                cause: format!("{number} {text}"),
                remedy: text.clone(),
            };
            let place = RemoteError::add(&error, &mut errors);
            assert_eq!(usize::from(place), number.min(MOST_ERRORS - 1));
        }
        let longest = [
            encode(HEADER, &PageRequest::Pin(vec![[0xFF; 16]; MOST_KEYS])),
            encode(HEADER, &PageRequest::Store(vec![offer; MOST_PAGES])),
            encode(HEADER, &PageReply::Lengths(vec![u32::MAX; MOST_KEYS])),
            encode(HEADER, &PageReply::Loaded(vec![lost; MOST_PAGES], errors)),
        ];
        assert!(longest.iter().all(|one| one.len() <= MOST_MESSAGE));
        let (header, request): (_, PageRequest) = decode(&longest[1]).unwrap();
        assert_eq!(header, HEADER);
        assert!(request.is_sound(MOST_PAGES, u32::MAX));
        assert!(!request.is_sound(MOST_PAGES - 1, u32::MAX));
        assert!(!request.is_sound(MOST_PAGES, u32::MAX - 1));
    }

    #[test]
    fn each_cut_and_each_longer_message_is_refused() {
        let bytes = encode(HEADER, &PageRequest::Lengths(vec![[7; 16], [8; 16]]));
        for length in 0..bytes.len() {
            decode::<PageRequest>(&bytes[..length]).unwrap_err();
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(decode::<PageRequest>(&longer), Err(MessageFault::Body));
        let mut later = bytes;
        later[8] = 9;
        assert_eq!(decode::<PageRequest>(&later), Err(MessageFault::Version(9)));
        later[0] = 0;
        assert_eq!(decode::<PageRequest>(&later), Err(MessageFault::Magic));
    }

    #[test]
    fn errors_keep_their_kind_and_their_texts() {
        let key = PageKey::of_bytes([3; 16]);
        let mut errors = Vec::new();
        for fault in FAULTS {
            let lost = KvError::Lost {
                key,
                slot: 4,
                offset: 5,
                fault,
            };
            let text = lost.to_string();
            let sent = RemoteLoad::of(&Err(lost), &mut errors);
            assert_eq!(sent.error(key, &errors).unwrap().to_string(), text);
        }
        assert!(errors.is_empty());
        let usage = KvError::Superseded {
            own: 1,
            by: Some(2),
        };
        let (text, remedy) = (usage.to_string(), usage.remedy());
        let sent = RemoteLoad::of(&Err(usage), &mut errors);
        let error = sent.error(key, &errors).unwrap();
        assert_eq!((error.code(), error.to_string()), ("changed", text));
        assert_eq!(error.remedy(), remedy);
        assert!(RemoteLoad::Failed(1).error(key, &errors).is_none());
        assert!(cut(&"ü".repeat(MOST_TEXT)).len() <= MOST_TEXT);
    }
}
