//! A small NVMe controller that shares no code with ours: registers and offsets from the specification's figures,
//! memory by `pread` and `pwrite` on the client's files.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

pub const BLOCKS: u64 = 256;
pub const BLOCK: usize = 4096;
/// Queue entries at most, 0's based, with CAP.CQR; CAP.TO is 1 s, CAP.CSS the NVM command set.
const CAP: u64 = 4095 | 1 << 16 | 2 << 24 | 1 << 37;

/// I/O queue pairs.
pub const PAIRS: u32 = 128;

const DOORBELLS: u64 = 0x1000;

struct Ring {
    base: u64,
    entries: u32,
    index: u32,
    phase: u16,
    /// Index of the completion queue of a submission queue.
    cq: usize,
}

impl Ring {
    fn new(base: u64, entries: u32, cq: usize) -> Self {
        Self {
            base,
            entries,
            index: 0,
            phase: 1,
            cq,
        }
    }

    /// Returns the address of the next entry of `bytes` bytes; moves on.
    fn next(&mut self, bytes: u64) -> u64 {
        let address = self.base + u64::from(self.index) * bytes;
        self.index = (self.index + 1) % self.entries;
        address
    }
}

/// The controller. The doorbells lie in `bar`, where they lie in BAR0.
pub struct Controller {
    bar: File,
    registers: BTreeMap<u64, u32>,
    /// Memory by first address: length, file, and the offset of the range in the file.
    memory: BTreeMap<u64, (u64, File, u64)>,
    sqs: BTreeMap<usize, Ring>,
    cqs: BTreeMap<usize, Ring>,
    disk: Vec<u8>,
    executed: BTreeMap<u8, u32>,
    pub resets: u32,
    /// Identify with this CNS ends with Invalid Namespace or Format.
    pub refused: Option<u8>,
    /// Bytes of Identify data that are other ones: CNS, offset, value.
    pub identify: Vec<(u8, usize, u8)>,
    /// INTx is not disabled in the PCI Command register. Such an interrupt is never taken here, so the
    /// controller fails on its first completion, as SPDK's target does.
    pub intx: bool,
    /// A Format NVM, and the percentage that remains: each Identify Namespace halves it.
    format: Option<([u8; 64], u8)>,
}

impl Controller {
    pub fn new(bar: File) -> Self {
        let mut controller = Self {
            bar,
            registers: BTreeMap::new(),
            memory: BTreeMap::new(),
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            disk: vec![0; BLOCKS as usize * BLOCK],
            executed: BTreeMap::new(),
            resets: 0,
            refused: None,
            identify: Vec::new(),
            intx: false,
            format: None,
        };
        controller.reset();
        controller
    }

    /// Resets everything but the disk and the memory of the client.
    pub fn reset(&mut self) {
        self.registers = BTreeMap::from([
            (0x00, CAP as u32),
            (0x04, (CAP >> 32) as u32),
            (0x08, 0x0001_0400),
        ]);
        self.disable();
        self.resets += 1;
    }

    fn disable(&mut self) {
        self.sqs.clear();
        self.cqs.clear();
        self.bar.write_all_at(&[0; 4096], DOORBELLS).unwrap();
        self.registers.insert(0x1C, 0);
    }

    /// Sets a register, as firmware does.
    pub fn set(&mut self, register: u64, value: u32) {
        self.registers.insert(register, value);
    }

    pub fn read(&self, register: u64) -> u32 {
        self.registers.get(&register).copied().unwrap_or(0)
    }

    fn read64(&self, register: u64) -> u64 {
        u64::from(self.read(register)) | u64::from(self.read(register + 4)) << 32
    }

    pub fn write(&mut self, register: u64, value: u32) {
        let before = self.read(register);
        self.registers.insert(register, value);
        if register != 0x14 {
            return;
        }
        match (before & 1, value & 1) {
            (0, 1) => {
                let sizes = self.read(0x24);
                let sq = Ring::new(self.read64(0x28), (sizes & 0xFFF) + 1, 0);
                let cq = Ring::new(self.read64(0x30), (sizes >> 16 & 0xFFF) + 1, 0);
                self.sqs.insert(0, sq);
                self.cqs.insert(0, cq);
                self.registers.insert(0x1C, 1);
            }
            (1, 0) => self.disable(),
            // Normal shutdown is complete at once.
            _ if value >> 14 & 3 == 1 => drop(self.registers.insert(0x1C, 1 | 2 << 2)),
            _ => {}
        }
    }

    pub fn map(&mut self, address: u64, size: u64, file: File, offset: u64) {
        let before = self.memory.insert(address, (size, file, offset));
        assert!(before.is_none(), "{address:#x} is mapped twice");
    }

    pub fn unmap(&mut self, address: u64, size: u64) {
        let (mapped, ..) = self.memory.remove(&address).expect("it was mapped");
        assert_eq!(mapped, size);
    }

    /// Commands of I/O queues that were executed, by opcode.
    pub fn executed(&self, opcode: u8) -> u32 {
        self.executed.get(&opcode).copied().unwrap_or(0)
    }

    /// Ranges of memory that are mapped.
    pub fn maps(&self) -> usize {
        self.memory.len()
    }

    /// Returns whether the client has unmapped all its memory.
    pub fn is_let_go(&self) -> bool {
        self.memory.is_empty()
    }

    fn at(&self, address: u64, len: usize) -> (&File, u64) {
        let (start, (size, file, offset)) = self.memory.range(..=address).next_back().unwrap();
        let into = address - start;
        assert!(into + len as u64 <= *size, "{address:#x} is not mapped");
        (file, offset + into)
    }

    fn load<const N: usize>(&self, address: u64) -> [u8; N] {
        let (file, at) = self.at(address, N);
        let mut bytes = [0; N];
        file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    fn store(&self, address: u64, bytes: &[u8]) {
        let (file, at) = self.at(address, bytes.len());
        file.write_all_at(bytes, at).unwrap();
    }

    /// Executes the commands that the doorbells announce.
    pub fn step(&mut self) {
        let queues: Vec<usize> = self.sqs.keys().copied().collect();
        for qid in queues {
            let mut tail = [0; 4];
            let doorbell = DOORBELLS + qid as u64 * 8;
            self.bar.read_exact_at(&mut tail, doorbell).unwrap();
            while let Some(sq) = self.sqs.get_mut(&qid)
                && sq.index != u32::from_le_bytes(tail)
            {
                let address = sq.next(64);
                let (head, cq) = (sq.index, sq.cq);
                let sqe: [u8; 64] = self.load(address);
                if let Some((dw0, status)) = self.execute(qid, &sqe) {
                    self.complete(qid, cq, head, &sqe, dw0, status);
                }
                if let Some((format, _)) = self.format.take_if(|(_, left)| *left == 0) {
                    self.complete(0, 0, head, &format, 0, 0);
                }
            }
        }
    }

    fn complete(
        &mut self,
        qid: usize,
        cq: usize,
        head: u32,
        sqe: &[u8; 64],
        dw0: u32,
        status: u16,
    ) {
        if self.intx {
            *self.registers.entry(0x1C).or_default() |= 2;
            return;
        }
        let ring = self.cqs.get_mut(&cq).unwrap();
        let phase = ring.phase;
        let address = ring.next(16);
        if ring.index == 0 {
            ring.phase ^= 1;
        }
        let mut cqe = [0; 16];
        cqe[..4].copy_from_slice(&dw0.to_le_bytes());
        cqe[8..10].copy_from_slice(&(head as u16).to_le_bytes());
        cqe[10..12].copy_from_slice(&(qid as u16).to_le_bytes());
        cqe[12..14].copy_from_slice(&sqe[2..4]);
        cqe[14..].copy_from_slice(&(status << 1 | phase).to_le_bytes());
        // The phase tag comes last.
        self.store(address, &cqe[..14]);
        self.store(address + 14, &cqe[14..]);
    }

    /// Executes a command; returns dword 0 and status, or `None` for a command that stays open.
    fn execute(&mut self, qid: usize, sqe: &[u8; 64]) -> Option<(u32, u16)> {
        if qid > 0 {
            *self.executed.entry(sqe[0]).or_default() += 1;
        }
        let dword = |n: usize| u32::from_le_bytes(sqe[n * 4..][..4].try_into().unwrap());
        let prp = |n: usize| u64::from_le_bytes(sqe[24 + n * 8..][..8].try_into().unwrap());
        let (low, high) = (dword(10) & 0xFFFF, (dword(10) >> 16) + 1);
        match (qid, sqe[0]) {
            (0, 0x00) => drop(self.sqs.remove(&(low as usize))),
            (0, 0x01) => {
                let cq = (dword(11) >> 16) as usize;
                // What the queue's predecessor rang last.
                let doorbell = DOORBELLS + u64::from(low) * 8;
                self.bar.write_all_at(&[0; 4], doorbell).unwrap();
                self.sqs.insert(low as usize, Ring::new(prp(0), high, cq));
            }
            (0, 0x04) => drop(self.cqs.remove(&(low as usize))),
            (0, 0x05) => drop(self.cqs.insert(low as usize, Ring::new(prp(0), high, 0))),
            (0, 0x06) if self.refused == Some(dword(10) as u8) => return Some((0, 0x0B)),
            (0, 0x06) => {
                let cns = dword(10) as u8;
                let mut data = identify(cns, dword(1));
                if let (0, Some((_, left))) = (cns, &mut self.format) {
                    data[32] = 0x80 | *left;
                    *left = if *left > 40 { *left / 2 } else { 0 };
                }
                for (_, at, value) in self.identify.iter().filter(|other| other.0 == cns) {
                    data[*at] = *value;
                }
                self.store(prp(0), &data);
            }
            (0, 0x80) => {
                self.format = Some((*sqe, 90));
                return None;
            }
            // As many queue pairs as there are, whatever was asked for.
            (0, 0x09) if dword(10) as u8 == 7 => return Some(((PAIRS - 1) * 0x1_0001, 0)),
            (0, 0x09 | 0x0A) => {}
            (0, 0x0C) => return None,
            (1.., 0x00) => {}
            (1.., 0x01 | 0x02) => {
                let first = u64::from(dword(10)) | u64::from(dword(11)) << 32;
                let count = u64::from(dword(12) & 0xFFFF) + 1;
                if first + count > BLOCKS {
                    return Some((0, 0x80));
                }
                assert!(count <= 2, "MDTS is two pages");
                for n in 0..count as usize {
                    let at = (first as usize + n) * BLOCK;
                    if sqe[0] == 1 {
                        let block: [u8; BLOCK] = self.load(prp(n));
                        self.disk[at..at + BLOCK].copy_from_slice(&block);
                    } else {
                        self.store(prp(n), &self.disk[at..at + BLOCK]);
                    }
                }
            }
            (1.., 0x08) if self.identify.contains(&(1, 520, 1 << 3)) => {
                assert_eq!(dword(12) & 1 << 25, 0, "Deallocate, and DLFEAT is 0");
                let at = dword(10) as usize * BLOCK;
                let count = (dword(12) & 0xFFFF) as usize + 1;
                self.disk[at..at + count * BLOCK].fill(0);
            }
            _ => return Some((0, 0x01)),
        }
        Some((0, 0))
    }
}

fn identify(cns: u8, nsid: u32) -> [u8; 4096] {
    let mut data = [0; 4096];
    match cns {
        0 if nsid == 1 => {
            for at in [0, 8, 16] {
                data[at..at + 8].copy_from_slice(&BLOCKS.to_le_bytes());
            }
            data[130] = 12;
        }
        1 => {
            data[4..24].copy_from_slice(b"FOREIGN-1           ");
            data[24..64].copy_from_slice(b"a controller of another project         ");
            data[64..72].copy_from_slice(b"1       ");
            data[77] = 1;
            data[80..84].copy_from_slice(&0x0001_0400u32.to_le_bytes());
            (data[512], data[513]) = (0x66, 0x44);
            data[516] = 1;
        }
        2 if nsid == 0 => data[0] = 1,
        _ => {}
    }
    data
}
