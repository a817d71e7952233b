//! `get-log`: any log page, as raw bytes.

use crate::admin::passthru::{byte, dword, word};
use crate::common::{DeviceArgs, check_stop, hex, output, progress, say};
use clap::Args;
use nvme_host::core::spec::admin::LogOptions;
use nvme_host::core::spec::{Nsid, log_page};
use nvme_host::units::{parse_bytes, parse_number};
use nvme_host::{Error, Result};
use serde_json::json;

/// Limit of the bytes of a page: the specification's limit may exceed this machine's memory.
const MOST: u64 = 1 << 30;

/// Show a log page in hex, or write its bytes
#[derive(Args)]
pub struct GetLog {
    #[command(flatten)]
    device: DeviceArgs,
    /// Log page identifier, for example 2 (SMART / Health Information)
    #[arg(long, short = 'i', value_parser = byte, required_unless_present = "aen")]
    log_id: Option<u8>,
    /// Bytes to fetch, a multiple of 4; in as many commands as the controller's MDTS asks for
    #[arg(long, short = 'l', value_name = "BYTES", value_parser = parse_bytes, required_unless_present = "aen")]
    log_len: Option<u64>,
    /// Dword 0 of an asynchronous event: fetch the page that it names, 4096 bytes unless --log-len
    #[arg(long, short = 'a', value_name = "DWORD", value_parser = dword, conflicts_with = "log_id")]
    aen: Option<u32>,
    /// Namespace; the default is the controller
    #[arg(long, short = 'n', value_name = "NSID", default_value = "0xffffffff", value_parser = dword)]
    namespace_id: u32,
    /// Log page offset in bytes, a multiple of 4
    #[arg(long, short = 'O', short_alias = 'o', value_name = "BYTES", default_value = "0", value_parser = parse_number)]
    lpo: u64,
    /// Log specific field (7 bits)
    #[arg(long, short = 's', default_value = "0", value_parser = byte)]
    lsp: u8,
    /// Log specific identifier
    #[arg(long, short = 'S', default_value = "0", value_parser = word)]
    lsi: u16,
    /// Retain the asynchronous event that the page belongs to
    #[arg(long, short = 'r')]
    rae: bool,
    /// UUID index (7 bits)
    #[arg(long, short = 'U', value_name = "INDEX", default_value = "0", value_parser = byte)]
    uuid_index: u8,
    /// Command set identifier
    #[arg(long, short = 'y', default_value = "0", value_parser = byte)]
    csi: u8,
    /// Take --lpo as an index into the page's list of structures
    #[arg(long)]
    ot: bool,
    /// Write the bytes to standard output as they are
    #[arg(long, short = 'b', conflicts_with = "json")]
    raw_binary: bool,
}

impl GetLog {
    pub fn run(self) -> Result<()> {
        for (name, value) in [("--lsp", self.lsp), ("--uuid-index", self.uuid_index)] {
            if value > 0x7F {
                return Err(Error::usage(
                    format!("{name} {value:#x} has more than 7 bits"),
                    "use at most 0x7f",
                ));
            }
        }
        // Bits 23:16 of the event name the page.
        let event_page = self.aen.map(|event| (event >> 16) as u8);
        let lid = event_page.or(self.log_id).unwrap_or(0);
        let bytes = self.log_len.unwrap_or(4096);
        let end = self.lpo.checked_add(bytes).filter(|_| bytes <= MOST);
        let end = end.ok_or_else(|| {
            Error::usage(
                format!("{bytes} bytes from offset {} are too many", self.lpo),
                format!("fetch at most {MOST} bytes"),
            )
        })?;
        let options = LogOptions {
            lsp: self.lsp,
            lsi: self.lsi,
            rae: self.rae,
            uuid_index: self.uuid_index,
            csi: self.csi,
            index_offset: self.ot,
        };
        let controller = self.device.start()?;
        let bar = progress::bytes(bytes, "reading");
        let mut stopped = Ok(());
        let nsid = Nsid(self.namespace_id);
        let page = controller.log_page_range(lid, nsid, self.lpo..end, options, |read| {
            bar.set_position(read);
            stopped = check_stop();
        })?;
        bar.finish_and_clear();
        stopped?;
        if (page.len() as u64) < bytes {
            let text = format!(
                "log page {lid:#04x} ends before byte {} of it: {} of {bytes} bytes were read",
                self.lpo + page.len() as u64,
                page.len()
            );
            say::warn(|| format!("warning: {text}"));
        }
        controller.shut_down()?;
        if self.raw_binary {
            return output::bytes(&page);
        }
        let name = log_page::name(lid).unwrap_or("vendor specific");
        if self.device.form.json {
            return output::json(&json!({
                "log_id": lid, "name": name, "nsid": nsid.0, "offset": self.lpo, "bytes": page.len(),
                "data": hex::digits(&page),
            }));
        }
        let head = format!(
            "Device:{} log-id:{lid:#04x} ({name}) namespace-id:{:#x} bytes:{}\n",
            self.device.device,
            nsid.0,
            page.len()
        );
        output::print(&(head + &hex::dump(&page, self.lpo)))
    }
}
