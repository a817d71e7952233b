//! The controller as a PCI function: its regions, and the effect of an access to them.
//!
//! BAR 0 holds the registers, which are trapped, and from 1000h on the doorbells, which a client
//! may map. BAR 4 holds the MSI-X table and its pending bits. Clients that deliver interrupts keep
//! their own copy of the table; this one is plain memory.

use super::config_space::{self, BarLayout, ConfigSpace};
use super::irq::InterruptLines;
use super::wire::{self, region};
use crate::controller::Controller;
use crate::memory::HostMemory;
use crate::runner::Runner;
use nvme_spec::register::{ALL_ONES, Cc, offset};
use rustix::io::Errno;
use std::boxed::Box;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::vec;

/// Bytes of an MSI-X table entry.
const MSIX_ENTRY: usize = 16;
/// Offset of the doorbells, in BAR 0 and in their memfd.
const DOORBELLS: u64 = offset::DOORBELLS as u64;

/// A PCI function and the threads that serve it.
pub(crate) struct PciFunction {
    pub controller: Arc<Controller<HostMemory>>,
    pub runner: Arc<Runner>,
    pub irqs: Arc<InterruptLines>,
    config: ConfigSpace,
    layout: BarLayout,
    table: Box<[u8]>,
    /// True if the client signals an eventfd when it rings, so that the threads may sleep long.
    pub client_signals: bool,
}

impl PciFunction {
    pub fn new(
        controller: Arc<Controller<HostMemory>>,
        runner: Arc<Runner>,
        irqs: Arc<InterruptLines>,
    ) -> Self {
        let vectors = controller.vectors();
        let doorbells = DOORBELLS + controller.doorbells().bytes() as u64;
        let table = (usize::from(vectors) * MSIX_ENTRY).next_multiple_of(4096);
        let pba = usize::from(vectors).div_ceil(64) * 8;
        let layout = BarLayout {
            // The BAR has at least the size that common drivers map without reading it first.
            bar0: doorbells.next_power_of_two().max(16 << 10),
            bar4: (table + pba.next_multiple_of(4096)).next_power_of_two() as u64,
            vectors,
            pba: table as u32,
        };
        let mut function = Self {
            controller,
            runner,
            irqs,
            config: ConfigSpace::new(layout),
            layout,
            table: vec![0; table].into_boxed_slice(),
            client_signals: false,
        };
        function.reset();
        function
    }

    /// Returns the size of a region in bytes; 0 for an unknown region.
    pub fn bytes(&self, index: u32) -> u64 {
        match index {
            region::BAR0 => self.layout.bar0,
            region::BAR4 => self.layout.bar4,
            region::CONFIG => config_space::BYTES as u64,
            _ => 0,
        }
    }

    /// Returns the mappable part of region `index`, with its descriptor.
    pub fn mappable(&self, index: u32) -> Option<(wire::SparseArea, OwnedFd)> {
        let doorbells = self.controller.doorbells();
        if index != region::BAR0 {
            return None;
        }
        let fd = doorbells.fd()?.try_clone_to_owned().ok()?;
        let area = wire::SparseArea {
            offset: DOORBELLS,
            size: doorbells.bytes() as u64,
        };
        Some((area, fd))
    }

    /// Checks that `count` bytes at `at` are inside region `index`.
    fn check(&self, index: u32, at: u64, count: usize) -> Result<(), Errno> {
        let end = at.checked_add(count as u64).ok_or(Errno::INVAL)?;
        if count == 0 || end > self.bytes(index) {
            return Err(Errno::INVAL);
        }
        Ok(())
    }

    /// Reads bytes of a region.
    pub fn read(&mut self, index: u32, at: u64, into: &mut [u8]) -> Result<(), Errno> {
        self.check(index, at, into.len())?;
        match index {
            region::BAR0 => self.read_bar0(at as u32, into),
            region::BAR4 => self.read_bar4(at as usize, into),
            _ => {
                let pin = self.controller.interrupt_pin();
                self.config.read(at as usize, into, pin);
            }
        }
        Ok(())
    }

    /// Writes bytes of a region.
    pub fn write(&mut self, index: u32, at: u64, from: &[u8]) -> Result<(), Errno> {
        self.check(index, at, from.len())?;
        match index {
            region::BAR0 => self.write_bar0(at as u32, from),
            region::BAR4 => {
                // The pending bits are read-only.
                let room = self.table.get_mut(at as usize..).unwrap_or_default();
                room.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            }
            _ => {
                let effects = self.config.write(at as usize, from);
                if effects.reset {
                    self.reset();
                }
                self.irqs.enable_pin(self.config.pin_enabled());
                self.recheck_pin();
            }
        }
        Ok(())
    }

    fn read_bar0(&self, at: u32, into: &mut [u8]) {
        // A 64-bit read must be one access to the register: in two halves, a driver could combine
        // the upper half of one value with the lower half of the next.
        if at.is_multiple_of(8) && into.len() == 8 {
            return into.copy_from_slice(&self.controller.read64(at).to_le_bytes());
        }
        let mut done = 0;
        while done < into.len() {
            let at = at + done as u32;
            let bytes = self.controller.read32(at & !3).to_le_bytes();
            let part = &bytes[at as usize % 4..];
            let take = part.len().min(into.len() - done);
            into[done..done + take].copy_from_slice(&part[..take]);
            done += take;
        }
    }

    /// Writes whole aligned words. NVMe leaves other accesses undefined; here they are ignored.
    fn write_bar0(&mut self, at: u32, from: &[u8]) {
        if !at.is_multiple_of(4) {
            return;
        }
        let (words, _) = from.as_chunks::<4>();
        for (word, at) in words.iter().zip((at..).step_by(4)) {
            self.controller.write32(at, u32::from_le_bytes(*word));
        }
        self.set_sleep();
        self.runner.wake();
        self.recheck_pin();
    }

    /// Sets the longest sleep of the threads: a disabled controller has nothing to poll.
    pub fn set_sleep(&self) {
        let cc = self.controller.read32(offset::CC);
        let enabled = cc != ALL_ONES && Cc(cc).en();
        self.runner.sleep_long(!enabled || self.client_signals);
    }

    fn read_bar4(&self, at: usize, into: &mut [u8]) {
        let pba = self.layout.pba as usize;
        for (i, byte) in into.iter_mut().enumerate() {
            let at = at + i;
            *byte = match at.checked_sub(pba) {
                None => self.table[at],
                Some(bits) => self.irqs.pending(bits * 8) as u8,
            };
        }
    }

    /// Signals the pin if it is asserted, because its level or the client's mask may have changed.
    pub fn recheck_pin(&self) {
        self.irqs.recheck_pin(|| self.controller.interrupt_pin());
    }

    /// Resets the function: registers, queues, configuration space, interrupt masks.
    pub fn reset(&mut self) {
        self.controller.function_reset();
        self.config.reset();
        self.irqs.reset();
        self.table.fill(0);
        // Vector Control: every vector starts masked.
        self.table
            .chunks_exact_mut(MSIX_ENTRY)
            .for_each(|entry| entry[12] = 1);
        self.set_sleep();
    }
}
