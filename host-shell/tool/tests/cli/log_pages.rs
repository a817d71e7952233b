//! Log pages: whole, in pieces, and lengths that no command can name.

use crate::common::{Folder, Place};

in_each_place!(
    a_log_page_comes_whole_in_several_commands,
    get_log_refuses_what_no_command_can_name,
);

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
    // The error log is longer than one command moves; the controller keeps fewer entries.
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
    // The page ends before the requested length: the number of commands for it makes no difference.
    for (mdts, bytes) in [("0", 65_536), ("1", 8192)] {
        let device = format!("sim:mem?size=1MiB&mdts={mdts}");
        let get = ["get-log", "-d", &device, "-i", "2", "-l", "65536"];
        let ran = folder.run(&get);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        assert!(
            ran.stdout.contains(&format!("bytes:{bytes}")),
            "{}",
            ran.stdout
        );
        let says = "log page 0x02 ends before byte 8192";
        assert_eq!(ran.stderr.contains(says), bytes == 8192, "{}", ran.stderr);
    }
    let text = folder.ok(&["get-log", "-d", d, "-i", "2", "-l", "512", "--rae"]);
    assert!(
        text.contains("log-id:0x02 (SMART / Health Information)"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 2 + 512 / 16);
    // Dword 0 of an event, here SMART, names the page.
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
    let (device, judge) = crate::common::embedded("sim:mem?size=1MiB&mdts=0");
    let controller =
        nvme_host::Controller::start(device, &nvme_host::ControllerConfig::default()).unwrap();
    let most = controller.max_transfer();
    let mut seen = Vec::new();
    // One page a command: MDTS is 4 KiB at its least, and 128 KiB of a page of zeroes follow the error log.
    let config = nvme_host::ControllerConfig {
        max_transfer: 1024,
        ..nvme_host::ControllerConfig::default()
    };
    let (small, small_judge) = crate::common::embedded("sim:mem?size=1MiB");
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
