//! `stat`: describes a file of a drive, and the extents of its data.

use super::{DriveArgs, mode, text, volume};
use crate::common::output;
use clap::Args;
use nvme_host::files::{Ext4Volume, FileExtent, FileKind, FileLocation, MountedFile, uuid_text};
use nvme_host::{Error, Result};
use serde_json::{Value, json};

/// Block size of a file that has none, in bytes.
const BLOCK: u64 = 512;

/// Describe a file of an ext4 on a drive: size, flags, generation, and the blocks that hold its data
#[derive(Args)]
pub struct StatCommand {
    /// File of a drive, or an immutable one on a mounted ext4 of this machine
    #[arg(value_name = "DEVICE:/PATH")]
    location: String,
    #[command(flatten)]
    drive: DriveArgs,
}

impl StatCommand {
    pub fn run(self) -> Result<()> {
        if !FileLocation::is_one(&self.location) {
            return self.mounted();
        }
        let location = FileLocation::parse(&self.location)?;
        let store = self.drive.store(&location)?;
        let volume = volume(&store, &location)?;
        let inode = volume.stat_link(&location.path)?;
        let target = match inode.kind {
            FileKind::Symlink => Some(text(&volume.read_link(&location.path)?)),
            _ => None,
        };
        let (extents, why) = match inode.kind {
            FileKind::File => match extents_of(&volume, &location.path) {
                Ok(extents) => (extents, None),
                // A file whose data cannot be read can still be described.
                Err(Error::Usage { cause, .. }) => (Vec::new(), Some(cause)),
                Err(error) => return Err(error),
            },
            _ => (Vec::new(), None),
        };
        let block = match u64::from(store.block_bytes()) {
            ..BLOCK => BLOCK,
            block => block,
        };
        let extents: Vec<Value> = extents.iter().map(|one| to_json(one, block)).collect();
        let mut found = json!({
            "path": location.path,
            "kind": inode.kind.name(),
            "inode": inode.number,
            "generation": inode.generation,
            "bytes": inode.size,
            "mode": mode(inode.kind, inode.permissions),
            "uid": inode.uid,
            "gid": inode.gid,
            "links": inode.links,
            "modified": inode.modified.0,
            "flags": inode.flag_names(),
        });
        let more = json!({
            "target": target,
            "no_extents": why,
            "block_bytes": block,
            "extents": extents,
        });
        if let (Value::Object(found), Value::Object(more)) = (&mut found, more) {
            let is_there = |value: &Value| self.drive.form.json || !value.is_null();
            found.extend(more.into_iter().filter(|(_, value)| is_there(value)));
        }
        match self.drive.form.json {
            true => output::json(&found),
            false => output::table("", &found),
        }
    }

    /// Prints a file of this machine. Positions count from the start of the mounted device.
    fn mounted(&self) -> Result<()> {
        let file = MountedFile::open(&self.location)?;
        let identity = file.identity();
        let extents = file.extents().iter();
        let extents = extents.map(|one| {
            json!({
                "logical": one.logical,
                "place": one.place,
                "bytes": one.bytes,
            })
        });
        let (major, minor) = identity.device;
        let found = json!({
            "path": self.location,
            "uuid": uuid_text(&identity.uuid),
            "device": format!("{major}:{minor}"),
            "inode": identity.inode,
            "generation": identity.generation,
            "bytes": identity.bytes,
            "modified": identity.modified.0,
            "extents": extents.collect::<Vec<_>>(),
        });
        match self.drive.form.json {
            true => output::json(&found),
            false => output::table("", &found),
        }
    }
}

/// Returns the extents. LBAs count from the start of the namespace, also on a partition.
fn extents_of(volume: &Ext4Volume, path: &str) -> Result<Vec<FileExtent>> {
    Ok(volume.file(path)?.extents()?.to_vec())
}

fn to_json(extent: &FileExtent, block: u64) -> Value {
    json!({
        "logical": extent.logical,
        "place": extent.place,
        "bytes": extent.bytes,
        "lba": extent.place.is_multiple_of(block).then(|| extent.place / block),
        "blocks": extent.bytes.is_multiple_of(block).then(|| extent.bytes / block),
        "written": extent.is_written,
    })
}
