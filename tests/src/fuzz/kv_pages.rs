//! Page stores are not trusted: whatever the blocks say, a page is what was stored, or it is missing.

use super::Input;
use nvme_kv::format::{StructureBlock, UNIT, seal};
use nvme_kv::{AreaRequest, BlockMedium, KvError, ModelFingerprint, PageStore, StoreOutcome};
use nvme_store::StoreTransfer;
use std::sync::{Mutex, OnceLock};

/// Pages of the store.
const PAGES: u8 = 4;
const PAGE_BYTES: usize = 4500;
/// Blocks of the area: superblocks, two halves of the journal, six slots.
const BLOCKS: usize = 2 + 2 * (2 + 16) + 6 * 3;
/// Number of blocks of the journal whose checksum the input can correct.
const JOURNAL_BLOCKS: usize = BLOCKS - 6 * 3;
/// Changes of one input.
const MOST_CHANGES: usize = 64;

/// Blocks in memory.
struct ImageBlocks(Mutex<Vec<u8>>);

impl BlockMedium for ImageBlocks {
    fn bytes(&self) -> u64 {
        (BLOCKS * UNIT as usize) as u64
    }

    fn block_bytes(&self) -> u32 {
        512
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> nvme_driver::Result<()> {
        let image = self.0.lock().expect("no thread panics with it");
        data.copy_from_slice(&image[offset as usize..][..data.len()]);
        Ok(())
    }

    fn transfer_all(&self, transfers: &mut [StoreTransfer<'_>]) -> Vec<nvme_driver::Result<()>> {
        let one = |transfer: &mut StoreTransfer<'_>| match transfer {
            StoreTransfer::Read(offset, data) => self.read_at(*offset, data),
            StoreTransfer::Write(offset, data) => self.write_durable(*offset, data),
        };
        transfers.iter_mut().map(one).collect()
    }

    fn write_durable(&self, offset: u64, data: &[u8]) -> nvme_driver::Result<()> {
        let mut image = self.0.lock().expect("no thread panics with it");
        image[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn flush(&self) -> nvme_driver::Result<()> {
        Ok(())
    }
}

fn request() -> AreaRequest {
    AreaRequest {
        offset: 0,
        bytes: (BLOCKS * UNIT as usize) as u64,
        page_bytes: PAGE_BYTES as u32,
        fingerprint: ModelFingerprint {
            model: "fuzzed".to_owned(),
            ..ModelFingerprint::default()
        },
    }
}

fn payload(number: u8) -> Vec<u8> {
    vec![number + 1; PAGE_BYTES - usize::from(number) * 300]
}

/// Returns a store with pages in a checkpoint and in the log, one of which was removed.
fn image() -> &'static [u8] {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let blocks = ImageBlocks(Mutex::new(vec![0; BLOCKS * UNIT as usize]));
        let store = PageStore::format(blocks, &request()).expect("the area has room");
        for number in 0..PAGES {
            let stored = store.store(store.key(&[number], 0), &payload(number));
            assert_eq!(stored.ok(), Some(StoreOutcome::Stored));
            if number == 1 {
                assert!(store.checkpoint().is_ok());
            }
        }
        assert_eq!(store.remove(&[store.key(&[0], 0)]).ok(), Some(1));
        let image = store.medium().0.lock().expect("no thread panics with it");
        image.clone()
    })
}

/// The bytes are changes of the image: the number of a block, a byte of choices, an offset in the block, and up to 63
/// bytes that are combined with the block's by exclusive or. Bit 0 of the choices corrects the checksum of a block of
/// the journal; bit 1 sets the block to zero first.
pub fn kv_pages(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut image = image().to_vec();
    for _ in 0..MOST_CHANGES {
        if input.is_empty() {
            break;
        }
        let number = usize::from(input.byte()) % BLOCKS;
        let choice = input.byte();
        let at = usize::from(input.half()) % UNIT as usize;
        let length = usize::from(input.byte()) % 64;
        let change = input.take(length);
        let (blocks, _) = image.as_chunks_mut::<{ UNIT as usize }>();
        let block: &mut StructureBlock = &mut blocks[number];
        if choice & 2 != 0 {
            block.fill(0);
        }
        for (byte, change) in block[at..].iter_mut().zip(change) {
            *byte ^= change;
        }
        if choice & 1 != 0 && number < JOURNAL_BLOCKS {
            seal(block);
        }
    }
    match PageStore::open(ImageBlocks(Mutex::new(image)), &request()) {
        Ok(store) => judge(store),
        Err(error) => {
            assert!(!error.to_string().is_empty() && !error.remedy().is_empty());
            assert!(!error.is_miss() && !matches!(error, KvError::Drive { .. }));
        }
    }
}

/// Loads the pages that are there, stores the missing ones, and checks that they are found after another opening.
fn judge(store: PageStore<ImageBlocks>) {
    let mut page = vec![0xEE; PAGE_BYTES];
    for number in 0..PAGES {
        let key = store.key(&[number], 0);
        match store.load(key, &mut page) {
            Ok(length) => assert_eq!(page[..length], payload(number)),
            Err(error) => {
                assert!(error.is_miss(), "{error}");
                assert!(page.iter().all(|byte| *byte == 0));
                assert!(matches!(
                    store.load(key, &mut page),
                    Err(KvError::Missing { .. })
                ));
                match store.store(key, &payload(number)) {
                    Ok(outcome) => assert_eq!(outcome, StoreOutcome::Stored),
                    // The number of the opening is the last one.
                    Err(error) => assert!(!error.is_miss()),
                }
            }
        }
    }
    let found = (0..PAGES).filter(|number| store.contains(&store.key(&[*number], 0)));
    let found: Vec<u8> = found.collect();
    let image = store
        .medium()
        .0
        .lock()
        .expect("no thread panics with it")
        .clone();
    drop(store);
    if let Ok(store) = PageStore::open(ImageBlocks(Mutex::new(image)), &request()) {
        for number in found {
            let loaded = store.load(store.key(&[number], 0), &mut page);
            assert_eq!(
                loaded.map_err(|error| error.to_string()),
                Ok(payload(number).len())
            );
            assert_eq!(page[..payload(number).len()], payload(number));
        }
    }
}
