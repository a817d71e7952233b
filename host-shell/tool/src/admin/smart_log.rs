//! `smart-log`: the SMART / Health Information log page.

use crate::common::{DeviceArgs, hex, number, output};
use clap::Args;
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::log_page::{SmartData, critical_warning, lid, u128};
use nvme_host::{Error, Result};
use serde_json::{Value, json};
use zerocopy::FromBytes;

const WARNINGS: [(u64, &str); 6] = [
    (critical_warning::SPARE as u64, "available spare is low"),
    (critical_warning::TEMPERATURE as u64, "temperature"),
    (
        critical_warning::RELIABILITY as u64,
        "reliability is degraded",
    ),
    (critical_warning::READ_ONLY as u64, "read only"),
    (
        critical_warning::BACKUP as u64,
        "volatile memory backup failed",
    ),
    (
        critical_warning::PERSISTENT_MEMORY as u64,
        "persistent memory region is read only",
    ),
];

/// Identify Controller, LPA: the SMART log can be had for each namespace.
const LPA_SMART_PER_NAMESPACE: u8 = 1;

/// Show the SMART / health log
#[derive(Args)]
pub struct SmartLog {
    #[command(flatten)]
    device: DeviceArgs,
    /// Namespace, where the controller keeps a log for each; the whole controller when missing
    #[arg(long, short = 'n', value_name = "NSID", value_parser = number::<u32>(1..=0xFFFF_FFFF))]
    namespace_id: Option<u32>,
}

impl SmartLog {
    pub fn run(self) -> Result<()> {
        let controller = self.device.start()?;
        let nsid = self.namespace_id.map_or(Nsid::ALL, Nsid);
        if nsid != Nsid::ALL {
            controller.identify_namespace(nsid)?;
            if controller.identify().lpa & LPA_SMART_PER_NAMESPACE == 0 {
                return Err(Error::usage(
                    "the controller keeps one SMART log for all namespaces",
                    "leave --namespace-id out",
                ));
            }
        }
        let bytes = controller.log_page(lid::SMART, nsid, size_of::<SmartData>())?;
        let smart = SmartData::read_from_bytes(&bytes)
            .map_err(|_| Error::internal("the log is not 512 bytes"))?;
        let title = "Smart Log for NVME device";
        if self.device.form.json {
            return output::json(&to_json(&smart));
        }
        let mut object = to_json(&smart);
        let kelvins = u16::from_le_bytes(smart.temperature);
        object["temperature"] = match kelvins {
            // NVMe Base 2.0c, "SMART / Health Information": 0 is not reported.
            0 => json!("not reported"),
            _ => json!(format!("{} C ({kelvins} K)", i32::from(kelvins) - 273)),
        };
        object["critical_warning"] = json!(hex::bits(smart.critical_warning.into(), &WARNINGS));
        for name in ["avail_spare", "spare_thresh", "percent_used"] {
            object[name] = json!(format!("{} %", object[name]));
        }
        output::table(title, &object)
    }
}

fn to_json(smart: &SmartData) -> Value {
    let count = |bytes: &[u8; 16]| {
        u64::try_from(u128(bytes)).map_or_else(|_| json!(u128(bytes).to_string()), |n| json!(n))
    };
    let mut object = json!({
        "critical_warning": smart.critical_warning,
        "temperature": u16::from_le_bytes(smart.temperature),
        "avail_spare": smart.available_spare,
        "spare_thresh": smart.spare_threshold,
        "percent_used": smart.percentage_used,
        "endurance_grp_critical_warning_summary": smart.endurance_group_warning,
        "data_units_read": count(&smart.data_units_read),
        "data_units_written": count(&smart.data_units_written),
        "host_read_commands": count(&smart.host_reads),
        "host_write_commands": count(&smart.host_writes),
        "controller_busy_time": count(&smart.busy_minutes),
        "power_cycles": count(&smart.power_cycles),
        "power_on_hours": count(&smart.power_on_hours),
        "unsafe_shutdowns": count(&smart.unsafe_shutdowns),
        "media_errors": count(&smart.media_errors),
        "num_err_log_entries": count(&smart.error_log_entries),
        "warning_temp_time": smart.warning_minutes,
        "critical_comp_time": smart.critical_minutes,
        "thm_temp1_trans_count": smart.tmt1_transitions,
        "thm_temp2_trans_count": smart.tmt2_transitions,
        "thm_temp1_total_time": smart.tmt1_seconds,
        "thm_temp2_total_time": smart.tmt2_seconds,
    });
    for (index, kelvins) in smart
        .temperature_sensors
        .iter()
        .enumerate()
        .filter(|(_, kelvins)| **kelvins != 0)
    {
        object[format!("temperature_sensor_{}", index + 1)] = json!(kelvins);
    }
    object
}
