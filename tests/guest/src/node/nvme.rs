//! A controller driven by its registers and one admin queue, without the project's driver in between.
// UNSAFETY: volatile accesses inside BAR 0 and one arena, both mapped for the life of the process.
#![allow(unsafe_code)]

use super::node::{self, Node, PAGE};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

const ENTRIES: usize = 16;
/// Number of pages of the arena: the queues, and one page for data.
pub const PAGES: usize = 3;
const DATA: usize = 2;
const CAP_HIGH: usize = 0x4;
const CC: usize = 0x14;
const CSTS: usize = 0x1C;
const AQA: usize = 0x24;
const ASQ: usize = 0x28;
const ACQ: usize = 0x30;
const DOORBELLS: usize = 0x1000;

/// An enabled controller.
pub struct Nvme {
    pub node: Node,
    bar: *mut u8,
    stride: usize,
    arena: *mut u8,
    /// Address of each page of the arena for the controller.
    iovas: [u64; PAGES],
    tail: usize,
    head: usize,
    phase: u32,
}

impl Nvme {
    /// Maps an arena and enables the controller with queues in it.
    pub fn start(node: Node) -> Result<Self, String> {
        let arena = node::arena(PAGES * PAGE)?;
        let mut iovas = [0; PAGES];
        for (page, iova) in iovas.iter_mut().enumerate() {
            // The pages are mapped one by one: without an IOMMU their addresses are not contiguous.
            let mapped = node.map((arena as usize + page * PAGE) as u64, PAGE);
            (_, *iova) = mapped.map_err(|errno| format!("MAP: errno {errno}"))?;
        }
        let bar = node
            .bar()
            .map_err(|errno| format!("mmap of BAR 0: errno {errno}"))?;
        let mut nvme = Self {
            node,
            bar,
            stride: 0,
            arena,
            iovas,
            tail: 0,
            head: 0,
            phase: 1,
        };
        nvme.stride = 4 << (nvme.read(CAP_HIGH) & 0xF);
        nvme.enable()?;
        Ok(nvme)
    }

    fn at(&self, offset: usize) -> *mut u32 {
        self.bar.wrapping_add(offset).cast()
    }

    fn read(&self, offset: usize) -> u32 {
        // SAFETY: the register lies inside the mapped BAR.
        unsafe { self.at(offset).read_volatile() }
    }

    fn write(&self, offset: usize, value: u32) {
        // SAFETY: the register lies inside the mapped BAR.
        unsafe { self.at(offset).write_volatile(value) }
    }

    pub fn is_enabled(&self) -> bool {
        self.read(CC) & 1 != 0
    }

    /// Rings for a queue that the disabled controller does not have, as a driver does that does not know of a stop yet:
    /// QEMU logs it.
    pub fn ring_stale(&self) {
        self.write(DOORBELLS, 1);
    }

    /// Enables the controller with both queues empty.
    pub fn enable(&mut self) -> Result<(), String> {
        // SAFETY: the first two pages of the arena, which no queue uses: the controller is disabled.
        unsafe { self.arena.write_bytes(0, 2 * PAGE) };
        let size = (ENTRIES - 1) as u32;
        self.write(AQA, size << 16 | size);
        for (register, address) in [(ASQ, self.iovas[0]), (ACQ, self.iovas[1])] {
            self.write(register, address as u32);
            self.write(register + 4, (address >> 32) as u32);
        }
        self.write(CC, 6 << 16 | 4 << 20 | 1);
        (self.tail, self.head, self.phase) = (0, 0, 1);
        for _ in 0..2000 {
            if self.read(CSTS) & 3 == 1 {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(format!("not ready: CSTS {:#x}", self.read(CSTS)))
    }

    /// Sends Identify Controller and returns its status, or None without an answer; `consumed` rings the head
    /// doorbell.
    pub fn identify(&mut self, consumed: bool) -> Option<u32> {
        self.identify_to(self.iovas[DATA], consumed)
    }

    /// Sends Identify Controller as [`identify`](Self::identify) does, with a page at any address.
    pub fn identify_to(&mut self, to: u64, consumed: bool) -> Option<u32> {
        let entry = self.arena.wrapping_add(64 * self.tail).cast::<u32>();
        let words = [
            (0, 6 | (self.tail as u32) << 16),
            (6, to as u32),
            (7, (to >> 32) as u32),
            (10, 1),
        ];
        for (at, value) in words {
            // SAFETY: the access stays inside the submission queue.
            unsafe { entry.add(at).write_volatile(value) };
        }
        self.tail = (self.tail + 1) % ENTRIES;
        fence(Ordering::SeqCst);
        self.write(DOORBELLS, self.tail as u32);
        let done = self.arena.wrapping_add(PAGE + 16 * self.head).cast::<u32>();
        for _ in 0..5000 {
            // SAFETY: the access stays inside the completion queue.
            let word = unsafe { done.add(3).read_volatile() };
            if word >> 16 & 1 == self.phase {
                self.head = (self.head + 1) % ENTRIES;
                self.phase ^= u32::from(self.head == 0);
                if consumed {
                    self.write(DOORBELLS + self.stride, self.head as u32);
                }
                return Some(word >> 17);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// Checks that Identify Controller into the arena gives the vendor.
    pub fn works(&mut self) -> Result<(), String> {
        let data = self.arena.wrapping_add(DATA * PAGE);
        // SAFETY: the page of the arena for data, which no command uses now.
        unsafe { data.write_bytes(0, PAGE) };
        let status = self.identify(true);
        // SAFETY: as above.
        let vendor = unsafe { data.cast::<u16>().read_volatile() };
        match (status, vendor) {
            (Some(0), 1..) => Ok(()),
            other => Err(format!("Identify: status and vendor {other:x?}")),
        }
    }
}
