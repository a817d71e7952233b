//! Warp 0, by one lane: properties, enable and disable, and the admin queue.

use crate::command::{NSID, PAGE};
use crate::device::{fence, idle, load32, load32_acquire, load64, now_ns, store32, store64};
use crate::io::{at, order, shared, words};
use crate::{Args, MAX_ENTRIES, MAX_QUEUES, MDTS, STOP, fault, is_reached};
use core::mem::offset_of;
use nvme_spec::admin::{QUEUE_CONTIGUOUS, cns, opcode};
use nvme_spec::feature::fid;
use nvme_spec::identify::{IdentifyController, IdentifyNamespace, LbaFormat, oncs};
use nvme_spec::register::{ALL_ONES, Aqa, Cap, Cc, Csts, offset};
use nvme_spec::{CQE_BYTES, Cqe, SQE_BYTES, Sqe, Status};

/// NVMe 1.4.
const VERSION: u32 = 0x0001_0400;
/// Longest time for the other warps to release their queues; CAP.TO has the same value.
const REST_NS: u64 = 2_000_000_000;
/// CAP.TO, in units of 500 ms.
const READY_TIMEOUT: u8 = 10;

/// Returns CAP of this controller.
#[inline(always)]
fn capabilities(args: &Args) -> u64 {
    let mut cap = Cap(0);
    cap.set_mqes(MAX_ENTRIES);
    cap.set_cqr(true);
    cap.set_to(READY_TIMEOUT);
    cap.set_dstrd(args.dstrd as u8);
    cap.set_css(1);
    cap.0
}

/// The admin queue while the controller is enabled.
#[derive(Clone, Copy)]
struct Admin {
    sq: u64,
    cq: u64,
    sq_entries: u32,
    cq_entries: u32,
    head: u32,
    tail: u32,
    phase: bool,
    /// Completion queues that were created, a bit each.
    cqs: [u64; 2],
}

/// A completion's status and dword 0.
type Answer = (Status, u32);

const OK: Answer = (Status::SUCCESS, 0);

/// Serves until the host sets the stop word, or the time is over.
pub fn run(args: &Args, end_ns: u64) {
    let register = |offset: u32| args.bar + u64::from(offset);
    store64(register(offset::CAP), capabilities(args));
    store32(register(offset::VS), VERSION);
    store32(register(offset::CSTS), 0);
    let mut admin = None;
    let mut csts = Csts(0);
    while load32(args.bar + STOP as u64) == 0 && now_ns() < end_ns {
        let dead = load32(shared!(args, dead));
        if dead == fault::GONE {
            let mut at = 0;
            while at < STOP as u64 {
                store32(args.bar + at, ALL_ONES);
                at += 4;
            }
            rest(args);
            continue;
        }
        if dead == fault::FATAL && !csts.cfs() {
            rest(args);
            csts.set_cfs(true);
            store32(register(offset::CSTS), csts.0);
        }
        // Acquire: pairs with the host's stores before CC.
        let cc = Cc(load32_acquire(register(offset::CC)));
        let enabled = csts.rdy() || csts.cfs();
        if cc.en() && !enabled {
            admin = enable(args, cc);
            csts.set_rdy(admin.is_some());
            csts.set_cfs(admin.is_none());
        } else if !cc.en() && enabled {
            admin = None;
            if !rest(args) {
                continue;
            }
            store32(shared!(args, dead), fault::NONE);
            csts = Csts(0);
        } else if enabled && cc.shn() != 0 && csts.shst() == 0 {
            rest(args);
            csts.set_shst(2);
        } else {
            match &mut admin {
                Some(admin) if dead == fault::NONE => admin.serve(args),
                _ => {}
            }
            idle();
            continue;
        }
        // All earlier reads and writes come before this store.
        fence();
        store32(register(offset::CSTS), csts.0);
    }
    let mut qid = 1;
    while qid <= args.queues {
        store32(at!(words(args, qid), wanted), order::END);
        qid += 1;
    }
}

/// Releases every queue; returns true if all warps answered in time.
fn rest(args: &Args) -> bool {
    let mut qid = 1;
    while qid <= args.queues {
        store32(at!(words(args, qid), wanted), order::REST);
        qid += 1;
    }
    let end_ns = now_ns() + REST_NS;
    let mut qid = 1;
    while qid <= args.queues {
        // Acquire: pairs with the fence of the queue's warp; what it wrote comes before CSTS.
        match load32_acquire(at!(words(args, qid), state)) {
            order::REST | order::END => qid += 1,
            _ if now_ns() > end_ns => return false,
            _ => idle(),
        }
    }
    true
}

/// Returns the admin queue that the properties name, or `None` when they name none that can be.
fn enable(args: &Args, cc: Cc) -> Option<Admin> {
    let aqa = Aqa(load32(args.bar + u64::from(offset::AQA)));
    let (sq_entries, cq_entries) = (u32::from(aqa.asqs_z()) + 1, u32::from(aqa.acqs_z()) + 1);
    let sq = load64(args.bar + u64::from(offset::ASQ));
    let cq = load64(args.bar + u64::from(offset::ACQ));
    let sizes = sq_entries >= 2 && cq_entries >= 2;
    let format = cc.mps() == 0 && cc.css() == 0 && cc.iosqes() == 6 && cc.iocqes() == 4;
    let places = sq.is_multiple_of(PAGE)
        && cq.is_multiple_of(PAGE)
        && is_reached(args, sq, u64::from(sq_entries) * SQE_BYTES as u64)
        && is_reached(args, cq, u64::from(cq_entries) * CQE_BYTES as u64);
    // Doorbells are 0 after a reset.
    let doorbells = args.bar + PAGE;
    store32(doorbells, 0);
    store32(doorbells + 4, 0);
    (sizes && format && places).then_some(Admin {
        sq,
        cq,
        sq_entries,
        cq_entries,
        head: 0,
        tail: 0,
        phase: true,
        cqs: [0; 2],
    })
}

impl Admin {
    /// Serves one command, if one waits and its completion has room.
    fn serve(&mut self, args: &Args) {
        let doorbells = args.bar + PAGE;
        // Acquire: pairs with the fence before the doorbell.
        let tail = load32_acquire(doorbells);
        // Acquire: pairs with the fence before the doorbell; entries before it were read.
        let seen = load32_acquire(doorbells + 4);
        let next = if self.tail + 1 == self.cq_entries {
            0
        } else {
            self.tail + 1
        };
        if tail == self.head || tail >= self.sq_entries || next == seen {
            return;
        }
        let at = self.sq + u64::from(self.head) * SQE_BYTES as u64;
        let word = |index: u64| load64(at + index * 8);
        let sqe = Sqe::from_words([
            word(0),
            word(1),
            word(2),
            word(3),
            word(4),
            word(5),
            word(6),
            word(7),
        ]);
        self.head = if self.head + 1 == self.sq_entries {
            0
        } else {
            self.head + 1
        };
        let (status, dw0) = self.answer(args, &sqe);
        let [lower, upper] = Cqe {
            dw0,
            dw1: 0,
            sqhd: self.head as u16,
            sqid: 0,
            cid: sqe.cid().0,
            phase_status: status.0 << 1 | u16::from(self.phase),
        }
        .to_words();
        let at = self.cq + u64::from(self.tail) * CQE_BYTES as u64;
        store64(at, lower);
        // Release: pairs with the acquire of the driver.
        fence();
        store64(at + 8, upper);
        self.phase ^= next == 0;
        self.tail = next;
    }

    fn answer(&mut self, args: &Args, sqe: &Sqe) -> Answer {
        match sqe.opcode() {
            opcode::IDENTIFY => (identify(args, sqe), 0),
            opcode::SET_FEATURES if sqe.cdw10 as u8 == fid::NUMBER_OF_QUEUES => {
                (Status::SUCCESS, (args.queues - 1) << 16 | (args.queues - 1))
            }
            opcode::CREATE_IO_CQ => self.create_cq(args, sqe),
            opcode::CREATE_IO_SQ => self.create_sq(args, sqe),
            opcode::DELETE_IO_SQ => self.delete_sq(args, sqe),
            opcode::DELETE_IO_CQ => self.delete_cq(args, sqe),
            // Bit 0: not aborted.
            opcode::ABORT => (Status::SUCCESS, 1),
            opcode::SET_FEATURES | opcode::GET_FEATURES => (Status::INVALID_FIELD.with_dnr(), 0),
            _ => (Status::INVALID_OPCODE.with_dnr(), 0),
        }
    }

    fn has_cq(&self, qid: u32) -> bool {
        let [low, high] = self.cqs;
        let word = if qid <= 64 { low } else { high };
        word >> ((qid - 1) % 64) & 1 != 0
    }

    fn flip_cq(&mut self, qid: u32) {
        let bit = 1 << ((qid - 1) % 64);
        match qid <= 64 {
            true => self.cqs[0] ^= bit,
            false => self.cqs[1] ^= bit,
        }
    }

    fn create_cq(&mut self, args: &Args, sqe: &Sqe) -> Answer {
        let (qid, entries) = (sqe.cdw10 & 0xFFFF, (sqe.cdw10 >> 16) + 1);
        if let Some(refused) = refused(args, sqe, qid, entries, CQE_BYTES) {
            return (refused.with_dnr(), 0);
        }
        if self.has_cq(qid) {
            return (Status::INVALID_QID.with_dnr(), 0);
        }
        let words = words(args, qid);
        store64(at!(words, cq), sqe.dptr[0]);
        store32(at!(words, cq_entries), entries);
        self.flip_cq(qid);
        OK
    }

    /// A submission queue must use the completion queue with its own number.
    fn create_sq(&mut self, args: &Args, sqe: &Sqe) -> Answer {
        let (qid, entries) = (sqe.cdw10 & 0xFFFF, (sqe.cdw10 >> 16) + 1);
        if let Some(refused) = refused(args, sqe, qid, entries, SQE_BYTES) {
            return (refused.with_dnr(), 0);
        }
        if sqe.cdw11 >> 16 != qid || !self.has_cq(qid) {
            return (Status::INVALID_CQ.with_dnr(), 0);
        }
        let words = words(args, qid);
        if load32(at!(words, wanted)) != order::REST {
            return (Status::INVALID_QID.with_dnr(), 0);
        }
        let stride = 4 << args.dstrd;
        store32(args.doorbells + u64::from(2 * qid * stride), 0);
        store32(args.doorbells + u64::from((2 * qid + 1) * stride), 0);
        store64(at!(words, sq), sqe.dptr[0]);
        store32(at!(words, sq_entries), entries);
        // Release: pairs with the acquire of the queue's warp.
        fence();
        store32(at!(words, wanted), order::SERVE);
        let end_ns = now_ns() + REST_NS;
        while load32_acquire(at!(words, state)) != order::SERVE {
            if now_ns() > end_ns {
                return (Status::INTERNAL_ERROR, 0);
            }
            idle();
        }
        OK
    }

    fn delete_sq(&mut self, args: &Args, sqe: &Sqe) -> Answer {
        let qid = sqe.cdw10 & 0xFFFF;
        let words = words(args, qid);
        let exists = qid != 0 && qid <= args.queues;
        if !exists || load32(at!(words, wanted)) != order::SERVE {
            return (Status::INVALID_QID.with_dnr(), 0);
        }
        store32(at!(words, wanted), order::REST);
        let end_ns = now_ns() + REST_NS;
        while load32_acquire(at!(words, state)) != order::REST {
            if now_ns() > end_ns {
                return (Status::INTERNAL_ERROR, 0);
            }
            idle();
        }
        OK
    }

    fn delete_cq(&mut self, args: &Args, sqe: &Sqe) -> Answer {
        let qid = sqe.cdw10 & 0xFFFF;
        if qid == 0 || qid > args.queues || !self.has_cq(qid) {
            return (Status::INVALID_QID.with_dnr(), 0);
        }
        if load32(at!(words(args, qid), wanted)) != order::REST {
            return (Status::INVALID_QUEUE_DELETION.with_dnr(), 0);
        }
        self.flip_cq(qid);
        OK
    }
}

/// Returns the reason why a queue cannot be created.
fn refused(args: &Args, sqe: &Sqe, qid: u32, entries: u32, bytes: usize) -> Option<Status> {
    let at = sqe.dptr[0];
    if qid == 0 || qid > args.queues.min(MAX_QUEUES) {
        Some(Status::INVALID_QID)
    } else if !(2..=MAX_ENTRIES).contains(&entries) {
        Some(Status::INVALID_QUEUE_SIZE)
    } else if !at.is_multiple_of(PAGE) {
        Some(Status::INVALID_PRP_OFFSET)
    } else if sqe.cdw11 & QUEUE_CONTIGUOUS == 0
        || !is_reached(args, at, u64::from(entries) * bytes as u64)
    {
        Some(Status::INVALID_FIELD)
    } else {
        None
    }
}

/// Writes a structure of Identify to the page of PRP1.
fn identify(args: &Args, sqe: &Sqe) -> Status {
    let to = sqe.dptr[0];
    if !to.is_multiple_of(PAGE) {
        return Status::INVALID_PRP_OFFSET.with_dnr();
    }
    if !is_reached(args, to, PAGE) {
        return Status::DATA_TRANSFER_ERROR;
    }
    let cns = sqe.cdw10 as u8;
    if !matches!(
        cns,
        cns::NAMESPACE | cns::CONTROLLER | cns::ACTIVE_NAMESPACES
    ) {
        return Status::INVALID_FIELD.with_dnr();
    }
    if cns == cns::NAMESPACE && sqe.nsid != NSID.0 {
        return Status::INVALID_NAMESPACE.with_dnr();
    }
    let mut at = 0;
    while at < PAGE {
        store64(to + at, 0);
        at += 8;
    }
    match cns {
        cns::CONTROLLER => controller(to),
        cns::NAMESPACE => namespace(args, to),
        _ if sqe.nsid < NSID.0 => store32(to, NSID.0),
        _ => {}
    }
    Status::SUCCESS
}

/// Stores the dword that holds the field at `field`, whose value is `value`; other fields in it
/// become 0.
fn put(to: u64, field: usize, value: u32) {
    store32(to + (field & !3) as u64, value << ((field & 3) * 8));
}

fn controller(to: u64) {
    const SQES: u32 = 0x66;
    const CQES: u32 = 0x44;
    put(to, offset_of!(IdentifyController, mdts), MDTS);
    put(to, offset_of!(IdentifyController, ver), VERSION);
    // "PEER" as serial number and model.
    put(
        to,
        offset_of!(IdentifyController, sn),
        u32::from_le_bytes(*b"PEER"),
    );
    put(
        to,
        offset_of!(IdentifyController, mn),
        u32::from_le_bytes(*b"PEER"),
    );
    put(to, offset_of!(IdentifyController, sqes), SQES | CQES << 8);
    put(to, offset_of!(IdentifyController, nn), NSID.0);
    put(
        to,
        offset_of!(IdentifyController, oncs),
        u32::from(oncs::COMPARE | oncs::WRITE_ZEROES),
    );
}

fn namespace(args: &Args, to: u64) {
    store64(to + offset_of!(IdentifyNamespace, nsze) as u64, args.blocks);
    store64(to + offset_of!(IdentifyNamespace, ncap) as u64, args.blocks);
    store64(to + offset_of!(IdentifyNamespace, nuse) as u64, args.blocks);
    let format = offset_of!(IdentifyNamespace, lbaf) + offset_of!(LbaFormat, lbads);
    put(to, format, args.block_shift);
}
