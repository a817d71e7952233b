//! Interrupts as eventfds that the client has armed: the pin and the MSI-X vectors, with their
//! masks and pending bits. The controller raises a vector; this module decides which eventfd is
//! signalled.

use super::wire::{self, IrqInfo, IrqSet, irq};
use crate::bus::interrupt::InterruptSink;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl, readlinkat};
use rustix::io::Errno;
use std::boxed::Box;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::vec::Vec;

/// State of one interrupt.
#[derive(Default)]
struct InterruptLine {
    fd: Option<OwnedFd>,
    masked: bool,
    /// True if it was raised while it was masked or not armed.
    pending: bool,
}

impl InterruptLine {
    /// Signals the client now, or when the interrupt is unmasked.
    fn raise(&mut self) {
        match &self.fd {
            Some(fd) if !self.masked => {
                self.pending = false;
                // The eventfd does not block, and one whose counter is full is signalled already.
                let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
            }
            _ => self.pending = true,
        }
    }
}

/// Interrupts of the function: the pin, and the MSI-X vectors.
pub(crate) struct InterruptLines {
    pin: Mutex<InterruptLine>,
    vectors: Box<[Mutex<InterruptLine>]>,
    /// True while a vector is armed, so that the pin is not used.
    msix: AtomicBool,
    /// True while the command register enables the pin.
    pin_enabled: AtomicBool,
}

fn lock(line: &Mutex<InterruptLine>) -> MutexGuard<'_, InterruptLine> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

impl InterruptSink for InterruptLines {
    fn raise(&self, vector: u16, _masked: bool, level: &dyn Fn() -> bool) {
        if self.msix.load(Ordering::Relaxed) {
            if let Some(line) = self.vectors.get(usize::from(vector)) {
                lock(line).raise();
            }
        } else {
            self.assert_pin(level);
        }
    }
}

impl InterruptLines {
    pub fn new(vectors: u16) -> Self {
        Self {
            pin: Mutex::default(),
            vectors: (0..vectors).map(|_| Mutex::default()).collect(),
            msix: AtomicBool::new(false),
            pin_enabled: AtomicBool::new(true),
        }
    }

    /// Signals the pin if `level` is asserted, and masks the pin. Until the client unmasks it, a
    /// level that stays asserted sends no further signal.
    fn assert_pin(&self, level: impl FnOnce() -> bool) {
        let mut pin = lock(&self.pin);
        let enabled = self.pin_enabled.load(Ordering::Relaxed);
        // Under the lock, since a level from before the client's last unmask may be over: the
        // driver has consumed all and waits for nothing that would end this signal.
        if pin.fd.is_some() && !pin.masked && enabled && level() {
            pin.raise();
            pin.masked = true;
        }
    }

    /// Signals the pin if `level` is asserted, since it could not be signalled while it was masked.
    pub fn recheck_pin(&self, level: impl FnOnce() -> bool) {
        if !self.msix.load(Ordering::Relaxed) {
            self.assert_pin(level);
        }
    }

    /// Sets Interrupt Disable of the command register (inverted).
    pub fn enable_pin(&self, enabled: bool) {
        self.pin_enabled.store(enabled, Ordering::Relaxed);
    }

    /// Returns 32 bits of the pending bit array, from vector `first` on.
    pub fn pending(&self, first: usize) -> u32 {
        let lines = self.vectors.iter().skip(first).take(32).enumerate();
        lines.fold(0, |bits, (i, line)| {
            bits | u32::from(lock(line).pending) << i
        })
    }

    /// Clears masks and pending bits, as a function reset does.
    pub fn reset(&self) {
        for line in self.vectors.iter().chain([&self.pin]) {
            let mut line = lock(line);
            (line.masked, line.pending) = (false, false);
        }
        self.enable_pin(true);
    }

    /// Closes every descriptor, because the client has left.
    pub fn disarm(&self) {
        for line in self.vectors.iter().chain([&self.pin]) {
            *lock(line) = InterruptLine::default();
        }
        self.msix.store(false, Ordering::Relaxed);
        self.enable_pin(true);
    }

    fn lines(&self, index: u32) -> &[Mutex<InterruptLine>] {
        match index {
            irq::INTX => std::slice::from_ref(&self.pin),
            irq::MSIX => &self.vectors,
            _ => &[],
        }
    }

    /// Answers DEVICE_GET_IRQ_INFO.
    pub fn info(&self, asked: IrqInfo) -> Result<IrqInfo, Errno> {
        if asked.index >= irq::COUNT || (asked.argsz as usize) < size_of::<IrqInfo>() {
            return Err(Errno::INVAL);
        }
        let flags = match asked.index {
            irq::INTX => wire::IRQ_EVENTFD | wire::IRQ_MASKABLE | wire::IRQ_AUTOMASKED,
            irq::MSIX => wire::IRQ_EVENTFD | wire::IRQ_MASKABLE,
            _ => 0,
        };
        Ok(IrqInfo {
            argsz: size_of::<IrqInfo>() as u32,
            flags,
            index: asked.index,
            count: self.lines(asked.index).len() as u32,
        })
    }

    /// Handles DEVICE_SET_IRQS; `data` are the bytes behind the structure.
    pub fn set(&self, set: IrqSet, data: &[u8], fds: Vec<OwnedFd>) -> Result<(), Errno> {
        let lines = self.lines(set.index);
        let (start, count) = (set.start as usize, set.count as usize);
        let end = start.checked_add(count).ok_or(Errno::INVAL)?;
        let chosen = lines.get(start..end).ok_or(Errno::INVAL)?;
        let kind = set.flags & 7;
        let action = set.flags & !7;
        if set.index >= irq::COUNT
            || !matches!(
                action,
                wire::SET_MASK | wire::SET_UNMASK | wire::SET_TRIGGER
            )
        {
            return Err(Errno::INVAL);
        }
        if kind != wire::SET_DATA_EVENTFD && !fds.is_empty() {
            return Err(Errno::INVAL);
        }
        let result = match (kind, action) {
            (wire::SET_DATA_EVENTFD, wire::SET_TRIGGER) => arm(chosen, fds),
            (wire::SET_DATA_NONE, wire::SET_TRIGGER) if count == 0 && start == 0 => {
                lines
                    .iter()
                    .for_each(|line| *lock(line) = InterruptLine::default());
                Ok(())
            }
            (wire::SET_DATA_NONE, _) => {
                chosen.iter().for_each(|line| act(&mut lock(line), action));
                Ok(())
            }
            (wire::SET_DATA_BOOL, _) if data.len() >= count => {
                let wanted = chosen.iter().zip(data).filter(|(_, wanted)| **wanted != 0);
                wanted.for_each(|(line, _)| act(&mut lock(line), action));
                Ok(())
            }
            // The client masks interrupts itself and needs no eventfds that report masking.
            _ => Err(Errno::INVAL),
        };
        let armed = self.vectors.iter().any(|line| lock(line).fd.is_some());
        self.msix.store(armed, Ordering::Relaxed);
        result
    }
}

/// Gives each interrupt its descriptor; without descriptors, disarms all of them.
fn arm(lines: &[Mutex<InterruptLine>], fds: Vec<OwnedFd>) -> Result<(), Errno> {
    if fds.is_empty() {
        lines.iter().for_each(|line| lock(line).fd = None);
        return Ok(());
    }
    if fds.len() != lines.len() {
        return Err(Errno::INVAL);
    }
    fds.iter().try_for_each(check)?;
    for (line, fd) in lines.iter().zip(fds) {
        let mut line = lock(line);
        line.fd = Some(fd);
        if line.pending {
            line.raise();
        }
    }
    Ok(())
}

/// Accepts eventfds only, and makes them non-blocking: a controller thread writes to them, and a
/// pipe that is full would block that thread.
fn check(fd: &OwnedFd) -> Result<(), Errno> {
    let path = std::format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = readlinkat(rustix::fs::CWD, path, Vec::new())?;
    if target.as_bytes() != b"anon_inode:[eventfd]" {
        return Err(Errno::INVAL);
    }
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

fn act(line: &mut InterruptLine, action: u32) {
    match action {
        wire::SET_MASK => line.masked = true,
        wire::SET_UNMASK => {
            line.masked = false;
            if line.pending {
                line.raise();
            }
        }
        _ => line.raise(),
    }
}
