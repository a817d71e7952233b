//! Tests of `host`: mapping, unmapping under a batch, memory of a peer.

use super::*;
use crate::memory::Dma;

#[test]
fn unmapped_addresses_fault_and_overlaps_are_refused() {
    let mut page = vec![0u64; 512];
    let memory = HostMemory::new();
    let ptr = page.as_mut_ptr().cast::<u8>();
    // SAFETY: `page` outlives `memory`.
    let map = |iova, len| unsafe { memory.map(iova, ptr, len) };
    assert_eq!(map(0x1000, 4096), Ok(()));
    assert_eq!(map(0x1FF8, 16), Err(MapError::Overlap));
    assert_eq!(map(0x0FF8, 16), Err(MapError::Overlap));
    assert_eq!(map(u64::MAX - 7, 16), Err(MapError::BadRange));
    assert_eq!(map(0x3001, 16), Err(MapError::Misaligned));
    {
        let guard = memory.guard();
        let dma = Dma::new(&guard);
        assert!(dma.write(0x1FFC, &[1, 2, 3, 4]).is_ok());
        assert_eq!(dma.write(0x1FFC, &[0; 8]).map_err(|e| e.0), Err(0x2000));
        assert_eq!(dma.check(0xFFF, 1).map_err(|e| e.0), Err(0xFFF));
    }
    assert_eq!(memory.unmap(0x1000, 4095), 0);
    assert_eq!(memory.unmap(0x1000, 4096), 1);
    assert!(Dma::new(&memory.guard()).check(0x1000, 1).is_err());
}

#[test]
fn unmap_waits_for_the_batch_in_progress() {
    let mut page = vec![7u64; 512];
    let memory = HostMemory::new();
    // SAFETY: `page` outlives `memory`.
    unsafe { memory.map(0, page.as_mut_ptr().cast(), 4096) }.unwrap();
    let gone = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let guard = memory.guard();
        scope.spawn(|| {
            assert_eq!(memory.unmap(0, 4096), 1);
            gone.store(true, Ordering::Release);
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!gone.load(Ordering::Acquire));
        assert_eq!(Dma::new(&guard).words::<1>(8), Ok([7]));
        drop(guard);
    });
    assert!(gone.load(Ordering::Acquire));
}

/// Peer memory that counts its copies and can be made to fail.
#[derive(Debug)]
struct Fake {
    bytes: Mutex<Vec<u8>>,
    copies: AtomicUsize,
    lost: std::sync::atomic::AtomicBool,
}

impl PeerAccess for Fake {
    unsafe fn write(&self, address: u64, from: *const u8, len: usize) {
        // SAFETY: the caller's range.
        let from = unsafe { std::slice::from_raw_parts(from, len) };
        let at = (address - 0x5000) as usize;
        self.bytes.lock().unwrap()[at..at + len].copy_from_slice(from);
        self.copies.fetch_add(1, Ordering::Relaxed);
    }

    unsafe fn read(&self, address: u64, into: *mut u8, len: usize) {
        // SAFETY: the caller's range.
        let into = unsafe { std::slice::from_raw_parts_mut(into, len) };
        let at = (address - 0x5000) as usize;
        into.copy_from_slice(&self.bytes.lock().unwrap()[at..at + len]);
        self.copies.fetch_add(1, Ordering::Relaxed);
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

#[test]
fn a_peers_memory_is_reached_by_copies_alone() {
    let fake = Arc::new(Fake {
        bytes: Mutex::new(vec![0; 8192]),
        copies: AtomicUsize::new(0),
        lost: false.into(),
    });
    let memory = HostMemory::new();
    memory.map_peer(0x9000, 0x5000, 8192, fake.clone()).unwrap();
    let guard = memory.guard();
    let dma = Dma::new(&guard);
    dma.write(0x9003, &[1, 2, 3]).unwrap();
    let mut back = [0; 5];
    dma.read(0x9002, &mut back).unwrap();
    assert_eq!(back, [0, 1, 2, 3, 0]);
    assert_eq!(fake.copies.load(Ordering::Relaxed), 2);
    let span = dma.span(0x9000, 5000).unwrap();
    assert!(span.word(0).is_none() && span.words::<1>(0).is_none());
    assert!(span.as_words().is_none() && dma.words::<1>(0x9000).is_err());
    let other = dma.span(0x9000 + 5000 - 4997, 4997).unwrap();
    span.copy_to(other);
    assert_eq!(fake.bytes.lock().unwrap()[3 + 3..][..3], [1, 2, 3]);
    fake.lost.store(true, Ordering::Relaxed);
    assert!(span.is_lost() && dma.span(0x9000, 1).unwrap().is_lost());
    assert!(Dma::new(&guard).check(0x9000, 1).is_err());
}
