//! `pack`: makes the image of an ext4 from a folder, with the data of each file contiguous. mke2fs does the work;
//! afterwards every file is read back out of the image by our own reader and compared.

use super::PIECE;
use crate::common::{OutputForm, check_stop, output, progress};
use clap::Args;
use nvme_host::catalog::HeaderSource;
use nvme_host::files::{DriveFile, Ext4Volume, open_regular};
use nvme_host::{Error, Result, Store, StoreOptions, units};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The variable that names another mke2fs.
const PROGRAM: &str = "MKE2FS";
const BLOCK: u64 = 4096;
/// Bytes that a file needs besides its data, with room for directories.
const PER_FILE: u64 = 1024;
/// Bitmaps and other structures of the same size in every image.
const FIXED: u64 = 16 << 20;
const TICK: Duration = Duration::from_millis(20);
/// There is no journal, and metadata lie only at the start, so that nothing interrupts the blocks of a long file.
const LAYOUT: [&str; 14] = [
    "-q",
    "-F",
    "-t",
    "ext4",
    "-b",
    "4096",
    "-m",
    "0",
    "-O",
    "sparse_super2,metadata_csum,^has_journal,^resize_inode",
    "-E",
    "num_backup_sb=0,lazy_itable_init=0",
    "-G",
    "4096",
];

/// Make an image of an ext4 with the files of a folder, each in one piece (needs mke2fs)
///
/// Use it as sim:IMAGE or file:IMAGE, or write it to a drive or partition. Every file is read back and compared.
/// MKE2FS=PROGRAM names another mke2fs.
#[derive(Args)]
pub struct PackCommand {
    /// Folder
    folder: PathBuf,
    /// Image to make; it must not exist
    image: PathBuf,
    /// Label of the file system, of at most 16 bytes
    #[arg(long, default_value = "models", value_parser = label)]
    label: String,
    #[command(flatten)]
    form: OutputForm,
}

fn label(text: &str) -> std::result::Result<String, String> {
    match text.len() {
        ..=16 => Ok(text.to_owned()),
        bytes => Err(format!("the label has {bytes} bytes, above 16")),
    }
}

/// A file of the folder, by its path below it.
struct PackedFile {
    path: PathBuf,
    bytes: u64,
}

impl PackCommand {
    pub fn run(self) -> Result<()> {
        let found = files(&self.folder)?;
        if fs::symlink_metadata(&self.image).is_ok() {
            let cause = format!("{} is there already", self.image.display());
            return Err(Error::usage(cause, "name another file, or remove it"));
        }
        self.check_apart()?;
        let made = self.make(&found).and_then(|()| self.verify(&found));
        if made.is_err() {
            // One that was not created after all is not there.
            let _ = fs::remove_file(&self.image);
        }
        let several = made?;
        let data = found.iter().map(|one| one.bytes).sum();
        if self.form.json {
            return output::json(&json!({
                "image": self.image.to_string_lossy(),
                "files": found.len(),
                "data_bytes": data,
                "image_bytes": size(&found),
                "in_pieces": several,
            }));
        }
        let mut lines = vec![format!(
            "{}: {} files, {} of data, compared",
            self.image.display(),
            found.len(),
            units::bytes(data)
        )];
        lines.extend(several.iter().map(|one| {
            let path = one["path"].as_str().unwrap_or_default();
            format!("{path} lies in {} pieces", one["pieces"])
        }));
        output::print(&lines.join("\n"))
    }

    /// Refuses an image inside of the folder: it would be copied into itself while it grows.
    fn check_apart(&self) -> Result<()> {
        let place = match self.image.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let place = fs::canonicalize(place).map_err(Error::file("create", &self.image))?;
        let folder = fs::canonicalize(&self.folder).map_err(Error::file("list", &self.folder))?;
        match place.starts_with(&folder) {
            false => Ok(()),
            true => Err(Error::usage(
                format!(
                    "the image {} lies in the folder {}, and would be packed into itself",
                    self.image.display(),
                    self.folder.display()
                ),
                "make it beside the folder",
            )),
        }
    }

    /// Runs mke2fs, which makes the image.
    fn make(&self, found: &[PackedFile]) -> Result<()> {
        let inodes = (found.len() as u64 * 2 + 1024).to_string();
        let program = std::env::var_os(PROGRAM).unwrap_or_else(|| "mke2fs".into());
        let mut mke2fs = Command::new(program);
        // Not on the path of every user.
        let path = std::env::var("PATH").unwrap_or_default();
        mke2fs.env("PATH", format!("{path}:/usr/sbin:/sbin"));
        mke2fs.args(LAYOUT).args(["-N", &inodes, "-L", &self.label]);
        mke2fs.arg("-d").arg(&self.folder).arg(&self.image);
        mke2fs.arg(format!("{}k", size(found) >> 10));
        mke2fs.stdin(Stdio::null()).stdout(Stdio::null());
        let child = mke2fs.stderr(Stdio::piped()).spawn();
        let child = child.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::environment(
                "mke2fs is not here",
                "install e2fsprogs (`apt-get install e2fsprogs`), or name the program with MKE2FS=",
            ),
            _ => Error::System {
                call: "mke2fs",
                source: error,
            },
        });
        let bar = progress::spinner("mke2fs");
        let said = wait(child?)?;
        bar.finish_and_clear();
        match said {
            None => Ok(()),
            Some(said) => Err(Error::environment(
                format!("mke2fs failed: {said}"),
                "check the free space, and that every file of the folder can be read",
            )),
        }
    }

    /// Compares every file; returns the files that are not contiguous.
    fn verify(&self, found: &[PackedFile]) -> Result<Vec<Value>> {
        let options = StoreOptions {
            read_only: true,
            ..StoreOptions::default()
        };
        let device = format!("file:{}", self.image.display());
        let store = Arc::new(Store::open(&device, &options)?);
        let volume = Ext4Volume::open(&store, None)?;
        let bar = progress::bytes(found.iter().map(|one| one.bytes).sum(), "compare");
        let mut several = Vec::new();
        for one in found {
            let path = format!("/{}", one.path.display());
            let file = volume.file(&path)?;
            let pieces = file.extents()?.iter().filter(|one| one.is_written).count();
            if pieces > 1 {
                several.push(json!({ "path": path, "pieces": pieces }));
            }
            compare(&file, &self.folder.join(&one.path), &mut |bytes| {
                bar.inc(bytes)
            })?;
        }
        bar.finish_and_clear();
        Ok(several)
    }
}

/// Returns the number of bytes of the image: whole MiB.
fn size(found: &[PackedFile]) -> u64 {
    let of_file = |one: &PackedFile| one.bytes.next_multiple_of(BLOCK) + PER_FILE;
    let data: u64 = found.iter().map(of_file).sum();
    (data + data / 64 + FIXED).next_multiple_of(1 << 20)
}

/// Finds the regular files below `folder`. Links and empty folders go into the image, too.
fn files(folder: &Path) -> Result<Vec<PackedFile>> {
    let mut found = Vec::new();
    let mut left = vec![PathBuf::new()];
    while let Some(below) = left.pop() {
        let path = folder.join(&below);
        for entry in fs::read_dir(&path).map_err(Error::file("list", &path))? {
            let entry = entry.map_err(Error::file("list", &path))?;
            let below = below.join(entry.file_name());
            let about = entry
                .metadata()
                .map_err(Error::file("look at", entry.path()))?;
            if about.is_dir() {
                left.push(below);
            } else if about.is_file() {
                found.push(PackedFile {
                    path: below,
                    bytes: about.len(),
                });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Waits for the end of `child`, and returns its message if it failed. Ctrl-C ends it.
fn wait(mut child: Child) -> Result<Option<String>> {
    let system = |source| Error::System {
        call: "wait",
        source,
    };
    let status = loop {
        if let Err(stopped) = check_stop() {
            // The process may have ended meanwhile.
            let _ = child.kill();
            child.wait().map_err(system)?;
            return Err(stopped);
        }
        match child.try_wait().map_err(system)? {
            Some(status) => break status,
            None => std::thread::sleep(TICK),
        }
    };
    if status.success() {
        return Ok(None);
    }
    let mut said = String::new();
    if let Some(stderr) = &mut child.stderr {
        // Without its words there is the status.
        let _ = stderr.read_to_string(&mut said);
    }
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    Ok(Some(last.map_or(status.to_string(), str::to_owned)))
}

/// Compares a file of the image with its source.
fn compare(file: &DriveFile, from: &Path, on_bytes: &mut dyn FnMut(u64)) -> Result<()> {
    let (source, _) = open_regular(from)?;
    let mismatch = |at: u64| Error::Mismatch {
        what: format!("{} differs from its copy at byte {at}", from.display()),
    };
    let bytes = source
        .metadata()
        .map_err(Error::file("look at", from))?
        .len();
    if bytes != file.len() {
        return Err(mismatch(bytes.min(file.len())));
    }
    let mut parts = [(); 2].map(|()| vec![0; bytes.min(PIECE) as usize]);
    let mut at = 0;
    while at < bytes {
        check_stop()?;
        let length = (bytes - at).min(PIECE) as usize;
        let [ours, theirs] = parts.each_mut().map(|part| &mut part[..length]);
        file.read_at(at, ours)?;
        source
            .read_exact_at(theirs, at)
            .map_err(Error::file("read", from))?;
        if let Some(first) = ours.iter().zip(&*theirs).position(|(a, b)| a != b) {
            return Err(mismatch(at + first as u64));
        }
        at += length as u64;
        on_bytes(length as u64);
    }
    Ok(())
}
