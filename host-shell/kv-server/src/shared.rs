//! The store of one of the processes that share an area: owner or client, and the change from client to owner.

use crate::client::{CallFault, OwnerSession, RemotePins};
use crate::message::AreaHello;
use crate::place::{AreaLock, AreaPlace};
use crate::server::{AreaServer, OwnedArea, OwnedPages};
use crate::socket::ListeningSocket;
use nvme_driver::lock::lock;
use nvme_kv::{
    AreaLayout, AreaRequest, BlockMedium, FingerprintDigest, KvError, KvStats, ModelFingerprint,
    PageKey, PageStore, RecoveryReport, Result, StoreOutcome, WeakPins,
};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The longest wait of a lookup for a present owner: it needs only the owner's memory.
const LOOKUP_TIME: Duration = Duration::from_secs(2);
/// Pause before an owner is looked for again.
const PAUSE: Duration = Duration::from_millis(5);
/// The longest wait, in place of one whose end the clock cannot tell.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The area that processes share, and how this one behaves.
#[derive(Clone, Debug)]
pub struct SharedRequest {
    /// The device, by which processes find each other: a path, or another name that is the same in all of them.
    pub device: String,
    /// First byte of the area, a multiple of 4,096.
    pub offset: u64,
    /// Bytes of the area; `None` for those up to the end of the device.
    pub bytes: Option<u64>,
    /// The most bytes of a page.
    pub page_bytes: u32,
    /// Fingerprint of the pages, the same in all processes.
    pub fingerprint: ModelFingerprint,
    /// Formats the area as [`PageStore::open_or_format`] does; otherwise that is an error.
    pub may_format: bool,
    /// Directory of locks and sockets, of this user alone; `None` for `nvme-gpu` in XDG_RUNTIME_DIR, or
    /// `nvme-gpu-UID` in the folder of temporary files.
    pub directory: Option<PathBuf>,
    /// The longest time that a call waits for an owner, and for its answer.
    pub timeout: Duration,
}

/// Opens the device, when this process becomes the owner.
type OpenMedium<M> = Box<dyn Fn() -> nvme_driver::Result<M> + Send + Sync>;

/// Pages of an area that several processes share, for any number of threads.
///
/// Its calls are those of [`PageStore`], by the store itself in the process that owns it and over a socket in the others.
/// Calls that do not answer in time end with [`KvError::Owner`]; lookups find nothing then, so that pages are computed.
/// Calls that an owner's end interrupts are made again at the next one. A page that was stored twice is `Present`.
///
/// A process that becomes the owner during a call also waits for the device to open and for the recovery.
pub struct SharedPageStore<M: BlockMedium + 'static> {
    request: SharedRequest,
    hello: AreaHello,
    digest: FingerprintDigest,
    place: AreaPlace,
    open: OpenMedium<M>,
    state: Mutex<RoleState<M>>,
    changed: Condvar,
    unanswered: AtomicU64,
}

struct RoleState<M: BlockMedium + 'static> {
    role: Option<AreaRole<M>>,
    /// A thread of this process is looking for an owner, or becoming one.
    is_looking: bool,
    is_closed: bool,
    formatted: Option<String>,
}

enum AreaRole<M: BlockMedium + 'static> {
    Owner(Arc<OwnerRole<M>>),
    Client(Arc<OwnerSession>),
}

impl<M: BlockMedium + 'static> Clone for AreaRole<M> {
    fn clone(&self) -> Self {
        match self {
            Self::Owner(owner) => Self::Owner(Arc::clone(owner)),
            Self::Client(session) => Self::Client(Arc::clone(session)),
        }
    }
}

/// Fields are dropped in this order: no client is served from a store that is being closed.
struct OwnerRole<M: BlockMedium + 'static> {
    _server: AreaServer,
    pages: OwnedPages<M>,
}

/// Pages that stay in their slots until this is dropped, their store is closed, or their owner ends. A client's end also
/// ten minutes later, and with the connection by which they were made: a lookup that got no answer in time breaks it.
pub struct SharedPins<M: BlockMedium + 'static>(PinsOfRole<M>);

enum PinsOfRole<M: BlockMedium + 'static> {
    /// Not a reference that would keep the area's lock and its device after the store is closed.
    Own(WeakPins<OwnedArea<M>, M>),
    Remote(RemotePins),
    Unanswered,
}

impl<M: BlockMedium + 'static> SharedPins<M> {
    /// Returns the number of pages; 0 once a client's have ended with their connection.
    pub fn len(&self) -> usize {
        match &self.0 {
            PinsOfRole::Own(pins) => pins.len(),
            PinsOfRole::Remote(pins) => pins.len(),
            PinsOfRole::Unanswered => 0,
        }
    }

    /// True if no page was found.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<M: BlockMedium + 'static> SharedPageStore<M> {
    /// Becomes the owner of the area, or a client of its owner. `open` opens the device; only an owner calls it.
    ///
    /// # Errors
    /// As [`PageStore::open`], and [`PageStore::open_or_format`] with `may_format`. [`KvError::Owner`] with the code
    /// `mismatch` if the owner has pages of another model, size or version of this package, and with `timeout` if no
    /// owner answers.
    pub fn open(
        request: SharedRequest,
        open: impl Fn() -> nvme_driver::Result<M> + Send + Sync + 'static,
    ) -> Result<Self> {
        let encoded = request.fingerprint.encode()?;
        let place = AreaPlace::of(
            request.directory.as_deref(),
            &request.device,
            request.offset,
        )?;
        let shared = Self {
            digest: FingerprintDigest::of(&encoded),
            hello: AreaHello {
                bytes: request.bytes,
                page_bytes: request.page_bytes,
                fingerprint: encoded,
            },
            place,
            open: Box::new(open),
            state: Mutex::new(RoleState {
                role: None,
                is_looking: false,
                is_closed: false,
                formatted: None,
            }),
            changed: Condvar::new(),
            unanswered: AtomicU64::new(0),
            request,
        };
        shared.role(deadline_after(shared.request.timeout))?;
        Ok(shared)
    }

    /// Returns the role of this process. Looks for an owner, or becomes one, if there is none.
    fn role(&self, deadline: Instant) -> Result<AreaRole<M>> {
        let mut state = lock(&self.state);
        loop {
            if state.is_closed {
                return Err(KvError::Usage {
                    cause: "the page store is closed".to_owned(),
                    remedy: "open it again, or close it later".to_owned(),
                });
            }
            match &state.role {
                Some(AreaRole::Client(session)) if session.has_ended() => state.role = None,
                Some(role) => return Ok(role.clone()),
                None if !state.is_looking => break,
                None => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(unanswered());
                    }
                    let waited = self.changed.wait_timeout(state, left);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
        state.is_looking = true;
        drop(state);
        let mut search = OwnerSearch {
            pages: self,
            found: None,
        };
        let (role, formatted) = self.find(deadline)?;
        search.found = Some((role.clone(), formatted));
        Ok(role)
    }

    fn find(&self, deadline: Instant) -> Result<(AreaRole<M>, Option<String>)> {
        loop {
            if let Some(held) = self.place.try_lock()? {
                return self.own(held);
            }
            match OwnerSession::open(&self.place.socket, &self.hello, deadline) {
                Ok(session) => return Ok((AreaRole::Client(Arc::new(session)), None)),
                Err(CallFault::Answered(error)) => return Err(error),
                // It has the lock and does not listen yet, or has just ended.
                Err(CallFault::OwnerEnded | CallFault::TimedOut) => {}
            }
            if Instant::now() >= deadline {
                return Err(unanswered());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Opens the device and its store, and serves it.
    fn own(&self, held: AreaLock) -> Result<(AreaRole<M>, Option<String>)> {
        let medium = (self.open)().map_err(|source| KvError::Drive {
            action: "opening the device of the page store".to_owned(),
            source,
        })?;
        let rest = medium.bytes().saturating_sub(self.request.offset);
        let request = AreaRequest {
            offset: self.request.offset,
            bytes: self.request.bytes.unwrap_or(rest),
            page_bytes: self.request.page_bytes,
            fingerprint: self.request.fingerprint.clone(),
        };
        let (pages, formatted) = match self.request.may_format {
            true => PageStore::open_or_format(medium, &request)?,
            false => (PageStore::open(medium, &request)?, None),
        };
        let pages = OwnedPages(Arc::new(OwnedArea {
            pages,
            request,
            is_to_the_end: self.request.bytes.is_none(),
            _lock: held,
        }));
        let socket = ListeningSocket::bind(&self.place.socket)?;
        let server = AreaServer::start(pages.clone(), socket)?;
        let owner = OwnerRole {
            _server: server,
            pages,
        };
        let formatted = formatted.map(|cause| cause.to_string());
        Ok((AreaRole::Owner(Arc::new(owner)), formatted))
    }

    /// Makes a call by the role of this process, and again if its owner ends meanwhile, or `is_superseded` says that
    /// another process has opened the area.
    fn call<T>(
        &self,
        limit: Duration,
        mut of_owner: impl FnMut(&OwnedPages<M>) -> T,
        mut of_client: impl FnMut(&Arc<OwnerSession>, Instant) -> std::result::Result<T, CallFault>,
        is_superseded: impl Fn(&T) -> bool,
    ) -> Result<T> {
        let deadline = deadline_after(limit);
        let mut is_first = true;
        loop {
            let role = self.role(deadline)?;
            match &role {
                AreaRole::Owner(owner) => {
                    let result = of_owner(&owner.pages);
                    if !is_superseded(&result) || !std::mem::take(&mut is_first) {
                        return Ok(result);
                    }
                    self.leave(role);
                }
                AreaRole::Client(session) => match of_client(session, deadline) {
                    Ok(result) => {
                        if !is_superseded(&result) || !std::mem::take(&mut is_first) {
                            return Ok(result);
                        }
                        self.leave(role);
                    }
                    Err(CallFault::Answered(error)) => {
                        if !is_taken(&error) || !std::mem::take(&mut is_first) {
                            return Err(error);
                        }
                        self.leave(role);
                    }
                    Err(CallFault::OwnerEnded) if Instant::now() < deadline => {
                        std::thread::sleep(PAUSE);
                    }
                    Err(CallFault::OwnerEnded | CallFault::TimedOut) => {
                        return Err(unanswered());
                    }
                },
            }
        }
    }

    /// Ends a role whose owner was superseded: the next owner is looked for.
    fn leave(&self, role: AreaRole<M>) {
        let mut state = lock(&self.state);
        let is_same = match (&state.role, &role) {
            (Some(AreaRole::Owner(one)), AreaRole::Owner(other)) => Arc::ptr_eq(one, other),
            (Some(AreaRole::Client(one)), AreaRole::Client(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        let left = is_same.then(|| state.role.take());
        drop(state);
        // Not with the lock: the threads of the server end first.
        drop((left, role));
    }

    /// Makes a lookup; `otherwise` is its result if no owner answers.
    fn look<T>(
        &self,
        otherwise: impl FnOnce() -> T,
        of_owner: impl FnMut(&OwnedPages<M>) -> T,
        of_client: impl FnMut(&Arc<OwnerSession>, Instant) -> std::result::Result<T, CallFault>,
    ) -> T {
        let limit = LOOKUP_TIME.min(self.request.timeout);
        let looked = self.call(limit, of_owner, of_client, |_| false);
        looked.unwrap_or_else(|_| {
            self.unanswered.fetch_add(1, Ordering::Relaxed);
            otherwise()
        })
    }

    /// Returns the key of part `part` of the block that the caller knows by `block_hash`, as [`PageStore::key`].
    pub fn key(&self, block_hash: &[u8], part: u32) -> PageKey {
        self.digest.key(block_hash, part)
    }

    /// Returns the length of the page of each key in bytes; `None` if it is not found, or no owner answers.
    pub fn lengths(&self, keys: &[PageKey]) -> Vec<Option<u32>> {
        self.look(
            || vec![None; keys.len()],
            |pages| pages.lengths(keys),
            |session, deadline| session.lengths(keys, deadline),
        )
    }

    /// Counts the pages that are found as used, as [`PageStore::touch`].
    pub fn touch(&self, keys: &[PageKey]) {
        self.look(
            || (),
            |pages| pages.touch(keys),
            |session, deadline| session.touch(keys, deadline),
        );
    }

    /// Pins the pages of the first keys, up to the first key without a page; none if no owner answers.
    pub fn pin_prefix(&self, keys: &[PageKey]) -> SharedPins<M> {
        let own = |pages: &OwnedPages<M>| PinsOfRole::Own(WeakPins::of_prefix(&pages.0, keys));
        SharedPins(self.look(
            || PinsOfRole::Unanswered,
            own,
            |session, deadline| session.pin_prefix(keys, deadline).map(PinsOfRole::Remote),
        ))
    }

    /// Loads pages, as [`PageStore::load_all`].
    ///
    /// # Errors
    /// Those of [`PageStore::load_all`]; [`KvError::Owner`] for all pages if no owner answers.
    pub fn load_all(&self, pages: &mut [(PageKey, &mut [u8])]) -> Vec<Result<usize>> {
        // Both roles need the buffers, one after the other.
        let given = std::cell::RefCell::new(pages);
        let loaded = self.call(
            self.request.timeout,
            |store| store.load_all(&mut given.borrow_mut()),
            |session, deadline| session.load_all(&mut given.borrow_mut(), deadline),
            |_| false,
        );
        let pages = given.into_inner();
        loaded.unwrap_or_else(|error| {
            pages.iter_mut().for_each(|(_, page)| page.fill(0));
            pages.iter().map(|_| Err(error.again())).collect()
        })
    }

    /// Stores pages, as [`PageStore::store_all`].
    ///
    /// # Errors
    /// Those of [`PageStore::store_all`]; [`KvError::Owner`] for all pages if no owner answers: some may be found later.
    pub fn store_all(&self, pages: &[(PageKey, &[u8])]) -> Vec<Result<StoreOutcome>> {
        let stored = self.call(
            self.request.timeout,
            |store| store.store_all(pages),
            |session, deadline| session.store_all(pages, deadline),
            |outcomes| outcomes.iter().any(|one| one.as_ref().is_err_and(is_taken)),
        );
        stored.unwrap_or_else(|error| pages.iter().map(|_| Err(error.again())).collect())
    }

    /// Removes pages, as [`PageStore::remove`].
    ///
    /// # Errors
    /// Those of [`PageStore::remove`]; [`KvError::Owner`].
    pub fn remove(&self, keys: &[PageKey]) -> Result<usize> {
        self.call(
            self.request.timeout,
            |store| store.remove(keys),
            |session, deadline| session.remove(keys, deadline).map(Ok),
            |result| result.as_ref().is_err_and(is_taken),
        )?
    }

    /// Removes all pages, as [`PageStore::clear`].
    ///
    /// # Errors
    /// Those of [`PageStore::clear`]; [`KvError::Owner`].
    pub fn clear(&self) -> Result<()> {
        self.call(
            self.request.timeout,
            |store| store.clear(),
            |session, deadline| session.clear(deadline).map(Ok),
            |result| result.as_ref().is_err_and(is_taken),
        )?
    }

    /// Writes a checkpoint, as [`PageStore::checkpoint`].
    ///
    /// # Errors
    /// Those of [`PageStore::checkpoint`]; [`KvError::Owner`].
    pub fn checkpoint(&self) -> Result<()> {
        self.call(
            self.request.timeout,
            |store| store.checkpoint(),
            |session, deadline| session.checkpoint(deadline).map(Ok),
            |result| result.as_ref().is_err_and(is_taken),
        )?
    }

    /// Returns the counts of the owner, for all processes together.
    ///
    /// # Errors
    /// [`KvError::Owner`].
    pub fn stats(&self) -> Result<KvStats> {
        let limit = LOOKUP_TIME.min(self.request.timeout);
        self.call(
            limit,
            |store| store.stats(),
            |session, deadline| session.stats(deadline),
            |_| false,
        )
    }

    /// Returns the number of lookups of this process that found nothing because no owner answered.
    pub fn unanswered(&self) -> u64 {
        self.unanswered.load(Ordering::Relaxed)
    }

    /// Returns the sizes of the area, and what the owner's opening found.
    ///
    /// # Errors
    /// [`KvError::Owner`].
    pub fn area(&self) -> Result<(AreaLayout, RecoveryReport)> {
        match self.role(deadline_after(self.request.timeout))? {
            AreaRole::Owner(owner) => Ok((owner.pages.layout(), owner.pages.recovery())),
            AreaRole::Client(session) => Ok((session.welcome.layout(), session.welcome.recovery())),
        }
    }

    /// Returns whether this process owns the area, and the number of the owner's opening.
    ///
    /// # Errors
    /// [`KvError::Owner`].
    pub fn owner(&self) -> Result<(bool, u32)> {
        match self.role(deadline_after(self.request.timeout))? {
            AreaRole::Owner(owner) => Ok((true, owner.pages.epoch())),
            AreaRole::Client(session) => Ok((false, session.welcome.epoch)),
        }
    }

    /// Returns why this process formatted the area when it became its owner; `None` if it did not.
    pub fn formatted(&self) -> Option<String> {
        lock(&self.state).formatted.clone()
    }

    /// Ends the use of the area. An owner's clients continue with one of them as the owner. A second call does nothing.
    pub fn close(&self) {
        let role = {
            let mut state = lock(&self.state);
            state.is_closed = true;
            state.role.take()
        };
        self.changed.notify_all();
        // Not with the lock: the threads of the server end first.
        drop(role);
    }
}

impl<M: BlockMedium + 'static> Drop for SharedPageStore<M> {
    fn drop(&mut self) {
        self.close();
    }
}

/// The search for an owner, which ends also by an error or a panic.
struct OwnerSearch<'a, M: BlockMedium + 'static> {
    pages: &'a SharedPageStore<M>,
    found: Option<(AreaRole<M>, Option<String>)>,
}

impl<M: BlockMedium + 'static> Drop for OwnerSearch<'_, M> {
    fn drop(&mut self) {
        let mut state = lock(&self.pages.state);
        state.is_looking = false;
        if let Some((role, formatted)) = self.found.take()
            && !state.is_closed
        {
            state.formatted = formatted.or(state.formatted.take());
            state.role = Some(role);
        }
        drop(state);
        self.pages.changed.notify_all();
    }
}

/// Returns when a wait of `limit` ends.
fn deadline_after(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit).unwrap_or_else(|| now + LONGEST)
}

/// True for the error of an owner that another process has superseded by opening the area. Of an owner in another
/// process it is true for a formatted area, too: the client tries once more.
fn is_taken(error: &KvError) -> bool {
    match error {
        KvError::Superseded { by, .. } => by.is_some(),
        KvError::Owner { code, .. } => *code == "changed",
        _ => false,
    }
}

fn unanswered() -> KvError {
    KvError::Owner {
        code: "timeout",
        cause: "the owner of the page store did not answer in time".to_owned(),
        remedy: "look for a process that is stopped, or use a longer timeout".to_owned(),
    }
}
