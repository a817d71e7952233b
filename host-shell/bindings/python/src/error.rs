//! Errors of the library as exceptions of Python. Their classes are in `nvme_gpu/_errors.py`.

use nvme_host::Error;
use nvme_host::store::status::{self, RowStatus};
use nvme_search as search;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static RAISE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Python's words for the options that the library's errors name in those of the tool.
const WORDS: [(&str, &str); 6] = [
    ("--timeout-ms", "timeout_ms="),
    ("--allow-write", "allow_write=True"),
    ("--queues", "queues="),
    ("--depth", "depth="),
    ("--tier", "gpu_tier="),
    ("--gpu", "gpu="),
];

/// Parts of an exception.
#[derive(Clone)]
pub struct ExceptionParts {
    /// One word for its kind, from which Python finds the class.
    pub code: &'static str,
    pub cause: String,
    pub remedy: String,
    /// The controller's answer: status code type and status code.
    pub status: Option<u16>,
    /// Place of the first failed row in the request.
    pub row: Option<u64>,
    /// Its id, where it is known.
    pub id: Option<i64>,
    pub errno: Option<i32>,
}

impl ExceptionParts {
    /// Creates the fault of a wrong use of a function.
    pub fn usage(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::of(&Error::usage(cause, remedy))
    }

    pub fn of(error: &Error) -> Self {
        let status = match error {
            Error::Command { status, .. } => Some(status.code()),
            _ => None,
        };
        let errno = match error {
            Error::File { source, .. } | Error::System { source, .. } => source.raw_os_error(),
            _ => None,
        };
        Self {
            code: error.code(),
            cause: error.to_string(),
            remedy: nvme_host::words::of_interface(&error.remedy(), &WORDS),
            status,
            row: None,
            id: None,
            errno,
        }
    }

    /// Creates the fault of a row that ended with `code`; `what` names the call.
    pub fn row(code: i32, row: u64, id: Option<i64>, what: &str, failed: u64) -> Self {
        let of_id = id.map_or_else(String::new, |id| format!(" (id {id})"));
        let (name, remedy) = status::describe(code);
        let cause = format!("{what}: row {row}{of_id}: {name}; rows that failed: {failed}");
        let mut fault = Self::by_code(code, (row, id), cause, remedy);
        if code == RowStatus::OutOfRange.code() {
            // Python raises a class for these alone, whose code is "usage".
            fault.code = "index";
        }
        fault
    }

    /// Creates the fault of a query of a search.
    pub fn query(code: i32, query: u64, what: &str, failed: u64) -> Self {
        let (name, remedy) = search::describe(code);
        let cause = format!("{what}: query {query}: {name}; queries that failed: {failed}");
        Self::by_code(code, (query, None), cause, remedy)
    }

    fn by_code(code: i32, (row, id): (u64, Option<i64>), cause: String, remedy: &str) -> Self {
        let word = match code {
            -1 | search::code::BAD_QUERY => "usage",
            -2 => "timeout",
            -3 => "gone",
            1.. => "command",
            _ => "device",
        };
        Self {
            code: word,
            cause,
            remedy: remedy.to_owned(),
            status: u16::try_from(code).ok().filter(|code| *code != 0),
            row: Some(row),
            id,
            errno: None,
        }
    }

    /// Returns the exception.
    pub fn raise(self, py: Python<'_>) -> PyErr {
        let make = RAISE.get_or_try_init(py, || -> PyResult<Py<PyAny>> {
            let module = py.import("nvme_gpu._errors")?;
            Ok(module.getattr("make")?.unbind())
        });
        let made = make.and_then(|make| {
            let parts = (
                self.code,
                self.cause,
                self.remedy,
                self.status,
                self.row,
                self.id,
                self.errno,
            );
            make.bind(py).call1(parts)
        });
        match made {
            Ok(exception) => PyErr::from_value(exception),
            Err(error) => error,
        }
    }
}

impl From<Error> for ExceptionParts {
    fn from(error: Error) -> Self {
        Self::of(&error)
    }
}

impl From<nvme_kv::KvError> for ExceptionParts {
    fn from(error: nvme_kv::KvError) -> Self {
        let mut parts = match &error {
            nvme_kv::KvError::Drive { source, .. } => Self::of(source),
            other => Self::usage("", other.remedy()),
        };
        parts.code = error.code();
        parts.cause = error.to_string();
        parts
    }
}

impl From<ExceptionParts> for PyErr {
    fn from(fault: ExceptionParts) -> Self {
        Python::attach(|py| fault.raise(py))
    }
}

/// Turns errors of the library into exceptions.
pub trait OrRaise<T> {
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for nvme_host::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(|error| ExceptionParts::of(&error).into())
    }
}
