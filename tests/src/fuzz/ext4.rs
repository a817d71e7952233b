//! File systems are not trusted: whatever the blocks say, the reader comes to an end or refuses
//! them.

use super::Input;
use nvme_ext4::{Ext4, Ext4Error, FileData, FileKind, SourceError, VolumeSource};
use std::collections::HashSet;

/// Bytes of a block of the input.
const BLOCK: usize = 1024;
/// Files that are looked at.
const MOST_FILES: usize = 100;

/// The blocks that the input gives; the remaining ones are zeros.
struct Blocks {
    bytes: Vec<u8>,
}

impl VolumeSource for Blocks {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<(), SourceError> {
        let from = self.bytes.get(offset as usize..).unwrap_or(&[]);
        assert!(from.len() >= data.len(), "a read past the end");
        data.copy_from_slice(&from[..data.len()]);
        Ok(())
    }
}

/// The input is the size of the image in KiB, then numbers of blocks with their content.
pub fn ext4(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let blocks = 4 + usize::from(input.half()) % 1024;
    let mut image = vec![0; blocks * BLOCK];
    while !input.is_empty() {
        let at = usize::from(input.half()) % blocks * BLOCK;
        let part = input.take(BLOCK);
        image[at..at + part.len()].copy_from_slice(part);
    }
    if let Err(error) = Ext4::open(Blocks { bytes: image }).and_then(|volume| look(&volume)) {
        assert!(!error.to_string().is_empty() && !error.remedy().is_empty());
        assert!(!matches!(error, Ext4Error::Read { .. }), "{error}");
    }
}

/// Looks at all that can be reached. One file that is damaged does not end it.
fn look(volume: &Ext4<Blocks>) -> Result<(), Ext4Error> {
    let mut seen = HashSet::new();
    let mut left = vec![volume.lookup("/")?];
    let mut last = None;
    while let Some(directory) = left.pop() {
        if !seen.insert(directory.number) || seen.len() > MOST_FILES {
            continue;
        }
        let entries = volume.list(&directory);
        let entries = entries.unwrap_or_else(|error| {
            last = Some(error);
            Vec::new()
        });
        for entry in entries.into_iter().take(MOST_FILES) {
            assert!(!entry.name.is_empty() && !entry.name.contains(&b'/'));
            let ended = volume.inode(entry.inode).and_then(|inode| {
                match inode.kind {
                    FileKind::Directory => left.push(inode),
                    FileKind::Symlink => {
                        let target = volume.read_link(&inode)?;
                        assert_eq!(target.len() as u64, inode.size);
                        let _ = volume.lookup(&target);
                    }
                    FileKind::File => judge(volume, &volume.file(&inode)?)?,
                    _ => {}
                }
                Ok(())
            });
            last = ended.err().or(last);
        }
    }
    last.map_or(Ok(()), Err)
}

fn judge(volume: &Ext4<Blocks>, file: &FileData) -> Result<(), Ext4Error> {
    let len = volume.source().len();
    let mut places = Vec::new();
    let mut logical = 0;
    for one in file.extents().unwrap_or_default() {
        assert!(one.logical >= logical && one.bytes > 0);
        logical = one.logical + one.bytes;
        assert!(one.place + one.bytes <= len, "outside of the device");
        places.push((one.place, one.bytes));
    }
    places.sort_unstable();
    assert!(places.is_sorted_by(|a, b| a.0 + a.1 <= b.0), "overlap");
    let mut data = [0xAA; 3000];
    for at in [0, file.len() / 2, file.len().saturating_sub(1000), u64::MAX] {
        let bytes = volume.read_at(file, at, &mut data)?;
        assert_eq!(bytes as u64, file.len().saturating_sub(at).min(3000));
    }
    if let Some(place) = file.place() {
        assert!(place + file.len() <= len);
    }
    volume.check_unchanged(file)
}
