//! Checks that any segments, mapped by the core and walked as the specification says, are the same segments, and that
//! the simulator moves the bytes of a read and of a write through them.

use arbitrary::{Arbitrary, Unstructured};
use nvme_core::PointerError;
use nvme_core::mem::DmaWords;
use nvme_core::sgl::{self, SglSegment};
use nvme_core::spec::register::{Aqa, Cc, offset};
use nvme_core::spec::sgl::{SglDescriptor, kind};
use nvme_core::spec::{Cid, Cqe, Iova, Lba, Nsid, Sqe, Status, admin, nvm};
use nvme_core::sync::AtomicU64;
use nvme_sim::config::NamespaceConfig;
use nvme_sim::{Config, Controller, MemoryStore, VecMemory};

/// Descriptors in one segment of the core's lists.
const SEGMENT: usize = 256;
/// Address of the lists, for the walk and in the simulator's memory.
const LISTS: u64 = 0x10_0000;
const BLOCK: u64 = 512;

/// A piece of a transfer, before lengths are made to fit.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Piece {
    page: u8,
    offset: u16,
    len: u16,
    skipped: bool,
}

#[derive(Arbitrary, Debug)]
struct Scenario {
    pieces: Vec<Piece>,
    /// Number of times that the pieces are repeated: many make lists of several segments.
    times: u16,
    /// Descriptors that the list memory is short of.
    short: u8,
    empty: Option<u16>,
    lba: u8,
}

/// The segments and the address of their list come from `bytes`.
pub fn sgl_round_trip(bytes: &[u8]) {
    let Ok(scenario) = Scenario::arbitrary(&mut Unstructured::new(bytes)) else {
        return;
    };
    let count = scenario.pieces.len();
    let times = usize::from(scenario.times) % 40 + 1;
    let total = (count * times).min(1500);
    let mut segments: Vec<SglSegment> = (0..total)
        .map(|index| segment(scenario.pieces[index % count], index as u64))
        .collect();
    if let Some(at) = scenario.empty.filter(|_| total > 0) {
        segments[usize::from(at) % total] = SglSegment::Discard { len: 0 };
    }
    // A command's own descriptor can be data alone.
    let needed = match segments[..] {
        [SglSegment::Data { .. }] => 0,
        _ => descriptors(total),
    };
    let short =
        usize::from(scenario.short > 240) * usize::from(scenario.short - 240.min(scenario.short));
    let room = needed.saturating_sub(short);
    let words: Vec<AtomicU64> = (0..room * 2).map(|_| AtomicU64::new(0)).collect();
    let list = DmaWords::new(&words, Iova(LISTS));
    let empty = segments.iter().any(|one| bytes_of(one) == 0) || total == 0;
    match sgl::map(&segments, list) {
        Err(PointerError::Empty) => assert!(empty, "refused without an empty segment"),
        Err(PointerError::ListTooSmall) => assert!(room < needed && !empty, "{needed} fit"),
        Err(other) => panic!("{other:?} of {total} segments"),
        Ok(first) => {
            assert!(!empty && room >= needed, "{needed} descriptors in {room}");
            let found = walk(first, list, total);
            assert!(found == segments, "{found:?}, not {segments:?}");
            transfer(&segments, first, list, u64::from(scenario.lba));
        }
    }
}

/// Returns a segment anywhere in the data, of `DATA` bytes at most; odd lengths occur.
fn segment(piece: Piece, index: u64) -> SglSegment {
    let len = u32::from(piece.len) % 700 + 1;
    if piece.skipped {
        return SglSegment::Discard { len };
    }
    let page = (u64::from(piece.page) + index) % 64;
    SglSegment::Data {
        iova: Iova(DATA + page * 4096 + u64::from(piece.offset % 4096)),
        len,
    }
}

fn bytes_of(segment: &SglSegment) -> u64 {
    match *segment {
        SglSegment::Data { len, .. } | SglSegment::Discard { len } => u64::from(len),
    }
}

/// Descriptors in list memory: one for each segment, and one for each pointer to a further list.
fn descriptors(segments: usize) -> usize {
    let mut left = segments;
    let mut pointers = 0;
    while left > SEGMENT {
        left -= SEGMENT - 1;
        pointers += 1;
    }
    segments + pointers
}

/// Returns the segments that a controller reads: NVMe Base 2.0c, "Scatter Gather List (SGL)".
fn walk(first: [u64; 2], list: DmaWords<'_>, most: usize) -> Vec<SglSegment> {
    let mut found = Vec::new();
    let mut next = Some(SglDescriptor::from_words(first));
    while let Some(descriptor) = next.take() {
        assert_eq!(descriptor.sub_type(), 0);
        match descriptor.kind() {
            kind::SEGMENT | kind::LAST_SEGMENT => {
                assert_eq!(descriptor.address % 8, 0, "a list is qword aligned");
                assert!(descriptor.length > 0 && descriptor.length.is_multiple_of(16));
                let count = descriptor.length as usize / 16;
                let start = ((descriptor.address - LISTS) / 8) as usize;
                assert!(start + count * 2 <= list.len(), "past the list memory");
                for index in 0..count {
                    let at = start + index * 2;
                    let one = SglDescriptor::from_words([list.get(at), list.get(at + 1)]);
                    let leads = matches!(one.kind(), kind::SEGMENT | kind::LAST_SEGMENT);
                    if leads {
                        let may = index + 1 == count && descriptor.kind() == kind::SEGMENT;
                        assert!(may, "a pointer in the middle, or in the last segment");
                        next = Some(one);
                    } else {
                        found.push(data(one));
                    }
                }
                let last = descriptor.kind() == kind::LAST_SEGMENT;
                assert_eq!(last, next.is_none(), "the last segment leads nowhere");
            }
            _ => found.push(data(descriptor)),
        }
        assert!(found.len() <= most, "more than was mapped");
    }
    found
}

fn data(descriptor: SglDescriptor) -> SglSegment {
    let len = descriptor.length;
    match descriptor.kind() {
        kind::DATA_BLOCK => SglSegment::Data {
            iova: Iova(descriptor.address),
            len,
        },
        kind::BIT_BUCKET => SglSegment::Discard { len },
        other => panic!("descriptor type {other}"),
    }
}

const RINGS: u64 = 0x1_0000;
const DATA: u64 = 0x20_0000;
const BYTES: usize = 0x26_0000;

/// Uses the same list on a simulated controller: a read scatters through it, and a write gathers.
fn transfer(segments: &[SglSegment], first: [u64; 2], list: DmaWords<'_>, lba: u64) {
    let len: u64 = segments.iter().map(bytes_of).sum();
    let Some(blocks) =
        (len.is_multiple_of(BLOCK) && len > 0 && len <= 128 << 10).then_some((len / BLOCK) as u32)
    else {
        return;
    };
    let machine = Machine::new();
    let memory = machine.sim.memory();
    for index in 0..list.len() {
        let at = LISTS + index as u64 * 8;
        memory
            .write(at, &list.get(index).to_le_bytes())
            .expect("mapped");
    }
    // Each byte of the namespace says where it is, so that the read shows which bytes it moved.
    let image: Vec<u8> = (0..len).map(|at| (at * 7 + at / 256) as u8 | 1).collect();
    memory.write(PLAIN, &image).expect("mapped");
    let plain = SglDescriptor::new(kind::DATA_BLOCK, PLAIN, len as u32).to_words();
    let write = nvm::write(Nsid(1), Lba(lba), blocks);
    assert_eq!(machine.run(write.with_sgl(plain)), Status::SUCCESS);
    let read = nvm::read(Nsid(1), Lba(lba), blocks);
    assert_eq!(machine.run(read.with_sgl(first)), Status::SUCCESS);
    // The segments are copied in order, so that a segment over another one holds the later data.
    let mut expected = vec![0; BYTES - DATA as usize];
    let mut at = 0;
    for segment in segments {
        let piece = &image[at..][..bytes_of(segment) as usize];
        if let SglSegment::Data { iova, .. } = segment {
            expected[(iova.0 - DATA) as usize..][..piece.len()].copy_from_slice(piece);
        }
        at += piece.len();
    }
    let mut got = vec![0; expected.len()];
    memory.read(DATA, &mut got).expect("mapped");
    assert!(got == expected, "a read through the list");
    // Back, when nothing was skipped and no piece lies over another.
    let skips = segments
        .iter()
        .any(|one| matches!(one, SglSegment::Discard { .. }));
    if !skips {
        let again = nvm::compare(Nsid(1), Lba(lba), blocks).with_sgl(first);
        let mut gathered = Vec::new();
        for segment in segments {
            if let SglSegment::Data { iova, len } = segment {
                let from = (iova.0 - DATA) as usize;
                gathered.extend_from_slice(&expected[from..][..*len as usize]);
            }
        }
        let same = gathered == image;
        assert_eq!(
            machine.run(again).is_success(),
            same,
            "a compare through the list"
        );
    }
    let findings = machine.sim.findings();
    assert!(findings.is_empty(), "the auditor found {findings:?}");
}

const PLAIN: u64 = 0x4_0000;

/// A simulated controller with an I/O queue, whose commands run at once.
struct Machine {
    sim: Controller<VecMemory>,
    /// Number of commands so far on the admin queue and on the I/O queue.
    sent: [std::cell::Cell<u64>; 2],
}

impl Machine {
    fn new() -> Self {
        let store = MemoryStore::new(1 << 20).expect("a mebibyte");
        let config = Config {
            namespaces: vec![NamespaceConfig::new(BLOCK as u32, Box::new(store))],
            max_queues: 1,
            mqes: 16,
            audit: true,
            ..Config::empty()
        };
        let sim = Controller::new(config, VecMemory::new(BYTES)).expect("a valid configuration");
        let mut aqa = Aqa(0);
        aqa.set_asqs_z(15);
        aqa.set_acqs_z(15);
        sim.write32(offset::AQA, aqa.0);
        sim.write64(offset::ASQ, RINGS);
        sim.write64(offset::ACQ, RINGS + 0x1000);
        let mut cc = Cc(0);
        cc.set_iosqes(6);
        cc.set_iocqes(4);
        cc.set_en(true);
        sim.write32(offset::CC, cc.0);
        let machine = Self {
            sim,
            sent: Default::default(),
        };
        let params = |iova| admin::QueueParams {
            qid: nvme_core::spec::Qid(1),
            entries: 16,
            iova: Iova(iova),
        };
        let cq = admin::create_io_cq(params(RINGS + 0x3000), None);
        assert!(machine.on(0, cq).is_success());
        let sq = admin::create_io_sq(params(RINGS + 0x2000), nvme_core::spec::Qid(1));
        assert!(machine.on(0, sq).is_success());
        machine
    }

    fn run(&self, sqe: Sqe) -> Status {
        self.on(1, sqe)
    }

    fn on(&self, queue: usize, sqe: Sqe) -> Status {
        let number = self.sent[queue].replace(self.sent[queue].get() + 1);
        let (ring, bell) = (RINGS + queue as u64 * 0x2000, queue as u32 * 8);
        let (memory, index) = (self.sim.memory(), number % 16);
        let words = sqe.with_cid(Cid(number as u16)).to_words();
        let bytes = words.map(u64::to_le_bytes).concat();
        memory.write(ring + index * 64, &bytes).expect("mapped");
        let next = ((number + 1) % 16) as u32;
        self.sim.write32(offset::DOORBELLS + bell, next);
        self.sim.step(0);
        let mut entry = [0; 16];
        memory
            .read(ring + 0x1000 + index * 16, &mut entry)
            .expect("mapped");
        self.sim.write32(offset::DOORBELLS + bell + 4, next);
        let half = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("eight"));
        let cqe = Cqe::from_words(half(0), half(8));
        assert_eq!(cqe.cid, number as u16, "no answer");
        cqe.status()
    }
}
