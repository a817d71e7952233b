//! `nvme-gpu --help`: the commands in groups, those first that most people need.

use clap::Command;
use clap::builder::StyledStr;
use std::fmt::Write as _;

/// Groups of commands, in the order of the help.
const GROUPS: [(&str, &[&str]); 7] = [
    (
        "First steps",
        &["demo", "doctor", "why", "bench", "top", "devices", "serve"],
    ),
    (
        "Models, tables and vectors",
        &["generate", "catalog", "manifest", "search", "pipeline"],
    ),
    (
        "Blocks and files",
        &[
            "read", "write", "stream", "compare", "import", "verify", "ls", "cat", "cp", "stat",
            "pack",
        ],
    ),
    (
        "Drives of this machine",
        &[
            "list", "bind", "unbind", "topology", "p2p", "witness", "reset",
        ],
    ),
    (
        "What a drive says",
        &[
            "identify",
            "list-ns",
            "smart-log",
            "error-log",
            "get-log",
            "get-feature",
            "regs",
            "events",
            "sanitize-log",
        ],
    ),
    (
        "What changes a drive",
        &[
            "set-feature",
            "flush",
            "write-zeroes",
            "dsm",
            "format",
            "sanitize",
            "admin-passthru",
            "io-passthru",
        ],
    ),
    ("Shells and manuals", &["completions", "man", "help"]),
];

/// Gives the help of the whole tool its groups.
pub fn arrange(command: Command) -> Command {
    let mut text = String::new();
    for (title, names) in GROUPS {
        let _ = writeln!(text, "{title}:");
        for name in names {
            let about = match *name {
                "help" => Some("Print this message, or the help of a command".to_owned()),
                name => command.find_subcommand(name).map(first_sentence),
            };
            // Some builds lack commands.
            if let Some(about) = about {
                let _ = writeln!(text, "  {name:14}  {about}");
            }
        }
        text.push('\n');
    }
    // clap fills in what stands in braces, which no description has.
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{text}Options:\n{{options}}{{after-help}}\n"
    );
    command.help_template(StyledStr::from(template))
}

fn first_sentence(command: &Command) -> String {
    let about = command
        .get_about()
        .map(ToString::to_string)
        .unwrap_or_default();
    let end = about.find(". ").unwrap_or(about.len());
    about[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_command_is_in_one_group() {
        let command = crate::cli::command_line();
        let visible = command.get_subcommands().filter(|one| !one.is_hide_set());
        let all: BTreeSet<&str> = visible.map(Command::get_name).chain(["help"]).collect();
        let listed: Vec<&str> = GROUPS
            .iter()
            .flat_map(|(_, names)| *names)
            .copied()
            .collect();
        let missing: Vec<&&str> = all.iter().filter(|name| !listed.contains(*name)).collect();
        assert!(missing.is_empty(), "in no group: {missing:?}");
        assert_eq!(
            listed.iter().collect::<BTreeSet<_>>().len(),
            listed.len(),
            "one is in two groups"
        );
        #[cfg(feature = "sim")]
        assert_eq!(
            listed.len(),
            all.len(),
            "a group names a command that is not there"
        );
    }
}
