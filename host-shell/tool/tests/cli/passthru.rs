//! `admin-passthru` and `io-passthru`: commands whose dwords the user gives.

use crate::common::{Folder, Place, bytes};

const BLOCK: usize = 4096;

in_each_place!(
    an_admin_command_from_its_dwords_returns_its_data,
    io_commands_from_their_dwords_move_blocks,
    passthru_refuses_what_the_opcode_or_the_driver_forbids,
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
    folder.file("long", 2 * BLOCK, 3);
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
    io(
        &["-O", "2", "-i", "in", "-l", "4096"],
        "--input-file is given, but",
    );
    for option in ["-r", "-b", "--prefill=0"] {
        io(&["-O", "2", option], "the length of the data, which is 0");
    }
    io(
        &["-O", "1", "-l", "4096", "-i", "in", "-b"],
        "--raw-binary is given, but",
    );
    io(
        &["-O", "0", "-b"],
        "opcode 0x00 are 00b, which moves no data",
    );
    io(
        &["-O", "2", "-l", "4096", "-m", "8"],
        "metadata is not supported",
    );
    io(
        &["-O", "2", "-l", "8192"],
        "moves 4096 bytes by its own fields, and the data has 8192",
    );
    io(
        &["-O", "2", "-l", "0"],
        "moves 4096 bytes by its own fields, and the data has 0",
    );
    io(
        &["-O", "2", "-l", "2MiB", "--cdw12", "511"],
        "2097152 bytes are more than one command moves here: 131072, the controller's largest transfer (MDTS)",
    );
    io(
        &["-O", "1", "-l", "4096", "-i", "long"],
        "has more than --data-len",
    );
    io(&["-O", "2", "-l", "4096", "-n", "7"], "no namespace 7");
    io(&["-O", "0x1ff"], "8 bits");
    admin(
        &["-O", "6", "-l", "64"],
        "moves 4096 bytes by its own fields, and the data has 64",
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
