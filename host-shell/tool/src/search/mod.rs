//! `search`: nearest vectors in a graph whose nodes lie on a drive.

mod build;
mod input;
mod place;
mod query;

use crate::common::images::CommandFiles;
use clap::{Args, Subcommand};
use nvme_host::Result;

/// Find nearest vectors in a graph whose nodes lie on a drive
#[derive(Args)]
pub struct SearchCommand {
    #[command(subcommand)]
    command: SearchVerb,
}

#[derive(Subcommand)]
enum SearchVerb {
    Build(build::BuildCommand),
    Query(Box<query::QueryCommand>),
}

impl SearchCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        match self.command {
            SearchVerb::Build(command) => command.run(files),
            SearchVerb::Query(command) => command.run(files),
        }
    }
}
