use super::*;
use crate::Catalog;
use crate::Manifest;
use nvme_store::{FileIo, StoreOptions};
use std::sync::Barrier;

const LONG: Duration = Duration::from_secs(60);

fn open(device: &str) -> Arc<Store> {
    let options = StoreOptions {
        queues: 3,
        depth: 8,
        timeout: Duration::from_secs(1),
        ..StoreOptions::default()
    };
    Arc::new(Store::open(device, &options).unwrap())
}

fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 29) as u8
}

fn fill(store: &Store, bytes: u64) {
    let data: Vec<u8> = (0..bytes).map(byte).collect();
    store.write_at(0, &data).unwrap();
}

/// Returns layers of unequal length at odd offsets.
fn layers(count: u64) -> ModelLayers {
    let ranges = (0..count).map(|layer| {
        let begin = layer * 30_011 + 3;
        (format!("l{layer}."), begin..begin + 20_000 + layer * 100)
    });
    ModelLayers::of_ranges(ranges).unwrap()
}

fn is_right(layer: &LoadedLayer) -> bool {
    let bytes = layer.bytes().unwrap();
    let begin = layer.plan().pieces()[0].offset;
    assert_eq!(bytes.as_ptr().addr() % 4096, 0);
    layer.address() == bytes.as_ptr().addr() as u64
        && bytes[..layer.plan().bytes() as usize]
            .iter()
            .zip(begin..)
            .all(|(one, at)| *one == byte(at))
}

fn loader(store: &Arc<Store>, count: u64, options: LoaderOptions) -> LayerLoader {
    LayerLoader::new(store, layers(count), &options).unwrap()
}

const SLOTS: fn(usize) -> LoaderOptions = |slots| LoaderOptions {
    slots,
    ..LoaderOptions::default()
};

#[test]
fn every_store_gives_whole_layers_pass_after_pass() {
    let path = std::env::temp_dir().join(format!("nvme-gpu-loader-{}", std::process::id()));
    std::fs::File::create(&path)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let stripe = "stripe:sim:mem?size=4MiB|sim:mem?size=4MiB?stripe=64KiB";
    for device in [
        "sim:mem?size=4MiB&block=4096",
        stripe,
        path.to_str().unwrap(),
    ] {
        let store = open(device);
        fill(&store, 400_000);
        for slots in [1, 2, 3, 9] {
            let loader = loader(&store, 7, SLOTS(slots));
            for index in (0..7).cycle().take(21) {
                let layer = loader.layer(index).unwrap();
                assert!(is_right(&layer), "{device}: {layer:?} of {slots} slots");
                assert_eq!((layer.index(), layer.stream()), (index, 0));
                assert!(!layer.is_on_gpu() && layer.wait(Duration::ZERO).is_ok());
            }
            let stats = loader.stats();
            let (ready, reads) = match slots {
                // With one slot no layer is read ahead.
                1 => (0, 21),
                2 | 3 => (20, 20 + slots as u64),
                // Every layer has a slot, so that each is read once.
                _ => (20, 7),
            };
            assert_eq!((stats.asked, stats.ready, stats.reads), (21, ready, reads));
            assert_eq!(loader.path().slots, slots.min(7));
        }
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn the_first_layers_stay_within_their_budget() {
    let store = open("sim:mem?size=4MiB");
    fill(&store, 400_000);
    let budget = 20_000 + 20_100 + 20_199;
    let loader = loader(
        &store,
        5,
        LoaderOptions {
            resident: ResidentLayers::Bytes(budget),
            ..LoaderOptions::default()
        },
    );
    let path = loader.path();
    assert_eq!(
        (path.resident, path.resident_bytes, path.slots),
        (2, 40_100, 2)
    );
    assert_eq!(path.memory_bytes(), 40_100 + 2 * 20_400);
    for index in (0..5).cycle().take(15) {
        assert!(is_right(&loader.layer(index).unwrap()));
    }
    // The two layers that stay are read once; the others in each pass, and the first of them once more, ahead of the
    // next pass.
    assert_eq!(loader.stats().reads, 2 + 3 * 3 + 1);
    let loader = self::loader(
        &store,
        3,
        LoaderOptions {
            resident: ResidentLayers::Layers(vec![0, 1, 2]),
            ..LoaderOptions::default()
        },
    );
    for index in [2, 0, 1, 0, 2] {
        assert!(is_right(&loader.layer(index).unwrap()));
    }
    assert_eq!((loader.stats().reads, loader.path().slot_bytes), (3, 0));
}

#[test]
fn a_learned_order_is_read_ahead_from_the_second_pass_on() {
    let store = open("sim:mem?size=4MiB");
    fill(&store, 400_000);
    let options = LoaderOptions {
        order: LayerOrder::Learned,
        slots: 2,
        ..LoaderOptions::default()
    };
    let loader = loader(&store, 6, options);
    let pass = [5, 1, 3, 0, 4];
    for _ in 0..3 {
        for index in pass {
            assert!(is_right(&loader.layer(index).unwrap()));
        }
    }
    assert!(loader.knows_order());
    // The first pass, and the first layer of the second.
    assert_eq!(loader.stats().ready, 15 - 6);
}

#[test]
fn layers_that_are_held_keep_their_slots() {
    let store = open("sim:mem?size=4MiB");
    fill(&store, 400_000);
    let loader = loader(&store, 5, SLOTS(2));
    let first = loader.layer(0).unwrap();
    let again = loader.layer(0).unwrap();
    let other = loader.layer(3).unwrap();
    let error = loader.layer(1).unwrap_err();
    assert!(
        matches!(&error, Error::Usage { cause, .. } if cause.contains("3, 0")),
        "{error}"
    );
    drop(first);
    assert!(loader.layer(1).is_err() && is_right(&again) && is_right(&other));
    drop(again);
    assert!(is_right(&loader.layer(1).unwrap()) && is_right(&other));
    assert!(format!("{loader:?} {other:?}").contains("l3."));
}

#[test]
fn an_error_of_a_read_ahead_is_that_of_its_layer_and_the_next_call_reads_again() {
    // The seventh command belongs to layer 2: each layer needs two of 16 KiB, and l0 and l1 come before it.
    let store =
        open("sim:mem?size=4MiB&block=4096&mdts=2&queues=1&fault=status:0x281@op=read,nth=7");
    fill(&store, 400_000);
    let options = LoaderOptions {
        ahead: Some(1),
        ..SLOTS(3)
    };
    let ranges =
        (0..4u64).map(|layer| (format!("l{layer}"), layer * 32_768..layer * 32_768 + 32_768));
    let loader =
        LayerLoader::new(&store, ModelLayers::of_ranges(ranges).unwrap(), &options).unwrap();
    let mut failed = Vec::new();
    for index in (0..4).cycle().take(12) {
        match loader.layer(index) {
            Ok(layer) => assert!(is_right(&layer)),
            Err(error) => {
                assert!(matches!(error, Error::Command { .. }), "{error}");
                assert!(
                    error
                        .to_string()
                        .contains(&format!("layer {index} (l{index})"))
                );
                failed.push(index);
                assert!(is_right(&loader.layer(index).unwrap()));
            }
        }
    }
    assert_eq!(failed.len(), 1, "{failed:?}");
    loader.check(LONG).unwrap();
}

#[test]
fn a_lost_command_is_a_time_out_and_a_drive_that_left_is_gone() {
    for (fault, word) in [
        ("drop@op=read,nth=3", "timeout"),
        ("allones@op=read,nth=3", "gone"),
    ] {
        let store = open(&format!("sim:mem?size=4MiB&block=4096&fault={fault}"));
        let ranges = (0..4u64).map(|layer| ("l", layer * 4096..(layer + 1) * 4096));
        let loader = LayerLoader::new(&store, ModelLayers::of_ranges(ranges).unwrap(), &SLOTS(1));
        let loader = loader.unwrap();
        let results: Vec<_> = (0..4)
            .map(|index| loader.layer(index))
            .map(|one| one.map(drop))
            .collect();
        assert!(results[0].is_ok() && results[1].is_ok());
        assert_eq!(results[2].as_ref().unwrap_err().code(), word);
        // After a reset the drive works again.
        assert_eq!(results[3].is_ok(), word == "timeout", "{:?}", results[3]);
        assert_eq!(loader.layer(2).is_ok(), word == "timeout");
    }
}

#[test]
fn a_file_that_became_shorter_is_an_error_of_its_last_layers() {
    let path = std::env::temp_dir().join(format!("nvme-gpu-short-{}", std::process::id()));
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(300_000).unwrap();
    let options = StoreOptions {
        file_io: FileIo::Pread,
        ..StoreOptions::default()
    };
    let store = Arc::new(Store::open(path.to_str().unwrap(), &options).unwrap());
    fill(&store, 300_000);
    let loader = loader(&store, 4, SLOTS(1));
    assert!(is_right(&loader.layer(3).unwrap()));
    file.set_len(70_000).unwrap();
    assert!(matches!(loader.layer(2).unwrap_err(), Error::File { .. }));
    assert!(is_right(&loader.layer(0).unwrap()));
    fill(&store, 300_000);
    assert!(is_right(&loader.layer(2).unwrap()));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_closed_loader_lets_the_store_go_and_layers_stay() {
    let store = open("sim:mem?size=4MiB");
    fill(&store, 400_000);
    let loader = loader(&store, 5, SLOTS(3));
    let layer = loader.layer(1).unwrap();
    loader.close(LONG).unwrap();
    loader.close(Duration::ZERO).unwrap();
    assert_eq!(Arc::strong_count(&store), 1);
    let error = loader.layer(1).unwrap_err();
    assert!(matches!(&error, Error::Usage { cause, .. } if cause.contains("closed")));
    drop(loader);
    assert!(is_right(&layer));
}

#[test]
fn threads_share_a_loader() {
    let store = open("sim:mem?size=4MiB");
    fill(&store, 400_000);
    let loader = loader(&store, 6, SLOTS(5));
    let begin = Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (loader, begin) = (&loader, &begin);
            scope.spawn(move || {
                begin.wait();
                for step in 0..60 {
                    let index = (step * (thread + 1) + thread) % 6;
                    assert!(is_right(&loader.layer(index).unwrap()));
                }
            });
        }
    });
    assert_eq!(loader.stats().asked, 240);
}

#[test]
fn what_cannot_be_is_refused() {
    let store = open("sim:mem?size=1MiB");
    let new = |layers: ModelLayers, options| LayerLoader::new(&store, layers, &options);
    let past = ModelLayers::of_ranges([("x", 0..(1 << 20) + 1)]).unwrap();
    let huge = ModelLayers::of_ranges([("x", 0..u64::MAX)]).unwrap();
    let on_gpu = LoaderOptions {
        memory: LayerMemory::Gpu,
        ..LoaderOptions::default()
    };
    let unknown = LoaderOptions {
        order: LayerOrder::Given(vec![9]),
        ..LoaderOptions::default()
    };
    for (refused, what) in [
        (new(past, SLOTS(2)), "1048577 bytes"),
        (new(huge, SLOTS(2)), "past the store"),
        (new(layers(2), SLOTS(0)), "slots for layers is 0"),
        (new(layers(2), on_gpu), "without a GPU"),
        (new(layers(2), unknown), "layer 9"),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(&error, Error::Usage { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    let loader = new(layers(2), SLOTS(2)).unwrap();
    assert!(matches!(loader.layer(2).unwrap_err(), Error::Usage { .. }));
    let empty = ModelLayers::of_ranges([("none", 7..7), ("some", 7..8)]).unwrap();
    let loader = new(empty, SLOTS(2)).unwrap();
    assert!(loader.layer(0).unwrap().bytes().is_some());
}

#[test]
fn tensors_are_found_by_their_names() {
    use std::ops::ControlFlow;
    let data: Vec<u8> = (0..200).collect();
    let header = r#"{"l.0.w":{"dtype":"F32","shape":[5,5],"data_offsets":[0,100]},"l.1.w":{"dtype":"U8","shape":[100],"data_offsets":[100,200]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(&data);
    let path = std::env::temp_dir().join(format!(
        "nvme-gpu-layers-{}.safetensors",
        std::process::id()
    ));
    std::fs::write(&path, file).unwrap();
    let store = open("sim:mem?size=1MiB");
    let go_on = &mut |_, _| ControlFlow::Continue(());
    let catalog = crate::Catalog::import(&store, &path, 1001, true, go_on).unwrap();
    std::fs::remove_file(path).unwrap();
    let layers = ModelLayers::numbered(&catalog).unwrap();
    let loader = LayerLoader::new(&store, layers, &SLOTS(2)).unwrap();
    let layer = loader.layer(1).unwrap();
    assert_eq!(layer.tensor_bytes("w").unwrap(), &data[100..]);
    assert_eq!(layer.tensor_bytes("l.1.w"), layer.tensor_bytes("w"));
    assert!(layer.tensor_bytes("l.0.w").is_none());
    assert_eq!(loader.layers().get(0).unwrap().tensors()[0].shape, [5, 5]);
    assert!(loader.path().mover.contains("threads of the store"));
}

/// Returns the manifest of the first `bytes` bytes that `fill` writes.
fn manifest(bytes: u64) -> Manifest {
    let data: Vec<u8> = (0..bytes).map(byte).collect();
    let mut go_on = |_, _| std::ops::ControlFlow::Continue(());
    Manifest::of(&data.as_slice(), bytes, &[], &mut go_on).unwrap()
}

/// Layers of whole chunks, the last one shorter.
fn whole_layers(manifest: &Manifest, count: u64) -> ModelLayers {
    let ranges = (0..count).map(|layer| {
        let begin = layer * 131_072;
        (
            format!("l{layer}."),
            begin..(begin + 131_072).min(manifest.bytes()),
        )
    });
    ModelLayers::of_ranges(ranges).unwrap()
}

#[test]
fn a_layer_with_other_bytes_than_its_manifest_is_an_error_and_others_are_fine() {
    let store = open("sim:mem?size=4MiB&block=4096");
    let manifest = manifest(500_000);
    fill(&store, 500_000);
    let layers = whole_layers(&manifest, 4)
        .verified_by(&manifest, 0)
        .unwrap();
    let loader = LayerLoader::new(&store, layers, &SLOTS(2)).unwrap();
    assert_eq!(loader.path().verified_by, Some("host"));
    for index in [0, 1, 2, 3] {
        assert!(is_right(&loader.layer(index).unwrap()));
    }
    assert_eq!(loader.stats().verified, loader.stats().bytes);
    let flip = |at: u64| {
        let mut one = [0];
        store.read_at(at, &mut one).unwrap();
        store.write_at(at, &[one[0] ^ 0x10]).unwrap();
    };
    let wrong = 2 * 131_072 + 70_001;
    flip(wrong);
    let layers = whole_layers(&manifest, 4)
        .verified_by(&manifest, 0)
        .unwrap();
    let loader = LayerLoader::new(&store, layers, &SLOTS(2)).unwrap();
    for index in [0, 1, 2, 2, 3, 0, 1] {
        match (index, loader.layer(index)) {
            (2, Err(Error::Mismatch { what })) => {
                let place = format!(
                    "layer 2 (l2.): 65536 bytes from byte {} of",
                    wrong / 65_536 * 65_536
                );
                assert!(what.starts_with(&place), "{what}");
            }
            (2, other) => panic!("{other:?}"),
            (_, layer) => assert!(is_right(&layer.unwrap())),
        }
    }
    // The layer that was read ahead is still the wrong one; after its failure it is read again.
    let ahead = lock(&loader.shared.state).loads();
    assert!(ahead.iter().all(|load| load.wait(LONG).is_ok()));
    flip(wrong);
    assert_eq!(loader.layer(2).unwrap_err().code(), "mismatch");
    assert!(is_right(&loader.layer(2).unwrap()));
}

/// The first and last byte of each chunk of the first and the last layer, whose last chunk is short.
#[test]
fn damage_is_found_in_the_first_and_the_last_chunk_of_a_layer() {
    let store = open("sim:mem?size=4MiB&block=4096");
    let manifest = manifest(500_000);
    fill(&store, 500_000);
    for at in [
        0, 65_535, 65_536, 131_071, 393_216, 458_751, 458_752, 499_999,
    ] {
        store.write_at(at, &[byte(at) ^ 0x80]).unwrap();
        let layers = whole_layers(&manifest, 4).verified_by(&manifest, 0);
        let loader = LayerLoader::new(&store, layers.unwrap(), &SLOTS(2)).unwrap();
        for index in 0..4 {
            match loader.layer(index) {
                Ok(layer) => assert!(index as u64 != at / 131_072 && is_right(&layer), "{at}"),
                Err(Error::Mismatch { what }) => {
                    let place = format!(" from byte {} of the file", at / 65_536 * 65_536);
                    assert!(
                        index as u64 == at / 131_072 && what.contains(&place),
                        "{at}: {what}"
                    );
                }
                Err(other) => panic!("{at}: {other}"),
            }
        }
        store.write_at(at, &[byte(at)]).unwrap();
    }
}

#[test]
fn tensors_are_verified_and_what_lies_between_them_is_not() {
    let mut file = {
        let text = r#"{"a.x":{"dtype":"U8","shape":[64],"data_offsets":[0,64]},"b.x":{"dtype":"U8","shape":[64],"data_offsets":[64,128]},"a.y":{"dtype":"U8","shape":[70000],"data_offsets":[128,70128]}}"#;
        let mut file = (text.len() as u64).to_le_bytes().to_vec();
        file.extend(text.as_bytes());
        file.extend((0..70_128).map(byte));
        file
    };
    let catalog = Catalog::of(&file.as_slice()).unwrap();
    let mut go_on = |_, _| std::ops::ControlFlow::Continue(());
    let length = file.len() as u64;
    let manifest = Manifest::of(&file.as_slice(), length, catalog.entries(), &mut go_on).unwrap();
    // b.x lies between the tensors of layer a., and is read with them.
    let b = catalog.get("b.x").unwrap().offset as usize;
    file[b] ^= 1;
    let store = open("sim:mem?size=4MiB");
    store.write_at(7, &file).unwrap();
    let catalog = Catalog::of_store(&store, 7).unwrap();
    assert_eq!(catalog.begin(), 7);
    let layers = ModelLayers::by_prefix(&catalog, &["a.", "b."]).unwrap();
    let layers = layers.verified_by(&manifest, catalog.begin()).unwrap();
    assert_eq!(layers.get(0).unwrap().verified_bytes(), 64 + 70_000);
    assert_eq!(layers.get(0).unwrap().read_bytes(), 128 + 70_000);
    let loader = LayerLoader::new(&store, layers, &SLOTS(2)).unwrap();
    let a = loader.layer(0).unwrap();
    assert_eq!(a.tensor_bytes("y").unwrap()[..9], file[b + 64..b + 73]);
    let error = loader.layer(1).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("layer 1 (b.): 64 bytes from byte"),
        "{error}"
    );
    assert_eq!(error.code(), "mismatch");
}

#[test]
fn layers_that_are_not_of_the_manifest_are_refused() {
    let manifest = manifest(300_000);
    for (ranges, begin, what) in [
        (
            [0..65_536, 65_536..300_001],
            0,
            "layer b: bytes 65536 to 300001 of a file",
        ),
        (
            [0..65_536, 65_536..131_071],
            0,
            "layer b: bytes 65536 to 131071 of the file are a part",
        ),
        (
            [0..65_536, 65_537..131_072],
            0,
            "layer b: bytes 65537 to 131072 of the file are a part",
        ),
        (
            [99..65_635, 98..200],
            99,
            "layer b: its bytes lie before byte 99",
        ),
    ] {
        let [a, b] = ranges;
        let layers = ModelLayers::of_ranges([("a", a), ("b", b)]).unwrap();
        let error = layers.verified_by(&manifest, begin).unwrap_err();
        assert!(matches!(&error, Error::Usage { .. }), "{error}");
        assert!(error.to_string().contains(what), "{error}");
    }
    let empty = ModelLayers::of_ranges([("a", 5..5)]).unwrap();
    assert!(
        empty
            .verified_by(&manifest, 0)
            .unwrap()
            .get(0)
            .unwrap()
            .chunks()
            .is_empty()
    );
}

/// Chunks are found by their offset in memory, also if the file's pieces are scattered on the store.
#[test]
fn layers_of_a_file_in_pieces_are_verified() {
    let manifest = manifest(300_000);
    let store = open("sim:mem?size=4MiB");
    let data: Vec<u8> = (0..300_000).map(byte).collect();
    store.write_at(1_000_000, &data[..100_000]).unwrap();
    store.write_at(13, &data[100_000..]).unwrap();
    let layers = whole_layers(&manifest, 3)
        .verified_by(&manifest, 0)
        .unwrap();
    let layers = layers.placed(|offset, bytes| {
        let (begin, end) = (offset, offset + bytes);
        let first = begin.min(100_000)..end.min(100_000);
        let second = begin.max(100_000)..end.max(100_000);
        Ok(vec![
            first.start + 1_000_000..first.end + 1_000_000,
            second.start - 100_000 + 13..second.end - 100_000 + 13,
        ])
    });
    let loader = LayerLoader::new(&store, layers.unwrap(), &SLOTS(2)).unwrap();
    for index in 0..3 {
        let layer = loader.layer(index).unwrap();
        let begin = index * 131_072;
        let bytes = layer.plan().bytes() as usize;
        assert_eq!(
            &layer.bytes().unwrap()[..bytes],
            &data[begin..begin + bytes]
        );
    }
    store.write_at(13 + 50_000, &[data[150_000] ^ 1]).unwrap();
    let loader = LayerLoader::new(&store, loader.layers().clone(), &SLOTS(2)).unwrap();
    let error = loader.layer(1).unwrap_err().to_string();
    assert!(
        error.contains("65536 bytes from byte 131072 of the file"),
        "{error}"
    );
    assert!(loader.layer(0).is_ok() && loader.layer(2).is_ok());
}

/// A layer fails if the read of any of its pieces fails, also of the last one.
#[test]
fn a_layer_fails_with_the_read_of_any_of_its_pieces() {
    for nth in [1, 2, 3] {
        let device = format!("sim:mem?size=4MiB&queues=1&fault=status:0x281@op=read,nth={nth}");
        let layers = ModelLayers::of_ranges([("l0".to_owned(), 0..3 * 4096)]).unwrap();
        let apart = |offset: u64, bytes: u64| {
            let pieces = (0..bytes / 4096).map(|piece| offset + 2 * piece * 4096);
            Ok(pieces.map(|at| at..at + 4096).collect())
        };
        let layers = layers.placed(apart).unwrap();
        let loader = LayerLoader::new(&open(&device), layers, &SLOTS(1)).unwrap();
        let error = loader.layer(0).unwrap_err();
        assert!(matches!(error, Error::Command { .. }), "{nth}: {error}");
        assert!(loader.layer(0).is_ok(), "{nth}");
    }
}
