//! Common parts of the examples: the words of their command lines, and their exit codes.

use nvme_host::units::parse_bytes;
use nvme_host::{Error, Result};
use std::process::ExitCode;

/// The words of a command line.
pub struct Arguments(Vec<String>);

#[allow(dead_code, reason = "each example takes some of them")]
impl Arguments {
    /// Returns the arguments of this process.
    pub fn here() -> Self {
        Self(std::env::args().skip(1).collect())
    }

    /// Returns the first argument.
    pub fn first(&self) -> Option<&str> {
        self.0.first().map(String::as_str)
    }

    /// Returns the word at position `at`.
    pub fn word(&self, at: usize) -> Option<&str> {
        self.0.get(at).map(String::as_str)
    }

    /// Returns the number at position `at`, given as `4096` or `8GiB`; `default` if there are fewer
    /// words.
    pub fn number<N: TryFrom<u64>>(&self, at: usize, default: N) -> Result<N> {
        let Some(word) = self.0.get(at) else {
            return Ok(default);
        };
        let number = parse_bytes(word).map_err(|why| Error::usage(why, "give a number"))?;
        N::try_from(number)
            .map_err(|_| Error::usage(format!("{word} as a number"), "give a smaller one"))
    }
}

/// Runs the example: an error is printed to standard error, with its remedy.
pub fn end(run: impl FnOnce(&Arguments) -> Result<()>) -> ExitCode {
    match run(&Arguments::here()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error} ({})", error.remedy());
            ExitCode::FAILURE
        }
    }
}
