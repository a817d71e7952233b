//! Every option of a device's text, declared once: its parser together with its default and help,
//! from which `--help` and the table in docs/simulator.md are made.

use super::draft::ConfigDraft;
use super::faults::{CONDITIONS, FAULTS, parse_fault};
use super::values::{number, size, switch, time};
use crate::medium::latency::LatencyProfile;
use std::format;
use std::string::{String, ToString};

/// An option of the text form: `NAME=VALUE`.
pub struct OptionRow {
    /// Name.
    pub name: &'static str,
    /// Form of the value.
    pub value: &'static str,
    /// Value without the option, or the effect of leaving it out.
    pub default: &'static str,
    /// Meaning, for the help.
    pub help: &'static str,
    pub(super) set: fn(&mut ConfigDraft, &str) -> Result<(), String>,
}

macro_rules! options {
    ($($name:literal $value:literal [$default:literal] $help:literal => $set:expr;)*) => {
        &[$(OptionRow { name: $name, value: $value, default: $default, help: $help, set: $set }),*]
    };
}

/// Makes a setter that stores a parsed value in a field.
macro_rules! put {
    ($parse:ident => $($place:ident).+) => {
        |draft, text| {
            draft.$($place).+ = $parse(text)?;
            Ok(())
        }
    };
}

/// The options of `sim:`.
pub const OPTIONS: &[OptionRow] = options! {
    "size" "SIZE" ["the size of the image; 64MiB for mem, 1TiB for null, 1TiB for generated"]
        "bytes of each namespace; creates a missing image" => |draft, text| {
            draft.size = Some(size(text)?);
            Ok(())
        };
    "block" "512|4096" ["4096"] "bytes of a logical block" => put!(number => block);
    "ns" "COUNT" ["1"] "namespaces, 1 to 256; images are PATH, PATH.2, ..." => |draft, text| {
        draft.count = number(text)?;
        match draft.count {
            1..=256 => Ok(()),
            _ => Err("must be 1 to 256".into()),
        }
    };
    "meta" "BYTES" ["0"] "metadata of each block, in a buffer apart, kept in memory" => put!(number => meta);
    "ro" "on|off" ["off"] "writes are refused; the image is opened for reading" => put!(switch => ro);
    "noiob" "BLOCKS" ["0"] "optimal I/O boundary; 0 is none" => put!(number => noiob);
    "queues" "COUNT" ["64"] "I/O queue pairs, 1 to 4095" => put!(number => config.max_queues);
    "mqes" "ENTRIES" ["4096"] "the longest queue, 2 to 65536" => put!(number => config.mqes);
    "mdts" "N" ["5"] "a command moves at most 2^N pages of MPSMIN; 0 is no limit" => put!(number => config.mdts);
    "dstrd" "N" ["0"] "doorbells are 4 << N bytes apart, 0 to 10" => put!(number => config.dstrd);
    "mpsmin" "N" ["0"] "the smallest page is 4096 << N bytes, 0 to 4" => put!(number => config.mpsmin);
    "mpsmax" "N" ["4"] "the largest page is 4096 << N bytes, MPSMIN to 4" => put!(number => config.mpsmax);
    "cqr" "on|off" ["on"] "queues must be physically contiguous" => put!(switch => config.cqr);
    "sgl" "on|off" ["on"] "SGLs for I/O commands" => put!(switch => config.sgl);
    "wc" "on|off" ["on"] "a volatile write cache: a power cut takes what was not flushed" =>
        put!(switch => config.write_cache);
    "cache" "SIZE" ["16MiB"] "bytes of each namespace that the write cache holds, at most 4GiB" => |draft, text| {
        let bytes = usize::try_from(size(text)?).ok();
        let bytes = bytes.filter(|bytes| *bytes <= 1 << 32);
        draft.config.cache_bytes = bytes.ok_or("must be at most 4GiB")?;
        Ok(())
    };
    "serial" "TEXT" ["SIM00000000000000001"] "serial number, at most 20 printable characters" => |draft, text| {
        draft.config.serial = printable(text, 20)?;
        Ok(())
    };
    "model" "TEXT" ["nvme-gpu simulated controller"] "model number, at most 40 printable characters" => |draft, text| {
        draft.config.model = printable(text, 40)?;
        Ok(())
    };
    "hmpre" "UNITS" ["0"] "preferred host memory buffer in units of 4 KiB; 0 is none" => put!(number => config.hmpre);
    "hmmin" "UNITS" ["0"] "the least host memory buffer in units of 4 KiB" => put!(number => config.hmmin);
    "profile" "none|optane|nvme-gen5" ["none"] "how long commands take" => |draft, text| {
        draft.config.profile = LatencyProfile::named(text).ok_or("must be none, optane or nvme-gen5")?;
        Ok(())
    };
    "latency" "TIME" ["that of the profile"] "latency of Read, Compare and Verify, whose rate stays that of the profile" =>
        |draft, text| {
            draft.read_ns = Some(time(text)?);
            Ok(())
        };
    "ready" "TIME" ["0ns"] "from a change of CC.EN to that of CSTS.RDY" => put!(time => config.ready_delay_ns);
    "sanitize" "TIME" ["0ns"] "one pass of a sanitize operation; 0ns is as fast as the image is" =>
        put!(time => config.sanitize_ns);
    "aborts" "COUNT" ["4"] "Abort commands outstanding at the same time, 1 to 256" => put!(number => config.abort_limit);
    "aers" "COUNT" ["4"] "Asynchronous Event Requests outstanding at the same time, 1 to 256" =>
        put!(number => config.aer_limit);
    "audit" "on|off" ["off"] "a protocol auditor watches and reports on standard error" => put!(switch => config.audit);
    "threads" "COUNT" ["1"] "threads that serve the queues, 1 to 64" => put!(number => config.threads);
    "seed" "NUMBER" ["0"] "seed of the faults with a probability" => put!(number => config.faults.seed);
    "fault" "FAULT" ["none"] "what goes wrong; may be given several times" => |draft, text| {
        let rule = parse_fault(text).map_err(|error| error.why)?;
        draft.config.faults.rules.push(rule);
        Ok(())
    };
};

fn printable(text: &str, most: usize) -> Result<String, String> {
    let plain = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    if text.is_empty() || text.len() > most || !plain {
        return Err(format!("must be 1 to {most} printable ASCII characters"));
    }
    Ok(text.to_string())
}

/// Returns the three tables as text for `--help`: one entry a line, at most `width` columns.
pub fn help(width: usize) -> String {
    let mut text = String::from("Options of sim:, after ? and separated by &:\n");
    let line = |text: &mut String, head: String, help: String| {
        const INDENT: usize = 24;
        let mut column = 2 + head.len();
        *text += &format!("  {head}");
        if column + 1 > INDENT {
            text.push('\n');
            column = 0;
        }
        *text += &" ".repeat(INDENT - column);
        column = INDENT;
        for (i, word) in help.split(' ').enumerate() {
            if i != 0 && column + 1 + word.len() > width {
                *text += &format!("\n{}", " ".repeat(INDENT));
                column = INDENT;
            } else if i != 0 {
                text.push(' ');
                column += 1;
            }
            *text += word;
            column += word.len();
        }
        text.push('\n');
    };
    for row in OPTIONS {
        let help = format!("{} [{}]", row.help, row.default);
        line(&mut text, format!("{}={}", row.name, row.value), help);
    }
    text += "\nFaults, as fault=NAME[:VALUE][@CONDITION,...]:\n";
    for row in FAULTS {
        let value = if row.value.is_empty() { "" } else { ":" };
        line(
            &mut text,
            format!("{}{value}{}", row.name, row.value),
            row.help.to_string(),
        );
    }
    text += "\nConditions of a fault:\n";
    for row in CONDITIONS {
        line(
            &mut text,
            format!("{}={}", row.name, row.value),
            row.help.to_string(),
        );
    }
    text
}

/// Returns the three tables as lists, as docs/simulator.md has them.
pub fn markdown() -> String {
    let mut text = String::from("Options, with their defaults:\n\n");
    for row in OPTIONS {
        let head = format!("`{}={}`", row.name, row.value);
        text += &entry(&format!("{head} ({}): {}", row.default, row.help));
    }
    text += "\nFaults:\n\n";
    for row in FAULTS {
        let value = if row.value.is_empty() { "" } else { ":" };
        text += &entry(&format!("`{}{value}{}`: {}", row.name, row.value, row.help));
    }
    text += "\nConditions of a fault:\n\n";
    for row in CONDITIONS {
        text += &entry(&format!("`{}={}`: {}", row.name, row.value, row.help));
    }
    text
}

/// Returns an entry of a list in lines of at most 120 columns.
fn entry(text: &str) -> String {
    let mut lines = String::from("-");
    let mut column = 1;
    for word in text.split(' ') {
        if column + 1 + word.len() > 120 {
            lines += "\n ";
            column = 1;
        }
        lines += &format!(" {word}");
        column += 1 + word.len();
    }
    lines + "\n"
}
