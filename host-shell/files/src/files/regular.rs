//! Opens regular files of this machine; a name of anything else is refused.

use nvme_driver::error::{Error, Result};
use std::fs::{File, FileType, Metadata};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens the regular file at `path` for reading. A pipe, whose open would wait for a writer, is refused at once.
///
/// # Errors
/// [`Error::File`]; [`Error::Usage`] for a directory, pipe, socket or device.
pub fn open_regular(path: &Path) -> Result<(File, Metadata)> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path);
    let file = match file {
        Ok(file) => file,
        // A socket has no open at all.
        Err(error) => {
            let kind = std::fs::metadata(path).map(|about| about.file_type());
            return Err(match kind {
                Ok(kind) if !kind.is_file() && !kind.is_dir() => not_regular(path, kind),
                _ => Error::file("open", path)(error),
            });
        }
    };
    let about = file.metadata().map_err(Error::file("look at", path))?;
    match about.is_file() {
        true => Ok((file, about)),
        false => Err(not_regular(path, about.file_type())),
    }
}

/// Returns the refusal of `path`, which is of `kind`.
pub(super) fn not_regular(path: &Path, kind: FileType) -> Error {
    let cause = format!("{} is {}, not a regular file", path.display(), name(kind));
    Error::usage(cause, "name a regular file")
}

/// Names the kind of a file that is not a regular one.
fn name(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

#[cfg(test)]
mod tests {
    use super::open_regular;
    use nvme_driver::error::Error;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = std::env::temp_dir().join(format!("nvme-gpu-regular-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (pipe, socket) = (folder.join("pipe"), folder.join("socket"));
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        for (path, kind) in [
            (&*pipe, "a pipe"),
            (&socket, "a socket"),
            (&folder, "a directory"),
            (Path::new("/dev/null"), "a device"),
        ] {
            match open_regular(path) {
                Err(Error::Usage { cause, .. }) => {
                    assert!(
                        cause.ends_with(&format!("is {kind}, not a regular file")),
                        "{cause}"
                    );
                }
                other => panic!("{kind}: {other:?}"),
            }
        }
        drop(listener);
        let file = folder.join("file");
        assert!(matches!(open_regular(&file), Err(Error::File { .. })));
        std::fs::write(&file, b"four").unwrap();
        assert_eq!(open_regular(&file).unwrap().1.len(), 4);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
