//! Every fault and every condition of a device's text, declared once: its parser together with its
//! help, so that the help cannot name a fault that the parser lacks.

use super::draft::bad;
use super::values::{number, opcode, size, time};
use crate::config::fault::{ExternalChange, Fault, FaultCondition, FaultRule};
use crate::config::settings::ConfigError;
use nvme_spec::Status;
use std::format;
use std::string::String;
use std::vec::Vec;

/// A fault of the text form: `NAME` or `NAME:VALUE`.
pub struct FaultRow {
    /// Name.
    pub name: &'static str,
    /// Form of the value; empty for a fault without one.
    pub value: &'static str,
    /// Effect, for the help.
    pub help: &'static str,
    parse: fn(&str) -> Result<Fault, String>,
}

/// A condition of the text form, which limits a fault to some commands: `NAME=VALUE`.
pub struct ConditionRow {
    /// Name.
    pub name: &'static str,
    /// Form of the value.
    pub value: &'static str,
    /// The commands that satisfy it, for the help.
    pub help: &'static str,
    set: fn(&mut FaultCondition, &str) -> Result<(), String>,
}

macro_rules! faults {
    ($($name:literal $value:literal $help:literal => $parse:expr;)*) => {
        &[$(FaultRow { name: $name, value: $value, help: $help, parse: $parse }),*]
    };
}

macro_rules! conditions {
    ($($name:literal $value:literal $help:literal => $set:expr;)*) => {
        &[$(ConditionRow { name: $name, value: $value, help: $help, set: $set }),*]
    };
}

/// The faults of `fault=`.
pub const FAULTS: &[FaultRow] = faults! {
    "drop" "" "the command never completes; an Abort does not find it" => |_| Ok(Fault::Drop);
    "delay" "TIME" "the command completes this much later; an Abort finds it until then" =>
        |text| Ok(Fault::Delay(at_least_one(text)?));
    "stubborn" "TIME" "as delay, but an Abort that finds the command says that it was aborted and changes nothing" =>
        |text| Ok(Fault::Stubborn(at_least_one(text)?));
    "reorder" "" "the command completes after those fetched with it" => |_| Ok(Fault::Reorder);
    "duplicate" "" "the completion is posted twice" => |_| Ok(Fault::Duplicate);
    "echo" "TIME" "the completion is posted again this much later" => |text| Ok(Fault::Echo(at_least_one(text)?));
    "latedata" "TIME" "the command completes at once and its data move this much later; I/O commands without a PRP list" =>
        |text| Ok(Fault::LateData(at_least_one(text)?));
    "wrongcid" "CID" "the completion carries this command identifier" => |text| Ok(Fault::WrongCid(number(text)?));
    "flippedcid" "BITS" "the completion carries the command identifier with these bits flipped" =>
        |text| match number(text)? {
            0 => Err("0 flips no bit".into()),
            bits => Ok(Fault::FlippedCid(bits)),
        };
    "wrongphase" "" "the completion carries the phase tag of the previous pass" => |_| Ok(Fault::WrongPhase);
    "badsqhd" "HEAD" "the completion carries this submission queue head" => |text| Ok(Fault::BadSqhd(number(text)?));
    "torncqe" "" "the phase tag is visible before dwords 0 and 1 are" => |_| Ok(Fault::TornCqe);
    "status" "CODE" "the command is not executed and completes with this status, 1 to 0x7fff; with hints alone it succeeds" =>
        |text| match number(text)? {
            status @ 1..=0x7FFF => Ok(Fault::Status(Status(status))),
            _ => Err("a status is 1 to 0x7fff: type times 0x100 plus code plus hints (0x2000 more, 0x4000 do not retry)".into()),
        };
    "cfs" "" "the controller stops with CSTS.CFS" => |_| Ok(Fault::Cfs);
    "allones" "" "the controller leaves the bus: registers read as all ones" => |_| Ok(Fault::AllOnes);
    "stuckready" "" "CSTS.RDY does not follow the next change of CC.EN" => |_| Ok(Fault::StuckReady);
    "sanitizefail" "" "a sanitize operation fails half way" => |_| Ok(Fault::SanitizeFails);
    "format" "BYTES" "another host formats namespace 1 to blocks of 512 or 4096 bytes after the I/O command" =>
        |text| match number(text)? {
            bytes @ (512 | 4096) => Ok(Fault::External(ExternalChange::Format(bytes))),
            _ => Err("must be 512 or 4096".into()),
        };
    "shrink" "SIZE" "another host makes namespace 1 so short after the I/O command" =>
        |text| match size(text)? {
            bytes if bytes > 0 && bytes.is_multiple_of(4096) => Ok(Fault::External(ExternalChange::Shrink(bytes))),
            _ => Err("must be a multiple of 4096, and not 0".into()),
        };
    "detach" "" "another host deletes namespace 1 after the I/O command" => |_| Ok(Fault::External(ExternalChange::Detach));
    "protect" "" "another host write-protects namespace 1 after the I/O command" => |_| Ok(Fault::External(ExternalChange::Protect));
    "erase" "" "another host sanitizes the device after the I/O command" => |_| Ok(Fault::External(ExternalChange::Erase));
    "firmware" "MDTS" "another host activates firmware with this MDTS, 0 to 16, after the I/O command" =>
        |text| match number(text)? {
            mdts @ 0..=16 => Ok(Fault::External(ExternalChange::Firmware(mdts))),
            _ => Err("must be 0 to 16".into()),
        };
    "grant" "PAIRS" "the next controller reset grants at most this many I/O queue pairs: set after the I/O command" =>
        |text| match number(text)? {
            0 => Err("must be at least 1".into()),
            pairs => Ok(Fault::External(ExternalChange::Grant(pairs))),
        };
    "replace" "" "Identify is another drive's after the I/O command" => |_| Ok(Fault::External(ExternalChange::Replace));
};

/// The conditions of a fault.
pub const CONDITIONS: &[ConditionRow] = conditions! {
    "qid" "N" "commands of submission queue N; without it those of every I/O queue" => |when, text| {
        when.qid = Some(number(text)?);
        Ok(())
    };
    "op" "NAME|CODE" "commands of this opcode: an I/O command's or an admin command's name, or a number" => |when, text| {
        let (code, is_admin) = opcode(text)?;
        if is_admin && when.qid.is_some_and(|qid| qid != 0) {
            return Err(format!("{text} is an admin command: leave qid= out"));
        }
        when.opcode = Some(code);
        when.qid = if is_admin { Some(0) } else { when.qid };
        Ok(())
    };
    "nth" "N|A-B" "the N-th match alone, from 1, or the A-th to the B-th" => |when, text| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let (first, last) = (positive(first)?, positive(last)?);
        if last < first {
            return Err(format!("{last} comes before {first}"));
        }
        (when.nth, when.until) = (Some(first), Some(last));
        Ok(())
    };
    "every" "N" "every N-th match, from 1" => |when, text| {
        when.every = Some(positive(text)?);
        Ok(())
    };
    "p" "PROBABILITY" "a match with this probability, 0.000001 to 1, drawn from seed" => |when, text| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let p = text.parse::<f64>().ok().filter(|p| digits && (1e-6..=1.0).contains(p));
        when.per_million = Some((p.ok_or("must be 0.000001 to 1")? * 1e6).round() as u32);
        Ok(())
    };
};

/// Parses one fault: `WHAT[:VALUE][@CONDITION,...]`, of [`FAULTS`] and [`CONDITIONS`].
///
/// # Errors
/// The error, attributed to the option `fault`.
pub fn parse_fault(text: &str) -> Result<FaultRule, ConfigError> {
    let wrong = |why: String| bad("fault", why);
    let (what, conditions) = match text.split_once('@') {
        Some((what, conditions)) => (what, Some(conditions)),
        None => (text, None),
    };
    let (name, value) = match what.split_once(':') {
        Some((name, value)) => (name, Some(value)),
        None => (what, None),
    };
    let Some(row) = FAULTS.iter().find(|row| row.name == name) else {
        let names: Vec<&str> = FAULTS.iter().map(|row| row.name).collect();
        let names = names.join(", ");
        return Err(wrong(format!(
            "no fault is called '{name}'; there are {names}"
        )));
    };
    let value = match (row.value.is_empty(), value) {
        (true, Some(_)) => return Err(wrong(format!("{name} takes no value"))),
        (false, None) => return Err(wrong(format!("write it as {name}:{}", row.value))),
        (_, value) => value.unwrap_or_default(),
    };
    let what = (row.parse)(value).map_err(|why| wrong(format!("{name}: {why}")))?;
    let mut when = FaultCondition::default();
    let mut seen: Vec<&str> = Vec::new();
    for condition in conditions.into_iter().flat_map(|all| all.split(',')) {
        let Some((name, value)) = condition.split_once('=') else {
            return Err(wrong(format!(
                "write the condition '{condition}' as name=value"
            )));
        };
        let Some(row) = CONDITIONS.iter().find(|row| row.name == name) else {
            let names: Vec<&str> = CONDITIONS.iter().map(|row| row.name).collect();
            let names = names.join(", ");
            return Err(wrong(format!(
                "no condition is called '{name}'; there are {names}"
            )));
        };
        if seen.contains(&name) {
            return Err(wrong(format!("{name} is given twice; give it once")));
        }
        seen.push(name);
        let qid = when.qid;
        (row.set)(&mut when, value).map_err(|why| wrong(format!("{name}: {why}")))?;
        if name == "qid" && qid == Some(0) && when.qid != Some(0) {
            return Err(wrong(
                "the opcode is an admin command's: leave qid= out".into(),
            ));
        }
    }
    let of_commands = !matches!(what, Fault::StuckReady | Fault::SanitizeFails);
    if !of_commands && (when.qid.is_some() || when.opcode.is_some()) {
        let why = format!("{name} befalls no command: leave qid= and op= out");
        return Err(wrong(why));
    }
    if matches!(what, Fault::External(_)) && when.qid == Some(0) {
        return Err(wrong(format!("{name} befalls an I/O command")));
    }
    Ok(FaultRule { when, what })
}

fn at_least_one(text: &str) -> Result<u64, String> {
    match time(text)? {
        0 => Err("must be at least 1ns".into()),
        ns => Ok(ns),
    }
}

fn positive(text: &str) -> Result<u64, String> {
    match number(text)? {
        0 => Err("counts from 1".into()),
        n => Ok(n),
    }
}
