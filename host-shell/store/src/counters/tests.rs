use super::*;
use crate::testing::{SHORT, of_sim, options};
use crate::{Store, StoreOptions};

/// Returns the page of this process whose device is `device`.
fn page(device: &str) -> Option<PublishedStore> {
    let all = published_stores(&readable_folders());
    let own = |one: &PublishedStore| one.pid == std::process::id() && one.path.device == device;
    all.into_iter().flatten().find(own)
}

#[test]
fn a_page_shows_what_a_store_counts_until_it_is_closed() {
    let device = "sim:mem?size=5MiB&block=512";
    let store = Store::open(device, &options()).unwrap();
    store.write_at(0, &[7; 4096]).unwrap();
    let table = store.table(0, 100, 32).unwrap();
    let mut out = [0; 5 * 32];
    let report = table
        .gather((&[3i64, 9, 3, 3, 200]).into(), &mut out, None)
        .unwrap();
    assert_eq!(report.failed, 1);
    let stats = store.stats();
    assert_eq!((stats.rows_read, stats.failed_rows), (5, 1));
    assert_eq!((stats.duplicates_saved, stats.bytes_written), (2, 4096));
    assert!(stats.bytes_read >= 64 && stats.waited_ns > 0);
    assert_eq!((stats.commands_under_way, stats.recoveries), (0, 0));
    assert_eq!(stats.latency_us.iter().sum::<u64>(), stats.commands);
    let shown = page(device).unwrap();
    assert_eq!(shown.stats, stats);
    let path = store.path();
    assert_eq!((shown.path.path, shown.path.why), (path.path, path.why));
    assert_eq!((shown.path.tier, shown.path.data.as_str()), (None, "host"));
    // The table keeps the store open.
    drop((store, table));
    assert_eq!(page(device), None);
}

#[test]
fn members_that_are_joined_publish_one_page() {
    let open = |name: &str| Store::open(name, &StoreOptions::default()).unwrap();
    let names = ["sim:mem?size=6MiB&block=512", "sim:mem?size=7MiB&block=512"];
    let members = names.map(open).into_iter().collect();
    let store = Store::stripe(members, 4096).unwrap();
    assert!(names.iter().all(|name| page(name).is_none()));
    let joined = page(&store.path().device).unwrap();
    assert!(joined.path.why.contains("2 members"), "{joined:?}");
}

#[test]
fn recoveries_and_failed_commands_leave_nothing_under_way() {
    let options = StoreOptions {
        timeout: SHORT,
        ..options()
    };
    let store = Store::open(
        "sim:mem?size=4MiB&block=512&fault=drop@op=read,nth=2&fault=status:0x281@op=read,nth=5",
        &options,
    )
    .unwrap();
    let ends: Vec<bool> = (0..8)
        .map(|place| store.read_at(place * 4096, &mut [0; 512]).is_ok())
        .collect();
    assert!(ends.contains(&false) && ends.contains(&true), "{ends:?}");
    let stats = store.stats();
    assert_eq!((stats.recoveries, stats.commands_under_way), (1, 0));
    assert!(stats.commands >= 8);
}

#[test]
fn a_store_counts_without_a_page_that_others_read() {
    let counters = StoreCounters {
        words: PageWords::own(),
        file: None,
        texts: Mutex::default(),
    };
    counters.add(StoreCounter::Commands, 2);
    counters.ended_after(3000);
    assert_eq!(counters.stats().commands, 2);
    assert_eq!(counters.stats().latency_us[2], 1);
    // A folder that cannot be made.
    assert!(StoreCounters::publish_in(Path::new("/proc/none"), 1).is_err());
    let store = of_sim("size=4MiB&block=512&queues=1");
    assert_eq!(store.stats().commands, 0);
}

#[test]
fn texts_are_whole_and_cut_at_a_character() {
    let folder = std::env::temp_dir().join(format!("nvme-gpu-texts-{}", std::process::id()));
    let counters = StoreCounters::publish_in(&folder, 1).unwrap();
    let path = |letter: &str| DataPath {
        device: letter.repeat(2000),
        data: "gpu",
        tier: Some(2),
        path: letter.repeat(20),
        why: letter.repeat(5000),
    };
    counters.begin(&path("a"));
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for letter in ["é", "b"].iter().cycle().take(20_000) {
                counters.set_path(&path(letter));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let mut seen = 0;
        while !is_over.load(Ordering::Relaxed) || seen == 0 {
            for one in published_stores(std::slice::from_ref(&folder)) {
                // A reader that never finds the texts at rest says so.
                let Ok(one) = one else { continue };
                let letter = one.path.path.chars().next().unwrap();
                assert!(one.path.why.chars().all(|each| each == letter));
                assert!(one.path.device.chars().all(|each| each == letter));
                assert_eq!((one.path.tier, one.path.device.len() / 8), (Some(2), 31));
                seen += 1;
            }
        }
        writer.join().unwrap();
    });
    drop(counters);
    assert!(published_stores(std::slice::from_ref(&folder)).is_empty());
    std::fs::remove_dir(&folder).unwrap();
}
