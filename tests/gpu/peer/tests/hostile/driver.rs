//! The driver's side: its memory, its rings, and the threads of the controller that it uses.
// UNSAFETY: rings, doorbells and data are raw memory that the controller's threads share.
#![allow(unsafe_code)]

use super::{BLOCKS, PAGE, PAGES};
use gpu_peer::{Args, BAR_BYTES, Plan, QUEUE_BYTES, STOP, Shared, Window, run};
use nvme_spec::admin::{self, QueueParams};
use nvme_spec::register::{Aqa, Cc, Csts, offset};
use nvme_spec::{Cid, Cqe, Iova, Qid, Sqe, Status};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Returns zeroed memory from the start of a page on, which is never freed: threads may outlive a
/// test that fails.
pub fn memory(bytes: usize) -> u64 {
    let words = vec![0u64; bytes / 8 + PAGE / 8].leak();
    (words.as_mut_ptr().expose_provenance() as u64).next_multiple_of(PAGE as u64)
}

pub fn word32<'a>(at: u64) -> &'a AtomicU32 {
    // SAFETY: the address is inside leaked memory, which atomics alone touch.
    unsafe { &*std::ptr::with_exposed_provenance(at as usize) }
}

pub fn word64<'a>(at: u64) -> &'a AtomicU64 {
    // SAFETY: as above.
    unsafe { &*std::ptr::with_exposed_provenance(at as usize) }
}

/// A pair of rings on the driver's side.
pub struct Ring {
    pub sq: u64,
    pub cq: u64,
    pub doorbells: [u64; 2],
    pub sq_entries: u32,
    pub cq_entries: u32,
    pub tail: u32,
    pub head: u32,
    pub phase: bool,
}

impl Ring {
    pub fn push(&mut self, sqe: Sqe) {
        let at = self.sq + u64::from(self.tail) * 64;
        for (index, word) in sqe.to_words().into_iter().enumerate() {
            word64(at + index as u64 * 8).store(word, Ordering::Relaxed);
        }
        self.tail = (self.tail + 1) % self.sq_entries;
    }

    pub fn ring(&self) {
        word32(self.doorbells[0]).store(self.tail, Ordering::Release);
    }

    pub fn poll(&mut self) -> Option<Cqe> {
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

    pub fn give_back(&self) {
        word32(self.doorbells[1]).store(self.head, Ordering::Release);
    }

    /// Returns the next completion.
    pub fn wait(&mut self) -> Cqe {
        let cqe = until(|| self.poll());
        self.give_back();
        cqe
    }

    /// Sends one command and waits for its end.
    pub fn ask(&mut self, sqe: Sqe) -> (Status, u32) {
        self.push(sqe.with_cid(Cid(0x4321)));
        self.ring();
        let cqe = self.wait();
        assert_eq!(cqe.cid(), Cid(0x4321));
        (cqe.status(), cqe.dw0)
    }
}

pub fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "no answer");
        std::thread::yield_now();
    }
}

pub struct Peer {
    pub args: Args,
    pub memory: u64,
    pub threads: Vec<JoinHandle<()>>,
    pub admin: Ring,
}

impl Peer {
    pub fn start(queues: u32, warps: u32, plan: Plan) -> Self {
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
        // SAFETY: every address names leaked memory of the right size.
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

    pub fn register(&self, offset: u32) -> u32 {
        word32(self.args.bar + u64::from(offset)).load(Ordering::Acquire)
    }

    pub fn write(&self, offset: u32, value: u32) {
        word32(self.args.bar + u64::from(offset)).store(value, Ordering::Release);
    }

    pub fn csts(&self) -> Csts {
        Csts(self.register(offset::CSTS))
    }

    pub fn enable(&mut self) {
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

    pub fn disable(&self) {
        self.write(offset::CC, 0);
        until(|| (self.csts().0 == 0).then_some(()));
    }

    /// Returns the memory of a queue's rings: 16 pages each.
    pub fn queue(&self, qid: u16, sq_entries: u32, cq_entries: u32) -> Ring {
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

    pub fn create(&mut self, qid: u16, sq_entries: u32, cq_entries: u32) -> Ring {
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

    /// Returns a page of data.
    pub fn page(&self, index: usize) -> u64 {
        self.memory + ((80 + index) * PAGE) as u64
    }

    pub fn shared(&self) -> Shared {
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
            // The message of a thread that panicked was already printed.
            let _ = thread.join();
        }
    }
}

pub fn enabled() -> Cc {
    let mut cc = Cc(0);
    cc.set_en(true);
    cc.set_iosqes(6);
    cc.set_iocqes(4);
    cc
}

pub fn params(qid: u16, entries: u32, at: u64) -> QueueParams {
    QueueParams {
        qid: Qid(qid),
        entries,
        iova: Iova(at),
    }
}

pub fn fill(at: u64, bytes: usize, value: u64) {
    for index in 0..bytes as u64 / 8 {
        word64(at + index * 8).store(value + index, Ordering::Relaxed);
    }
}
