//! The image files of a command's device: they are neither its input nor its output, and an image that a command
//! created is removed when the command fails.

use nvme_host::files::{check_apart, named_by};
use nvme_host::{Error, Result};
use rustix::fs::{FlockOperation, fcntl_lock};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Files of a command: those that its outputs must not replace.
#[derive(Default)]
pub struct CommandFiles {
    /// The device, as the user named it on the command line.
    device: Option<String>,
    /// Paths that the command reads, as given on the command line. Outputs whose names the command derives, as in a
    /// copy into a folder, are compared with them as well.
    inputs: Vec<String>,
}

/// Returns the image files that `device` names, whether they exist or not.
fn files(device: &str) -> Vec<PathBuf> {
    #[cfg(feature = "sim")]
    if let Some(text) = device.strip_prefix("sim:") {
        return nvme_host::sim::images(text);
    }
    let _ = device;
    Vec::new()
}

/// Escapes `path` for the name of a simulated device.
pub fn escaped(path: &str) -> String {
    #[cfg(feature = "sim")]
    return nvme_sim::config::escape(path);
    #[cfg(not(feature = "sim"))]
    path.to_owned()
}

/// Refuses a device with an image that does not exist: for commands that change nothing, and so do not
/// create it either.
pub fn must_exist(device: &str) -> Result<()> {
    for image in files(device) {
        fs::metadata(&image).map_err(Error::file("open the image", &image))?;
    }
    Ok(())
}

impl CommandFiles {
    pub fn new(device: Option<String>, inputs: Vec<String>) -> Self {
        Self { device, inputs }
    }

    /// Returns the device of the command.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// Keeps created images, even if the command fails later: what it did to them is done, or can be continued.
    pub fn keep_created(&self) {
        #[cfg(feature = "sim")]
        nvme_host::sim::take_created();
    }

    /// Removes the images that this process created, after the command failed.
    pub fn remove_created(&self) {
        #[cfg(feature = "sim")]
        for image in nvme_host::sim::take_created() {
            image.remove();
        }
    }

    /// Refuses `path` as an output that is an image of the command's device, or of another process's.
    pub fn refuse_output(&self, path: &Path) -> Result<()> {
        if self.is_image_of_device(fs::metadata(path).ok()) {
            return Err(Error::usage(
                format!("{} is the image of the device itself", path.display()),
                "write to another file",
            ));
        }
        check_apart(path, &self.inputs)?;
        // Only a regular file can be replaced. A user who may not open it for writing tests a shared lock instead
        // of an exclusive one, and still learns that a simulator has it in use.
        let open = || {
            let file = File::options().read(true).write(true).open(path);
            let shared = || (File::open(path), FlockOperation::NonBlockingLockShared);
            let (file, lock) = match file {
                Ok(file) => (Ok(file), FlockOperation::NonBlockingLockExclusive),
                Err(_) => shared(),
            };
            file.map(|file| (file, lock))
        };
        match open() {
            Ok((file, lock)) if is_locked(&file, lock) => Err(in_use(path)),
            _ => Ok(()),
        }
    }

    /// Refuses an input that is an image of the command's device, or that another process writes to.
    pub fn refuse_input(&self, file: &File, path: &Path) -> Result<()> {
        if self.is_image_of_device(file.metadata().ok()) {
            return Err(Error::usage(
                format!("{} is the image of the device itself", path.display()),
                "name another file",
            ));
        }
        match is_locked(file, FlockOperation::NonBlockingLockShared) {
            true => Err(in_use(path)),
            false => Ok(()),
        }
    }

    fn is_image_of_device(&self, file: Option<fs::Metadata>) -> bool {
        let same = |one: &fs::Metadata, other: &fs::Metadata| {
            (one.dev(), one.ino()) == (other.dev(), other.ino())
        };
        let images = self.device().map(named_by).unwrap_or_default();
        let mut images = images.iter().filter_map(|image| fs::metadata(image).ok());
        file.is_some_and(|file| file.is_file() && images.any(|image| same(&file, &image)))
    }
}

fn in_use(path: &Path) -> Error {
    Error::usage(
        format!(
            "{} is in use as an image by another process",
            path.display()
        ),
        format!(
            "end that process first (`fuser -v {}` names it), or choose another file",
            path.display()
        ),
    )
}

/// True if another open file description holds a conflicting lock, as a simulator does on its images.
fn is_locked(file: &File, lock: FlockOperation) -> bool {
    let taken = fcntl_lock(file, lock);
    let _ = fcntl_lock(file, FlockOperation::NonBlockingUnlock);
    matches!(
        taken,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS)
    )
}
