//! Plausibility of a witness file: its form, its ranges, content that must not be in it, and contradictions. A witness
//! file comes from strangers: one with a figure above its link, or with a name in it, must not be published.

use super::record::{RunEnd, StepEnd, TimedPass, VERSION, WitnessRecord, WitnessStep};
use super::redact::found_in;
use super::steps::{IDENTIFY, StepWorkload};
use crate::common::images::CommandFiles;
use crate::common::input::InputFile;
use crate::common::output;
use nvme_host::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// The longest file that is read.
const MOST: usize = 1 << 20;
/// Limit of the faults that are named.
const MOST_NAMED: usize = 10;
/// Tolerance of the comparison with a link's rate, since clocks are not exact: a link cannot carry more than
/// this times its rate.
const TOLERANCE: f64 = 1.02;
/// The fastest link that there is, generation 6 with 16 lanes.
const FASTEST_GB_PER_S: f64 = 121.1;

/// Checks the file at `path` and prints its row.
///
/// # Errors
/// [`Error::Mismatch`] for an implausible witness file; [`Error::Usage`] for another file; [`Error::File`] if it cannot
/// be read.
pub fn run(path: &Path, files: &CommandFiles, as_json: bool) -> Result<()> {
    let mut bytes = vec![0; MOST];
    let length = InputFile::open(path, files)?.read_at_most(&mut bytes)?;
    let other = |why: String| {
        Error::usage(
            format!("{} is no witness file: {why}", path.display()),
            "name a file that `nvme-gpu witness` has written",
        )
    };
    if length > MOST {
        return Err(other(format!("it has more than {MOST} bytes")));
    }
    let record = read(&bytes[..length]).map_err(other)?;
    let problems = problems(&record);
    if !problems.is_empty() {
        let mut what = problems[..problems.len().min(MOST_NAMED)].join("; ");
        if problems.len() > MOST_NAMED {
            what.push_str(&format!("; and {} more", problems.len() - MOST_NAMED));
        }
        return Err(Error::Mismatch { what });
    }
    let row = row(&record);
    match as_json {
        true => output::json(&json!({ "valid": true, "simulator": record.simulator, "row": row })),
        false => output::print(&row),
    }
}

/// Reads the record in `bytes`, if they have its form and no other members.
pub fn read(bytes: &[u8]) -> std::result::Result<WitnessRecord, String> {
    let value: Value =
        serde_json::from_slice(bytes).map_err(|error| format!("it is not JSON: {error}"))?;
    serde_json::from_value(value).map_err(|error| error.to_string())
}

/// Returns the faults of the record.
pub fn problems(record: &WitnessRecord) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut check = |fits: bool, what: String| {
        if !fits {
            wrong.push(what);
        }
    };
    check(
        record.schema_version == output::SCHEMA_VERSION && record.witness_version == VERSION,
        format!("version {}", record.witness_version),
    );
    check(is_date(&record.date), format!("date '{}'", record.date));
    check(
        record.tool.starts_with("nvme-gpu ") && record.command.starts_with("nvme-gpu witness "),
        format!("tool '{}', command '{}'", record.tool, record.command),
    );
    check(
        record.ended != RunEnd::Complete || is_whole(record),
        "complete, though rungs are missing".to_owned(),
    );
    check(
        record.controller.is_some() || record.steps.iter().all(|one| one.outcome != StepEnd::Ok),
        "steps without a controller".to_owned(),
    );
    for text in texts(&serde_json::to_value(record).unwrap_or_default()) {
        if let Some(what) = found_in(&text) {
            wrong.push(what);
        }
    }
    if let Some(one) = &record.controller {
        let is_program = matches!(one.way.as_str(), "sim" | "vfio-user")
            || one.model.contains("QEMU")
            || one.model.contains("nvme-gpu");
        if is_program && !record.simulator {
            wrong.push(format!("'{}' by {} is a simulator", one.model, one.way));
        }
        if !one.block_bytes.is_power_of_two() || !(512..=1 << 20).contains(&one.block_bytes) {
            wrong.push(format!("blocks of {} bytes", one.block_bytes));
        }
        if one
            .mdts_bytes
            .is_some_and(|bytes| !bytes.is_power_of_two() || bytes < 4096)
        {
            wrong.push(format!("MDTS of {:?} bytes", one.mdts_bytes));
        }
    }
    let limits = limits(record);
    for (index, step) in record.steps.iter().enumerate() {
        let before = &record.steps[..index];
        if before
            .iter()
            .any(|one| (&one.name, one.by) == (&step.name, step.by))
        {
            wrong.push(format!("{} by {:?} twice", step.name, step.by));
        }
        let named = |what: String| format!("{} by {:?}: {what}", step.name, step.by);
        wrong.extend(of_step(step, limits).into_iter().map(named));
    }
    wrong
}

/// MDTS, GB/s of the link, and true if the controller is a program.
type Limits = (Option<u64>, Option<f64>, bool);

/// Returns the limits of the figures, as far as the record has them. A program (a simulated controller) transfers
/// nothing over its link.
fn limits(record: &WitnessRecord) -> Limits {
    let one = record.controller.as_ref();
    let link = one
        .filter(|_| !record.simulator)
        .and_then(|one| one.link.as_ref()?.trained?.gb_per_s);
    let mdts = one.and_then(|one| one.mdts_bytes);
    (mdts, link, record.simulator)
}

/// True if every rung was tried by the CPU and the GPU, or none after a controller that could not be brought
/// up.
fn is_whole(record: &WitnessRecord) -> bool {
    let is_up = record.controller.is_some();
    record.steps.first().is_some_and(|one| one.name == IDENTIFY)
        && record.steps.len()
            == if is_up {
                1 + 2 * StepWorkload::ALL.len()
            } else {
                1
            }
}

fn of_step(step: &WitnessStep, limits: Limits) -> Vec<String> {
    let mut wrong = Vec::new();
    let is_known =
        step.name == IDENTIFY || StepWorkload::ALL.iter().any(|one| one.name() == step.name);
    if !is_known {
        wrong.push("no rung of that name".to_owned());
    }
    let is_identify = step.name == IDENTIFY;
    let fits = match step.outcome {
        StepEnd::Ok => {
            (is_identify || step.measured.is_some() && step.verified.is_some())
                && step.error.is_none()
        }
        StepEnd::Failed => step.error.is_some() && step.measured.is_none(),
        StepEnd::Skipped => step.why.is_some() && step.measured.is_none(),
    };
    if !fits {
        wrong.push(format!(
            "{:?}, and members that say otherwise",
            step.outcome
        ));
    }
    if let Some(one) = &step.measured {
        wrong.extend(of_figures(one, limits));
    }
    if let Some(one) = &step.verified {
        if one.sums.as_ref().is_some_and(|sums| sums[0] != sums[1]) {
            wrong.push("two sums that differ".to_owned());
        }
        let is_sum = |sum: &String| sum.len() == 16 && sum.bytes().all(|b| b.is_ascii_hexdigit());
        if one
            .sums
            .as_ref()
            .is_some_and(|sums| !sums.iter().all(is_sum))
        {
            wrong.push("a sum that is none".to_owned());
        }
        if !(0.0..=1.0).contains(&one.zero_share) || one.bytes == 0 {
            wrong.push(format!(
                "{} bytes verified, share of zeroes {}",
                one.bytes, one.zero_share
            ));
        }
    }
    if step.tier.as_ref().is_some_and(|tier| tier.tier > 3) {
        wrong.push("a tier above 3".to_owned());
    }
    wrong
}

fn of_figures(one: &TimedPass, (mdts, link, is_program): Limits) -> Vec<String> {
    let mut wrong = Vec::new();
    let numbers = [one.seconds, one.gb_per_s, one.of_link.unwrap_or(0.0)];
    let near = |one: f64, other: f64| (one - other).abs() <= 0.01 * other.abs();
    let checks = [
        (
            numbers
                .iter()
                .all(|number| number.is_finite() && *number >= 0.0)
                && one.seconds > 0.0,
            "a figure that is no measure",
        ),
        (
            near(one.gb_per_s, one.bytes as f64 / one.seconds / 1e9),
            "GB/s are not bytes by seconds",
        ),
        (
            link.is_none_or(|link| one.gb_per_s <= link * TOLERANCE),
            "faster than the link",
        ),
        (
            is_program || one.gb_per_s <= FASTEST_GB_PER_S,
            "faster than any link",
        ),
        (
            match (one.of_link, link) {
                (Some(share), Some(link)) => near(share, one.gb_per_s / link),
                (share, _) => share.is_none(),
            },
            "a share of the link that is another one",
        ),
        (
            mdts.is_none_or(|mdts| one.command_bytes <= mdts),
            "commands longer than MDTS",
        ),
        (
            one.commands >= 1
                && one.queues >= 1
                && one.depth >= 1
                && one.bytes <= one.commands.saturating_mul(one.command_bytes),
            "more bytes than its commands move",
        ),
    ];
    wrong.extend(
        checks
            .iter()
            .filter(|(fits, _)| !fits)
            .map(|(_, what)| (*what).to_owned()),
    );
    wrong
}

/// True for text of the form 2026-11-25T02:30:00Z.
fn is_date(text: &str) -> bool {
    let form = "0000-00-00T00:00:00Z";
    let fits = |(one, form): (u8, u8)| match form {
        b'0' => one.is_ascii_digit(),
        form => one == form,
    };
    text.len() == form.len() && text.bytes().zip(form.bytes()).all(fits)
}

/// Returns every text in a value.
fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::String(text) => vec![text.clone()],
        Value::Array(all) => all.iter().flat_map(texts).collect(),
        Value::Object(members) => members.values().flat_map(texts).collect(),
        _ => Vec::new(),
    }
}

/// Returns the line for docs/hardware.md.
pub fn row(record: &WitnessRecord) -> String {
    let ok = record
        .steps
        .iter()
        .filter(|one| one.outcome == StepEnd::Ok)
        .count();
    let failed: Vec<&str> = record
        .steps
        .iter()
        .filter(|one| one.outcome == StepEnd::Failed)
        .map(|one| one.name.as_str())
        .collect();
    let mut claim = format!("witness: {ok} rungs");
    for step in &record.steps {
        let (true, Some(one)) = (step.name.starts_with("sequential"), &step.measured) else {
            continue;
        };
        let by = format!("{:?}", step.by).to_lowercase();
        let tier = step
            .tier
            .as_ref()
            .map_or(String::new(), |tier| format!(" tier {}", tier.tier));
        let share = one.of_link.map_or(String::new(), |share| {
            format!(" ({:.0} % of the link)", share * 100.0)
        });
        claim.push_str(&format!(
            ", {} {by}{tier} {:.2} GB/s{share}",
            nvme_host::units::bytes(one.bytes),
            one.gb_per_s
        ));
    }
    if !failed.is_empty() {
        claim.push_str(&format!(", failed: {}", failed.join(", ")));
    }
    if record.ended != RunEnd::Complete {
        claim.push_str(", not complete");
    }
    let checked = record.steps.iter().filter_map(|one| one.verified.as_ref());
    if checked.clone().count() > 0 && checked.clone().all(|one| one.zero_share >= 1.0) {
        claim.push_str(", of zeroes only");
    }
    let drive = record
        .controller
        .as_ref()
        .map_or("no controller".to_owned(), |one| {
            format!("{} {} by {}", one.model, one.firmware, one.way)
        });
    let gpu = record.gpu.as_ref().map_or(String::new(), |gpu| {
        format!(", {} {}", gpu.model, gpu.driver.as_deref().unwrap_or(""))
    });
    let kind = if record.simulator { "SIMULATOR: " } else { "" };
    let commit = record.tool.rsplit("commit ").next().unwrap_or_default();
    let commit = commit
        .trim_end_matches(')')
        .get(..7)
        .unwrap_or("development");
    let day = record.date.get(..10).unwrap_or_default();
    let (command, gpu) = (&record.command, gpu.trim_end());
    format!(
        "- {claim}: `{command}`; {kind}{drive}{gpu}, Linux {}, {commit}, {day}",
        record.machine.kernel
    )
}

#[cfg(test)]
mod tests;
