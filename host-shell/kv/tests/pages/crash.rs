//! The power is cut during every write and flush of random histories. Nothing that was committed is lost, nothing
//! that was removed is found, and no page has other bytes than were stored.

use crate::disk::MemoryDisk;
use crate::{bytes_for, key, load, payload, request};
use nvme_kv::{KvError, PageStore, StoreOutcome};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One step of a history; numbers are of pages.
#[derive(Clone, Debug)]
enum HistoryStep {
    Store(Vec<u64>),
    Remove(u64),
    Load(u64),
    Checkpoint,
    Clear,
    Reopen,
}

fn history_step(pages: u64) -> impl Strategy<Value = HistoryStep> {
    prop_oneof![
        8 => prop::collection::vec(0..pages, 1..4).prop_map(HistoryStep::Store),
        4 => (0..pages).prop_map(HistoryStep::Remove),
        2 => (0..pages).prop_map(HistoryStep::Load),
        1 => Just(HistoryStep::Checkpoint),
        1 => Just(HistoryStep::Clear),
        1 => Just(HistoryStep::Reopen),
    ]
}

/// What a page may be after a crash: versions, or none.
#[derive(Clone, Debug, Default, PartialEq)]
struct Expected {
    /// Version that was committed, and not removed.
    version: Option<u64>,
    /// What the step that was cut may have made of it.
    instead: Option<Option<u64>>,
}

/// A model of a store beside it.
struct PageModel {
    pages: HashMap<u64, Expected>,
    versions: u64,
    /// False if pages may make room for others.
    has_room: bool,
}

impl PageModel {
    fn new(has_room: bool) -> Self {
        Self {
            pages: HashMap::new(),
            versions: 0,
            has_room,
        }
    }

    fn page(&mut self, number: u64) -> &mut Expected {
        self.pages.entry(number).or_default()
    }

    /// Executes a step on both. An error is one of the power cut.
    fn run(&mut self, store: &PageStore<MemoryDisk>, step: &HistoryStep) -> Result<(), KvError> {
        match step {
            HistoryStep::Store(numbers) => self.store(store, numbers)?,
            HistoryStep::Remove(number) => {
                self.page(*number).instead = Some(None);
                store.remove(&[key(store, *number)])?;
                *self.page(*number) = Expected::default();
            }
            HistoryStep::Load(number) => self.check(store, *number)?,
            HistoryStep::Checkpoint => store.checkpoint()?,
            HistoryStep::Clear => {
                self.pages
                    .values_mut()
                    .for_each(|one| one.instead = Some(None));
                store.clear()?;
                self.pages.clear();
            }
            HistoryStep::Reopen => {}
        }
        Ok(())
    }

    fn store(&mut self, store: &PageStore<MemoryDisk>, numbers: &[u64]) -> Result<(), KvError> {
        self.versions += 1;
        let version = self.versions;
        let payloads: Vec<_> = numbers.iter().map(|one| payload(*one, version)).collect();
        let pages = numbers.iter().zip(&payloads);
        let pages: Vec<_> = pages
            .map(|(one, payload)| (key(store, *one), &payload[..]))
            .collect();
        for number in numbers {
            let page = self.page(*number);
            // A page that was found stays; with eviction it may have gone before.
            if page.version.is_none() || !self.has_room {
                self.page(*number).instead = Some(Some(version));
            }
        }
        let mut failure = None;
        for (number, result) in numbers.iter().zip(store.store_all(&pages)) {
            match result {
                Ok(StoreOutcome::Stored) => {
                    *self.page(*number) = Expected {
                        version: Some(version),
                        instead: None,
                    };
                }
                Ok(_) => {}
                Err(error) => failure = Some(error),
            }
        }
        if failure.is_none() {
            numbers
                .iter()
                .for_each(|number| self.page(*number).instead = None);
        }
        failure.map_or(Ok(()), Err)
    }

    fn check(&mut self, store: &PageStore<MemoryDisk>, number: u64) -> Result<(), KvError> {
        let expected = self.page(number).clone();
        let mut allowed = vec![expected.version];
        allowed.extend(expected.instead);
        match load(store, number) {
            Ok(bytes) => {
                let is_one = allowed
                    .iter()
                    .flatten()
                    .any(|version| bytes == payload(number, *version));
                assert!(is_one, "page {number} has other bytes than {expected:?}");
            }
            Err(KvError::Missing { .. }) => {
                let may_miss = allowed.contains(&None) || !self.has_room;
                assert!(may_miss, "page {number} is lost: {expected:?}");
            }
            Err(error @ KvError::Lost { .. }) => panic!("page {number}: {error}"),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Runs a history from the formatting on, until the power is cut or its end.
fn run(
    disk: &MemoryDisk,
    bytes: u64,
    steps: &[HistoryStep],
    model: &mut PageModel,
) -> Result<(), KvError> {
    let (mut store, _) = PageStore::open_or_format(disk.clone(), &request(bytes))?;
    for step in steps {
        model.run(&store, step)?;
        if matches!(step, HistoryStep::Reopen) {
            store = PageStore::open(disk.clone(), &request(bytes))?;
        }
    }
    Ok(())
}

/// Cuts the power during the step `cut` of `steps`, restarts, and compares; then continues and compares again.
fn crash(steps: &[HistoryStep], cut: u64, (slots, pages): (u64, u64), seed: u64) -> bool {
    let bytes = bytes_for(slots);
    let disk = MemoryDisk::new(bytes as usize, seed);
    let mut model = PageModel::new(slots >= pages);
    disk.cut_after(cut);
    let ended = run(&disk, bytes, steps, &mut model);
    if !disk.is_dead() {
        ended.unwrap();
        return false;
    }
    disk.restart();
    let (store, formatted) = PageStore::open_or_format(disk.clone(), &request(bytes)).unwrap();
    if let Some(why) = formatted {
        assert!(
            matches!(why, KvError::Blank { .. } | KvError::Damaged { .. }),
            "{why}"
        );
        assert!(
            model.pages.is_empty(),
            "formatted again after a commit: {why}"
        );
    }
    for number in 0..pages {
        model.check(&store, number).unwrap();
        // From now on it is what was found.
        let found = load(&store, number).ok();
        let page = model.page(number);
        let all = [page.version, page.instead.flatten()];
        let version = found.map(|bytes| {
            let mut all = all.iter().flatten();
            *all.find(|version| bytes == payload(number, **version))
                .unwrap()
        });
        *page = Expected {
            version,
            instead: None,
        };
    }
    for step in steps.iter().take(8) {
        model.run(&store, step).unwrap();
    }
    disk.restart();
    let store = PageStore::open(disk, &request(bytes)).unwrap();
    (0..pages).for_each(|number| model.check(&store, number).unwrap());
    true
}

/// Cuts the power during every write and flush of a history.
fn crash_everywhere(steps: &[HistoryStep], slots: u64, pages: u64, seed: u64) -> u64 {
    let mut cut = 0;
    while crash(steps, cut, (slots, pages), seed ^ cut) {
        cut += 1;
    }
    cut
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_committed_is_lost_and_nothing_else_is_found(
        steps in prop::collection::vec(history_step(6), 1..20),
        seed: u64,
    ) {
        crash_everywhere(&steps, 8, 6, seed);
    }

    #[test]
    fn pages_that_make_room_are_never_found_with_bytes_of_others(
        steps in prop::collection::vec(history_step(9), 1..20),
        seed: u64,
    ) {
        crash_everywhere(&steps, 4, 9, seed);
    }
}

/// Long enough for the log to be full three times.
#[test]
fn power_cuts_around_checkpoints_lose_nothing() {
    let steps: Vec<HistoryStep> = (0..26u64)
        .flat_map(|round| {
            let number = round % 5;
            [
                HistoryStep::Store(vec![number]),
                HistoryStep::Remove(number),
            ]
        })
        .chain([HistoryStep::Store(vec![0, 1, 2, 3, 4])])
        .collect();
    for seed in 0..3 {
        let cuts = crash_everywhere(&steps, 6, 5, seed);
        assert!(cuts > 130, "{cuts}");
    }
}

/// Random histories, one after the other, of which each is cut at every point: as many points as NVME_KV_CRASH_POINTS says.
#[test]
fn a_campaign_of_power_cuts_loses_nothing() {
    let wanted = match std::env::var("NVME_KV_CRASH_POINTS") {
        Ok(text) => text.parse().expect("NVME_KV_CRASH_POINTS is a number"),
        Err(_) => 500,
    };
    let (points, histories) = (AtomicU64::new(0), AtomicU64::new(0));
    let run = || {
        while points.load(Relaxed) < wanted {
            let seed = histories.fetch_add(1, Relaxed);
            let mut rng = [0; 32];
            rng[..8].copy_from_slice(&seed.to_le_bytes());
            let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &rng);
            let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
            // Every other area is too small for its pages, which make room for each other then.
            let (slots, pages) = [(8, 6), (4, 9)][seed as usize % 2];
            let steps = prop::collection::vec(history_step(pages), 1..40);
            let steps = steps.new_tree(&mut runner).unwrap().current();
            let cuts = crash_everywhere(&steps, slots, pages, seed);
            points.fetch_add(cuts, Relaxed);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(run))));
    let (points, histories) = (points.into_inner(), histories.into_inner());
    println!("{points} power cuts in {histories} histories");
    assert!(points >= wanted);
}

/// Openings that are cut themselves, again and again.
#[test]
fn power_cuts_of_openings_lose_nothing() {
    for seed in 0..40 {
        let bytes = bytes_for(8);
        let disk = MemoryDisk::new(bytes as usize, seed);
        let store = PageStore::format(disk.clone(), &request(bytes)).unwrap();
        for number in 0..5 {
            let stored = store.store(key(&store, number), &payload(number, 0));
            assert_eq!(stored.unwrap(), StoreOutcome::Stored);
        }
        for opening in 0..20 {
            disk.cut_after(opening % 3);
            let opened = PageStore::open(disk.clone(), &request(bytes));
            assert!(opened.is_ok() || disk.is_dead());
            disk.restart();
        }
        let store = PageStore::open(disk, &request(bytes)).unwrap();
        for number in 0..5 {
            assert_eq!(load(&store, number).unwrap(), payload(number, 0));
        }
    }
}
