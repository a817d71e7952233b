//! Checks whether an output is an input as well: a file that would be overwritten while it is read, or a model
//! that its own derivative would replace.

use super::location::FileLocation;
use nvme_driver::error::{Error, Result};
use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Identity of the file that a path names, through any links.
#[derive(Clone, Debug, PartialEq, Eq)]
enum FileIdentity {
    File {
        device: u64,
        inode: u64,
    },
    /// A block device, whichever of its nodes is named.
    Block(u64),
    /// A file that is not there yet: its folder, and its name.
    Missing {
        device: u64,
        inode: u64,
        name: OsString,
    },
}

impl FileIdentity {
    /// Returns the identity of an open file; `None` for files that can be an input and an output at
    /// once: a terminal, /dev/null, a pipe, a folder.
    fn of(path: &Path) -> Option<Self> {
        match std::fs::metadata(path) {
            Ok(about) if about.file_type().is_block_device() => Some(Self::Block(about.rdev())),
            Ok(about) => about.is_file().then(|| Self::File {
                device: about.dev(),
                inode: about.ino(),
            }),
            Err(_) => {
                let folder = match path.parent() {
                    Some(folder) if folder != Path::new("") => folder,
                    _ => Path::new("."),
                };
                let folder = std::fs::metadata(folder).ok()?;
                Some(Self::Missing {
                    device: folder.dev(),
                    inode: folder.ino(),
                    name: path.file_name()?.to_owned(),
                })
            }
        }
    }
}

/// Returns the files of this machine that `text` names as a path, a device (`sim:`, `file:`), a file on a drive
/// (`DEVICE:/path`), or a model in several files.
pub fn named_by(text: &str) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::from(text)];
    if let Ok(location) = FileLocation::parse(text) {
        found.extend(of_device(&location.device));
    }
    found.extend(of_device(text));
    if let Ok(Some(files)) = crate::catalog::set_of(Path::new(text)) {
        found.extend(files.into_iter().map(|(path, _)| path));
    }
    found
}

/// Returns the files in which the device `text` lies: for a stripe the files of each member.
fn of_device(text: &str) -> Vec<PathBuf> {
    if let Some(members) = text.strip_prefix("stripe:") {
        let members = members.split("?stripe=").next().unwrap_or_default();
        return members.split('|').flat_map(of_member).collect();
    }
    of_member(text)
}

fn of_member(text: &str) -> Vec<PathBuf> {
    if let Some(path) = text.strip_prefix("file:") {
        return vec![PathBuf::from(path)];
    }
    #[cfg(feature = "sim")]
    if let Some(options) = text.strip_prefix("sim:") {
        return nvme_driver::device::sim::images(options);
    }
    vec![PathBuf::from(text)]
}

/// Returns true if `path` names a file that the device `text` lies in.
pub fn is_of_device(path: &Path, text: &str) -> bool {
    let wanted = FileIdentity::of(path);
    let mut files = of_device(text).into_iter();
    wanted.is_some() && files.any(|file| FileIdentity::of(&file) == wanted)
}

/// Refuses `output` when it is one of the files that `inputs` name: see [`named_by`]. Hard and symbolic links to a file
/// are that file.
///
/// # Errors
/// [`Error::Usage`] with both names.
pub fn check_apart(output: &Path, inputs: &[impl AsRef<str>]) -> Result<()> {
    let Some(of_output) = FileIdentity::of(output) else {
        return Ok(());
    };
    for input in inputs.iter().map(AsRef::as_ref) {
        let mut files = named_by(input).into_iter();
        if files.any(|file| FileIdentity::of(&file).as_ref() == Some(&of_output)) {
            return Err(Error::usage(
                format!(
                    "the output {} is a file of the input {input}, which would be written over",
                    output.display()
                ),
                "write to another file",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::check_apart;
    use std::os::unix::fs::symlink;

    #[test]
    fn an_output_is_no_input_by_whatever_name() {
        let folder = std::env::temp_dir().join(format!("nvme-gpu-apart-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = |name: &str| folder.join(name);
        std::fs::write(path("input"), b"bytes").unwrap();
        std::fs::write(path("other"), b"bytes").unwrap();
        std::fs::hard_link(path("input"), path("hard")).unwrap();
        symlink(path("input"), path("soft")).unwrap();
        let text = |name: &str| path(name).to_str().unwrap().to_owned();
        let mut inputs = vec![text("input"), format!("file:{}", text("input"))];
        inputs.push(format!("file:{}:/a/file", text("input")));
        inputs.push(format!(
            "stripe:file:{}|file:{}",
            text("other-member"),
            text("input")
        ));
        #[cfg(feature = "sim")]
        inputs.push(format!("sim:{}?ro=on", text("input")));
        for input in &inputs {
            for output in ["input", "hard", "soft", "./../x/../input"] {
                let output = match output.starts_with('.') {
                    true => folder.join(".").join("input"),
                    false => path(output),
                };
                let refused = check_apart(&output, &["no such file", input]).unwrap_err();
                assert!(refused.to_string().contains(input.as_str()), "{refused}");
            }
            for output in ["other", "new"] {
                check_apart(&path(output), &[input]).unwrap();
            }
        }
        // A file that does not exist yet is compared by its folder and name.
        let new = folder.join(".").join("new");
        assert!(check_apart(&new, &[text("new")]).is_err());
        check_apart(std::path::Path::new("/dev/null"), &["/dev/null"]).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
    }
}
