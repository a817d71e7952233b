//! Lanes over `io_uring`: each has a ring, and private memory that the kernel reads and writes.
//!
//! Invariant: a slot's memory is accessed only while the slot is not in flight. The memory outlives the ring:
//! it is freed once every operation has ended, else leaked.
// UNSAFETY: the kernel is given addresses of slots, and slots are viewed as bytes.
#![allow(unsafe_code)]

use super::regular::RegularFile;
use crate::lane::{
    Ended, LARGE_BYTES, LARGE_SLOTS, LaneCommand, LaneFailure, LaneOperation, SMALL_BYTES,
    StoreLane,
};
use io_uring::{IoUring, Probe, opcode, types};
use nvme_driver::dma::DmaPages;
use nvme_driver::error::Result;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// A slot that an operation holds.
#[derive(Clone, Copy)]
struct UringOperation {
    command: LaneCommand,
    tag: Option<u32>,
    /// Bytes that earlier parts of the operation have moved.
    moved: u32,
}

pub(super) struct UringLane {
    ring: IoUring,
    file: Arc<RegularFile>,
    /// `depth` small slots, then the large ones.
    memory: ManuallyDrop<DmaPages>,
    depth: usize,
    operations: Vec<Option<UringOperation>>,
    free_small: Vec<usize>,
    free_large: Vec<usize>,
    /// Operations that the kernel has, with a tag or not.
    with_kernel: usize,
    /// Operations with a tag.
    in_flight: usize,
    /// Slots that are submitted again, for the remaining bytes of a short transfer.
    again: Vec<usize>,
}

impl UringLane {
    /// # Errors
    /// The errors of the system: containers often refuse the call (EPERM, ENOSYS).
    pub fn new(file: &Arc<RegularFile>, depth: u32) -> io::Result<Self> {
        let depth = depth as usize;
        let slots = depth + LARGE_SLOTS;
        let entries = slots.next_power_of_two() as u32;
        let ring = IoUring::new(entries)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let bytes = depth * SMALL_BYTES as usize + LARGE_SLOTS * LARGE_BYTES as usize;
        let memory = DmaPages::new(bytes).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self {
            ring,
            file: Arc::clone(file),
            memory: ManuallyDrop::new(memory),
            depth,
            operations: vec![None; slots],
            free_small: (0..depth).collect(),
            free_large: (depth..slots).collect(),
            with_kernel: 0,
            in_flight: 0,
            again: Vec::new(),
        })
    }

    /// Returns the start of a slot's memory.
    fn start(&self, slot: usize) -> *mut u8 {
        let small = slot.min(self.depth) * SMALL_BYTES as usize;
        let large = slot.saturating_sub(self.depth) * LARGE_BYTES as usize;
        self.memory.start().wrapping_add(small + large)
    }

    /// Returns the memory of a slot that no operation holds.
    fn bytes(&mut self, slot: usize, bytes: u32) -> &mut [u8] {
        let size = if slot < self.depth {
            SMALL_BYTES
        } else {
            LARGE_BYTES
        };
        let len = bytes.min(size) as usize;
        // SAFETY: the range is inside the slot, whose memory is zeroed and lives as long as `self`; the caller took the
        // slot from a free list, or its operation has ended, so the kernel does not touch it.
        unsafe { std::slice::from_raw_parts_mut(self.start(slot), len) }
    }

    /// Submits the remaining bytes of a slot's operation to the ring.
    fn push(&mut self, slot: usize, operation: &UringOperation) -> io::Result<()> {
        let file = types::Fd(self.file.file.as_raw_fd());
        let UringOperation { command, moved, .. } = operation;
        let start = self.start(slot).wrapping_add(*moved as usize);
        let (len, offset) = (command.bytes - moved, command.offset + u64::from(*moved));
        let entry = match command.op {
            LaneOperation::Read => opcode::Read::new(file, start, len).offset(offset).build(),
            LaneOperation::Write => opcode::Write::new(file, start, len).offset(offset).build(),
            LaneOperation::WriteFua => opcode::Write::new(file, start, len)
                .offset(offset)
                .rw_flags(libc::RWF_DSYNC)
                .build(),
            LaneOperation::Flush => opcode::Fsync::new(file)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
        };
        let entry = entry.user_data(slot as u64);
        // SAFETY: the range lies in the slot: `moved` is at most `bytes`, which `submit` checked against the
        // slot's size. The slot is in no free list until this operation has ended, and its memory is freed
        // after that; `self.file` keeps the descriptor open.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        self.with_kernel += 1;
        Ok(())
    }

    fn free(&mut self, slot: usize) {
        match slot < self.depth {
            true => self.free_small.push(slot),
            false => self.free_large.push(slot),
        }
    }

    /// Processes an operation that has ended: a short transfer goes to `again` with its remaining bytes,
    /// everything else is reported to `ended`.
    fn end(&mut self, slot: usize, result: i32, ended: &mut dyn FnMut(u32, Outcome<'_>)) {
        self.with_kernel -= 1;
        let Some(Some(mut operation)) = self.operations.get(slot).copied() else {
            return;
        };
        let LaneCommand { op, bytes, .. } = operation.command;
        let whole = match u32::try_from(result) {
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
            Ok(_) if op == LaneOperation::Flush => Ok(()),
            Ok(0) if bytes > 0 => Err(io::Error::from(end_kind(op))),
            Ok(moved) => {
                operation.moved = operation.moved.saturating_add(moved).min(bytes);
                if operation.moved < bytes && operation.tag.is_some() {
                    self.operations[slot] = Some(operation);
                    self.again.push(slot);
                    return;
                }
                Ok(())
            }
        };
        self.operations[slot] = None;
        if let Some(tag) = operation.tag {
            self.in_flight -= 1;
            match whole {
                Ok(()) if op == LaneOperation::Read => ended(tag, Ok(self.bytes(slot, bytes))),
                Ok(()) => ended(tag, Ok(&[])),
                Err(source) => {
                    let retry = matches!(source.raw_os_error(), Some(libc::EAGAIN | libc::EINTR));
                    let error = self.file.error(op, source);
                    ended(tag, Err(LaneFailure { error, retry }));
                }
            }
        }
        self.free(slot);
    }

    fn reap(&mut self, ended: &mut dyn FnMut(u32, Outcome<'_>)) {
        loop {
            let next = self.ring.completion().next();
            let Some(entry) = next else { return };
            self.end(entry.user_data() as usize, entry.result(), ended);
        }
    }

    /// Submits the pushed entries, and waits for `wanted` completions.
    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        match self.ring.submit_and_wait(wanted) {
            Ok(_) => Ok(()),
            // The kernel wants completions taken first, or a signal came: the next call submits the remaining
            // operations.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn system(source: io::Error) -> nvme_driver::Error {
        let call = "io_uring_enter";
        nvme_driver::Error::System { call, source }
    }
}

type Outcome<'a> = std::result::Result<&'a [u8], LaneFailure>;

/// Returns the kind of error for a transfer of no bytes.
fn end_kind(op: LaneOperation) -> io::ErrorKind {
    match op.is_write() {
        true => io::ErrorKind::WriteZero,
        false => io::ErrorKind::UnexpectedEof,
    }
}

impl StoreLane for UringLane {
    fn begin(&mut self) -> Result<()> {
        Ok(())
    }

    fn submit(
        &mut self,
        command: &LaneCommand,
        tag: u32,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        if command.bytes > LARGE_BYTES {
            return Err(nvme_driver::Error::internal(
                "a command is longer than a slot",
            ));
        }
        let free = match command.bytes > SMALL_BYTES {
            true => &mut self.free_large,
            false => &mut self.free_small,
        };
        let Some(slot) = free.pop() else {
            if self.with_kernel == 0 {
                return Err(nvme_driver::Error::internal(
                    "the slots of a ring were lost",
                ));
            }
            if self.in_flight == 0 {
                // Operations of an earlier call that ended early hold the slots.
                self.enter(1).map_err(Self::system)?;
                self.reap(&mut |_, _| ());
            }
            return Ok(false);
        };
        if command.op.is_write() {
            fill(self.bytes(slot, command.bytes));
        }
        let operation = UringOperation {
            command: *command,
            tag: Some(tag),
            moved: 0,
        };
        if let Err(source) = self.push(slot, &operation) {
            self.free(slot);
            return Err(Self::system(source));
        }
        self.operations[slot] = Some(operation);
        self.in_flight += 1;
        Ok(true)
    }

    fn ring(&mut self) -> Result<()> {
        self.enter(0).map_err(Self::system)
    }

    fn poll(&mut self, ended: Ended<'_>) -> Result<()> {
        self.reap(ended);
        if self.again.is_empty() {
            return Ok(());
        }
        while let Some(slot) = self.again.pop() {
            let Some(operation) = self.operations[slot] else {
                continue;
            };
            self.push(slot, &operation).map_err(Self::system)?;
        }
        self.enter(0).map_err(Self::system)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn pause(&mut self, _spins: u32) {
        // An error shows again at the next submission.
        let _ = self.enter(1);
    }

    fn abandon(&mut self) {
        for operation in self.operations.iter_mut().flatten() {
            operation.tag = None;
        }
        for slot in std::mem::take(&mut self.again) {
            self.operations[slot] = None;
            self.free(slot);
        }
        self.in_flight = 0;
    }
}

impl Drop for UringLane {
    fn drop(&mut self) {
        self.abandon();
        while self.with_kernel > 0 {
            if self.enter(1).is_err() {
                // The kernel may still write there.
                return;
            }
            self.reap(&mut |_, _| ());
        }
        // SAFETY: it is dropped once, here, and not used afterwards. No operation is in flight, so the kernel no longer
        // reads or writes the slots; with one in flight the memory is leaked above.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
    }
}
