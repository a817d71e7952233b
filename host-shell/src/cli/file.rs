//! Input and output files that are whole or not there.

use super::check_stop;
use nvme_host::{Error, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Reads a whole input; `-` is standard input.
pub fn read_input(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if path == Path::new("-") {
        io::stdin()
            .lock()
            .read_to_end(&mut bytes)
            .map_err(Error::file("read", "standard input"))?;
    } else {
        bytes = fs::read(path).map_err(Error::file("read", path))?;
    }
    Ok(bytes)
}

/// Reads an input, `-` is standard input, into `bytes` from its start; how much there was, at most one
/// byte more than fits.
pub fn read_at_most(path: &Path, bytes: &mut [u8]) -> Result<usize> {
    let mut source: Box<dyn Read> = match path == Path::new("-") {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(path).map_err(Error::file("open", path))?),
    };
    let name = if path == Path::new("-") {
        Path::new("standard input")
    } else {
        path
    };
    let mut more = [0];
    let mut at = 0;
    loop {
        let place = match at < bytes.len() {
            true => &mut bytes[at..],
            false => &mut more[..],
        };
        match source.read(place) {
            Ok(0) => return Ok(at),
            Ok(count) => at += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => check_stop()?,
            Err(error) => return Err(Error::file("read", name)(error)),
        }
        if at > bytes.len() {
            return Ok(at);
        }
    }
}

/// An output that replaces `path` when it is complete, and leaves it as it was otherwise.
pub enum Output {
    /// Standard output, a device or a pipe: written as it comes.
    Stream(Box<dyn Write>, PathBuf),
    /// A file beside the target, renamed at the end.
    Replace {
        /// The file.
        file: File,
        /// Where it is now.
        temporary: PathBuf,
        /// What it becomes.
        target: PathBuf,
    },
}

impl Output {
    /// Opens an output; none or `-` is standard output.
    pub fn create(path: Option<&Path>) -> Result<Self> {
        let path = match path {
            None => {
                return Ok(Self::Stream(
                    Box::new(io::stdout()),
                    "standard output".into(),
                ));
            }
            Some(path) if path == Path::new("-") => {
                return Ok(Self::Stream(
                    Box::new(io::stdout()),
                    "standard output".into(),
                ));
            }
            Some(path) => path,
        };
        // Through a link, the file that it names is replaced, not the link.
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                return Err(Error::file("write", path)(
                    io::ErrorKind::IsADirectory.into(),
                ));
            }
            Ok(metadata) if !metadata.is_file() => {
                let file = OpenOptions::new()
                    .write(true)
                    .open(path)
                    .map_err(Error::file("open", path))?;
                return Ok(Self::Stream(Box::new(file), path.clone()));
            }
            _ => {}
        }
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let temporary = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)
            .map_err(Error::file("create", path))?;
        Ok(Self::Replace {
            file,
            temporary,
            target: path.clone(),
        })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Stream(stream, path) => stream
                .write_all(bytes)
                .map_err(Error::file("write", &*path)),
            Self::Replace { file, target, .. } => file
                .write_all(bytes)
                .map_err(Error::file("write", &*target)),
        }
    }

    /// Makes the output what the user asked for.
    pub fn commit(mut self) -> Result<()> {
        match &mut self {
            Self::Stream(stream, path) => stream.flush().map_err(Error::file("write", &*path)),
            Self::Replace {
                file,
                temporary,
                target,
            } => {
                if let Ok(metadata) = fs::metadata(&*target) {
                    // A replaced file keeps its mode; a file system without modes has none to keep.
                    let _ = file.set_permissions(metadata.permissions());
                }
                file.sync_all().map_err(Error::file("write", &*target))?;
                fs::rename(&*temporary, &*target).map_err(Error::file("rename to", &*target))
            }
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Self::Replace { temporary, .. } = self {
            // After a commit it is gone already.
            let _ = fs::remove_file(temporary);
        }
    }
}
