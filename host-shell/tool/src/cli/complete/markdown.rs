//! The reference of every command in Markdown: the content of docs/tool.md.

use clap::{Arg, Command};
use std::collections::{BTreeMap, BTreeSet};

/// Longest line of a document.
const WIDTH: usize = 120;
/// Options that this many commands have in the same words are described once.
const COMMON: usize = 3;

/// Options that commands take together, by the heading under which they are described.
const SETS: [(&str, &[&str]); 2] = [
    (
        "Device options",
        &["device", "doorbells", "irq", "json", "rings", "timeout-ms"],
    ),
    (
        "GPU options",
        &["data-in-cmb", "gpu", "mode", "threads", "tier", "trace"],
    ),
];

/// The heading of common options that belong to no set.
const OTHERS: &str = "Other options of several commands";

/// Returns every visible command with its options.
pub fn reference(mut root: Command) -> String {
    root.build();
    let mut uses: BTreeMap<String, usize> = BTreeMap::new();
    let mut verbs = Vec::new();
    collect(&root, "", &mut verbs);
    for (_, verb) in &verbs {
        for arg in options(verb) {
            *uses.entry(item(arg)).or_default() += 1;
        }
    }
    let is_common = |arg: &Arg| {
        arg.get_long().is_some() && uses.get(&item(arg)).is_some_and(|count| *count >= COMMON)
    };
    let mut text = String::from(
        "# The tool\n\nEvery command of `nvme-gpu` with its options. This page is what `nvme-gpu man --markdown` prints; a test holds\nit against the tool.\n\n",
    );
    if let Some(after) = root.get_after_help() {
        text.push_str(&format!("```text\n{}\n```\n", after.to_string().trim_end()));
    }
    let common: BTreeMap<String, String> = verbs
        .iter()
        .flat_map(|(_, verb)| options(verb))
        .filter(|arg| is_common(arg))
        .filter_map(|arg| Some((item(arg), arg.get_long()?.to_owned())))
        .collect();
    text.push_str("\nEvery command takes:\n\n");
    let global = root.get_arguments().filter(|arg| arg.is_global_set());
    text.extend(global.map(item));
    text.push_str(&common_options(&common));
    // The command that describes an option first: later commands with the same option and text refer to it.
    let mut described: BTreeMap<String, String> = BTreeMap::new();
    for (name, verb) in &verbs {
        text.push_str(&format!("\n## {name}\n\n"));
        if let Some(about) = verb.get_long_about().or(verb.get_about()) {
            let about = about.to_string();
            let paragraphs: Vec<String> = about.split("\n\n").map(paragraph).collect();
            text.push_str(&paragraphs.join("\n"));
        }
        let aliases: Vec<String> = verb
            .get_visible_aliases()
            .map(|one| format!("`{one}`"))
            .collect();
        if !aliases.is_empty() {
            text.push_str(&format!("\nAlso: {}.\n", aliases.join(", ")));
        }
        text.push_str(&own_options(verb, name, &is_common, &mut described));
        let common: BTreeSet<&str> = options(verb)
            .filter(|arg| is_common(arg))
            .filter_map(Arg::get_long)
            .collect();
        if !common.is_empty() {
            text.push_str(&format!("\n{}", wrap("", &also(common))));
        }
    }
    text
}

/// Describes the options that a command does not share with many, and names those that an earlier one has in the same
/// words.
fn own_options(
    verb: &Command,
    name: &str,
    is_common: &dyn Fn(&Arg) -> bool,
    described: &mut BTreeMap<String, String>,
) -> String {
    let mut own = String::new();
    let mut repeated: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for arg in options(verb).filter(|arg| !is_common(arg)) {
        let text = item(arg);
        match described.get(&text) {
            Some(earlier) => {
                let names = repeated.entry(earlier.clone()).or_default();
                names.push(short_name(arg));
            }
            None => {
                own.push_str(&text);
                described.insert(text, name.to_owned());
            }
        }
    }
    if !own.is_empty() {
        own.insert(0, '\n');
    }
    for (earlier, names) in repeated {
        let anchor = earlier.replace(' ', "-");
        let line = format!("As in [{earlier}](#{anchor}): {}.", names.join(", "));
        own.push_str(&format!("\n{}", wrap("", &line)));
    }
    own
}

/// Describes the common options, item and long name, each under the first set that has it.
fn common_options(common: &BTreeMap<String, String>) -> String {
    let mut text = String::new();
    let mut left: Vec<(&String, &String)> = common.iter().collect();
    left.sort_by_key(|(item, long)| (*long, *item));
    for (heading, names) in SETS {
        text.push_str(&format!("\n## {heading}\n\n"));
        left.retain(|(item, long)| {
            let is_here = names.contains(&long.as_str());
            if is_here {
                text.push_str(item);
            }
            !is_here
        });
    }
    text.push_str(&format!("\n## {OTHERS}\n\n"));
    left.iter().for_each(|(item, _)| text.push_str(item));
    text
}

/// Names the common options of a command, whole sets by their headings.
fn also(mut common: BTreeSet<&str>) -> String {
    let mut named = Vec::new();
    for (heading, names) in SETS {
        if names.iter().all(|name| common.contains(name)) {
            common.retain(|name| !names.contains(name));
            let anchor = heading.to_lowercase().replace(' ', "-");
            named.push(format!("[{heading}](#{anchor})"));
        }
    }
    named.extend(common.iter().map(|name| format!("`--{name}`")));
    format!("Also {}.", named.join(", "))
}

/// Returns the paragraph in lines, with a full stop at its end.
fn paragraph(text: &str) -> String {
    let text = text.trim_end();
    let end = match text.ends_with(['.', ':', '?', '!']) {
        true => "",
        false => ".",
    };
    wrap("", &format!("{text}{end}"))
}

fn collect<'a>(parent: &'a Command, prefix: &str, verbs: &mut Vec<(String, &'a Command)>) {
    let shown = |verb: &&Command| !verb.is_hide_set() && verb.get_name() != "help";
    for verb in parent.get_subcommands().filter(shown) {
        let name = format!("{prefix}{}", verb.get_name());
        // The ones below say more than a group of commands does.
        if verb.has_subcommands() {
            collect(verb, &format!("{name} "), verbs);
        } else {
            verbs.push((name, verb));
        }
    }
}

fn options(verb: &Command) -> impl Iterator<Item = &Arg> {
    verb.get_arguments()
        .filter(|arg| !arg.is_hide_set() && !arg.is_global_set() && arg.get_id() != "help")
}

/// Returns the name by which a reference names an option: `--long`, or `<VALUE>` of a positional one.
fn short_name(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    match (arg.get_long(), names.first()) {
        (Some(long), _) => format!("`--{long}`"),
        (None, Some(value)) => format!("`<{value}>`"),
        (None, None) => format!("`<{}>`", arg.get_id().to_string().to_uppercase()),
    }
}

/// Formats one option: its syntax, its meaning, its values.
fn item(arg: &Arg) -> String {
    let takes_value = arg.get_action().takes_values();
    let names = arg.get_value_names().unwrap_or_default();
    let value = names.first().map_or_else(
        || arg.get_id().to_string().to_uppercase(),
        ToString::to_string,
    );
    let mut spelt = Vec::new();
    spelt.extend(arg.get_short().map(|short| format!("-{short}")));
    let longs = arg
        .get_long()
        .into_iter()
        .chain(arg.get_visible_aliases().into_iter().flatten());
    spelt.extend(longs.map(|long| format!("--{long}")));
    let head = match (spelt.is_empty(), takes_value) {
        (true, _) => format!("<{value}>"),
        (false, true) => format!("{} <{value}>", spelt.join(", ")),
        (false, false) => spelt.join(", "),
    };
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let mut text = format!("- `{head}`: {}", help.replace('\n', " "));
    let choices: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|choice| takes_value && !choice.is_hide_set())
        .map(|choice| format!("`{}`", choice.get_name()))
        .collect();
    if !choices.is_empty() {
        text.push_str(&format!("; one of {}", choices.join(", ")));
    }
    let default: Vec<String> = arg
        .get_default_values()
        .iter()
        .filter(|value| takes_value && !value.is_empty())
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    if !default.is_empty() {
        text.push_str(&format!("; default {}", default.join(", ")));
    }
    wrap("  ", &text)
}

/// Lines of at most [`WIDTH`] columns, those after the first behind `indent`.
fn wrap(indent: &str, text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a first line");
        if !line.trim().is_empty() && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(format!("{indent}{word}"));
        } else {
            if !line.trim().is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.join("\n") + "\n"
}
