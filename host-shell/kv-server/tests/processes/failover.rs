//! Owners and clients that end at the worst moments.

use crate::rank::Rank;
use crate::{AREA_BYTES, Gate, PAGE, SLOTS, Scratch, Stage, load, payload, request, shared, store};
use nvme_kv::{AreaRequest, PageStore, StoreOutcome};
use nvme_kv_server::OpenedArea;
use nvme_store::{Store, StoreOptions};
use std::sync::Arc;
use std::time::Duration;

/// Asks each rank, and returns the places of those that own the area.
fn owners(ranks: &mut [Rank]) -> Vec<usize> {
    let said = ranks.iter_mut().map(|rank| rank.ask("owner"));
    let owns = said
        .enumerate()
        .filter(|(_, said)| said.starts_with("owner"));
    owns.map(|(place, _)| place).collect()
}

#[test]
fn four_processes_find_each_others_pages_while_owners_are_killed() {
    let scratch = Scratch::new();
    let mut ranks: Vec<_> = (0..4).map(|_| Rank::opened(&scratch)).collect();
    assert_eq!(owners(&mut ranks), [0]);
    assert_eq!(ranks[3].ask("store 1 2 3"), "Stored Stored Stored");
    assert_eq!(ranks[1].ask("store 2"), "Present");
    for rank in &mut ranks {
        assert_eq!(rank.ask("found 0 1 2 3 4"), "1 2 3");
        assert_eq!(rank.ask("load 2"), payload(2).len().to_string());
    }
    for round in 0..3 {
        for (number, rank) in ranks.iter_mut().enumerate() {
            rank.tell(&format!("mix {} 60", round * 4 + number));
        }
        ranks.remove(0).kill();
        let mixed: Vec<_> = ranks.iter().map(Rank::listen).collect();
        assert!(
            mixed.iter().all(|said| said.starts_with("mixed")),
            "{mixed:?}"
        );
        // One of the others, whichever called first, owns the area now.
        let owner = owners(&mut ranks);
        assert_eq!(owner.len(), 1);
        ranks.swap(0, owner[0]);
        ranks.push(Rank::opened(&scratch));
    }
    assert_eq!(ranks.remove(0).ask("close"), "closed");
    assert!(ranks[0].ask("load 1").parse::<usize>().is_ok() || ranks[0].ask("store 1") == "Stored");
    assert_eq!(owners(&mut ranks).len(), 1);
}

#[test]
fn an_owner_that_is_killed_during_a_store_loses_no_page_and_the_store_is_made_again() {
    for (stage, outcome) in [
        (Stage::Write, "Stored"),
        (Stage::Flush, "Stored"),
        (Stage::BeforeCommit, "Stored"),
        // The record is on the drive, and only the answer is not sent.
        (Stage::AfterCommit, "Present"),
    ] {
        let scratch = Scratch::new();
        let mut owner = Rank::opened(&scratch);
        let mut client = Rank::opened(&scratch);
        assert_eq!(client.ask("owner"), "client 1");
        assert_eq!(client.ask("store 1 2"), "Stored Stored");
        assert_eq!(client.ask("pin 1"), "1");
        assert_eq!(owner.ask(&format!("hold {stage:?}")), "ready");
        client.tell("store 3");
        assert_eq!(owner.listen(), format!("held at {stage:?}"));
        owner.kill();
        assert_eq!(client.listen(), outcome);
        assert_eq!(client.ask("owner"), "owner 2");
        assert_eq!(client.ask("found 0 1 2 3"), "1 2 3");
        assert_eq!(client.ask("load 3"), payload(3).len().to_string());
        // Pins of the owner before have ended, and letting go of them harms none of the next one's.
        assert_eq!(client.ask("pin 2"), "1");
        assert_eq!(client.ask("unpin"), "unpinned");
        let mut next = Rank::opened(&scratch);
        assert_eq!(next.ask("load 1"), payload(1).len().to_string());
    }
}

#[test]
fn a_client_that_is_killed_gives_its_pages_back() {
    let scratch = Scratch::new();
    let mut owner = Rank::opened(&scratch);
    let all: Vec<u64> = (0..SLOTS).collect();
    let words = |numbers: &[u64]| {
        numbers
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    };
    owner.ask(&format!("store {}", words(&all)));
    let mut pinning = Rank::opened(&scratch);
    let found = owner.ask(&format!("found {}", words(&all)));
    let found: Vec<u64> = found.split(' ').map(|word| word.parse().unwrap()).collect();
    for number in &found {
        assert_eq!(pinning.ask(&format!("pin {number}")), "1");
    }
    let mut loading = Rank::opened(&scratch);
    assert_eq!(owner.ask("hold Read"), "ready");
    loading.tell(&format!("load {}", found[0]));
    assert_eq!(owner.listen(), "held at Read");
    let room = SLOTS as usize - found.len();
    for number in 100..100 + room as u64 {
        assert_eq!(owner.ask(&format!("store {number}")), "Stored");
        assert_eq!(pinning.ask(&format!("pin {number}")), "1");
    }
    assert_eq!(pinning.ask("store 200"), "NoRoom");
    loading.kill();
    pinning.kill();
    assert_eq!(owner.ask("hold none"), "ready");
    // The owner sees their end a moment later.
    let outcome = (0..600).map(|_| {
        std::thread::sleep(Duration::from_millis(50));
        owner.ask("store 200")
    });
    assert!(outcome.into_iter().any(|outcome| outcome == "Stored"));
}

#[test]
fn a_client_that_is_killed_during_its_store_leaves_a_whole_page_or_none() {
    for stage in [Stage::Write, Stage::BeforeCommit] {
        let scratch = Scratch::new();
        let mut owner = Rank::opened(&scratch);
        let mut client = Rank::opened(&scratch);
        assert_eq!(owner.ask(&format!("hold {stage:?}")), "ready");
        client.tell("store 3");
        assert_eq!(owner.listen(), format!("held at {stage:?}"));
        client.kill();
        assert_eq!(owner.ask("hold none"), "ready");
        // The owner has the whole page: it stores it although no one waits for it.
        let mut stored = (0..600).map(|_| {
            std::thread::sleep(Duration::from_millis(50));
            owner.ask("store 3")
        });
        let ended = stored.find(|outcome| outcome != "InProgress");
        assert_eq!(ended.as_deref(), Some("Present"));
        assert_eq!(owner.ask("load 3"), payload(3).len().to_string());
    }
}

#[test]
fn an_owner_that_is_stopped_makes_misses_and_typed_errors() {
    let scratch = Scratch::new();
    let mut owner = Rank::opened(&scratch);
    let mut request = request(&scratch.0, "llama");
    request.timeout = Duration::from_secs(2);
    let pages = shared(request, Arc::new(Gate::default())).unwrap();
    assert_eq!(store(&pages, 1).unwrap(), StoreOutcome::Stored);
    let key = [pages.key(&1u64.to_le_bytes(), 0)];
    let pins = pages.pin_prefix(&key);
    assert_eq!(pins.len(), 1);
    owner.stop();
    assert_eq!(pages.lengths(&key), [None]);
    assert_eq!(pages.pin_prefix(&key).len(), 0);
    assert_eq!(pages.unanswered(), 2);
    for error in [
        load(&pages, 1).unwrap_err(),
        store(&pages, 2).unwrap_err(),
        pages.clear().unwrap_err(),
    ] {
        assert_eq!(error.code(), "timeout", "{error}");
        assert!(!error.is_miss());
    }
    owner.go_on();
    // What was asked for before is not taken for an answer to what is asked now.
    let found = (0..600).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        load(&pages, 1).is_ok() || store(&pages, 1).is_ok()
    });
    assert!(found);
    drop(pins);
    assert!(owner.ask("owner").starts_with("owner"));
}

/// A second area begins among the first one's pages: its socket has no owner and its first bytes are blank, so that only the
/// claim refuses it.
#[test]
fn an_area_that_overlaps_another_processs_is_refused() {
    let scratch = Scratch::new();
    let mut owner = Rank::opened(&scratch);
    assert_eq!(owner.ask("store 1"), "Stored");
    let mut inside = request(&scratch.0, "llama");
    inside.offset = 60 * 4096;
    let said = shared(inside, Arc::new(Gate::default())).err();
    let said = said.expect("the areas overlap").to_string();
    assert!(
        said.contains("from byte 245760 on overlap") && said.contains("in another process"),
        "{said}"
    );
    owner.kill();
    assert_eq!(
        Rank::opened(&scratch).ask("load 1"),
        payload(1).len().to_string()
    );
}

#[test]
fn a_timeout_may_be_longer_than_the_clock_can_tell() {
    let scratch = Scratch::new();
    let mut request = request(&scratch.0, "llama");
    request.timeout = Duration::MAX;
    for _ in 0..2 {
        let owner = shared(request.clone(), Arc::new(Gate::default())).unwrap();
        let client = shared(request.clone(), Arc::new(Gate::default())).unwrap();
        for pages in [&owner, &client] {
            assert!(store(pages, 1).is_ok() && load(pages, 1).is_ok());
            assert_eq!(u64::from(pages.area().unwrap().0.slots), SLOTS);
        }
        assert!(owner.owner().unwrap().0 && !client.owner().unwrap().0);
    }
}

/// Pins that are forgotten, as by the variable of a notebook, keep neither the area's lock nor its device.
#[test]
fn an_area_that_was_closed_with_pins_has_a_next_owner() {
    let scratch = Scratch::new();
    let pages = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).unwrap();
    assert_eq!(store(&pages, 1).unwrap(), StoreOutcome::Stored);
    let key = |number: u64| pages.key(&number.to_le_bytes(), 0);
    let pins = [pages.pin_prefix(&[key(1)]), pages.pin_prefix(&[key(2)])];
    assert_eq!(pins.each_ref().map(|one| one.len()), [1, 0]);
    pages.close();
    let mut next = Rank::opened(&scratch);
    assert_eq!(next.ask("owner"), "owner 2");
    assert_eq!(next.ask("load 1"), payload(1).len().to_string());
    drop(pins);
    assert_eq!(next.ask("load 1"), payload(1).len().to_string());
    assert_eq!(next.ask("close"), "closed");
    // Nor does an area of one process alone.
    let file = scratch.0.join("own");
    std::fs::File::create(&file)
        .unwrap()
        .set_len(AREA_BYTES)
        .unwrap();
    let device = format!("file:{}", file.display());
    let medium = Store::open(&device, &StoreOptions::default()).unwrap();
    let medium = Arc::new(medium);
    let area = AreaRequest {
        offset: 0,
        bytes: AREA_BYTES,
        page_bytes: PAGE as u32,
        fingerprint: request(&scratch.0, "llama").fingerprint,
    };
    let own = PageStore::format(Arc::clone(&medium), &area).unwrap();
    let own = OpenedArea::Own(Arc::new(own));
    let key = own.key(b"1", 0);
    own.store_all(&[(key, &payload(1))]).remove(0).unwrap();
    let pins = own.pin_prefix(&[key]);
    assert_eq!(pins.len(), 1);
    drop(own);
    assert_eq!(Arc::strong_count(&medium), 1);
}

/// A cleaner of old files removes the lock, and the next process takes the area from an owner that lives.
#[test]
fn an_owner_that_another_one_replaces_is_its_client() {
    let scratch = Scratch::new();
    let pages = shared(request(&scratch.0, "llama"), Arc::new(Gate::default())).unwrap();
    let mut client = Rank::opened(&scratch);
    assert_eq!(store(&pages, 1).unwrap(), StoreOutcome::Stored);
    for file in std::fs::read_dir(scratch.0.join("sockets")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "lock") {
            std::fs::remove_file(path).unwrap();
        }
    }
    let mut next = Rank::opened(&scratch);
    assert_eq!(next.ask("owner"), "owner 2");
    assert_eq!(client.ask("store 2"), "Stored");
    assert_eq!(store(&pages, 3).unwrap(), StoreOutcome::Stored);
    assert_eq!(pages.owner().unwrap(), (false, 2));
    assert_eq!(
        pages.remove(&[pages.key(&2u64.to_le_bytes(), 0)]).unwrap(),
        1
    );
    assert_eq!(next.ask("found 1 2 3"), "1 3");
    assert_eq!(client.ask("owner"), "client 2");
    // The socket is the next owner's, and stays.
    assert_eq!(Rank::opened(&scratch).ask("owner"), "client 2");
}

#[test]
fn processes_of_another_model_are_refused_and_change_nothing() {
    let scratch = Scratch::new();
    let mut owner = Rank::opened(&scratch);
    assert_eq!(owner.ask("store 1"), "Stored");
    let other = Rank::start(&scratch, "mistral");
    let said = other.listen();
    assert!(
        said.starts_with("mismatch: ") && said.contains("llama") && said.contains("mistral"),
        "{said}"
    );
    assert_eq!(owner.ask("load 1"), payload(1).len().to_string());
}
