//! The tool's descriptions of itself and of a controller.

use crate::common::{Folder, Place, Ran, bytes};
use std::process::Stdio;

in_each_place!(
    quiet_and_verbose_change_what_is_said_and_no_result,
    identify_prints_hex_and_the_names_of_bits,
);

fn quiet_and_verbose_change_what_is_said_and_no_result(place: Place) {
    let folder = Folder::new(place);
    let list = ["list-ns", "-d", "sim:mem?size=1MiB"];
    let plain = folder.run(&list);
    assert_eq!(plain.stderr, "");
    let verbose = folder.run(&[&list[..], &["-v"]].concat());
    assert_eq!(verbose.stdout, plain.stdout);
    assert!(verbose.stderr.starts_with("opened "), "{}", verbose.stderr);
    assert!(
        verbose.stderr.contains("controller ready after "),
        "{}",
        verbose.stderr
    );
    let quiet = folder.run(&[&["-q"], &list[..]].concat());
    assert_eq!((quiet.stdout, quiet.stderr), (plain.stdout, String::new()));
    folder.fails(&["-q", "-v", "list-ns", "-d", "sim:mem"], 2, "--quiet");
    // An error is said all the same.
    folder.fails(
        &["-q", "read", "-d", "sim:mem?size=1MiB", "--lba", "9999999"],
        2,
        "past namespace",
    );
}

fn identify_prints_hex_and_the_names_of_bits(place: Place) {
    let folder = Folder::new(place);
    let d = "sim:mem?size=1MiB";
    let numbers = folder.json(&["identify", "ctrl", "-d", d]);
    let text = folder.ok(&["identify", "ctrl", "-d", d]);
    let line = |name: &str| {
        let found = text
            .lines()
            .find(|line| line.split(':').next().unwrap().trim() == name);
        found
            .unwrap_or_else(|| panic!("{name}: {text}"))
            .split_once(" : ")
            .unwrap()
            .1
            .to_owned()
    };
    for name in [
        "vid", "ssvid", "oacs", "oncs", "fna", "sgls", "sqes", "lpa", "cntlid",
    ] {
        let hex = format!("{:#x}", numbers[name].as_u64().unwrap());
        assert_eq!(line(name).split(' ').next(), Some(hex.as_str()), "{name}");
    }
    assert!(line("oncs").contains("Compare") && line("oncs").contains("Write Zeroes"));
    assert!(line("oacs").contains("Format NVM"), "{}", line("oacs"));
    assert_eq!(line("ver"), "0x20000 (2.0.0)");
    let ns = folder.ok(&["identify", "ns", "-d", d]);
    assert!(ns.contains("blocks of 4096 bytes)"), "{ns}");
    assert!(ns.contains(" : 0x100\n"), "256 blocks: {ns}");
}

#[test]
fn devices_lists_the_options_and_faults_of_the_simulator() {
    let folder = Folder::new(Place::Embedded);
    let text = folder.ok(&["devices"]);
    for row in nvme_sim::config::OPTIONS {
        assert!(
            text.contains(&format!("\n  {}=", row.name)),
            "{}: {text}",
            row.name
        );
    }
    for row in nvme_sim::config::FAULTS {
        assert!(
            text.contains(&format!("\n  {}", row.name)),
            "{}: {text}",
            row.name
        );
    }
    assert!(folder.ok(&["--help"]).contains("nvme-gpu devices"));
}

#[test]
fn help_begins_with_the_first_sentence_of_the_readme() {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    let sentence = readme.lines().find(|line| line.ends_with('.')).unwrap();
    let help = Folder::new(Place::Embedded).ok(&["--help"]);
    assert_eq!(help.lines().next(), Some(sentence));
}

#[test]
fn completions_name_every_command() {
    let folder = Folder::new(Place::Embedded);
    let help = folder.ok(&["--help"]);
    let commands: Vec<&str> = help
        .lines()
        .take_while(|line| *line != "Options:")
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .collect();
    assert!(commands.len() > 25, "{commands:?}");
    for shell in ["bash", "zsh", "fish"] {
        let script = folder.ok(&["completions", shell]);
        for command in &commands {
            assert!(script.contains(command), "{shell}: {command}");
        }
        assert!(script.contains("allow-write"), "{shell}");
    }
    folder.fails(&["completions", "tcsh"], 2, "tcsh");
    // bash uses it to complete commands, and the options of each.
    let script = folder.ok(&["completions", "bash"]);
    std::fs::write(folder.path("script"), script).unwrap();
    for (words, wanted) in [
        ("nvme-gpu ben", "bench"),
        ("nvme-gpu bench --io", "--io-size"),
        ("nvme-gpu admin-passthru --op", "--opcode"),
        ("nvme-gpu search query --l", "--list"),
    ] {
        let found = completed(&folder, words);
        assert!(found.contains(&wanted.to_owned()), "{words}: {found:?}");
    }
}

/// Returns the words that bash offers to replace the last one, by the completions in the file `script`.
fn completed(folder: &Folder, words: &str) -> Vec<String> {
    let call = "source \"$1\"; shift; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); \
                of=$(complete -p nvme-gpu | sed 's/.* -F \\([^ ]*\\) .*/\\1/'); \
                $of nvme-gpu \"${!#}\" \"\"; printf '%s\\n' \"${COMPREPLY[@]}\"";
    let done = std::process::Command::new("bash")
        .args(["--norc", "-c", call, "bash"])
        .arg(folder.path("script"))
        .args(words.split(' '))
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    let found = String::from_utf8(done.stdout).unwrap();
    found.lines().map(str::to_owned).collect()
}

#[test]
fn manual_pages_are_printed_and_written() {
    let folder = Folder::new(Place::Embedded);
    let page = folder.ok(&["man"]);
    assert!(page.contains(".TH nvme-gpu 1"), "{page}");
    // The list of devices keeps its lines.
    let lists = ".SH DEVICES AND EXIT CODES\n.nf\nDevices:\n";
    assert!(
        page.contains(lists) && page.contains(".fi\n.SH VERSION"),
        "{page}"
    );
    std::fs::create_dir(folder.path("man1")).unwrap();
    folder.ok(&["man", "man1"]);
    for name in ["nvme-gpu.1", "nvme-gpu-read.1", "nvme-gpu-io-passthru.1"] {
        let page = String::from_utf8(bytes(&folder.path("man1").join(name))).unwrap();
        assert!(page.contains(".SH NAME"), "{name}");
        assert_eq!(page.contains(lists), name == "nvme-gpu.1", "{name}");
    }
    folder.fails(&["man", "no/folder"], 4, "no/folder");
}

#[test]
fn the_version_says_what_it_was_built_from() {
    let folder = Folder::new(Place::Embedded);
    let text = folder.ok(&["--version"]);
    let start = format!("nvme-gpu {} (", env!("CARGO_PKG_VERSION"));
    let from = text
        .strip_prefix(&start)
        .and_then(|text| text.strip_suffix(")\n"));
    let from = from.unwrap_or_else(|| panic!("{text}"));
    assert!(
        from == "development build" || from.starts_with("commit "),
        "{from}"
    );
}

/// The functions of the build script; its `main` is for cargo.
#[allow(dead_code)]
#[path = "../../build.rs"]
mod build_script;

#[test]
fn a_release_names_the_commit_that_it_is_built_from_and_no_other() {
    let folder = Folder::new(Place::Embedded);
    let git = |arguments: &[&str]| {
        let output = std::process::Command::new("git")
            .arg("-C")
            .arg(folder.path("."))
            .args(["-c", "user.name=n", "-c", "user.email=e@example"])
            .args(arguments)
            .stderr(Stdio::null())
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let found = || build_script::commit(&folder.path("."));
    assert_eq!(found(), None, "outside git");
    std::fs::write(folder.path("other"), "").unwrap();
    git(&["init", "-q"]);
    git(&["add", "other"]);
    git(&["commit", "-q", "-m", "another project"]);
    std::fs::write(folder.path("build.rs"), "").unwrap();
    assert_eq!(found(), None, "inside another project's repository");
    git(&["add", "build.rs"]);
    git(&["commit", "-q", "-m", "ours"]);
    let head = git(&["rev-parse", "HEAD"]);
    let commit = found().unwrap();
    assert_eq!(commit.len(), 12);
    assert!(head.starts_with(&commit), "{commit} of {head}");
    assert!(!build_script::watched(&folder.path(".")).is_empty());
}

#[test]
fn the_reference_describes_the_command_line_as_it_is() {
    if !cfg!(all(
        feature = "cuda",
        feature = "vfio",
        feature = "vfio-user"
    )) {
        // The page is of a build with every feature.
        return;
    }
    let folder = Folder::new(Place::Embedded);
    let printed = folder.ok(&["man", "--markdown"]);
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tool.md");
    let page = std::fs::read_to_string(&path).unwrap_or_default();
    for (line, (is, should)) in page.lines().zip(printed.lines()).enumerate() {
        assert_eq!(
            is,
            should,
            "docs/tool.md:{}: write `nvme-gpu man --markdown` there",
            line + 1
        );
    }
    assert_eq!(
        page.lines().count(),
        printed.lines().count(),
        "write `nvme-gpu man --markdown` to docs/tool.md"
    );
    assert!(printed.lines().all(|line| line.chars().count() <= 120));
}

#[test]
fn a_closed_standard_error_is_no_failure() {
    let folder = Folder::new(Place::Embedded);
    let arguments = ["list-ns", "-d", "sim:mem?size=1MiB", "-v"];
    let script = "exec \"$0\" \"$@\" 2>&-";
    let output = std::process::Command::new("sh")
        .arg("-c")
        .arg(script)
        .arg(env!("CARGO_BIN_EXE_nvme-gpu"))
        .args(arguments)
        .current_dir(folder.path("."))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let ran = Ran::new(&arguments, output);
    assert_eq!((ran.code, ran.stdout.trim()), (0, "[   0]:0x1"));
}
