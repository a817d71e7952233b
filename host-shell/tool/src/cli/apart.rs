//! A check before each command runs: its output must not be its own input.

use clap::{ArgMatches, Command};
use nvme_host::Result;
use nvme_host::files::{check_apart, named_by};
use std::path::PathBuf;

/// Arguments that name outputs of a command.
const OUTPUTS: [&str; 9] = [
    "out",
    "logits",
    "trace",
    "plot",
    "to",
    "image",
    "socket",
    "out_ids",
    "out_distances",
];
/// Arguments that name inputs of a command; some commands write to the device, too.
const INPUTS: [&str; 12] = [
    "device",
    "model",
    "manifest",
    "file",
    "location",
    "folder",
    "input",
    "input_file",
    "load",
    "check",
    "paths",
    "peer",
];
/// Commands that write a file's bytes to a device, which may be a file.
const ONTO_DEVICE: [&str; 3] = ["import", "query", "build"];

/// Compares the outputs of the command that `matches` is of with its inputs, and with each other. Returns the inputs.
///
/// # Errors
/// [`nvme_host::Error::Usage`] for one that is both.
pub fn check(command: &Command, matches: &ArgMatches) -> Result<Vec<String>> {
    if let Some((name, matches)) = matches.subcommand() {
        let found = command.find_subcommand(name);
        return found.map_or(Ok(Vec::new()), |command| check(command, matches));
    }
    let is_output = |id: &str| {
        OUTPUTS.contains(&id) || id == "device" && ONTO_DEVICE.contains(&command.get_name())
    };
    let (outputs, inputs): (Vec<_>, Vec<_>) = given(command, matches)
        .into_iter()
        .partition(|(id, _)| is_output(id));
    for (at, (id, output)) in outputs.iter().enumerate() {
        let others = outputs[at + 1..].iter().chain(&inputs);
        let others: Vec<&str> = others.map(|(_, text)| text.as_str()).collect();
        let files = match id == "device" {
            true => named_by(output),
            false => vec![PathBuf::from(output)],
        };
        for file in files {
            check_apart(&file, &others)?;
        }
    }
    Ok(inputs.into_iter().map(|(_, text)| text).collect())
}

/// Returns the arguments of the command line that name files, each with its text.
fn given(command: &Command, matches: &ArgMatches) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        if !OUTPUTS.contains(&id) && !INPUTS.contains(&id) {
            continue;
        }
        let values = matches.try_get_raw(id).ok().flatten();
        for value in values.into_iter().flatten() {
            if let Some(text) = value.to_str().filter(|text| *text != "-") {
                found.push((id.to_owned(), text.to_owned()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{INPUTS, OUTPUTS};
    use clap::Command;

    /// Texts that name no file.
    const OTHERS: [&str; 8] = [
        "prompt", "chat", "label", "address", "driver", "user", "only", "dir",
    ];

    /// Calls `look` for each argument that takes a text or a path.
    fn each(command: &Command, look: &mut dyn FnMut(&str, &str)) {
        for argument in command.get_arguments() {
            let parser = format!("{:?}", argument.get_value_parser());
            if parser.contains("string") || parser.contains("path_buf") {
                look(command.get_name(), argument.get_id().as_str());
            }
        }
        for command in command.get_subcommands() {
            each(command, look);
        }
    }

    #[test]
    fn every_argument_with_a_path_is_an_input_or_an_output() {
        let mut count = 0;
        each(&super::super::command_line(), &mut |command, id| {
            count += 1;
            let lists = [&OUTPUTS[..], &INPUTS, &OTHERS];
            let is_known = lists.iter().any(|list| list.contains(&id));
            assert!(
                is_known,
                "{command} {id}: say whether it is read or written"
            );
        });
        assert!(count > 30, "{count}");
    }
}
