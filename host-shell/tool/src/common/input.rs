//! Input of commands that send data to blocks: read piece by piece, checked before it is sent.
//!
//! - A regular file, or a block device, has a length: it must be whole blocks that fit into the range, which is
//!   known before anything is sent.
//! - A pipe is read to its end. Data past the last block is an error; so is an end within a block. With `--blocks`
//!   exactly that many blocks are read, and all that follows in the pipe is ignored.
//! - A character device such as /dev/zero may have no end: it needs `--blocks`.
//!
//! The first piece of a pipe is checked like a file, so that an invalid input which ends within it changes
//! nothing.

use crate::common::check_stop;
use crate::common::images::CommandFiles;
use nvme_host::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Time to wait for data between two checks for Ctrl-C.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// Length of an input, as far as it is known before it is read.
enum InputLength {
    /// Number of bytes.
    Bytes(u64),
    /// A pipe: its length is known only at its end.
    Pipe,
    /// Perhaps without end.
    Endless,
}

/// An input that was opened.
pub struct InputFile {
    file: File,
    name: PathBuf,
    extent: InputLength,
}

/// Destination blocks of an input.
#[derive(Clone, Copy)]
pub struct InputTarget {
    /// Bytes of a block.
    pub block: u32,
    /// First block.
    pub lba: u64,
    /// Blocks of the namespace.
    pub size: u64,
    /// Blocks that the user expects.
    pub expected: Option<u64>,
}

/// An input that fits into its target range.
pub struct InputPieces {
    input: InputFile,
    target: InputTarget,
    /// Number of blocks that the input will have in all, if that is known.
    blocks: Option<u64>,
    /// Blocks that came.
    done: u64,
    ended: bool,
}

impl InputFile {
    /// Opens an input; `-` is standard input.
    pub fn open(path: &Path, files: &CommandFiles) -> Result<Self> {
        let (file, name) = match path == Path::new("-") {
            true => {
                let name = PathBuf::from("standard input");
                let file: io::Result<OwnedFd> = match crate::stdio::was_closed(0) {
                    true => Err(io::Error::from_raw_os_error(libc::EBADF)),
                    false => io::stdin().as_fd().try_clone_to_owned(),
                };
                (file.map(File::from), name)
            }
            // Without this, opening a pipe would wait for its writer, deaf to Ctrl-C.
            false => {
                let file = OpenOptions::new()
                    .read(true)
                    .custom_flags(libc::O_NONBLOCK)
                    .open(path);
                (file, path.to_owned())
            }
        };
        let mut file = file.map_err(Error::file("read", &name))?;
        let kind = file
            .metadata()
            .map_err(Error::file("read", &name))?
            .file_type();
        if kind.is_dir() {
            return Err(Error::file("read", &name)(
                io::ErrorKind::IsADirectory.into(),
            ));
        }
        let extent = if kind.is_file() || kind.is_block_device() {
            files.refuse_input(&file, &name)?;
            let mut length = || {
                let at = file.stream_position()?;
                let end = file.seek(SeekFrom::End(0))?;
                file.seek(SeekFrom::Start(at))?;
                Ok(end.saturating_sub(at))
            };
            InputLength::Bytes(length().map_err(Error::file("read", &name))?)
        } else if kind.is_char_device() && !file.is_terminal() {
            InputLength::Endless
        } else {
            InputLength::Pipe
        };
        Ok(Self { file, name, extent })
    }

    /// Checks the known facts about the input against its target; `fits` checks a number of blocks against the
    /// namespace.
    pub fn pieces(
        self,
        target: InputTarget,
        fits: impl Fn(u64) -> Result<()>,
    ) -> Result<InputPieces> {
        let blocks = match (&self.extent, target.expected) {
            (InputLength::Bytes(bytes), expected) => {
                let blocks = self.whole_blocks(*bytes, target.block)?;
                if let Some(expected) = expected.filter(|expected| *expected != blocks) {
                    return Err(Error::usage(
                        format!(
                            "{} has {blocks} blocks, not {expected}",
                            self.name.display()
                        ),
                        "correct --blocks, or leave it out",
                    ));
                }
                Some(blocks)
            }
            (_, Some(expected)) => Some(expected),
            (InputLength::Pipe, None) => None,
            (InputLength::Endless, None) => {
                return Err(Error::usage(
                    format!("{} may have no end", self.name.display()),
                    "say with --blocks how many blocks to take from it",
                ));
            }
        };
        fits(blocks.unwrap_or(1))?;
        Ok(InputPieces {
            input: self,
            target,
            blocks,
            done: 0,
            ended: false,
        })
    }

    /// Returns the number of blocks in `bytes` bytes, which must be whole and not none.
    fn whole_blocks(&self, bytes: u64, block: u32) -> Result<u64> {
        let block = u64::from(block);
        let name = self.name.display();
        if bytes == 0 {
            return Err(Error::usage(
                format!("{name} has 0 bytes"),
                "give at least one block of data",
            ));
        }
        if !bytes.is_multiple_of(block) {
            return Err(Error::usage(
                format!(
                    "{name} has {bytes} bytes, which is not a whole number of {block}-byte blocks"
                ),
                format!("pad it to a multiple of {block} (`truncate -s %{block} FILE`)"),
            ));
        }
        Ok(bytes / block)
    }

    /// Reads a short input into `bytes`, and returns its length, at most one byte more than fits. A pipe is
    /// waited for, and Ctrl-C ends the wait.
    pub fn read_at_most(mut self, bytes: &mut [u8]) -> Result<usize> {
        let count = self.fill(bytes)?;
        match count < bytes.len() {
            true => Ok(count),
            false => Ok(count + self.fill(&mut [0])?),
        }
    }

    /// Reads until `bytes` are full or the input ends, and returns the number of bytes read.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<usize> {
        let mut at = 0;
        while at < bytes.len() {
            check_stop()?;
            if !matches!(self.extent, InputLength::Bytes(_)) {
                let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
                if !poll(&mut fds, Some(&TICK)).is_ok_and(|ready| ready > 0) {
                    continue;
                }
            }
            match self.file.read(&mut bytes[at..]) {
                Ok(0) => break,
                Ok(count) => at += count,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                    ) => {}
                Err(error) => return Err(Error::file("read", &self.name)(error)),
            }
        }
        Ok(at)
    }
}

impl InputPieces {
    /// Returns the number of blocks that the input will have in all, if that is known.
    pub fn blocks(&self) -> Option<u64> {
        self.blocks
    }

    /// Returns the number of blocks that came.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Puts the next blocks into `piece`, at most `most` bytes; none at the end.
    pub fn next(&mut self, piece: &mut Vec<u8>, most: usize) -> Result<bool> {
        piece.clear();
        let InputTarget {
            block, lba, size, ..
        } = self.target;
        let room = self.blocks.unwrap_or(size - lba) - self.done;
        if self.ended || (room == 0 && self.blocks.is_some()) {
            return Ok(false);
        }
        let most = (most / block as usize) as u64;
        let wanted = (room.min(most) * u64::from(block)) as usize;
        piece.resize(wanted, 0);
        let count = self.input.fill(piece)?;
        piece.truncate(count);
        if count < wanted {
            self.ended = true;
            self.check_end(count as u64)?;
        } else if self.blocks.is_none() && room <= most {
            // Whether there is more is known before the last blocks are sent.
            self.ended = true;
            if self.input.fill(&mut [0])? != 0 {
                return Err(Error::usage(
                    format!(
                        "{} has more than the {} blocks from LBA {lba} to the end of the namespace",
                        self.input.name.display(),
                        size - lba
                    ),
                    self.already("shorten it, or say with --blocks how many blocks to take"),
                ));
            }
        }
        self.done += (piece.len() / block as usize) as u64;
        Ok(!piece.is_empty())
    }

    /// Checks that the input may end after `count` more bytes.
    fn check_end(&self, count: u64) -> Result<()> {
        let block = u64::from(self.target.block);
        let name = self.input.name.display();
        let came = self.done * block + count;
        if let Some(blocks) = self.blocks {
            let cause = match self.input.extent {
                InputLength::Bytes(_) => format!("{name} became shorter while it was read"),
                _ => format!("{name} ended after {came} bytes, before {blocks} blocks"),
            };
            return Err(Error::usage(
                cause,
                self.already("correct --blocks, or give all of the data"),
            ));
        }
        match self.input.whole_blocks(came, self.target.block) {
            Err(Error::Usage { cause, remedy }) => Err(Error::usage(cause, self.already(&remedy))),
            other => other.map(drop),
        }
    }

    /// Returns `remedy` with the amount that was sent already.
    fn already(&self, remedy: &str) -> String {
        match self.done {
            0 => remedy.to_owned(),
            done => format!("{remedy}; the first {done} blocks were sent"),
        }
    }
}
