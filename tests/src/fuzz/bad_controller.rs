//! A controller whose answers come from the fuzzer: registers, completion rings, the Identify page.
//!
//! Not [`Hand`](crate::hand::Hand): a script decides each answer, and the rings lie where the driver's registers
//! say. It is honest unless the fuzzer's bytes say otherwise, so that a driver gets far. Invariant: it
//! remembers what the driver did to its registers and fails the run when no driver may do that. The auditor
//! watches the queues.

use super::audited::Audited;
use super::is_audited;
use arbitrary::{Arbitrary, Unstructured};
use nvme_core::mem::{CqCell, DmaWords, SqCell};
use nvme_core::spec::admin::{cns, opcode};
use nvme_core::spec::register::{Aqa, Cap, Cc, Csts, offset};
use nvme_core::spec::{Cqe, Iova, Sqe};
use nvme_core::sync::{AtomicU32, AtomicU64, Order, Scope};
use nvme_core::{ControllerIdentity, RegisterAccess};
use std::cell::{Cell, RefCell};

/// Address of the Identify page for the controller.
pub const PAGE: Iova = Iova(0x7_0000);
/// Address of the lists of the I/O queue's commands.
pub const LISTS: Iova = Iova(0x30_0000);

/// The fuzzer's choices for the controller's properties.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Shape {
    cap: Option<u64>,
    vs: u32,
    crto: u32,
    mqes_z: u16,
    to: u8,
    mps: u8,
    crms: u8,
    /// Reads of CSTS before it follows CC.
    lag: u8,
    mdts: u8,
    entry_sizes: Option<(u8, u8)>,
    sgls: u8,
    has_power_states: bool,
    host_memory: u8,
    namespaces: u8,
    granted: u32,
    lbads: u8,
    /// True if the controller stops acting once all bytes are used.
    goes_silent: bool,
}

/// An action of the controller.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Turn {
    Nothing,
    /// Answers everything correctly.
    Honest,
    /// Ends one of the commands that the controller has fetched.
    Answer {
        io: bool,
        pick: u8,
        status: u16,
        dw0: u32,
        sqhd: Option<u16>,
        sqid: Option<u16>,
    },
    /// Posts an entry that answers no command.
    Post {
        io: bool,
        cid: u16,
        words: (u64, u64),
    },
    /// Writes anywhere in a completion ring: old entries, torn ones, any phase.
    Smear {
        io: bool,
        index: u8,
        words: (u64, u64),
    },
    /// Writes into the Identify page.
    Dma {
        index: u16,
        word: u64,
    },
}

/// A queue pair as the controller sees it.
pub struct Rings {
    pub qid: u16,
    /// Address of the submission ring.
    pub at: Iova,
    pub sq: Vec<SqCell>,
    pub cq: Vec<CqCell>,
    pub tail: AtomicU32,
    pub head: AtomicU32,
    fetched: Cell<u32>,
    posted: Cell<usize>,
    waiting: RefCell<Vec<Sqe>>,
}

impl Rings {
    fn new(qid: u16, at: Iova, sq_entries: usize, cq_entries: usize) -> Self {
        Self {
            qid,
            at,
            sq: (0..sq_entries).map(|_| SqCell::default()).collect(),
            cq: (0..cq_entries).map(|_| CqCell::default()).collect(),
            tail: AtomicU32::new(0),
            head: AtomicU32::new(0),
            fetched: Cell::new(0),
            posted: Cell::new(0),
            waiting: RefCell::default(),
        }
    }

    /// Sets the doorbells and counters as a reset leaves them.
    fn reset(&self) {
        self.tail.store(0, Order::Relaxed, Scope::Sys);
        self.head.store(0, Order::Relaxed, Scope::Sys);
        self.fetched.set(0);
        self.posted.set(0);
        self.waiting.borrow_mut().clear();
    }

    /// Returns whether the doorbells are as a reset leaves them.
    fn is_reset(&self) -> bool {
        let rung = [&self.tail, &self.head].map(|bell| bell.load(Order::Relaxed, Scope::Sys));
        rung == [0, 0]
            && (self.fetched.get(), self.posted.get()) == (0, 0)
            && self.waiting.borrow().is_empty()
    }

    fn answer(&self, cid: u16, status: u16, dw0: u32) -> Cqe {
        Cqe {
            dw0,
            dw1: 0,
            sqhd: self.fetched.get() as u16,
            sqid: self.qid,
            cid,
            phase_status: status << 1,
        }
    }
}

/// The controller.
pub struct BadController<'a> {
    script: RefCell<Unstructured<'a>>,
    shape: Shape,
    pub admin: Rings,
    pub io: Rings,
    pub page: Vec<AtomicU64>,
    pub lists: Vec<AtomicU64>,
    pub audited: RefCell<Audited>,
    cc: Cell<Cc>,
    csts: Cell<Csts>,
    lag: Cell<u8>,
    queue: Cell<(u32, u64, u64)>,
    /// The last CC that the driver read.
    seen_cc: Cell<Cc>,
    /// True if the driver may set CC.EN.
    pub may_enable: Cell<bool>,
    identity: ControllerIdentity,
}

impl<'a> BadController<'a> {
    /// Returns a controller whose geometry and actions come from `bytes`, with `list_words` words for lists; `None`
    /// when they are too few.
    pub fn new(bytes: &'a [u8], list_words: usize) -> Option<Self> {
        let mut script = Unstructured::new(bytes);
        let shape = Shape::arbitrary(&mut script).ok()?;
        Some(Self {
            script: RefCell::new(script),
            admin: Rings::new(0, Iova(0x10_0000), 4, 5),
            io: Rings::new(1, Iova(0x20_0000), 8, 6),
            page: (0..512).map(|_| AtomicU64::new(0)).collect(),
            lists: (0..list_words).map(|_| AtomicU64::new(0)).collect(),
            audited: RefCell::new(Audited::new(is_audited(bytes))),
            cc: Cell::new(Cc(0)),
            csts: Cell::new(Csts(0)),
            lag: Cell::new(0),
            queue: Cell::new((0, 0, 0)),
            seen_cc: Cell::new(Cc(0)),
            may_enable: Cell::new(false),
            identity: ControllerIdentity::new(),
            shape,
        })
    }

    /// Returns the Identify page as the driver sees it.
    pub fn words(&self) -> DmaWords<'_> {
        DmaWords::new(&self.page, PAGE)
    }

    /// Returns the next thing that the bytes say; `None` when they are used up.
    pub fn next<T: Arbitrary<'a>>(&self) -> Option<T> {
        let mut script = self.script.borrow_mut();
        match script.is_empty() {
            true => None,
            false => script.arbitrary().ok(),
        }
    }

    /// Takes one action. Returns `false` if the bytes are used up.
    pub fn act(&self) -> bool {
        let turn = self.next::<Turn>();
        self.fetch(&self.admin);
        self.fetch(&self.io);
        let rings = |io| if io { &self.io } else { &self.admin };
        match turn {
            None if self.shape.goes_silent => {}
            None | Some(Turn::Honest) => self.serve(),
            Some(Turn::Nothing) => {}
            Some(Turn::Answer {
                io,
                pick,
                status,
                dw0,
                sqhd,
                sqid,
            }) => {
                let rings = rings(io);
                let count = rings.waiting.borrow().len();
                if count > 0 {
                    let sqe = rings.waiting.borrow_mut().remove(usize::from(pick) % count);
                    let mut cqe = rings.answer(sqe.cid().0, status, dw0);
                    cqe.sqhd = sqhd.unwrap_or(cqe.sqhd);
                    cqe.sqid = sqid.unwrap_or(cqe.sqid);
                    self.post(rings, cqe);
                }
            }
            Some(Turn::Post { io, cid, words }) => {
                let mut cqe = Cqe::from_words(words.0, words.1);
                cqe.cid = cid;
                self.post(rings(io), cqe);
            }
            Some(Turn::Smear { io, index, words }) => {
                self.audited.borrow_mut().lose();
                let cells = &rings(io).cq;
                cells[usize::from(index) % cells.len()].post(Cqe::from_words(words.0, words.1));
            }
            Some(Turn::Dma { index, word }) => {
                self.page[usize::from(index) % 512].store(word, Order::Relaxed, Scope::Sys);
            }
        }
        turn.is_some()
    }

    /// Returns a word of the driver's memory.
    fn word(&self, at: u64) -> Option<u64> {
        let entry = |rings: &Rings| {
            let offset = at.checked_sub(rings.at.0)? as usize;
            let sqe = rings.sq.get(offset / 64)?.load();
            Some(sqe.to_words()[offset % 64 / 8])
        };
        let list = || {
            let offset = at.checked_sub(LISTS.0)? as usize;
            Some(self.lists.get(offset / 8)?.load(Order::Relaxed, Scope::Sys))
        };
        entry(&self.admin).or_else(|| entry(&self.io)).or_else(list)
    }

    /// Reads the doorbells and fetches the new commands.
    fn fetch(&self, rings: &Rings) {
        let word = |at| self.word(at);
        let mut audited = self.audited.borrow_mut();
        let [tail, head] =
            [&rings.tail, &rings.head].map(|bell| bell.load(Order::Acquire, Scope::Sys));
        assert!(
            (tail as usize) < rings.sq.len(),
            "tail doorbell {tail} of queue {}",
            rings.qid
        );
        audited.doorbells(rings.qid, tail, head, &word);
        while rings.fetched.get() != tail {
            let index = rings.fetched.get();
            let sqe = rings.sq[index as usize].load();
            audited.fetched(rings.qid, index, &sqe, &word);
            rings.waiting.borrow_mut().push(sqe);
            rings.fetched.set((index + 1) % rings.sq.len() as u32);
        }
    }

    fn post(&self, rings: &Rings, mut cqe: Cqe) {
        let posted = rings.posted.get();
        let (at, lap) = (posted % rings.cq.len(), posted / rings.cq.len());
        cqe.phase_status = cqe.phase_status & !1 | u16::from(lap % 2 == 0);
        let word = |at| self.word(at);
        let mut audited = self.audited.borrow_mut();
        audited.posted(rings.qid, at as u32, &cqe, &word);
        rings.cq[at].post(cqe);
        rings.posted.set(posted + 1);
    }

    /// Answers all commands as a working controller does.
    fn serve(&self) {
        for sqe in self.admin.waiting.take() {
            let dw0 = match sqe.opcode() {
                opcode::IDENTIFY => self.identify(&sqe),
                opcode::SET_FEATURES => self.shape.granted,
                _ => 0,
            };
            self.post(&self.admin, self.admin.answer(sqe.cid().0, 0, dw0));
        }
        for sqe in self.io.waiting.take() {
            self.post(&self.io, self.io.answer(sqe.cid().0, 0, 0));
        }
    }

    fn identify(&self, sqe: &Sqe) -> u32 {
        assert_eq!(sqe.dptr, [PAGE.0, 0], "Identify data goes to the page");
        let mut bytes = [0u8; 4096];
        let shape = &self.shape;
        match sqe.cdw10 as u8 {
            cns::CONTROLLER => {
                bytes[77] = shape.mdts;
                bytes[258] = shape.mdts; // Abort command limit
                bytes[265] = u8::from(shape.has_power_states);
                bytes[272] = shape.host_memory; // HMPRE
                let (sqes, cqes) = shape.entry_sizes.unwrap_or((0x66, 0x44));
                (bytes[512], bytes[513]) = (sqes, cqes);
                bytes[516] = shape.namespaces;
                bytes[536] = shape.sgls;
            }
            cns::ACTIVE_NAMESPACES => {
                for nsid in 1..=usize::from(shape.namespaces % 40) {
                    bytes[nsid * 4 - 4] = nsid as u8;
                }
            }
            cns::NAMESPACE => {
                bytes[1] = 8; // 2,048 blocks
                bytes[128 + 2] = shape.lbads;
            }
            other => panic!("the driver never asks for CNS {other:#x}"),
        }
        for (word, bytes) in self.page.iter().zip(bytes.chunks_exact(8)) {
            let value = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            word.store(value, Order::Relaxed, Scope::Sys);
        }
        0
    }

    fn cap(&self) -> u64 {
        let shape = &self.shape;
        let mut cap = Cap(0);
        cap.set_mqes(u32::from(shape.mqes_z | 63) + 1);
        cap.set_to(shape.to);
        cap.set_css(1);
        cap.set_mpsmin(u8::from(shape.mps > 250) * 5);
        cap.set_mpsmax(shape.mps % 16);
        cap.set_crms(shape.crms & 3);
        shape.cap.unwrap_or(cap.0)
    }

    /// Moves CSTS towards the state that CC asks for, after a delay.
    fn settle(&self) -> Csts {
        let (cc, mut csts) = (self.cc.get(), self.csts.get());
        let target = (cc.en(), if cc.shn() != 0 && cc.en() { 2 } else { 0 });
        if (csts.rdy(), csts.shst()) != target {
            let left = self.lag.get();
            self.lag.set(left.saturating_sub(1));
            if left == 0 {
                csts.set_rdy(target.0);
                csts.set_shst(target.1);
                if !cc.en() {
                    self.admin.reset();
                    self.io.reset();
                    self.audited.borrow_mut().reset();
                }
            }
        }
        self.csts.set(csts);
        csts
    }

    /// Returns the honest value, or another.
    fn answer<T: Arbitrary<'a>>(&self, honest: T, ones: T) -> T {
        match self.next::<u8>() {
            Some(0xFF) => ones,
            Some(0xFD | 0xFE) => self.next().unwrap_or(honest),
            _ => honest,
        }
    }
}

impl RegisterAccess for BadController<'_> {
    fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    fn read32(&self, at: u32) -> u32 {
        let honest = match at {
            offset::VS => self.shape.vs,
            offset::CC => self.cc.get().0,
            offset::CSTS => self.settle().0,
            offset::CRTO => self.shape.crto,
            _ => panic!("the driver has no use for register {at:#x}"),
        };
        let told = self.answer(honest, u32::MAX);
        if at == offset::CC {
            self.seen_cc.set(Cc(told));
        }
        told
    }

    fn read64(&self, at: u32) -> u64 {
        assert_eq!(at, offset::CAP, "the driver has no use for this register");
        self.answer(self.cap(), u64::MAX)
    }

    fn write32(&self, at: u32, value: u32) {
        let (aqa, asq, acq) = self.queue.get();
        if at == offset::AQA {
            assert!(self.may_enable.get(), "the admin queue moves while enabled");
            return self.queue.set((value, asq, acq));
        }
        assert_eq!(at, offset::CC, "a driver does not write this register");
        let cc = Cc(value);
        if cc.en() && !self.seen_cc.get().en() {
            assert!(self.may_enable.get(), "enabled before memory was ready");
            assert!(Aqa(aqa).asqs_z() > 0 && Aqa(aqa).acqs_z() > 0 && asq != acq);
            assert_eq!((cc.iosqes(), cc.iocqes(), cc.shn()), (6, 4, 0), "{cc:?}");
        }
        if cc.en() && self.may_enable.get() {
            let mut audited = self.audited.borrow_mut();
            // The registers may have reported a reset that did not happen.
            if !self.admin.is_reset() || !self.io.is_reset() {
                audited.lose();
            }
            audited.enable(cc, self.queue.get());
        }
        self.lag.set(self.shape.lag % 8);
        self.cc.set(cc);
    }

    fn write64(&self, at: u32, value: u64) {
        assert!(self.may_enable.get(), "the admin queue moves while enabled");
        let (aqa, asq, acq) = self.queue.get();
        match at {
            offset::ASQ => self.queue.set((aqa, value, acq)),
            offset::ACQ => self.queue.set((aqa, asq, value)),
            _ => panic!("a driver does not write register {at:#x}"),
        }
    }
}
