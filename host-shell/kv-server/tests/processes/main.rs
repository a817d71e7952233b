//! Processes that share an area: owners and clients that are killed, peers that break the protocol.

mod failover;
mod peers;
mod rank;

use nvme_driver::error::Result;
use nvme_kv::{BlockMedium, ModelFingerprint, StoreOutcome};
use nvme_kv_server::{SharedPageStore, SharedRequest};
use nvme_store::{RangeClaim, Store, StoreOptions, StoreTransfer};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Bytes of a page in these tests: one block and a part of another.
const PAGE: usize = 5000;
/// Pages of an area: two superblocks, two checkpoints of two blocks and two logs of 16 blocks are beside them.
const SLOTS: u64 = 24;
const PAGES_AT: u64 = (2 + 2 * 2 + 2 * 16) * 4096;
const AREA_BYTES: u64 = PAGES_AT + SLOTS * 3 * 4096;
/// The longest that a process of a test may take to answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder with a file for an area and one for sockets, until it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("nvme-kv-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        let file = std::fs::File::create(folder.join("pages")).unwrap();
        file.set_len(AREA_BYTES).unwrap();
        Self(folder)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn request(folder: &Path, model: &str) -> SharedRequest {
    SharedRequest {
        device: folder.join("pages").to_str().unwrap().to_owned(),
        offset: 0,
        bytes: None,
        page_bytes: PAGE as u32,
        fingerprint: ModelFingerprint {
            model: model.to_owned(),
            block_tokens: 16,
            ..ModelFingerprint::default()
        },
        may_format: true,
        directory: Some(folder.join("sockets")),
        timeout: PATIENCE,
    }
}

/// Opens the area of a folder as this process's.
fn shared(request: SharedRequest, gate: Arc<Gate>) -> nvme_kv::Result<SharedPageStore<GatedFile>> {
    let device = request.device.clone();
    SharedPageStore::open(request, move || {
        let store = Store::open(&format!("file:{device}"), &StoreOptions::default())?;
        Ok(GatedFile {
            store,
            gate: Arc::clone(&gate),
        })
    })
}

/// The payload of the page `number`; lengths differ.
fn payload(number: u64) -> Vec<u8> {
    let length = PAGE - (number as usize * 37) % 4500;
    let seed = (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let byte = |at: u64| (seed.wrapping_add(at).wrapping_mul(0xA24B_AED4_963E_E407) >> 56) as u8;
    (0..length as u64).map(byte).collect()
}

fn store<M: BlockMedium>(pages: &SharedPageStore<M>, number: u64) -> nvme_kv::Result<StoreOutcome> {
    let key = pages.key(&number.to_le_bytes(), 0);
    pages.store_all(&[(key, &payload(number))]).remove(0)
}

/// Loads a page and compares it with what was stored; its length.
fn load<M: BlockMedium>(pages: &SharedPageStore<M>, number: u64) -> nvme_kv::Result<usize> {
    let mut page = vec![0xEE; PAGE];
    let key = pages.key(&number.to_le_bytes(), 0);
    let loaded = pages.load_all(&mut [(key, &mut page)]).remove(0);
    match &loaded {
        Ok(length) => assert!(
            page[..*length] == payload(number),
            "wrong bytes of {number}"
        ),
        Err(error) => assert!(page.iter().all(|byte| *byte == 0), "{error}"),
    }
    loaded
}

/// The kinds of accesses at which a gate can hold a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Read,
    Write,
    Flush,
    BeforeCommit,
    AfterCommit,
}

/// Holds accesses of one kind while it is closed.
#[derive(Default)]
struct Gate {
    closed: Mutex<Option<Stage>>,
    opened: Condvar,
}

impl Gate {
    fn set(&self, stage: Option<Stage>) {
        *self.closed.lock().unwrap() = stage;
        self.opened.notify_all();
    }

    fn pass(&self, stage: Stage) {
        let mut closed = self.closed.lock().unwrap();
        if *closed == Some(stage) {
            rank::say(&format!("held at {stage:?}"));
        }
        while *closed == Some(stage) {
            let waited = self.opened.wait_timeout(closed, PATIENCE).unwrap();
            assert!(!waited.1.timed_out(), "the gate stays closed");
            closed = waited.0;
        }
    }
}

/// A file whose accesses a test can hold.
struct GatedFile {
    store: Store,
    gate: Arc<Gate>,
}

impl BlockMedium for GatedFile {
    fn bytes(&self) -> u64 {
        self.store.len()
    }

    fn block_bytes(&self) -> u32 {
        self.store.block_bytes()
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.store.read_at(offset, data)
    }

    fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>> {
        match transfers.first() {
            Some(StoreTransfer::Write(..)) => self.gate.pass(Stage::Write),
            Some(StoreTransfer::Read(at, _)) if *at >= PAGES_AT => self.gate.pass(Stage::Read),
            _ => {}
        }
        self.store.transfer_all(transfers)
    }

    fn write_durable(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.gate.pass(Stage::BeforeCommit);
        self.store.write_at_fua(offset, data)?;
        self.gate.pass(Stage::AfterCommit);
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.gate.pass(Stage::Flush);
        self.store.flush()
    }

    fn claim(&self, offset: u64, bytes: u64) -> Result<Option<RangeClaim>> {
        self.store.claim(offset, bytes).map(Some)
    }
}
