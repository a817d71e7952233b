//! Commands about files on a drive that no kernel mounts, and about the tensors in files: reading an ext4 through
//! the driver, importing models, making manifests and images.

pub mod cat;
pub mod catalog;
pub mod cp;
pub mod import;
pub mod ls;
pub mod manifest;
pub mod pack;
pub mod stat;
mod tree;

use crate::common::images::CommandFiles;
use crate::common::{
    CommandTimeout, NamespaceId, OutputForm, check_stop, file::OutputFile, images, progress, say,
};
use clap::Args;
use nvme_host::catalog::HeaderSource;
use nvme_host::files::{DriveFile, Ext4Volume, FileKind, FileLocation, flags};
use nvme_host::{Result, Store, StoreOptions};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Bytes that are copied at a time.
const PIECE: u64 = 8 << 20;

/// Options of accessing the drive.
#[derive(Args)]
pub struct DriveArgs {
    #[command(flatten)]
    namespace: NamespaceId,
    #[command(flatten)]
    timeout: CommandTimeout,
    #[command(flatten)]
    form: OutputForm,
}

impl DriveArgs {
    /// Opens the store for reading alone.
    fn store(&self, location: &FileLocation) -> Result<Arc<Store>> {
        self.open(&location.device)
    }

    /// Opens the store of a device with these options.
    fn open(&self, device: &str) -> Result<Arc<Store>> {
        images::must_exist(device)?;
        let options = StoreOptions {
            read_only: true,
            nsid: self.namespace.namespace_id,
            timeout: self.timeout.limit(),
            ..StoreOptions::default()
        };
        Ok(Arc::new(Store::open(device, &options)?))
    }
}

/// Returns the file system that `location` names, with a warning for a damaged partition table and for errors
/// that Linux noted.
pub fn volume(store: &Arc<Store>, location: &FileLocation) -> Result<Ext4Volume> {
    let volume = Ext4Volume::open(store, location.part)?;
    if let Some(what) = volume.damage() {
        say::warn(|| {
            format!(
                "warning: the partition table at the end of the drive is used: in the first, {what}"
            )
        });
    }
    if volume.info().has_errors {
        say::warn(|| {
            "warning: Linux has noted errors in the file system: run e2fsck on it".to_owned()
        });
    }
    Ok(volume)
}

/// Writes all of `file` to `out`, or to standard output. Holes stay holes if the output can have them.
fn copy(file: &DriveFile, out: Option<&Path>, files: &CommandFiles) -> Result<()> {
    let bytes = file.len();
    let mut out = OutputFile::create(out, files)?;
    let bar = progress::bytes(bytes, "copying");
    let mut piece = vec![0; bytes.min(PIECE) as usize];
    let mut end = 0;
    for range in written(file)? {
        out.hole(range.start - end)?;
        bar.inc(range.start - end);
        end = range.end;
        let mut at = range.start;
        while at < range.end {
            check_stop()?;
            let part = &mut piece[..(range.end - at).min(PIECE) as usize];
            file.read_at(at, part)?;
            out.write(part)?;
            at += part.len() as u64;
            bar.inc(part.len() as u64);
        }
    }
    out.hole(bytes - end)?;
    // A file that changed meanwhile has no consistent copy.
    file.check_unchanged()?;
    bar.finish_and_clear();
    out.commit()
}

/// Returns the bytes of a file that are not zeros for want of blocks.
fn written(file: &DriveFile) -> Result<Vec<Range<u64>>> {
    if file.inode().has(flags::INLINE_DATA) {
        let all = 0..file.len();
        return Ok(vec![all]);
    }
    let extents = file.extents()?.iter().filter(|one| one.is_written);
    let ranges = extents.map(|one| one.logical..(one.logical + one.bytes).min(file.len()));
    Ok(ranges.collect())
}

/// Returns the mode as `ls -l` writes it.
fn mode(kind: FileKind, permissions: u16) -> String {
    let mut text = String::new();
    text.push(match kind {
        FileKind::File => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::Fifo => 'p',
        FileKind::CharDevice => 'c',
        FileKind::BlockDevice => 'b',
        FileKind::Socket => 's',
    });
    for shift in [6, 3, 0] {
        for (bit, letter) in [(4, 'r'), (2, 'w'), (1, 'x')] {
            let is_set = permissions >> shift & bit != 0;
            text.push(if is_set { letter } else { '-' });
        }
    }
    text
}

/// Converts a name or target to text; bytes that are not UTF-8 become replacement characters.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use nvme_host::files::FileKind;

    #[test]
    fn modes_are_written_as_ls_writes_them() {
        let kinds = [
            (FileKind::File, "-rw-r-----"),
            (FileKind::Directory, "drw-r-----"),
            (FileKind::Symlink, "lrw-r-----"),
            (FileKind::Fifo, "prw-r-----"),
            (FileKind::CharDevice, "crw-r-----"),
            (FileKind::BlockDevice, "brw-r-----"),
            (FileKind::Socket, "srw-r-----"),
        ];
        for (kind, expected) in kinds {
            assert_eq!(super::mode(kind, 0o640), expected);
        }
        assert_eq!(super::mode(FileKind::File, 0o755), "-rwxr-xr-x");
    }
}
