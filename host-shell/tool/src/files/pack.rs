//! `pack`: makes the image of an ext4 from a folder, with the data of each file contiguous. mke2fs does the work;
//! afterwards every file is read back out of the image by our own reader and compared.

use super::{PIECE, text};
use crate::common::file::CreatedFile;
use crate::common::{OutputForm, check_stop, output, progress};
use clap::Args;
use nvme_host::catalog::HeaderSource;
use nvme_host::files::{DriveFile, Ext4Volume, open_regular};
use nvme_host::{Error, Result, Store, StoreOptions, units};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// The variable that names another mke2fs.
const PROGRAM: &str = "MKE2FS";
const BLOCK: u64 = 4096;
/// Bytes that a file, link or folder needs besides its data: its inode, and its name in a folder of full blocks.
const PER_ENTRY: u64 = 1024;
/// Inodes besides those of the folder's content.
const MORE_INODES: u64 = 1024;
/// Bitmaps and other structures of the same size in every image.
const FIXED: u64 = 16 << 20;
const TICK: Duration = Duration::from_millis(20);
/// Time for the last words of a program that has ended.
const LAST_WORDS: Duration = Duration::from_secs(5);
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

/// Everything below a folder.
#[derive(Default)]
struct FolderContent {
    /// Regular files, by path.
    files: Vec<PackedFile>,
    /// Links, and others that are neither files nor folders.
    links: u64,
    folders: u64,
}

impl FolderContent {
    fn entries(&self) -> u64 {
        self.files.len() as u64 + self.links + self.folders
    }

    /// Returns the number of bytes of the files.
    fn data_bytes(&self) -> u64 {
        self.files.iter().map(|one| one.bytes).sum()
    }

    /// Returns the number of bytes of the image: whole MiB.
    fn image_bytes(&self) -> u64 {
        let of_files = self
            .files
            .iter()
            .map(|one| one.bytes.next_multiple_of(BLOCK));
        // A folder has a block at least, and a link has one if its target is long.
        let of_others = (self.links + self.folders) * BLOCK;
        let data = of_files.sum::<u64>() + of_others + self.entries() * PER_ENTRY;
        (data + data / 64 + FIXED).next_multiple_of(1 << 20)
    }
}

impl PackCommand {
    pub fn run(self) -> Result<()> {
        let found = content(&self.folder)?;
        let is_there = || {
            let cause = format!("{} is there already", self.image.display());
            Error::usage(cause, "name another file, or remove it")
        };
        if fs::symlink_metadata(&self.image).is_ok() {
            return Err(is_there());
        }
        self.check_apart()?;
        let image = CreatedFile::create(&self.image).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => is_there(),
            _ => Error::file("create", &self.image)(error),
        })?;
        let made = self.make(&found).and_then(|()| self.verify(&found.files));
        if made.is_err() {
            image.remove();
        }
        let several = made?;
        let (count, data) = (found.files.len(), found.data_bytes());
        if self.form.json {
            return output::json(&json!({
                "image": self.image.to_string_lossy(),
                "files": count,
                "data_bytes": data,
                "image_bytes": found.image_bytes(),
                "in_pieces": several,
            }));
        }
        let mut lines = vec![format!(
            "{}: {count} files, {} of data, compared",
            self.image.display(),
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
    fn make(&self, found: &FolderContent) -> Result<()> {
        let inodes = (found.entries() + MORE_INODES).to_string();
        let program = std::env::var_os(PROGRAM).unwrap_or_else(|| "mke2fs".into());
        let mut mke2fs = Command::new(program);
        // Not on the path of every user.
        let path = std::env::var("PATH").unwrap_or_default();
        mke2fs.env("PATH", format!("{path}:/usr/sbin:/sbin"));
        mke2fs.args(LAYOUT).args(["-N", &inodes, "-L", &self.label]);
        mke2fs.arg("-d").arg(&self.folder).arg(&self.image);
        mke2fs.arg(format!("{}k", found.image_bytes() >> 10));
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
            let path = [b"/", one.path.as_os_str().as_bytes()].concat();
            let file = volume.file(&path)?;
            let pieces = file.extents()?.iter().filter(|one| one.is_written).count();
            if pieces > 1 {
                several.push(json!({ "path": text(&path), "pieces": pieces }));
            }
            compare(&file, &self.folder.join(&one.path), &mut |bytes| {
                bar.inc(bytes)
            })?;
        }
        bar.finish_and_clear();
        Ok(several)
    }
}

/// Finds everything below `folder`.
fn content(folder: &Path) -> Result<FolderContent> {
    let mut found = FolderContent::default();
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
                found.folders += 1;
                left.push(below);
            } else if about.is_file() {
                found.files.push(PackedFile {
                    path: below,
                    bytes: about.len(),
                });
            } else {
                found.links += 1;
            }
        }
    }
    found.files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Waits for the end of `child`, and returns its message if it failed. Ctrl-C ends it.
fn wait(mut child: Child) -> Result<Option<String>> {
    let system = |source| Error::System {
        call: "wait",
        source,
    };
    // A pipe that nobody reads would fill, and the program wait for ever.
    let (send, last) = mpsc::channel();
    if let Some(stderr) = child.stderr.take() {
        std::thread::spawn(move || send.send(last_line(stderr)));
    }
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
    // Without its words there is the status; a child that it left can keep the pipe open.
    let said = last.recv_timeout(LAST_WORDS).ok().flatten();
    Ok(Some(said.unwrap_or_else(|| status.to_string())))
}

/// Reads to the end; returns the last line that is not blank.
fn last_line(from: impl Read) -> Option<String> {
    let lines = BufReader::new(from).split(b'\n').map_while(io::Result::ok);
    let last = lines.filter(|line| !line.trim_ascii().is_empty()).last()?;
    Some(String::from_utf8_lossy(&last).into_owned())
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
