//! `cp`: a file of a drive into a file of this machine.

use super::{DriveArgs, copy, volume};
use crate::common::output;
use clap::Args;
use nvme_host::files::Location;
use nvme_host::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// Copy a file out of an ext4 on a drive
#[derive(Args)]
pub struct Cp {
    /// File: DEVICE:/path; a partition is part=N in the device
    #[arg(value_name = "DEVICE:/PATH")]
    location: String,
    /// Where it goes: a file, replaced when everything has been read, or a folder
    #[arg(value_name = "FILE")]
    to: PathBuf,
    #[command(flatten)]
    drive: DriveArgs,
}

impl Cp {
    pub fn run(self) -> Result<()> {
        let location = Location::parse(&self.location)?;
        if Location::is_one(&self.to.to_string_lossy()) {
            let cause = format!("{} is on a drive", self.to.display());
            return Err(Error::usage(cause, "copy to a file of this machine"));
        }
        let store = self.drive.store(&location)?;
        let volume = volume(&store, &location)?;
        let file = volume.file(&location.path)?;
        let name = location.path.rsplit('/').next().unwrap_or("");
        let to = match self.to.is_dir() {
            true => self.to.join(name),
            false => self.to,
        };
        copy(&file, Some(&to))?;
        match self.drive.json {
            true => output::json(&json!({
                "path": location.path,
                "to": to.to_string_lossy(),
                "bytes": file.inode().size,
            })),
            false => Ok(()),
        }
    }
}
