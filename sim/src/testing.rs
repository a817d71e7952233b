//! A small driver for the tests, written from the specification. It checks nothing itself: each
//! test compares statuses, and the protocol auditor checks what both sides did.
//!
//! The protocol auditor watches every test: see [`Driver::breaks`].

use crate::bus::interrupt::InterruptSink;
use crate::config::settings::{Config, NamespaceConfig};
use crate::controller::Controller;
use crate::medium::store::MemoryStore;
use crate::memory::SpinLock;
use crate::memory::VecMemory;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use nvme_auditor::{Finding, ProtocolSide, Rule};
use nvme_spec::admin::{self, QueueParams};
use nvme_spec::register::{Cc, Csts, offset};
use nvme_spec::{Cid, Cqe, Iova, Qid, Sqe, Status};

/// Number of entries of every ring of the driver.
pub const ENTRIES: u32 = 16;
/// Address of the data: PRP1 of `DATA` covers one page, and mapped pages follow it.
pub const DATA: u64 = 0x10_0000;
const RINGS: u64 = 0x1_0000;
const MEMORY: usize = 8 << 20;

pub struct QueueRing {
    tail: u32,
    head: u32,
    phase: bool,
}

/// Interrupts that were raised: each vector, and true if INTMS masked it.
#[derive(Default)]
pub struct Raised(SpinLock<Vec<(u16, bool)>>);

impl Raised {
    pub fn take(&self) -> Vec<(u16, bool)> {
        core::mem::take(&mut self.0.lock())
    }
}

impl InterruptSink for Raised {
    fn raise(&self, vector: u16, masked: bool, _level: &dyn Fn() -> bool) {
        self.0.lock().push((vector, masked));
    }
}

pub struct Driver {
    pub controller: Controller<Arc<VecMemory>>,
    pub memory: Arc<VecMemory>,
    pub now_ns: u64,
    rings: Vec<QueueRing>,
    next_cid: u16,
    /// Rules that the test violates on purpose.
    breaks: Vec<Rule>,
    /// Rules that the controller's injected faults violate.
    explained: Vec<Rule>,
    breaks_anything: bool,
}

/// Returns the plain configuration of most tests: 1 MiB of 512-byte blocks in memory.
pub fn config() -> Config {
    let store = MemoryStore::new(1 << 20).expect("1 MiB");
    let mut config = Config::empty();
    config
        .namespaces
        .push(NamespaceConfig::new(512, Box::new(store)));
    config.max_queues = 4;
    config.mqes = 64;
    config
}

pub fn sq_at(qid: u16) -> u64 {
    RINGS + u64::from(qid) * 0x2000
}

pub fn cq_at(qid: u16) -> u64 {
    RINGS + u64::from(qid) * 0x2000 + 0x1000
}

impl Driver {
    /// Makes a driver of a controller that is not enabled yet.
    pub fn cold(config: Config) -> Self {
        Self::make(config, None)
    }

    fn make(mut config: Config, interrupts: Option<Arc<Raised>>) -> Self {
        config.audit = true;
        let explained = config.faults.breaks();
        let memory = Arc::new(VecMemory::new(MEMORY));
        let queues = usize::from(config.max_queues) + 1;
        let mut controller =
            Controller::new(config, memory.clone()).expect("a valid configuration");
        if let Some(sink) = interrupts {
            controller = controller.with_interrupts(sink);
        }
        let rings = (0..queues)
            .map(|_| QueueRing {
                tail: 0,
                head: 0,
                phase: true,
            })
            .collect();
        Self {
            controller,
            memory,
            now_ns: 0,
            rings,
            next_cid: 0,
            breaks: Vec::new(),
            explained,
            breaks_anything: false,
        }
    }

    /// Declares that the test violates these rules on purpose. When the driver is dropped, the
    /// auditor must have found each of them and nothing else, apart from the rules that the
    /// controller's faults break.
    pub fn breaks(&mut self, rules: &[Rule]) {
        self.breaks.extend(rules);
    }

    /// Declares that the test may violate any rule of the driver's side; the controller may violate
    /// none.
    pub fn breaks_anything(&mut self) {
        self.breaks_anything = true;
    }

    /// Makes a driver of an enabled controller with its admin queue.
    pub fn new(config: Config) -> Self {
        let mut driver = Self::cold(config);
        driver.enable();
        driver
    }

    /// Makes a driver of an enabled controller, with a record of its interrupts.
    pub fn with_interrupts(config: Config) -> (Self, Arc<Raised>) {
        let raised = Arc::new(Raised::default());
        let mut driver = Self::make(config, Some(raised.clone()));
        driver.enable();
        (driver, raised)
    }

    /// Makes a driver of an enabled controller with I/O queue pair 1.
    pub fn with_queue(config: Config) -> Self {
        let mut driver = Self::new(config);
        driver.create_pair(1);
        driver
    }

    pub fn cc() -> Cc {
        let mut cc = Cc(0);
        cc.set_iosqes(6);
        cc.set_iocqes(4);
        cc.set_en(true);
        cc
    }

    pub fn csts(&self) -> Csts {
        Csts(self.controller.read32(offset::CSTS))
    }

    pub fn enable(&mut self) {
        self.controller
            .write32(offset::AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        self.controller.write64(offset::ASQ, sq_at(0));
        self.controller.write64(offset::ACQ, cq_at(0));
        self.controller.write32(offset::CC, Self::cc().0);
        self.clear_ring(0);
        assert!(self.csts().rdy(), "{:?}", self.csts());
    }

    fn clear_ring(&mut self, qid: u16) {
        self.memory
            .write(cq_at(qid), &[0; ENTRIES as usize * 16])
            .expect("mapped");
        self.rings[usize::from(qid)] = QueueRing {
            tail: 0,
            head: 0,
            phase: true,
        };
    }

    pub fn params(qid: u16, iova: u64) -> QueueParams {
        QueueParams {
            qid: Qid(qid),
            entries: ENTRIES,
            iova: Iova(iova),
        }
    }

    pub fn create_pair(&mut self, qid: u16) {
        self.create_pair_on(qid, None);
    }

    /// Creates a queue pair with interrupts.
    pub fn create_pair_on(&mut self, qid: u16, vector: Option<u16>) {
        self.clear_ring(qid);
        let cq = admin::create_io_cq(Self::params(qid, cq_at(qid)), vector);
        assert_eq!(self.admin(cq), Ok(0));
        let sq = admin::create_io_sq(Self::params(qid, sq_at(qid)), Qid(qid));
        assert_eq!(self.admin(sq), Ok(0));
    }

    /// Writes an entry into the ring without ringing the doorbell.
    pub fn push(&mut self, qid: u16, sqe: Sqe) -> u16 {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        let ring = &mut self.rings[usize::from(qid)];
        let words = sqe
            .with_cid(Cid(cid))
            .to_words()
            .map(u64::to_le_bytes)
            .concat();
        self.memory
            .write(sq_at(qid) + u64::from(ring.tail) * 64, &words)
            .expect("mapped");
        ring.tail = (ring.tail + 1) % ENTRIES;
        cid
    }

    pub fn ring(&self, qid: u16) {
        let tail = self.rings[usize::from(qid)].tail;
        self.controller
            .doorbells()
            .sq_tail(qid)
            .store(tail, Ordering::Release);
    }

    /// Takes the next completion without writing the head doorbell.
    pub fn peek(&self, qid: u16) -> Option<Cqe> {
        let ring = &self.rings[usize::from(qid)];
        let mut bytes = [0; 16];
        self.memory
            .read(cq_at(qid) + u64::from(ring.head) * 16, &mut bytes)
            .expect("mapped");
        let word = |at: usize| {
            bytes[at..at + 8]
                .iter()
                .rev()
                .fold(0, |w, b| w << 8 | u64::from(*b))
        };
        let cqe = Cqe::from_words(word(0), word(8));
        (cqe.phase() == ring.phase).then_some(cqe)
    }

    pub fn pop(&mut self, qid: u16) -> Option<Cqe> {
        let cqe = self.peek(qid)?;
        let ring = &mut self.rings[usize::from(qid)];
        ring.head = (ring.head + 1) % ENTRIES;
        ring.phase ^= ring.head == 0;
        let head = ring.head;
        self.controller
            .doorbells()
            .cq_head(qid)
            .store(head, Ordering::Release);
        Some(cqe)
    }

    /// Steps the controller at the current time.
    pub fn step(&mut self) -> u32 {
        self.controller.step(self.now_ns).commands
    }

    /// Takes every completion posted so far, as (CID, status code).
    pub fn drain(&mut self, qid: u16) -> Vec<(u16, u16)> {
        core::iter::from_fn(|| self.pop(qid))
            .map(|cqe| (cqe.cid, cqe.status().code()))
            .collect()
    }

    /// Executes one command: returns dword 0, or the status without DNR and More.
    pub fn run(&mut self, qid: u16, sqe: Sqe) -> Result<u32, Status> {
        let cid = self.push(qid, sqe);
        self.ring(qid);
        self.step();
        let cqe = self.pop(qid).expect("a completion");
        assert_eq!((cqe.cid, cqe.sqid), (cid, qid));
        match cqe.status() {
            status if status.is_success() => Ok(cqe.dw0),
            status => Err(Status(status.code())),
        }
    }

    pub fn admin(&mut self, sqe: Sqe) -> Result<u32, Status> {
        self.run(0, sqe)
    }

    /// Executes a command on queue 1.
    pub fn io(&mut self, sqe: Sqe) -> Result<u32, Status> {
        self.run(1, sqe)
    }

    pub fn bytes(&self, iova: u64, len: usize) -> Vec<u8> {
        let mut bytes = alloc::vec![0; len];
        self.memory.read(iova, &mut bytes).expect("mapped");
        bytes
    }

    pub fn fill(&self, iova: u64, value: u8, len: usize) {
        self.memory
            .write(iova, &alloc::vec![value; len])
            .expect("mapped");
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let mut findings = self.controller.findings();
        findings.retain(|one| !self.breaks_anything || one.rule.side() == ProtocolSide::Controller);
        judge(&findings, &self.breaks, &self.explained);
    }
}

/// Fails the test unless every rule of `breaks` has a finding and every finding is of a rule in
/// `breaks` or `explained`. In a test that is failing already, only prints the findings.
pub fn judge(findings: &[Finding], breaks: &[Rule], explained: &[Rule]) {
    let expected = |rule: &Rule| breaks.contains(rule) || explained.contains(rule);
    let unexpected: Vec<_> = findings.iter().filter(|one| !expected(&one.rule)).collect();
    let found = |rule: &&Rule| findings.iter().any(|one| one.rule == **rule);
    let missing: Vec<_> = breaks.iter().filter(|rule| !found(rule)).collect();
    if unexpected.is_empty() && missing.is_empty() {
        return;
    }
    let mut text = std::format!("the auditor did not find {missing:?}; it found:");
    for finding in unexpected {
        text += &std::format!("\n{finding}");
    }
    if std::thread::panicking() {
        std::eprintln!("{text}");
    } else {
        panic!("{text}");
    }
}
