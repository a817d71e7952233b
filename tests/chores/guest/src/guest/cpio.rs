//! The archive format of an initramfs: cpio "newc". Archives may follow each other in one file.

use super::apt::{failed, read};
use chores::process::Failure;
use std::collections::BTreeSet;
use std::path::Path;

/// An archive that is being written. Folders are added before their content.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    /// Adds a copy of `source` as `name` (no leading slash), executable.
    pub fn file(&mut self, name: &str, source: &Path) -> Result<(), Failure> {
        let content = read(source)?;
        self.bytes(name, &content);
        Ok(())
    }

    pub fn bytes(&mut self, name: &str, content: &[u8]) {
        self.parents(name);
        self.entry(name, 0o100_755, content);
    }

    pub fn link(&mut self, name: &str, to: &str) {
        self.parents(name);
        self.entry(name, 0o120_777, to.as_bytes());
    }

    /// Adds every file under `source` below `name`.
    pub fn tree(&mut self, name: &str, source: &Path) -> Result<(), Failure> {
        for path in super::apt::files(source)? {
            let leaf = path.file_name().unwrap_or_default().to_string_lossy();
            let inner = format!("{name}/{leaf}");
            let kind = path
                .symlink_metadata()
                .map_err(|error| failed(&path, &error))?;
            if kind.is_dir() {
                self.tree(&inner, &path)?;
            } else {
                self.file(&inner, &path)?;
            }
        }
        Ok(())
    }

    /// Returns the archive with its closing entry.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, b"");
        self.bytes
    }

    fn parents(&mut self, name: &str) {
        for (end, _) in name.match_indices('/') {
            let folder = &name[..end];
            if self.folders.insert(folder.to_string()) {
                self.entry(folder, 0o040_755, b"");
            }
        }
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("a file below 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("a short name");
        // inode, mode, uid, gid, links, time, size, four device numbers, length of the name, checksum
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            size,
            0,
            0,
            0,
            0,
            name_size,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::Archive;

    #[test]
    fn an_entry_is_a_header_a_name_and_content_each_padded_to_four_bytes() {
        let mut archive = Archive::default();
        archive.bytes("a", b"hello");
        let bytes = archive.finish();
        assert_eq!(&bytes[..14], b"07070100000001");
        assert_eq!(&bytes[54..62], b"00000005");
        assert_eq!(&bytes[110..112], b"a\0");
        assert_eq!(&bytes[112..120], b"hello\0\0\0");
        assert_eq!(&bytes[120..126], b"070701");
        assert!(bytes.len().is_multiple_of(4));
    }

    #[test]
    fn a_folder_is_added_once_and_before_its_files() {
        let mut archive = Archive::default();
        archive.bytes("a/b/c", b"");
        archive.bytes("a/b/d", b"");
        let bytes = archive.finish();
        let text = String::from_utf8(bytes).unwrap();
        let at = |name: &str| text.find(&format!("{name}\0")).unwrap();
        assert!(at("a") < at("a/b") && at("a/b") < at("a/b/c"));
        assert_eq!(text.matches("000041ed").count(), 2);
    }
}
