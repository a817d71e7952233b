//! `manifest`: writes the hashes of a file's chunks, or checks that a file has them.

use super::{DriveArgs, volume};
use crate::common::images::CommandFiles;
use crate::common::{check_stop, file::OutputFile, output, progress};
use clap::Args;
use nvme_host::catalog::{Catalog, HeaderSource};
use nvme_host::files::FileLocation;
use nvme_host::units::parse_bytes;
use nvme_host::{Manifest, Result};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Hash the chunks of a file of tensors (XXH3), by which `generate` and layer loaders verify what they load
#[derive(Args)]
pub struct ManifestArgs {
    /// File of this machine, DEVICE:/path, or with --offset a device
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    file: String,
    /// FILE is a device that has the file from this byte on, as `import` writes it
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    offset: Option<u64>,
    /// The size of the file at --offset, where its header alone does not say it
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, requires = "offset")]
    bytes: Option<u64>,
    /// The manifest to write
    #[arg(long, short = 'o', value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    drive: DriveArgs,
}

impl ManifestArgs {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let mut out = OutputFile::create(Some(&self.out), files)?;
        let manifest = self.make()?;
        check_stop()?;
        out.write(manifest.to_json().as_bytes())?;
        out.commit()?;
        let (chunks, hash) = (
            manifest.chunks().count(),
            format!("{:016x}", manifest.xxh3()),
        );
        if self.drive.form.json {
            return output::json(&json!({
                "file": self.file,
                "bytes": manifest.bytes(),
                "chunk_bytes": manifest.chunk_bytes(),
                "chunks": chunks,
                "xxh3": hash,
            }));
        }
        output::print(&format!(
            "{}: {} bytes in {chunks} chunks, xxh3 {hash}",
            self.file,
            manifest.bytes()
        ))
    }

    fn make(&self) -> Result<Manifest> {
        let bar = progress::bytes(0, "hashing");
        let mut on_progress = |done, all| {
            bar.set_length(all);
            bar.set_position(done);
            match check_stop() {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        };
        if let Some(offset) = self.offset {
            let store = self.drive.open(&self.file)?;
            return match self.bytes {
                None => Manifest::of_store(&store, offset, &mut on_progress),
                Some(bytes) => Manifest::of_range(&store, offset, bytes, &mut on_progress),
            };
        }
        if !FileLocation::is_one(&self.file) {
            return Manifest::of_file(Path::new(&self.file), &mut on_progress);
        }
        let location = FileLocation::parse(&self.file)?;
        let store = self.drive.store(&location)?;
        let file = volume(&store, &location)?.file(&location.path)?;
        let catalog: Catalog = file.catalog()?;
        let made = Manifest::of(
            &file,
            HeaderSource::len(&file),
            catalog.entries(),
            &mut on_progress,
        )?;
        // A file that changed meanwhile has no consistent manifest.
        file.check_unchanged()?;
        Ok(made)
    }
}
