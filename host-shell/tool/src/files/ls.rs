//! `ls`: the names in a directory of a drive.

use super::{DriveArgs, mode, text, volume};
use crate::common::output;
use clap::Args;
use nvme_host::Result;
use nvme_host::files::{FileInode, FileKind, FileLocation};
use serde_json::{Value, json};

/// List a directory of an ext4 on a drive that no kernel mounts
#[derive(Args)]
pub struct LsCommand {
    /// Directory or file of a drive; part=N names a partition (vfio:BDF?part=1:/models)
    #[arg(value_name = "DEVICE:/PATH")]
    location: String,
    #[command(flatten)]
    drive: DriveArgs,
}

impl LsCommand {
    pub fn run(self) -> Result<()> {
        let location = FileLocation::parse(&self.location)?;
        let store = self.drive.store(&location)?;
        let volume = volume(&store, &location)?;
        let path = &location.path;
        let is_directory = volume.stat(path)?.kind == FileKind::Directory;
        let found: Vec<(String, String, FileInode)> = match is_directory {
            true => {
                let folder = path.trim_end_matches('/');
                let entries = volume.list(path)?.into_iter().map(|(entry, inode)| {
                    let name = text(&entry.name);
                    (format!("{folder}/{name}"), name, inode)
                });
                entries.collect()
            }
            false => vec![(path.clone(), path.clone(), volume.stat_link(path)?)],
        };
        let mut entries = Vec::new();
        for (path, name, inode) in found {
            let target = match inode.kind {
                // A link that cannot be read, of an encrypted directory for one, is shown without its target.
                FileKind::Symlink => volume
                    .read_link_of(&inode, &path)
                    .ok()
                    .map(|target| text(&target)),
                _ => None,
            };
            entries.push((name, inode, target));
        }
        match self.drive.form.json {
            true => {
                let entries: Vec<Value> = entries.iter().map(to_json).collect();
                output::json(&json!({ "path": path, "entries": entries }))
            }
            false if entries.is_empty() => Ok(()),
            false => {
                let lines: Vec<String> = entries.iter().map(to_text).collect();
                output::print(&lines.join("\n"))
            }
        }
    }
}

fn to_text((name, inode, target): &(String, FileInode, Option<String>)) -> String {
    let arrow = target.as_ref().map(|target| format!(" -> {target}"));
    format!(
        "{} {:>14} {name}{}",
        mode(inode.kind, inode.permissions),
        inode.size,
        arrow.unwrap_or_default()
    )
}

fn to_json((name, inode, target): &(String, FileInode, Option<String>)) -> Value {
    json!({
        "name": name,
        "kind": inode.kind.name(),
        "inode": inode.number,
        "bytes": inode.size,
        "target": target,
    })
}
