//! `import` and `verify`: writes a file's bytes to a device, and compares them. The file is read back after a flush,
//! and its XXH3 compared, before the command reports success.

use super::{DriveArgs, PIECE};
use crate::common::images::CommandFiles;
use crate::common::{WriteArgs, check_stop, images, output, progress};
use clap::Args;
use indicatif::ProgressBar;
use nvme_host::catalog;
use nvme_host::files::open_regular;
use nvme_host::store::path_of_file;
use nvme_host::units::parse_bytes;
use nvme_host::{Error, Result, Store, StoreOptions};
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Files and their position on the device.
#[derive(Args)]
struct ImportPlaces {
    /// File; the index of a model (.json), or the first part of a split GGUF, stands for all its files, each from a
    /// multiple of 4096 bytes on
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
pub struct ImportCommand {
    #[command(flatten)]
    places: ImportPlaces,
    /// Continue an interrupted import
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    write: WriteArgs,
}

/// Compare a file with what lies on a device, by checksums (XXH3)
#[derive(Args)]
pub struct VerifyCommand {
    #[command(flatten)]
    places: ImportPlaces,
}

impl ImportCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let input = ImportInput::open(&self.places.file, files)?;
        let store = self.store()?;
        let place = self.places.offset;
        input.check_fits(&store, place)?;
        let bar = progress::bytes(2 * input.bytes(), "import");
        let (mut ours, mut theirs) = (input.piece(), input.piece());
        let (mut sums, mut written) = (ImportSums::default(), 0);
        for source in &input.sources {
            for (at, length) in source.pieces() {
                check_stop()?;
                let ours = &mut ours[..length];
                source.read(at, ours)?;
                sums.update(ours);
                let theirs = &mut theirs[..length];
                let to = place + source.begin + at;
                if self.resume {
                    store.read_at(to, theirs)?;
                }
                if !self.resume || ours != theirs {
                    store.write_at(to, ours)?;
                    written += length as u64;
                }
                // `--resume` continues from here.
                files.keep_created();
                bar.inc(length as u64);
            }
            sums.end_file();
        }
        store.flush()?;
        files.keep_created();
        input.compare(&sums, &store, place, &bar)?;
        bar.finish_and_clear();
        report(&self.places, &input, &sums, Some(written))
    }

    fn store(&self) -> Result<Store> {
        let (device, options) = (&self.places.device, self.places.options(&self.write));
        if path_of_file(device).is_some() {
            return Store::open(device, &options);
        }
        let device = nvme_host::open(device)?;
        self.write.check(&*device, "import")?;
        Store::over(device, &options)
    }
}

impl VerifyCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let input = ImportInput::open(&self.places.file, files)?;
        images::must_exist(&self.places.device)?;
        let options = StoreOptions {
            read_only: true,
            ..self.places.options(&WriteArgs { allow_write: false })
        };
        let store = Store::open(&self.places.device, &options)?;
        input.check_fits(&store, self.places.offset)?;
        let bar = progress::bytes(2 * input.bytes(), "verify");
        let (mut piece, mut sums) = (input.piece(), ImportSums::default());
        for source in &input.sources {
            for (at, length) in source.pieces() {
                check_stop()?;
                source.read(at, &mut piece[..length])?;
                sums.update(&piece[..length]);
                bar.inc(length as u64);
            }
            sums.end_file();
        }
        input.compare(&sums, &store, self.places.offset, &bar)?;
        bar.finish_and_clear();
        report(&self.places, &input, &sums, None)
    }
}

impl ImportPlaces {
    fn options(&self, write: &WriteArgs) -> StoreOptions {
        StoreOptions {
            allow_write: write.allow_write,
            nsid: self.drive.namespace.namespace_id,
            timeout: self.drive.timeout.limit(),
            ..StoreOptions::default()
        }
    }
}

/// The files that a path names: one, or all files of a model.
struct ImportInput<'a> {
    path: &'a Path,
    /// Sources in the order of their positions.
    sources: Vec<ImportSource>,
    is_set: bool,
}

impl<'a> ImportInput<'a> {
    fn open(path: &'a Path, files: &CommandFiles) -> Result<Self> {
        let set = catalog::set_of(path)?;
        let is_set = set.is_some();
        let found = set
            .unwrap_or_else(|| vec![(path.to_owned(), 0)])
            .into_iter();
        let sources = found.map(|(path, begin)| ImportSource::open(path, begin, files));
        Ok(Self {
            path,
            sources: sources.collect::<Result<_>>()?,
            is_set,
        })
    }

    fn bytes(&self) -> u64 {
        self.sources.iter().map(|one| one.bytes).sum()
    }

    fn check_fits(&self, store: &Store, place: u64) -> Result<()> {
        let last = self.sources.last().map_or(0, |one| one.begin + one.bytes);
        store.check_room(&self.path.display().to_string(), place, last)
    }

    /// Allocates memory for the longest piece.
    fn piece(&self) -> Vec<u8> {
        let longest = self.sources.iter().map(|one| one.bytes.min(PIECE)).max();
        vec![0; longest.unwrap_or(0) as usize]
    }

    /// Compares the bytes on the device with the checksums of the files.
    fn compare(
        &self,
        sums: &ImportSums,
        store: &Store,
        place: u64,
        bar: &ProgressBar,
    ) -> Result<()> {
        let mut piece = self.piece();
        for (source, expected) in self.sources.iter().zip(&sums.of_files) {
            let mut hash = Xxh3::new();
            for (at, length) in source.pieces() {
                check_stop()?;
                store.read_at(place + source.begin + at, &mut piece[..length])?;
                hash.update(&piece[..length]);
                bar.inc(length as u64);
            }
            let found = hash.digest();
            if found != *expected {
                let path = source.path.display();
                return Err(Error::Mismatch {
                    what: format!("{path} has the XXH3 {expected:016x}, the device {found:016x}"),
                });
            }
        }
        Ok(())
    }
}

/// A file of this machine.
struct ImportSource {
    file: File,
    path: PathBuf,
    bytes: u64,
    /// Position at which the next file begins.
    begin: u64,
}

impl ImportSource {
    fn open(path: PathBuf, begin: u64, files: &CommandFiles) -> Result<Self> {
        let (file, about) = open_regular(&path)?;
        files.refuse_input(&file, &path)?;
        Ok(Self {
            file,
            path,
            bytes: about.len(),
            begin,
        })
    }

    /// Returns the offset and length of each piece.
    fn pieces(&self) -> impl Iterator<Item = (u64, usize)> + use<> {
        let bytes = self.bytes;
        let begins = (0..bytes).step_by(PIECE as usize);
        begins.map(move |at| (at, (bytes - at).min(PIECE) as usize))
    }

    fn read(&self, at: u64, data: &mut [u8]) -> Result<()> {
        let read = self.file.read_exact_at(data, at);
        read.map_err(Error::file("read", &self.path))
    }
}

/// Checksums of the files, and of their concatenation.
#[derive(Default)]
struct ImportSums {
    of_files: Vec<u64>,
    of_this: Xxh3,
    of_all: Xxh3,
}

impl ImportSums {
    fn update(&mut self, bytes: &[u8]) {
        self.of_this.update(bytes);
        self.of_all.update(bytes);
    }

    fn end_file(&mut self) {
        self.of_files.push(self.of_this.digest());
        self.of_this.reset();
    }
}

fn report(
    places: &ImportPlaces,
    input: &ImportInput<'_>,
    sums: &ImportSums,
    written: Option<u64>,
) -> Result<()> {
    let of_files = input.sources.iter().zip(&sums.of_files);
    let files: Vec<Value> = of_files
        .filter(|_| input.is_set)
        .map(|(one, hash)| {
            json!({
                "file": one.path.to_string_lossy(),
                "offset": places.offset + one.begin,
                "bytes": one.bytes,
                "xxh3": format!("{hash:016x}"),
            })
        })
        .collect();
    let hash = format!("{:016x}", sums.of_all.digest());
    if places.drive.form.json {
        return output::json(&json!({
            "file": input.path.to_string_lossy(),
            "offset": places.offset,
            "bytes": input.bytes(),
            "written": written,
            "xxh3": hash,
            "files": files,
        }));
    }
    let written = written.map(|bytes| format!(", {bytes} of them written"));
    let several = match input.is_set {
        true => format!(" in {} files", files.len()),
        false => String::new(),
    };
    output::print(&format!(
        "{}: {} bytes{several} from byte {} on{}, xxh3 {hash}",
        input.path.display(),
        input.bytes(),
        places.offset,
        written.unwrap_or_default()
    ))
}
