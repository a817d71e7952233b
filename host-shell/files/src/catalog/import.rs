//! A file's bytes onto a store, compared afterwards.

use super::Catalog;
use super::shards;
use super::source::{FileSource, HeaderSource};
use crate::files::is_of_device;
use nvme_driver::error::{Error, Result};
use nvme_store::Store;
use std::ops::ControlFlow;
use std::path::Path;

/// Bytes that are copied at a time.
const PIECE: u64 = 8 << 20;

/// Progress callback of an import: bytes done and bytes in all; a verified import counts each byte twice.
/// `Break` ends the import.
pub type OnProgress<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

impl Catalog {
    /// Writes the file at `path` to `store` from byte `offset` on, and returns its catalog with positions in
    /// the store. The files of an index (see [`of_file`](Self::of_file)) are concatenated, each from a multiple
    /// of 4,096 after `offset` on; the index itself is not written.
    ///
    /// The header is checked before anything is written. The data are flushed; with `verify` they are read back
    /// then and compared with the file. `on_progress` is called after each 8 MiB.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file of no known format and for one that does not fit; [`Error::File`];
    /// [`Error::Mismatch`] if bytes that were read back differ, also for a file that changed meanwhile;
    /// [`Error::Interrupted`] when `on_progress` ended it; else the errors of the store. Part of the range may have
    /// been written then.
    pub fn import(
        store: &Store,
        path: &Path,
        offset: u64,
        verify: bool,
        on_progress: OnProgress<'_>,
    ) -> Result<Self> {
        let opened = shards::open(path)?;
        let catalog = opened.catalog;
        for device in store.member_paths() {
            let mut files = opened.files.iter().map(|(file, _)| file.path());
            if let Some(file) = files.find(|file| is_of_device(file, &device.device)) {
                return Err(Error::usage(
                    format!("{} is the file of the store itself", file.display()),
                    "import it to another store",
                ));
            }
        }
        if offset
            .checked_add(catalog.bytes)
            .is_none_or(|end| end > store.len())
        {
            let cause = format!(
                "{} has {} bytes, which do not fit at byte {offset} of a store of {}",
                path.display(),
                catalog.bytes,
                store.len()
            );
            return Err(Error::usage(cause, "use a larger store or another offset"));
        }
        let catalog = catalog.at(offset);
        let bytes: u64 = opened.files.iter().map(|(file, _)| file.len()).sum();
        let mut progress = ImportProgress {
            done: 0,
            total: if verify { 2 * bytes } else { bytes },
            on_progress,
        };
        let onto = ImportTarget { store, offset };
        onto.write(&opened.files, &mut progress)?;
        store.flush()?;
        if verify {
            onto.compare(&opened.files, &mut progress)?;
        }
        Ok(catalog)
    }
}

/// Destination of the files.
struct ImportTarget<'a> {
    store: &'a Store,
    offset: u64,
}

impl ImportTarget<'_> {
    fn write(&self, files: &[(FileSource, u64)], progress: &mut ImportProgress<'_>) -> Result<()> {
        let mut buffer = vec![0; PIECE as usize];
        for (file, begin) in files {
            for (at, length) in pieces(file.len()) {
                let piece = &mut buffer[..length];
                file.read_at(at, piece)?;
                self.store.write_at(self.offset + begin + at, piece)?;
                progress.add(length)?;
            }
        }
        Ok(())
    }

    fn compare(
        &self,
        files: &[(FileSource, u64)],
        progress: &mut ImportProgress<'_>,
    ) -> Result<()> {
        let (mut ours, mut theirs) = (vec![0; PIECE as usize], vec![0; PIECE as usize]);
        for (file, begin) in files {
            for (at, length) in pieces(file.len()) {
                let (ours, theirs) = (&mut ours[..length], &mut theirs[..length]);
                file.read_at(at, ours)?;
                self.store.read_at(self.offset + begin + at, theirs)?;
                if let Some(first) = ours.iter().zip(&*theirs).position(|(a, b)| a != b) {
                    let what = format!(
                        "byte {} of {} is {:#04x} in the file and {:#04x} on the device",
                        at + first as u64,
                        file.label(),
                        ours[first],
                        theirs[first]
                    );
                    return Err(Error::Mismatch { what });
                }
                progress.add(length)?;
            }
        }
        Ok(())
    }
}

/// Bytes done so far.
struct ImportProgress<'a> {
    done: u64,
    total: u64,
    on_progress: OnProgress<'a>,
}

impl ImportProgress<'_> {
    fn add(&mut self, bytes: usize) -> Result<()> {
        self.done += bytes as u64;
        match (self.on_progress)(self.done, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Interrupted),
        }
    }
}

/// Returns the offset and length of each piece.
fn pieces(bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let begins = (0..bytes).step_by(PIECE as usize);
    begins.map(move |at| (at, (bytes - at).min(PIECE) as usize))
}
