//! Measures opening a store of a million pages: `cargo run --release -p nvme-kv --example opening -- FILE`.
//!
//! The file is made, sparse, and removed. Payloads are not written, so that it stays small: opening reads none.

use nvme_driver::error::Result;
use nvme_kv::{AreaRequest, BlockMedium, ModelFingerprint, PageStore};
use nvme_store::{Store, StoreOptions, StoreTransfer};
use std::time::Instant;

const PAGES: u64 = 1_000_000;
/// Bytes of a slot of the smallest page, and room for the journal.
const AREA_BYTES: u64 = PAGES * 8192 + (300 << 20);

/// A file with a written journal and empty slots.
struct JournalFile {
    store: Store,
    journal_bytes: u64,
}

impl BlockMedium for JournalFile {
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
        let one = |transfer: &mut StoreTransfer<'_>| match transfer {
            StoreTransfer::Read(offset, data) => self.store.read_at(*offset, data),
            StoreTransfer::Write(offset, data) if *offset < self.journal_bytes => {
                self.store.write_at(*offset, data)
            }
            StoreTransfer::Write(..) => Ok(()),
        };
        transfers.iter_mut().map(one).collect()
    }

    fn write_durable(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.store.write_at_fua(offset, data)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args()
        .nth(1)
        .ok_or("name a file that may be made")?;
    std::fs::File::create_new(&path)?.set_len(AREA_BYTES)?;
    let measured = measure(&path);
    std::fs::remove_file(&path)?;
    measured
}

fn measure(path: &str) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let open = || Store::open(&format!("file:{path}"), &StoreOptions::default());
    let request = AreaRequest {
        offset: 0,
        bytes: AREA_BYTES,
        page_bytes: 4096,
        fingerprint: ModelFingerprint::default(),
    };
    let file = JournalFile {
        store: open()?,
        journal_bytes: nvme_kv::AreaLayout::fit(AREA_BYTES, 4096)?.slot_at(0),
    };
    let pages = PageStore::format(file, &request)?;
    let numbers: Vec<u64> = (0..PAGES).collect();
    for numbers in numbers.chunks(1000) {
        let keys = numbers
            .iter()
            .map(|number| pages.key(&number.to_le_bytes(), 0));
        let stored = pages.store_all(&keys.map(|key| (key, &b"x"[..])).collect::<Vec<_>>());
        stored.into_iter().collect::<nvme_kv::Result<Vec<_>>>()?;
    }
    drop(pages);
    for what in ["a log", "a checkpoint"] {
        let started = Instant::now();
        let pages = PageStore::open(open()?, &request)?;
        let took = started.elapsed();
        let report = pages.recovery();
        println!(
            "{} pages, {} blocks of the log: opened in {} ms (last was written: {what})",
            report.pages,
            report.log_blocks,
            took.as_millis()
        );
        pages.checkpoint()?;
    }
    Ok(())
}
