//! `format`: other blocks, and an empty namespace.

use crate::admin::passthru::{byte, dword};
use crate::common::images::CommandFiles;
use crate::common::{DeviceArgs, WriteArgs, duration, output, progress, say};
use clap::Args;
use nvme_host::core::bringup::NamespaceInfo;
use nvme_host::core::spec::Nsid;
use nvme_host::core::spec::admin::Format as Settings;
use nvme_host::units::parse_bytes;
use nvme_host::{Controller, Error, Result};
use serde_json::{Value, json};
use std::time::Duration;

/// Format a namespace: its data is lost, its blocks may get another size
#[derive(Args)]
pub struct FormatCommand {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// Namespace; 0xffffffff for all
    #[arg(long, short = 'n', value_name = "NSID", value_parser = dword)]
    namespace_id: u32,
    /// Index of the LBA format; the present one when missing, which all namespaces of the command must share
    #[arg(long, short = 'l', value_name = "INDEX", value_parser = byte, conflicts_with = "block_size")]
    lbaf: Option<u8>,
    /// Bytes per block: the first LBA format that has them, without metadata
    #[arg(long, short = 'b', value_name = "BYTES", value_parser = parse_bytes)]
    block_size: Option<u64>,
    /// Secure erase: 0 none, 1 user data erase, 2 cryptographic erase
    #[arg(long, short = 's', default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    ses: u8,
    /// Protection information: 0 none, 1 to 3 its type
    #[arg(long, short = 'i', default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pi: u8,
    /// Place of the protection information: 0 last, 1 first in the metadata
    #[arg(long, short = 'p', default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    pil: u8,
    /// Place of the metadata: 0 apart, 1 behind each block in the data buffer
    #[arg(long, short = 'm', default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=1))]
    ms: u8,
    /// Time limit of the format; then the controller is reset
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration)]
    wait: Duration,
}

impl FormatCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let device = &self.device;
        let controller = device.start_writing(&self.write, "format", &device.config())?;
        let nsid = Nsid(self.namespace_id);
        let mut settings = Settings::new(self.index(&controller, nsid)?, self.ses);
        settings.set_pi(self.pi);
        settings.set_pil(self.pil == 1);
        settings.set_mset(self.ms == 1);
        let bar = progress::spinner("formatting");
        let formatted = controller.format(nsid, settings, self.wait, |percent| {
            bar.set_message(format!("formatting: {percent} %"));
        });
        bar.finish_and_clear();
        let now = formatted?;
        files.keep_created();
        controller.shut_down()?;
        for info in now.iter().filter(|info| !info.is_supported()) {
            say::warn(|| {
                format!(
                    "warning: namespace {} has {} bytes of metadata now, which read and write do not support",
                    info.nsid, info.metadata_bytes
                )
            });
        }
        if device.form.json {
            let list: Value = now.iter().map(to_json).collect();
            return output::json(&json!({ "formatted": list }));
        }
        let lines: Vec<String> = now
            .iter()
            .map(|info| {
                let (blocks, bytes) = (info.blocks, info.block_bytes);
                format!(
                    "namespace {}: formatted, {blocks} blocks of {bytes} bytes",
                    info.nsid
                )
            })
            .collect();
        output::print(&lines.join("\n"))
    }

    /// Returns the LBA format asked for, which all namespaces of the command get.
    fn index(&self, controller: &Controller, nsid: Nsid) -> Result<u8> {
        if let Some(index) = self.lbaf {
            let most = 63;
            return Some(index).filter(|index| *index <= most).ok_or_else(|| {
                Error::usage(
                    format!("there is no LBA format {index}"),
                    format!("use 0 to {most}"),
                )
            });
        }
        let namespaces = match nsid {
            Nsid::ALL => controller.namespaces()?,
            nsid => vec![nsid],
        };
        let first = namespaces.first().copied().unwrap_or(Nsid(1));
        let index = self.index_of(controller, first)?;
        for other in namespaces.into_iter().skip(1) {
            let its = self.index_of(controller, other)?;
            if its != index {
                let what = match self.block_size {
                    Some(bytes) => format!("the LBA format with blocks of {bytes} bytes"),
                    None => "the present LBA format".to_owned(),
                };
                return Err(Error::usage(
                    format!(
                        "{what} is {index} in namespace {first} and {its} in namespace {other}"
                    ),
                    "give one for all with --lbaf or --block-size, or format each namespace for itself",
                ));
            }
        }
        Ok(index)
    }

    /// Returns the present LBA format of a namespace, or the one with blocks of --block-size.
    fn index_of(&self, controller: &Controller, one: Nsid) -> Result<u8> {
        let identify = controller.identify_namespace(one)?;
        let Some(bytes) = self.block_size else {
            return Ok(identify.lba_format_index() as u8);
        };
        let formats = identify.lbaf.iter().take(identify.lba_formats());
        let fits = |format: &nvme_host::core::spec::identify::LbaFormat| {
            format.ms == 0 && format.block_bytes().map(u64::from) == Some(bytes)
        };
        let index = formats.clone().position(fits);
        index.map(|index| index as u8).ok_or_else(|| {
            let has: Vec<String> = formats
                .filter(|format| format.ms == 0)
                .filter_map(|format| Some(format.block_bytes()?.to_string()))
                .collect();
            Error::usage(
                format!("namespace {one} has no format with blocks of {bytes} bytes"),
                format!("use one of {}", has.join(", ")),
            )
        })
    }
}

fn to_json(info: &NamespaceInfo) -> Value {
    json!({
        "nsid": info.nsid.0, "blocks": info.blocks, "block_bytes": info.block_bytes,
        "metadata_bytes": info.metadata_bytes,
    })
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use clap::Parser;
    use nvme_host::ControllerConfig;

    #[derive(Parser)]
    struct FormatLine {
        #[command(flatten)]
        command: FormatCommand,
    }

    /// All namespaces got the LBA format that the first one has.
    #[test]
    fn namespaces_of_different_formats_need_one_that_is_given() {
        let device = nvme_host::open("sim:mem?size=1MiB&ns=2").unwrap();
        let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
        let index = |options: &str| {
            let words = format!("format -d sim:mem -n 0xffffffff {options}");
            let line = FormatLine::try_parse_from(words.split_whitespace()).unwrap();
            let found = line.command.index(&controller, Nsid::ALL);
            found.map_err(|error| error.to_string())
        };
        let [small, large] = [512, 4096].map(|bytes| index(&format!("-b {bytes}")).unwrap());
        assert_eq!(index(""), Ok(large));
        let settings = Settings::new(small, 0);
        let minute = Duration::from_secs(60);
        controller
            .format(Nsid(2), settings, minute, |_| ())
            .unwrap();
        let error = index("").unwrap_err();
        let says = format!("is {large} in namespace 1 and {small} in namespace 2");
        assert!(error.contains(&says), "{error}");
        assert_eq!(index("-b 512"), Ok(small));
        assert_eq!(index(&format!("-l {large}")), Ok(large));
    }
}
