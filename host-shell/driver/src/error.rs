//! Errors of the host library: the cause, the remedy, and the exit code of the command line.
//!
//! `Display` is the cause alone; [`Error::remedy`] is the action that mends it.

mod context;

use crate::words::bounded;
use nvme_core::spec::{Cid, Qid, Status};
use std::io;
use std::path::PathBuf;

/// Exit codes of `nvme-gpu`.
pub mod exit {
    /// Everything asked for was done.
    pub const OK: u8 = 0;
    /// The controller answered with an error, could not be brought up, or lacks a feature that the command
    /// needs.
    pub const DEVICE: u8 = 1;
    /// The command line or a range is invalid, or does not suit the device; nothing was sent.
    pub const USAGE: u8 = 2;
    /// Data differ from the data that they were compared with.
    pub const MISMATCH: u8 = 3;
    /// A file could not be read or written.
    pub const FILE: u8 = 4;
    /// The controller did not answer in time, or is gone.
    pub const TIMEOUT: u8 = 5;
    /// This machine lacks something: memory, descriptors, a permission, a driver, an IOMMU, a GPU.
    pub const ENVIRONMENT: u8 = 6;
    /// A fault of this program.
    pub const INTERNAL: u8 = 7;
    /// Ctrl-C, SIGTERM or SIGHUP.
    pub const INTERRUPTED: u8 = 130;
}

/// The action of opening a simulator's image: a missing one can be created.
pub(crate) const OPEN_IMAGE: &str = "open the image";

/// Every failure of this library and of the command line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument that cannot be obeyed; nothing has been sent to the controller.
    #[error("{cause}")]
    Usage {
        /// Subject, broken rule and offending value, as one sentence.
        cause: String,
        /// The spelling or value to use instead.
        remedy: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// Verb: "open", "write", ...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A system call that is not about a file failed.
    #[error("{call} failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The device could not be opened or brought up.
    #[error("{cause}")]
    Device {
        /// Failed step and its reason, as one sentence.
        cause: String,
        /// Action that mends it.
        remedy: String,
    },
    /// This machine lacks something: a permission, a driver, an IOMMU, a GPU.
    #[error("{cause}")]
    Environment {
        /// Missing capability, as one sentence.
        cause: String,
        /// Action that provides it.
        remedy: String,
    },
    /// Something that the code excludes happened.
    #[error("{cause}")]
    Internal {
        /// Broken invariant, with the values that were seen.
        cause: String,
    },
    /// The controller answered a command with an error status.
    #[error("{what} ended with {status}")]
    Command {
        /// The command in words.
        what: String,
        /// The controller's answer.
        status: Status,
    },
    /// Identify says that the controller or the namespace cannot do this; nothing has been sent.
    #[error("{what} is not supported: {bit} is 0")]
    Unsupported {
        /// Operation that the caller requested.
        what: &'static str,
        /// Field of the Identify data structure that is clear, such as "ONCS bit 2".
        bit: &'static str,
    },
    /// Data differ from the data that they were compared with.
    #[error("{what}")]
    Mismatch {
        /// Position of the first difference and the two things that were compared.
        what: String,
    },
    /// A command was not answered before its deadline. Its buffer stays with the controller until the
    /// controller can no longer touch it.
    #[error("command {cid} of queue {qid} got no answer within {timeout_ms} ms ({account})")]
    Timeout {
        /// The queue.
        qid: Qid,
        /// The command.
        cid: Cid,
        /// The deadline in force.
        timeout_ms: u64,
        /// Result of the recovery: the fate of this command and of the others in flight.
        account: String,
    },
    /// The controller is gone, failed, or did not come back from a reset.
    #[error("{cause}")]
    Gone {
        /// Evidence that the controller is gone, as one sentence.
        cause: String,
    },
    /// The device, or a namespace of it, has changed since it was opened: another host formatted it, it became
    /// smaller, another drive answers. Nothing has been sent.
    #[error("{cause}")]
    Changed {
        /// Property that changed, with its old and new value.
        cause: String,
    },
    /// The wait ended before the work did: the work continues in the background.
    #[error("{cause}")]
    Unfinished {
        /// Work that is pending, and its progress.
        cause: String,
        /// Call that resumes the wait.
        remedy: String,
    },
    /// The caller asked for an end (Ctrl-C).
    #[error("interrupted")]
    Interrupted,
}

/// Result with this library's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns a [`Error::Usage`] from its two sentences.
    pub fn usage(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Usage {
            cause: bounded(cause.into()),
            remedy: bounded(remedy.into()),
        }
    }

    /// Returns a [`Error::Device`] from its two sentences.
    pub fn device(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Device {
            cause: bounded(cause.into()),
            remedy: bounded(remedy.into()),
        }
    }

    /// Returns an [`Error::Environment`] from its two sentences.
    pub fn environment(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Environment {
            cause: bounded(cause.into()),
            remedy: bounded(remedy.into()),
        }
    }

    /// Returns an [`Error::Internal`].
    pub fn internal(cause: impl Into<String>) -> Self {
        Self::Internal {
            cause: bounded(cause.into()),
        }
    }

    /// Returns a closure for `map_err` that names the system call that failed.
    pub fn system(call: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { call, source }
    }

    /// Returns a closure for `map_err` that names the file and the action.
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File {
            action,
            path,
            source,
        }
    }

    /// Returns the remedy: one clause without a full stop.
    pub fn remedy(&self) -> String {
        match self {
            Self::Usage { remedy, .. }
            | Self::Device { remedy, .. }
            | Self::Environment { remedy, .. }
            | Self::Unfinished { remedy, .. } => remedy.clone(),
            Self::Internal { .. } => {
                "this is a fault of this program: report it with the command line".to_owned()
            }
            Self::File {
                action: OPEN_IMAGE,
                source,
                ..
            } if source.kind() == io::ErrorKind::NotFound => {
                "check the path; a command that writes creates the image when size= is given, as in \
                 `nvme-gpu write -d 'sim:PATH?size=1GiB'`"
                    .to_owned()
            }
            Self::File { source, .. } => file_remedy(source).to_owned(),
            Self::System { source, .. } => system_remedy(source).to_owned(),
            Self::Command { status, .. } => crate::remedy::of_status(*status).to_owned(),
            Self::Unsupported { .. } => {
                "leave it out, or use a controller that has it (`nvme-gpu identify` prints the bit)"
                    .to_owned()
            }
            Self::Mismatch { .. } => {
                "read both sides again and look where they differ".to_owned()
            }
            Self::Timeout { .. } => {
                "raise --timeout-ms if the device is slow, else check the device".to_owned()
            }
            Self::Gone { .. } => {
                "check that the device, or its server, is there and runs, then start again".to_owned()
            }
            Self::Changed { .. } => "open it again".to_owned(),
            Self::Interrupted => {
                "run the command again; commands already sent may have taken effect".to_owned()
            }
        }
    }

    /// Returns one word for the kind of error, for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Usage { .. } => "usage",
            Self::File { .. } => "file",
            Self::System { .. } => "system",
            Self::Device { .. } => "device",
            Self::Environment { .. } => "environment",
            Self::Internal { .. } => "internal",
            Self::Command { .. } => "command",
            Self::Unsupported { .. } => "unsupported",
            Self::Unfinished { .. } => "unfinished",
            Self::Mismatch { .. } => "mismatch",
            Self::Timeout { .. } => "timeout",
            Self::Gone { .. } => "gone",
            Self::Changed { .. } => "changed",
            Self::Interrupted => "interrupted",
        }
    }

    /// Returns the exit code of the command line for this error: one of [`exit`].
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage { .. } | Self::Changed { .. } => exit::USAGE,
            Self::System { .. } | Self::Environment { .. } => exit::ENVIRONMENT,
            Self::File { source, .. } if is_shortage(source) => exit::ENVIRONMENT,
            Self::File { .. } => exit::FILE,
            Self::Internal { .. } => exit::INTERNAL,
            Self::Device { .. } => exit::DEVICE,
            Self::Command { status, .. } if status.code() == Status::COMPARE_FAILURE.code() => {
                exit::MISMATCH
            }
            Self::Command { .. } | Self::Unsupported { .. } => exit::DEVICE,
            Self::Mismatch { .. } => exit::MISMATCH,
            Self::Timeout { .. } | Self::Gone { .. } | Self::Unfinished { .. } => exit::TIMEOUT,
            Self::Interrupted => exit::INTERRUPTED,
        }
    }
}

/// True if the process or the system has run out of a resource, so that the file itself is not at fault.
fn is_shortage(source: &io::Error) -> bool {
    let shortages = [libc::EMFILE, libc::ENFILE, libc::ENOMEM];
    source
        .raw_os_error()
        .is_some_and(|errno| shortages.contains(&errno))
}

fn system_remedy(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EMFILE) => "raise the limit of open files (`ulimit -n`), or use fewer queues",
        Some(libc::ENFILE) => "the whole system has too many files open: end other programs",
        Some(libc::ENOMEM) => {
            "free memory, use fewer queues or smaller buffers, or raise the limits that `ulimit -a` shows"
        }
        Some(libc::EAGAIN) => {
            "use fewer threads or queues, or raise the limits of processes and locked memory (`ulimit -u`, `-l`)"
        }
        Some(libc::EPERM | libc::EACCES) => {
            "run it as a user who may do this (`nvme-gpu doctor` shows what is missing)"
        }
        Some(libc::ENOSYS | libc::EOPNOTSUPP) => "use a kernel that has this system call",
        _ => "`nvme-gpu doctor` shows what this machine lacks",
    }
}

fn file_remedy(source: &io::Error) -> &'static str {
    if is_shortage(source) {
        return system_remedy(source);
    }
    match source.raw_os_error() {
        Some(libc::EBADF) => {
            "leave it open when the program starts, or send it to a file or /dev/null"
        }
        Some(libc::ENXIO) => "name a file, or a socket through vfio-user:, that a program has open",
        Some(libc::ELOOP) => "the links lead in a circle: name the file itself",
        Some(libc::ENOTDIR) => "a part of the path is a file, not a folder: check the path",
        Some(libc::EROFS) => "choose a place on a file system that is mounted for writing",
        Some(libc::EFBIG) => {
            "raise the limit of file sizes (`ulimit -f`), or choose a file system for longer files"
        }
        Some(libc::EIO) => "the medium below the file fails: see `dmesg`",
        Some(libc::EINVAL) => "choose a file system that supports this, or another file",
        _ => kind_remedy(source),
    }
}

fn kind_remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "check the path",
        io::ErrorKind::PermissionDenied => "check the permissions of the file and its folder",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space, or choose another place"
        }
        io::ErrorKind::ResourceBusy => {
            "wait for the other process, or serve the image once and use vfio-user:SOCKET"
        }
        io::ErrorKind::IsADirectory => "name a file, not a folder",
        io::ErrorKind::BrokenPipe => "keep the reader of the pipe open",
        io::ErrorKind::InvalidFilename => "use a shorter path (a socket's has 107 bytes at most)",
        io::ErrorKind::ConnectionRefused => "start the server, and name the socket that it made",
        io::ErrorKind::WouldBlock => "the server is busy with another client; wait for it to leave",
        _ => "check the file and its file system",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_of_a_file_has_its_remedy() {
        for (errno, part) in [
            (libc::EBADF, "leave it open"),
            (libc::ENXIO, "vfio-user:"),
            (libc::ELOOP, "circle"),
            (libc::ENOTDIR, "not a folder"),
            (libc::EROFS, "mounted for writing"),
            (libc::EFBIG, "ulimit -f"),
            (libc::EIO, "the medium below"),
            (libc::EINVAL, "file system that supports this"),
            (libc::ENOENT, "check the path"),
            (libc::EACCES, "check the permissions"),
            (libc::ENOSPC, "free space"),
            (libc::EDQUOT, "free space"),
            (libc::EBUSY, "wait for the other process"),
            (libc::EISDIR, "name a file"),
            (libc::EPIPE, "reader of the pipe"),
            (libc::ENAMETOOLONG, "shorter path"),
            (libc::ECONNREFUSED, "start the server"),
            (libc::EAGAIN, "busy with another client"),
            (libc::EXDEV, "its file system"),
            (libc::EMFILE, "ulimit -n"),
        ] {
            let error = Error::file("open", "a")(io::Error::from_raw_os_error(errno));
            assert!(error.remedy().contains(part), "{errno}: {}", error.remedy());
            let shortage = errno == libc::EMFILE;
            let code = if shortage {
                exit::ENVIRONMENT
            } else {
                exit::FILE
            };
            assert_eq!((error.exit_code(), error.code()), (code, "file"), "{errno}");
        }
    }

    #[test]
    fn a_message_is_no_longer_than_a_screen() {
        let long = format!("a.gguf: {} are missing", "é".repeat(1 << 20));
        let error = Error::usage(long.clone(), long);
        for text in [error.to_string(), error.remedy()] {
            assert!(text.len() < 2_100, "{}", text.len());
            assert!(text.starts_with("a.gguf: é") && text.ends_with("é are missing"));
            assert!(text.contains(" bytes left out) "), "{text}");
        }
        assert_eq!(Error::internal("x".repeat(2_000)).to_string().len(), 2_000);
    }

    #[test]
    fn every_errno_of_the_system_has_its_remedy() {
        for (errno, part) in [
            (libc::EMFILE, "open files"),
            (libc::ENFILE, "the whole system"),
            (libc::ENOMEM, "free memory"),
            (libc::EAGAIN, "fewer threads"),
            (libc::EPERM, "a user who may"),
            (libc::ENOSYS, "a kernel that has"),
            (libc::EIO, "doctor"),
        ] {
            let source = io::Error::from_raw_os_error(errno);
            let error = Error::System {
                call: "mmap",
                source,
            };
            assert!(error.remedy().contains(part), "{errno}: {}", error.remedy());
            assert_eq!(
                (error.exit_code(), error.code()),
                (exit::ENVIRONMENT, "system")
            );
        }
    }

    #[test]
    fn every_kind_has_a_code_an_exit_code_and_a_remedy() {
        let text = || "x".to_owned();
        for (error, code, exit) in [
            (Error::usage("x", "y"), "usage", exit::USAGE),
            (Error::device("x", "y"), "device", exit::DEVICE),
            (
                Error::environment("x", "y"),
                "environment",
                exit::ENVIRONMENT,
            ),
            (Error::internal("x"), "internal", exit::INTERNAL),
            (
                Error::Unsupported {
                    what: "Verify",
                    bit: "bit 7 of ONCS",
                },
                "unsupported",
                exit::DEVICE,
            ),
            (
                Error::Unfinished {
                    cause: text(),
                    remedy: text(),
                },
                "unfinished",
                exit::TIMEOUT,
            ),
            (Error::Mismatch { what: text() }, "mismatch", exit::MISMATCH),
            (Error::Gone { cause: text() }, "gone", exit::TIMEOUT),
            (Error::Interrupted, "interrupted", exit::INTERRUPTED),
            (
                Error::Command {
                    what: text(),
                    status: Status::COMPARE_FAILURE,
                },
                "command",
                exit::MISMATCH,
            ),
        ] {
            assert_eq!((error.code(), error.exit_code()), (code, exit), "{error}");
            let remedy = error.remedy();
            assert!(!remedy.is_empty() && !remedy.ends_with('.'), "{remedy}");
        }
    }
}
