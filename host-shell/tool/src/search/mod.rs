//! `search`: nearest vectors in a graph whose nodes lie on a drive.

mod build;
mod input;
mod place;
mod query;

use clap::{Args, Subcommand};
use nvme_host::Result;

/// Find nearest vectors in a graph whose nodes lie on a drive
#[derive(Args)]
pub struct Search {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Build(build::Build),
    Query(Box<query::Query>),
}

impl Search {
    pub fn run(self) -> Result<()> {
        match self.command {
            Command::Build(command) => command.run(),
            Command::Query(command) => command.run(),
        }
    }
}
