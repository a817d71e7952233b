//! Pages of a page store between a simulated drive and memory of the stand-in's GPU: bytes, outcomes and counts are those
//! of the CPU, whatever is on the drive. Each case runs in a process of its own.
// UNSAFETY: loads and copies name GPU memory by address.
#![allow(unsafe_code)]

mod stand_in;

use nvme_host::cuda::{
    DeviceMemory, HostCopy, MemoryUse, PageEnd, PageExtent, PageMover, PageRead, PageWrite, Stream,
};
use nvme_host::store::{GpuOptions, status};
use nvme_host::{Error, Store, StoreOptions};
use nvme_kv::format::payload_checksum;
use nvme_kv::{
    AreaRequest, ArrivedPage, KvError, LoadPlan, LoadedPage, ModelFingerprint, PageFault, PageKey,
    PagePlace, PageStore, PayloadFacts, StoreOutcome,
};
use stand_in::{in_process, is_over_the_stand_in};
use std::sync::Arc;
use std::time::Duration;

const WAIT: Duration = Duration::from_secs(120);
const PAGE: usize = 9000;
const BLOCK: u64 = 4096;
/// Bytes of a slot: header and payload in whole blocks.
const SLOT: u64 = BLOCK + 3 * BLOCK;

type Pages = Arc<PageStore<Arc<Store>>>;

struct Fixture {
    store: Arc<Store>,
    pages: Pages,
    mover: PageMover,
    stream: Stream,
    memory: DeviceMemory,
}

/// A page in memory of the GPU: its pieces, as offsets and lengths.
type Pieces = Vec<(usize, usize)>;

impl Fixture {
    fn open(faults: &str) -> Self {
        let options = StoreOptions {
            timeout: Duration::from_secs(60),
            gpu: Some(GpuOptions::default()),
            ..StoreOptions::default()
        };
        let device = format!("sim:mem?size=16MiB&queues=32{faults}");
        let store = Arc::new(Store::open(&device, &options).unwrap());
        store.check_pages_on_gpu().unwrap();
        let request = AreaRequest {
            offset: 8192,
            bytes: 12 << 20,
            page_bytes: PAGE as u32,
            fingerprint: ModelFingerprint::default(),
        };
        let pages = PageStore::format(Arc::clone(&store), &request).unwrap();
        let gpu = store.gpu().unwrap();
        let memory = DeviceMemory::new(gpu, 4 << 20).unwrap();
        memory.fill(0xAA).unwrap();
        Self {
            pages: Arc::new(pages),
            mover: PageMover::new(gpu).unwrap(),
            stream: Stream::new(gpu).unwrap(),
            memory,
            store,
        }
    }

    fn extents(&self, pages: &[Pieces]) -> Vec<Vec<PageExtent>> {
        let extent = |&(at, bytes): &(usize, usize)| PageExtent {
            address: self.memory.address() + at as u64,
            bytes: bytes as u64,
        };
        pages
            .iter()
            .map(|pieces| pieces.iter().map(extent).collect())
            .collect()
    }

    fn put(&self, pieces: &Pieces, data: &[u8]) {
        let mut done = 0;
        for (at, bytes) in pieces {
            self.memory.upload(*at, &data[done..done + bytes]).unwrap();
            done += bytes;
        }
    }

    fn get(&self, pieces: &Pieces) -> Vec<u8> {
        let mut data = Vec::new();
        for (at, bytes) in pieces {
            let mut some = vec![0; *bytes];
            self.memory.download(*at, &mut some).unwrap();
            data.extend(some);
        }
        data
    }

    /// Stores pages by the GPU.
    fn store_all(&self, keys: &[PageKey], pages: &[Pieces]) -> Vec<nvme_kv::Result<StoreOutcome>> {
        let extents = self.extents(pages);
        let all: Vec<&[PageExtent]> = extents.iter().map(Vec::as_slice).collect();
        // SAFETY: the memory of the fixture.
        let staged = unsafe { self.mover.stage(&all, self.stream.handle()) }.unwrap();
        let checksums = staged.wait(WAIT).unwrap();
        let facts: Vec<PayloadFacts> = keys
            .iter()
            .zip(pages)
            .zip(checksums)
            .map(|((key, pieces), checksum)| PayloadFacts {
                key: *key,
                length: pieces.iter().map(|(_, bytes)| bytes).sum(),
                checksum,
            })
            .collect();
        let plan = self.pages.plan_store(&facts);
        let places = plan.places();
        let write = |place: &PagePlace| PageWrite {
            page: place.number,
            offset: place.offset,
        };
        let writes: Vec<PageWrite> = places.iter().map(write).collect();
        let header_of = |page: usize| places[page].header.to_block();
        let written = self
            .store
            .write_pages_on_gpu(&self.mover, &staged, &writes, header_of)
            .unwrap();
        let ends = written.wait(WAIT).unwrap().into_iter();
        plan.finish(ends.map(|code| match code {
            0 => Ok(()),
            code => Err(status::error_of(code, "a write of the test")),
        }))
    }

    /// Loads pages by the GPU.
    fn load_all(&self, keys: &[PageKey], pages: &[Pieces]) -> Vec<nvme_kv::Result<LoadedPage>> {
        let extents = self.extents(pages);
        let room = |pieces: &Pieces| pieces.iter().map(|(_, bytes)| bytes).sum();
        let wanted = keys.iter().copied().zip(pages.iter().map(room));
        let plan = LoadPlan::new(Arc::clone(&self.pages), wanted);
        let places = plan.places();
        let reads: Vec<PageRead<'_>> = places
            .iter()
            .map(|place| PageRead {
                offset: place.offset,
                bytes: place.length,
                checksum: place.checksum,
                pieces: &extents[place.number],
            })
            .collect();
        let stream = self.stream.handle();
        let header_of = |page: usize| payload_checksum(&places[page].header.to_block());
        // SAFETY: the memory of the fixture.
        let loaded = unsafe {
            self.store
                .load_pages_on_gpu(&self.mover, &reads, header_of, stream)
        }
        .unwrap();
        let ends = loaded.wait(WAIT).unwrap();
        assert_eq!(ends.len(), places.len());
        plan.finish(ends.into_iter().map(|end| match end {
            PageEnd::Right { checksum } => ArrivedPage::Compared { checksum },
            PageEnd::Wrong { header, checksum } => ArrivedPage::Read { header, checksum },
            PageEnd::Failed(code) => ArrivedPage::Failed(status::error_of(code, "a read")),
        }))
    }

    fn keys(&self, count: u32) -> Vec<PageKey> {
        (0..count)
            .map(|part| self.pages.key(b"block", part))
            .collect()
    }

    fn slot(&self, slot: u32) -> u64 {
        8192 + self.pages.layout().slot_at(slot)
    }
}

fn content(number: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| (number * 31 + at * 7 + (at >> 8)) as u8)
        .collect()
}

/// Pages one behind the other, `room` bytes each.
fn in_a_row(count: usize, room: usize) -> Vec<Pieces> {
    (0..count).map(|page| vec![(page * room, room)]).collect()
}

fn stored(outcomes: &[nvme_kv::Result<StoreOutcome>]) -> bool {
    outcomes
        .iter()
        .all(|one| matches!(one, Ok(StoreOutcome::Stored)))
}

#[test]
fn pages_stored_one_way_are_loaded_the_other_way() {
    if !is_over_the_stand_in() {
        return in_process("pages_stored_one_way_are_loaded_the_other_way");
    }
    let gpu = Fixture::open("");
    let keys = gpu.keys(8);
    let length = |number: usize| PAGE - 1000 * number;
    let places: Vec<Pieces> = (0..8)
        .map(|page| vec![(page * PAGE, length(page))])
        .collect();
    for (number, pieces) in places.iter().enumerate() {
        gpu.put(pieces, &content(number, length(number)));
    }
    assert!(stored(&gpu.store_all(&keys[..4], &places[..4])));
    let payloads: Vec<Vec<u8>> = (4..8)
        .map(|number| content(number, length(number)))
        .collect();
    let given = keys[4..]
        .iter()
        .copied()
        .zip(payloads.iter().map(Vec::as_slice));
    assert!(stored(&gpu.pages.store_all(&given.collect::<Vec<_>>())));
    let again = gpu.store_all(&keys, &places);
    assert!(
        again
            .iter()
            .all(|one| matches!(one, Ok(StoreOutcome::Present)))
    );
    gpu.memory.fill(0xAA).unwrap();
    let rooms = in_a_row(8, PAGE);
    let loaded = gpu.load_all(&keys, &rooms);
    for (number, one) in loaded.iter().enumerate() {
        assert_eq!(one.as_ref().unwrap().length, length(number));
        let mut host = vec![0; PAGE];
        assert_eq!(
            gpu.pages.load(keys[number], &mut host).unwrap(),
            length(number)
        );
        let (data, tail) = (gpu.get(&rooms[number]), PAGE - length(number));
        assert_eq!(data[..length(number)], host[..length(number)]);
        assert_eq!(data[..length(number)], content(number, length(number)));
        assert_eq!(
            data[length(number)..],
            vec![0xAA; tail],
            "no byte behind the page"
        );
    }
    let stats = gpu.pages.stats();
    assert_eq!(
        (stats.stored, stats.loaded, stats.lost, stats.pages),
        (8, 16, 0, 8)
    );
    // An owner after a crash finds them: each was durable before its commit.
    let request = AreaRequest {
        offset: 8192,
        bytes: 12 << 20,
        page_bytes: PAGE as u32,
        fingerprint: ModelFingerprint::default(),
    };
    let next = PageStore::open(Arc::clone(&gpu.store), &request).unwrap();
    assert_eq!(next.recovery().pages, 8);
    let mut host = vec![0; PAGE];
    assert_eq!(next.load(keys[2], &mut host).unwrap(), length(2));
    // The owner before commits nothing any more, also what its GPU has written.
    let late = gpu.store_all(&gpu.keys(9)[8..], &rooms[..1]);
    assert!(matches!(late[0], Err(KvError::Superseded { .. })));
}

#[test]
fn pieces_of_a_page_lie_at_any_address() {
    if !is_over_the_stand_in() {
        return in_process("pieces_of_a_page_lie_at_any_address");
    }
    let gpu = Fixture::open("");
    let cuts = [1, 333, 4096, 4097, 470, 3];
    assert_eq!(cuts.iter().sum::<usize>(), PAGE);
    for (round, (first, gap)) in [(0, 0), (1, 3), (5, 16), (16, 1)].into_iter().enumerate() {
        let keys = &gpu.keys(12)[3 * round..][..3];
        let mut at = first;
        let mut next = |bytes: usize| {
            let here = at;
            at += bytes + gap;
            (here, bytes)
        };
        let places: Vec<Pieces> = (0..3)
            .map(|_| cuts.iter().map(|bytes| next(*bytes)).collect())
            .collect();
        for (number, pieces) in places.iter().enumerate() {
            gpu.put(pieces, &content(number, PAGE));
        }
        let all = vec![(0, 4 * PAGE)];
        let before = gpu.get(&all);
        assert!(stored(&gpu.store_all(keys, &places)));
        for (number, key) in keys.iter().enumerate() {
            let mut host = vec![0; PAGE];
            assert_eq!(gpu.pages.load(*key, &mut host).unwrap(), PAGE);
            assert_eq!(host, content(number, PAGE));
            gpu.put(&places[number], &vec![0x55; PAGE]);
        }
        assert!(gpu.load_all(keys, &places).iter().all(Result::is_ok));
        assert!(
            gpu.get(&all) == before,
            "the pieces as they were, and nothing between them"
        );
    }
}

/// What a load says of a page, without the parts that differ between stores.
fn fault_of<T>(outcome: &nvme_kv::Result<T>) -> Option<(PageKey, u32, u64, PageFault)> {
    match outcome {
        Err(KvError::Lost {
            key,
            slot,
            offset,
            fault,
        }) => Some((*key, *slot, *offset, *fault)),
        _ => None,
    }
}

#[test]
fn each_damage_has_the_outcome_of_the_cpu_way() {
    if !is_over_the_stand_in() {
        return in_process("each_damage_has_the_outcome_of_the_cpu_way");
    }
    let mut found = Vec::new();
    for by_gpu in [false, true] {
        let gpu = Fixture::open("");
        let keys = gpu.keys(10);
        let payloads: Vec<Vec<u8>> = (0..9).map(|number| content(number, PAGE)).collect();
        let given = keys.iter().copied().zip(payloads.iter().map(Vec::as_slice));
        assert!(stored(&gpu.pages.store_all(&given.collect::<Vec<_>>())));
        let flip = |at: u64| {
            let mut byte = [0];
            gpu.store.read_at(at, &mut byte).unwrap();
            gpu.store.write_at(at, &[byte[0] ^ 1]).unwrap();
        };
        // The last byte of a payload; a misdirected write; a lost and a torn one; headers of nothing and of another byte.
        flip(gpu.slot(1) + BLOCK + PAGE as u64 - 1);
        let mut other = vec![0; SLOT as usize];
        gpu.store.read_at(gpu.slot(8), &mut other).unwrap();
        gpu.store.write_at(gpu.slot(2), &other).unwrap();
        gpu.store
            .write_at(gpu.slot(3) + BLOCK, &[0; 2 * BLOCK as usize])
            .unwrap();
        gpu.store
            .write_at(gpu.slot(4) + 2 * BLOCK, &[0; BLOCK as usize])
            .unwrap();
        gpu.store
            .write_at(gpu.slot(5), &[0; BLOCK as usize])
            .unwrap();
        flip(gpu.slot(6) + 2000);
        let rooms = in_a_row(10, PAGE);
        let (outcomes, data) = match by_gpu {
            true => {
                let outcomes = gpu.load_all(&keys, &rooms);
                let faults: Vec<_> = outcomes.iter().map(fault_of).collect();
                let right: Vec<bool> = outcomes.iter().map(Result::is_ok).collect();
                (
                    (faults, right),
                    rooms.iter().map(|room| gpu.get(room)).collect(),
                )
            }
            false => {
                let mut pages = vec![vec![0xAA; PAGE]; 10];
                let given = keys
                    .iter()
                    .copied()
                    .zip(pages.iter_mut().map(Vec::as_mut_slice));
                let outcomes = gpu.pages.load_all(&mut given.collect::<Vec<_>>());
                let faults: Vec<_> = outcomes.iter().map(fault_of).collect();
                let right: Vec<bool> = outcomes.iter().map(Result::is_ok).collect();
                ((faults, right), pages)
            }
        };
        let stats = gpu.pages.stats();
        let counts = (stats.pages, stats.loaded, stats.missed, stats.lost);
        let there: Vec<bool> = keys.iter().map(|key| gpu.pages.contains(key)).collect();
        let data: Vec<Vec<u8>> = data;
        for (number, page) in data.iter().enumerate().take(9) {
            let right = match outcomes.1[number] {
                true => content(number, PAGE),
                false => vec![0; PAGE],
            };
            assert!(page == &right, "page {number}, by the GPU: {by_gpu}");
        }
        found.push((outcomes, counts, there));
    }
    assert_eq!(found[0], found[1]);
    let ((faults, right), counts, there) = &found[1];
    let faults: Vec<Option<PageFault>> = faults.iter().map(|one| one.map(|one| one.3)).collect();
    use PageFault as F;
    assert_eq!(
        faults[1..7],
        [
            F::Payload,
            F::OtherPage,
            F::Payload,
            F::Payload,
            F::Header,
            F::Header
        ]
        .map(Some)
    );
    assert_eq!(*counts, (3, 3, 1, 6));
    let kept = [
        true, false, false, false, false, false, false, true, true, false,
    ];
    assert_eq!((&there[..], &right[..]), (&kept[..], &kept[..]));
}

/// Faults of the queues that the GPU drives: those of the host come last.
fn of_the_gpu(fault: &str) -> String {
    (1..25)
        .map(|queue| format!("&fault={fault},qid={queue}"))
        .collect()
}

#[test]
fn reads_and_writes_that_fail_cost_their_pages_alone() {
    if !is_over_the_stand_in() {
        return in_process("reads_and_writes_that_fail_cost_their_pages_alone");
    }
    let gpu = Fixture::open(&of_the_gpu("status:0x281@op=read,p=0.3"));
    let (keys, rooms) = (gpu.keys(60), in_a_row(60, PAGE));
    for (number, pieces) in rooms.iter().enumerate() {
        gpu.put(pieces, &content(number, PAGE));
    }
    assert!(stored(&gpu.store_all(&keys, &rooms)));
    let loaded = gpu.load_all(&keys, &rooms);
    for (number, one) in loaded.iter().enumerate() {
        let right = match one {
            Ok(_) => content(number, PAGE),
            Err(_) => vec![0; PAGE],
        };
        assert!(gpu.get(&rooms[number]) == right, "page {number}");
        let fault = fault_of(one).map(|one| one.3);
        assert!(
            one.is_ok() || fault == Some(PageFault::Unreadable),
            "{one:?}"
        );
    }
    let lost = loaded.iter().filter(|one| one.is_err()).count();
    assert!(0 < lost && lost < 60, "{lost}");
    assert_eq!(gpu.pages.stats().lost, lost as u64);

    let gpu = Fixture::open(&of_the_gpu("status:0x280@op=write,p=0.4"));
    let keys = gpu.keys(40);
    for (number, pieces) in rooms[..40].iter().enumerate() {
        gpu.put(pieces, &content(number, PAGE));
    }
    let outcomes = gpu.store_all(&keys, &rooms[..40]);
    let failed = outcomes.iter().filter(|one| one.is_err()).count();
    assert!(0 < failed && failed < 40, "{failed}");
    assert_eq!(gpu.pages.stats().failed, failed as u64);
    for ((number, key), outcome) in keys.iter().enumerate().zip(&outcomes) {
        assert_eq!(
            gpu.pages.contains(key),
            outcome.is_ok(),
            "a failed write is never found"
        );
        let mut host = vec![0; PAGE];
        if gpu.pages.load(*key, &mut host).is_ok() {
            assert_eq!(host, content(number, PAGE));
        }
    }
}

#[test]
fn more_pages_than_are_staged_at_a_time_follow_in_the_stream() {
    if !is_over_the_stand_in() {
        return in_process("more_pages_than_are_staged_at_a_time_follow_in_the_stream");
    }
    let gpu = Fixture::open("");
    let keys = gpu.keys(2);
    let rooms = in_a_row(2, PAGE);
    gpu.put(&rooms[0], &content(7, PAGE));
    assert!(stored(&gpu.store_all(&keys[..1], &rooms[..1])));
    // The same page more often than 32 MiB hold.
    let plan = LoadPlan::new(Arc::clone(&gpu.pages), [(keys[0], PAGE)].into_iter());
    let place = plan.places().remove(0);
    let pieces = gpu.extents(&rooms);
    let count = (32 << 20) / SLOT as usize + 5;
    let reads = vec![
        PageRead {
            offset: place.offset,
            bytes: place.length,
            checksum: place.checksum,
            pieces: &pieces[1],
        };
        count
    ];
    let header_of = |_| payload_checksum(&place.header.to_block());
    // SAFETY: the memory of the fixture; all pages write the same bytes.
    let loaded = unsafe {
        gpu.store
            .load_pages_on_gpu(&gpu.mover, &reads, header_of, gpu.stream.handle())
    };
    let ends = loaded.unwrap().wait(WAIT).unwrap();
    let right = PageEnd::Right {
        checksum: place.checksum,
    };
    assert_eq!(ends.len(), count);
    assert!(ends.iter().all(|end| *end == right));
    assert_eq!(gpu.get(&rooms[1]), content(7, PAGE));
}

#[test]
fn pages_of_the_host_are_copied_to_their_pieces_and_back() {
    if !is_over_the_stand_in() {
        return in_process("pages_of_the_host_are_copied_to_their_pieces_and_back");
    }
    let gpu = Fixture::open("");
    let places: Vec<Pieces> = vec![
        vec![(3, 5000), (9001, 4000)],
        vec![(20_000, 77)],
        vec![(30_000, 50)],
    ];
    for (number, pieces) in places.iter().enumerate() {
        let bytes = pieces.iter().map(|(_, bytes)| bytes).sum();
        gpu.put(pieces, &content(number, bytes));
    }
    let extents = gpu.extents(&places);
    let all: Vec<&[PageExtent]> = extents.iter().map(Vec::as_slice).collect();
    let stream = gpu.stream.handle();
    let mut host = gpu
        .mover
        .host_pages(&all, MemoryUse::Writes, stream)
        .unwrap();
    // SAFETY: the memory of the fixture, here and below.
    unsafe { host.enqueue(HostCopy::Collect, stream) }.unwrap();
    host.wait(WAIT).unwrap();
    let found: Vec<Vec<u8>> = host
        .payloads()
        .unwrap()
        .iter()
        .map(|one| one.to_vec())
        .collect();
    assert_eq!(found, [content(0, PAGE), content(1, 77), content(2, 50)]);
    for payload in host.payloads().unwrap() {
        payload.fill(0x11);
    }
    let lengths = [Some(8000), None, Some(50)];
    // SAFETY: the memory of the pages outlives the copies, which are waited for.
    unsafe { host.enqueue(HostCopy::Deliver(&lengths), stream) }.unwrap();
    host.wait(WAIT).unwrap();
    let mut first = vec![0x11; 8000];
    first.extend(&content(0, PAGE)[8000..]);
    assert_eq!(gpu.get(&places[0]), first);
    assert_eq!(gpu.get(&places[1]), vec![0; 77]);
    assert_eq!(gpu.get(&places[2]), vec![0x11; 50]);
}

#[test]
fn what_cannot_be_moved_is_refused_before_anything_is_read() {
    if !is_over_the_stand_in() {
        return in_process("what_cannot_be_moved_is_refused_before_anything_is_read");
    }
    let gpu = Fixture::open("");
    let header_of = |_| payload_checksum(&[0; 4096]);
    let end = gpu.store.len();
    let memory = gpu.memory.address();
    let piece = |address, bytes| PageExtent { address, bytes };
    let (good, short) = ([piece(memory, 9000)], [piece(memory, 8999)]);
    let far = [piece(memory, 1 << 30)];
    for (offset, pieces) in [
        (4095, &good),
        (end - 4096, &good),
        (u64::MAX - 4095, &good),
        (8192, &short),
        (8192, &far),
        (8192, &[piece(64, 9000)]),
    ] {
        let read = PageRead {
            offset,
            bytes: 9000,
            checksum: 0,
            pieces,
        };
        // SAFETY: nothing is read.
        let refused = unsafe {
            gpu.store
                .load_pages_on_gpu(&gpu.mover, &[read], header_of, gpu.stream.handle())
        };
        assert!(
            matches!(refused.err(), Some(Error::Usage { .. })),
            "{offset} {pieces:?}"
        );
    }
    // SAFETY: nothing is read.
    assert!(unsafe { gpu.mover.stage(&[&[]], gpu.stream.handle()) }.is_err());
    assert_eq!(gpu.get(&vec![(0, 9000)]), vec![0xAA; 9000]);
}
