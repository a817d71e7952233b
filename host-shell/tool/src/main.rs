//! The command line: `nvme-gpu`.

mod cli;
mod stdio;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
