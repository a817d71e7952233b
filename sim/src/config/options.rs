//! The text form of a device: `PATH?option=value&...`, `mem?size=1GiB`, `null`, `generated`. The tables of
//! options and faults are in `table` and `faults`; image files are opened last, after everything
//! else was checked.

mod draft;
mod faults;
mod images;
mod table;
mod values;

use crate::config::settings::{Config, ConfigError, NamespaceConfig};
use crate::medium::latency::LatencyProfile;
use crate::medium::store::{GeneratedStore, MemoryStore, NullStore};
pub use draft::ImageAccess;
use draft::{ConfigDraft, bad};
pub use faults::{CONDITIONS, ConditionRow, FAULTS, FaultRow, parse_fault};
use images::StoreLocation;
pub use images::check_space;
use std::boxed::Box;
use std::format;
use std::path::PathBuf;
use std::string::String;
use std::vec::Vec;
pub use table::{OPTIONS, OptionRow, help, markdown};

/// Sizes of `mem`, and of `null` and `generated`, without the option `size`.
const DEFAULT_MEMORY: u64 = 64 << 20;
const DEFAULT_NULL: u64 = 1 << 40;

/// Makes a controller's configuration from `text`: `PATH`, `mem`, `null` or `generated`, then options after a
/// question mark, separated by `&`. Sizes and times have the grammar of [`nvme_units`].
///
/// The options are those of [`OPTIONS`]. Each may be given once, except `fault`; see
/// [`parse_fault`]. In the path, `%3F` is a question mark and `%25` a percent sign; [`escape`]
/// writes them. A file called `mem` is `./mem`.
///
/// An existing file is opened with its size. A missing one is created if `size` is given, after
/// everything else has been checked, free space included. An image that another process uses is
/// rejected: see [`FileStore`](crate::FileStore).
///
/// # Errors
/// The wrong option, and a value that it may have. No image was created then.
pub fn parse(text: &str) -> Result<Config, ConfigError> {
    parse_for(text, ImageAccess::Write)
}

/// Makes a configuration as [`parse`] does, with images opened for `access`.
///
/// # Errors
/// As [`parse`].
pub fn parse_for(text: &str, access: ImageAccess) -> Result<Config, ConfigError> {
    let (place, mut draft) = draft(text)?;
    draft.ro |= access == ImageAccess::Read;
    draft.config.check_values()?;
    if !crate::medium::namespace::FORMATS.contains(&draft.block) {
        return Err(bad("block", "must be 512 or 4096"));
    }
    let stores = match &place {
        StoreLocation::Null => draft.each(
            |bytes| Ok(Box::new(NullStore::new(bytes)) as _),
            DEFAULT_NULL,
        )?,
        StoreLocation::Generated => {
            draft.ro = true;
            draft.each(
                |bytes| Ok(Box::new(GeneratedStore::new(bytes)) as _),
                DEFAULT_NULL,
            )?
        }
        StoreLocation::Memory => draft.each(
            |bytes| match MemoryStore::new(bytes) {
                Some(store) => Ok(Box::new(store) as _),
                None => Err(bad("size", "there is not that much memory")),
            },
            DEFAULT_MEMORY,
        )?,
        StoreLocation::Images(path) => {
            let paths = images::paths(path, draft.count);
            let opened = images::open(&paths, &draft, access)?;
            draft.config.created = opened.created;
            opened.stores
        }
    };
    let ConfigDraft {
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

/// Returns the image files that `text` names, whether they exist or not; none for other kinds of media.
///
/// # Errors
/// As [`parse`], except for errors of the images themselves.
pub fn image_paths(text: &str) -> Result<Vec<PathBuf>, ConfigError> {
    let (place, draft) = draft(text)?;
    Ok(match place {
        StoreLocation::Images(path) => images::paths(&path, draft.count),
        _ => Vec::new(),
    })
}

/// Escapes `path` for the place before the question mark of a device's text. A file with the name of a medium becomes
/// `./mem` and so on.
pub fn escape(path: &str) -> String {
    let escaped = path.replace('%', "%25").replace('?', "%3F");
    match StoreLocation::of(&escaped) {
        Ok(StoreLocation::Null | StoreLocation::Memory | StoreLocation::Generated) => {
            format!("./{escaped}")
        }
        _ => escaped,
    }
}

/// Reads the text without looking at any file.
fn draft(text: &str) -> Result<(StoreLocation, ConfigDraft), ConfigError> {
    let (place, options) = text.split_once('?').unwrap_or((text, ""));
    let place = StoreLocation::of(place)?;
    let mut draft = ConfigDraft {
        config: Config::empty(),
        size: None,
        block: 4096,
        count: 1,
        meta: 0,
        ro: false,
        noiob: 0,
        read_ns: None,
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
    check_effects(&draft, &seen)?;
    if let Some(read_ns) = draft.read_ns {
        draft.config.profile = draft.config.profile.with_latency(read_ns);
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

/// Refuses options that would have no effect beside the others.
fn check_effects(draft: &ConfigDraft, seen: &[&str]) -> Result<(), ConfigError> {
    let config = &draft.config;
    let has_times = config.profile != LatencyProfile::NONE || draft.read_ns.is_some();
    if seen.contains(&"cache") && !config.write_cache {
        return Err(bad("cache", "there is no write cache; leave out wc=off"));
    }
    if config.hmmin > 0 && config.hmpre == 0 {
        let why = "the controller asks for no host memory; give hmpre=, too";
        return Err(bad("hmmin", why));
    }
    if config.faults.seed > 0 && config.faults.rules.is_empty() && !has_times {
        let why = "nothing here is random; give fault=, profile= or latency=, too";
        return Err(bad("seed", why));
    }
    Ok(())
}

/// Returns the message for an unknown option: the nearest known one, or all of them.
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

#[cfg(test)]
mod tests;
