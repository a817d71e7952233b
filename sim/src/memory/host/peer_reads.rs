//! Tests of reads into memory that only its owner copies to: the copies are deferred and made together,
//! and the commands complete after them.

use super::*;
use crate::config::settings::{Config, NamespaceConfig};
use crate::controller::Controller;
use crate::engine::batch::MAX_DEFERRED;
use crate::medium::store::{BlockStore, MemoryStore};
use crate::memory::PeerCopy;
use crate::testing::judge;
use nvme_auditor::Rule;
use nvme_spec::admin::{self, QueueParams};
use nvme_spec::register::{Cc, offset};
use nvme_spec::{Cid, Iova, Lba, Nsid, Qid, Sqe, Status, nvm};

const ENTRIES: u32 = 64;
const PEER: u64 = 0x10_0000;
const BLOCK: usize = 512;
const CQ: usize = (0x2000 + 0x1000) / 8;

/// A peer that records the number of copies in each call, and the number of completions posted
/// before it.
#[derive(Debug)]
struct RecordingPeer {
    words: Arc<[AtomicU64]>,
    bytes: Mutex<Vec<u8>>,
    calls: Mutex<Vec<(usize, usize)>>,
    lost: AtomicBool,
}

impl PeerAccess for RecordingPeer {
    unsafe fn write(&self, address: u64, from: *const u8, len: usize) {
        // SAFETY: the caller's range.
        let from = unsafe { std::slice::from_raw_parts(from, len) };
        self.bytes.lock().unwrap()[address as usize..][..len].copy_from_slice(from);
    }

    unsafe fn write_all(&self, copies: &[PeerCopy]) {
        self.calls
            .lock()
            .unwrap()
            .push((copies.len(), posted(&self.words).len()));
        for copy in copies {
            // SAFETY: the caller's ranges.
            unsafe { self.write(copy.address, copy.from, copy.len) };
        }
    }

    unsafe fn read(&self, _: u64, _: *mut u8, _: usize) {
        unreachable!("these commands only read blocks");
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

/// Returns the statuses in the completion queue of pair 1, in its first pass.
fn posted(words: &[AtomicU64]) -> Vec<Status> {
    let upper = words[CQ..].iter().skip(1).step_by(2);
    let upper = upper.map(|word| word.load(Ordering::Acquire));
    let posted = upper.take_while(|upper| upper >> 48 & 1 == 1);
    posted.map(|upper| Status((upper >> 49) as u16)).collect()
}

/// Starts a controller with queue pair 1, whose blocks hold their numbers, and with a peer's memory.
fn start() -> (Controller<HostMemory>, Arc<[AtomicU64]>, Arc<RecordingPeer>) {
    let words: Arc<[AtomicU64]> = (0..1 << 12).map(|_| AtomicU64::new(0)).collect();
    let owner = Arc::new(RecordingPeer {
        words: words.clone(),
        bytes: Mutex::new(vec![0xEE; 64 * BLOCK]),
        calls: Mutex::default(),
        lost: AtomicBool::new(false),
    });
    let memory = HostMemory::new();
    memory.share(0, words.clone()).unwrap();
    memory
        .map_peer(PEER, 0, (64 * BLOCK) as u64, owner.clone())
        .unwrap();
    let store = MemoryStore::new((256 * BLOCK) as u64).unwrap();
    for block in 0..256usize {
        let bytes = [block as u8; BLOCK];
        store.write_at((block * BLOCK) as u64, &bytes).unwrap();
    }
    let mut config = Config::empty();
    config.audit = true;
    config
        .namespaces
        .push(NamespaceConfig::new(512, Box::new(store)));
    let controller = Controller::new(config, memory).unwrap();
    controller.write32(offset::AQA, 7 << 16 | 7);
    controller.write64(offset::ASQ, 0);
    controller.write64(offset::ACQ, 0x1000);
    let mut cc = Cc(0);
    cc.set_iosqes(6);
    cc.set_iocqes(4);
    cc.set_en(true);
    controller.write32(offset::CC, cc.0);
    let at = |iova| QueueParams {
        qid: Qid(1),
        entries: ENTRIES,
        iova: Iova(iova),
    };
    let create = [
        admin::create_io_cq(at(0x3000), None),
        admin::create_io_sq(at(0x2000), Qid(1)),
    ];
    submit(&controller, &words, 0, &create);
    (controller, words, owner)
}

/// Puts entries at the start of a ring and publishes them with one doorbell write.
fn submit(controller: &Controller<HostMemory>, words: &[AtomicU64], qid: u16, sqes: &[Sqe]) {
    let ring = usize::from(qid) * 0x2000 / 8;
    let named = (0..).zip(sqes).map(|(cid, sqe)| sqe.with_cid(Cid(cid)));
    let flat = named.flat_map(|sqe| sqe.to_words());
    for (word, value) in words[ring..].iter().zip(flat) {
        word.store(value, Ordering::Relaxed);
    }
    let tail = controller.doorbells().sq_tail(qid);
    tail.store(sqes.len() as u32, Ordering::Release);
    controller.step(0);
}

fn read(lba: u64, to: u64) -> Sqe {
    nvm::read(Nsid(1), Lba(lba), 1).with_prps(PEER + to * BLOCK as u64, 0)
}

#[test]
fn reads_into_a_peer_are_copied_together_and_completed_afterwards() {
    let (controller, words, owner) = start();
    // Every other block, so that no two copies are adjacent; a flush and an invalid command between
    // them.
    let count = MAX_DEFERRED as u64 + 5;
    let mut sqes: Vec<Sqe> = (0..count).map(|i| read(2 * i, i)).collect();
    sqes.insert(3, nvm::flush(Nsid(1)));
    sqes.insert(4, read(1 << 40, 0));
    submit(&controller, &words, 1, &sqes);
    // The flush and the invalid command follow the first copy, so their completions wait for it.
    assert_eq!(
        *owner.calls.lock().unwrap(),
        [(MAX_DEFERRED, 0), (5, MAX_DEFERRED + 2)]
    );
    let posted = posted(&words);
    assert_eq!(posted.len(), sqes.len());
    for (index, status) in posted.into_iter().enumerate() {
        assert_eq!(status.is_success(), index != 4, "{index}: {status:?}");
    }
    let bytes = owner.bytes.lock().unwrap();
    for i in 0..count as usize {
        assert!(
            bytes[i * BLOCK..][..BLOCK]
                .iter()
                .all(|byte| *byte == 2 * i as u8)
        );
    }
    assert!(
        bytes[count as usize * BLOCK..]
            .iter()
            .all(|byte| *byte == 0xEE)
    );
    // The invalid command.
    judge(&controller.findings(), &[Rule::LbaRange], &[]);
}

#[test]
fn what_lies_side_by_side_is_one_copy() {
    let (controller, words, owner) = start();
    let mut sqes: Vec<Sqe> = (0..8).map(|i| read(10 + i, i)).collect();
    sqes.push(read(99, 20));
    submit(&controller, &words, 1, &sqes);
    assert_eq!(*owner.calls.lock().unwrap(), [(2, 0)]);
    assert_eq!(owner.bytes.lock().unwrap()[7 * BLOCK], 17);
    assert_eq!(owner.bytes.lock().unwrap()[20 * BLOCK], 99);
    judge(&controller.findings(), &[], &[]);
}

#[test]
fn a_peer_that_is_lost_fails_what_waits_for_it() {
    let (controller, words, owner) = start();
    // A peer that is lost before a batch is not mapped in it at all; this one is lost by the first
    // copy.
    let lost = LostAtFirst(owner.clone());
    let memory = controller.memory().clone();
    memory.unmap(PEER, (64 * BLOCK) as u64);
    memory
        .map_peer(PEER, 0, (64 * BLOCK) as u64, Arc::new(lost))
        .unwrap();
    submit(
        &controller,
        &words,
        1,
        &[read(1, 0), nvm::flush(Nsid(1)), read(5, 4)],
    );
    let error = Status::DATA_TRANSFER_ERROR;
    assert_eq!(posted(&words), [error, error, error]);
    assert_eq!(controller.queue_stats(1).errors, 3);
    judge(&controller.findings(), &[], &[]);
}

#[derive(Debug)]
struct LostAtFirst(Arc<RecordingPeer>);

impl PeerAccess for LostAtFirst {
    unsafe fn write(&self, _: u64, _: *const u8, _: usize) {
        self.0.lost.store(true, Ordering::Relaxed);
    }

    unsafe fn read(&self, _: u64, _: *mut u8, _: usize) {}

    fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}
