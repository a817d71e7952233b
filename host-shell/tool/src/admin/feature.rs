//! `get-feature` and `set-feature`: one feature, as numbers and as text.

use crate::admin::passthru::dword as bits32;
use crate::common::images::CommandFiles;
use crate::common::{DeviceArgs, WriteArgs, hex, output};
use clap::{Args, ValueEnum};
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::admin::FeatureSelect;
use nvme_host::core::spec::feature::{self, fid};
use nvme_host::passthru::is_set_by_driver;
use nvme_host::units::parse_number;
use nvme_host::{Controller, ControllerConfig, Error, Result};
use serde_json::{Value, json};

/// A device, and what a feature of it belongs to.
#[derive(Args)]
struct ScopeArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Namespace of a feature that belongs to one: 1 when missing, 0 for none, 0xffffffff for all
    #[arg(long, short = 'n', value_name = "NSID", value_parser = bits32)]
    namespace_id: Option<u32>,
}

impl ScopeArgs {
    /// Returns the options for a command that changes feature `fid`: of one namespace, or else of the subsystem.
    fn config(&self, fid: u8) -> Result<ControllerConfig> {
        let config = self.device.config();
        Ok(match self.nsid(fid)? {
            Nsid::NONE | Nsid::ALL => config,
            Nsid(nsid) => ControllerConfig {
                changes: Some(nvme_host::sysfs::CommandScope::Namespace(nsid)),
                ..config
            },
        })
    }

    /// Returns the NSID of a command for feature `fid`. One namespace is refused for a feature of the controller.
    fn nsid(&self, fid: u8) -> Result<Nsid> {
        let nsid = match (self.namespace_id, scope(fid)) {
            (Some(given), _) => Nsid(given),
            (None, FeatureScope::Namespace) => Nsid(1),
            (None, _) => Nsid::NONE,
        };
        let is_one = nsid != Nsid::NONE && nsid != Nsid::ALL;
        if is_one && scope(fid) == FeatureScope::Controller {
            return Err(Error::usage(
                format!("feature {fid:#04x} is one of the controller, not of namespace {nsid}"),
                "leave out --namespace-id",
            ));
        }
        Ok(nsid)
    }

    /// Does the same as [`nsid`](Self::nsid), and refuses a namespace that the controller does not have.
    fn nsid_of(&self, controller: &Controller, fid: u8) -> Result<Nsid> {
        let nsid = self.nsid(fid)?;
        if nsid != Nsid::NONE && nsid != Nsid::ALL {
            controller.identify_namespace(nsid)?;
        }
        Ok(nsid)
    }
}

/// Show the value of a feature, and its data where it has some
#[derive(Args)]
pub struct GetFeature {
    #[command(flatten)]
    scope: ScopeArgs,
    /// Feature identifier, for example 0x07 (Number of Queues)
    #[arg(long, short = 'f', value_parser = parse_number)]
    feature_id: u64,
    /// The value to read
    #[arg(long, short = 's', value_enum, default_value = "current")]
    sel: FeatureValue,
    /// Command dword 11
    #[arg(long, value_parser = parse_number, default_value = "0")]
    cdw11: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum FeatureValue {
    #[value(alias = "0")]
    Current,
    #[value(alias = "1")]
    Default,
    #[value(alias = "2")]
    Saved,
    #[value(alias = "3")]
    Capabilities,
}

/// Set the value of a feature until the next reset (which this program does at its next start)
#[derive(Args)]
pub struct SetFeature {
    #[command(flatten)]
    scope: ScopeArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// Feature identifier, for example 0x06 (Volatile Write Cache)
    #[arg(long, short = 'f', value_parser = parse_number)]
    feature_id: u64,
    /// Command dword 11
    #[arg(long, short = 'V', value_parser = parse_number)]
    value: u64,
}

fn id(number: u64) -> Result<u8> {
    u8::try_from(number)
        .ok()
        .filter(|fid| *fid != 0)
        .ok_or_else(|| {
            Error::usage(
                format!("there is no feature {number:#x}"),
                "use 0x01 to 0xff",
            )
        })
}

fn dword(number: u64) -> Result<u32> {
    u32::try_from(number).map_err(|_| {
        Error::usage(
            format!("{number:#x} has more than 32 bits"),
            "use at most 0xffffffff",
        )
    })
}

impl GetFeature {
    pub fn run(self) -> Result<()> {
        let (fid, cdw11) = (id(self.feature_id)?, dword(self.cdw11)?);
        let sel = match self.sel {
            FeatureValue::Current => FeatureSelect::Current,
            FeatureValue::Default => FeatureSelect::Default,
            FeatureValue::Saved => FeatureSelect::Saved,
            FeatureValue::Capabilities => FeatureSelect::Capabilities,
        };
        let device = &self.scope.device;
        // A namespace that the feature does not have is refused before the device is opened.
        self.scope.nsid(fid)?;
        let controller = device.start()?;
        let nsid = self.scope.nsid_of(&controller, fid)?;
        let (value, data) = controller.get_feature(fid, sel, nsid, cdw11)?;
        let name = feature::name(fid).unwrap_or("vendor specific");
        let fields = if sel == FeatureSelect::Capabilities {
            capabilities(value)
        } else {
            decoded(fid, value)
        };
        if device.form.json {
            let mut object = json!({
                "feature": format!("{fid:#04x}"),
                "name": name,
                "current_value": format!("{value:#010x}"),
                "value": value,
                "fields": fields,
            });
            if !data.is_empty() {
                object["data"] = json!(hex::digits(&data));
            }
            return output::json(&object);
        }
        output::table(
            &format!("get-feature:{fid:#04x} ({name}), value:{value:#010x}"),
            &fields,
        )?;
        match data.is_empty() {
            true => Ok(()),
            false => output::print(hex::dump(&data, 0).trim_end()),
        }
    }
}

impl SetFeature {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let (fid, value) = (id(self.feature_id)?, dword(self.value)?);
        if is_set_by_driver(fid) {
            return Err(Error::usage(
                format!("feature {fid:#04x} is set by the driver itself"),
                "choose a feature whose value is command dword 11",
            ));
        }
        if let Some(bytes @ 1..) = feature::data_bytes(fid) {
            return Err(Error::usage(
                format!("feature {fid:#04x} is set by {bytes} bytes of data, not by a value"),
                format!("use `nvme-gpu admin-passthru -O 9 -4 {fid:#x} -l {bytes} -i FILE`"),
            ));
        }
        let device = &self.scope.device;
        let config = self.scope.config(fid)?;
        let controller = device.start_writing(&self.write, "set-feature", &config)?;
        let nsid = self.scope.nsid_of(&controller, fid)?;
        let dw0 = controller.set_feature(fid, nsid, value)?;
        files.keep_created();
        let name = feature::name(fid).unwrap_or("vendor specific");
        if device.form.json {
            return output::json(
                &json!({ "feature": format!("{fid:#04x}"), "value": value, "result": dw0 }),
            );
        }
        output::print(&format!(
            "set-feature:{fid:#04x} ({name}), value:{value:#010x}"
        ))
    }
}

/// Object that a feature belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FeatureScope {
    Namespace,
    Controller,
    /// The scope of a vendor's feature, or of one that is newer than this program, is unknown: the user states it.
    Unknown,
}

/// Returns the scope of a feature. NVMe Base 2.0c, 5.27.1 (Feature Specific Information), "Set
/// Features - Feature Identifiers".
fn scope(fid: u8) -> FeatureScope {
    match fid {
        fid::LBA_RANGE_TYPE
        | fid::ERROR_RECOVERY
        | fid::NAMESPACE_METADATA
        | fid::RESERVATION_NOTIFICATION
        | fid::RESERVATION_PERSISTENCE
        | fid::WRITE_PROTECTION => FeatureScope::Namespace,
        _ if feature::name(fid).is_some() => FeatureScope::Controller,
        _ => FeatureScope::Unknown,
    }
}

fn capabilities(value: u32) -> Value {
    let value = feature::Capabilities(value);
    json!({ "saveable": value.saveable(), "namespace_specific": value.namespace_specific(), "changeable": value.changeable() })
}

fn decoded(fid: u8, value: u32) -> Value {
    match fid {
        fid::ARBITRATION => {
            let value = feature::Arbitration(value);
            json!({ "ab": value.ab(), "lpw": value.lpw_z(), "mpw": value.mpw_z(), "hpw": value.hpw_z() })
        }
        fid::POWER_MANAGEMENT => {
            json!({ "ps": feature::PowerManagement(value).ps(), "wh": feature::PowerManagement(value).wh() })
        }
        fid::TEMPERATURE => {
            let value = feature::TemperatureThreshold(value);
            json!({ "tmpth": value.tmpth(), "celsius": i32::from(value.tmpth()) - 273 })
        }
        fid::ERROR_RECOVERY => {
            json!({ "tler": feature::ErrorRecovery(value).tler(), "dulbe": feature::ErrorRecovery(value).dulbe() })
        }
        fid::VOLATILE_WRITE_CACHE => json!({ "wce": feature::VolatileWriteCache(value).wce() }),
        fid::NUMBER_OF_QUEUES => {
            let value = feature::NumberOfQueues(value);
            json!({ "nsqa": value.nsq_z(), "ncqa": value.ncq_z(), "submission_queues": u32::from(value.nsq_z()) + 1, "completion_queues": u32::from(value.ncq_z()) + 1 })
        }
        fid::INTERRUPT_COALESCING => {
            json!({ "thr": feature::InterruptCoalescing(value).thr_z(), "time": feature::InterruptCoalescing(value).time() })
        }
        fid::WRITE_ATOMICITY => json!({ "dn": feature::WriteAtomicity(value).dn() }),
        fid::AUTONOMOUS_POWER => json!({ "apste": feature::AutonomousPower(value).apste() }),
        _ => json!({}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use nvme_host::sysfs::CommandScope;

    #[derive(Parser)]
    struct FeatureLine {
        #[command(flatten)]
        scope: ScopeArgs,
    }

    /// Namespace 1 alone was looked at for users of what is set in the whole controller.
    #[test]
    fn a_feature_of_the_controller_is_judged_by_all_of_its_namespaces() {
        let (vendor, cache) = (0xc0, fid::VOLATILE_WRITE_CACHE);
        let changes = |fid: u8, options: &str| {
            let words = format!("set-feature -d sim:mem {options}");
            let line = FeatureLine::try_parse_from(words.split_whitespace()).unwrap();
            let config = line.scope.config(fid);
            config
                .map(|config| config.changes)
                .map_err(|error| error.to_string())
        };
        let all = ControllerConfig::default().changes;
        assert_eq!(changes(cache, ""), Ok(all));
        assert_eq!(changes(cache, "-n 0"), Ok(all));
        assert_eq!(changes(vendor, ""), Ok(all));
        assert_eq!(changes(vendor, "-n 0xffffffff"), Ok(all));
        assert_eq!(
            changes(vendor, "-n 3"),
            Ok(Some(CommandScope::Namespace(3)))
        );
        let recovery = fid::ERROR_RECOVERY;
        assert_eq!(changes(recovery, ""), Ok(Some(CommandScope::Namespace(1))));
        assert_eq!(
            changes(recovery, "-n 2"),
            Ok(Some(CommandScope::Namespace(2)))
        );
        let refused = changes(cache, "-n 2").unwrap_err();
        assert!(
            refused.contains("is one of the controller, not of namespace 2"),
            "{refused}"
        );
    }
}
