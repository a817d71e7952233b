//! The client's side: connections to the owner, each for one request at a time.

use crate::message::{
    AreaHello, MOST_KEYS, MessageFault, OwnerWelcome, PacketHeader, PageOffer, PageReply,
    PageRequest, RemoteError, RemoteLoad, RemoteStore, VERSION, decode, encode,
};
use crate::server::protocol;
use crate::socket::{MessageSocket, SocketFault};
use crate::window::PageWindow;
use nvme_driver::lock::lock;
use nvme_kv::format::payload_checksum;
use nvme_kv::{KvError, KvStats, PageKey, StoreOutcome};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Connections of a client for transfers, beside the one for its lookups and pins.
const MOST_TRANSFERS: usize = 4;
/// Time for a pin's end to be sent: the owner ends it with the connection otherwise.
const UNPIN_TIME: Duration = Duration::from_secs(1);

/// Reason why a request has no result.
#[derive(Debug)]
pub(crate) enum CallFault {
    /// The owner answered with an error, or the answer cannot be used.
    Answered(KvError),
    /// The owner has ended, or none listens: another one may be there.
    OwnerEnded,
    /// The deadline passed.
    TimedOut,
}

impl From<KvError> for CallFault {
    fn from(error: KvError) -> Self {
        Self::Answered(error)
    }
}

/// A connection, which is dropped after an error: what the owner still writes is in no one's window then.
struct OwnerConnection {
    socket: MessageSocket,
    window: PageWindow,
    epoch: u32,
    sequence: u64,
    /// Ends with the connection: pins are those of one connection, and refer to this.
    life: Arc<()>,
}

impl OwnerConnection {
    fn open(
        path: &Path,
        hello: &AreaHello,
        deadline: Instant,
    ) -> Result<(Self, OwnerWelcome), CallFault> {
        let socket = MessageSocket::connect(path, deadline).map_err(fault_of)?;
        let header = PacketHeader {
            epoch: 0,
            sequence: 0,
        };
        let bytes = encode(header, &PageRequest::Hello(hello.clone()));
        socket.send(&bytes, None, deadline).map_err(fault_of)?;
        let message = socket.receive(deadline).map_err(fault_of)?;
        let (header, reply) = decode::<PageReply>(&message.bytes).map_err(unreadable)?;
        match (reply, message.file) {
            (PageReply::Welcome(welcome), Some(file)) if welcome.epoch == header.epoch => {
                let window = PageWindow::received(file, welcome.page_bytes, welcome.window_pages)?;
                let connection = Self {
                    socket,
                    window,
                    epoch: header.epoch,
                    sequence: 0,
                    life: Arc::default(),
                };
                Ok((connection, welcome))
            }
            (PageReply::Refused(error), _) => Err(error.to_error().into()),
            _ => Err(protocol("the owner's greeting has no window").into()),
        }
    }

    /// Sends a request, and returns its reply.
    fn request(
        &mut self,
        request: &PageRequest,
        deadline: Instant,
    ) -> Result<PageReply, CallFault> {
        self.sequence += 1;
        let header = PacketHeader {
            epoch: self.epoch,
            sequence: self.sequence,
        };
        let bytes = encode(header, request);
        self.socket.send(&bytes, None, deadline).map_err(fault_of)?;
        let message = self.socket.receive(deadline).map_err(fault_of)?;
        match decode::<PageReply>(&message.bytes).map_err(unreadable)? {
            (of, reply) if of == header => Ok(reply),
            (_, PageReply::Refused(error)) => Err(error.to_error().into()),
            _ => Err(protocol("the owner answers another request").into()),
        }
    }
}

fn fault_of(fault: SocketFault) -> CallFault {
    match fault {
        SocketFault::Closed => CallFault::OwnerEnded,
        SocketFault::TimedOut => CallFault::TimedOut,
        SocketFault::Garbage(_) | SocketFault::Failed(_) => CallFault::Answered(KvError::Owner {
            code: "system",
            cause: format!("the connection to the owner of the page store failed: {fault}"),
            remedy: "start the processes that share it as one user, in one container".to_owned(),
        }),
    }
}

fn unreadable(fault: MessageFault) -> CallFault {
    CallFault::Answered(match fault {
        MessageFault::Version(found) => KvError::Owner {
            code: "mismatch",
            cause: format!(
                "the owner has version {found} of the messages, this process version {VERSION}"
            ),
            remedy: "use one version of this package in all processes".to_owned(),
        },
        MessageFault::Magic | MessageFault::Body => protocol("a reply is none of this protocol"),
    })
}

/// The connections of this process to one opening of an owner.
pub(crate) struct OwnerSession {
    path: PathBuf,
    hello: AreaHello,
    pub welcome: OwnerWelcome,
    /// For lookups and pins. `None` after it broke: the pins have ended.
    control: Mutex<Option<OwnerConnection>>,
    transfers: Mutex<TransferPool>,
    returned: Condvar,
    has_ended: AtomicBool,
}

#[derive(Default)]
struct TransferPool {
    free: Vec<OwnerConnection>,
    in_use: usize,
}

impl OwnerSession {
    /// Connects to the owner that listens at `path`.
    pub fn open(path: &Path, hello: &AreaHello, deadline: Instant) -> Result<Self, CallFault> {
        let (control, welcome) = OwnerConnection::open(path, hello, deadline)?;
        Ok(Self {
            path: path.to_owned(),
            hello: hello.clone(),
            welcome,
            control: Mutex::new(Some(control)),
            transfers: Mutex::default(),
            returned: Condvar::new(),
            has_ended: AtomicBool::new(false),
        })
    }

    /// True once the owner was seen to have ended.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    fn noted<T>(&self, result: Result<T, CallFault>) -> Result<T, CallFault> {
        if matches!(result, Err(CallFault::OwnerEnded)) {
            self.has_ended.store(true, Ordering::SeqCst);
        }
        result
    }

    /// Makes a request that needs only the owner's memory.
    fn ask(&self, request: &PageRequest, deadline: Instant) -> Result<PageReply, CallFault> {
        self.ask_by(&mut lock(&self.control), request, deadline)
    }

    /// Makes a request as [`ask`](Self::ask) by `control`, which is this session's and locked.
    fn ask_by(
        &self,
        control: &mut Option<OwnerConnection>,
        request: &PageRequest,
        deadline: Instant,
    ) -> Result<PageReply, CallFault> {
        let result = match control.as_mut() {
            Some(connection) => connection.request(request, deadline),
            // A connection that timed out is not used again: a late reply would be taken for another's.
            None => OwnerConnection::open(&self.path, &self.hello, deadline).and_then(|opened| {
                let (connection, welcome) = opened;
                if welcome.epoch != self.welcome.epoch {
                    return Err(CallFault::OwnerEnded);
                }
                control.insert(connection).request(request, deadline)
            }),
        };
        if result.is_err() {
            *control = None;
        }
        self.noted(result).and_then(unrefused)
    }

    /// Runs `transfer` with a connection that no other thread uses.
    fn with_transfer<T>(
        &self,
        deadline: Instant,
        transfer: impl FnOnce(&mut OwnerConnection) -> Result<T, CallFault>,
    ) -> Result<T, CallFault> {
        let mut pool = lock(&self.transfers);
        while pool.free.is_empty() && pool.in_use >= MOST_TRANSFERS {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(CallFault::TimedOut);
            }
            let waited = self.returned.wait_timeout(pool, left);
            pool = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let free = pool.free.pop();
        pool.in_use += 1;
        drop(pool);
        let mut place = TransferPlace {
            session: self,
            connection: None,
        };
        let result = match free {
            Some(connection) => Ok(connection),
            None => OwnerConnection::open(&self.path, &self.hello, deadline).and_then(|opened| {
                let (connection, welcome) = opened;
                let is_same = welcome.epoch == self.welcome.epoch;
                is_same.then_some(connection).ok_or(CallFault::OwnerEnded)
            }),
        };
        let result = result.and_then(|mut connection| {
            let result = transfer(&mut connection)?;
            place.connection = Some(connection);
            Ok(result)
        });
        self.noted(result)
    }

    /// Returns the length of the page of each key.
    pub fn lengths(
        &self,
        keys: &[PageKey],
        deadline: Instant,
    ) -> Result<Vec<Option<u32>>, CallFault> {
        let mut lengths = Vec::with_capacity(keys.len());
        for keys in keys.chunks(MOST_KEYS) {
            match self.ask(&PageRequest::Lengths(bytes_of(keys)), deadline)? {
                PageReply::Lengths(found) if found.len() == keys.len() => {
                    lengths.extend(
                        found
                            .into_iter()
                            .map(|length| (length > 0).then_some(length)),
                    );
                }
                _ => return Err(unexpected()),
            }
        }
        Ok(lengths)
    }

    /// Counts pages as used: the last of `keys` makes room first.
    pub fn touch(&self, keys: &[PageKey], deadline: Instant) -> Result<(), CallFault> {
        for keys in keys.rchunks(MOST_KEYS) {
            done(self.ask(&PageRequest::Touch(bytes_of(keys)), deadline)?)?;
        }
        Ok(())
    }

    /// Pins the pages of the first keys, up to the first key without a page.
    pub fn pin_prefix(
        self: &Arc<Self>,
        keys: &[PageKey],
        deadline: Instant,
    ) -> Result<RemotePins, CallFault> {
        let mut pins = RemotePins {
            session: Arc::downgrade(self),
            connection: Weak::new(),
            pins: Vec::new(),
            pages: 0,
        };
        // Locked for all chunks: a lookup of another thread that breaks the connection would end the pins of the first.
        // The guard comes after `pins`, whose drop locks the same mutex.
        let mut control = lock(&self.control);
        for keys in keys.chunks(MOST_KEYS) {
            let request = PageRequest::Pin(bytes_of(keys));
            match self.ask_by(&mut control, &request, deadline)? {
                PageReply::Pinned { pin, pages } if pages as usize <= keys.len() => {
                    let life = control.as_ref().map(|one| Arc::downgrade(&one.life));
                    pins.connection = life.unwrap_or_default();
                    pins.pins.push(pin);
                    pins.pages += pages as usize;
                    if (pages as usize) < keys.len() {
                        break;
                    }
                }
                _ => return Err(unexpected()),
            }
        }
        Ok(pins)
    }

    /// Loads pages, as many together as a window holds. A page whose bytes are not those that the owner verified is an
    /// error.
    pub fn load_all(
        &self,
        pages: &mut [(PageKey, &mut [u8])],
        deadline: Instant,
    ) -> Result<Vec<nvme_kv::Result<usize>>, CallFault> {
        let mut results = Vec::with_capacity(pages.len());
        for pages in pages.chunks_mut(self.welcome.window_pages.max(1) as usize) {
            let loaded = self.with_transfer(deadline, |connection| {
                let keys = pages.iter().map(|(key, _)| *key.as_bytes()).collect();
                match connection.request(&PageRequest::Load(keys), deadline)? {
                    PageReply::Loaded(outcomes, errors) if outcomes.len() == pages.len() => {
                        Ok(take_all(connection, pages, &outcomes, &errors))
                    }
                    reply => Err(refusal_of(reply)),
                }
            })?;
            results.extend(loaded);
        }
        Ok(results)
    }

    /// Stores pages, as many together as a window holds.
    pub fn store_all(
        &self,
        pages: &[(PageKey, &[u8])],
        deadline: Instant,
    ) -> Result<Vec<nvme_kv::Result<StoreOutcome>>, CallFault> {
        let mut results = Vec::with_capacity(pages.len());
        for pages in pages.chunks(self.welcome.window_pages.max(1) as usize) {
            let most = self.welcome.page_bytes as usize;
            let fits = |(_, page): &&(PageKey, &[u8])| (1..=most).contains(&page.len());
            let chosen: Vec<_> = pages.iter().filter(fits).collect();
            let stored = self.with_transfer(deadline, |connection| {
                let mut offers = Vec::with_capacity(chosen.len());
                for (number, (key, page)) in chosen.iter().enumerate() {
                    connection.window.write(number, page)?;
                    offers.push(PageOffer {
                        key: *key.as_bytes(),
                        length: page.len() as u32,
                        checksum: payload_checksum(page),
                    });
                }
                match connection.request(&PageRequest::Store(offers), deadline)? {
                    PageReply::Stored(outcomes, errors) if outcomes.len() == chosen.len() => {
                        let of = |outcome: RemoteStore| outcome_of(outcome, &errors);
                        Ok(outcomes.into_iter().map(of).collect::<Vec<_>>())
                    }
                    reply => Err(refusal_of(reply)),
                }
            })?;
            let mut stored = stored.into_iter();
            results.extend(pages.iter().map(|page| match fits(&page) {
                true => stored.next().unwrap_or(Ok(StoreOutcome::NoRoom)),
                false => Err(KvError::Usage {
                    cause: format!(
                        "a page of {} bytes is not between 1 and {most} bytes long",
                        page.1.len()
                    ),
                    remedy: "store pages of the size that the store was made for".to_owned(),
                }),
            }));
        }
        Ok(results)
    }

    /// Removes pages; returns the number of those that were there.
    pub fn remove(&self, keys: &[PageKey], deadline: Instant) -> Result<usize, CallFault> {
        let mut removed = 0;
        for keys in keys.chunks(MOST_KEYS) {
            let request = PageRequest::Remove(bytes_of(keys));
            match self.with_transfer(deadline, |one| one.request(&request, deadline))? {
                PageReply::Removed(count) => removed += count as usize,
                reply => return Err(refusal_of(reply)),
            }
        }
        Ok(removed)
    }

    /// Removes all pages.
    pub fn clear(&self, deadline: Instant) -> Result<(), CallFault> {
        done(self.with_transfer(deadline, |one| one.request(&PageRequest::Clear, deadline))?)
    }

    /// Lets the owner write a checkpoint.
    pub fn checkpoint(&self, deadline: Instant) -> Result<(), CallFault> {
        done(self.with_transfer(deadline, |one| {
            one.request(&PageRequest::Checkpoint, deadline)
        })?)
    }

    /// Returns the owner's counts.
    pub fn stats(&self, deadline: Instant) -> Result<KvStats, CallFault> {
        match self.ask(&PageRequest::Stats, deadline)? {
            PageReply::Stats(stats) => Ok(stats.into()),
            _ => Err(unexpected()),
        }
    }
}

/// A connection that is in use: it goes back to the pool, or leaves its place there to a new one.
struct TransferPlace<'a> {
    session: &'a OwnerSession,
    connection: Option<OwnerConnection>,
}

impl Drop for TransferPlace<'_> {
    fn drop(&mut self) {
        let mut pool = lock(&self.session.transfers);
        pool.in_use -= 1;
        pool.free.extend(self.connection.take());
        self.session.returned.notify_one();
    }
}

/// Pins of an owner's pages.
pub(crate) struct RemotePins {
    /// Not a reference that would keep the pins after the store is closed.
    session: Weak<OwnerSession>,
    /// The connection with which the pins end.
    connection: Weak<()>,
    /// Numbers of the pins.
    pins: Vec<u64>,
    pages: usize,
}

impl RemotePins {
    /// Returns the number of pages; 0 once the connection has ended, and the pins with it.
    pub fn len(&self) -> usize {
        match self.connection.strong_count() {
            0 => 0,
            _ => self.pages,
        }
    }
}

impl Drop for RemotePins {
    fn drop(&mut self) {
        let Some(session) = self.session.upgrade() else {
            return;
        };
        let mut control = lock(&session.control);
        for pin in self.pins.drain(..) {
            let deadline = Instant::now() + UNPIN_TIME;
            // Those of a connection that broke have ended with it.
            let is_same = |one: &&mut OwnerConnection| {
                std::ptr::eq(Arc::as_ptr(&one.life), self.connection.as_ptr())
            };
            let Some(connection) = control.as_mut().filter(is_same) else {
                break;
            };
            if connection
                .request(&PageRequest::Unpin(pin), deadline)
                .is_err()
            {
                *control = None;
            }
        }
    }
}

fn bytes_of(keys: &[PageKey]) -> Vec<[u8; PageKey::BYTES]> {
    keys.iter().map(|key| *key.as_bytes()).collect()
}

fn done(reply: PageReply) -> Result<(), CallFault> {
    match reply {
        PageReply::Done => Ok(()),
        reply => Err(refusal_of(reply)),
    }
}

fn unexpected() -> CallFault {
    protocol("the owner's reply is not one to this request").into()
}

fn unrefused(reply: PageReply) -> Result<PageReply, CallFault> {
    match reply {
        PageReply::Refused(error) => Err(error.to_error().into()),
        reply => Ok(reply),
    }
}

fn refusal_of(reply: PageReply) -> CallFault {
    unrefused(reply).map_or_else(|fault| fault, |_| unexpected())
}

/// Copies pages out of the window, and compares each with its checksum.
fn take_all(
    connection: &OwnerConnection,
    pages: &mut [(PageKey, &mut [u8])],
    outcomes: &[RemoteLoad],
    errors: &[RemoteError],
) -> Vec<nvme_kv::Result<usize>> {
    let mut results = Vec::with_capacity(pages.len());
    for (number, ((key, page), outcome)) in pages.iter_mut().zip(outcomes).enumerate() {
        let taken = match outcome {
            RemoteLoad::Loaded { length, checksum } => {
                take(connection, number, page, *length as usize, *checksum, *key)
            }
            outcome => Err(outcome
                .error(*key, errors)
                .unwrap_or_else(|| protocol("an outcome refers to no error"))),
        };
        if taken.is_err() {
            page.fill(0);
        }
        results.push(taken);
    }
    results
}

fn take(
    connection: &OwnerConnection,
    number: usize,
    page: &mut [u8],
    length: usize,
    checksum: u64,
    key: PageKey,
) -> nvme_kv::Result<usize> {
    let room = page.len();
    let page = page.get_mut(..length).ok_or_else(|| KvError::Usage {
        cause: format!("the page of key {key} has {length} bytes, and its buffer {room}"),
        remedy: "pass a buffer of the store's page size".to_owned(),
    })?;
    connection.window.read(number, page)?;
    match payload_checksum(page) == checksum {
        true => Ok(length),
        false => Err(protocol(
            "a page in the window is not the one that was loaded",
        )),
    }
}

fn outcome_of(outcome: RemoteStore, errors: &[RemoteError]) -> nvme_kv::Result<StoreOutcome> {
    match outcome {
        RemoteStore::Stored => Ok(StoreOutcome::Stored),
        RemoteStore::Present => Ok(StoreOutcome::Present),
        RemoteStore::InProgress => Ok(StoreOutcome::InProgress),
        RemoteStore::NoRoom => Ok(StoreOutcome::NoRoom),
        RemoteStore::Failed(place) => Err(errors.get(usize::from(place)).map_or_else(
            || protocol("an outcome refers to no error"),
            RemoteError::to_error,
        )),
    }
}

#[cfg(test)]
mod tests;
