//! An open file or block device, and the errors of its system calls.

use crate::lane::LaneOperation;
use nvme_driver::error::Error;
use std::fs::File;
use std::io;
use std::path::PathBuf;

/// An open file.
pub(super) struct RegularFile {
    pub file: File,
    pub path: PathBuf,
}

impl RegularFile {
    /// Returns the error of a system call for `op`. An end inside the file means that it has shrunk: ranges are
    /// checked before anything is sent.
    pub fn error(&self, op: LaneOperation, source: io::Error) -> Error {
        let action = match op {
            LaneOperation::Read => "read",
            LaneOperation::Write | LaneOperation::WriteFua => "write",
            LaneOperation::Flush => "flush",
        };
        let source = match source.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file is shorter than when it was opened",
            ),
            _ => source,
        };
        Error::file(action, &self.path)(source)
    }
}
