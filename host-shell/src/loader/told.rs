//! An error told again, with what it happened to.

use crate::error::Error;
use std::io;

/// `error` with `what` before its cause; its kind, remedy and numbers stay. Errors of files name the file alone.
pub(super) fn told(error: &Error, what: &str) -> Error {
    let with = |text: &dyn std::fmt::Display| format!("{what}: {text}");
    match error {
        Error::Usage { cause, remedy } => Error::usage(with(cause), remedy),
        Error::Device { cause, remedy } => Error::device(with(cause), remedy),
        Error::Environment { cause, remedy } => Error::environment(with(cause), remedy),
        Error::Unfinished { cause, remedy } => Error::Unfinished {
            cause: with(cause),
            remedy: remedy.clone(),
        },
        Error::Internal { cause } => Error::internal(with(cause)),
        Error::Gone { cause } => Error::Gone { cause: with(cause) },
        Error::Mismatch { what: which } => Error::Mismatch { what: with(which) },
        Error::Command {
            what: which,
            status,
        } => Error::Command {
            what: with(which),
            status: *status,
        },
        Error::Timeout {
            qid,
            cid,
            timeout_ms,
            account,
        } => Error::Timeout {
            qid: *qid,
            cid: *cid,
            timeout_ms: *timeout_ms,
            account: with(account),
        },
        Error::File {
            action,
            path,
            source,
        } => Error::File {
            action,
            path: path.clone(),
            source: again(source),
        },
        Error::System { call, source } => Error::System {
            call,
            source: again(source),
        },
        Error::Unsupported { what, bit } => Error::Unsupported { what, bit },
        Error::Interrupted => Error::Interrupted,
    }
}

fn again(source: &io::Error) -> io::Error {
    match source.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::new(source.kind(), source.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_core::spec::{Cid, Qid, Status};

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
            let again = told(&error, "layer 7");
            assert_eq!(
                (again.code(), again.remedy()),
                (error.code(), error.remedy())
            );
            assert!(again.to_string().contains("layer 7: x"), "{again}");
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
            assert_eq!(told(&error, "layer 7").to_string(), error.to_string());
        }
    }
}
