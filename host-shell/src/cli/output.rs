//! Printing: aligned `name : value` lines as nvme-cli's, or one JSON object.

use nvme_host::{Error, Notice, Notify, Result};
use serde_json::{Value, json};
use std::io::{self, IsTerminal, Write};

/// Writes text to standard output; a full disk or a closed pipe is an error.
pub fn print(text: &str) -> Result<()> {
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
        .map_err(Error::file("write", "standard output"))
}

/// Writes bytes to standard output as they are.
pub fn bytes(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)
        .and_then(|()| out.flush())
        .map_err(Error::file("write", "standard output"))
}

/// Prints what a controller reports beside the answers to commands: a line on standard error for each, as JSON where
/// the results are.
pub fn warnings(as_json: bool) -> Notify {
    Notify::new(move |notice| {
        let text = notice.to_string().replace(['\n', '\r'], " ");
        let line = match (as_json, notice) {
            (false, _) => format!("warning: {text}"),
            (true, Notice::Event(event)) => {
                json!({ "warning": text, "event": super::events::to_json(event) }).to_string()
            }
            (true, _) => json!({ "warning": text }).to_string(),
        };
        super::say::warn(|| line);
    })
}

/// Prints one JSON object: indented for a person at a terminal, else on one line.
pub fn json(value: &Value) -> Result<()> {
    if io::stdout().is_terminal() {
        print(&format!("{value:#}"))
    } else {
        print(&value.to_string())
    }
}

/// Prints one JSON object on one line, for readers of several.
pub fn line(value: &Value) -> Result<()> {
    print(&value.to_string())
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
                Value::String(value) => text.push_str(&format!("{name:<width$} : {value}\n")),
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
