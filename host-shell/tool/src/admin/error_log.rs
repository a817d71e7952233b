//! `error-log`: the entries of the Error Information log page.

use crate::common::{DeviceArgs, number, output};
use clap::Args;
use nvme_host::Result;
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::log_page::{ErrorEntry, lid};
use serde_json::{Value, json};
use zerocopy::FromBytes;

/// Show the error log, the newest entry first
#[derive(Args)]
pub struct ErrorLog {
    #[command(flatten)]
    device: DeviceArgs,
    /// Entries to fetch; all that the controller keeps when missing
    #[arg(long, short = 'e', value_parser = number::<u32>(1..=0xFFFF_FFFF))]
    log_entries: Option<u32>,
}

impl ErrorLog {
    pub fn run(self) -> Result<()> {
        let controller = self.device.start()?;
        let most = u32::from(controller.identify().elpe) + 1;
        let wanted = self.log_entries.unwrap_or(most);
        let entries = wanted.min(most) as usize;
        let bytes =
            controller.log_page(lid::ERROR, Nsid::ALL, entries * size_of::<ErrorEntry>())?;
        let entries: Vec<ErrorEntry> = bytes
            .chunks_exact(size_of::<ErrorEntry>())
            .filter_map(|bytes| ErrorEntry::read_from_bytes(bytes).ok())
            .filter(|entry| entry.error_count != 0)
            .collect();
        if self.device.form.json {
            let list: Value = entries.iter().map(to_json).collect();
            return output::json(&json!({ "errors": list }));
        }
        let mut text = format!("Error Log Entries for device entries:{}\n", entries.len());
        for entry in &entries {
            text.push_str(&format!(
                "error_count:{} sqid:{} cmdid:{:#x} status:{} parm_err_loc:{:#x} lba:{:#x} nsid:{:#x}\n",
                entry.error_count,
                entry.sqid,
                entry.cid,
                entry.status(),
                entry.parameter_error_location,
                entry.lba,
                entry.nsid
            ));
        }
        output::print(&text)
    }
}

fn to_json(entry: &ErrorEntry) -> Value {
    json!({
        "error_count": entry.error_count,
        "sqid": entry.sqid,
        "cmdid": entry.cid,
        "status_field": entry.phase_status >> 1,
        "status_text": entry.status().to_string(),
        "phase_tag": entry.phase_status & 1,
        "parm_error_location": entry.parameter_error_location,
        "lba": entry.lba,
        "nsid": entry.nsid,
        "vs": entry.vendor_log_page,
        "trtype": entry.trtype,
        "cs": entry.command_specific,
        "trtype_spec_info": entry.trtype_specific,
    })
}
