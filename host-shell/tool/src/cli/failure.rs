//! The end of a command that failed: one line, or one JSON object, on standard error.

use crate::common::visible;
use nvme_host::Error;
use nvme_host::core::spec::Status;
use serde_json::{Value, json};
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Prints the error and returns the exit code. `device` is the command's, `as_json` is true with --json.
pub fn report(error: &Error, device: Option<&str>, as_json: bool) -> ExitCode {
    if let Error::File { path, source, .. } = error
        && source.kind() == ErrorKind::BrokenPipe
        && path.as_os_str() == crate::common::file::STANDARD_OUTPUT
    {
        // The reader of the pipe has ended: like any filter, the tool ends without a message.
        let _ = signal_hook::low_level::emulate_default_handler(signal_hook::consts::SIGPIPE);
    }
    let remedy = remedy(error, device);
    let line = match as_json {
        true => visible::json(&object(error, &remedy).to_string()),
        false => visible::line(&format!("error: {error}: {remedy}")),
    };
    // Where standard error is closed too, the exit code has to do.
    let _ = writeln!(io::stderr(), "{line}");
    ExitCode::from(error.exit_code())
}

/// Returns the remedy, completed by the device that was used, which only the command line knows.
fn remedy(error: &Error, device: Option<&str>) -> String {
    let remedy = error.remedy();
    match (error, device) {
        // A controller in this process is gone with its error log.
        (Error::Command { .. }, Some(device)) if !device.starts_with("sim:") => {
            let device = shell_quoted(device);
            format!("{remedy}; `nvme-gpu error-log -d {device}` may say more")
        }
        (Error::Timeout { .. }, Some(device)) if device.contains("fault=") => {
            format!("{remedy}, or take fault= out of the device's options")
        }
        _ => remedy,
    }
}

/// Returns `text` as one word of a shell.
fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@+%".contains(c);
    match text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

fn object(error: &Error, remedy: &str) -> Value {
    json!({
        "schema_version": crate::common::output::SCHEMA_VERSION,
        "error": {
            "code": error.code(),
            "exit_code": error.exit_code(),
            "message": error.to_string(),
            "remedy": remedy,
            "status": match error {
                Error::Command { status, .. } => status_object(*status),
                _ => Value::Null,
            },
        },
    })
}

fn status_object(status: Status) -> Value {
    json!({
        "sct": status.sct(),
        "sc": status.sc(),
        "dnr": status.dnr(),
        "more": status.more(),
        "text": status.to_string(),
    })
}

/// Refuses to run if standard output is closed: the results would be lost.
pub fn check_standard_output() -> Result<(), Error> {
    match crate::stdio::was_closed(1) {
        true => Err(Error::file("write", crate::common::file::STANDARD_OUTPUT)(
            io::Error::from_raw_os_error(libc::EBADF),
        )),
        false => Ok(()),
    }
}
