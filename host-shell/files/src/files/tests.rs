//! Volumes on stores, over the images that the reader of ext4 is fuzzed with.

use super::gpt::tests::disk;
use super::{Ext4Volume, StoreRange};
use crate::catalog::{Dtype, HeaderSource, TensorEntry};
use crate::loader::{LayerLoader, LayerPlan, LoaderOptions, ModelLayers};
use nvme_driver::Error;
use nvme_store::Store;
use nvme_store::StoreOptions;
use std::path::Path;
use std::sync::Arc;

/// Returns the image of a seed of the fuzzer: the seed has the image's size, then numbers of blocks with their content.
fn image(seed: &str) -> Vec<u8> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/ext4");
    let seed = std::fs::read(corpus.join(seed)).unwrap();
    let number = |at: usize| usize::from(u16::from_le_bytes([seed[at], seed[at + 1]]));
    let mut image = vec![0; (number(0) + 4) * 1024];
    for at in (2..seed.len()).step_by(1026) {
        image[number(at) * 1024..][..1024].copy_from_slice(&seed[at + 2..at + 1026]);
    }
    image
}

fn store(device: &str, bytes: &[u8]) -> Arc<Store> {
    let store = Store::open(device, &StoreOptions::default()).unwrap();
    store.write_at(0, bytes).unwrap();
    Arc::new(store)
}

/// Returns the seed in partition 2 of a disk.
fn parted() -> Vec<u8> {
    let image = image("plain");
    let blocks = image.len() as u64 / 4096;
    let mut disk = disk(4096, &[(6, 9), (20, 19 + blocks)]);
    disk[20 * 4096..][..image.len()].copy_from_slice(&image);
    disk
}

#[test]
fn files_of_a_partition_are_read_where_they_lie() {
    let store = store("sim:mem?size=400KiB&block=4096", &parted());
    let volume = Ext4Volume::open(&store, Some(2)).unwrap();
    assert_eq!((volume.damage(), volume.info().block_bytes), (None, 1024));
    let names: Vec<String> = volume
        .list("/")
        .unwrap()
        .into_iter()
        .map(|(entry, _)| String::from_utf8(entry.name).unwrap())
        .collect();
    assert_eq!(names, ["d", "f", "far", "l"]);
    assert_eq!(volume.read_link("/l").unwrap(), b"f");
    let file = volume.file("/far").unwrap();
    assert_eq!(*file.inode(), volume.stat("/f").unwrap());
    assert_ne!(volume.stat_link("/l").unwrap().number, file.inode().number);
    let place = file.place(8, 32).unwrap();
    let mut data = [0; 32];
    store.read_at(place, &mut data).unwrap();
    assert_eq!(data, *b"datadatadatadatadatadatadatadata");
    assert_eq!(file.extents().unwrap()[0].place, place - 8);
    let mut part = [0; 4];
    file.read_at(36, &mut part).unwrap();
    assert_eq!(part, *b"data");
    assert!(matches!(
        file.read_at(37, &mut part),
        Err(Error::Usage { .. })
    ));
    assert_eq!(
        (file.name(), file.label()),
        ("far".to_owned(), "/far".to_owned())
    );
    file.check_unchanged().unwrap();
    let entry = TensorEntry {
        name: "rows".to_owned(),
        dtype: Dtype::U8,
        shape: vec![9, 4],
        offset: 4,
        bytes: 36,
    };
    let table = file.table(&entry).unwrap();
    let mut row = [0; 4];
    let ended = table.gather((&[8i64]).into(), &mut row, None).unwrap();
    ended.check().unwrap();
    assert_eq!(row, *b"data");
    assert!(matches!(file.catalog(), Err(Error::Usage { .. })));
    // The file is written again, so its inode has another time.
    let inode = file.inode().clone();
    let mut all = vec![0; store.len() as usize];
    store.read_at(0, &mut all).unwrap();
    let time = (inode.modified.0 as u32).to_le_bytes();
    let at = (0..all.len() - 4)
        .step_by(4)
        .filter(|at| all[*at..at + 4] == time);
    for at in at {
        store.write_at(at as u64, &[0x55; 4]).unwrap();
    }
    assert!(matches!(
        file.check_unchanged(),
        Err(Error::Mismatch { .. })
    ));
}

#[test]
fn a_damaged_table_is_said_and_a_missing_partition_lists_the_others() {
    let mut bytes = parted();
    bytes[4096] = 0;
    let damaged = store("sim:mem?size=400KiB&block=4096", &bytes);
    let volume = Ext4Volume::open(&damaged, Some(2)).unwrap();
    assert!(
        volume
            .damage()
            .is_some_and(|what| what.contains("no header"))
    );
    assert!(volume.stat("/f").is_ok());
    match Ext4Volume::open(&damaged, Some(3)) {
        Err(Error::Usage { cause, remedy }) => {
            assert!(
                cause.contains("no partition 3") && remedy.contains("2 (100.0 KiB, 'näme')"),
                "{remedy}"
            );
        }
        other => panic!("{other:?}"),
    }
    // A file has no block size, so that both sizes are tried.
    let path = std::env::temp_dir().join(format!("nvme-gpu-part-{}", std::process::id()));
    std::fs::write(&path, parted()).unwrap();
    let file = Store::open(path.to_str().unwrap(), &StoreOptions::default());
    let file = Arc::new(file.unwrap());
    let (part, damage) = StoreRange::partition(&file, 2).unwrap();
    assert_eq!(
        (part.offset(), damage, part.store().len()),
        (20 * 4096, None, file.len())
    );
    std::fs::remove_file(&path).unwrap();
    let plain = store("sim:mem?size=1MiB", &image("plain"));
    assert!(matches!(
        Ext4Volume::open(&plain, Some(1)),
        Err(Error::Device { .. })
    ));
    assert!(Ext4Volume::open(&plain, None).is_ok());
}

#[test]
fn errors_keep_their_kinds() {
    let fragments = store("sim:mem?size=1MiB", &image("fragments"));
    let volume = Ext4Volume::open(&fragments, None).unwrap();
    let file = volume.file("/f").unwrap();
    for (offset, bytes) in [(0, file.len()), (0, 2048), (file.len(), 1), (u64::MAX, 2)] {
        let refused = file.place(offset, bytes);
        assert!(
            matches!(refused, Err(Error::Usage { .. })),
            "{offset}, {bytes}"
        );
    }
    assert!(file.place(0, 1024).is_ok());
    let kinds = [
        volume.stat("/none").unwrap_err().code(),
        volume.stat("/f/x").unwrap_err().code(),
        volume.file("/").unwrap_err().code(),
        volume.read_link("/f").unwrap_err().code(),
        volume.list("/f").unwrap_err().code(),
    ];
    assert_eq!(kinds, ["file", "usage", "usage", "usage", "usage"]);
    let empty = store("sim:mem?size=1MiB", &[]);
    assert_eq!(Ext4Volume::open(&empty, None).unwrap_err().code(), "device");
    let mut broken = image("checksums");
    broken[1024 + 0x78] ^= 1;
    let broken = store("sim:mem?size=1MiB", &broken);
    assert_eq!(
        Ext4Volume::open(&broken, None).unwrap_err().code(),
        "device"
    );
    let inline = store("sim:mem?size=1MiB", &image("inline"));
    let volume = Ext4Volume::open(&inline, None).unwrap();
    let file = volume.file("/f").unwrap();
    assert_eq!(file.extents().unwrap_err().code(), "usage");
    let mut data = vec![0; 100];
    file.read_at(0, &mut data).unwrap();
    assert_eq!(data, [b'i'; 100]);
    let failing = store(
        "sim:mem?size=1MiB&fault=status:0x281@op=read,nth=2",
        &image("plain"),
    );
    let failed = Ext4Volume::open(&failing, None).and_then(|volume| volume.stat("/f"));
    assert!(matches!(failed, Err(Error::Command { .. })), "{failed:?}");
}

#[test]
fn a_header_that_the_drive_cannot_read_is_an_error_of_the_drive() {
    // The first fault that lets the file be opened hits the first read of its header.
    let failed = (1..1000).find_map(|nth| {
        let device = format!("sim:mem?size=1MiB&fault=status:0x281@op=read,nth={nth}");
        let failing = store(&device, &image("plain"));
        let volume = Ext4Volume::open(&failing, None).ok()?;
        let file = volume.file("/far").ok()?;
        Some(file.catalog().unwrap_err())
    });
    let failed = failed.unwrap();
    assert_eq!(failed.code(), "command", "{failed}");
    assert!(failed.to_string().starts_with("/far: "), "{failed}");
    assert!(!failed.remedy().contains("safetensors"));
}

#[test]
fn layers_of_a_file_in_pieces_are_read_from_each() {
    let pieces = store("sim:mem?size=1MiB", &image("pieces"));
    let volume = Ext4Volume::open(&pieces, None).unwrap();
    let file = volume.file("/models/model.safetensors").unwrap();
    assert!(file.extents().unwrap().len() > 4);
    let catalog = file.catalog().unwrap();
    let layers = file
        .layers(ModelLayers::numbered(&catalog).unwrap())
        .unwrap();
    assert!(
        layers
            .iter()
            .all(|layer| layer.read_bytes() == 24 * 33 * 4 + 6)
    );
    let most = layers.iter().map(|layer| layer.pieces().len()).max();
    assert!(most > Some(3), "{most:?}");
    let loader = LayerLoader::new(&pieces, layers, &LoaderOptions::default()).unwrap();
    for index in [0, 1, 2, 3, 0] {
        let layer = loader.layer(index).unwrap();
        let weights = layer.tensor_bytes("w").unwrap().as_chunks::<4>().0;
        assert_eq!(weights.len(), 24 * 33);
        for (at, weight) in weights.iter().enumerate() {
            assert_eq!(f32::from_le_bytes(*weight), (index * 10_000 + at) as f32);
        }
        assert_eq!(layer.tensor_bytes("b").unwrap(), [0, 1, 2, 3, 4, 5]);
    }
    // Rows of a table lie together.
    let refused = file.table(catalog.get("m.layers.0.w").unwrap());
    assert!(matches!(refused, Err(Error::Usage { .. })), "{refused:?}");
    // The zeros of a hole lie in no block of the store.
    let sparse = store("sim:mem?size=1MiB", &image("fragments"));
    let volume = Ext4Volume::open(&sparse, None).unwrap();
    let layers = ModelLayers::of_ranges([("first", 0..1024), ("hole", 0..2048)]).unwrap();
    let refused = volume.file("/f").unwrap().layers(layers).unwrap_err();
    assert_eq!(refused.code(), "usage");
    assert!(refused.to_string().starts_with("layer hole: "), "{refused}");
    let layers = ModelLayers::of_ranges([("last", 32 << 10..33 << 10)]).unwrap();
    let placed = volume.file("/f").unwrap().layers(layers).unwrap();
    assert_eq!(placed.iter().map(LayerPlan::read_bytes).sum::<u64>(), 1024);
}

#[test]
fn names_that_are_no_text_are_found() {
    let mut bytes = image("pieces");
    let name = bytes.windows(8).position(|some| some == b"rows.npy");
    bytes[name.unwrap()] = 0xFF;
    let store = store("sim:mem?size=1MiB", &bytes);
    let volume = Ext4Volume::open(&store, None).unwrap();
    let path = b"/models/\xFFows.npy";
    let file = volume.file(path).unwrap();
    assert_eq!(file.label(), "/models/\u{FFFD}ows.npy");
    let listed = volume.list("/models").unwrap();
    let (entry, inode) = listed.iter().find(|(one, _)| one.name[0] == 0xFF).unwrap();
    assert_eq!((&entry.name[..], inode), (&path[8..], file.inode()));
    let again = volume.file_of(inode, "other").unwrap();
    assert_eq!((again.len(), again.label()), (928, "other".to_owned()));
    assert_eq!(volume.list_of(inode, "other").unwrap_err().code(), "usage");
    assert_eq!(volume.read_link_of(inode, "x").unwrap_err().code(), "usage");
    assert!(Arc::ptr_eq(again.volume().store(), &store));
}

fn refused(store: &Arc<Store>, part: Option<u32>, what: &str) {
    match Ext4Volume::open(store, part) {
        Err(error @ Error::Device { .. }) => {
            let (text, remedy) = (error.to_string(), error.remedy());
            assert!(
                text.contains(what) && !remedy.is_empty(),
                "{text}, not {what}"
            );
        }
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn what_lies_there_in_place_of_an_ext4_is_named() {
    // A table that is for blocks of another size than the drive has: as an image of another drive.
    for (own, other) in [(4096, 512), (512, 4096)] {
        let mut bytes = disk(other, &[(6, 9), (20, 95)]);
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        let device = format!("sim:mem?size={}&block={own}", bytes.len());
        let drive = store(&device, &bytes);
        let what = format!(
            "the partition table is one of blocks of {other} bytes, on a drive with blocks of {own}: 1 ("
        );
        refused(&drive, Some(1), &what);
        let listed = format!("a partition table of blocks of {other} bytes: 1 (");
        refused(&drive, None, &listed);
    }
    let drive = store("sim:mem?size=400KiB&block=4096", &parted());
    refused(
        &drive,
        None,
        "a partition table of blocks of 4096 bytes: 1 (16.0 KiB, 'näme'), 2 (",
    );
    for (at, signature, what) in [
        (0, &b"XFSB"[..], "an XFS"),
        (65_600, b"_BHRfS_M", "a btrfs"),
        (3, b"NTFS    ", "an NTFS"),
        (3, b"EXFAT   ", "an exFAT"),
        (82, b"FAT32   ", "a FAT"),
        (54, b"FAT12   ", "a FAT"),
        (1024, &[0x10, 0x20, 0xF5, 0xF2], "an F2FS"),
        (32_769, b"CD001", "an ISO 9660"),
        (0, b"LUKS\xBA\xBE", "LUKS"),
        (512, b"LABELONE", "LVM"),
        (4096, &[0xFC, 0x4E, 0x2B, 0xA9], "RAID"),
        (4086, b"SWAPSPACE2", "a swap space"),
        (131_072, &[0x0C, 0xB1, 0xBA, 0], "a ZFS"),
        (0, b"GGUF", "a GGUF file"),
        (510, &[0x55, 0xAA], "the kind MBR"),
        (4095, &[0], "nothing but zeros"),
        (4095, &[1], "the magic number is 0x0000"),
    ] {
        let mut bytes = vec![0; 400 << 10];
        bytes[at..at + signature.len()].copy_from_slice(signature);
        let whole = store("sim:mem?size=400KiB&block=4096", &bytes);
        refused(&whole, None, what);
        // The same on a partition.
        if bytes[300 << 10..].iter().all(|byte| *byte == 0) {
            let mut parted = disk(4096, &[(6, 95)]);
            let room = 90 * 4096;
            parted[6 * 4096..][..room].copy_from_slice(&bytes[..room]);
            let drive = store("sim:mem?size=400KiB&block=4096", &parted);
            refused(&drive, Some(1), what);
        }
    }
}
