//! Commands made by hand, log pages as bytes, resets, and what the tool says about itself.
#![cfg(feature = "sim")]

mod common;

use common::{Folder, Place, Ran, bytes, data};
use std::process::Stdio;

const BLOCK: usize = 4096;

in_each_place!(
    an_admin_command_from_its_dwords_returns_its_data,
    io_commands_from_their_dwords_move_blocks,
    passthru_refuses_what_the_opcode_or_the_driver_forbids,
    a_log_page_comes_whole_in_several_commands,
    get_log_refuses_what_no_command_can_name,
    the_controller_works_after_a_reset,
    quiet_and_verbose_change_what_is_said_and_no_result,
    identify_prints_hex_and_the_names_of_bits,
);

fn from_digits(text: &str) -> Vec<u8> {
    let digit = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

fn an_admin_command_from_its_dwords_returns_its_data(place: Place) {
    let folder = Folder::new(place);
    let d = "sim:mem?serial=ABC&size=1MiB";
    let identify = [
        "admin-passthru",
        "-d",
        d,
        "--opcode",
        "0x06",
        "--cdw10",
        "1",
        "-l",
        "4096",
        "-r",
    ];
    let object = folder.json(&identify);
    let page = from_digits(object["data"].as_str().unwrap());
    assert_eq!(page.len(), 4096);
    assert_eq!(&page[4..24], b"ABC                 ");
    assert_eq!(
        (&object["name"], object["result"].as_u64()),
        (&"Identify".into(), Some(0))
    );
    let raw = folder.output(&[&identify[..], &["-b"]].concat());
    assert!(raw.status.success());
    assert!(raw.stdout == page, "raw data is the same bytes");
    let text = folder.ok(&identify);
    assert!(
        text.starts_with("Identify (0x06): success, result: 0x00000000\n"),
        "{text}"
    );
    assert!(text.contains("\n0000: "), "{text}");
    assert_eq!(text.lines().count(), 2 + 4096 / 16);
    assert!(text.contains("41 42 43 20"), "{text}");
    // Get Features, Number of Queues: the value is dword 0.
    let queues = folder.json(&[
        "admin-passthru",
        "-d",
        "sim:mem?queues=4",
        "-O",
        "10",
        "--cdw10",
        "7",
    ]);
    assert_eq!(queues["result"], 0x0003_0003);
    // The controller's own error.
    let missing = [
        "admin-passthru",
        "-d",
        d,
        "-O",
        "0x06",
        "--cdw10",
        "0xee",
        "-l",
        "4096",
        "-r",
    ];
    folder.fails(&missing, 1, "Identify (0x06) ended with Invalid Field");
}

fn io_commands_from_their_dwords_move_blocks(place: Place) {
    let folder = Folder::new(place);
    let mut expected = bytes(&folder.file("disk.img", 64 * BLOCK, 1));
    let input = bytes(&folder.file("in", 2 * BLOCK, 2));
    let d = "sim:disk.img";
    let write = [
        "io-passthru",
        "-d",
        d,
        "-O",
        "1",
        "-n",
        "1",
        "--cdw10",
        "5",
        "--cdw12",
        "1",
        "-l",
        "8192",
        "-w",
        "-i",
        "in",
    ];
    let text = folder.ok(&write);
    assert_eq!(text.trim(), "Write (0x01): success, result: 0x00000000");
    expected[5 * BLOCK..7 * BLOCK].copy_from_slice(&input);
    folder.ok(&["flush", "-d", d]);
    assert!(
        bytes(&folder.path("disk.img")) == expected,
        "two blocks from 5 on"
    );
    let read = [
        "io-passthru",
        "-d",
        d,
        "-O",
        "2",
        "--cdw10",
        "4",
        "--cdw12",
        "3",
        "-l",
        "16384",
        "-r",
        "-b",
    ];
    let raw = folder.output(&read);
    assert!(
        raw.stdout == expected[4 * BLOCK..8 * BLOCK],
        "four blocks from 4 on"
    );
    // A shorter input is filled up.
    std::fs::write(folder.path("short"), b"start").unwrap();
    let filled = [
        "io-passthru",
        "-d",
        d,
        "-O",
        "1",
        "--cdw10",
        "9",
        "-l",
        "4096",
        "-w",
        "-i",
        "short",
        "-p",
        "0xa5",
    ];
    folder.ok(&filled);
    folder.ok(&["flush", "-d", d]);
    let block = &bytes(&folder.path("disk.img"))[9 * BLOCK..10 * BLOCK];
    assert!(block.starts_with(b"start") && block[5..].iter().all(|byte| *byte == 0xA5));
    // Compare: the controller's answer has the exit code of a difference.
    let compare = [
        "io-passthru",
        "-d",
        d,
        "-O",
        "5",
        "--cdw10",
        "20",
        "-l",
        "4096",
        "-w",
        "-i",
        "short",
    ];
    folder.fails(&compare, 3, "Compare Failure");
    folder.ok(&["io-passthru", "-d", d, "-O", "0"]);
}

fn passthru_refuses_what_the_opcode_or_the_driver_forbids(place: Place) {
    let folder = Folder::new(place);
    let image = bytes(&folder.file("disk.img", 16 * BLOCK, 1));
    folder.file("in", BLOCK, 2);
    let d = "sim:disk.img";
    let admin =
        |more: &[&str], text| folder.fails(&[&["admin-passthru", "-d", d], more].concat(), 2, text);
    let io =
        |more: &[&str], text| folder.fails(&[&["io-passthru", "-d", d], more].concat(), 2, text);
    admin(
        &["-O", "6", "-w", "-l", "4096", "-i", "in"],
        "opcode 0x06 are 10b, which receives data",
    );
    io(
        &["-O", "1", "-r", "-l", "4096"],
        "opcode 0x01 are 01b, which sends data",
    );
    io(&["-O", "0", "-l", "4096"], "moves no data");
    io(&["-O", "2", "-i", "in", "-l", "4096"], "--input-file, but");
    io(&["-O", "2", "-r"], "without its length");
    io(
        &["-O", "2", "-l", "4096", "-m", "8"],
        "metadata is not supported",
    );
    io(
        &["-O", "2", "-l", "8192"],
        "moves 4096 bytes by its own fields, the data has 8192",
    );
    io(
        &["-O", "2", "-l", "0"],
        "moves 4096 bytes by its own fields, the data has 0",
    );
    io(
        &["-O", "2", "-l", "2MiB", "--cdw12", "511"],
        "more than one command moves",
    );
    io(
        &["-O", "1", "-l", "4096", "-i", "disk.img"],
        "has more than --data-len",
    );
    io(&["-O", "2", "-l", "4096", "-n", "7"], "no namespace 7");
    io(&["-O", "0x1ff"], "8 bits");
    admin(
        &["-O", "6", "-l", "64"],
        "moves 4096 bytes by its own fields, the data has 64",
    );
    admin(&["-O", "2", "-l", "64", "--cdw10", "2"], "moves 4 bytes");
    admin(
        &["-O", "0x0a", "--cdw10", "0x0e"],
        "feature 0x0e has 8 bytes of data",
    );
    for opcode in ["0", "1", "4", "5", "0x0c", "0x7c"] {
        admin(&["-O", opcode], "the driver");
    }
    admin(
        &["-O", "9", "--cdw10", "7", "--cdw11", "0x10001"],
        "is set by the driver itself",
    );
    folder.fails(
        &[
            "io-passthru",
            "-d",
            d,
            "-O",
            "1",
            "-l",
            "4096",
            "-i",
            "none",
        ],
        4,
        "none",
    );
    assert!(bytes(&folder.path("disk.img")) == image);
}

#[test]
fn a_dry_run_prints_the_command_and_opens_nothing() {
    let folder = Folder::new(Place::Embedded);
    let command = [
        "io-passthru",
        "-d",
        "sim:missing.img",
        "-O",
        "0x02",
        "-n",
        "3",
        "-2",
        "1",
        "-3",
        "2",
        "-4",
        "0x10",
        "-5",
        "5",
        "-6",
        "7",
        "-7",
        "8",
        "-8",
        "9",
        "-9",
        "0xffffffff",
        "-l",
        "4096",
    ];
    let text = folder.ok(&[&command[..], &["--dry-run"]].concat());
    let expected = "opcode       : 02 (Read)\nnsid         : 00000003\ncdw2         : 00000001\n\
        cdw3         : 00000002\ncdw10        : 00000010\ncdw11        : 00000005\ncdw12        : 00000007\n\
        cdw13        : 00000008\ncdw14        : 00000009\ncdw15        : ffffffff\n";
    assert_eq!(text, expected);
    let shown = ["io-passthru", "-d", "sim:mem", "-O", "0", "--show-command"];
    let ran = folder.run(&shown);
    assert!(
        ran.stderr.starts_with("opcode       : 00 (Flush)\n"),
        "{}",
        ran.stderr
    );
    assert_eq!(ran.stdout, "Flush (0x00): success, result: 0x00000000\n");
}

fn a_log_page_comes_whole_in_several_commands(place: Place) {
    let folder = Folder::new(place);
    // MDTS 1 allows 8 KiB; the page of commands and effects has 4 KiB, so offsets are tried with it.
    let d = "sim:mem?size=1MiB&mdts=1";
    let page = |length: &str, offset: &str| {
        let output = folder.output(&[
            "get-log", "-d", d, "-i", "5", "-l", length, "-O", offset, "-b",
        ]);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        output.stdout
    };
    let whole = page("4096", "0");
    // Identify and Get Log Page are supported.
    assert_eq!(
        (whole.len(), whole[4 * 6] & 1, whole[4 * 2] & 1),
        (4096, 1, 1)
    );
    assert!(page("4", "24") == whole[24..28]);
    assert!(page("1000", "0x400") == whole[1024..2024]);
    // More than one command moves: the error log, of which the controller keeps fewer entries.
    let object = folder.json(&[
        "get-log",
        "-d",
        d,
        "-i",
        "1",
        "-l",
        "4096",
        "-n",
        "0xffffffff",
    ]);
    assert_eq!(
        (object["bytes"].as_u64(), &object["name"]),
        (Some(4096), &"Error Information".into())
    );
    let text = folder.ok(&["get-log", "-d", d, "-i", "2", "-l", "512", "--rae"]);
    assert!(
        text.contains("log-id:0x02 (SMART / Health Information)"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 2 + 512 / 16);
    // By the dword of an event: SMART, whose page it names.
    let event = folder.json(&["get-log", "-d", d, "--aen", "0x20001", "-l", "512"]);
    assert_eq!(event["log_id"], 2);
    folder.fails(
        &["get-log", "-d", d, "-i", "0xc0", "-l", "64"],
        1,
        "Invalid Log Page",
    );
}

fn get_log_refuses_what_no_command_can_name(place: Place) {
    let folder = Folder::new(place);
    let get = |more: &[&str], text| {
        folder.fails(
            &[&["get-log", "-d", "sim:mem?size=1MiB"], more].concat(),
            2,
            text,
        )
    };
    get(&["-i", "2", "-l", "0"], "multiples of 4");
    get(&["-i", "2", "-l", "6"], "multiples of 4");
    get(&["-i", "2", "-l", "512", "-O", "2"], "multiples of 4");
    get(&["-i", "2", "-l", "2GiB"], "fetch at most");
    get(
        &["-i", "2", "-l", "512", "-O", "0xfffffffffffffffc"],
        "fetch at most",
    );
    get(&["-i", "2", "-l", "512", "--lsp", "0x80"], "7 bits");
    get(&["-i", "0x100", "-l", "512"], "8 bits");
    get(&["-l", "512"], "--log-id");
    get(&["-i", "2"], "--log-len");
}

#[test]
fn a_long_log_page_is_fetched_in_pieces_within_mdts() {
    use nvme_host::core::spec::Nsid;
    use nvme_host::core::spec::admin::LogOptions;
    let (device, judge) = common::embedded("sim:mem?size=1MiB&mdts=0");
    let controller = nvme_host::Controller::start(device, &nvme_host::Config::default()).unwrap();
    let most = controller.max_transfer();
    let mut seen = Vec::new();
    // One page a command: MDTS is 4 KiB at its least, and 128 KiB of a page of zeroes follow the error log.
    let config = nvme_host::Config {
        max_transfer: 1024,
        ..nvme_host::Config::default()
    };
    let (small, small_judge) = common::embedded("sim:mem?size=1MiB");
    let small = nvme_host::Controller::start(small, &config).unwrap();
    let pieces = small
        .log_page_range(5, Nsid::ALL, 512..4096, LogOptions::default(), |read| {
            seen.push(read)
        })
        .unwrap();
    assert_eq!(seen, [1024, 2048, 3072, 3584]);
    let whole = controller
        .log_page_range(5, Nsid::ALL, 0..4096, LogOptions::default(), |_| ())
        .unwrap();
    assert!(pieces == whole[512..], "{most}");
    drop((controller, small, judge, small_judge));
}

fn the_controller_works_after_a_reset(place: Place) {
    let folder = Folder::new(place);
    let d = "sim:mem?size=1MiB";
    for (flags, what) in [
        (&[][..], "controller reset"),
        (&["--subsystem"], "NVM subsystem reset"),
    ] {
        let text = folder.ok(&[&["reset", "-d", d], flags].concat());
        assert!(
            text.starts_with(&format!("{what}: success, ready again after ")),
            "{text}"
        );
        let object = folder.json(&[&["reset", "-d", d], flags].concat());
        assert_eq!(object["reset"], what);
    }
}

#[test]
fn a_subsystem_reset_keeps_the_data_and_the_queues_of_a_controller_in_use() {
    use nvme_host::core::spec::register::{Csts, offset};
    use nvme_host::core::spec::{Lba, Nsid};
    let (device, judge) = common::embedded("sim:mem?size=1MiB");
    let controller = nvme_host::Controller::start(device, &nvme_host::Config::default()).unwrap();
    let mut namespace = controller.namespace(Nsid(1)).unwrap();
    let input = data(4 * BLOCK, 3);
    namespace.write(Lba(7), &input).unwrap();
    for (round, reset) in [
        nvme_host::Controller::reset,
        nvme_host::Controller::reset_subsystem,
    ]
    .into_iter()
    .enumerate()
    {
        reset(&controller).unwrap();
        assert_eq!(controller.resets(), round as u32 + 1);
        let csts = Csts(controller.device().registers().read32(offset::CSTS));
        assert_eq!(csts.nssro(), round == 1, "NSSRO says which kind it was");
        let mut output = vec![0; 4 * BLOCK];
        namespace.read(Lba(7), &mut output).unwrap();
        assert!(output == input);
    }
    drop((namespace, controller, judge));
}

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
fn completions_name_every_command() {
    let folder = Folder::new(Place::Embedded);
    let help = folder.ok(&["--help"]);
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .map(|line| line.split_whitespace().next().unwrap())
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
    // bash takes it for a script.
    let script = folder.ok(&["completions", "bash"]);
    std::fs::write(folder.path("script"), script).unwrap();
    let bash = std::process::Command::new("bash")
        .arg("-n")
        .arg(folder.path("script"))
        .status();
    assert!(bash.is_ok_and(|status| status.success()));
}

#[test]
fn manual_pages_are_printed_and_written() {
    let folder = Folder::new(Place::Embedded);
    let page = folder.ok(&["man"]);
    assert!(page.contains(".TH nvme-gpu 1"), "{page}");
    std::fs::create_dir(folder.path("man1")).unwrap();
    folder.ok(&["man", "man1"]);
    for name in ["nvme-gpu.1", "nvme-gpu-read.1", "nvme-gpu-io-passthru.1"] {
        let page = String::from_utf8(bytes(&folder.path("man1").join(name))).unwrap();
        assert!(page.contains(".SH NAME"), "{name}");
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
#[path = "../build.rs"]
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
