//! Atomic replacement of a file: either all of it is written, or it stays unchanged.

use nvme_driver::error::{Error, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers of temporary files of this process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Writes `bytes` to the regular file `path`: writes a new file, and replaces the old one once all bytes are on
/// its file system. After an error the old file is still there.
///
/// # Errors
/// [`Error::File`]; [`Error::Usage`] for a path that exists and is no regular file: a pipe would wait for its
/// reader.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    // Through a link, the file that it names is replaced, not the link.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let before = fs::metadata(path).ok();
    if let Some(about) = before.as_ref().filter(|about| !about.is_file()) {
        return Err(super::regular::not_regular(path, about.file_type()));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_file_name(format!(".{name}.{}.{number}.part", std::process::id()));
    let file = File::create_new(&temporary).map_err(Error::file("create", path))?;
    let written = write(file, bytes, before).and_then(|()| fs::rename(&temporary, path));
    written.map_err(|error| {
        let _ = fs::remove_file(&temporary);
        Error::file("write", path)(error)
    })
}

fn write(mut file: File, bytes: &[u8], before: Option<fs::Metadata>) -> std::io::Result<()> {
    if let Some(about) = before {
        // A file system without modes has none to keep.
        let _ = file.set_permissions(about.permissions());
    }
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::replace;
    use nvme_driver::error::Error;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    #[test]
    fn a_file_is_replaced_and_a_pipe_refused() {
        let folder = std::env::temp_dir().join(format!("nvme-gpu-replace-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (file, pipe) = (folder.join("file"), folder.join("pipe"));
        for content in [&b"first"[..], b"2"] {
            replace(&file, content).unwrap();
            assert_eq!(std::fs::read(&file).unwrap(), content);
        }
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        assert!(matches!(replace(&pipe, b"x"), Err(Error::Usage { .. })));
        assert!(matches!(
            replace(&folder.join("no/file"), b"x"),
            Err(Error::File { .. })
        ));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
