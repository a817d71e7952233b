//! Printing: aligned `name : value` lines as nvme-cli's, or one JSON object.

use crate::common::visible;
use nvme_host::{ControllerNotice, DeviceEvent, Error, NoticeListener, Result};
use serde_json::{Value, json};
use std::io::{self, IsTerminal, Write};

/// The version of the printed JSON: docs/json.md. It grows when a member is removed or changes its meaning.
pub const SCHEMA_VERSION: u32 = 1;

/// Writes text to standard output; a full disk or a closed pipe is an error.
pub fn print(text: &str) -> Result<()> {
    write(&visible::lines(text))
}

fn write(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| {
            if text.ends_with('\n') {
                Ok(())
            } else {
                out.write_all(b"\n")
            }
        })
        .and_then(|()| out.flush())
        .map_err(Error::file("write", crate::common::file::STANDARD_OUTPUT))
}

/// Writes bytes to standard output as they are.
pub fn bytes(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(Error::file("write", "standard output"))
}

/// Prints reports of a controller besides the answers to commands: a line on standard error for each, in JSON
/// if the results are.
pub fn warnings(as_json: bool) -> NoticeListener {
    NoticeListener::new(move |notice| {
        let text = notice.to_string();
        let line = match (as_json, notice) {
            (false, _) => visible::line(&format!("warning: {text}")),
            (true, ControllerNotice::Event(event)) => {
                versioned(&json!({ "warning": text, "event": event_json(event) })).to_string()
            }
            (true, _) => versioned(&json!({ "warning": text })).to_string(),
        };
        crate::common::say::warn(|| line);
    })
}

/// Prints one JSON object: indented for a person at a terminal, else on one line.
pub fn json(value: &Value) -> Result<()> {
    let value = versioned(value);
    if io::stdout().is_terminal() {
        write(&visible::json(&format!("{value:#}")))
    } else {
        write(&visible::json(&value.to_string()))
    }
}

/// Returns `value` with the version of the schema as its first member.
fn versioned(value: &Value) -> Value {
    let mut object = json!({ "schema_version": SCHEMA_VERSION });
    if let (Value::Object(object), Value::Object(members)) = (&mut object, value) {
        object.extend(members.clone());
    }
    object
}

/// Prints one JSON object on one line, for readers of several.
pub fn line(value: &Value) -> Result<()> {
    write(&visible::json(&versioned(value).to_string()))
}

/// Prints `name : value` lines from an object's members, in order.
pub fn table(title: &str, value: &Value) -> Result<()> {
    let mut text = String::new();
    if !title.is_empty() {
        text.push_str(title);
        text.push('\n');
    }
    if let Value::Object(members) = value {
        let width = members.keys().map(String::len).max().unwrap_or(0);
        for (name, value) in members {
            match value {
                Value::String(value) => {
                    text.push_str(&format!("{name:<width$} : {}\n", visible::line(value)));
                }
                Value::Array(list) if list.iter().any(Value::is_object) => {
                    for (index, item) in list.iter().enumerate() {
                        text.push_str(&format!("{name:<width$} : {index}: {}\n", one_line(item)));
                    }
                }
                value => text.push_str(&format!("{name:<width$} : {value}\n")),
            }
        }
    }
    print(&text)
}

fn one_line(value: &Value) -> String {
    match value {
        Value::Object(members) => members
            .iter()
            .map(|(name, value)| format!("{name}:{value}"))
            .collect::<Vec<_>>()
            .join(" "),
        value => value.to_string(),
    }
}

/// Returns an event as JSON.
pub fn event_json(event: &DeviceEvent) -> Value {
    json!({
        "event_type": event.event.event_type(),
        "event_info": event.event.info(),
        "log_page": event.event.log_page(),
        "changed_namespaces": event.changed_namespaces(),
        "text": event.to_string(),
    })
}
