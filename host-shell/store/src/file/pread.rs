//! Lanes that read and write by system calls of the calling thread: `pread`, `pwrite`, `fdatasync`.

use super::regular::RegularFile;
use crate::lane::{Ended, LaneCommand, LaneFailure, LaneOperation, StoreLane};
use nvme_driver::error::Result;
use std::collections::VecDeque;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// A lane that executes each command in `StoreLane::poll`, just before it reports it, so that one buffer is enough.
pub(super) struct PreadLane {
    file: Arc<RegularFile>,
    depth: usize,
    waiting: VecDeque<(LaneCommand, u32, Vec<u8>)>,
    buffer: Vec<u8>,
}

impl PreadLane {
    pub fn new(file: &Arc<RegularFile>, depth: u32) -> Self {
        Self {
            file: Arc::clone(file),
            depth: depth as usize,
            waiting: VecDeque::new(),
            buffer: Vec::new(),
        }
    }

    fn carry_out(&mut self, command: &LaneCommand, data: &[u8]) -> std::io::Result<()> {
        let file = &self.file.file;
        match command.op {
            LaneOperation::Read => {
                self.buffer.resize(command.bytes as usize, 0);
                file.read_exact_at(&mut self.buffer, command.offset)
            }
            LaneOperation::Write => file.write_all_at(data, command.offset),
            LaneOperation::WriteFua => {
                file.write_all_at(data, command.offset)?;
                file.sync_data()
            }
            LaneOperation::Flush => file.sync_data(),
        }
    }
}

impl StoreLane for PreadLane {
    fn begin(&mut self) -> Result<()> {
        Ok(())
    }

    fn submit(
        &mut self,
        command: &LaneCommand,
        tag: u32,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        if self.waiting.len() >= self.depth {
            return Ok(false);
        }
        let mut data = Vec::new();
        if command.op.is_write() {
            data.resize(command.bytes as usize, 0);
            fill(&mut data);
        }
        self.waiting.push_back((*command, tag, data));
        Ok(true)
    }

    fn ring(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, ended: Ended<'_>) -> Result<()> {
        while let Some((command, tag, data)) = self.waiting.pop_front() {
            match self.carry_out(&command, &data) {
                Ok(()) if command.op == LaneOperation::Read => ended(tag, Ok(&self.buffer)),
                Ok(()) => ended(tag, Ok(&[])),
                Err(source) => {
                    let error = self.file.error(command.op, source);
                    ended(
                        tag,
                        Err(LaneFailure {
                            error,
                            retry: false,
                        }),
                    );
                }
            }
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn pause(&mut self, _spins: u32) {}

    fn abandon(&mut self) {
        self.waiting.clear();
    }
}
