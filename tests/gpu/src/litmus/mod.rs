//! Litmus tests: outcomes on the GPU's memory with the orders that the core relies on, and without them.
//!
//! A case is a shape, its ordering, its memory and its set of threads. An ordered case must show no forbidden outcome.
//! A weakened one should: if it does not, that shape proves nothing here, and the line says `powerless`.

pub mod cases;
mod cpu;
mod doorbell;
mod ground;
mod launch;
pub mod peer;

use crate::bench::Bench;
use crate::report::{End, Options, Report};
use gpu_litmus::Counts;
use launch::Litmus;
use std::time::{Duration, Instant};

/// The most time for a case.
const LONGEST: Duration = Duration::from_secs(6);
/// A weakened case ends once it has shown this number of forbidden outcomes.
const SHOWN: u64 = 1000;

/// Tests every case, and the doorbell that many warps ring.
pub fn all(report: &mut Report, bench: &Bench) {
    let mut litmus = None;
    for case in cases::all() {
        report.case(&case.name(), |options| {
            match run(bench, &mut litmus, &case, options) {
                Ok(seen) => End::Passed(seen),
                Err(why) => End::Failed(why),
            }
        });
    }
    doorbell::all(report, bench);
}

fn run(
    bench: &Bench,
    litmus: &mut Option<Litmus>,
    case: &cases::Case,
    options: &Options,
) -> Result<String, String> {
    let litmus = match litmus {
        Some(litmus) => litmus,
        None => litmus.insert(Litmus::new(bench).map_err(|error| error.to_string())?),
    };
    let began = Instant::now();
    let (mut sum, mut launches) = (Counts::default(), 0);
    while sum.fresh < options.litmus && began.elapsed() < LONGEST * bench.patience as u32 {
        let counts = litmus.launch(bench, case, launches, options.litmus)?;
        sum.reads += counts.reads;
        sum.fresh += counts.fresh;
        sum.forbidden += counts.forbidden;
        sum.late += counts.late;
        launches += 1;
        if case.weak() && sum.forbidden >= SHOWN {
            break;
        }
    }
    verdict(case.weak(), &sum, launches, options.litmus)
}

/// Returns the verdict on the counts of a case.
fn verdict(weak: bool, sum: &Counts, launches: u64, wanted: u64) -> Result<String, String> {
    let Counts {
        reads,
        fresh,
        forbidden,
        late,
        ..
    } = sum;
    let seen = format!("{reads} reads, {fresh} fresh, {forbidden} forbidden, {launches} launches");
    if *late > 0 {
        return Err(format!("{seen}; {late} threads ran out of time"));
    }
    if *fresh < wanted.min(1000) && *forbidden == 0 {
        return Err(format!("{seen}: too few to say anything"));
    }
    match (weak, forbidden) {
        (false, 1..) => Err(seen),
        (true, 0) => Ok(format!("{seen}: powerless")),
        _ => Ok(seen),
    }
}

#[cfg(test)]
mod tests {
    use super::verdict;
    use gpu_litmus::Counts;

    #[test]
    fn an_ordered_case_fails_by_one_forbidden_outcome_and_a_weak_one_by_none() {
        let mut sum = Counts {
            reads: 10_000,
            fresh: 5_000,
            ..Counts::default()
        };
        assert!(verdict(false, &sum, 1, 5_000).is_ok());
        assert!(
            verdict(true, &sum, 1, 5_000)
                .unwrap()
                .ends_with("powerless")
        );
        sum.forbidden = 1;
        assert!(verdict(false, &sum, 1, 5_000).is_err());
        assert!(
            !verdict(true, &sum, 1, 5_000)
                .unwrap()
                .ends_with("powerless")
        );
        sum.late = 1;
        assert!(verdict(true, &sum, 1, 5_000).is_err());
        let few = Counts {
            fresh: 999,
            ..Counts::default()
        };
        assert!(verdict(false, &few, 1, 5_000).is_err());
    }
}
