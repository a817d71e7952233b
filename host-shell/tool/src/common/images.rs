//! The image files of a command's device: they are neither its input nor its output, and one that a
//! command created is removed when the command fails.

use nvme_host::files::{check_apart, named_by};
use nvme_host::{Error, Result};
use rustix::fs::{FlockOperation, fcntl_lock};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The device of the command, as the command line names it.
static DEVICE: OnceLock<Option<String>> = OnceLock::new();
/// Paths that the command reads, as given on the command line.
static INPUTS: OnceLock<Vec<String>> = OnceLock::new();
/// Images that were missing when the command opened its device.
static MISSING: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Notes the device of the command. Once, before it runs.
pub fn set_device(device: Option<String>) {
    let _ = DEVICE.set(device);
}

/// Records the inputs of the command. Called once, before it runs.
pub fn set_inputs(inputs: Vec<String>) {
    let _ = INPUTS.set(inputs);
}

/// Returns the device of the command.
pub fn device() -> Option<&'static str> {
    DEVICE.get().and_then(Option::as_deref)
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

/// Notes which images of `device` opening it will create.
pub fn about_to_open(device: &str) {
    let missing = files(device).into_iter().filter(|file| !file.exists());
    noted().extend(missing);
}

/// Keeps created images, even if the command fails later.
#[cfg(feature = "sim")]
pub fn keep_created() {
    noted().clear();
}

/// Removes the images that were created, after the command failed.
pub fn remove_created() {
    for file in noted().drain(..) {
        // One that was not created after all is not there.
        let _ = fs::remove_file(file);
    }
}

fn noted() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    MISSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Refuses `path` as an output that is an image of the command's device, or of another process's.
pub fn refuse_output(path: &Path) -> Result<()> {
    if is_image_of_device(fs::metadata(path).ok()) {
        return Err(Error::usage(
            format!("{} is the image of the device itself", path.display()),
            "write to another file",
        ));
    }
    check_apart(path, INPUTS.get().map_or(&[], Vec::as_slice))?;
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
pub fn refuse_input(file: &File, path: &Path) -> Result<()> {
    if is_image_of_device(file.metadata().ok()) {
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

/// True if another open file description holds a lock against `lock`, as a simulator does on its images.
fn is_locked(file: &File, lock: FlockOperation) -> bool {
    let taken = fcntl_lock(file, lock);
    let _ = fcntl_lock(file, FlockOperation::NonBlockingUnlock);
    matches!(
        taken,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS)
    )
}

fn is_image_of_device(file: Option<fs::Metadata>) -> bool {
    let same = |one: &fs::Metadata, other: &fs::Metadata| {
        (one.dev(), one.ino()) == (other.dev(), other.ino())
    };
    let images = device().map(named_by).unwrap_or_default();
    let mut images = images.iter().filter_map(|image| fs::metadata(image).ok());
    file.is_some_and(|file| file.is_file() && images.any(|image| same(&file, &image)))
}
