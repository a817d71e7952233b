//! `cat`: a file of a drive to standard output.

use super::{DriveArgs, copy, volume};
use crate::common::images::CommandFiles;
use clap::Args;
use nvme_host::Result;
use nvme_host::files::FileLocation;

/// Write a file of an ext4 on a drive to standard output
#[derive(Args)]
pub struct CatCommand {
    /// File of a drive
    #[arg(value_name = "DEVICE:/PATH")]
    location: String,
    #[command(flatten)]
    drive: DriveArgs,
}

impl CatCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let location = FileLocation::parse(&self.location)?;
        let store = self.drive.store(&location)?;
        let volume = volume(&store, &location)?;
        copy(&volume.file(&location.path)?, None, files)
    }
}
