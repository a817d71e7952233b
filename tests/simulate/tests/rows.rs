//! Kernels beside writes and recoveries: correct code gives no findings, and planted bugs of the host do. The bugs of
//! kernels are patches of `tests/mutants`.

use nvme_simulate::account::Failure;
use nvme_simulate::rows::{Counts, Sabotage, run, stripes};
use nvme_simulate::run::Arena;

/// Seeds within which a planted bug must be found.
const SEEDS: u64 = 2_000;
/// Number of seeds in which nothing may be found.
const HONEST: u64 = 60;

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
        if seed < 3 {
            let two = run(&mut Arena::default(), seed, Sabotage::None, true);
            assert_eq!(one.hash, two.hash, "seed {seed} does not repeat");
            assert!(!two.lines.is_empty());
        }
    }
    let of_stripes = ["owned_stripes"];
    for (name, count) in counts.named() {
        let is_due = count >= 10 || of_stripes.contains(&name);
        assert!(is_due, "{name}: {count} in {HONEST} seeds");
    }
}

#[test]
fn a_row_in_stripes_fails_for_its_own_drives_alone() {
    let (mut arena, mut counts) = (Arena::default(), Counts::default());
    for seed in 0..HONEST {
        let one = stripes::run(&mut arena, seed, false);
        assert_eq!(one.failure, None, "seed {seed}");
        counts.add(&one.counts);
        if seed < 3 {
            let two = stripes::run(&mut Arena::default(), seed, true);
            assert_eq!(one.hash, two.hash, "seed {seed} does not repeat");
            assert!(!two.lines.is_empty());
        }
    }
    let Counts {
        rows,
        failed,
        gone,
        lost,
        recoveries,
        owned_stripes,
        ..
    } = counts;
    assert!(rows >= 1000, "{counts:?}");
    for count in [failed, gone, lost, recoveries, owned_stripes] {
        assert!(count >= 5, "{counts:?}");
    }
}

#[test]
fn a_row_of_before_a_write() {
    is_found(Sabotage::KeepsStale, &["rows"]);
}
