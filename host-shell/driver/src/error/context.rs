//! Errors with their context: the name of the object that they are about.

use super::Error;
use std::io;

impl Error {
    /// Returns a copy of the error with `what` before its cause; kind, remedy and numbers stay. Errors that
    /// already name a file, a call or a feature are copied unchanged.
    pub fn with_context(&self, what: &str) -> Self {
        self.told_by(|text| format!("{what}: {text}"))
    }

    /// Returns a copy of the error.
    pub fn again(&self) -> Self {
        self.told_by(|text| text.to_string())
    }

    fn told_by(&self, with: impl Fn(&dyn std::fmt::Display) -> String) -> Self {
        match self {
            Self::Usage { cause, remedy } => Self::usage(with(cause), remedy),
            Self::Device { cause, remedy } => Self::device(with(cause), remedy),
            Self::Environment { cause, remedy } => Self::environment(with(cause), remedy),
            Self::Unfinished { cause, remedy } => Self::Unfinished {
                cause: with(cause),
                remedy: remedy.clone(),
            },
            Self::Internal { cause } => Self::internal(with(cause)),
            Self::Gone { cause } => Self::Gone { cause: with(cause) },
            Self::Changed { cause } => Self::Changed { cause: with(cause) },
            Self::Mismatch { what: which } => Self::Mismatch { what: with(which) },
            Self::Command {
                what: which,
                status,
            } => Self::Command {
                what: with(which),
                status: *status,
            },
            Self::Timeout {
                qid,
                cid,
                timeout_ms,
                account,
            } => Self::Timeout {
                qid: *qid,
                cid: *cid,
                timeout_ms: *timeout_ms,
                account: with(account),
            },
            Self::File {
                action,
                path,
                source,
            } => Self::File {
                action,
                path: path.clone(),
                source: again(source),
            },
            Self::System { call, source } => Self::System {
                call,
                source: again(source),
            },
            Self::Unsupported { what, bit } => Self::Unsupported { what, bit },
            Self::Interrupted => Self::Interrupted,
        }
    }
}

/// Returns a copy of the error, with its error number of the system if it has one.
fn again(source: &io::Error) -> io::Error {
    match source.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::new(source.kind(), source.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use crate::error::Error;
    use nvme_core::spec::{Cid, Qid, Status};
    use std::io;

    #[test]
    fn an_error_keeps_its_kind_and_gets_a_name() {
        let text = || "x".to_owned();
        let file = |source| Error::File {
            action: "read",
            path: "a".into(),
            source,
        };
        for error in [
            Error::usage("x", "y"),
            Error::device("x", "y"),
            Error::environment("x", "y"),
            Error::internal("x"),
            Error::Gone { cause: text() },
            Error::Changed { cause: text() },
            Error::Mismatch { what: text() },
            Error::Unfinished {
                cause: text(),
                remedy: text(),
            },
            Error::Command {
                what: text(),
                status: Status(0x281),
            },
            Error::Timeout {
                qid: Qid(1),
                cid: Cid(2),
                timeout_ms: 3,
                account: text(),
            },
        ] {
            let again = error.with_context("layer 7");
            assert_eq!(
                (again.code(), again.remedy()),
                (error.code(), error.remedy())
            );
            assert!(again.to_string().contains("layer 7: x"), "{again}");
            assert_eq!(error.again().to_string(), error.to_string());
        }
        for error in [
            file(io::Error::from_raw_os_error(libc::EIO)),
            file(io::Error::new(io::ErrorKind::UnexpectedEof, "short")),
            Error::System {
                call: "mmap",
                source: io::Error::from_raw_os_error(libc::ENOMEM),
            },
            Error::Unsupported {
                what: "Verify",
                bit: "bit 7",
            },
            Error::Interrupted,
        ] {
            assert_eq!(error.with_context("layer 7").to_string(), error.to_string());
        }
    }
}
