//! File systems past 2^32 blocks, made by hand on a device that has only the bytes that are written here. Block numbers
//! have high halves; extents that end with the last block are accepted, extents that end past it are not.

use nvme_ext4::{Ext4, Ext4Error, SourceError, VolumeSource};
use std::collections::HashMap;

const BLOCK: u64 = 4096;
/// Blocks of the file system; the device has some more.
const BLOCKS: u64 = 6 << 32;
const INODES: u32 = 48;
const PER_GROUP: u32 = 16;
/// Blocks of the groups' inode tables, of the directory, and of the files' data.
const TABLES: [u64; 3] = [5 << 32 | 7, 3 << 32 | 9, BLOCKS - 1];
const DIRECTORY: u64 = 4 << 32 | 1000;

/// Blocks by their numbers; all others are zeros.
#[derive(Clone, Default)]
struct Sparse(HashMap<u64, Vec<u8>>);

impl VolumeSource for Sparse {
    fn len(&self) -> u64 {
        (BLOCKS + 8) * BLOCK
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<(), SourceError> {
        for (at, byte) in (offset..).zip(data) {
            let block = self.0.get(&(at / BLOCK));
            *byte = block.map_or(0, |block| block[(at % BLOCK) as usize]);
        }
        Ok(())
    }
}

impl Sparse {
    fn put(&mut self, block: u64, at: usize, bytes: &[u8]) {
        let block = self
            .0
            .entry(block)
            .or_insert_with(|| vec![0; BLOCK as usize]);
        block[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Writes a number whose halves lie apart.
    fn halves(&mut self, block: u64, low: usize, high: usize, value: u64) {
        self.put(block, low, &(value as u32).to_le_bytes());
        self.put(block, high, &((value >> 32) as u32).to_le_bytes());
    }

    fn inode(&mut self, number: u32, mode: u16, size: u64, root: &[u8]) {
        let index = (number - 1) as usize;
        let block = TABLES[index / PER_GROUP as usize];
        let at = index % PER_GROUP as usize * 256;
        self.put(block, at, &mode.to_le_bytes());
        self.halves(block, at + 0x4, at + 0x6C, size);
        self.put(block, at + 0x1A, &[1]);
        self.put(block, at + 0x20, &0x8_0000u32.to_le_bytes());
        self.put(block, at + 0x28, root);
    }

    fn open(&self) -> Ext4<Self> {
        Ext4::open(self.clone()).unwrap()
    }
}

/// Returns the head of a node of extents, and its entries.
fn node(depth: u16, most: u16, entries: &[[u8; 12]]) -> Vec<u8> {
    let head = [0xF30A, entries.len() as u16, most, depth, 0, 0];
    let mut node: Vec<u8> = head
        .iter()
        .flat_map(|half: &u16| half.to_le_bytes())
        .collect();
    node.extend(entries.iter().flatten());
    node
}

fn extent(logical: u32, length: u16, place: u64) -> [u8; 12] {
    let mut entry = [0; 12];
    entry[..4].copy_from_slice(&logical.to_le_bytes());
    entry[4..6].copy_from_slice(&length.to_le_bytes());
    entry[6..8].copy_from_slice(&((place >> 32) as u16).to_le_bytes());
    entry[8..].copy_from_slice(&(place as u32).to_le_bytes());
    entry
}

fn index(logical: u32, child: u64) -> [u8; 12] {
    let mut entry = [0; 12];
    entry[..4].copy_from_slice(&logical.to_le_bytes());
    entry[4..8].copy_from_slice(&(child as u32).to_le_bytes());
    entry[8..10].copy_from_slice(&((child >> 32) as u16).to_le_bytes());
    entry
}

/// Names in the root directory, and their inodes.
fn directory(names: &[(&str, u32)]) -> Vec<u8> {
    let mut block = Vec::new();
    let all = [(".", 2), ("..", 2)]
        .into_iter()
        .chain(names.iter().copied());
    for (name, inode) in all {
        block.extend(inode.to_le_bytes());
        block.extend([0, 0, name.len() as u8, 0]);
        block.extend(name.as_bytes());
        block.resize(block.len().next_multiple_of(4), 0);
        let begin = block.len() - 8 - name.len().next_multiple_of(4);
        let length = (block.len() - begin) as u16;
        block[begin + 4..begin + 6].copy_from_slice(&length.to_le_bytes());
    }
    block.extend([0; 4]);
    let rest = BLOCK as usize - block.len() + 4;
    block.extend((rest as u16).to_le_bytes());
    block
}

/// Makes a file system with files in its root directory: name, inode, size and the root of its extents.
fn made(files: &[(&str, u32, u64, Vec<u8>)]) -> Sparse {
    let mut device = Sparse::default();
    let at = 1024;
    device.put(0, at, &INODES.to_le_bytes());
    device.halves(0, at + 0x4, at + 0x150, BLOCKS);
    for (offset, value) in [(0x18, 2u32), (0x20, 32_768), (0x28, PER_GROUP), (0x4C, 1)] {
        device.put(0, at + offset, &value.to_le_bytes());
    }
    device.put(0, at + 0x38, &[0x53, 0xEF, 1, 0]);
    device.put(0, at + 0x58, &256u16.to_le_bytes());
    // File types, extents, 64 bits.
    device.put(0, at + 0x60, &0xC2u32.to_le_bytes());
    device.put(0, at + 0xFE, &64u16.to_le_bytes());
    for (group, table) in TABLES.iter().enumerate() {
        device.halves(1, group * 64 + 0x8, group * 64 + 0x28, *table);
    }
    device.inode(2, 0x41ED, BLOCK, &node(0, 4, &[extent(0, 1, DIRECTORY)]));
    let names: Vec<(&str, u32)> = files.iter().map(|one| (one.0, one.1)).collect();
    device.put(DIRECTORY, 0, &directory(&names));
    for (_, inode, size, root) in files {
        device.inode(*inode, 0x81A4, *size, root);
    }
    device
}

#[test]
fn blocks_past_2_32_are_found_by_both_halves_of_their_numbers() {
    let (leaf, data) = (3 << 32 | 77, 4 << 32 | 5);
    let tree = node(1, 4, &[index(0, leaf)]);
    let mut device = made(&[
        ("tree", 13, 2 * BLOCK, tree),
        // Files whose inodes lie in the second and third group.
        (
            "second",
            17,
            BLOCK,
            node(0, 4, &[extent(0, 1, 5 << 32 | 900)]),
        ),
        ("third", 48, BLOCK, node(0, 4, &[extent(0, 1, 901)])),
    ]);
    device.put(leaf, 0, &node(0, 340, &[extent(0, 2, data)]));
    for (block, byte) in [(data, 1), (data + 1, 2), (5 << 32 | 900, 3), (901, 4)] {
        device.put(block, 0, &vec![byte; BLOCK as usize]);
    }
    let volume = device.open();
    assert_eq!(volume.info().blocks, BLOCKS);
    for (name, place, bytes) in [
        ("tree", data, &[1, 2][..]),
        ("second", 5 << 32 | 900, &[3]),
        ("third", 901, &[4]),
    ] {
        let file = volume.file(&volume.lookup(name).unwrap()).unwrap();
        let extents = file.extents().unwrap();
        assert_eq!(extents.len(), 1, "{name}");
        assert_eq!(extents[0].place, place * BLOCK, "{name}");
        let mut found = vec![0; bytes.len() * BLOCK as usize];
        assert_eq!(volume.read_at(&file, 0, &mut found).unwrap(), found.len());
        let firsts: Vec<u8> = found.iter().step_by(BLOCK as usize).copied().collect();
        assert_eq!(firsts, bytes, "{name}");
    }
}

#[test]
fn an_extent_of_32768_blocks_is_written_and_one_more_is_not() {
    let (long, never) = (2 << 32 | 11, 1 << 32 | 13);
    let root = node(
        0,
        4,
        &[extent(0, 0x8000, long), extent(0x8000, 0x8001, never)],
    );
    let size = (0x8000 + 1) * BLOCK;
    let mut device = made(&[("long", 12, size, root)]);
    device.put(long, 0, &[7]);
    device.put(long + 0x7FFF, BLOCK as usize - 1, &[9]);
    device.put(never, 0, &vec![0xEE; BLOCK as usize]);
    let volume = device.open();
    let file = volume.file(&volume.lookup("long").unwrap()).unwrap();
    let extents = file.extents().unwrap();
    let found: Vec<_> = extents
        .iter()
        .map(|one| (one.bytes / BLOCK, one.is_written))
        .collect();
    assert_eq!(found, [(0x8000, true), (1, false)]);
    let read = |at: u64| {
        let mut byte = [0xAA];
        assert_eq!(volume.read_at(&file, at, &mut byte).unwrap(), 1);
        byte[0]
    };
    assert_eq!((read(0), read(0x8000 * BLOCK - 1)), (7, 9));
    assert_eq!((read(0x8000 * BLOCK), read(size - 1)), (0, 0));
    // The most blocks of one that was not written.
    let root = node(0, 4, &[extent(0, 0xFFFF, never)]);
    let volume = made(&[("never", 12, 0x7FFF * BLOCK, root)]).open();
    let file = volume.file(&volume.lookup("never").unwrap()).unwrap();
    let extents = file.extents().unwrap();
    assert_eq!(
        (extents[0].bytes / BLOCK, extents[0].is_written),
        (0x7FFF, false)
    );
}

fn corrupt<T>(result: nvme_ext4::Result<T>, what: &str) {
    match result {
        Err(error @ Ext4Error::Corrupt { .. }) => {
            assert!(error.to_string().contains(what), "{error}, not {what}");
        }
        Err(other) => panic!("{what}: {other}"),
        Ok(_) => panic!("{what}: it was accepted"),
    }
}

#[test]
fn what_ends_with_the_last_block_is_read_and_one_block_more_is_refused() {
    let file_at = |place: u64, length: u16| {
        let bytes = u64::from(length) * BLOCK;
        let mut device = made(&[("edge", 12, bytes, node(0, 4, &[extent(0, length, place)]))]);
        device.put(BLOCKS - 1, BLOCK as usize - 1, &[5]);
        device.put(BLOCKS, 0, &[6]);
        let volume = device.open();
        let file = volume
            .lookup("edge")
            .and_then(|inode| volume.file(&inode))?;
        let mut last = [0];
        volume.read_at(&file, bytes - 1, &mut last)?;
        Ok(last[0])
    };
    assert_eq!(file_at(BLOCKS - 2, 2).unwrap(), 5);
    corrupt(file_at(BLOCKS - 1, 2), "2 blocks from 0 on in block");
    corrupt(file_at(BLOCKS, 1), "1 blocks from 0 on in block");
    // A node of a tree lies in the last block, or behind it.
    let tree_at = |leaf: u64| {
        let root = node(1, 4, &[index(0, leaf)]);
        let mut device = made(&[("tree", 12, BLOCK, root)]);
        device.put(leaf, 0, &node(0, 340, &[extent(0, 1, 99)]));
        let volume = device.open();
        volume.lookup("tree").and_then(|inode| volume.file(&inode))
    };
    // The last block holds inodes of the third group, which this test does not read.
    assert!(tree_at(BLOCKS - 1).is_ok());
    corrupt(tree_at(BLOCKS), "block 25769803776 of 25769803776");
    // Inodes of a group.
    let table_at = |table: u64| {
        let mut device = made(&[]);
        device.halves(1, 2 * 64 + 0x8, 2 * 64 + 0x28, table);
        device.put(table, 15 * 256, &0x81A4u16.to_le_bytes());
        device.open().inode(48)
    };
    assert!(table_at(BLOCKS - 1).is_ok());
    corrupt(
        table_at(BLOCKS),
        "the inodes of group 2 in block 25769803776",
    );
}

#[test]
fn a_directory_names_the_last_inode_and_none_behind_it() {
    let list = |inode: u32| {
        let mut device = made(&[]);
        device.put(DIRECTORY, 0, &directory(&[("last", inode)]));
        let volume = device.open();
        volume.list(&volume.lookup("/")?)
    };
    let entries = list(INODES).unwrap();
    assert_eq!(
        (&*entries[0].name, entries[0].inode),
        (&b"last"[..], INODES)
    );
    corrupt(list(INODES + 1), "inode 49 of 48");
    corrupt(made(&[]).open().inode(INODES + 1), "inode 49 of 48");
    corrupt(made(&[]).open().inode(0), "inode 0 of 48");
}
