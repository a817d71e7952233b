//! `cp`: copies a file of a drive to a file of this machine, or a folder to a folder.

use super::{DriveArgs, copy, tree, volume};
use crate::common::images::CommandFiles;
use crate::common::output;
use clap::Args;
use nvme_host::files::{Ext4Volume, FileInode, FileKind, FileLocation};
use nvme_host::{Error, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Copy a file, or a folder with all that is in it, out of an ext4 on a drive
#[derive(Args)]
pub struct CpCommand {
    /// File of a drive
    #[arg(value_name = "DEVICE:/PATH")]
    location: String,
    /// Destination: a file, replaced when everything has been read, or a folder
    #[arg(value_name = "FILE")]
    to: PathBuf,
    /// Copy a folder; it is there when all of it has been copied
    #[arg(long, short = 'r')]
    recursive: bool,
    #[command(flatten)]
    drive: DriveArgs,
}

impl CpCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let location = FileLocation::parse(&self.location)?;
        if FileLocation::is_one(&self.to.to_string_lossy()) {
            let cause = format!("{} is on a drive", self.to.display());
            return Err(Error::usage(cause, "copy to a file of this machine"));
        }
        let store = self.drive.store(&location)?;
        let volume = volume(&store, &location)?;
        let path = &location.path;
        let inode = volume.stat(path)?;
        let to = match self.to.is_dir() {
            true => self.to.join(name_of(path)?),
            false => self.to.clone(),
        };
        let done = match inode.kind {
            FileKind::Directory if self.recursive => folder(&volume, &inode, path, &to)?,
            FileKind::Directory => {
                let cause = format!("{path} is a directory");
                return Err(Error::usage(cause, "copy it with --recursive"));
            }
            _ => {
                let file = volume.file_of(&inode, path)?;
                copy(&file, Some(&to), files)?;
                json!({ "bytes": inode.size })
            }
        };
        // The bytes of the file are on standard output.
        if !self.drive.form.json || to == Path::new("-") {
            return Ok(());
        }
        let mut said = json!({ "path": path, "to": to.to_string_lossy() });
        if let (Value::Object(said), Value::Object(done)) = (&mut said, done) {
            said.extend(done);
        }
        output::json(&said)
    }
}

/// Returns the last component of a path on the drive.
///
/// # Errors
/// [`Error::Usage`] for a path without a file name.
fn name_of(path: &str) -> Result<&str> {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or("");
    match name {
        "" | "." | ".." => Err(Error::usage(
            format!("{path} has no name that its copy could have"),
            "name a folder that is not there yet",
        )),
        name => Ok(name),
    }
}

fn folder(volume: &Ext4Volume, inode: &FileInode, from: &str, to: &Path) -> Result<Value> {
    let copied = tree::copy(volume, inode, from, to)?;
    let left_out = copied.left_out.iter();
    let left_out = left_out.map(|(path, kind)| json!({ "path": path, "kind": kind }));
    Ok(json!({
        "bytes": copied.bytes,
        "files": copied.files,
        "directories": copied.directories,
        "links": copied.links,
        "left_out": left_out.collect::<Vec<_>>(),
    }))
}
