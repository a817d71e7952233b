//! Files of a release: each failure names its path.

use chores::process::Failure;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

fn failed(action: &str, path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot {action} {}: {error}", path.display()))
}

pub fn make_folder(path: &Path) -> Result<(), Failure> {
    fs::create_dir_all(path).map_err(|error| failed("create", path, &error))
}

/// Makes an empty folder in place of whatever has its name.
pub fn empty_folder(path: &Path) -> Result<(), Failure> {
    if path.exists() {
        fs::remove_dir_all(path).map_err(|error| failed("empty", path, &error))?;
    }
    make_folder(path)
}

/// Writes a file that all may read, with its folders.
pub fn write(path: &Path, text: &str) -> Result<(), Failure> {
    make_folder(path.parent().unwrap_or(path))?;
    fs::write(path, text).map_err(|error| failed("write", path, &error))?;
    allow(path, 0o644)
}

pub fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| failed("read", path, &error))
}

/// Copies a file with the permissions `mode`, and makes its folders.
pub fn copy(from: &Path, to: &Path, mode: u32) -> Result<(), Failure> {
    make_folder(to.parent().unwrap_or(to))?;
    fs::copy(from, to).map_err(|error| failed("copy", from, &error))?;
    allow(to, mode)
}

/// Copies a folder with all that it holds.
pub fn copy_folder(from: &Path, to: &Path) -> Result<(), Failure> {
    make_folder(to)?;
    for name in names(from)? {
        let path = from.join(&name);
        match path.is_dir() {
            true => copy_folder(&path, &to.join(name))?,
            false => copy(&path, &to.join(name), 0o644)?,
        }
    }
    Ok(())
}

pub fn allow(path: &Path, mode: u32) -> Result<(), Failure> {
    let permissions = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, permissions).map_err(|error| failed("change", path, &error))
}

/// Returns the names in a folder, sorted.
pub fn names(folder: &Path) -> Result<Vec<String>, Failure> {
    let entries = fs::read_dir(folder).map_err(|error| failed("read", folder, &error))?;
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    Ok(names)
}

/// Removes the files of a folder whose names end with `end`.
pub fn remove_ending(folder: &Path, end: &str) -> Result<(), Failure> {
    for name in names(folder)?.iter().filter(|name| name.ends_with(end)) {
        let path = folder.join(name);
        fs::remove_file(&path).map_err(|error| failed("remove", &path, &error))?;
    }
    Ok(())
}
