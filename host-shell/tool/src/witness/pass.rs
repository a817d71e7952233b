//! One pass over a range by a queue of a CPU thread.

use super::watch::StepWatch;
use nvme_host::core::spec::{Lba, Nsid, Sqe, nvm};
use nvme_host::{Controller, DmaBuffer, DriverQueue, Error, Result};
use std::time::Instant;

/// The range of a pass and the shape of its commands. All lengths are whole blocks.
#[derive(Clone, Copy, Debug)]
pub struct PassRange {
    pub nsid: Nsid,
    pub lba: u64,
    pub block: u64,
    pub bytes: u64,
    pub command: u64,
    pub depth: u32,
}

/// Commands in flight, with the buffers that a pass needs for them.
struct PassCommands<'a> {
    pass: &'a PassRange,
    queue: DriverQueue,
    free: Vec<DmaBuffer>,
    /// Start of the command of each buffer.
    starts: Vec<u64>,
    next: u64,
}

impl PassRange {
    /// Reads the range; `look` receives the offset of each command's bytes in it, and the bytes. Returns the seconds.
    pub fn read(
        &self,
        controller: &Controller,
        watch: &StepWatch,
        mut look: impl FnMut(u64, &[u8]),
    ) -> Result<f64> {
        self.run(
            controller,
            watch,
            "Read",
            nvm::read,
            |_, _| (),
            |at, bytes| look(at, bytes),
        )
    }

    /// Writes the range; `fill` receives the offset of each command's bytes in it, and room for them. Returns the
    /// seconds.
    pub fn write(
        &self,
        controller: &Controller,
        watch: &StepWatch,
        fill: impl FnMut(u64, &mut [u8]),
    ) -> Result<f64> {
        self.run(controller, watch, "Write", nvm::write, fill, |_, _| ())
    }

    fn run(
        &self,
        controller: &Controller,
        watch: &StepWatch,
        what: &str,
        command: fn(Nsid, Lba, u32) -> Sqe,
        mut fill: impl FnMut(u64, &mut [u8]),
        mut look: impl FnMut(u64, &[u8]),
    ) -> Result<f64> {
        let depth = self.depth.max(1);
        let queue = controller.create_queue_pair(depth + 1)?;
        let count = depth.min(queue.depth()) as usize;
        let free = DmaBuffer::several(controller.device(), self.command as usize, count)?;
        let starts = vec![0; free.len()];
        let mut flight = PassCommands {
            pass: self,
            queue,
            free,
            starts,
            next: 0,
        };
        let begin = Instant::now();
        let mut failure = None;
        // After a failure the commands in flight are waited for: they still move data.
        while failure.is_none() && flight.next < self.bytes || flight.queue.in_flight() > 0 {
            if failure.is_none() {
                failure = flight.submit(command, &mut fill).err();
            }
            let Some(done) = flight.queue.wait()? else {
                continue;
            };
            if !done.is_success() {
                failure.get_or_insert_with(|| flight.queue.error_of(&done, what));
                continue;
            }
            if let Some(buffer) = done.buffer {
                look(flight.starts[buffer.index()], buffer.as_slice());
                if let Err(error) = watch.tick(buffer.len() as u64) {
                    failure.get_or_insert(error);
                }
                flight.free.push(buffer);
            }
        }
        failure.map_or_else(|| Ok(begin.elapsed().as_secs_f64()), Err)
    }
}

impl PassCommands<'_> {
    /// Submits a command for each buffer that is free.
    fn submit(
        &mut self,
        command: fn(Nsid, Lba, u32) -> Sqe,
        fill: &mut impl FnMut(u64, &mut [u8]),
    ) -> Result<()> {
        let pass = self.pass;
        let mut refused = None;
        let before = self.next;
        while self.next < pass.bytes
            && let Some(mut buffer) = self.free.pop()
        {
            let bytes = pass.command.min(pass.bytes - self.next);
            buffer.resize(bytes as usize);
            fill(self.next, buffer.as_mut_slice());
            self.starts[buffer.index()] = self.next;
            let lba = Lba(pass.lba + self.next / pass.block);
            let sqe = command(pass.nsid, lba, (bytes / pass.block) as u32);
            if let Err(rejected) = self.queue.submit(sqe, Some(buffer)) {
                let otherwise = |error: nvme_host::core::SubmitError| {
                    Error::device(error.to_string(), "try again")
                };
                refused = Some(rejected.error.into_error(otherwise));
                break;
            }
            self.next += bytes;
        }
        if self.next > before {
            self.queue.ring();
        }
        refused.map_or(Ok(()), Err)
    }
}
