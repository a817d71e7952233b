//! `sanitize`, which erases the whole device, and `sanitize-log`, which shows how far it is.

use crate::admin::passthru::dword;
use crate::common::images::CommandFiles;
use crate::common::{DeviceArgs, WriteArgs, check_stop, duration, hex, output, progress};
use clap::{Args, ValueEnum};
use nvme_host::core::spec::admin::{self, SanitizeAction};
use nvme_host::core::spec::log_page::{SanitizeStatus, sanitize_state};
use nvme_host::{Controller, Error, Result};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Longest wait for the end, if no other is given.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);
/// Time between two looks at the progress.
const LOOK: Duration = Duration::from_millis(100);

/// Erase all data of the NVM subsystem for good, and wait until that is done
///
/// Every namespace of the subsystem loses its data. The sanitize continues after this program has ended; sanitize-log
/// shows its progress.
#[derive(Args)]
pub struct SanitizeCommand {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    write: WriteArgs,
    /// Sanitize action
    #[arg(long, short = 'a', visible_alias = "action", value_enum)]
    sanact: SanitizeVerb,
    /// Allow unrestricted sanitize exit: after a failure the drive may be used without another sanitize
    #[arg(long, short = 'u')]
    ause: bool,
    /// Do not deallocate the blocks afterwards
    #[arg(long, visible_alias = "nodas")]
    no_dealloc: bool,
    /// Overwrite passes, 1 to 15; 0 for 16; 1 when missing
    #[arg(long, short = 'n', value_name = "PASSES", value_parser = clap::value_parser!(u8).range(0..=15))]
    owpass: Option<u8>,
    /// Overwrite pattern; 0 when missing
    #[arg(long, short = 'p', value_name = "DWORD", value_parser = dword)]
    ovrpat: Option<u32>,
    /// Invert the overwrite pattern between passes
    #[arg(long, short = 'i')]
    oipbp: bool,
    /// Longest wait for the end; 60m when missing
    #[arg(long, value_name = "TIME", value_parser = duration)]
    wait: Option<Duration>,
    /// Start it and do not wait for the end
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum SanitizeVerb {
    #[value(alias = "1", alias = "0x1", alias = "0x01")]
    ExitFailure,
    #[value(alias = "2", alias = "0x2", alias = "0x02")]
    StartBlockErase,
    #[value(alias = "3", alias = "0x3", alias = "0x03")]
    StartOverwrite,
    #[value(alias = "4", alias = "0x4", alias = "0x04")]
    StartCryptoErase,
}

/// Show the state and progress of a sanitize
#[derive(Args)]
pub struct SanitizeLog {
    #[command(flatten)]
    device: DeviceArgs,
}

impl SanitizeCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        self.check()?;
        let device = &self.device;
        let controller = device.start_writing(&self.write, "sanitize", &device.config())?;
        let action = match self.sanact {
            SanitizeVerb::ExitFailure => SanitizeAction::ExitFailureMode,
            SanitizeVerb::StartBlockErase => SanitizeAction::BlockErase,
            SanitizeVerb::StartOverwrite => SanitizeAction::Overwrite,
            SanitizeVerb::StartCryptoErase => SanitizeAction::CryptoErase,
        };
        controller.sanitize(admin::SanitizeFields {
            action,
            unrestricted: self.ause,
            passes: match self.owpass {
                Some(0) => 16,
                passes => passes.unwrap_or(1),
            },
            invert: self.oipbp,
            no_deallocate: self.no_dealloc,
            pattern: self.ovrpat.unwrap_or(0),
        })?;
        files.keep_created();
        let status = match self.no_wait || self.sanact == SanitizeVerb::ExitFailure {
            true => controller.sanitize_status()?,
            false => self.wait_for(&controller)?,
        };
        controller.shut_down()?;
        show(self.device.form.json, &status)
    }

    /// Refuses options that the sanitize action does not have.
    fn check(&self) -> Result<()> {
        let (overwrite, exit) = (SanitizeVerb::StartOverwrite, SanitizeVerb::ExitFailure);
        let check = |name: &str, is_given: bool, is_usable: bool, remedy: &str| match is_given
            && !is_usable
        {
            true => {
                let action = self.sanact.to_possible_value();
                let action = action.as_ref().map_or("", |value| value.get_name());
                let cause = format!("{name} has no effect on --sanact {action}");
                Err(Error::usage(cause, remedy))
            }
            false => Ok(()),
        };
        for (name, is_given) in [
            ("--owpass", self.owpass.is_some()),
            ("--ovrpat", self.ovrpat.is_some()),
            ("--oipbp", self.oipbp),
        ] {
            let remedy = "leave it out, or choose --sanact start-overwrite";
            check(name, is_given, self.sanact == overwrite, remedy)?;
        }
        for (name, is_given) in [
            ("--ause", self.ause),
            ("--no-dealloc", self.no_dealloc),
            ("--wait", self.wait.is_some()),
            ("--no-wait", self.no_wait),
        ] {
            check(name, is_given, self.sanact != exit, "leave it out")?;
        }
        Ok(())
    }

    fn wait_for(&self, controller: &Controller) -> Result<SanitizeStatus> {
        let longest = self.wait.unwrap_or(LONGEST_WAIT);
        let bar = progress::percent("sanitize");
        let start = Instant::now();
        loop {
            let status = controller.sanitize_status()?;
            match status.state() {
                sanitize_state::IN_PROGRESS => bar.set_position(u64::from(status.sprog)),
                sanitize_state::SUCCESS | sanitize_state::DEALLOCATED => {
                    bar.finish_and_clear();
                    return Ok(status);
                }
                state => {
                    return Err(Error::device(
                        format!("the sanitize ended without success: {}", state_text(state)),
                        "run sanitize again; after --ause, `--sanact exit-failure` makes the drive usable",
                    ));
                }
            }
            check_stop()?;
            if start.elapsed() > longest {
                return Err(Error::Unfinished {
                    cause: format!(
                        "the sanitize is at {} % after {} s",
                        percent(&status),
                        longest.as_secs()
                    ),
                    remedy: "it goes on; see `nvme-gpu sanitize-log`, or raise --wait".to_owned(),
                });
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl SanitizeLog {
    pub fn run(self) -> Result<()> {
        let controller = self.device.start()?;
        let status = controller.sanitize_status()?;
        controller.shut_down()?;
        show(self.device.form.json, &status)
    }
}

fn percent(status: &SanitizeStatus) -> u64 {
    u64::from(status.sprog) * 100 / 65_536
}

fn state_text(state: u16) -> &'static str {
    match state {
        sanitize_state::NEVER => "never sanitized",
        sanitize_state::SUCCESS => "the most recent sanitize succeeded",
        sanitize_state::IN_PROGRESS => "in progress",
        sanitize_state::FAILED => "the most recent sanitize failed",
        sanitize_state::DEALLOCATED => "succeeded, with deallocation although none was asked for",
        _ => "reserved",
    }
}

fn show(as_json: bool, status: &SanitizeStatus) -> Result<()> {
    let mut value = json!({
        "sprog": status.sprog,
        "sstat": status.sstat,
        "scdw10": status.scdw10,
        "eto": status.eto,
        "etbe": status.etbe,
        "etce": status.etce,
        "etond": status.etond,
        "etbend": status.etbend,
        "etcend": status.etcend,
    });
    if as_json {
        value["state"] = json!(state_text(status.state()));
        value["passes"] = json!(status.passes());
        value["global_data_erased"] = json!(status.is_global_data_erased());
        return output::json(&value);
    }
    let progress = match status.state() {
        sanitize_state::IN_PROGRESS => format!("{} ({} %)", status.sprog, percent(status)),
        _ => format!("{}", status.sprog),
    };
    value["sprog"] = json!(progress);
    let erased = match status.is_global_data_erased() {
        true => ", nothing written since",
        false => "",
    };
    let state = state_text(status.state());
    let passes = match status.passes() {
        0 => String::new(),
        passes => format!(", {passes} passes complete"),
    };
    value["sstat"] = json!(format!("{:#x} ({state}{passes}{erased})", status.sstat));
    value["scdw10"] = json!(hex::bits(status.scdw10.into(), &[]));
    for name in ["eto", "etbe", "etce", "etond", "etbend", "etcend"] {
        value[name] = match value[name].as_u64() {
            Some(seconds) if seconds != u64::from(SanitizeStatus::NOT_REPORTED) => {
                Value::String(format!("{seconds} s"))
            }
            _ => json!("not reported"),
        };
    }
    output::table("Sanitize Status", &value)
}
