//! The command line: `nvme-gpu`.

mod admin;
mod bench;
mod cli;
mod common;
mod demo;
mod device;
mod files;
#[cfg(feature = "cuda")]
mod gpu;
mod io;
mod model;
mod pipeline;
mod search;
mod stdio;
mod top;
mod witness;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
