//! `import` and `verify`: a file's bytes onto a device, and whether they are there.

use super::{DriveArgs, PIECE};
use crate::common::{WriteArgs, check_stop, images, output, progress};
use clap::Args;
use indicatif::ProgressBar;
use nvme_host::units::parse_bytes;
use nvme_host::{Error, Result, Store, StoreOptions};
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use xxhash_rust::xxh3::Xxh3;

/// Which file, and where it lies.
#[derive(Args)]
struct Places {
    /// File of this machine
    file: PathBuf,
    /// Device: as for other commands, or file:PATH
    #[arg(long, short = 'd')]
    device: String,
    /// First byte on the device
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    offset: u64,
    #[command(flatten)]
    drive: DriveArgs,
}

/// Write a file to a device, read it back and compare its checksum (XXH3)
#[derive(Args)]
pub struct Import {
    #[command(flatten)]
    places: Places,
    /// Leave what is on the device already: goes on where an import was interrupted
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    write: WriteArgs,
}

/// Compare a file with what lies on a device, by checksums (XXH3)
#[derive(Args)]
pub struct Verify {
    #[command(flatten)]
    places: Places,
}

impl Import {
    pub fn run(self) -> Result<()> {
        let source = Source::open(&self.places.file)?;
        let store = self.store()?;
        let place = self.places.offset;
        source.check_fits(&store, place)?;
        let bar = progress::bytes(2 * source.bytes, "import");
        let (mut ours, mut theirs) = (source.piece(), source.piece());
        let (mut hash, mut written) = (Xxh3::new(), 0);
        for (at, length) in source.pieces() {
            check_stop()?;
            let ours = &mut ours[..length];
            source.read(at, ours)?;
            hash.update(ours);
            let theirs = &mut theirs[..length];
            if self.resume {
                store.read_at(place + at, theirs)?;
            }
            if !self.resume || ours != theirs {
                store.write_at(place + at, ours)?;
                written += length as u64;
            }
            bar.inc(length as u64);
        }
        store.flush()?;
        let expected = hash.digest();
        check(expected, of_store(&store, place, &source, &bar)?, &source)?;
        bar.finish_and_clear();
        report(&self.places, &source, expected, Some(written))
    }

    fn store(&self) -> Result<Store> {
        let (device, options) = (&self.places.device, self.places.options(&self.write));
        let is_file = device.starts_with(['/', '.']) || device.starts_with("file:");
        if is_file {
            return Store::open(device, &options);
        }
        images::about_to_open(device);
        let device = nvme_host::open(device)?;
        self.write.check(&*device, "import")?;
        Store::over(device, &options)
    }
}

impl Verify {
    pub fn run(self) -> Result<()> {
        let source = Source::open(&self.places.file)?;
        images::must_exist(&self.places.device)?;
        let options = StoreOptions {
            read_only: true,
            ..self.places.options(&WriteArgs { allow_write: false })
        };
        let store = Store::open(&self.places.device, &options)?;
        source.check_fits(&store, self.places.offset)?;
        let bar = progress::bytes(2 * source.bytes, "verify");
        let (mut piece, mut hash) = (source.piece(), Xxh3::new());
        for (at, length) in source.pieces() {
            check_stop()?;
            source.read(at, &mut piece[..length])?;
            hash.update(&piece[..length]);
            bar.inc(length as u64);
        }
        let expected = hash.digest();
        let found = of_store(&store, self.places.offset, &source, &bar)?;
        check(expected, found, &source)?;
        bar.finish_and_clear();
        report(&self.places, &source, expected, None)
    }
}

impl Places {
    fn options(&self, write: &WriteArgs) -> StoreOptions {
        StoreOptions {
            allow_write: write.allow_write,
            nsid: self.drive.namespace_id,
            timeout: Duration::from_millis(self.drive.timeout_ms),
            ..StoreOptions::default()
        }
    }
}

/// The file of this machine.
struct Source<'a> {
    file: File,
    path: &'a Path,
    bytes: u64,
}

impl<'a> Source<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::file("open", path))?;
        let about = file.metadata().map_err(Error::file("look at", path))?;
        if !about.is_file() {
            let cause = format!("{} is no regular file", path.display());
            return Err(Error::usage(cause, "name a file"));
        }
        images::refuse_input(&file, path)?;
        Ok(Self {
            file,
            path,
            bytes: about.len(),
        })
    }

    fn check_fits(&self, store: &Store, place: u64) -> Result<()> {
        let end = place.checked_add(self.bytes);
        if end.is_some_and(|end| end <= store.len()) {
            return Ok(());
        }
        let cause = format!(
            "{} has {} bytes, which do not lie from byte {place} on of a device of {}",
            self.path.display(),
            self.bytes,
            store.len()
        );
        Err(Error::usage(cause, "use a larger device or another offset"))
    }

    fn piece(&self) -> Vec<u8> {
        vec![0; self.bytes.min(PIECE) as usize]
    }

    /// Offset and length of each piece.
    fn pieces(&self) -> impl Iterator<Item = (u64, usize)> + use<> {
        let bytes = self.bytes;
        let begins = (0..bytes).step_by(PIECE as usize);
        begins.map(move |at| (at, (bytes - at).min(PIECE) as usize))
    }

    fn read(&self, at: u64, data: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(data, at);
        read.map_err(Error::file("read", self.path))
    }
}

/// The checksum of what lies on the device.
fn of_store(store: &Store, place: u64, source: &Source<'_>, bar: &ProgressBar) -> Result<u64> {
    let (mut piece, mut hash) = (source.piece(), Xxh3::new());
    for (at, length) in source.pieces() {
        check_stop()?;
        store.read_at(place + at, &mut piece[..length])?;
        hash.update(&piece[..length]);
        bar.inc(length as u64);
    }
    Ok(hash.digest())
}

fn check(expected: u64, found: u64, source: &Source<'_>) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    let path = source.path.display();
    Err(Error::Mismatch {
        what: format!("{path} has the XXH3 {expected:016x}, the device {found:016x}"),
    })
}

fn report(places: &Places, source: &Source<'_>, hash: u64, written: Option<u64>) -> Result<()> {
    let hash = format!("{hash:016x}");
    if places.drive.json {
        return output::json(&json!({
            "file": source.path.to_string_lossy(),
            "offset": places.offset,
            "bytes": source.bytes,
            "written": written,
            "xxh3": hash,
        }));
    }
    let written = written.map(|bytes| format!(", {bytes} of them written"));
    output::print(&format!(
        "{}: {} bytes from byte {} on{}, xxh3 {hash}",
        source.path.display(),
        source.bytes,
        places.offset,
        written.unwrap_or_default()
    ))
}
