//! The controller as host threads, against a driver that does what none may do.
// UNSAFETY: rings, doorbells and data are raw memory that the controller's threads share.
#![allow(unsafe_code)]

use gpu_peer::{Args, BAR_BYTES, MAX_ENTRIES, Plan, QUEUE_BYTES, STOP, Shared, Window, run};
use nvme_spec::admin::{self, QueueParams, cns};
use nvme_spec::nvm::{self, opcode};
use nvme_spec::register::{Aqa, Cap, Cc, Csts, offset};
use nvme_spec::{Cid, Cqe, Iova, Lba, Nsid, Qid, Sqe, Status};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// Pages of the driver's memory: admin rings, I/O rings, then data.
const PAGES: usize = 600;
const BLOCKS: u64 = 4096;
const NSID: Nsid = Nsid(1);

/// Zeroed memory from the start of a page on, never freed: threads may outlive a test that fails.
fn memory(bytes: usize) -> u64 {
    let words = vec![0u64; bytes / 8 + PAGE / 8].leak();
    (words.as_mut_ptr().expose_provenance() as u64).next_multiple_of(PAGE as u64)
}

fn word32<'a>(at: u64) -> &'a AtomicU32 {
    // SAFETY: inside leaked memory, which atomics alone touch.
    unsafe { &*std::ptr::with_exposed_provenance(at as usize) }
}

fn word64<'a>(at: u64) -> &'a AtomicU64 {
    // SAFETY: as above.
    unsafe { &*std::ptr::with_exposed_provenance(at as usize) }
}

/// A ring pair as the driver has it.
struct Ring {
    sq: u64,
    cq: u64,
    doorbells: [u64; 2],
    sq_entries: u32,
    cq_entries: u32,
    tail: u32,
    head: u32,
    phase: bool,
}

impl Ring {
    fn push(&mut self, sqe: Sqe) {
        let at = self.sq + u64::from(self.tail) * 64;
        for (index, word) in sqe.to_words().into_iter().enumerate() {
            word64(at + index as u64 * 8).store(word, Ordering::Relaxed);
        }
        self.tail = (self.tail + 1) % self.sq_entries;
    }

    fn ring(&self) {
        word32(self.doorbells[0]).store(self.tail, Ordering::Release);
    }

    fn poll(&mut self) -> Option<Cqe> {
        let at = self.cq + u64::from(self.head) * 16;
        let upper = word64(at + 8).load(Ordering::Acquire);
        let cqe = Cqe::from_words(word64(at).load(Ordering::Relaxed), upper);
        if cqe.phase() != self.phase {
            return None;
        }
        self.head = (self.head + 1) % self.cq_entries;
        self.phase ^= self.head == 0;
        Some(cqe)
    }

    fn give_back(&self) {
        word32(self.doorbells[1]).store(self.head, Ordering::Release);
    }

    /// The next completion.
    fn wait(&mut self) -> Cqe {
        let cqe = until(|| self.poll());
        self.give_back();
        cqe
    }

    /// Sends one command and waits for its end.
    fn ask(&mut self, sqe: Sqe) -> (Status, u32) {
        self.push(sqe.with_cid(Cid(0x4321)));
        self.ring();
        let cqe = self.wait();
        assert_eq!(cqe.cid(), Cid(0x4321));
        (cqe.status(), cqe.dw0)
    }
}

fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "no answer");
        std::thread::yield_now();
    }
}

struct Peer {
    args: Args,
    memory: u64,
    threads: Vec<JoinHandle<()>>,
    admin: Ring,
}

impl Peer {
    fn start(queues: u32, warps: u32, plan: Plan) -> Self {
        let memory = memory(PAGES * PAGE);
        let args = Args {
            bar: self::memory(BAR_BYTES),
            doorbells: self::memory(PAGE),
            own: self::memory(QUEUE_BYTES * (queues as usize + 1)),
            medium: self::memory(BLOCKS as usize * 512),
            blocks: BLOCKS,
            timeout_ns: 120_000_000_000,
            windows: [
                Window {
                    start: memory,
                    bytes: (PAGES * PAGE) as u64,
                },
                Window::default(),
                Window::default(),
                Window::default(),
            ],
            plan,
            block_shift: 9,
            queues,
            dstrd: 0,
            warps: warps + 1,
        };
        // SAFETY: every address is leaked memory of that size.
        let part = move |warp| unsafe { run(&args, warp) };
        let threads = (0..args.warps).map(|warp| std::thread::spawn(move || part(warp)));
        let mut peer = Self {
            args,
            memory,
            threads: threads.collect(),
            admin: Ring {
                sq: memory,
                cq: memory + PAGE as u64,
                doorbells: [args.bar + PAGE as u64, args.bar + PAGE as u64 + 4],
                sq_entries: 8,
                cq_entries: 5,
                tail: 0,
                head: 0,
                phase: true,
            },
        };
        until(|| (peer.register(offset::VS) != 0).then_some(()));
        peer.enable();
        peer
    }

    fn register(&self, offset: u32) -> u32 {
        word32(self.args.bar + u64::from(offset)).load(Ordering::Acquire)
    }

    fn write(&self, offset: u32, value: u32) {
        word32(self.args.bar + u64::from(offset)).store(value, Ordering::Release);
    }

    fn csts(&self) -> Csts {
        Csts(self.register(offset::CSTS))
    }

    fn enable(&mut self) {
        for word in 0..PAGE as u64 / 8 {
            word64(self.admin.cq + word * 8).store(0, Ordering::Relaxed);
        }
        (self.admin.tail, self.admin.head, self.admin.phase) = (0, 0, true);
        let mut aqa = Aqa(0);
        aqa.set_asqs_z(self.admin.sq_entries as u16 - 1);
        aqa.set_acqs_z(self.admin.cq_entries as u16 - 1);
        self.write(offset::AQA, aqa.0);
        word64(self.args.bar + u64::from(offset::ASQ)).store(self.admin.sq, Ordering::Relaxed);
        word64(self.args.bar + u64::from(offset::ACQ)).store(self.admin.cq, Ordering::Relaxed);
        self.write(offset::CC, enabled().0);
        until(|| self.csts().rdy().then_some(()));
    }

    fn disable(&self) {
        self.write(offset::CC, 0);
        until(|| (self.csts().0 == 0).then_some(()));
    }

    /// The memory of a queue's rings: 16 pages each.
    fn queue(&self, qid: u16, sq_entries: u32, cq_entries: u32) -> Ring {
        let sq = self.memory + (2 + 17 * u64::from(qid - 1)) * PAGE as u64;
        let cq = sq + 16 * PAGE as u64;
        for word in 0..u64::from(cq_entries) * 2 {
            word64(cq + word * 8).store(0, Ordering::Relaxed);
        }
        let bell = self.args.doorbells + u64::from(qid) * 8;
        Ring {
            sq,
            cq,
            doorbells: [bell, bell + 4],
            sq_entries,
            cq_entries,
            tail: 0,
            head: 0,
            phase: true,
        }
    }

    fn create(&mut self, qid: u16, sq_entries: u32, cq_entries: u32) -> Ring {
        let ring = self.queue(qid, sq_entries, cq_entries);
        let cq = params(qid, cq_entries, ring.cq);
        assert_eq!(
            self.admin.ask(admin::create_io_cq(cq, None)).0,
            Status::SUCCESS
        );
        let sq = params(qid, sq_entries, ring.sq);
        assert_eq!(
            self.admin.ask(admin::create_io_sq(sq, Qid(qid))).0,
            Status::SUCCESS
        );
        ring
    }

    /// A page of data.
    fn page(&self, index: usize) -> u64 {
        self.memory + ((80 + index) * PAGE) as u64
    }

    fn shared(&self) -> Shared {
        let word = |index: u64| word32(self.args.own + index * 4).load(Ordering::Relaxed);
        Shared {
            commands: word(0),
            dead: word(1),
            bad_doorbells: word(2),
            full: word(3),
            posted: word(4),
            late: word(5),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.write(STOP as u32, 1);
        for thread in self.threads.drain(..) {
            // One that panicked has said why.
            let _ = thread.join();
        }
    }
}

fn enabled() -> Cc {
    let mut cc = Cc(0);
    cc.set_en(true);
    cc.set_iosqes(6);
    cc.set_iocqes(4);
    cc
}

fn params(qid: u16, entries: u32, at: u64) -> QueueParams {
    QueueParams {
        qid: Qid(qid),
        entries,
        iova: Iova(at),
    }
}

fn fill(at: u64, bytes: usize, value: u64) {
    for index in 0..bytes as u64 / 8 {
        word64(at + index * 8).store(value + index, Ordering::Relaxed);
    }
}

#[test]
fn what_a_driver_may_not_ask_for_is_refused() {
    let mut peer = Peer::start(1, 1, Plan::default());
    let mut ring = peer.create(1, 8, 8);
    let page = |index| peer.page(index);
    let read = |blocks| nvm::read(NSID, Lba(0), blocks);
    let list = page(0);
    // A list whose last entry of a page names the list again: a circle.
    let circle = page(1);
    fill(circle, PAGE, 0);
    word64(circle + PAGE as u64 - 8).store(circle + PAGE as u64 - 8, Ordering::Relaxed);
    word64(list).store(page(3), Ordering::Relaxed);
    word64(list + 8).store(page(4) + 512, Ordering::Relaxed);
    let with = |mut sqe: Sqe, bits: u32| {
        sqe.cdw0 |= bits;
        sqe
    };
    let end = peer.memory + (PAGES * PAGE) as u64;
    let cases = [
        ("opcode", Sqe::new(0x55, NSID), Status::INVALID_OPCODE),
        (
            "fused",
            with(read(1).with_prps(page(2), 0), 1 << 8),
            Status::INVALID_FIELD,
        ),
        (
            "an SGL",
            read(1).with_sgl([page(2), 512]),
            Status::INVALID_FIELD,
        ),
        (
            "no namespace",
            nvm::read(Nsid(0), Lba(0), 1).with_prps(page(2), 0),
            Status::INVALID_NAMESPACE,
        ),
        (
            "all namespaces",
            nvm::read(Nsid::ALL, Lba(0), 1).with_prps(page(2), 0),
            Status::INVALID_NAMESPACE,
        ),
        (
            "past the end",
            nvm::read(NSID, Lba(BLOCKS), 1).with_prps(page(2), 0),
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "over the end",
            nvm::read(NSID, Lba(BLOCKS - 1), 2).with_prps(page(2), 0),
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "an LBA that wraps",
            nvm::read(NSID, Lba(u64::MAX), 2).with_prps(page(2), 0),
            Status::LBA_OUT_OF_RANGE,
        ),
        (
            "more than MDTS",
            read(2049).with_prps(page(2), page(0)),
            Status::INVALID_FIELD,
        ),
        (
            "PRP1 no dword",
            read(1).with_prps(page(2) + 2, 0),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "PRP2 in a page",
            read(16).with_prps(page(2), page(3) + 8),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "a list no qword",
            read(24).with_prps(page(2), list + 4),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "an entry in a page",
            read(24).with_prps(page(2), list),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "a list that is a circle",
            read(24).with_prps(page(2), circle + PAGE as u64 - 8),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            "memory of others",
            read(1).with_prps(0x1000, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "memory past the end",
            read(1).with_prps(end, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "a page at the very end",
            read(1).with_prps(u64::MAX - 511, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "PRP2 of others",
            read(16).with_prps(page(2), 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "a list of others",
            read(24).with_prps(page(2), end),
            Status::DATA_TRANSFER_ERROR,
        ),
    ];
    for (name, sqe, status) in cases {
        let (answer, _) = ring.ask(sqe);
        assert!(answer.is(status), "{name}: {answer}");
    }
    // It works all the same.
    fill(peer.args.medium, 512, 7);
    assert_eq!(ring.ask(read(1).with_prps(page(5), 0)).0, Status::SUCCESS);
    assert_eq!(word64(page(5) + 8).load(Ordering::Relaxed), 8);
    assert_eq!(peer.shared().bad_doorbells, 0);
}

#[test]
fn data_moves_to_and_from_every_kind_of_list() {
    let mut peer = Peer::start(1, 1, Plan::default());
    let mut ring = peer.create(1, 8, 8);
    fill(peer.args.medium, 512 * 2048, 1000);
    // Lists that begin near the end of a page and go on in another.
    for (pages, at) in [
        (1, 0),
        (2, 0),
        (3, 0),
        (3, 4080),
        (256, 2048),
        (256, 4088),
        (200, 3800),
    ] {
        for first in [0, 512, 3584] {
            let blocks = (pages * 8).min(2048 - first / 512);
            let (data, list) = (peer.page(100), peer.page(0) + at);
            fill(data, 257 * PAGE, 0);
            let prp = |index: u64| data + index * PAGE as u64;
            let mut entry = list;
            let needed = u64::div_ceil(first + blocks * 512, PAGE as u64);
            for index in 1..needed {
                let is_last = entry % PAGE as u64 == PAGE as u64 - 8;
                if is_last && index + 1 < needed {
                    word64(entry).store(peer.page(2), Ordering::Relaxed);
                    entry = peer.page(2);
                }
                word64(entry).store(prp(index), Ordering::Relaxed);
                entry += 8;
            }
            let prp2 = if needed > 2 { list } else { prp(1) };
            let range = |op: fn(Nsid, Lba, u32) -> Sqe| {
                op(NSID, Lba(0), blocks as u32).with_prps(data + first, prp2)
            };
            assert_eq!(
                ring.ask(range(nvm::read)).0,
                Status::SUCCESS,
                "{pages} {at} {first}"
            );
            for index in 0..blocks * 64 {
                let word = word64(data + first + index * 8).load(Ordering::Relaxed);
                assert_eq!(
                    word,
                    1000 + index,
                    "{pages} pages, list at {at}, from {first}"
                );
            }
            assert_eq!(ring.ask(range(nvm::compare)).0, Status::SUCCESS);
            let last = data + first + blocks * 512 - 4;
            word32(last).fetch_xor(1, Ordering::Relaxed);
            assert!(ring.ask(range(nvm::compare)).0.is(Status::COMPARE_FAILURE));
            assert_eq!(ring.ask(range(nvm::write)).0, Status::SUCCESS);
            let end = peer.args.medium + blocks * 512 - 4;
            word32(last).fetch_xor(1, Ordering::Relaxed);
            let (there, here) = (word32(end), word32(last));
            let differ = there.load(Ordering::Relaxed) ^ here.load(Ordering::Relaxed);
            assert_eq!(differ, 1);
            assert_eq!(ring.ask(range(nvm::write)).0, Status::SUCCESS);
        }
    }
    assert_eq!(
        ring.ask(nvm::write_zeroes(NSID, Lba(1), 65)).0,
        Status::SUCCESS
    );
    let medium = |block: u64| word64(peer.args.medium + block * 512).load(Ordering::Relaxed);
    assert_eq!([0, 1, 65, 66].map(medium), [1000, 0, 0, 1000 + 66 * 64]);
    for nsid in [NSID, Nsid::ALL] {
        assert_eq!(ring.ask(Sqe::new(opcode::FLUSH, nsid)).0, Status::SUCCESS);
    }
}

#[test]
fn a_completion_queue_is_never_overrun() {
    let mut peer = Peer::start(1, 1, Plan::default());
    let mut ring = peer.create(1, 64, 4);
    for number in 0..50 {
        ring.push(Sqe::new(opcode::FLUSH, NSID).with_cid(Cid(number)));
    }
    ring.ring();
    // Three of four entries; the fourth is never written until one is given back.
    until(|| (peer.shared().full > 100).then_some(()));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(peer.shared().posted, 3);
    assert_eq!(word64(ring.cq + 3 * 16 + 8).load(Ordering::Relaxed), 0);
    for number in 0..50 {
        let cqe = until(|| ring.poll());
        assert_eq!((cqe.cid(), cqe.status()), (Cid(number), Status::SUCCESS));
        if number % 3 == 2 || number > 45 {
            ring.give_back();
        }
    }
    assert_eq!(peer.shared().posted, 50);
}

#[test]
fn doorbells_that_no_queue_can_have_are_ignored() {
    let mut peer = Peer::start(2, 1, Plan::default());
    let (mut one, mut two) = (peer.create(1, 3, 3), peer.create(2, 1024, 1024));
    word32(one.doorbells[0]).store(3, Ordering::Release);
    until(|| (peer.shared().bad_doorbells > 0).then_some(()));
    word32(one.doorbells[0]).store(0, Ordering::Release);
    // A head past what was posted frees nothing.
    word32(one.doorbells[1]).store(2, Ordering::Release);
    for number in 0..2 {
        one.push(Sqe::new(opcode::FLUSH, NSID).with_cid(Cid(number)));
    }
    one.ring();
    for number in 0..2 {
        assert_eq!(until(|| one.poll()).cid(), Cid(number));
    }
    one.give_back();
    // Rings that are no power of two, and large ones, many times around.
    for number in 0..2500 {
        for ring in [&mut one, &mut two] {
            let sqe = Sqe::new(opcode::FLUSH, NSID).with_cid(Cid(number));
            ring.push(sqe);
            ring.ring();
            let cqe = ring.wait();
            assert_eq!((cqe.cid(), u32::from(cqe.sqhd)), (Cid(number), ring.tail));
        }
    }
}

#[test]
fn queues_are_created_and_deleted_as_the_specification_says() {
    let mut peer = Peer::start(2, 2, Plan::default());
    let cap = Cap(word64(peer.args.bar).load(Ordering::Relaxed));
    assert_eq!(
        (cap.mqes(), cap.dstrd(), cap.css() & 1),
        (MAX_ENTRIES, 0, 1)
    );
    let at = peer.page(0);
    let cq = |qid, entries, at| admin::create_io_cq(params(qid, entries, at), None);
    let sq = |qid, entries, at, cqid| admin::create_io_sq(params(qid, entries, at), Qid(cqid));
    let refusals = [
        (cq(0, 8, at), Status::INVALID_QID),
        (cq(3, 8, at), Status::INVALID_QID),
        (cq(1, 1, at), Status::INVALID_QUEUE_SIZE),
        (cq(1, 1025, at), Status::INVALID_QUEUE_SIZE),
        (cq(1, 8, at + 64), Status::INVALID_PRP_OFFSET),
        (cq(1, 8, 0x1000), Status::INVALID_FIELD),
        (sq(1, 8, at, 1), Status::INVALID_CQ),
        (admin::delete_io_sq(Qid(1)), Status::INVALID_QID),
        (admin::delete_io_cq(Qid(1)), Status::INVALID_QID),
        (
            admin::identify(cns::NAMESPACE, Nsid(2)).with_prps(at, 0),
            Status::INVALID_NAMESPACE,
        ),
        (
            admin::identify(0x77, Nsid(0)).with_prps(at, 0),
            Status::INVALID_FIELD,
        ),
        (
            admin::identify(cns::CONTROLLER, Nsid(0)).with_prps(at + 4, 0),
            Status::INVALID_PRP_OFFSET,
        ),
        (
            admin::identify(cns::CONTROLLER, Nsid(0)).with_prps(0x2000, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        (admin::async_event_request(), Status::INVALID_OPCODE),
    ];
    for (sqe, status) in refusals {
        let (answer, _) = peer.admin.ask(sqe);
        assert!(answer.is(status), "{answer} for {sqe:?}");
    }
    for _ in 0..3 {
        let mut ring = peer.create(1, 8, 16);
        assert!(peer.admin.ask(cq(1, 8, at)).0.is(Status::INVALID_QID));
        assert!(peer.admin.ask(sq(1, 8, at, 1)).0.is(Status::INVALID_QID));
        assert!(peer.admin.ask(sq(2, 8, at, 1)).0.is(Status::INVALID_CQ));
        assert!(
            peer.admin
                .ask(admin::delete_io_cq(Qid(1)))
                .0
                .is(Status::INVALID_QUEUE_DELETION)
        );
        assert_eq!(ring.ask(Sqe::new(opcode::FLUSH, NSID)).0, Status::SUCCESS);
        assert_eq!(
            peer.admin.ask(admin::abort(Qid(1), Cid(3))),
            (Status::SUCCESS, 1)
        );
        assert_eq!(
            peer.admin.ask(admin::delete_io_sq(Qid(1))).0,
            Status::SUCCESS
        );
        // A queue that was deleted is not served.
        ring.push(Sqe::new(opcode::FLUSH, NSID));
        ring.ring();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(ring.poll(), None);
        assert_eq!(
            peer.admin.ask(admin::delete_io_cq(Qid(1))).0,
            Status::SUCCESS
        );
    }
}

#[test]
fn a_reset_lets_go_of_everything() {
    let mut peer = Peer::start(2, 1, Plan::default());
    for _ in 0..4 {
        let mut rings = [peer.create(1, 8, 8), peer.create(2, 8, 8)];
        for ring in &mut rings {
            for _ in 0..20 {
                assert_eq!(ring.ask(Sqe::new(opcode::FLUSH, NSID)).0, Status::SUCCESS);
            }
        }
        peer.disable();
        // Nothing is fetched or posted any more.
        let [one, _] = &mut rings;
        one.push(Sqe::new(opcode::FLUSH, NSID));
        one.ring();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(one.poll(), None);
        peer.enable();
    }
    let mut cc = enabled();
    cc.set_shn(1);
    peer.write(offset::CC, cc.0);
    until(|| (peer.csts().shst() == 2).then_some(()));
}

#[test]
fn an_admin_queue_that_cannot_be_is_a_fatal_status() {
    let peer = Peer::start(1, 1, Plan::default());
    peer.disable();
    for asq in [0x1000, peer.memory + 64, u64::MAX - 4095] {
        word64(peer.args.bar + u64::from(offset::ASQ)).store(asq, Ordering::Relaxed);
        peer.write(offset::CC, enabled().0);
        until(|| peer.csts().cfs().then_some(()));
        assert!(!peer.csts().rdy());
        peer.disable();
    }
}
