//! The same over a real driver: a simulated drive whose power is cut, and one that loses commands.

use crate::{bytes_for, key, load, payload, request};
use nvme_driver::error::Result;
use nvme_kv::{BlockMedium, KvError, PageStore, StoreOutcome};
use nvme_store::{Store, StoreOptions, StoreTransfer};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// A drive whose power is cut after some writes and flushes.
struct CutDrive {
    store: Store,
    cut: Box<dyn Fn() + Send + Sync>,
    left: AtomicI64,
}

impl CutDrive {
    /// Counts a step; the one behind the last of them cuts the power.
    fn step(&self) -> Result<()> {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 0 {
            (self.cut)();
        }
        self.check_power()
    }

    fn check_power(&self) -> Result<()> {
        match self.left.load(Ordering::SeqCst) < 0 {
            true => Err(nvme_driver::Error::Gone {
                cause: "the power is off".to_owned(),
            }),
            false => Ok(()),
        }
    }
}

impl BlockMedium for CutDrive {
    fn bytes(&self) -> u64 {
        self.store.len()
    }

    fn block_bytes(&self) -> u32 {
        self.store.block_bytes()
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        self.check_power()
            .and_then(|()| self.store.read_at(offset, data))
    }

    fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<Result<()>> {
        let one = |transfer: &mut StoreTransfer<'_>| match transfer {
            StoreTransfer::Read(offset, data) => self.read_at(*offset, data),
            StoreTransfer::Write(offset, data) => self
                .step()
                .and_then(|()| self.store.write_at(*offset, data)),
        };
        transfers.iter_mut().map(one).collect()
    }

    fn write_durable(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.step()
            .and_then(|()| self.store.write_at_fua(offset, data))
    }

    fn flush(&self) -> Result<()> {
        self.step().and_then(|()| self.store.flush())
    }
}

/// One cut; tests/pages/crash.rs has every one, of a disk in memory. A driver whose drive was reset waits for each
/// queue, so that there is one.
#[test]
fn a_power_cut_of_a_simulated_drive_loses_nothing_that_was_committed() {
    let options = StoreOptions {
        queues: 1,
        ..StoreOptions::default()
    };
    for cut in [23, 1000] {
        let bytes = bytes_for(6);
        let device = format!("mem?size={}KiB&block=512", bytes.div_ceil(1024));
        let (device, controller) = nvme_driver::sim::embed(&device).unwrap();
        let open = || Store::over(Arc::clone(&device), &options).unwrap();
        let drive = CutDrive {
            store: open(),
            cut: Box::new(move || controller.power_cut()),
            left: AtomicI64::new(cut),
        };
        let pages = PageStore::format(drive, &request(bytes)).unwrap();
        // Some of them make room for others.
        let mut committed: Vec<u64> = (0..9).collect();
        committed.retain(|number| {
            let stored = pages.store(key(&pages, *number), &payload(*number, 0));
            stored.is_ok_and(|one| one == StoreOutcome::Stored)
        });
        assert_eq!(committed.len() == 9, cut == 1000);
        committed.retain(|number| pages.contains(&key(&pages, *number)));
        drop(pages);
        let pages = PageStore::open(open(), &request(bytes)).unwrap();
        for number in 0..9 {
            match load(&pages, number) {
                Ok(bytes) => assert_eq!(bytes, payload(number, 0), "cut {cut}"),
                Err(KvError::Missing { .. }) => {
                    assert!(!committed.contains(&number), "cut {cut}: {number}");
                }
                Err(error) => panic!("cut {cut}: {error}"),
            }
        }
    }
}

#[test]
fn a_command_that_fails_is_the_error_of_its_page_alone() {
    let bytes = bytes_for(8);
    let name = format!("sim:mem?size={bytes}&block=512&fault=status:0x281@op=read,nth=40");
    let drive = Store::open(&name, &StoreOptions::default()).unwrap();
    let pages = PageStore::format(drive, &request(bytes)).unwrap();
    for number in 0..8 {
        let stored = pages.store(key(&pages, number), &payload(number, 0));
        assert_eq!(stored.unwrap(), StoreOutcome::Stored);
    }
    let mut lost = 0;
    for number in (0..8).cycle().take(40) {
        match load(&pages, number) {
            Ok(bytes) => assert_eq!(bytes, payload(number, 0)),
            Err(KvError::Lost { .. }) => lost += 1,
            Err(error) => assert!(
                lost > 0 && matches!(error, KvError::Missing { .. }),
                "{error}"
            ),
        }
    }
    assert_eq!((lost, pages.stats().lost), (1, 1));
}

#[test]
fn a_file_holds_a_store_too() {
    let bytes = bytes_for(4);
    let path = std::env::temp_dir().join(format!("nvme-kv-{}", std::process::id()));
    std::fs::File::create(&path)
        .unwrap()
        .set_len(bytes)
        .unwrap();
    let open = || Store::open(&path.display().to_string(), &StoreOptions::default()).unwrap();
    let (pages, formatted) = PageStore::open_or_format(open(), &request(bytes)).unwrap();
    assert!(matches!(formatted, Some(KvError::Blank { .. })));
    pages.store(key(&pages, 1), &payload(1, 0)).unwrap();
    drop(pages);
    let (pages, formatted) = PageStore::open_or_format(open(), &request(bytes)).unwrap();
    assert!(formatted.is_none());
    assert_eq!(load(&pages, 1).unwrap(), payload(1, 0));
    std::fs::remove_file(&path).unwrap();
}
