//! `get-feature` and `set-feature`: one feature, as numbers and as text.

use crate::common::{NamespaceArgs, WriteArgs, output};
use clap::{Args, ValueEnum};
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::admin::Select;
use nvme_host::core::spec::feature::{self, fid};
use nvme_host::units::parse_number;
use nvme_host::{Error, Result};
use serde_json::{Value, json};

/// Show the value of a feature
#[derive(Args)]
pub struct GetFeature {
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// Feature identifier, for example 0x07 (Number of Queues)
    #[arg(long, short = 'f', value_parser = parse_number)]
    feature_id: u64,
    /// Which value
    #[arg(long, short = 's', value_enum, default_value = "current")]
    sel: Sel,
    /// Command dword 11
    #[arg(long, value_parser = parse_number, default_value = "0")]
    cdw11: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Sel {
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
    namespace: NamespaceArgs,
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
            Sel::Current => Select::Current,
            Sel::Default => Select::Default,
            Sel::Saved => Select::Saved,
            Sel::Capabilities => Select::Capabilities,
        };
        // Capabilities come in dword 0 alone, also for features with data.
        let bytes = if sel == Select::Capabilities {
            0
        } else {
            data_bytes(fid)
        };
        let controller = self.namespace.device.start()?;
        let nsid = self.namespace.nsid();
        controller.identify_namespace(nsid)?;
        let nsid = if is_per_namespace(fid) {
            nsid
        } else {
            Nsid::NONE
        };
        let (value, data) = controller.get_feature(fid, sel, nsid, cdw11, bytes)?;
        let name = feature::name(fid).unwrap_or("vendor specific");
        let fields = if sel == Select::Capabilities {
            capabilities(value)
        } else {
            decoded(fid, value)
        };
        if self.namespace.device.json {
            let hex: String = data.iter().map(|byte| format!("{byte:02x}")).collect();
            let mut object = json!({
                "feature": format!("{fid:#04x}"),
                "name": name,
                "current_value": format!("{value:#010x}"),
                "value": value,
                "fields": fields,
            });
            if !data.is_empty() {
                object["data"] = json!(hex);
            }
            return output::json(&object);
        }
        output::table(
            &format!("get-feature:{fid:#04x} ({name}), value:{value:#010x}"),
            &fields,
        )
    }
}

impl SetFeature {
    pub fn run(self) -> Result<()> {
        let (fid, value) = (id(self.feature_id)?, dword(self.value)?);
        if data_bytes(fid) > 0 || matches!(fid, fid::NUMBER_OF_QUEUES | fid::HOST_MEMORY_BUFFER) {
            return Err(Error::usage(
                format!("feature {fid:#04x} is set by the driver itself"),
                "choose a feature whose value is command dword 11",
            ));
        }
        let device = &self.namespace.device;
        let controller =
            device.start_writing(&self.write, "set-feature", &self.namespace.config())?;
        let nsid = self.namespace.nsid();
        controller.identify_namespace(nsid)?;
        let nsid = if is_per_namespace(fid) {
            nsid
        } else {
            Nsid::NONE
        };
        let dw0 = controller.set_feature(fid, nsid, value)?;
        let name = feature::name(fid).unwrap_or("vendor specific");
        if self.namespace.device.json {
            return output::json(
                &json!({ "feature": format!("{fid:#04x}"), "value": value, "result": dw0 }),
            );
        }
        output::print(&format!(
            "set-feature:{fid:#04x} ({name}), value:{value:#010x}"
        ))
    }
}

fn is_per_namespace(fid: u8) -> bool {
    matches!(
        fid,
        fid::LBA_RANGE_TYPE
            | fid::ERROR_RECOVERY
            | fid::RESERVATION_NOTIFICATION
            | fid::RESERVATION_PERSISTENCE
            | fid::WRITE_PROTECTION
    )
}

/// Bytes of data that Get Features returns beside dword 0.
pub fn data_bytes(fid: u8) -> usize {
    match fid {
        fid::LBA_RANGE_TYPE => 4096,
        fid::AUTONOMOUS_POWER => feature::AUTONOMOUS_POWER_BYTES,
        fid::HOST_MEMORY_BUFFER => 4096,
        fid::TIMESTAMP => 8,
        fid::HOST_BEHAVIOR => 512,
        fid::HOST_IDENTIFIER => 16,
        _ => 0,
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
