//! Tests of stores of every kind: ranges, threads, and the writes that a read may see.

mod recovery;
mod stripe;

use super::testing::{SHORT, TestFile, every_kind, of_file, of_sim, options, pattern};
use super::*;
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

fn cause(error: Error) -> String {
    error.to_string()
}

fn usage<T: std::fmt::Debug>(result: Result<T>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Usage { .. }), "{error:?}");
    assert!(!error.remedy().is_empty());
    error.to_string()
}

/// Stores and tables can be used by several threads at once.
#[test]
fn stores_and_tables_are_shared_by_threads() {
    fn is_shared<T: Send + Sync + 'static>() {}
    is_shared::<Store>();
    is_shared::<Table>();
}

#[test]
fn any_range_is_read_as_it_was_written() {
    let edges = [
        0u64, 1, 511, 512, 513, 4095, 4096, 4097, 12_287, 12_288, 300_001,
    ];
    for (name, store, _file) in every_kind() {
        let mut model = vec![0; store.len() as usize];
        for (round, &offset) in edges.iter().enumerate() {
            for &len in &edges {
                let mut data = vec![0; len as usize];
                pattern(offset, round as u64 + len, &mut data);
                store.write_at(offset, &data).unwrap();
                model[offset as usize..][..data.len()].copy_from_slice(&data);
                let around = offset.saturating_sub(5000)..(offset + len + 5000).min(store.len());
                let mut back = vec![0xEE; (around.end - around.start) as usize];
                store.read_at(around.start, &mut back).unwrap();
                let expected = &model[around.start as usize..around.end as usize];
                assert!(back == expected, "{name}: {offset} {len}");
            }
        }
        let mut back = vec![0; model.len()];
        store.read_at(0, &mut back).unwrap();
        assert!(back == model, "{name}");
        let stats = store.stats();
        assert!(stats.commands > 100 && stats.bytes > 1 << 20, "{stats:?}");
        assert_eq!(stats.retries, 0);
    }
}

#[test]
fn ranges_past_the_end_are_refused_before_anything_is_sent() {
    for (name, store, _file) in every_kind() {
        let (len, before) = (store.len(), store.stats());
        for (offset, bytes) in [
            (len, 1),
            (len - 1, 2),
            (u64::MAX, 1),
            (u64::MAX - 3, 9),
            (len + 1, 0),
        ] {
            let mut data = vec![0; bytes];
            let text = usage(store.read_at(offset, &mut data));
            assert!(text.contains("past the store"), "{name}: {text}");
            usage(store.write_at(offset, &data));
            usage(store.write_at_fua(offset, &data));
        }
        assert_eq!(store.stats(), before, "{name}");
        // The end of the store is a valid offset for no bytes.
        store.read_at(len, &mut []).unwrap();
        store.write_at(len, &[]).unwrap();
        store.write_at(len - 1, &[7]).unwrap();
        store.flush().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn reads_and_writes_agree_with_a_vector(
        steps in prop::collection::vec((0u64..1 << 20, 0usize..40_000, 0u8..4), 1..12)
    ) {
        for (name, store, _file) in every_kind() {
            let mut model = vec![0; store.len() as usize];
            for (round, (offset, bytes, what)) in steps.iter().enumerate() {
                let offset = offset % store.len();
                let bytes = (*bytes).min((store.len() - offset) as usize);
                let mut data = vec![0; bytes];
                if *what == 0 {
                    store.read_at(offset, &mut data).unwrap();
                    prop_assert!(data == model[offset as usize..][..bytes], "{}: {:?}", name, steps);
                    continue;
                }
                pattern(offset, round as u64, &mut data);
                match *what {
                    1 => store.write_at_fua(offset, &data).unwrap(),
                    _ => store.write_at(offset, &data).unwrap(),
                }
                model[offset as usize..][..bytes].copy_from_slice(&data);
            }
            let mut back = vec![0; model.len()];
            store.read_at(0, &mut back).unwrap();
            prop_assert!(back == model, "{}: {:?}", name, steps);
        }
    }
}

#[test]
fn threads_that_write_neighbouring_bytes_of_a_block_all_land() {
    for (name, store, _file) in every_kind() {
        std::thread::scope(|scope| {
            for thread in 0..6u64 {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..40u64 {
                        for block in 0..3 {
                            let offset = block * 512 + thread * 85;
                            store
                                .write_at(offset, &[(round + thread) as u8; 85])
                                .unwrap();
                            let mut back = [0; 85];
                            store.read_at(offset, &mut back).unwrap();
                            assert_eq!(back, [(round + thread) as u8; 85]);
                        }
                    }
                });
            }
        });
        let mut back = vec![0; 510];
        store.read_at(512, &mut back).unwrap();
        for (thread, bytes) in back.chunks(85).enumerate() {
            assert_eq!(bytes, [39 + thread as u8; 85], "{name}");
        }
    }
}

#[test]
fn a_read_sees_every_write_that_returned_before_it_began() {
    for (name, store, _file) in every_kind() {
        // The writer publishes the number of its last finished round; a reader sees that round or a later one.
        let finished = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=200u64 {
                    store.write_at(1021, &round.to_le_bytes()).unwrap();
                    finished.store(round, Ordering::SeqCst);
                }
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    while finished.load(Ordering::SeqCst) < 200 {
                        let before = finished.load(Ordering::SeqCst);
                        let mut low = [0; 1];
                        store.read_at(1021, &mut low).unwrap();
                        // One byte lies in one block, so that it holds the number of one round; rounds below 256 fit
                        // into it.
                        assert!(u64::from(low[0]) >= before, "{name}: {} {before}", low[0]);
                    }
                });
            }
        });
    }
}

#[test]
fn names_of_devices_are_checked() {
    for text in ["", "nvme0", "floppy:a", "kmod:x"] {
        usage(Store::open(text, &options()));
    }
    let missing = Store::open("/nowhere/at/all", &options()).unwrap_err();
    assert!(matches!(missing, Error::File { .. }));
    usage(Store::open("file:/", &options()));
    usage(Store::open("/dev/null", &options()));
    for wrong in [
        StoreOptions {
            queues: 0,
            ..options()
        },
        StoreOptions {
            depth: 0,
            ..options()
        },
        StoreOptions {
            depth: 5000,
            ..options()
        },
        StoreOptions {
            allow_write: true,
            read_only: true,
            ..options()
        },
        StoreOptions {
            nsid: 9,
            ..options()
        },
    ] {
        usage(Store::open("sim:mem?size=1MiB", &wrong));
    }
}

#[test]
fn a_text_with_a_slash_is_a_path_and_one_with_a_colon_before_it_a_device() {
    for path in ["/a", "./a", "../a", "a/b", "a/b:c", "~/a"] {
        assert_eq!(path_of_file(path), Some(path));
    }
    // The tests run in the folder of their package.
    for (device, path) in [("Cargo.toml", "Cargo.toml"), ("file:a", "a")] {
        assert_eq!(path_of_file(device), Some(path));
    }
    for device in ["", "nvme0", "nothing.img", "src", "sim:/a", "vfio-user:./a"] {
        assert_eq!(path_of_file(device), None);
    }
}

#[test]
fn paths_mean_files() {
    let file = TestFile::new(100);
    for text in [file.text(), format!("file:{}", file.text())] {
        let store = Store::open(&text, &options()).unwrap();
        assert_eq!((store.len(), store.block_bytes()), (100, 1));
        assert!(!store.is_empty());
        assert_eq!(store.path().device, format!("file:{}", file.text()));
        assert!(format!("{store:?}").contains("len: 100"));
    }
}

#[test]
fn the_path_says_what_carries_the_data() {
    let store = of_sim("size=1MiB&block=512");
    assert_eq!((store.len(), store.block_bytes()), (1 << 20, 512));
    let path = serde_json::to_value(store.path()).unwrap();
    assert_eq!(path["device"], "sim:mem?size=1MiB&block=512");
    assert_eq!(
        (&path["data"], &path["tier"]),
        (&"host".into(), &serde_json::Value::Null)
    );
    assert!(
        path["path"]
            .as_str()
            .unwrap()
            .contains("embedded simulator")
    );
    assert!(path["why"].as_str().unwrap().contains("no GPU"));
    assert_eq!(store.controllers().count(), 1);
    let file = TestFile::new(4096);
    let store = of_file(&file, FileIo::Pread);
    assert_eq!(store.path().path, "pread");
    assert!(store.path().why.contains("doctor"));
    let json = serde_json::to_value(store.stats()).unwrap();
    assert_eq!(json["commands"], 0);
}

#[test]
fn a_store_for_reading_only_is_not_written() {
    let file = TestFile::new(1 << 20);
    let image = format!("sim:{}", file.text());
    let read_only = StoreOptions {
        read_only: true,
        ..options()
    };
    for device in [image, file.text()] {
        // Readers share it.
        let stores = [0, 1].map(|_| Store::open(&device, &read_only).unwrap());
        for store in &stores {
            let text = usage(store.write_at(0, &[1]));
            assert!(text.contains("reading only"), "{text}");
            usage(store.write_at_fua(0, &[1]));
            store.read_at(77, &mut [0; 9]).unwrap();
        }
    }
}

/// A simulated drive that reports that a disk in use may be behind it, as VFIO does.
struct Guarded(Arc<dyn Device>);

impl Device for Guarded {
    fn name(&self) -> String {
        "guarded".to_owned()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn registers(&self) -> &(dyn nvme_core::RegisterAccess + Sync) {
        self.0.registers()
    }

    fn doorbells(&self) -> nvme_driver::DoorbellMap {
        self.0.doorbells()
    }

    fn map_dma(&self, pages: &Arc<nvme_driver::DmaPages>) -> Result<nvme_core::spec::Iova> {
        self.0.map_dma(pages)
    }

    fn unmap_dma(&self, iova: nvme_core::spec::Iova, bytes: usize) -> Result<()> {
        self.0.unmap_dma(iova, bytes)
    }

    fn guards_data(&self) -> bool {
        true
    }
}

#[test]
fn a_real_device_is_written_only_where_that_is_allowed() {
    let open = |allow_write| {
        let device = Guarded(nvme_driver::open("sim:mem?size=1MiB").unwrap());
        let options = StoreOptions {
            allow_write,
            ..options()
        };
        Store::over(Arc::new(device), &options).unwrap()
    };
    let store = open(false);
    let text = usage(store.write_at(0, &[1]));
    assert!(text.contains("guarded is a real device"), "{text}");
    let table = store.table(0, 10, 4).unwrap();
    let change = table.scatter_add((&[1i64]).into(), &[1; 4], RowElement::I32, None);
    usage(change);
    store.read_at(0, &mut [0; 10]).unwrap();
    open(true).write_at(0, &[1]).unwrap();
}

#[test]
fn a_scatter_judges_all_ids_before_it_sends_anything() {
    let store = of_sim("size=1MiB");
    let table = store.table(96, 100, 4).unwrap();
    let before = store.stats().commands;
    for wrong in [-1i64, 100, i64::MIN, i64::MAX] {
        for ids in [[wrong, 3, 5], [3, wrong, 5], [3, 5, wrong]] {
            let mut status = [9; 3];
            let report = table.scatter(
                (&ids).into(),
                &[7; 12],
                DuplicateIds::Last,
                Some(&mut status),
            );
            let report = report.unwrap();
            let place = ids.iter().position(|id| *id == wrong).unwrap();
            let mut wanted = [-5; 3];
            wanted[place] = -1;
            let first = report.first.as_ref().unwrap();
            assert_eq!((status, report.failed), (wanted, 3));
            assert_eq!((first.row, first.id, first.status), (place, wrong, -1));
            usage(report.check());
            let added = table.scatter_add((&ids).into(), &[7; 12], RowElement::I32, None);
            usage(added.unwrap().check());
        }
    }
    assert_eq!(store.stats().commands, before);
}

#[test]
fn a_forced_write_that_fails_says_so() {
    let store = of_sim("size=1MiB&fault=status:0x280@op=write,nth=1");
    let text = cause(store.write_at_fua(0, &[0; 4096]).unwrap_err());
    assert!(text.contains("Write (FUA) of LBA 0"), "{text}");
}

/// Only one store drives a drive: a second store on the same image is refused, and does not disturb the first.
#[test]
fn a_second_store_on_an_image_is_refused() {
    let file = TestFile::new(1 << 20);
    let device = format!("sim:{}", file.text());
    let first = Store::open(&device, &options()).unwrap();
    let error = Store::open(&device, &options()).unwrap_err();
    assert!(matches!(error, Error::File { .. }), "{error:?}");
    first.write_at(5, b"still there").unwrap();
    drop(first);
    let again = Store::open(&device, &options()).unwrap();
    let mut back = [0; 11];
    again.read_at(5, &mut back).unwrap();
    assert_eq!(&back, b"still there");
}

#[test]
fn several_stores_on_one_file_see_each_other() {
    let file = TestFile::new(1 << 20);
    let stores = [of_file(&file, FileIo::Auto), of_file(&file, FileIo::Pread)];
    std::thread::scope(|scope| {
        for (index, store) in stores.iter().enumerate() {
            scope.spawn(move || {
                for at in (index as u64..4096).step_by(2) {
                    store.write_at(at, &[1 + index as u8]).unwrap();
                }
            });
        }
    });
    let mut back = [0; 4096];
    stores[0].read_at(0, &mut back).unwrap();
    assert!(back.chunks(2).all(|pair| pair == [1, 2]));
}

#[test]
fn flushed_and_forced_data_survive_a_power_cut() {
    let (device, controller) = nvme_driver::sim::embed("mem?size=1MiB&block=512").unwrap();
    let store = Store::over(Arc::clone(&device), &options()).unwrap();
    store.write_at(100, &[1; 1000]).unwrap();
    store.flush().unwrap();
    store.write_at_fua(5000, &[2; 100]).unwrap();
    store.write_at(9000, &[3; 100]).unwrap();
    assert!(controller.unflushed_bytes() > 0);
    controller.power_cut();
    drop(store);
    let store = Store::over(device, &options()).unwrap();
    let mut back = vec![0xEE; 16 << 10];
    store.read_at(0, &mut back).unwrap();
    let mut expected = vec![0; back.len()];
    expected[100..1100].fill(1);
    expected[5000..5100].fill(2);
    assert!(back == expected);
}

#[test]
fn a_dead_member_ends_what_needs_it_and_nothing_else() {
    const STRIPE: u64 = 16 << 10;
    let members = vec![
        of_sim("size=1MiB"),
        of_sim("size=1MiB&fault=allones@op=read,nth=2"),
        of_sim("size=2MiB&serial=LONG"),
    ];
    let store = Store::stripe(members, STRIPE).unwrap();
    assert_eq!(store.len(), 3 << 20);
    let mut all = vec![0; store.len() as usize];
    pattern(0, 3, &mut all);
    store.write_at(0, &all).unwrap();
    store.read_at(STRIPE, &mut [0; 10]).unwrap();
    let mut back = vec![0; all.len()];
    for _ in 0..2 {
        let text = cause(store.read_at(0, &mut back).unwrap_err());
        assert!(text.contains("member 1 (sim:mem?size=1MiB&fault"), "{text}");
    }
    assert!(cause(store.flush().unwrap_err()).contains("member 1"));
    for at in [0, 2 * STRIPE, 3 * STRIPE, 5 * STRIPE] {
        let mut back = vec![0; STRIPE as usize];
        store.read_at(at, &mut back).unwrap();
        assert!(back == all[at as usize..][..back.len()]);
    }
    let path = store.path();
    assert!(path.device.starts_with("stripe:sim:mem?size=1MiB|sim:"));
    assert!(path.why.contains("3 members"), "{}", path.why);
    assert_eq!(store.member_paths().len(), 3);
}

#[test]
fn errors_of_members_are_named() {
    for (fault, word) in [("status:0x281", "Unrecovered"), ("drop", "got no answer")] {
        let options = StoreOptions {
            timeout: SHORT,
            ..options()
        };
        let text = format!(
            "stripe:sim:mem?size=1MiB|sim:mem?size=1MiB&fault={fault}@op=read,nth=1?stripe=64KiB"
        );
        let store = Store::open(&text, &options).unwrap();
        assert_eq!(store.len(), 2 << 20);
        store.read_at(0, &mut [0; 65_536]).unwrap();
        let text = cause(store.read_at(65_536, &mut [0; 1]).unwrap_err());
        assert!(text.contains("member 1") && text.contains(word), "{text}");
        store.read_at(65_536, &mut [0; 1]).unwrap();
    }
}

/// Members have several block sizes: the stripe has to fit each of them, in any order.
#[test]
fn a_stripe_is_checked_against_every_member() {
    let small = || of_sim("size=1MiB&block=512");
    let large = || of_sim("size=1MiB&block=4096");
    let refused = |members: Vec<Store>, bytes: u64| {
        let error = Store::stripe(members, bytes).unwrap_err();
        assert!(matches!(error, Error::Usage { .. }), "{error}");
        error.to_string()
    };
    for bytes in [512, 1536, 6144] {
        assert!(refused(vec![small(), large()], bytes).contains("member 1"));
        assert!(refused(vec![large(), small()], bytes).contains("member 0"));
        assert!(refused(vec![small(), small(), large()], bytes).contains("member 2"));
    }
    let short = of_sim("size=4KiB&block=512");
    assert!(refused(vec![small(), short], 8192).contains("member 1"));
    let both = Store::stripe(vec![small(), large()], 12288).unwrap();
    assert_eq!(both.block_bytes(), 4096);
}

/// Code that reads ahead, and a GPU that keeps rows, learn of each write when it has ended, and of no read.
#[test]
fn every_write_makes_another_mark() {
    for (name, store, _file) in every_kind() {
        let table = store.table(0, 100, 100).unwrap();
        let (mut data, rows, ids) = (vec![1; 5000], [2; 200], [3i64, 4]);
        let mut last = store.write_mark();
        let mut changed = |what: &str, wanted: bool| {
            let now = store.write_mark();
            assert_eq!(now != last, wanted, "{name}: {what}");
            last = now;
        };
        changed("nothing", false);
        store.write_at(0, &data).unwrap();
        changed("a write", true);
        store.write_at(7, &data[..3]).unwrap();
        changed("a write of a part of a block", true);
        store.write_at_fua(0, &data).unwrap();
        changed("a forced write", true);
        let report = table.scatter((&ids).into(), &rows, DuplicateIds::Last, None);
        report.unwrap().check().unwrap();
        changed("a scatter", true);
        let report = table.scatter_add((&ids).into(), &rows, RowElement::I32, None);
        report.unwrap().check().unwrap();
        changed("an addition", true);
        let results = store.transfer_all(&mut [StoreTransfer::Write(4096, &data[..4096])]);
        assert!(results.iter().all(Result::is_ok));
        changed("a batch", true);
        store.read_at(0, &mut data).unwrap();
        let mut out = [0; 200];
        let report = table.gather((&ids).into(), &mut out, None);
        report.unwrap().check().unwrap();
        let results = store.transfer_all(&mut [StoreTransfer::Read(0, &mut data)]);
        assert!(results.iter().all(Result::is_ok));
        changed("reads", false);
    }
    // Another store on the same file writes it.
    let file = TestFile::new(1 << 20);
    let (one, other) = (of_file(&file, FileIo::Pread), of_file(&file, FileIo::Pread));
    let before = one.write_mark();
    other.write_at(5, &[1]).unwrap();
    assert_ne!(one.write_mark(), before);
}

#[test]
fn stripes_that_cannot_be_are_refused() {
    let sim = || of_sim("size=1MiB&block=4096");
    usage(Store::stripe(Vec::new(), 4096));
    usage(Store::stripe(vec![sim()], 0));
    usage(Store::stripe(vec![sim(), sim()], 6000));
    usage(Store::stripe(vec![sim(), sim()], 2 << 20));
    let store = sim();
    let _table = store.table(0, 1, 1).unwrap();
    assert!(usage(Store::stripe(vec![sim(), store], 4096)).contains("member 1 has tables"));
    let stripe = Store::stripe(vec![sim(), sim()], 4096).unwrap();
    assert!(usage(Store::stripe(vec![stripe], 4096)).contains("stripe itself"));
    usage(Store::open("stripe:", &options()));
    usage(Store::open(
        "stripe:sim:mem?size=1MiB?stripe=much",
        &options(),
    ));
    let store = Store::open("stripe:sim:mem?size=1MiB|sim:mem?size=1MiB", &options()).unwrap();
    assert_eq!(store.len(), 2 << 20);
}
