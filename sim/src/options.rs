//! The text form of a device: `PATH?option=value&...`, `mem?size=1GiB`, `null`.

use crate::config::{Config, ConfigError, NamespaceConfig};
use crate::fault::{Fault, FaultRule, When};
use crate::file_store::File;
use crate::latency::Profile;
use crate::store::{Memory, Null, Store};
use nvme_core::spec::Status;
use nvme_core::spec::{admin, nvm};
use std::boxed::Box;
use std::format;
use std::path::Path;
use std::string::{String, ToString};
use std::vec::Vec;

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

/// Makes a controller's configuration out of `text`: `PATH`, `mem` or `null`, then options after a
/// question mark, separated by `&`.
///
/// `size=` and `cache=` (in the grammar of [`nvme_units`], as every size and time here), `block=512|4096`, `ns=` (namespaces of equal
/// size; file images become PATH, PATH.2, ...), `meta=`, `ro=on|off`, `noiob=`, `queues=`, `mqes=`,
/// `mdts=`, `dstrd=`, `mpsmin=`, `mpsmax=`, `cqr=on|off`, `sgl=on|off`, `wc=on|off`, `cache=`,
/// `serial=`, `model=`, `hmpre=`, `hmmin=`, `profile=none|optane|nvme-gen5`, `ready=TIME`,
/// `aborts=`, `aers=`, `seed=`, and `fault=` any number of times (see [`parse_fault`]).
///
/// A file is opened as it is; only when it is missing and `size` is given, it is created.
pub fn parse(text: &str) -> Result<Config, ConfigError> {
    let (place, options) = text.split_once('?').unwrap_or((text, ""));
    if place.is_empty() {
        return Err(bad(
            "device",
            "give a path, mem or null before the question mark",
        ));
    }
    let mut config = Config::empty();
    let mut shape = Shape {
        place,
        size: None,
        block: 4096,
        count: 1,
        meta: 0,
        ro: false,
        noiob: 0,
    };
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let Some((name, value)) = option.split_once('=') else {
            return Err(bad(option, "write it as name=value"));
        };
        set(&mut config, &mut shape, name, value)?;
    }
    for index in 0..shape.count {
        let mut namespace = NamespaceConfig::new(shape.block, shape.store(index)?);
        namespace.metadata_bytes = shape.meta;
        namespace.read_only = shape.ro;
        namespace.noiob = shape.noiob;
        config.namespaces.push(namespace);
    }
    config.check()?;
    Ok(config)
}

struct Shape<'a> {
    place: &'a str,
    size: Option<u64>,
    block: u32,
    count: u32,
    meta: u16,
    ro: bool,
    noiob: u16,
}

impl Shape<'_> {
    fn store(&self, index: u32) -> Result<Box<dyn Store + Send + Sync>, ConfigError> {
        match self.place {
            "null" => Ok(Box::new(Null::new(self.size.unwrap_or(DEFAULT_NULL)))),
            "mem" => {
                let store = Memory::new(self.size.unwrap_or(DEFAULT_MEMORY));
                Ok(Box::new(store.ok_or_else(|| {
                    bad("size", "there is not that much memory")
                })?))
            }
            place => {
                let name = if index == 0 {
                    place.into()
                } else {
                    format!("{place}.{}", index + 1)
                };
                Ok(Box::new(self.file(Path::new(&name))?))
            }
        }
    }

    fn file(&self, path: &Path) -> Result<File, ConfigError> {
        let failed = |error: std::io::Error| ConfigError {
            option: path.display().to_string(),
            why: error.to_string(),
            errno: error.raw_os_error(),
        };
        let store = match (path.exists(), self.size) {
            (false, Some(size)) => {
                let block = u64::from(self.block);
                if size == 0 || !size.is_multiple_of(block) {
                    return Err(bad(
                        "size",
                        format!("must be a multiple of {block}, and not 0"),
                    ));
                }
                File::create(path, size).map_err(failed)?
            }
            (false, None) => {
                let mut error = failed(std::io::ErrorKind::NotFound.into());
                error.why = "no such file; add size= to create it".into();
                error.errno = Some(libc::ENOENT);
                return Err(error);
            }
            (true, _) => File::open(path, self.ro).map_err(failed)?,
        };
        let bytes = store.bytes();
        if self.size.is_some_and(|size| size != bytes) {
            return Err(bad(
                "size",
                format!("{} exists and has {bytes} bytes", path.display()),
            ));
        }
        if bytes == 0 || !bytes.is_multiple_of(u64::from(self.block)) {
            let why = format!("{bytes} bytes are not a multiple of block={}", self.block);
            return Err(bad(&path.display().to_string(), why));
        }
        Ok(store)
    }
}

fn set(
    config: &mut Config,
    shape: &mut Shape<'_>,
    name: &str,
    value: &str,
) -> Result<(), ConfigError> {
    match name {
        "size" => shape.size = Some(size(name, value)?),
        "block" => shape.block = number(name, value)?,
        "ns" => {
            shape.count = number(name, value)?;
            if !(1..=256).contains(&shape.count) {
                return Err(bad(name, "must be 1 to 256"));
            }
        }
        "meta" => shape.meta = number(name, value)?,
        "ro" => shape.ro = switch(name, value)?,
        "noiob" => shape.noiob = number(name, value)?,
        "queues" => config.max_queues = number(name, value)?,
        "mqes" => config.mqes = number(name, value)?,
        "mdts" => config.mdts = number(name, value)?,
        "dstrd" => config.dstrd = number(name, value)?,
        "mpsmin" => config.mpsmin = number(name, value)?,
        "mpsmax" => config.mpsmax = number(name, value)?,
        "cqr" => config.cqr = switch(name, value)?,
        "sgl" => config.sgl = switch(name, value)?,
        "wc" => config.write_cache = switch(name, value)?,
        "cache" => {
            let bytes = usize::try_from(size(name, value)?).ok();
            let bytes = bytes.filter(|bytes| *bytes <= 1 << 32);
            config.cache_bytes = bytes.ok_or_else(|| bad(name, "must be at most 4GiB"))?;
        }
        "serial" => config.serial = value.into(),
        "model" => config.model = value.into(),
        "hmpre" => config.hmpre = number(name, value)?,
        "hmmin" => config.hmmin = number(name, value)?,
        "profile" => {
            config.profile = Profile::named(value)
                .ok_or_else(|| bad(name, "must be none, optane or nvme-gen5"))?;
        }
        "audit" => config.audit = switch(name, value)?,
        "ready" => config.ready_delay_ns = time(name, value)?,
        "aborts" => config.abort_limit = number(name, value)?,
        "aers" => config.aer_limit = number(name, value)?,
        "seed" => config.faults.seed = number(name, value)?,
        "fault" => config.faults.rules.push(parse_fault(value)?),
        _ => {
            return Err(bad(
                name,
                "unknown option; see the list in the documentation",
            ));
        }
    }
    Ok(())
}

/// Parses one fault: `WHAT[:VALUE][@CONDITION,...]`.
///
/// WHAT is drop, delay:TIME, reorder, duplicate, wrongcid:N, wrongphase, badsqhd:N, status:CODE (SCT
/// and SC as one number, 0x281 for an unrecovered read), cfs, allones, stuckready, torncqe. The
/// conditions are qid=N, op=NAME or number, nth=N, every=N and p=PROBABILITY.
pub fn parse_fault(text: &str) -> Result<FaultRule, ConfigError> {
    let (what, conditions) = text.split_once('@').unwrap_or((text, ""));
    let (what, value) = match what.split_once(':') {
        Some((what, value)) => (what, Some(value)),
        None => (what, None),
    };
    let needed = || value.ok_or_else(|| bad("fault", format!("write it as {what}:VALUE")));
    let what = match what {
        "drop" => Fault::Drop,
        "delay" => Fault::Delay(time("fault", needed()?)?),
        "reorder" => Fault::Reorder,
        "duplicate" => Fault::Duplicate,
        "wrongcid" => Fault::WrongCid(number("fault", needed()?)?),
        "wrongphase" => Fault::WrongPhase,
        "badsqhd" => Fault::BadSqhd(number("fault", needed()?)?),
        "status" => {
            let code: u16 = number("fault", needed()?)?;
            if code == 0 || code > 0x7FF {
                return Err(bad(
                    "fault",
                    "a status is 1 to 0x7ff: type times 0x100 plus code",
                ));
            }
            Fault::Status(Status(code))
        }
        "cfs" => Fault::Cfs,
        "allones" => Fault::AllOnes,
        "stuckready" => Fault::StuckReady,
        "torncqe" => Fault::TornCqe,
        _ => return Err(bad("fault", format!("no fault is called {what}"))),
    };
    let mut when = When::default();
    for condition in conditions
        .split(',')
        .filter(|condition| !condition.is_empty())
    {
        let Some((name, value)) = condition.split_once('=') else {
            return Err(bad("fault", format!("write {condition} as name=value")));
        };
        match name {
            "qid" => when.qid = Some(number(name, value)?),
            "op" => {
                let (opcode, is_admin) = opcode(value)?;
                when.opcode = Some(opcode);
                if is_admin {
                    when.qid = Some(0);
                }
            }
            "nth" => when.nth = Some(number(name, value)?),
            "every" => when.every = Some(number(name, value)?),
            "p" => {
                let p = value
                    .parse::<f64>()
                    .ok()
                    .filter(|p| (0.0..=1.0).contains(p));
                let p = p.ok_or_else(|| bad(name, "must be 0 to 1"))?;
                when.per_million = Some((p * 1e6) as u32);
            }
            _ => return Err(bad(name, "no such condition: qid, op, nth, every or p")),
        }
    }
    Ok(FaultRule { when, what })
}

fn opcode(text: &str) -> Result<(u8, bool), ConfigError> {
    let admin_opcode = match text {
        "identify" => Some(admin::opcode::IDENTIFY),
        "create-cq" => Some(admin::opcode::CREATE_IO_CQ),
        "create-sq" => Some(admin::opcode::CREATE_IO_SQ),
        "delete-cq" => Some(admin::opcode::DELETE_IO_CQ),
        "delete-sq" => Some(admin::opcode::DELETE_IO_SQ),
        "abort" => Some(admin::opcode::ABORT),
        "get-features" => Some(admin::opcode::GET_FEATURES),
        "set-features" => Some(admin::opcode::SET_FEATURES),
        "get-log-page" => Some(admin::opcode::GET_LOG_PAGE),
        "format" => Some(admin::opcode::FORMAT_NVM),
        _ => None,
    };
    if let Some(opcode) = admin_opcode {
        return Ok((opcode, true));
    }
    let opcode = match text {
        "flush" => nvm::opcode::FLUSH,
        "write" => nvm::opcode::WRITE,
        "read" => nvm::opcode::READ,
        "compare" => nvm::opcode::COMPARE,
        "write-zeroes" => nvm::opcode::WRITE_ZEROES,
        "dsm" => nvm::opcode::DATASET_MANAGEMENT,
        "verify" => nvm::opcode::VERIFY,
        number_text => number("op", number_text)?,
    };
    Ok((opcode, false))
}

fn number<T: TryFrom<u64>>(name: &str, text: &str) -> Result<T, ConfigError> {
    let value = nvme_units::parse_number(text).map_err(|why| bad(name, why))?;
    T::try_from(value).map_err(|_| bad(name, format!("{text} is too large")))
}

fn switch(name: &str, text: &str) -> Result<bool, ConfigError> {
    match text {
        "on" | "1" | "yes" | "true" => Ok(true),
        "off" | "0" | "no" | "false" => Ok(false),
        _ => Err(bad(name, "must be on or off")),
    }
}

/// A number of bytes with an optional unit.
fn size(name: &str, text: &str) -> Result<u64, ConfigError> {
    nvme_units::parse_bytes(text).map_err(|why| bad(name, why))
}

/// A time in nanoseconds, with its unit.
fn time(name: &str, text: &str) -> Result<u64, ConfigError> {
    nvme_units::parse_nanoseconds(text).map_err(|why| bad(name, why))
}

/// Names of every option, for help texts.
pub fn option_names() -> Vec<&'static str> {
    Vec::from([
        "size", "block", "ns", "meta", "ro", "noiob", "queues", "mqes", "mdts", "dstrd", "mpsmin",
        "mpsmax", "cqr", "sgl", "wc", "cache", "serial", "model", "hmpre", "hmmin", "profile",
        "ready", "aborts", "aers", "audit", "seed", "fault",
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(text: &str) -> String {
        parse(text)
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }

    #[test]
    fn options_become_a_configuration() {
        let text = "mem?size=1MiB&block=512&ns=2&queues=8&mdts=3&mqes=0x100&dstrd=4&profile=optane\
                    &wc=off&seed=7&fault=drop@op=read,nth=5&fault=delay:5ms@qid=1,every=3";
        let config = parse(text).unwrap();
        assert_eq!(config.namespaces.len(), 2);
        assert_eq!(config.namespaces[1].store.bytes(), 1 << 20);
        assert_eq!(
            (config.max_queues, config.mdts, config.mqes, config.dstrd),
            (8, 3, 256, 4)
        );
        assert_eq!(config.profile, Profile::OPTANE);
        assert!(!config.write_cache);
        let rules = &config.faults.rules;
        assert_eq!(
            (rules[0].what, rules[0].when.opcode),
            (Fault::Drop, Some(2))
        );
        assert_eq!(rules[1].what, Fault::Delay(5_000_000));
        assert_eq!(rules[1].when.qid, Some(1));
    }

    #[test]
    fn every_option_name_is_known() {
        for name in option_names() {
            assert!(
                !why(&format!("mem?{name}=~")).contains("unknown option"),
                "{name}"
            );
        }
    }

    #[test]
    fn mistakes_are_named_with_their_option() {
        assert!(why("").starts_with("device: "));
        assert!(why("mem?size=12x").starts_with("size: "));
        assert!(why("mem?size=4095").starts_with("size: "));
        assert!(why("mem?block=1000").starts_with("block: "));
        assert!(why("mem?colour=red").starts_with("colour: unknown"));
        assert!(why("mem?queues").contains("name=value"));
        assert!(why("null?fault=explode").contains("explode"));
        assert!(why("null?fault=status:0").contains("0x7ff"));
        assert!(why("mem?size=99999999TiB").starts_with("size: "));
        assert!(why("/nonexistent/image").contains("add size="));
    }

    #[test]
    fn a_file_is_created_only_when_missing_and_sized() {
        let path = std::env::temp_dir().join(format!("nvme-sim-options-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let name = path.display();
        parse(&format!("{name}?size=8KiB")).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192);
        assert_eq!(
            parse(&format!("{name}")).unwrap().namespaces[0]
                .store
                .bytes(),
            8192
        );
        assert!(why(&format!("{name}?size=16KiB")).contains("exists and has 8192 bytes"));
        std::fs::write(&path, [0; 5000]).unwrap();
        assert!(why(&format!("{name}")).contains("not a multiple"));
        std::fs::remove_file(&path).unwrap();
    }
}
