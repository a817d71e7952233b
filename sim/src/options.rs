//! The text form of a device: `PATH?option=value&...`, `mem?size=1GiB`, `null`.

mod images;
mod table;

use crate::config::{Config, ConfigError, NamespaceConfig};
use crate::fault::{Fault, FaultRule, When};
use crate::store::{Memory, Null, Store};
use images::Place;
pub use images::check_space;
use nvme_core::spec::{admin, nvm};
use std::boxed::Box;
use std::format;
use std::path::PathBuf;
use std::string::{String, ToString};
use std::vec::Vec;
pub use table::{CONDITIONS, ConditionRow, FAULTS, FaultRow, OPTIONS, OptionRow, help, markdown};

/// Size of `mem` and `null` without `size`.
const DEFAULT_MEMORY: u64 = 64 << 20;
const DEFAULT_NULL: u64 = 1 << 40;

fn bad(option: &str, why: impl Into<String>) -> ConfigError {
    ConfigError {
        option: option.into(),
        why: why.into(),
        errno: None,
    }
}

/// What the images are opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Commands may write. A missing image is created where `size` says how large it is; no other
    /// process may have it open.
    Write,
    /// No command writes: as with `ro=on`, images are opened for reading, none is created, and others
    /// may read them at the same time.
    Read,
}

/// Makes a controller's configuration out of `text`: `PATH`, `mem` or `null`, then options after a
/// question mark, separated by `&`. Sizes and times have the grammar of [`nvme_units`].
///
/// The options are those of [`OPTIONS`], each at most once but `fault`; see [`parse_fault`]. In the path,
/// `%3F` is a question mark and `%25` a percent sign; [`escape`] writes them. A file called `mem` is `./mem`.
///
/// A file is opened as it is; only when it is missing and `size` is given, it is created, after
/// everything else has been checked, free space included. An image that another process uses is
/// refused: see [`File`](crate::File).
///
/// # Errors
/// Which option is wrong and what it should be. No image was created then.
pub fn parse(text: &str) -> Result<Config, ConfigError> {
    parse_for(text, Access::Write)
}

/// As [`parse`], for what `access` says.
///
/// # Errors
/// As [`parse`].
pub fn parse_for(text: &str, access: Access) -> Result<Config, ConfigError> {
    let (place, mut draft) = draft(text)?;
    draft.ro |= access == Access::Read;
    draft.config.check_values()?;
    if !crate::namespace::FORMATS.contains(&draft.block) {
        return Err(bad("block", "must be 512 or 4096"));
    }
    let stores = match &place {
        Place::Null => draft.each(|bytes| Ok(Box::new(Null::new(bytes)) as _), DEFAULT_NULL)?,
        Place::Memory => draft.each(
            |bytes| match Memory::new(bytes) {
                Some(store) => Ok(Box::new(store) as _),
                None => Err(bad("size", "there is not that much memory")),
            },
            DEFAULT_MEMORY,
        )?,
        Place::Images(path) => {
            let paths = images::paths(path, draft.count);
            let opened = images::open(&paths, &draft, access)?;
            draft.config.created = opened.created;
            opened.stores
        }
    };
    let Draft {
        mut config,
        block,
        meta,
        ro,
        noiob,
        ..
    } = draft;
    for store in stores {
        let mut namespace = NamespaceConfig::new(block, store);
        namespace.metadata_bytes = meta;
        namespace.read_only = ro;
        namespace.noiob = noiob;
        config.namespaces.push(namespace);
    }
    config.check()?;
    Ok(config)
}

/// The image files that `text` names, whether they exist or not; none for `mem` and `null`.
///
/// # Errors
/// As [`parse`], but for what the images themselves are.
pub fn image_paths(text: &str) -> Result<Vec<PathBuf>, ConfigError> {
    let (place, draft) = draft(text)?;
    Ok(match place {
        Place::Images(path) => images::paths(&path, draft.count),
        _ => Vec::new(),
    })
}

/// `path` as it is written before the question mark of a device's text.
pub fn escape(path: &str) -> String {
    path.replace('%', "%25").replace('?', "%3F")
}

type AnyStore = Box<dyn Store + Send + Sync>;

/// What options say, before anything is made of it.
pub(crate) struct Draft {
    config: Config,
    size: Option<u64>,
    block: u32,
    count: u32,
    meta: u16,
    ro: bool,
    noiob: u16,
}

impl Draft {
    fn each(
        &self,
        make: impl Fn(u64) -> Result<AnyStore, ConfigError>,
        default: u64,
    ) -> Result<Vec<AnyStore>, ConfigError> {
        let bytes = self.size.unwrap_or(default);
        self.check_size(bytes)?;
        (0..self.count).map(|_| make(bytes)).collect()
    }

    fn check_size(&self, bytes: u64) -> Result<(), ConfigError> {
        let block = self.block;
        if bytes == 0 || !bytes.is_multiple_of(u64::from(block)) {
            let why = format!("must be a multiple of {block}, and not 0");
            return Err(bad("size", why));
        }
        Ok(())
    }
}

/// Reads the text; looks at no file.
fn draft(text: &str) -> Result<(Place, Draft), ConfigError> {
    let (place, options) = text.split_once('?').unwrap_or((text, ""));
    let place = Place::of(place)?;
    let mut draft = Draft {
        config: Config::empty(),
        size: None,
        block: 4096,
        count: 1,
        meta: 0,
        ro: false,
        noiob: 0,
    };
    let mut seen: Vec<&str> = Vec::new();
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let Some((name, value)) = option.split_once('=') else {
            return Err(bad(option, "write it as name=value"));
        };
        let Some(row) = OPTIONS.iter().find(|row| row.name == name) else {
            return Err(bad(name, unknown(name)));
        };
        if name != "fault" && seen.contains(&name) {
            return Err(bad(name, "is given twice; give it once"));
        }
        seen.push(name);
        (row.set)(&mut draft, value).map_err(|why| bad(name, why))?;
    }
    let queues = draft.config.max_queues;
    for rule in &draft.config.faults.rules {
        if let Some(qid) = rule.when.qid.filter(|qid| *qid > queues) {
            let why = format!("qid={qid} is above the last queue; queues={queues}");
            return Err(bad("fault", why));
        }
    }
    Ok((place, draft))
}

/// What is said of an option that there is not: the nearest that there is, or all of them.
fn unknown(name: &str) -> String {
    let near = |row: &&OptionRow| {
        let (a, b) = (row.name, name);
        !b.is_empty() && (a.starts_with(b) || b.starts_with(a))
    };
    match OPTIONS.iter().find(near) {
        Some(row) => format!("unknown option; did you mean {}=?", row.name),
        None => {
            let names: Vec<&str> = OPTIONS.iter().map(|row| row.name).collect();
            format!("unknown option; there are {}", names.join(", "))
        }
    }
}

/// Parses one fault: `WHAT[:VALUE][@CONDITION,...]`, of [`FAULTS`] and [`CONDITIONS`].
///
/// # Errors
/// What is wrong, blamed on the option `fault`.
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
    let mut when = When::default();
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
    Ok(FaultRule { when, what })
}

/// The opcode of that name or number, and whether it is an admin command's.
fn opcode(text: &str) -> Result<(u8, bool), String> {
    let named: [(&str, u8, bool); 19] = [
        ("identify", admin::opcode::IDENTIFY, true),
        ("create-cq", admin::opcode::CREATE_IO_CQ, true),
        ("create-sq", admin::opcode::CREATE_IO_SQ, true),
        ("delete-cq", admin::opcode::DELETE_IO_CQ, true),
        ("delete-sq", admin::opcode::DELETE_IO_SQ, true),
        ("abort", admin::opcode::ABORT, true),
        ("get-features", admin::opcode::GET_FEATURES, true),
        ("set-features", admin::opcode::SET_FEATURES, true),
        ("get-log-page", admin::opcode::GET_LOG_PAGE, true),
        ("format", admin::opcode::FORMAT_NVM, true),
        ("sanitize", admin::opcode::SANITIZE, true),
        ("flush", nvm::opcode::FLUSH, false),
        ("write", nvm::opcode::WRITE, false),
        ("read", nvm::opcode::READ, false),
        ("compare", nvm::opcode::COMPARE, false),
        ("write-zeroes", nvm::opcode::WRITE_ZEROES, false),
        (
            "write-uncorrectable",
            nvm::opcode::WRITE_UNCORRECTABLE,
            false,
        ),
        ("dsm", nvm::opcode::DATASET_MANAGEMENT, false),
        ("verify", nvm::opcode::VERIFY, false),
    ];
    if let Some((_, code, is_admin)) = named.into_iter().find(|(name, ..)| *name == text) {
        return Ok((code, is_admin));
    }
    let names = named.map(|(name, ..)| name).join(", ");
    match number(text) {
        Ok(code) => Ok((code, false)),
        Err(_) => Err(format!("'{text}' is not 0 to 255 nor one of {names}")),
    }
}

fn number<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let value = nvme_units::parse_number(text)?;
    T::try_from(value).map_err(|_| format!("{text} is too large"))
}

fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" | "1" | "yes" | "true" => Ok(true),
        "off" | "0" | "no" | "false" => Ok(false),
        _ => Err("must be on or off".to_string()),
    }
}

/// A number of bytes with an optional unit.
fn size(text: &str) -> Result<u64, String> {
    nvme_units::parse_bytes(text)
}

/// A time in nanoseconds, with its unit.
fn time(text: &str) -> Result<u64, String> {
    nvme_units::parse_nanoseconds(text)
}

#[cfg(test)]
mod tests;
