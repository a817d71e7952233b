//! What the command line refuses: each row is an exit code, a command line and a part of its error.
//!
//! Every row is run as it is and with --json. Each time there is exactly one line on standard error with a
//! cause and a remedy, or one JSON object that says the same, nothing on standard output, no file more or
//! less, and no block changed.
#![cfg(feature = "sim")]

mod common;

use common::{Folder, Place, bytes};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(30);

/// A folder with an image of 16 blocks, and inputs of every kind.
fn folder() -> Folder {
    let folder = Folder::new(Place::Embedded);
    folder.file("disk.img", 16 * BLOCK, 1);
    folder.file("in", 2 * BLOCK, 2);
    folder.file("long", 17 * BLOCK, 3);
    folder.file("odd", BLOCK + 1, 4);
    folder.file("empty", 0, 5);
    std::fs::create_dir(folder.path("folder")).unwrap();
    symlink("disk.img", folder.path("link")).unwrap();
    symlink("loop", folder.path("loop")).unwrap();
    symlink("nowhere", folder.path("dangling")).unwrap();
    std::fs::hard_link(folder.path("disk.img"), folder.path("hard")).unwrap();
    folder
}

/// The words of a row: `''` is an empty one, and `{LF}` a line feed.
fn words(line: &str) -> Vec<String> {
    let word = |word: &str| word.replace("''", "").replace("{LF}", "\n");
    line.split(' ').map(word).collect()
}

/// Runs every row of `table`: `exit code | command line | part of the error`.
fn check(table: &str) {
    let folder = folder();
    let (names, image) = (folder.names(), bytes(&folder.path("disk.img")));
    let mut wrong = Vec::new();
    let rows: Vec<&str> = table
        .lines()
        .map(str::trim_start)
        .filter(|row| !row.is_empty())
        .collect();
    assert!(!rows.is_empty());
    for row in &rows {
        let [code, line, text] = row.splitn(3, " | ").collect::<Vec<_>>()[..] else {
            panic!("not a row: {row}");
        };
        let code = code.parse().unwrap();
        for as_json in [false, true] {
            let mut command = folder.command();
            command.args(words(line)).stdin(Stdio::null());
            if as_json && !line.contains("--json") {
                command.arg("--json");
            }
            let output = command.output().unwrap();
            let (out, said) = (text_of(&output.stdout), text_of(&output.stderr));
            let fault = fault(output.status.code(), code, &out, &said, text, as_json);
            if let Some(fault) = fault {
                wrong.push(format!("{line}, json {as_json}: {fault}: {said}"));
            }
        }
        assert_eq!(folder.names(), names, "{line}");
        assert!(bytes(&folder.path("disk.img")) == image, "{line}");
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        rows.len(),
        wrong.join("\n")
    );
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What is wrong with how a command failed.
fn fault(
    came: Option<i32>,
    code: i32,
    out: &str,
    said: &str,
    text: &str,
    as_json: bool,
) -> Option<String> {
    if came != Some(code) {
        return Some(format!("exit code {came:?}, not {code}"));
    }
    if !out.is_empty() {
        return Some(format!("standard output: {out}"));
    }
    let Some(line) = said.strip_suffix('\n').filter(|line| !line.contains('\n')) else {
        return Some("not one line".to_owned());
    };
    if line.contains("panicked") || line.chars().any(char::is_control) {
        return Some("a panic, or a control character".to_owned());
    }
    let (cause, remedy) = if as_json {
        let object: serde_json::Value = match serde_json::from_str(line) {
            Ok(object) => object,
            Err(error) => return Some(error.to_string()),
        };
        let error = &object["error"];
        if object["schema_version"] != 1 || error["exit_code"] != code {
            return Some("no version, or another code".to_owned());
        }
        let member = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (member("message"), member("remedy"))
    } else {
        let Some(rest) = line.strip_prefix("error: ") else {
            return Some("does not begin with error:".to_owned());
        };
        let Some((cause, remedy)) = rest.rsplit_once(": ") else {
            return Some("no remedy".to_owned());
        };
        (cause.to_owned(), remedy.to_owned())
    };
    if remedy.len() < 4 || cause.len() < 4 {
        return Some("no cause, or no remedy".to_owned());
    }
    let found = if as_json {
        format!("{cause}: {remedy}")
    } else {
        line.to_owned()
    };
    // What JSON escapes, the line escapes in another way.
    (!found.contains(text) && !text.contains("\\u{")).then(|| format!("without '{text}'"))
}

/// Command lines that are right, and their options with a number.
const NUMBERS: &str = "
    read -d sim:disk.img | lba blocks namespace-id timeout-ms
    write -d sim:disk.img -i in | lba blocks namespace-id timeout-ms
    compare -d sim:disk.img -i in | lba blocks
    write-zeroes -d sim:disk.img --blocks=1 | lba
    write-zeroes -d sim:disk.img --lba=1 | blocks
    dsm -d sim:disk.img --ad --blocks=1 | slbs
    dsm -d sim:disk.img --ad --slbs=1 | blocks
    smart-log -d sim:disk.img | namespace-id
    error-log -d sim:disk.img | log-entries
    get-feature -d sim:disk.img --feature-id=7 | cdw11
    set-feature -d sim:disk.img --feature-id=6 | value
    bench -d sim:disk.img | queues depth rwmixread rate-iops seed
    stream -d sim:disk.img | lba queues depth
    demo | queues depth block sim-threads seed
    serve -d sim:disk.img -s cntrl | threads
    p2p -d sim:disk.img --peer in | lba
";

const SIZES: &str = "
    bench -d sim:disk.img | bs io-size size
    stream -d sim:disk.img | size bytes
    demo | size bs
    p2p -d sim:disk.img --peer in | size
";

const TIMES: &str = "
    bench -d sim:disk.img | runtime recover
    demo | timeout
";

/// Every option of `table` with every one of `values`: refused, naming the option.
fn check_values(table: &str, values: &[&str]) {
    let mut rows = String::new();
    for line in table.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (base, options) = line.split_once(" | ").unwrap();
        for option in options.split(' ') {
            for value in values {
                rows.push_str(&format!("2 | {base} --{option}={value} | --{option}\n"));
            }
        }
    }
    check(&rows);
}

#[test]
fn numbers_that_are_none_are_refused_at_every_option() {
    check_values(
        NUMBERS,
        &[
            "",
            "+1",
            "-1",
            "1.5",
            "1e3",
            "x",
            "0x",
            "0x+1",
            "1_000",
            "99999999999999999999",
            "٣",
        ],
    );
}

#[test]
fn sizes_that_are_none_are_refused_at_every_option() {
    check_values(
        SIZES,
        &[
            "",
            "0",
            "+4096",
            "-1",
            "1.5G",
            "4x",
            "KiB",
            "0x1000",
            "99999999999999999999",
            "16777216TiB",
            "４",
        ],
    );
}

#[test]
fn times_that_are_none_are_refused_at_every_option() {
    check_values(
        TIMES,
        &[
            "",
            "0",
            "0s",
            "5",
            "+5s",
            "-5s",
            "1h",
            "1e3s",
            "s",
            "1..5s",
            "99999999999s",
        ],
    );
}

#[test]
fn command_lines_that_clap_refuses_name_what_was_meant() {
    check(
        "
        2 | fly | no command 'fly': see `nvme-gpu --help`
        2 | reed | did you mean 'read'?
        2 | identfy | did you mean 'identify'?
        2 | '' | no command ''
        2 | READ | no command 'READ'
        2 | identify | see `nvme-gpu identify --help`
        2 | identify ctlr -d sim:disk.img | did you mean 'ctrl'?
        2 | identify ns | missing: --device
        2 | read | missing: --device <DEVICE>: see `nvme-gpu read --help`
        2 | write -d sim:disk.img | --in <FILE>
        2 | dsm -d sim:disk.img --ad | --slbs
        2 | read -d | --device
        2 | read -d sim:disk.img --colour | unexpected argument '--colour'
        2 | read -d sim:disk.img --block 1 | did you mean '--blocks'?
        2 | read -d sim:disk.img --jsn | did you mean '--json'?
        2 | read -d sim:disk.img -Z | '-Z'
        2 | read -d sim:disk.img extra | unexpected argument 'extra'
        2 | bench -d sim:disk.img --rw randred | did you mean 'randread'?
        2 | bench -d sim:disk.img --rw ? | possible values: read, write
        2 | bench -d sim:disk.img --rw= | possible values: read, write
        2 | read -d sim:disk.img --rings gpu | possible values: host, cmb
        2 | read -d sim:disk.img --doorbells x | possible values: direct, relay
        2 | get-feature -d sim:disk.img -f 7 -s 9 | possible values: current
        2 | read -d sim:disk.img --lba 1 --lba 2 | given more than once
        2 | read -d sim:disk.img -d sim:mem | given more than once
        2 | read -d sim:disk.img --irq --irq | given more than once
        2 | bench -d sim:disk.img --irq=1 | unexpected value '1'
        2 | bench -d sim:disk.img --runtime 1s --io-size 4k | does not go with
        2 | bench -d sim:disk.img --ramp 1:2:3 --rate-iops 9 | does not go with
        2 | demo -d sim:mem --keep | does not go with
        2 | bench -d sim:disk.img --ramp 1:2 | FROM:TO:STEPS
        2 | bench -d sim:disk.img --ramp 0:2:3 | not in the range
        2 | bench -d sim:disk.img --ramp 1:x:3 | whole number
        2 | bench -d sim:disk.img --ramp 1:2:1001 | not in the range
        2 | bench -d sim:disk.img --ramp +1:2:3 | whole number
        2 | read -d sim:disk.img --timeout-ms 0 | 1 to 3600000
        2 | read -d sim:disk.img --timeout-ms 3600001 | 1 to 3600000
        2 | read -d sim:disk.img -n 0 | not in the range
        2 | read -d sim:disk.img -n 0xffffffff | not in the range
        2 | bench -d sim:disk.img --depth 0 | not in the range
        2 | bench -d sim:disk.img --queues 4097 | 1 to 4096
        2 | bench -d sim:disk.img --rwmixread 101 | 0 to 100
        2 | bench -d sim:disk.img --rate-iops 0 | not in the range
        2 | error-log -d sim:disk.img -e 0 | not in the range
    ",
    );
}

#[test]
fn control_characters_of_arguments_and_paths_are_written_out() {
    check(
        "
        2 | \x1b[31mred | \\u{1b}[31mred
        2 | read -d \x1b]0;title\x07 | \\u{1b}]0;title\\u{7}
        2 | read -d sim:disk.img --lba 1{LF}2 | 1\\u{a}2
        4 | write -d sim:disk.img -i a\x1b[2Jb{LF} | a\\u{1b}[2Jb\\u{a}
        4 | read -d sim:a\u{9b}2J.img | a\\u{9b}2J.img
        4 | read -d sim:\u{202e}gmi.img | \\u{202e}gmi.img
        4 | read -d sim:disk.img -o no/\r/x | no/\\u{d}/x
        2 | read -d sim:disk.img --\u{7f} | \\u{7f}
        2 | bench -d sim:disk.img --plot a\x1b.gif | a\\u{1b}.gif
    ",
    );
}

#[test]
fn devices_that_are_none_say_which_there_are() {
    let long = format!("sim:{}", "x".repeat(300));
    let socket = format!("vfio-user:{}", "x".repeat(120));
    check(
        &"
        2 | read -d '' | write sim:PATH
        2 | read -d disk.img | names no device
        2 | read -d usb:1 | unknown kind
        2 | read -d SIM:mem | unknown kind
        2 | read -d kmod:x | this build has no
        2 | read -d sim: | path
        4 | read -d sim:missing.img | No such file
        4 | read -d sim:folder/missing.img | No such file
        4 | read -d sim:disk.img/x | disk.img/x
        4 | read -d sim:folder | name a file, not a folder
        4 | read -d sim:loop | loop
        4 | read -d sim:dangling | dangling
        4 | read -d LONG | shorter path
        2 | read -d sim:odd | multiple of
        2 | read -d sim:empty | multiple of
        2 | read -d sim:mem?size=12x | size
        2 | read -d sim:mem?size=+4096 | size
        2 | read -d sim:mem?size=4097 | size
        2 | read -d sim:mem?size=0 | size
        2 | read -d sim:mem?block=100 | block
        2 | read -d sim:mem?colour=red | colour
        2 | read -d sim:mem?queues | queues
        2 | read -d sim:mem?threads=0 | option threads
        2 | read -d sim:mem?threads=+1 | option threads
        2 | read -d sim:mem?threads=65 | option threads
        2 | read -d sim:mem?ns=0 | ns
        2 | read -d sim:mem?ready=5 | no unit
        2 | read -d sim:mem?fault=delay:5 | no unit
        2 | read -d sim:mem?fault=explode | explode
        2 | read -d sim:disk.img?size=1MiB | exists and has
        4 | read -d vfio-user:nowhere | nowhere
        4 | read -d vfio-user:disk.img | start the server
        4 | read -d vfio-user:folder | folder
        4 | read -d vfio-user: | cannot connect
        4 | read -d LONGSOCKET | shorter path
        2 | serve -d vfio-user:x -s cntrl | cannot be served
        2 | serve -d sim:disk.img -s in | not a socket
        2 | serve -d sim:disk.img -s folder | not a socket
        2 | serve -d sim:disk.img -s no/cntrl | make the folder first
        4 | serve -d sim:missing.img -s cntrl | missing.img
        2 | serve -d sim:new.img?size=1MiB -s no/cntrl | folder first
    "
        .replace("LONGSOCKET", &socket)
        .replace("LONG", &long),
    );
    if cfg!(feature = "vfio") {
        check(
            "
            2 | read -d vfio: | not a PCI address
            2 | read -d vfio:x | not a PCI address
            6 | read -d vfio:ffff:ff:1f.7 | no PCI function
            2 | bind x | not a PCI address
            6 | bind ffff:ff:1f.7 | no PCI function
            2 | unbind ffff:ff:1f.8 | not a PCI address
        ",
        );
    }
}

#[test]
fn ranges_and_namespaces_that_are_not_there() {
    check(
        "
        2 | read -d sim:disk.img --lba 16 | the last LBA is 15
        2 | read -d sim:disk.img --lba 18446744073709551615 | the last LBA is 15
        2 | read -d sim:disk.img --blocks 0 | no blocks
        2 | read -d sim:disk.img --blocks 17 | the last LBA is 15
        2 | read -d sim:disk.img --blocks 18446744073709551615 | the last LBA is 15
        2 | read -d sim:disk.img -n 2 | no namespace 2
        2 | write -d sim:disk.img -i long | the last LBA is 15
        2 | write -d sim:disk.img -i in --lba 15 | the last LBA is 15
        2 | write -d sim:disk.img -i in --lba 18446744073709551615 | past namespace 1
        2 | write -d sim:disk.img -i in --blocks 3 | 2 blocks, not 3
        2 | write -d sim:disk.img -i in -n 9 | no namespace 9
        2 | compare -d sim:disk.img -i long | the last LBA is 15
        2 | compare -d sim:disk.img -i in --blocks 1 | 2 blocks, not 1
        2 | compare -d sim:disk.img -i /dev/zero | --blocks
        2 | compare -d sim:disk.img -i /dev/zero -b 17 | the last LBA is 15
        2 | write-zeroes -d sim:disk.img -s 15 -b 2 | the last LBA is 15
        2 | write-zeroes -d sim:disk.img -s 0 -b 0 | no blocks
        2 | dsm -d sim:disk.img --ad -s 1,2 -b 1 | 2 starts
        2 | dsm -d sim:disk.img --ad -s 16 -b 1 | the last LBA is 15
        2 | dsm -d sim:disk.img --ad -s 1, -b 1,1 | --slbs
        2 | dsm -d sim:disk.img -s 1 -b 1 | add --deallocate
        2 | smart-log -d sim:disk.img -n 99 | no namespace 99
        2 | smart-log -d sim:disk.img -n 1 | one SMART log
        2 | get-feature -d sim:disk.img -f 7 -n 99 | no namespace 99
        2 | get-feature -d sim:disk.img -f 0 | no feature 0x0
        2 | get-feature -d sim:disk.img -f 0x100 | no feature 0x100
        2 | get-feature -d sim:disk.img -f 7 --cdw11 0x100000000 | 32 bits
        2 | set-feature -d sim:disk.img -f 6 --value 0x100000000 | 32 bits
        2 | set-feature -d sim:disk.img -f 7 --value 1 | set by the driver
        2 | set-feature -d sim:disk.img -f 6 --value 0 -n 5 | no namespace 5
        2 | flush -d sim:disk.img -n 2 | no namespace 2
        2 | identify ns -d sim:disk.img -n 2 | no namespace 2
        2 | bench -d sim:disk.img --size 1MiB --io-size 4k | use at most 65536
        2 | bench -d sim:disk.img --size 1 --io-size 4k | less than one command
        2 | bench -d sim:disk.img --bs 8GiB | too large
        2 | bench -d sim:disk.img --bs 1MiB --io-size 1MiB | --bs
        2 | bench -d sim:disk.img --bs 1000 --io-size 4k | block
        2 | bench -d sim:disk.img -n 2 --io-size 4k | no namespace 2
        2 | bench -d sim:disk.img --plot a.gif | neither .svg nor .png
        4 | bench -d sim:disk.img --plot no/a.svg | no/a.svg
        2 | stream -d sim:disk.img --lba 1 | --lba without --gpu
        2 | demo --size 4097 | 4096
        4 | demo --size 99TiB | do not fit into
        2 | demo --block 1000 | 512 or 4096
        2 | demo --bs 1 | less than a block
        4 | demo --image disk.img --size 1MiB --cpu | exists
        4 | demo --image no/x.img --size 1MiB --cpu | no/x.img
        2 | p2p -d sim:disk.img --peer in --size 99TiB | the last LBA is 15
        2 | p2p -d sim:disk.img --peer in --size 5000 | whole pages
        4 | p2p -d sim:disk.img --peer missing --size 4096 | missing
        2 | read -d sim:disk.img --irq | leave --irq out
    ",
    );
}

#[test]
fn inputs_and_outputs_that_cannot_be_used() {
    check(
        "
        2 | read -d sim:disk.img -o disk.img | the image of the device itself
        2 | read -d sim:disk.img -o ./folder/../disk.img | the image of the device itself
        2 | read -d sim:disk.img -o link | the image of the device itself
        2 | read -d sim:disk.img -o hard | the image of the device itself
        2 | read -d sim:link -o hard | the image of the device itself
        2 | bench -d sim:disk.img --plot disk.img | neither .svg
        4 | read -d sim:disk.img -o folder | not a folder
        4 | read -d sim:disk.img -o . | not a folder
        4 | read -d sim:disk.img -o / | not a folder
        4 | read -d sim:disk.img -o no/such | check the path
        4 | read -d sim:disk.img -o in/x | in/x
        2 | read -d sim:disk.img -o '' | --out
        4 | read -d sim:disk.img -o /dev/full | free space
        4 | read -d sim:disk.img -o /proc/version | /proc/version
    ",
    );
    let both = "
        2 | VERB -d sim:disk.img -i disk.img | the image of the device itself
        2 | VERB -d sim:disk.img -i link | the image of the device itself
        2 | VERB -d sim:disk.img -i hard | the image of the device itself
        2 | VERB -d sim:disk.img -i odd | whole number of 4096-byte blocks
        2 | VERB -d sim:disk.img -i empty | at least one block of data
        4 | VERB -d sim:disk.img -i missing | missing
        2 | VERB -d sim:disk.img -i '' | --in
        4 | VERB -d sim:disk.img -i folder | not a folder
        4 | VERB -d sim:disk.img -i loop | circle
        4 | VERB -d sim:disk.img -i dangling | check the path
        4 | VERB -d sim:disk.img -i in/x | not a folder
        2 | VERB -d sim:disk.img -i /dev/null | --blocks
        2 | VERB -d sim:disk.img -i /dev/null -b 1 | ended after 0 bytes
        2 | VERB -d sim:disk.img -i /dev/zero | --blocks
        2 | VERB -d sim:disk.img -i - | --blocks
        4 | VERB -d sim:new.img -i in | new.img
        4 | VERB -d sim:new.img?size=1MiB -i missing | missing
    ";
    for verb in ["write", "compare"] {
        check(&both.replace("VERB", verb));
    }
}

/// A command that fails leaves no image, and one that only reads does not make one.
#[test]
fn no_command_that_fails_or_reads_leaves_an_image() {
    check(
        "
        4 | read -d sim:new.img?size=64KiB | No such file
        4 | compare -d sim:new.img?size=64KiB -i in | No such file
        4 | identify ctrl -d sim:new.img?size=64KiB | No such file
        4 | identify ns -d sim:new.img?size=64KiB | No such file
        4 | list-ns -d sim:new.img?size=64KiB | No such file
        4 | smart-log -d sim:new.img?size=64KiB | No such file
        4 | error-log -d sim:new.img?size=64KiB | No such file
        4 | get-feature -d sim:new.img?size=64KiB -f 7 | No such file
        4 | flush -d sim:new.img?size=64KiB | No such file
        4 | regs -d sim:new.img?size=64KiB | No such file
        4 | stream -d sim:new.img?size=64KiB | No such file
        4 | bench -d sim:new.img?size=64KiB --io-size 4k | No such file
        4 | p2p -d sim:new.img?size=64KiB --peer in | No such file
        2 | write -d sim:new.img?size=64KiB -i odd | whole number
        2 | write -d sim:new.img?size=64KiB -i long | the last LBA is 15
        2 | write -d sim:new.img?size=64KiB -i in --lba 15 | the last LBA is 15
        2 | write -d sim:new.img?size=64KiB -i in -b 1 | 2 blocks, not 1
        2 | write -d sim:new.img?size=64KiB -i in -n 2 | no namespace 2
        2 | write -d sim:new.img?size=64KiB -i in --irq | leave --irq out
        2 | write-zeroes -d sim:new.img?size=64KiB -s 16 -b 1 | the last LBA is 15
        2 | dsm -d sim:new.img?size=64KiB --ad -s 16 -b 1 | the last LBA is 15
        2 | bench -d sim:new.img?size=64KiB --rw write --size 1MiB | use at most 65536
        2 | bench -d sim:new.img?size=64KiB --rw write --bs 1MiB | --bs
        2 | set-feature -d sim:new.img?size=64KiB -f 6 --value 0 -n 5 | no namespace 5
        2 | demo -d sim:new.img?size=64KiB --size 1MiB | past namespace 1
        2 | write -d sim:new.img?size=64KiB&ns=3 -i in -n 4 | no namespace 4
        1 | write -d sim:new.img?size=64KiB&fault=status:0x281@op=write -i in | 0x0281
        1 | write -d sim:folder/new.img?size=64KiB&fault=cfs@op=identify -i in | CSTS.CFS
    ",
    );
}

/// Runs a line of shell in the folder, with the binary as $B.
fn shell(folder: &Folder, line: &str) -> (Option<i32>, String) {
    let output = Command::new("sh")
        .args(["-c", line])
        .env("B", env!("CARGO_BIN_EXE_nvme-gpu"))
        .env("TMPDIR", folder.path(""))
        .current_dir(folder.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .output()
        .unwrap();
    (output.status.code(), text_of(&output.stderr))
}

/// Rows of shell lines: exit code and a part of the one line of error, none for no line.
fn check_shell(rows: &[(&str, i32, &str)]) {
    let folder = folder();
    let (names, image) = (folder.names(), bytes(&folder.path("disk.img")));
    for (line, code, text) in rows {
        let (came, said) = shell(&folder, line);
        assert_eq!(came, Some(*code), "{line}: {said}");
        match text.is_empty() {
            true => assert_eq!(said, "", "{line}"),
            false => {
                let fault = fault(came, *code, "", &said, text, false);
                assert_eq!(fault, None, "{line}: {said}");
            }
        }
        assert_eq!(folder.names(), names, "{line}");
        assert!(bytes(&folder.path("disk.img")) == image, "{line}");
    }
}

#[test]
fn standard_streams_that_are_closed_or_full() {
    check_shell(&[
        ("$B list-ns -d sim:mem >&-", 4, "leave it open"),
        ("$B read -d sim:disk.img >&-", 4, "leave it open"),
        ("$B list-ns -d sim:mem >/dev/full", 4, "free space"),
        ("$B read -d sim:disk.img >/dev/full", 4, "free space"),
        ("$B --help >/dev/full", 4, "free space"),
        ("$B --help >&-", 4, "leave it open"),
        ("$B write -d sim:disk.img -i - <&-", 4, "leave it open"),
        ("$B list-ns -d sim:mem 2>&- >/dev/null", 0, ""),
        ("$B", 2, "no command was given"),
        ("$B --", 2, "no command was given"),
        ("$B fly 2>&-", 2, ""),
        ("$B fly 2>/dev/full", 2, ""),
        // The end of every filter whose reader has gone.
        (
            "{ $B read -d sim:mem; echo $? >code; } | head -c 9 >/dev/null; c=$(cat code); rm code; exit $c",
            141,
            "",
        ),
        (
            "{ $B identify ctrl -d sim:mem; echo $? >code; } | true; c=$(cat code); rm code; [ $c = 141 ] || [ $c = 0 ]",
            0,
            "",
        ),
    ]);
}

#[test]
fn input_from_pipes_is_checked_before_the_first_block_where_it_can_be() {
    check_shell(&[
        (
            "printf x | $B write -d sim:disk.img -i -",
            2,
            "whole number",
        ),
        (": | $B write -d sim:disk.img -i -", 2, "0 bytes"),
        (
            "head -c 69632 /dev/zero | $B write -d sim:disk.img -i -",
            2,
            "more than the 16 blocks",
        ),
        (
            "cat /dev/zero | $B write -d sim:disk.img -i -",
            2,
            "more than the 16 blocks",
        ),
        (
            "cat /dev/zero | $B write -d sim:disk.img -i - --lba 15",
            2,
            "more than the 1 blocks",
        ),
        (
            "cat /dev/zero | $B write -d sim:disk.img -i - --lba 16",
            2,
            "the last LBA is 15",
        ),
        (
            "cat /dev/zero | $B write -d sim:disk.img -i - --blocks 17",
            2,
            "the last LBA is 15",
        ),
        (
            "cat in | $B write -d sim:disk.img -i - --blocks 3",
            2,
            "ended after 8192 bytes, before 3 blocks",
        ),
        (
            "$B write -d sim:disk.img -i disk.img <disk.img",
            2,
            "the image of the device itself",
        ),
        (
            "$B write -d sim:disk.img -i - <disk.img",
            2,
            "the image of the device itself",
        ),
        (
            "$B write -d sim:disk.img -i - <long",
            2,
            "the last LBA is 15",
        ),
        (
            "$B compare -d sim:disk.img -i - <disk.img",
            2,
            "the image of the device itself",
        ),
        ("cat disk.img | $B compare -d sim:disk.img -i -", 0, ""),
        (
            "cat disk.img /dev/zero | $B compare -d sim:disk.img -i - --blocks 16",
            0,
            "",
        ),
        ("cat disk.img | $B write -d sim:disk.img -i -", 0, ""),
        (
            "(tail -c 4096 disk.img; cat /dev/zero) | $B write -d sim:disk.img -i - -s 15 -b 1",
            0,
            "",
        ),
    ]);
}

#[test]
fn limits_of_the_process_are_named() {
    check_shell(&[
        (
            "ulimit -n 4; $B write -d sim:disk.img -i in",
            6,
            "ulimit -n",
        ),
        (
            "ulimit -n 4; exec $B serve -d sim:disk.img -s cntrl",
            6,
            "ulimit -n",
        ),
        (
            "ulimit -f 8; $B read -d sim:disk.img -o out",
            4,
            "ulimit -f",
        ),
    ]);
}

/// Waits until the process catches `signal`, and sends it.
fn send(child: &std::process::Child, signal: i32) {
    let begin = Instant::now();
    let catches = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("SigCgt:"))
            .unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << (signal - 1) != 0
    };
    while !catches() {
        assert!(begin.elapsed() < PATIENCE, "signal {signal} is not caught");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Long enough to reach the pipe; one that comes earlier has the same end.
    std::thread::sleep(Duration::from_millis(200));
    let arguments = [format!("-{signal}"), child.id().to_string()];
    assert!(
        Command::new("kill")
            .args(arguments)
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn a_pipe_without_its_other_end_ends_at_once_with_a_signal() {
    const HUP: i32 = 1;
    const INT: i32 = 2;
    const TERM: i32 = 15;
    let folder = folder();
    assert!(
        Command::new("mkfifo")
            .arg(folder.path("pipe"))
            .status()
            .unwrap()
            .success()
    );
    assert!(
        std::fs::metadata(folder.path("pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    let names = folder.names();
    for (line, signal) in [
        ("write -d sim:disk.img -i pipe", INT),
        ("compare -d sim:disk.img -i pipe", TERM),
        ("read -d sim:disk.img -o pipe", HUP),
        // A writer that does not write, and a reader that does not read.
        ("write -d sim:disk.img -i -", INT),
        ("read -d sim:mem", INT),
    ] {
        // Whoever runs the tests may ignore SIGHUP.
        let mut child = Command::new("env")
            .args(["--default-signal=HUP", env!("CARGO_BIN_EXE_nvme-gpu")])
            .current_dir(folder.path(""))
            .args(words(line))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Kept, so that the pipes stay open.
        let ends = (child.stdin.take(), child.stdout.take());
        send(&child, signal);
        let begin = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < PATIENCE, "{line} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(
            begin.elapsed() < Duration::from_secs(3),
            "{line}: {:?}",
            begin.elapsed()
        );
        drop(ends);
        let output = child.wait_with_output().unwrap();
        let said = text_of(&output.stderr);
        let fault = fault(output.status.code(), 130, "", &said, "interrupted", false);
        assert_eq!(fault, None, "{line}: {said}");
        assert_eq!(folder.names(), names, "{line}");
    }
}

/// The whole of an input was held once: 40 GiB of zeroes would not fit.
#[test]
fn long_inputs_are_sent_in_bounded_memory() {
    let folder = folder();
    for line in [
        "ulimit -v 1500000; $B write -d sim:null -i /dev/zero --blocks 524288",
        "ulimit -v 1500000; head -c 2147483648 /dev/zero | $B write -d sim:null -i -",
        "truncate -s 2G sparse; ulimit -v 1500000; $B write -d sim:null -i sparse",
    ] {
        let (code, said) = shell(&folder, line);
        assert_eq!((code, said.as_str()), (Some(0), ""), "{line}");
    }
}

/// Another user's files. Needs root to become that user; what is not run says so.
#[test]
fn files_of_others_are_named_with_their_remedy() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder();
    let only_owner = |name: &str| {
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(folder.path(name), mode).unwrap();
    };
    only_owner("disk.img");
    only_owner("in");
    let binary = folder.path("tool");
    std::fs::copy(env!("CARGO_BIN_EXE_nvme-gpu"), &binary).unwrap();
    let user = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    if shell(&folder, &format!("{user} ./tool --version")).0 != Some(0) {
        eprintln!("skipped: cannot become another user here");
        return;
    }
    for (line, code, text) in [
        ("./tool read -d sim:disk.img", 4, "check the permissions"),
        ("./tool write -d sim:mem -i in", 4, "check the permissions"),
        (
            "./tool read -d sim:mem -b 1 -o out",
            4,
            "check the permissions",
        ),
        (
            "./tool write -d 'sim:new.img?size=1MiB' -i long",
            4,
            "check the permissions",
        ),
        (
            "./tool serve -d sim:mem -s cntrl",
            2,
            "folder that you may write to",
        ),
    ] {
        let (came, said) = shell(&folder, &format!("{user} {line}"));
        assert_eq!(
            fault(came, code, "", &said, text, false),
            None,
            "{line}: {said}"
        );
    }
}
