//! Output files that are either complete or absent. A file is written under another name and renamed at the end, so
//! that a killed command leaves no part of it.

use crate::common::check_stop;
use crate::common::images::CommandFiles;
use nvme_host::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of standard output in errors.
pub const STANDARD_OUTPUT: &str = "standard output";

/// Time to wait for a reader between two checks for Ctrl-C.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// Zeros that are written at a time.
const ZEROS: u64 = 1 << 20;
/// Bytes that a pipe accepts when it reports that it is ready (PIPE_BUF).
const PIPE_BYTES: usize = 4096;

/// An output that replaces `path` when it is complete, and otherwise leaves it unchanged.
pub enum OutputFile {
    /// Standard output, a device or a pipe: written without a temporary file.
    Stream(DirectOutput),
    /// A file that becomes the target at the end.
    Replace {
        /// The file. It has no name if the file system supports that, so that a process that is killed leaves nothing.
        file: File,
        /// The name that the file has, or gets before it is renamed.
        temporary: PathBuf,
        /// The path that the file replaces in the end.
        target: PathBuf,
    },
}

/// An output that is written directly.
pub struct DirectOutput {
    file: File,
    name: PathBuf,
    /// True if a write may wait for a reader.
    waits: bool,
}

impl DirectOutput {
    fn new(file: io::Result<File>, name: &Path) -> Result<Self> {
        let file = file.map_err(Error::file("open", name))?;
        let kind = file.metadata().map_err(Error::file("open", name))?;
        let kind = kind.file_type();
        Ok(Self {
            waits: kind.is_fifo() || kind.is_socket() || file.is_terminal(),
            file,
            name: name.to_owned(),
        })
    }

    fn standard_output() -> Result<Self> {
        let file = io::stdout().as_fd().try_clone_to_owned().map(File::from);
        Self::new(file, Path::new(STANDARD_OUTPUT))
    }

    /// Opens a pipe, once it has a reader.
    fn pipe(path: &Path) -> Result<Self> {
        loop {
            check_stop()?;
            let file = OpenOptions::new()
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(path);
            match file {
                Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                file => return Self::new(file, path),
            }
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut most = bytes.len();
            if self.waits {
                check_stop()?;
                let mut fds = [PollFd::new(&self.file, PollFlags::OUT)];
                if !poll(&mut fds, Some(&TICK)).is_ok_and(|ready| ready > 0) {
                    continue;
                }
                most = most.min(PIPE_BYTES);
            }
            match self.file.write(&bytes[..most]) {
                Ok(0) => {
                    return Err(Error::file("write", &self.name)(
                        io::ErrorKind::WriteZero.into(),
                    ));
                }
                Ok(count) => bytes = &bytes[count..],
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                    ) => {}
                Err(error) => return Err(Error::file("write", &self.name)(error)),
            }
        }
        Ok(())
    }
}

impl OutputFile {
    /// Opens an output; none or `-` is standard output. An image that is in use and a block device are refused.
    pub fn create(path: Option<&Path>, files: &CommandFiles) -> Result<Self> {
        let Some(path) = path.filter(|path| *path != Path::new("-")) else {
            return Ok(Self::Stream(DirectOutput::standard_output()?));
        };
        // Through a link, the file that it names is replaced, not the link.
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                return Err(Error::file("write", path)(
                    io::ErrorKind::IsADirectory.into(),
                ));
            }
            Ok(metadata) if metadata.file_type().is_fifo() => {
                return Ok(Self::Stream(DirectOutput::pipe(path)?));
            }
            Ok(metadata) if metadata.file_type().is_block_device() => {
                return Err(Error::usage(
                    format!(
                        "the output {} is a block device, whose data would be lost",
                        path.display()
                    ),
                    "write to a file; `nvme-gpu import` writes a file to a device",
                ));
            }
            Ok(metadata) if !metadata.is_file() => {
                let file = OpenOptions::new().write(true).open(path);
                return Ok(Self::Stream(DirectOutput::new(file, path)?));
            }
            Ok(_) => files.refuse_output(path)?,
            Err(_) => {}
        }
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let temporary = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
        let file = nameless_beside(&temporary)
            .or_else(|_| {
                let mut options = OpenOptions::new();
                options.write(true).create_new(true).open(&temporary)
            })
            .map_err(Error::file("create", path))?;
        Ok(Self::Replace {
            file,
            temporary,
            target: path.clone(),
        })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Stream(stream) => stream.write(bytes),
            Self::Replace { file, target, .. } => file
                .write_all(bytes)
                .map_err(Error::file("write", &*target)),
        }
    }

    /// Appends zeros: as a hole in a file, as bytes elsewhere.
    pub fn hole(&mut self, mut bytes: u64) -> Result<()> {
        match self {
            Self::Stream(stream) => {
                let zeros = vec![0; bytes.min(ZEROS) as usize];
                while bytes > 0 {
                    check_stop()?;
                    let part = bytes.min(ZEROS);
                    stream.write(&zeros[..part as usize])?;
                    bytes -= part;
                }
                Ok(())
            }
            Self::Replace { file, target, .. } => {
                let past = i64::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge.into());
                let moved = past.and_then(|past| file.seek(SeekFrom::Current(past)));
                moved.map(drop).map_err(Error::file("write", &*target))
            }
        }
    }

    /// True if bytes that were written can be written over: those of a file, not of a pipe or device.
    pub fn can_go_back(&self) -> bool {
        matches!(self, Self::Replace { .. })
    }

    /// Writes `head` over the beginning of a file, which ends at byte `end`.
    pub fn replace_head(&mut self, head: &[u8], end: u64) -> Result<()> {
        match self {
            Self::Stream(stream) => Err(Error::file("write", &stream.name)(
                io::ErrorKind::NotSeekable.into(),
            )),
            Self::Replace { file, target, .. } => {
                let written = file.write_all_at(head, 0);
                let ended = written.and_then(|()| file.seek(SeekFrom::Start(end)));
                ended.map(drop).map_err(Error::file("write", &*target))
            }
        }
    }

    /// Moves the finished output to the path that the user named.
    pub fn commit(mut self) -> Result<()> {
        match &mut self {
            Self::Stream(_) => Ok(()),
            Self::Replace {
                file,
                temporary,
                target,
            } => {
                if let Ok(metadata) = fs::metadata(&*target) {
                    // A replaced file keeps its mode; a file system without modes has none to keep.
                    let _ = file.set_permissions(metadata.permissions());
                }
                // A hole at the end has not made the file longer.
                let end = file.stream_position();
                let ended = end.and_then(|end| file.set_len(end));
                ended.map_err(Error::file("write", &*target))?;
                file.sync_all().map_err(Error::file("write", &*target))?;
                give_name(file, temporary).map_err(Error::file("create", &*target))?;
                fs::rename(&*temporary, &*target).map_err(Error::file("rename to", &*target))
            }
        }
    }
}

/// A file that a command created under its own name, and removes if it fails.
pub struct CreatedFile {
    pub file: File,
    path: PathBuf,
}

impl CreatedFile {
    /// Creates an empty file. An existing file is an error.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        Ok(Self {
            file,
            path: path.to_owned(),
        })
    }

    /// Removes the file, unless another one has taken its place.
    pub fn remove(self) {
        let same = |one: fs::Metadata, other: fs::Metadata| {
            (one.dev(), one.ino()) == (other.dev(), other.ino())
        };
        let (there, ours) = (fs::symlink_metadata(&self.path), self.file.metadata());
        if there.is_ok_and(|there| ours.is_ok_and(|ours| same(there, ours))) {
            // The error to report is that of the command.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Checks that an output can be made at `path`, for a command whose result is written at its end and would be lost. A pipe
/// is not opened: its reader would see it end.
pub fn check_output(path: &Path, files: &CommandFiles) -> Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.file_type().is_fifo() => Ok(()),
        _ => OutputFile::create(Some(path), files).map(drop),
    }
}

/// Writes all of an output at once.
pub fn write_whole(path: &Path, bytes: &[u8], files: &CommandFiles) -> Result<()> {
    let mut out = OutputFile::create(Some(path), files)?;
    out.write(bytes)?;
    out.commit()
}

/// Opens a file without a name in the folder of `path`.
fn nameless_beside(path: &Path) -> io::Result<File> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_TMPFILE)
        .open(folder)
}

/// Gives `file` the name `path`, unless it has it already.
fn give_name(file: &File, path: &Path) -> io::Result<()> {
    if file.metadata()?.nlink() > 0 {
        return Ok(());
    }
    let nameless = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = rustix::fs::AtFlags::SYMLINK_FOLLOW;
    Ok(rustix::fs::linkat(
        rustix::fs::CWD,
        nameless,
        rustix::fs::CWD,
        path,
        flags,
    )?)
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let Self::Replace { temporary, .. } = self {
            // After a commit this name does not exist any more.
            let _ = fs::remove_file(temporary);
        }
    }
}
