//! Reports of runs, for people and for programs.

use nvme_simulate::account::Failure;
use nvme_simulate::fault::{Coverage, Kind, State, impossible};
use nvme_simulate::many::Total;
use nvme_simulate::plan::Plan;
use nvme_simulate::rows;
use nvme_simulate::run::{Arena, Run};
use nvme_simulate::sabotage::Sabotage;
use nvme_simulate::shrink::{Shrunk, shrink};
use serde_json::{Value, json};

/// Lines of a cut-down trace that are printed.
const LINES: usize = 80;

/// Many seeds. `whole`: enough seeds that every fault must have met every state.
pub fn swept(base: u64, threads: usize, total: &Total, whole: bool, as_json: bool) {
    // Only the first failure is cut down: the others probably have the same cause.
    let shrunk = total.failures.first().map(|(seed, failure)| {
        let plan = Plan::draw(*seed);
        shrink(&mut Arena::default(), &plan, Sabotage::None, failure)
    });
    if as_json {
        let object = json!({
            "base": base,
            "seeds": total.seeds,
            "threads": threads,
            "commands": total.commands,
            "recoveries": total.recoveries,
            "virtual_seconds": total.virtual_ns as f64 / 1e9,
            "seeds_per_second_per_core": total.per_second(),
            "failures": failed(&total.failures),
            "gathers": counted(&total.rows),
            "failures_of_gathers": failed(&total.failures_of_rows),
            "missing_in_gathers": total.missing_of_rows(),
            "shortest": shrunk.as_ref().map(shortest),
            "coverage": counts(&total.coverage),
            "missing": names(&total.coverage.missing()),
            "surprising": names(&total.coverage.surprising()),
        });
        println!("{object:#}");
        return;
    }
    println!(
        "{} seeds, {} commands, {} recoveries, {:.0} s of virtual time, {:.0} seeds/s per core",
        total.seeds,
        total.commands,
        total.recoveries,
        total.virtual_ns as f64 / 1e9,
        total.per_second()
    );
    println!("gathers: {}", in_words(&total.rows));
    print_coverage(&total.coverage, whole);
    let missing = total.missing_of_rows();
    if whole && !missing.is_empty() {
        println!("never met in gathers: {}", missing.join(", "));
    }
    for (seed, failure) in total.failures.iter().chain(&total.failures_of_rows) {
        println!("seed {seed} FAILED: {}: {}", failure.oracle, failure.text);
        println!("  repeat with: cargo xtask simulate --seed {seed}");
    }
    if let Some(shrunk) = shrunk {
        println!("the first of them, cut down in {} runs:", shrunk.runs);
        print_plan(&shrunk.plan);
        print_lines(&shrunk.run);
    }
}

fn failed(failures: &[(u64, Failure)]) -> Vec<Value> {
    let one = |(seed, failure): &(u64, Failure)| json!({"seed": seed, "oracle": failure.oracle, "text": failure.text});
    failures.iter().map(one).collect()
}

fn counted(counts: &rows::Counts) -> Value {
    let named = counts.named().into_iter();
    let named = named.map(|(name, count)| (name.to_owned(), json!(count)));
    Value::Object(named.collect())
}

fn in_words(counts: &rows::Counts) -> String {
    let named = counts
        .named()
        .map(|(name, count)| format!("{count} {name}"));
    named.join(", ")
}

/// Describes the result of one seed: its commands and its gathers.
pub fn replayed(
    seed: u64,
    plan: &Plan,
    (run, gathers): (&Run, &rows::Run),
    repeats: bool,
    as_json: bool,
) {
    let failure = run.failure.as_ref();
    let of_gathers = gathers.failure.as_ref();
    if as_json {
        let object = json!({
            "seed": seed,
            "commands": run.commands,
            "recoveries": run.recoveries,
            "virtual_seconds": run.virtual_ns as f64 / 1e9,
            "trace_hash": format!("{:016x}", run.hash),
            "repeats": repeats,
            "failure": failure.map(|failure| json!({"oracle": failure.oracle, "text": failure.text})),
            "trace": run.lines,
            "gathers": counted(&gathers.counts),
            "failure_of_gathers": of_gathers
                .map(|failure| json!({"oracle": failure.oracle, "text": failure.text})),
            "trace_of_gathers": gathers.lines,
        });
        println!("{object:#}");
        return;
    }
    println!("{:#?}\n{:#?}", plan.setup, plan.traps);
    run.lines.iter().for_each(|line| println!("{line}"));
    println!(
        "seed {seed}: {} commands, {} recoveries, trace {:016x}",
        run.commands, run.recoveries, run.hash
    );
    if !repeats {
        println!("FAILED: the same seed gave another trace when it was run again");
    }
    println!("gathers:");
    gathers.lines.iter().for_each(|line| println!("{line}"));
    println!("seed {seed}: {}", in_words(&gathers.counts));
    for failure in failure.into_iter().chain(of_gathers) {
        println!("FAILED: {}: {}", failure.oracle, failure.text);
    }
}

fn shortest(shrunk: &Shrunk) -> Value {
    json!({
        "operations": shrunk.plan.ops.iter().map(|op| format!("{op:?}")).collect::<Vec<_>>(),
        "traps": shrunk.plan.traps.iter().map(|trap| format!("{trap:?}")).collect::<Vec<_>>(),
        "commands": shrunk.plan.commands,
        "trace": shrunk.run.lines,
    })
}

fn print_plan(plan: &Plan) {
    println!("  {:?}", plan.setup);
    plan.traps.iter().for_each(|trap| println!("  {trap:?}"));
    plan.ops.iter().for_each(|op| println!("  {op:?}"));
    println!(
        "  then commands up to {}, power cut at the end: {}",
        plan.commands, plan.cut_at_end
    );
}

fn print_lines(run: &Run) {
    let skipped = run.lines.len().saturating_sub(LINES);
    if skipped > 0 {
        println!("  ... {skipped} lines");
    }
    run.lines
        .iter()
        .skip(skipped)
        .for_each(|line| println!("  {line}"));
    if let Some(failure) = &run.failure {
        println!("  {}: {}", failure.oracle, failure.text);
    }
}

fn name((kind, state): (Kind, State)) -> String {
    format!("{kind:?} in {state:?}")
}

fn names(pairs: &[(Kind, State)]) -> Vec<String> {
    pairs.iter().copied().map(name).collect()
}

fn counts(coverage: &Coverage) -> Value {
    let rows = Kind::ALL.map(|kind| {
        let row = State::ALL.map(|state| match impossible(kind, state) {
            Some(why) => (format!("{state:?}"), json!({"impossible": why})),
            None => (format!("{state:?}"), json!(coverage.count(kind, state))),
        });
        (
            format!("{kind:?}"),
            Value::Object(row.into_iter().collect()),
        )
    });
    Value::Object(rows.into_iter().collect())
}

fn print_coverage(coverage: &Coverage, whole: bool) {
    print!("{:12}", "");
    State::ALL
        .iter()
        .for_each(|state| print!("{:>11}", format!("{state:?}")));
    println!();
    for kind in Kind::ALL {
        print!("{:12}", format!("{kind:?}"));
        for state in State::ALL {
            match (impossible(kind, state), coverage.count(kind, state)) {
                (Some(_), 0) => print!("{:>11}", "-"),
                (_, count) => print!("{count:>11}"),
            }
        }
        println!();
    }
    for (text, pairs) in [
        ("never met", coverage.missing()),
        ("met, and said to be impossible", coverage.surprising()),
    ] {
        if whole && !pairs.is_empty() {
            println!("{text}: {}", names(&pairs).join(", "));
        }
    }
}
