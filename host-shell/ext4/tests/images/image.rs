//! Images that e2fsprogs makes.

use nvme_ext4::{Ext4, FileInode, FileKind, SourceError};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder that is removed at the end of the test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        // mke2fs waits for the disk, so that a folder in memory is used if there is one.
        let memory = PathBuf::from("/dev/shm");
        let parent = match memory.is_dir() {
            true => memory,
            false => std::env::temp_dir(),
        };
        let folder = parent.join(format!("nvme-ext4-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("files")).unwrap();
        Self(folder)
    }

    /// Returns the folder of the files that are put into the image.
    pub fn files(&self) -> PathBuf {
        self.0.join("files")
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        let path = self.files().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Writes a file of `bytes` bytes with data at each of `parts`.
    pub fn sparse(&self, name: &str, bytes: u64, parts: impl Iterator<Item = (u64, u8, usize)>) {
        let file = fs::File::create(self.files().join(name)).unwrap();
        file.set_len(bytes).unwrap();
        for (at, byte, length) in parts {
            file.write_all_at(&vec![byte; length], at).unwrap();
        }
    }

    pub fn link(&self, name: &str, target: &str) {
        std::os::unix::fs::symlink(target, self.files().join(name)).unwrap();
    }

    /// Makes an image of the files; `words` are options of mke2fs, `size` as `16M`.
    pub fn image(&self, words: &[&str], size: &str) -> Image {
        let path = self.0.join("image");
        let _ = fs::remove_file(&path);
        let mut mke2fs = tool("mke2fs");
        mke2fs.args([
            "-q",
            "-F",
            "-E",
            "hash_seed=01234567-89ab-cdef-0123-456789abcdef",
        ]);
        mke2fs.args(["-U", "01234567-89ab-cdef-0123-456789abcdef", "-d"]);
        mke2fs.arg(self.files()).args(words).arg(&path).arg(size);
        run(&mut mke2fs);
        Image { path }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn tool(name: &str) -> Command {
    let mut tool = Command::new(name);
    // The tools' folder is not on every user's path.
    let path = std::env::var("PATH").unwrap_or_default();
    tool.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    tool
}

fn run(command: &mut Command) -> String {
    let done = command.output();
    let done = done.unwrap_or_else(|error| panic!("{command:?}: {error}: install e2fsprogs"));
    let said = String::from_utf8_lossy(&done.stderr);
    // e2fsck ends with 1 when it changed something.
    assert!(
        matches!(done.status.code(), Some(0 | 1)),
        "{command:?}: {said}"
    );
    String::from_utf8(done.stdout).unwrap()
}

pub struct Image {
    pub path: PathBuf,
}

impl Image {
    pub fn debugfs(&self, command: &str) -> String {
        run(tool("debugfs").args(["-w", "-R", command]).arg(&self.path))
    }

    /// Makes e2fsck give directories an index of hashes.
    pub fn index(&self) {
        run(tool("e2fsck").args(["-f", "-y", "-D"]).arg(&self.path));
    }

    pub fn bytes(&self) -> Vec<u8> {
        fs::read(&self.path).unwrap()
    }

    pub fn open(&self) -> Ext4<Vec<u8>> {
        Ext4::open(self.bytes()).unwrap()
    }
}

pub fn open(bytes: &[u8]) -> nvme_ext4::Result<Ext4<Vec<u8>>> {
    Ext4::open(bytes.to_vec())
}

/// Reads all bytes of a file.
pub fn read(volume: &Ext4<Vec<u8>>, inode: &FileInode) -> nvme_ext4::Result<Vec<u8>> {
    let file = volume.file(inode)?;
    let mut data = vec![0xAA; file.len() as usize];
    let bytes = volume.read_at(&file, 0, &mut data)?;
    assert_eq!(bytes, data.len());
    Ok(data)
}

/// Returns everything under the root that can be reached, up to `most` files, each directory once.
pub fn walk(volume: &Ext4<Vec<u8>>, most: usize) -> nvme_ext4::Result<Vec<(PathBuf, FileInode)>> {
    let mut found = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let mut left = vec![(PathBuf::from("/"), volume.lookup("/")?)];
    while let Some((path, directory)) = left.pop() {
        if !seen.insert(directory.number) {
            continue;
        }
        for entry in volume.list(&directory)? {
            if found.len() > most {
                return Ok(found);
            }
            let inode = volume.inode(entry.inode)?;
            let path = path.join(Path::new(&*String::from_utf8_lossy(&entry.name)));
            if inode.kind == FileKind::Directory {
                left.push((path.clone(), inode.clone()));
            }
            found.push((path, inode));
        }
    }
    Ok(found)
}

/// A device whose reads fail.
#[derive(Debug)]
pub struct Failing(pub Vec<u8>, pub u64);

impl nvme_ext4::VolumeSource for Failing {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<(), SourceError> {
        if offset >= self.1 {
            return Err("the device is gone".into());
        }
        nvme_ext4::VolumeSource::read_at(&self.0, offset, data)
    }
}
