//! Pins of a session, of owners that answer as the tests say.

use super::OwnerSession;
use crate::message::{
    AreaHello, MOST_KEYS, OwnerWelcome, PacketHeader, PageReply, PageRequest, decode, encode,
};
use crate::socket::{ListeningSocket, MessageSocket};
use crate::window::PageWindow;
use nvme_driver::lock::lock;
use nvme_kv::PageKey;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const EPOCH: u32 = 7;
/// The longest wait for what a test expects.
const PATIENCE: Duration = Duration::from_secs(60);

/// An owner that finds and pins every page, and answers no other request.
struct PinningOwner {
    path: PathBuf,
    is_stopping: AtomicBool,
    /// Pins that each connection has made.
    pinned: Mutex<Vec<usize>>,
}

impl PinningOwner {
    /// Runs `act` with an owner and a session of it.
    fn with(act: impl FnOnce(&Self, Arc<OwnerSession>)) {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("nvme-kv-pins-{}-{number}", std::process::id());
        let owner = Self {
            path: std::env::temp_dir().join(name),
            is_stopping: AtomicBool::new(false),
            pinned: Mutex::default(),
        };
        let socket = ListeningSocket::bind(&owner.path).unwrap();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !owner.is_stopping.load(Ordering::SeqCst) {
                    let soon = Instant::now() + Duration::from_millis(20);
                    if let Some(client) = socket.accept(soon) {
                        let mut pinned = lock(&owner.pinned);
                        let number = pinned.len();
                        pinned.push(0);
                        let owner = &owner;
                        threads.spawn(move || owner.serve(number, &client));
                    }
                }
            });
            let hello = AreaHello {
                bytes: None,
                page_bytes: 4096,
                fingerprint: Vec::new(),
            };
            let session = OwnerSession::open(&owner.path, &hello, Instant::now() + PATIENCE);
            let acted = catch_unwind(AssertUnwindSafe(|| act(&owner, Arc::new(session.unwrap()))));
            owner.is_stopping.store(true, Ordering::SeqCst);
            acted.unwrap_or_else(|panic| resume_unwind(panic));
        });
    }

    fn serve(&self, number: usize, client: &MessageSocket) {
        let deadline = Instant::now() + PATIENCE;
        let window = PageWindow::new(4096).unwrap();
        while let Ok(message) = client.receive(deadline) {
            let (asked, request) = decode::<PageRequest>(&message.bytes).unwrap();
            let header = PacketHeader {
                epoch: EPOCH,
                sequence: asked.sequence,
            };
            let (reply, file) = match request {
                PageRequest::Hello(_) => {
                    let welcome = OwnerWelcome {
                        epoch: EPOCH,
                        window_pages: window.pages() as u32,
                        area_bytes: 1 << 20,
                        page_bytes: 4096,
                        slots: 64,
                        log_blocks: 16,
                        recovered: (0, 0, 0),
                        fell_back: false,
                    };
                    (PageReply::Welcome(welcome), Some(window.fd()))
                }
                PageRequest::Pin(keys) => {
                    let made = &mut lock(&self.pinned)[number];
                    let (pin, pages) = (*made as u64, keys.len() as u32);
                    *made += 1;
                    (PageReply::Pinned { pin, pages }, None)
                }
                PageRequest::Unpin(_) => (PageReply::Done, None),
                _ => continue,
            };
            let bytes = encode(header, &reply);
            if client.send(&bytes, file, deadline).is_err() {
                return;
            }
        }
    }
}

fn keys(count: usize) -> Vec<PageKey> {
    (0..count as u128)
        .map(|number| PageKey::of_bytes(number.to_le_bytes()))
        .collect()
}

/// A lookup that gets no answer in time breaks the connection whose pins they are.
#[test]
fn pins_whose_connection_has_ended_are_counted_no_more() {
    PinningOwner::with(|owner, session| {
        let pins = session.pin_prefix(&keys(5), Instant::now() + PATIENCE);
        let pins = pins.unwrap();
        assert_eq!(pins.len(), 5);
        assert!(session.lengths(&keys(1), Instant::now()).is_err());
        assert_eq!(pins.len(), 0);
        let again = session.pin_prefix(&keys(3), Instant::now() + PATIENCE);
        assert_eq!((pins.len(), again.unwrap().len()), (0, 3));
        assert_eq!(*lock(&owner.pinned), [1, 1]);
    });
}

/// Another thread breaks the connection at the first moment at which no request is under way.
#[test]
fn pins_of_many_keys_are_those_of_one_connection() {
    const CHUNKS: usize = 500;
    PinningOwner::with(|owner, session| {
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !has_ended.load(Ordering::SeqCst) && lock(&owner.pinned)[0] == 0 {
                    std::hint::spin_loop();
                }
                while !has_ended.load(Ordering::SeqCst) {
                    if let Ok(mut control) = session.control.try_lock() {
                        *control = None;
                        return;
                    }
                }
            });
            let pins = session.pin_prefix(&keys(CHUNKS * MOST_KEYS), Instant::now() + PATIENCE);
            has_ended.store(true, Ordering::SeqCst);
            drop(pins.unwrap());
        });
        assert_eq!(*lock(&owner.pinned), [CHUNKS]);
    });
}

/// As the pins of an owner, which keep neither the area nor its device.
#[test]
fn pins_end_with_their_session() {
    PinningOwner::with(|_, session| {
        let pins = session.pin_prefix(&keys(2), Instant::now() + PATIENCE);
        let pins = pins.unwrap();
        drop(session);
        assert_eq!(pins.len(), 0);
    });
}
