//! `admin-passthru` and `io-passthru`: a command from its dwords. The command's length is checked against its own
//! fields first, since a controller moves the bytes that these name, whatever the buffer's length.

use crate::common::images::CommandFiles;
use crate::common::input::InputFile;
use crate::common::{DeviceArgs, WriteArgs, hex, output, say};
use clap::Args;
use nvme_host::core::spec::admin::opcode;
use nvme_host::core::spec::feature;
use nvme_host::core::spec::{Nsid, Sqe};
use nvme_host::passthru::{CommandSet, TransferDirection};
use nvme_host::units::{parse_bytes, parse_number};
use nvme_host::{Error, Result};
use serde_json::json;
use std::path::PathBuf;

/// Send an admin command given by its dwords, and show its result
#[derive(Args)]
pub struct AdminPassthru {
    /// Namespace; 0 for none, 0xffffffff for all
    #[arg(long, short = 'n', value_name = "NSID", default_value = "0", value_parser = dword)]
    namespace_id: u32,
    #[command(flatten)]
    command: CommandArgs,
}

/// Send an I/O command given by its dwords, and show its result
#[derive(Args)]
pub struct IoPassthru {
    /// Namespace; 0xffffffff for all
    #[arg(long, short = 'n', value_name = "NSID", default_value = "1", value_parser = dword)]
    namespace_id: u32,
    #[command(flatten)]
    command: CommandArgs,
}

#[derive(Args)]
struct CommandArgs {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// Opcode
    #[arg(long, short = 'O', short_alias = 'o', value_parser = byte)]
    opcode: u8,
    /// Command dword 2
    #[arg(long, short = '2', value_name = "DWORD", default_value = "0", value_parser = dword)]
    cdw2: u32,
    /// Command dword 3
    #[arg(long, short = '3', value_name = "DWORD", default_value = "0", value_parser = dword)]
    cdw3: u32,
    /// Command dword 10
    #[arg(long, short = '4', value_name = "DWORD", default_value = "0", value_parser = dword)]
    cdw10: u32,
    /// Command dword 11
    #[arg(long, short = '5', value_name = "DWORD", default_value = "0", value_parser = dword)]
    cdw11: u32,
    /// Command dword 12
    #[arg(long, short = '6', value_name = "DWORD", default_value = "0", value_parser = dword)]
    cdw12: u32,
    /// Command dword 13
    #[arg(long, short = '7', value_name = "DWORD", default_value = "0", value_parser = dword)]
    cdw13: u32,
    /// Command dword 14
    #[arg(long, short = '8', value_name = "DWORD", default_value = "0", value_parser = dword)]
    cdw14: u32,
    /// Command dword 15
    #[arg(long, short = '9', value_name = "DWORD", default_value = "0", value_parser = dword)]
    cdw15: u32,
    /// Bytes of the data buffer
    #[arg(long, short = 'l', value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    data_len: u64,
    /// Bytes of metadata; only 0, commands made by hand carry none
    #[arg(long, short = 'm', value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    metadata_len: u64,
    /// The command receives data (bits 1:0 of the opcode are 10b or 11b)
    #[arg(long, short = 'r')]
    read: bool,
    /// The command sends data (bits 1:0 of the opcode are 01b or 11b)
    #[arg(long = "write", short = 'w')]
    write_data: bool,
    /// Data to send; standard input when missing or `-`
    #[arg(long, short = 'i', value_name = "FILE")]
    input_file: Option<PathBuf>,
    /// Byte that fills the buffer behind the input, or before the command receives; 0 when missing
    #[arg(long, short = 'p', value_name = "BYTE", value_parser = byte)]
    prefill: Option<u8>,
    /// Write the data to standard output as it is, instead of a hex dump
    #[arg(long, short = 'b', conflicts_with = "json")]
    raw_binary: bool,
    /// Print the command before it is sent
    #[arg(long, short = 's')]
    show_command: bool,
    /// Print the command as text and do not send it; the device is not opened
    #[arg(long, conflicts_with = "json")]
    dry_run: bool,
}

/// Parses, for clap, 32 bits, decimal or 0x.
pub fn dword(text: &str) -> std::result::Result<u32, String> {
    u32::try_from(parse_number(text)?).map_err(|_| format!("'{text}' has more than 32 bits"))
}

/// Parses, for clap, 16 bits, decimal or 0x.
pub fn word(text: &str) -> std::result::Result<u16, String> {
    u16::try_from(parse_number(text)?).map_err(|_| format!("'{text}' has more than 16 bits"))
}

/// Parses, for clap, 8 bits, decimal or 0x.
pub fn byte(text: &str) -> std::result::Result<u8, String> {
    u8::try_from(parse_number(text)?).map_err(|_| format!("'{text}' has more than 8 bits"))
}

impl AdminPassthru {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        self.command
            .run(files, CommandSet::Admin, Nsid(self.namespace_id))
    }
}

impl IoPassthru {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        self.command
            .run(files, CommandSet::Nvm, Nsid(self.namespace_id))
    }
}

impl CommandArgs {
    fn run(self, files: &CommandFiles, set: CommandSet, nsid: Nsid) -> Result<()> {
        let sqe = self.sqe(nsid);
        self.check(set, &sqe)?;
        if self.dry_run {
            return output::print(&shown(set, &sqe));
        }
        if self.show_command {
            say::show(&shown(set, &sqe));
        }
        let (device, config) = match set.is_harmless(&sqe) {
            true => (self.device.open()?, self.device.reading()),
            false => {
                let what = format!(
                    "command {:#04x}, which is not known to be harmless,",
                    self.opcode
                );
                let device = self.device.open_to_write(&self.write, &what)?;
                (device, self.device.config())
            }
        };
        let data = self.data(files)?;
        let controller = self.device.access.start(device, &config)?;
        let answer = controller.passthru(set, sqe, &data)?;
        files.keep_created();
        controller.shut_down()?;
        let received = match TransferDirection::of(self.opcode).receives() {
            true => answer.data,
            false => Vec::new(),
        };
        if self.raw_binary {
            return output::bytes(&received);
        }
        if self.device.form.json {
            return output::json(&json!({
                "opcode": self.opcode,
                "name": set.name(self.opcode),
                "result": answer.dw0,
                "data": hex::digits(&received),
            }));
        }
        let name = set.name(self.opcode).unwrap_or("vendor specific");
        let mut text = format!(
            "{name} ({:#04x}): success, result: {:#010x}\n",
            self.opcode, answer.dw0
        );
        if !received.is_empty() {
            text.push_str(&hex::dump(&received, 0));
        }
        output::print(&text)
    }

    fn sqe(&self, nsid: Nsid) -> Sqe {
        let mut sqe = Sqe::new(self.opcode, nsid);
        sqe.cdw2 = self.cdw2;
        sqe.cdw3 = self.cdw3;
        sqe.cdw10 = self.cdw10;
        sqe.cdw11 = self.cdw11;
        sqe.cdw12 = self.cdw12;
        sqe.cdw13 = self.cdw13;
        sqe.cdw14 = self.cdw14;
        sqe.cdw15 = self.cdw15;
        sqe
    }

    /// Checks the options as far as that is possible without the device.
    fn check(&self, set: CommandSet, sqe: &Sqe) -> Result<()> {
        let direction = TransferDirection::of(self.opcode);
        let bits = self.opcode & 3;
        let wrong = |flag: &str, says: &str| {
            let is = format!("bits 1:0 of opcode {:#04x} are {bits:02b}b", self.opcode);
            Error::usage(
                format!("{flag} is given, but {is}, which {says}"),
                "choose the direction that the opcode has",
            )
        };
        if self.metadata_len > 0 {
            return Err(Error::usage(
                "metadata is not supported",
                "leave out --metadata-len, and use a namespace without metadata",
            ));
        }
        let says = match direction {
            TransferDirection::None => "moves no data",
            TransferDirection::ToController => "sends data",
            TransferDirection::FromController => "receives data",
            TransferDirection::Both => "moves data both ways",
        };
        if self.read && !direction.receives() {
            return Err(wrong("--read", says));
        }
        if (self.write_data || self.input_file.is_some()) && !direction.sends() {
            let flag = if self.write_data {
                "--write"
            } else {
                "--input-file"
            };
            return Err(wrong(flag, says));
        }
        if self.raw_binary && !direction.receives() {
            return Err(wrong("--raw-binary", says));
        }
        let needs_data = [
            self.read,
            self.write_data,
            self.input_file.is_some(),
            self.prefill.is_some(),
            self.raw_binary,
        ];
        if self.data_len == 0 && needs_data.contains(&true) {
            return Err(Error::usage(
                "--read, --write, --input-file, --prefill and --raw-binary need the length of the data, which is 0",
                "add --data-len BYTES",
            ));
        }
        if self.data_len > 0 && direction == TransferDirection::None {
            return Err(wrong("--data-len", says));
        }
        let fid = sqe.cdw10 as u8;
        let feature = match (set, self.opcode) {
            // The capabilities of a feature come in dword 0 alone.
            (CommandSet::Admin, opcode::GET_FEATURES) if sqe.cdw10 >> 8 & 7 != 3 => {
                feature::data_bytes(fid)
            }
            (CommandSet::Admin, opcode::SET_FEATURES) => feature::data_bytes(fid),
            _ => None,
        };
        let feature = feature.unwrap_or(0);
        if self.data_len < feature as u64 {
            return Err(Error::usage(
                format!("feature {fid:#04x} has {feature} bytes of data"),
                format!("use --data-len {feature}"),
            ));
        }
        Ok(())
    }

    /// Returns the buffer: the input, padded with the prefill byte.
    fn data(&self, files: &CommandFiles) -> Result<Vec<u8>> {
        let len = usize::try_from(self.data_len)
            .ok()
            .filter(|len| *len <= 64 << 20);
        let len = len.ok_or_else(|| {
            Error::usage(
                format!(
                    "--data-len {} is more than one command moves",
                    self.data_len
                ),
                "use at most the controller's MDTS",
            )
        })?;
        let mut data = vec![self.prefill.unwrap_or(0); len];
        if len > 0 && TransferDirection::of(self.opcode).sends() {
            let path = self.input_file.clone().unwrap_or_else(|| "-".into());
            let read = InputFile::open(&path, files)?.read_at_most(&mut data)?;
            if read > len {
                return Err(Error::usage(
                    format!("{} has more than --data-len {len} bytes", path.display()),
                    "raise --data-len, or shorten the input",
                ));
            }
        }
        Ok(data)
    }
}

/// Returns the command, a dword a line, as nvme-cli prints it.
fn shown(set: CommandSet, sqe: &Sqe) -> String {
    let name = set.name(sqe.opcode()).unwrap_or("vendor specific");
    let dwords = [
        ("nsid", sqe.nsid),
        ("cdw2", sqe.cdw2),
        ("cdw3", sqe.cdw3),
        ("cdw10", sqe.cdw10),
        ("cdw11", sqe.cdw11),
        ("cdw12", sqe.cdw12),
        ("cdw13", sqe.cdw13),
        ("cdw14", sqe.cdw14),
        ("cdw15", sqe.cdw15),
    ];
    let mut text = format!("opcode       : {:02x} ({name})\n", sqe.opcode());
    for (name, value) in dwords {
        text.push_str(&format!("{name:<12} : {value:08x}\n"));
    }
    text
}
