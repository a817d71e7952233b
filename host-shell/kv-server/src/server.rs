//! The owner's side: a thread accepts connections, and a thread serves each of them.
//!
//! What a client holds belongs to its connection: pins and the window end with it, however the client ends. A page is
//! stored only from a request that is whole, after the client has filled the window.

use crate::message::{
    AreaHello, MAGIC, MessageFault, OwnerWelcome, PacketHeader, PageOffer, PageReply, PageRequest,
    RemoteError, RemoteLoad, RemoteStore, VERSION, decode, encode,
};
use crate::place::AreaLock;
use crate::socket::{ListeningSocket, MessageSocket, SocketFault};
use crate::window::{PageWindow, window_pages};
use nvme_driver::lock::lock;
use nvme_kv::format::payload_checksum;
use nvme_kv::{
    AreaRequest, BlockMedium, KvError, ModelFingerprint, PageKey, PageStore, PinnedPages,
    StoreOutcome,
};
use std::collections::HashMap;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most connections of all clients.
pub(crate) const MOST_CONNECTIONS: usize = 256;
/// The most pins of a connection.
const MOST_PINS: usize = 1 << 16;
/// Time in which a new connection says what it wants, and in which a client takes a reply.
const REPLY_TIME: Duration = Duration::from_secs(5);
/// Interval at which threads look whether the server stops.
const TICK: Duration = Duration::from_millis(200);
/// Time for which a client may hold a pin: one that hangs does not hold pages for ever.
const LEASE: Duration = match cfg!(test) {
    false => Duration::from_secs(600),
    true => Duration::from_millis(300),
};

/// A store with the lock that makes it this process's. The lock is released after the device.
pub(crate) struct OwnedArea<M> {
    pub pages: PageStore<M>,
    pub request: AreaRequest,
    /// True if the bytes of the area were not given, but found.
    pub is_to_the_end: bool,
    pub _lock: AreaLock,
}

impl<M> AsRef<PageStore<M>> for OwnedArea<M> {
    fn as_ref(&self) -> &PageStore<M> {
        &self.pages
    }
}

/// A reference to an owned area, by which the server keeps it.
pub(crate) struct OwnedPages<M>(pub Arc<OwnedArea<M>>);

impl<M> Clone for OwnedPages<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M> Deref for OwnedPages<M> {
    type Target = PageStore<M>;

    fn deref(&self) -> &PageStore<M> {
        &self.0.pages
    }
}

/// Serves an area until it is dropped.
pub(crate) struct AreaServer {
    is_stopping: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
    serving: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

impl AreaServer {
    /// Begins to serve `area` at `socket`.
    ///
    /// # Errors
    /// [`KvError::Drive`] if the system gives no thread.
    pub fn start<M: BlockMedium + 'static>(
        area: OwnedPages<M>,
        socket: ListeningSocket,
    ) -> nvme_kv::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let serving = Arc::new(Mutex::new(Vec::new()));
        let of_thread = (Arc::clone(&is_stopping), Arc::clone(&serving));
        let accept = move || accept_all(&area, &socket, &of_thread.0, &of_thread.1);
        let named = std::thread::Builder::new().name("nvme-kv accept".to_owned());
        let accepting = named.spawn(accept).map_err(|source| KvError::Drive {
            action: "serving the page store".to_owned(),
            source: nvme_driver::Error::system("clone")(source),
        })?;
        Ok(Self {
            is_stopping,
            accepting: Some(accepting),
            serving,
        })
    }
}

impl Drop for AreaServer {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        // Threads end after the request that they execute, which ends by the drive's deadlines.
        if let Some(thread) = self.accepting.take() {
            let _ = thread.join();
        }
        let serving = std::mem::take(&mut *lock(&self.serving));
        for thread in serving {
            let _ = thread.join();
        }
    }
}

fn accept_all<M: BlockMedium + 'static>(
    area: &OwnedPages<M>,
    socket: &ListeningSocket,
    is_stopping: &Arc<AtomicBool>,
    serving: &Mutex<Vec<JoinHandle<()>>>,
) {
    while !is_stopping.load(Ordering::SeqCst) {
        let Some(connection) = socket.accept(Instant::now() + TICK) else {
            continue;
        };
        let mut threads = lock(serving);
        threads.retain(|thread| !thread.is_finished());
        if threads.len() >= MOST_CONNECTIONS {
            refuse(
                &connection,
                &KvError::Owner {
                    code: "environment",
                    cause: format!(
                        "the owner has {MOST_CONNECTIONS} connections, which is the limit"
                    ),
                    remedy: "close page stores that are not used".to_owned(),
                },
            );
            continue;
        }
        let (area, is_stopping) = (area.clone(), Arc::clone(is_stopping));
        let serve = move || {
            let client = ClientConnection::greet(&area, connection);
            if let Some(mut client) = client {
                client.serve(&is_stopping);
            }
        };
        let named = std::thread::Builder::new().name("nvme-kv client".to_owned());
        // Without a thread the connection is closed, and the client tries again.
        threads.extend(named.spawn(serve));
    }
}

/// Answers a client that is not served.
fn refuse(socket: &MessageSocket, error: &KvError) {
    let header = PacketHeader {
        epoch: 0,
        sequence: 0,
    };
    let reply = encode(header, &PageReply::Refused(RemoteError::of(error)));
    // A client that does not take it learns by the end of the connection.
    let _ = socket.send(&reply, None, Instant::now() + REPLY_TIME);
}

/// A client, by one of its connections.
struct ClientConnection<M: BlockMedium> {
    area: OwnedPages<M>,
    socket: MessageSocket,
    window: PageWindow,
    buffer: Vec<u8>,
    pins: HashMap<u64, (PinnedPages<OwnedPages<M>, M>, Instant)>,
    next_pin: u64,
}

impl<M: BlockMedium + 'static> ClientConnection<M> {
    /// Receives the first request, and answers it. `None` for a client that is not served.
    fn greet(area: &OwnedPages<M>, socket: MessageSocket) -> Option<Self> {
        let deadline = Instant::now() + REPLY_TIME;
        let message = socket.receive(deadline).ok()?;
        let checked = match decode::<PageRequest>(&message.bytes) {
            Ok((header, PageRequest::Hello(hello))) => check_hello(area, &hello).map(|()| header),
            Ok(_) => Err(protocol("the first message is not that of a new client")),
            Err(MessageFault::Version(found)) => Err(KvError::Owner {
                code: "mismatch",
                cause: format!(
                    "the client has version {found} of the messages, the owner version {VERSION}"
                ),
                remedy: "use one version of this package in all processes".to_owned(),
            }),
            Err(_) => Err(protocol("the first message is none of this protocol")),
        };
        let made = checked.and_then(|header| {
            let window = PageWindow::new(area.layout().page_bytes)?;
            Ok((header, window))
        });
        match made {
            Ok((header, window)) => {
                let welcome = encode(
                    PacketHeader {
                        epoch: area.epoch(),
                        sequence: header.sequence,
                    },
                    &PageReply::Welcome(welcome_of(area)),
                );
                socket
                    .send(&welcome, Some(window.fd().as_fd()), deadline)
                    .ok()?;
                Some(Self {
                    area: area.clone(),
                    socket,
                    window,
                    buffer: Vec::new(),
                    pins: HashMap::new(),
                    next_pin: 0,
                })
            }
            Err(error) => {
                refuse(&socket, &error);
                None
            }
        }
    }

    /// Executes requests until the client ends, breaks the protocol, or the server stops.
    fn serve(&mut self, is_stopping: &AtomicBool) {
        while !is_stopping.load(Ordering::SeqCst) {
            let now = Instant::now();
            self.pins.retain(|_, (_, until)| *until > now);
            let message = match self.socket.receive(now + TICK) {
                Ok(message) => message,
                Err(SocketFault::TimedOut) => continue,
                Err(_) => return,
            };
            let Ok((header, request)) = decode::<PageRequest>(&message.bytes) else {
                refuse(
                    &self.socket,
                    &protocol("a message is none of this protocol"),
                );
                return;
            };
            let reply = if header.epoch != self.area.epoch() {
                PageReply::Refused(RemoteError::of(&KvError::Owner {
                    code: "changed",
                    cause: format!(
                        "the request is one to opening {}, and the owner is opening {}",
                        header.epoch,
                        self.area.epoch()
                    ),
                    remedy: "connect again".to_owned(),
                }))
            } else if request.is_sound(self.window.pages(), self.area.layout().page_bytes) {
                let reply = self.execute(request);
                reply.unwrap_or_else(|error| PageReply::Refused(RemoteError::of(&error)))
            } else {
                refuse(&self.socket, &protocol("a list in a request is too long"));
                return;
            };
            let bytes = encode(header, &reply);
            if self
                .socket
                .send(&bytes, None, Instant::now() + REPLY_TIME)
                .is_err()
            {
                return;
            }
        }
    }

    fn execute(&mut self, request: PageRequest) -> nvme_kv::Result<PageReply> {
        let keys_of = |keys: Vec<_>| keys.into_iter().map(PageKey::of_bytes).collect::<Vec<_>>();
        Ok(match request {
            PageRequest::Hello(_) => return Err(protocol("a client greets twice")),
            PageRequest::Lengths(keys) => {
                let lengths = self.area.lengths(&keys_of(keys)).into_iter();
                PageReply::Lengths(lengths.map(|length| length.unwrap_or(0)).collect())
            }
            PageRequest::Touch(keys) => {
                self.area.touch(&keys_of(keys));
                PageReply::Done
            }
            PageRequest::Pin(keys) => {
                if self.pins.len() >= MOST_PINS {
                    return Err(KvError::Owner {
                        code: "usage",
                        cause: format!("the client holds {MOST_PINS} pins, which is the limit"),
                        remedy: "release pins".to_owned(),
                    });
                }
                let pins = PinnedPages::of_prefix(self.area.clone(), &keys_of(keys));
                let (pin, pages) = (self.next_pin, pins.len() as u32);
                self.next_pin += 1;
                if pages > 0 {
                    self.pins.insert(pin, (pins, Instant::now() + LEASE));
                }
                PageReply::Pinned { pin, pages }
            }
            PageRequest::Unpin(pin) => {
                self.pins.remove(&pin);
                PageReply::Done
            }
            PageRequest::Load(keys) => self.load(&keys_of(keys)),
            PageRequest::Store(offers) => self.store(&offers),
            PageRequest::Remove(keys) => {
                PageReply::Removed(self.area.remove(&keys_of(keys))? as u64)
            }
            PageRequest::Clear => {
                self.area.clear()?;
                PageReply::Done
            }
            PageRequest::Checkpoint => {
                self.area.checkpoint()?;
                PageReply::Done
            }
            PageRequest::Stats => PageReply::Stats(self.area.stats().into()),
        })
    }

    /// Loads pages, verified, into the window.
    fn load(&mut self, keys: &[PageKey]) -> PageReply {
        let page_bytes = self.area.layout().page_bytes as usize;
        self.buffer.resize(keys.len() * page_bytes, 0);
        let buffers = self.buffer.chunks_mut(page_bytes);
        let mut pages: Vec<_> = keys.iter().copied().zip(buffers).collect();
        let mut loaded = self.area.load_with_checksums(&mut pages);
        let mut errors = Vec::new();
        for (number, (outcome, (_, page))) in loaded.iter_mut().zip(&pages).enumerate() {
            if let Ok(found) = outcome
                && let Err(error) = self.window.write(number, &page[..found.length])
            {
                *outcome = Err(error);
            }
        }
        let outcomes = loaded
            .iter()
            .map(|one| RemoteLoad::of(one, &mut errors))
            .collect();
        PageReply::Loaded(outcomes, errors)
    }

    /// Stores the pages of the window whose bytes are those that the client has seen.
    fn store(&mut self, offers: &[PageOffer]) -> PageReply {
        let page_bytes = self.area.layout().page_bytes as usize;
        self.buffer.resize(offers.len() * page_bytes, 0);
        let mut pages = Vec::new();
        let mut errors = Vec::new();
        let mut outcomes = vec![RemoteStore::NoRoom; offers.len()];
        let mut numbers = Vec::new();
        for ((number, offer), page) in offers
            .iter()
            .enumerate()
            .zip(self.buffer.chunks_mut(page_bytes))
        {
            let page = &mut page[..offer.length as usize];
            let read = self.window.read(number, page).and_then(|()| {
                match payload_checksum(page) == offer.checksum {
                    true => Ok(()),
                    false => Err(protocol(
                        "a page in the window is not the one that is offered",
                    )),
                }
            });
            match read {
                Ok(()) => {
                    pages.push((PageKey::of_bytes(offer.key), &*page));
                    numbers.push(number);
                }
                Err(error) => {
                    outcomes[number] = RemoteStore::Failed(RemoteError::add(&error, &mut errors))
                }
            }
        }
        for (number, outcome) in numbers.into_iter().zip(self.area.store_all(&pages)) {
            outcomes[number] = match outcome {
                Ok(StoreOutcome::Stored) => RemoteStore::Stored,
                Ok(StoreOutcome::Present) => RemoteStore::Present,
                Ok(StoreOutcome::InProgress) => RemoteStore::InProgress,
                Ok(StoreOutcome::NoRoom) => RemoteStore::NoRoom,
                Err(error) => RemoteStore::Failed(RemoteError::add(&error, &mut errors)),
            };
        }
        PageReply::Stored(outcomes, errors)
    }
}

/// Checks that a client asks for the pages of this area.
fn check_hello<M: BlockMedium>(area: &OwnedPages<M>, hello: &AreaHello) -> nvme_kv::Result<()> {
    let fingerprint = ModelFingerprint::decode(&hello.fingerprint);
    let fingerprint = fingerprint.ok_or_else(|| protocol("the fingerprint cannot be read"))?;
    let own = &area.0.request;
    if hello.bytes.is_none() && !area.0.is_to_the_end {
        return Err(KvError::Owner {
            code: "mismatch",
            cause: format!(
                "the owner's area has {} bytes, and this process names none",
                own.bytes
            ),
            remedy: "name the same sizes in all processes".to_owned(),
        });
    }
    own.check_same(&AreaRequest {
        offset: own.offset,
        bytes: hello.bytes.unwrap_or(own.bytes),
        page_bytes: hello.page_bytes,
        fingerprint,
    })
}

fn welcome_of<M: BlockMedium>(area: &OwnedPages<M>) -> OwnerWelcome {
    let (layout, found) = (area.layout(), area.recovery());
    OwnerWelcome {
        epoch: area.epoch(),
        window_pages: window_pages(layout.page_bytes) as u32,
        area_bytes: layout.area_bytes,
        page_bytes: layout.page_bytes,
        slots: layout.slots,
        log_blocks: layout.log_blocks,
        recovered: (found.pages, found.log_blocks, found.lost_blocks),
        fell_back: found.fell_back,
    }
}

/// Returns the error of a peer that breaks the protocol.
pub(crate) fn protocol(rule: &str) -> KvError {
    KvError::Owner {
        code: "internal",
        cause: format!("{rule} ({} {VERSION})", String::from_utf8_lossy(&MAGIC)),
        remedy: "use one version of this package in all processes".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::OwnerSession;
    use crate::place::AreaPlace;
    use nvme_store::{Store, StoreOptions};

    const SLOTS: u64 = 8;
    /// The longest wait for what a lease's end allows.
    const PATIENCE: Duration = Duration::from_secs(120);

    /// A client that holds its pins for longer than a lease, and stays connected.
    #[test]
    fn pins_end_with_their_lease_and_their_pages_make_room() {
        let folder = std::env::temp_dir().join(format!("nvme-kv-lease-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let file = folder.join("pages");
        // Two superblocks, two checkpoints of two blocks, two logs of 16 blocks, slots of two blocks.
        let bytes = (2 + 2 * 2 + 2 * 16 + SLOTS * 2) * 4096;
        std::fs::File::create(&file)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        let device = format!("file:{}", file.display());
        let place = AreaPlace::of(Some(&folder.join("sockets")), &device, 0).unwrap();
        let request = AreaRequest {
            offset: 0,
            bytes,
            page_bytes: 4096,
            fingerprint: ModelFingerprint {
                model: "llama".to_owned(),
                ..ModelFingerprint::default()
            },
        };
        let store = Store::open(&device, &StoreOptions::default()).unwrap();
        let hello = AreaHello {
            bytes: Some(bytes),
            page_bytes: request.page_bytes,
            fingerprint: request.fingerprint.encode().unwrap(),
        };
        let area = OwnedPages(Arc::new(OwnedArea {
            pages: PageStore::format(store, &request).unwrap(),
            request,
            is_to_the_end: false,
            _lock: place.try_lock().unwrap().unwrap(),
        }));
        let socket = ListeningSocket::bind(&place.socket).unwrap();
        let server = AreaServer::start(area.clone(), socket).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let session = Arc::new(OwnerSession::open(&place.socket, &hello, deadline).unwrap());
        let key = |number: u64| area.key(&number.to_le_bytes(), 0);
        let store = |number: u64| {
            let stored = session.store_all(&[(key(number), &[7; 4096])], deadline);
            stored.unwrap().remove(0).unwrap()
        };
        let mut pins = Vec::new();
        for number in 0..SLOTS {
            assert_eq!(store(number), StoreOutcome::Stored);
            pins.push(session.pin_prefix(&[key(number)], deadline).unwrap());
        }
        assert_eq!(pins.iter().map(|one| one.len() as u64).sum::<u64>(), SLOTS);
        let has_room = (0..).any(|_| {
            assert!(Instant::now() < deadline, "the pins never end");
            std::thread::sleep(Duration::from_millis(20));
            store(1000) != StoreOutcome::NoRoom
        });
        assert!(has_room);
        drop((pins, session, server, area));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
