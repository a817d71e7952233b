//! Checks that the oracles can fail: bugs that are planted between the drivers and their surroundings are found, can be
//! repeated, and are shortened to a few operations.

use nvme_simulate::many::many;
use nvme_simulate::plan::Plan;
use nvme_simulate::run::{Arena, run};
use nvme_simulate::sabotage::Sabotage;
use nvme_simulate::shrink::shrink;

/// Seeds within which a planted bug must be found.
const SEEDS: u64 = 400;

/// Finds the bug, by one of `oracles`; the seed repeats; the plan is cut down and still fails.
fn is_found(sabotage: Sabotage, oracles: &[&str]) {
    let total = many(0, SEEDS, 1, sabotage, |_| ());
    let Some((seed, failure)) = total.failures.first() else {
        panic!("{sabotage:?} was not found in {SEEDS} seeds");
    };
    assert!(
        oracles.contains(&failure.oracle),
        "{sabotage:?}: {failure:?}"
    );
    let plan = Plan::draw(*seed);
    let mut arena = Arena::default();
    let [one, two] = [(); 2].map(|()| run(&mut arena, &plan, sabotage, true));
    assert_eq!(one.failure.as_ref(), Some(failure));
    assert_eq!(
        (one.hash, &one.lines),
        (two.hash, &two.lines),
        "the seed does not repeat"
    );
    let short = shrink(&mut arena, &plan, sabotage, failure);
    let again = short.run.failure.expect("the short plan fails");
    assert!(again.is_like(failure), "{again:?} instead of {failure:?}");
    let (before, after) = (plan.ops.len(), short.plan.ops.len());
    assert!(
        after * 2 < before,
        "{sabotage:?}: {before} operations became {after}"
    );
    // Without the bug the same schedule is clean, so the bug was the cause.
    let honest = run(&mut arena, &short.plan, Sabotage::None, false);
    assert_eq!(honest.failure, None);
}

#[test]
fn a_command_that_ends_twice() {
    is_found(Sabotage::EndsTwice, &["account"]);
}

#[test]
fn a_command_whose_end_is_lost() {
    is_found(Sabotage::EndIsLost, &["account", "deadline", "recovery"]);
}

#[test]
fn an_error_that_is_told_as_success() {
    is_found(Sabotage::ErrorIsSuccess, &["account", "data"]);
}

#[test]
fn a_bit_that_flips() {
    is_found(Sabotage::FlippedBit, &["data"]);
}

#[test]
fn data_beside_the_buffer() {
    is_found(Sabotage::Overrun, &["canary"]);
}

#[test]
fn a_buffer_that_is_taken_back_when_its_command_is_late() {
    is_found(
        Sabotage::EarlyRelease,
        &["memory", "canary", "data", "account", "auditor"],
    );
}

#[test]
fn deadlines_that_are_not_looked_at() {
    is_found(Sabotage::NoDeadlines, &["deadline"]);
}

#[test]
fn a_flush_that_does_nothing() {
    is_found(Sabotage::NoFlush, &["data"]);
}

/// A queue that was reclaimed stays closed until its restart, so that a host which forgets the restart is
/// refused its next command, before stale rings do harm.
#[test]
fn rings_that_are_not_emptied_for_a_new_start() {
    is_found(Sabotage::NoRestart, &["refusal"]);
}

#[test]
fn nothing_is_found_where_nothing_is_wrong() {
    let total = many(0, SEEDS, 1, Sabotage::None, |_| ());
    assert_eq!(total.failures, []);
    assert_eq!(total.coverage.surprising(), []);
    assert_eq!(total.seeds, SEEDS);
}

/// Every seed has 200 commands, a fault and a recovery, and gives the same trace every time.
#[test]
fn every_seed_has_enough_commands_a_fault_and_a_recovery_and_repeats() {
    let mut arena = Arena::default();
    for seed in 0..100 {
        let plan = Plan::draw(seed);
        let one = run(&mut arena, &plan, Sabotage::None, false);
        assert_eq!(one.failure, None, "seed {seed}");
        assert!(
            one.commands >= 200,
            "seed {seed}: {} commands",
            one.commands
        );
        assert!(one.recoveries >= 1, "seed {seed} has no recovery");
        assert!(one.coverage.total() >= 1, "seed {seed} has no fault");
        let two = run(&mut Arena::default(), &plan, Sabotage::None, true);
        assert_eq!(one.hash, two.hash, "seed {seed} does not repeat");
    }
}
