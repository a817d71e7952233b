//! A command line that clap refused, as one cause and one remedy.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use nvme_host::Error;
use std::ffi::OsString;

/// Explains why `command` rejected `arguments`.
pub fn explain(command: &clap::Command, arguments: &[OsString], error: &clap::Error) -> Error {
    let context = |kind| error.get(kind).map(texts).unwrap_or_default();
    let one = |kind| context(kind).join(", ");
    let argument = one(ContextKind::InvalidArg);
    let value = one(ContextKind::InvalidValue);
    let cause = match error.kind() {
        ErrorKind::InvalidValue | ErrorKind::ValueValidation if value.is_empty() => {
            format!("no value for '{argument}'")
        }
        ErrorKind::InvalidValue => format!("invalid value '{value}' for '{argument}'"),
        ErrorKind::ValueValidation => {
            let why = std::error::Error::source(error).map(ToString::to_string);
            // It names the value itself.
            format!("invalid value for '{argument}': {}", why.unwrap_or(value))
        }
        ErrorKind::UnknownArgument if is_negative(&argument) => {
            format!("'{argument}' is a negative number, and no option takes one")
        }
        ErrorKind::UnknownArgument => format!("unexpected argument '{argument}'"),
        ErrorKind::InvalidSubcommand => {
            format!(
                "there is no command '{}'",
                one(ContextKind::InvalidSubcommand)
            )
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            "no command was given".to_owned()
        }
        ErrorKind::MissingRequiredArgument => format!("missing: {argument}"),
        ErrorKind::ArgumentConflict => match one(ContextKind::PriorArg) {
            prior if prior == argument => format!("'{argument}' is given more than once"),
            prior if prior.is_empty() => format!("'{argument}' does not go with other options"),
            prior => format!("'{argument}' does not go with '{prior}'"),
        },
        ErrorKind::InvalidUtf8 => "an argument is not UTF-8 text".to_owned(),
        _ => first_line(error),
    };
    let mut remedy = String::new();
    let is_first = arguments.first().and_then(|first| first.to_str()) == Some(argument.as_str());
    if error.kind() == ErrorKind::UnknownArgument && is_first && argument.starts_with("--") {
        remedy.push_str(&format!(
            "options come behind the command: `{} COMMAND {argument}`; ",
            command.get_name()
        ));
    }
    for kind in [
        ContextKind::SuggestedArg,
        ContextKind::SuggestedSubcommand,
        ContextKind::SuggestedValue,
    ] {
        if let [.., nearest] = &context(kind)[..] {
            remedy.push_str(&format!("did you mean '{nearest}'? "));
        }
    }
    let possible = context(ContextKind::ValidValue);
    if !possible.is_empty() {
        remedy.push_str(&format!("possible values: {}; ", possible.join(", ")));
    }
    let commands = context(ContextKind::ValidSubcommand);
    if !commands.is_empty() {
        remedy.push_str(&format!("commands: {}; ", commands.join(", ")));
    }
    remedy.push_str(&format!("see `{} --help`", path(command, arguments)));
    Error::usage(cause, remedy)
}

fn is_negative(argument: &str) -> bool {
    let digits = argument.strip_prefix('-').unwrap_or_default();
    digits.starts_with(|first: char| first.is_ascii_digit())
}

fn texts(value: &ContextValue) -> Vec<String> {
    match value {
        ContextValue::String(text) => vec![text.clone()],
        ContextValue::Strings(texts) => texts.clone(),
        ContextValue::StyledStr(text) => vec![text.to_string()],
        ContextValue::Number(number) => vec![number.to_string()],
        _ => Vec::new(),
    }
}

fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

/// Returns the names of the subcommands that `arguments` begin with.
fn path(command: &clap::Command, arguments: &[OsString]) -> String {
    let mut path = vec![command.get_name()];
    let mut at = command;
    for argument in arguments.iter().filter_map(|argument| argument.to_str()) {
        if let Some(next) = at.find_subcommand(argument) {
            path.push(next.get_name());
            at = next;
        }
    }
    path.join(" ")
}
