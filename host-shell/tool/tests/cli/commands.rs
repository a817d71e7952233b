//! The command line as a user runs it: round trips, every input error, and the printed text.

use crate::common::{Folder, Place, bytes, data};

const BLOCK: usize = 4096;

in_each_place!(
    read_gives_exactly_the_bytes_of_the_file,
    write_puts_the_bytes_there_and_nowhere_else,
    compare_tells_equal_from_different,
    zeroes_and_deallocation_change_their_range_alone,
    bad_ranges_and_inputs_change_nothing,
    devices_that_cannot_be_opened_say_why,
    outputs_that_cannot_be_written_leave_nothing_behind,
    a_failed_read_keeps_the_old_output,
    a_lost_command_ends_with_a_typed_timeout,
    a_command_that_a_reset_took_away_is_sent_again,
    json_has_the_names_that_nvme_cli_uses,
    an_image_is_created_only_when_its_size_is_given,
);

fn read_gives_exactly_the_bytes_of_the_file(place: Place) {
    let folder = Folder::new(place);
    let image = bytes(&folder.file("disk.img", 300 * BLOCK, 1));
    for (lba, blocks) in [(0, 1), (0, 300), (299, 1), (7, 200), (31, 33)] {
        let (l, b) = (lba.to_string(), blocks.to_string());
        folder.ok(&[
            "read",
            "--device",
            "sim:disk.img",
            "--lba",
            &l,
            "--blocks",
            &b,
            "--out",
            "out",
        ]);
        let expected = &image[lba * BLOCK..(lba + blocks) * BLOCK];
        assert!(
            bytes(&folder.path("out")) == expected,
            "{blocks} blocks from {lba}"
        );
    }
    let all = folder.output(&["read", "-d", "sim:disk.img"]);
    assert!(all.stdout == image, "standard output, the whole namespace");
    assert!(
        bytes(&folder.path("disk.img")) == image,
        "reading changes nothing"
    );
    assert_eq!(folder.names(), ["disk.img", "out"]);
}

fn write_puts_the_bytes_there_and_nowhere_else(place: Place) {
    for block in [512, 4096] {
        for fua in [false, true] {
            let folder = Folder::new(place);
            let mut expected = bytes(&folder.file("disk.img", 200 * block, 1));
            let input = bytes(&folder.file("in", 90 * block, 2));
            let device = format!("sim:disk.img?block={block}&mdts=2");
            let mut arguments = vec!["write", "--device", &device, "--lba", "50", "--in", "in"];
            if fua {
                arguments.push("--fua");
            }
            folder.ok(&arguments);
            expected[50 * block..140 * block].copy_from_slice(&input);
            assert!(
                bytes(&folder.path("disk.img")) == expected,
                "block {block}, fua {fua}"
            );
            folder.ok(&["compare", "--device", &device, "--lba", "50", "--in", "in"]);
        }
    }
}

fn compare_tells_equal_from_different(place: Place) {
    let folder = Folder::new(place);
    let mut image = bytes(&folder.file("disk.img", 64 * BLOCK, 1));
    std::fs::write(folder.path("same"), &image[8 * BLOCK..40 * BLOCK]).unwrap();
    folder.ok(&[
        "compare",
        "-d",
        "sim:disk.img",
        "--lba",
        "8",
        "--in",
        "same",
    ]);
    image[39 * BLOCK] ^= 1;
    std::fs::write(folder.path("other"), &image[8 * BLOCK..40 * BLOCK]).unwrap();
    folder.fails(
        &[
            "compare",
            "-d",
            "sim:disk.img",
            "--lba",
            "8",
            "--in",
            "other",
        ],
        3,
        "differs",
    );
}

fn zeroes_and_deallocation_change_their_range_alone(place: Place) {
    let folder = Folder::new(place);
    let mut expected = bytes(&folder.file("disk.img", 64 * BLOCK, 1));
    folder.ok(&[
        "write-zeroes",
        "-d",
        "sim:disk.img",
        "--lba",
        "3",
        "--blocks",
        "10",
    ]);
    expected[3 * BLOCK..13 * BLOCK].fill(0);
    assert!(bytes(&folder.path("disk.img")) == expected, "write-zeroes");
    folder.ok(&[
        "dsm",
        "-d",
        "sim:disk.img",
        "--slbs",
        "20,40",
        "--blocks",
        "5,1",
        "--deallocate",
    ]);
    expected[20 * BLOCK..25 * BLOCK].fill(0);
    expected[40 * BLOCK..41 * BLOCK].fill(0);
    folder.ok(&["read", "-d", "sim:disk.img", "--out", "out"]);
    assert!(bytes(&folder.path("out")) == expected, "dsm reads as zero");
    folder.fails(
        &[
            "dsm",
            "-d",
            "sim:disk.img",
            "--slbs",
            "1,2",
            "--blocks",
            "1",
            "--deallocate",
        ],
        2,
        "2 starts",
    );
    folder.ok(&["flush", "-d", "sim:disk.img"]);
}

fn bad_ranges_and_inputs_change_nothing(place: Place) {
    let folder = Folder::new(place);
    let image = bytes(&folder.file("disk.img", 16 * BLOCK, 1));
    folder.file("odd", BLOCK + 1, 2);
    folder.file("empty", 0, 2);
    folder.file("long", 9 * BLOCK, 2);
    std::fs::write(folder.path("kept"), b"before").unwrap();
    let before = folder.names();
    let d = "sim:disk.img";
    for command in ["write", "compare"] {
        folder.fails(&[command, "-d", d, "--in", "odd"], 2, "whole number");
        folder.fails(&[command, "-d", d, "--in", "empty"], 2, "0 bytes");
        folder.fails(&[command, "-d", d, "--in", "missing"], 4, "missing");
        folder.fails(
            &[command, "-d", d, "--in", "long", "--lba", "8"],
            2,
            "past namespace 1",
        );
        folder.fails(
            &[
                command,
                "-d",
                d,
                "--in",
                "long",
                "--lba",
                "18446744073709551615",
            ],
            2,
            "past namespace 1",
        );
        folder.fails(
            &[command, "-d", d, "--in", "long", "-n", "2"],
            2,
            "no namespace 2",
        );
    }
    folder.fails(
        &["write", "-d", d, "--in", "long", "--blocks", "8"],
        2,
        "9 blocks, not 8",
    );
    let out = ["--out", "kept"];
    let read = |more: &[&str], code, text| {
        folder.fails(&[&["read", "-d", d], more, &out].concat(), code, text)
    };
    read(&["--blocks", "0"], 2, "no blocks");
    read(&["--lba", "16", "--blocks", "1"], 2, "the last LBA is 15");
    read(&["--lba", "16"], 2, "the last LBA is 15");
    read(&["--lba", "10", "--blocks", "7"], 2, "past namespace 1");
    read(&["--lba", "x"], 2, "invalid value");
    read(&["--colour"], 2, "--colour");
    folder.fails(
        &["write-zeroes", "-d", d, "--lba", "15", "--blocks", "2"],
        2,
        "past namespace 1",
    );
    folder.fails(
        &["write-zeroes", "-d", d, "--lba", "15", "--blocks", "0"],
        2,
        "no blocks",
    );
    assert!(bytes(&folder.path("disk.img")) == image);
    assert_eq!(bytes(&folder.path("kept")), b"before");
    assert_eq!(folder.names(), before);
}

fn devices_that_cannot_be_opened_say_why(place: Place) {
    let folder = Folder::new(place);
    folder.file("truncated.img", 16 * BLOCK - 100, 1);
    std::fs::create_dir(folder.path("folder")).unwrap();
    let before = folder.names();
    folder.fails(&["read", "-d", "sim:missing.img"], 4, "size=");
    folder.fails(&["read", "-d", "sim:truncated.img"], 2, "multiple of");
    folder.fails(&["read", "-d", "sim:folder"], 4, "folder");
    folder.fails(&["read", "-d", "sim:mem?colour=red"], 2, "colour");
    folder.fails(&["read", "-d", "sim:mem?block=100"], 2, "block");
    folder.fails(&["read", "-d", "sim:mem?threads=0"], 2, "option threads");
    folder.fails(&["read", "-d", "disk.img"], 2, "names no device");
    folder.fails(
        &["read", "-d", "truncated.img"],
        2,
        "write sim:truncated.img",
    );
    folder.fails(&["read", "-d", "usb:1"], 2, "unknown kind");
    folder.fails(&["read", "-d", "vfio-user:x"], 4, "cannot connect to x");
    folder.fails(
        &["read", "-d", "vfio-user:truncated.img"],
        4,
        "start the server",
    );
    folder.fails(&["read", "-d", "vfio-user:"], 2, "names no socket");
    let long = format!("vfio-user:{}", "x".repeat(120));
    folder.fails(&["read", "-d", &long], 4, "shorter path");
    if cfg!(feature = "vfio") {
        folder.fails(&["read", "-d", "kmod:x"], 2, "not a PCI address");
        let absent = ["read", "-d", "kmod:ffff:ff:1f.7"];
        folder.fails(&absent, 6, "no PCI function ffff:ff:1f.7");
        folder.fails(&["read", "-d", "vfio:x"], 2, "not a PCI address");
        let absent = ["read", "-d", "vfio:ffff:ff:1f.7"];
        folder.fails(&absent, 6, "no PCI function ffff:ff:1f.7");
    }
    folder.fails(&["read"], 2, "--device");
    folder.fails(&[], 2, "no command");
    folder.fails(&["fly"], 2, "fly");
    assert_eq!(folder.names(), before, "nothing is created on the way");
}

fn outputs_that_cannot_be_written_leave_nothing_behind(place: Place) {
    let folder = Folder::new(place);
    folder.file("disk.img", 16 * BLOCK, 1);
    let before = folder.names();
    folder.fails(
        &["read", "-d", "sim:disk.img", "--out", "no/such/folder"],
        4,
        "no/such/folder",
    );
    folder.fails(&["read", "-d", "sim:disk.img", "--out", "."], 4, "folder");
    if std::path::Path::new("/dev/full").exists() {
        folder.fails(
            &["read", "-d", "sim:disk.img", "--out", "/dev/full"],
            4,
            "free space",
        );
    }
    assert_eq!(folder.names(), before);
}

fn a_failed_read_keeps_the_old_output(place: Place) {
    let folder = Folder::new(place);
    folder.file("disk.img", 64 * BLOCK, 1);
    std::fs::write(folder.path("out"), b"old").unwrap();
    let device = "sim:disk.img?fault=status:0x281@op=read";
    folder.fails(&["read", "-d", device, "--out", "out"], 1, "0x0281");
    assert_eq!(bytes(&folder.path("out")), b"old");
    assert_eq!(folder.names(), ["disk.img", "out"]);
}

fn a_lost_command_ends_with_a_typed_timeout(place: Place) {
    let folder = Folder::new(place);
    let image = bytes(&folder.file("disk.img", 64 * BLOCK, 1));
    let device = "sim:disk.img?fault=drop@op=read";
    let arguments = [
        "read",
        "-d",
        device,
        "--blocks",
        "4",
        "--timeout-ms",
        "1000",
        "--out",
        "out",
    ];
    folder.fails(&arguments, 5, "no answer within 1000 ms");
    assert!(bytes(&folder.path("disk.img")) == image);
    assert_eq!(folder.names(), ["disk.img"]);
    folder.fails(
        &[
            "read",
            "-d",
            "sim:disk.img?fault=allones",
            "--timeout-ms",
            "1000",
        ],
        5,
        "all ones",
    );
}

fn a_command_that_a_reset_took_away_is_sent_again(place: Place) {
    let folder = Folder::new(place);
    let image = bytes(&folder.file("disk.img", 2048 * BLOCK, 1));
    // The controller fails once, in the middle of many reads.
    folder.ok(&[
        "read",
        "-d",
        "sim:disk.img?fault=cfs@op=read,nth=5",
        "--timeout-ms",
        "2000",
        "--out",
        "out",
    ]);
    assert!(bytes(&folder.path("out")) == image);
}

fn json_has_the_names_that_nvme_cli_uses(place: Place) {
    let folder = Folder::new(place);
    let d = "sim:mem?size=1MiB&block=512&ns=3&serial=ABC";
    let ctrl = folder.json(&["identify", "ctrl", "-d", d]);
    assert_eq!(ctrl["sn"], "ABC");
    assert_eq!(ctrl["nn"], 3);
    assert_eq!(ctrl, folder.json(&["id-ctrl", "-d", d]));
    let ns = folder.json(&["identify", "ns", "-d", d, "-n", "2"]);
    assert_eq!(ns["nsze"], 2048);
    let in_use: Vec<_> = ns["lbafs"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|format| format["in_use"] == 1)
        .collect();
    assert_eq!(in_use.len(), 1);
    assert_eq!(in_use[0]["ds"], 9);
    let list = folder.json(&["list-ns", "-d", d]);
    assert_eq!(
        list,
        serde_json::json!({
            "schema_version": 1, "nsid_list": [{ "nsid": 1 }, { "nsid": 2 }, { "nsid": 3 }],
        })
    );
    let with_metadata = ["list-ns", "-d", "sim:mem?meta=8"];
    let why = "namespace 1 cannot be used: it has 8 bytes of metadata per block";
    assert_eq!(folder.json(&with_metadata)["nsid_list"][0]["unusable"], why);
    assert_eq!(
        folder.ok(&with_metadata).trim(),
        format!("[   0]:0x1  {why}")
    );
    let smart = folder.json(&["smart-log", "-d", d]);
    assert!(smart["temperature"].as_u64().unwrap() > 273, "{smart}");
    assert!(smart["host_read_commands"].is_u64());
    assert!(folder.json(&["error-log", "-d", d])["errors"].is_array());
    let queues = folder.json(&["get-feature", "-d", "sim:mem?queues=4", "-f", "0x07"]);
    assert_eq!(queues["fields"]["submission_queues"], 4);
    let set = folder.json(&["set-feature", "-d", d, "-f", "6", "--value", "0"]);
    assert_eq!(set["value"], 0);
    let regs = folder.json(&["regs", "-d", "sim:mem?mqes=77&dstrd=2"]);
    assert_eq!(regs["cap"].as_u64().unwrap() & 0xFFFF, 76);
    assert_eq!(regs["csts"], 1);
    assert!(folder.ok(&["regs", "-d", d]).contains("Ready (RDY)"));
}

fn an_image_is_created_only_when_its_size_is_given(place: Place) {
    let folder = Folder::new(place);
    let input = data(2 * BLOCK, 9);
    std::fs::write(folder.path("in"), &input).unwrap();
    folder.ok(&[
        "write",
        "-d",
        "sim:new.img?size=1MiB",
        "--lba",
        "254",
        "--in",
        "in",
    ]);
    let image = bytes(&folder.path("new.img"));
    assert_eq!(image.len(), 1 << 20);
    assert!(image[254 * BLOCK..] == input && image[..254 * BLOCK].iter().all(|byte| *byte == 0));
}
