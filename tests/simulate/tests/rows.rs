//! Gathers beside writes and recoveries: nothing is found where nothing is wrong, and bugs that are planted are.

use nvme_simulate::account::Failure;
use nvme_simulate::rows::{Counts, Sabotage, run};
use nvme_simulate::run::Arena;

/// Seeds within which a planted bug must be found.
const SEEDS: u64 = 20_000;
/// Seeds in which nothing may be found.
const HONEST: u64 = 600;

fn first_failure(sabotage: Sabotage) -> Option<(u64, Failure)> {
    let mut arena = Arena::default();
    (0..SEEDS).find_map(|seed| {
        let failure = run(&mut arena, seed, sabotage, false).failure;
        failure.map(|failure| (seed, failure))
    })
}

/// Finds the bug by one of `oracles`, again with the same seed, and not without the bug.
fn is_found(sabotage: Sabotage, oracles: &[&str]) {
    let Some((seed, failure)) = first_failure(sabotage) else {
        panic!("{sabotage:?} was not found in {SEEDS} seeds");
    };
    let oracle = failure.oracle;
    assert!(oracles.contains(&oracle), "{sabotage:?}: {failure:?}");
    let mut arena = Arena::default();
    let again = run(&mut arena, seed, sabotage, false);
    assert_eq!(again.failure, Some(failure));
    assert_eq!(run(&mut arena, seed, Sabotage::None, false).failure, None);
}

#[test]
fn nothing_is_found_where_nothing_is_wrong_and_everything_happens() {
    let (mut arena, mut counts) = (Arena::default(), Counts::default());
    for seed in 0..HONEST {
        let one = run(&mut arena, seed, Sabotage::None, false);
        assert_eq!(one.failure, None, "seed {seed}");
        counts.add(&one.counts);
        if seed < 20 {
            let two = run(&mut Arena::default(), seed, Sabotage::None, true);
            assert_eq!(one.hash, two.hash, "seed {seed} does not repeat");
            assert!(!two.lines.is_empty());
        }
    }
    for (name, count) in counts.named() {
        assert!(count >= 100, "{name}: {count} in {HONEST} seeds");
    }
}

#[test]
fn a_lost_station_that_is_given_back_at_once() {
    is_found(Sabotage::FreesLost, &["station"]);
}

#[test]
fn a_lost_read_that_nobody_hears_of() {
    is_found(Sabotage::TellsNobody, &["station", "recovery"]);
}

#[test]
fn a_block_that_goes_on_past_a_shut_gate() {
    is_found(Sabotage::PassesAnyway, &["gate"]);
}

#[test]
fn a_row_that_fails_for_its_neighbours_block() {
    is_found(Sabotage::RepeatsNothing, &["rows"]);
}

#[test]
fn a_row_that_is_looked_for_in_the_wrong_slot() {
    is_found(Sabotage::OwnSlot, &["rows"]);
}

#[test]
fn a_row_that_failed_and_has_bytes() {
    is_found(Sabotage::LeavesBytes, &["rows"]);
}

#[test]
fn a_row_of_before_a_write() {
    is_found(Sabotage::KeepsStale, &["rows"]);
}

#[test]
fn a_row_of_before_a_write_that_a_recovery_ended() {
    is_found(Sabotage::ForgetsLostWrites, &["rows"]);
}

#[test]
fn lines_that_stay_pinned() {
    is_found(Sabotage::KeepsPins, &["cache"]);
}
