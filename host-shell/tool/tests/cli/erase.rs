//! `format` and `sanitize`: the erased data, refusals, and the errors of handles that were open before.

use crate::common::{Folder, Place, Ran, bytes, data};
use nvme_host::core::spec::admin::{Format, SanitizeAction, SanitizeFields};
use nvme_host::core::spec::log_page::sanitize_state;
use nvme_host::core::spec::{Lba, Nsid};
use nvme_host::{Controller, ControllerConfig, Error};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const MINUTE: Duration = Duration::from_secs(60);

in_each_place!(
    format_empties_the_namespace,
    format_refuses_what_the_controller_cannot_do,
    sanitize_erases_every_block_and_says_so,
    sanitize_refuses_what_makes_no_sense,
);

fn format_empties_the_namespace(place: Place) {
    let folder = Folder::new(place);
    folder.file("disk.img", 64 * BLOCK, 1);
    let d = "sim:disk.img";
    let text = folder.ok(&["format", "-d", d, "-n", "1", "--ses", "1"]);
    assert_eq!(
        text.trim(),
        "namespace 1: formatted, 64 blocks of 4096 bytes"
    );
    assert!(
        bytes(&folder.path("disk.img"))
            .iter()
            .all(|byte| *byte == 0)
    );
    folder.file("disk.img", 64 * BLOCK, 1);
    let object = folder.json(&["format", "-d", d, "-n", "0xffffffff", "-b", "512"]);
    assert_eq!(object["formatted"][0]["block_bytes"], 512);
    assert_eq!(object["formatted"][0]["blocks"], 64 * 8);
    assert!(
        bytes(&folder.path("disk.img"))
            .iter()
            .all(|byte| *byte == 0)
    );
}

fn format_refuses_what_the_controller_cannot_do(place: Place) {
    let folder = Folder::new(place);
    let image = bytes(&folder.file("disk.img", 16 * BLOCK, 1));
    let format = |more: &[&str], text| {
        folder.fails(&[&["format", "-d", "sim:disk.img"], more].concat(), 2, text)
    };
    format(&[], "--namespace-id");
    format(&["-n", "2"], "no namespace 2");
    format(&["-n", "1", "-l", "9"], "no LBA format 9");
    format(&["-n", "1", "-l", "64"], "no LBA format 64");
    format(
        &["-n", "1", "-b", "520"],
        "blocks of 520 bytes: use one of ",
    );
    format(&["-n", "1", "--pi", "1"], "no protection of type 1");
    format(&["-n", "1", "--ms", "1"], "does not place metadata so");
    format(&["-n", "1", "--ses", "3"], "--ses");
    format(&["-n", "1", "-l", "0", "-b", "512"], "--lbaf");
    assert!(
        bytes(&folder.path("disk.img")) == image,
        "nothing was erased"
    );
}

#[test]
fn a_handle_from_before_a_format_is_refused_and_a_new_one_has_the_new_blocks() {
    let (device, judge) = crate::common::embedded("sim:mem?size=1MiB");
    let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
    let mut before = controller.namespace(Nsid(1)).unwrap();
    before.write(Lba(0), &data(BLOCK, 1)).unwrap();
    let identify = controller.identify_namespace(Nsid(1)).unwrap();
    let is = |bytes: u32| {
        let formats = identify.lbaf.iter().take(identify.lba_formats());
        let mut formats = formats.map(|format| format.block_bytes());
        formats.position(|found| found == Some(bytes)).unwrap() as u8
    };
    // The blocks have the same size but are empty: the handle relies on data that are gone.
    let now = controller
        .format(Nsid(1), Format::new(is(4096), 0), MINUTE, |_| ())
        .unwrap();
    assert_eq!((now.len(), now[0].block_bytes), (1, 4096));
    let mut block = vec![1; BLOCK];
    let error = before.read(Lba(0), &mut block).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
    before = controller.namespace(Nsid(1)).unwrap();
    before.read(Lba(0), &mut block).unwrap();
    assert!(block.iter().all(|byte| *byte == 0));
    // The blocks have another size: the handle's blocks lie at other bytes.
    let now = controller
        .format(Nsid(1), Format::new(is(512), 0), MINUTE, |_| ())
        .unwrap();
    assert_eq!((now[0].block_bytes, now[0].blocks), (512, 2048));
    let refused = [
        before.read(Lba(0), &mut block),
        before.write(Lba(0), &block),
        before.flush(),
        before.write_zeroes(Lba(0), 1, false),
        before.deallocate(&[(Lba(0), 1)]),
    ];
    for result in refused {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Changed { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("namespace 1 was formatted"), "{text}");
    }
    let mut after = controller.namespace(Nsid(1)).unwrap();
    assert_eq!((after.block_bytes(), after.blocks()), (512, 2048));
    after.write(Lba(2047), &data(512, 2)).unwrap();
    // A reset finds the blocks that the format made, and no change.
    controller.reset().unwrap();
    let mut block = vec![0; 512];
    after.read(Lba(2047), &mut block).unwrap();
    assert!(block == data(512, 2));
    assert!(before.flush().is_err());
    drop((before, after, controller, judge));
}

#[test]
fn a_format_that_is_not_answered_ends_at_its_own_deadline() {
    let (device, judge) = crate::common::embedded("sim:mem?size=1MiB&fault=drop@op=format");
    let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
    let start = Instant::now();
    let result = controller.format(
        Nsid(1),
        Format::new(0, 0),
        Duration::from_millis(300),
        |_| (),
    );
    assert!(
        matches!(
            result,
            Err(Error::Timeout {
                timeout_ms: 300,
                ..
            })
        ),
        "{result:?}"
    );
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert!(
        controller.namespace(Nsid(1)).is_ok(),
        "the controller works again"
    );
    drop((controller, judge));
}

fn sanitize_erases_every_block_and_says_so(place: Place) {
    let folder = Folder::new(place);
    let d = "sim:disk.img?ns=2";
    for (action, overwrite) in [
        ("start-block-erase", &[][..]),
        ("0x04", &[]),
        ("start-overwrite", &["-n", "2", "-p", "0x41424344"]),
    ] {
        folder.file("disk.img", 64 * BLOCK, 1);
        folder.file("disk.img.2", 64 * BLOCK, 2);
        let words = ["sanitize", "-d", d, "-a", action, "--nodas"];
        let object = folder.json(&[&words[..], overwrite].concat());
        assert_eq!(
            object["state"], "the most recent sanitize succeeded",
            "{action}"
        );
        assert_eq!(
            (object["sprog"].as_u64(), &object["global_data_erased"]),
            (Some(0xFFFF), &true.into())
        );
        let mut image = bytes(&folder.path("disk.img"));
        image.extend(bytes(&folder.path("disk.img.2")));
        let expected: &[u8] = if action == "start-overwrite" {
            b"DCBA"
        } else {
            &[0; 4]
        };
        assert!(image.chunks(4).all(|part| part == expected), "{action}");
    }
    let log = folder.ok(&["sanitize-log", "-d", "sim:mem?size=1MiB"]);
    assert!(log.contains("sstat  : 0x0 (never sanitized)"), "{log}");
    let text = folder.ok(&["sanitize", "-d", "sim:mem?size=1MiB", "-a", "2"]);
    assert!(
        text.contains("the most recent sanitize succeeded"),
        "{text}"
    );
}

fn sanitize_refuses_what_makes_no_sense(place: Place) {
    let folder = Folder::new(place);
    let sanitize = |more: &[&str], text: &str| {
        folder.fails(
            &[&["sanitize", "-d", "sim:mem?size=1MiB"], more].concat(),
            2,
            text,
        )
    };
    sanitize(&[], "--sanact");
    sanitize(&["-a", "5"], "5");
    sanitize(&["-a", "2", "-n", "16"], "16");
    sanitize(&["-a", "2", "--wait", "1m", "--no-wait"], "--no-wait");
    for option in ["--owpass=0", "--ovrpat=0", "--oipbp"] {
        let name = option.split('=').next().unwrap();
        for action in ["start-block-erase", "start-crypto-erase", "exit-failure"] {
            let says = format!("{name} has no effect on --sanact {action}");
            sanitize(&["-a", action, option], &says);
        }
    }
    for option in ["--wait=60m", "--no-wait", "--ause", "--no-dealloc"] {
        let name = option.split('=').next().unwrap();
        let says = format!("{name} has no effect on --sanact exit-failure");
        sanitize(&["-a", "exit-failure", option], &says);
    }
}

#[test]
fn the_wait_for_a_sanitize_has_a_deadline_and_ends_at_ctrl_c() {
    let folder = Folder::new(Place::Embedded);
    // Sixteen passes over 4 GiB of memory take longer than the wait.
    let long = [
        "sanitize",
        "-d",
        "sim:mem?size=1GiB",
        "-a",
        "start-overwrite",
        "-n",
        "0",
        "-p",
        "1",
    ];
    let ran = folder.run(&[&long[..], &["--wait", "1ms"]].concat());
    ran.failed(5, "the sanitize is at ");
    assert!(ran.stderr.contains("sanitize-log"), "{}", ran.stderr);
    let started = folder.start(&long).unwrap();
    std::thread::sleep(Duration::from_millis(700));
    crate::common::interrupt(&started.child);
    Ran::new(&long, started.output()).failed(130, "interrupted");
}

#[test]
fn commands_during_a_sanitize_are_answered_with_the_remedy() {
    let (device, judge) = crate::common::embedded("sim:mem?size=256MiB");
    let controller = Controller::start(device, &ControllerConfig::default()).unwrap();
    let mut namespace = controller.namespace(Nsid(1)).unwrap();
    let overwrite = SanitizeFields {
        passes: 16,
        pattern: 7,
        no_deallocate: true,
        ..SanitizeFields::new(SanitizeAction::Overwrite)
    };
    controller.sanitize(overwrite).unwrap();
    let status = controller.sanitize_status().unwrap();
    assert_eq!(status.state(), sanitize_state::IN_PROGRESS);
    let mut block = vec![0; BLOCK];
    let error = namespace.read(Lba(0), &mut block).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
    namespace = controller.namespace(Nsid(1)).unwrap();
    let error = namespace.read(Lba(0), &mut block).unwrap_err();
    assert!(
        error.to_string().contains("Sanitize In Progress"),
        "{error}"
    );
    assert!(
        error.remedy().contains("sanitize-log"),
        "{}",
        error.remedy()
    );
    let start = Instant::now();
    while controller.sanitize_status().unwrap().state() == sanitize_state::IN_PROGRESS {
        assert!(start.elapsed() < 4 * MINUTE, "it ends");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Its data are not those for which the handle was opened.
    let error = namespace.read(Lba(0), &mut block).unwrap_err();
    assert!(error.to_string().contains("was sanitized"), "{error}");
    let mut namespace = controller.namespace(Nsid(1)).unwrap();
    namespace.read(Lba(0), &mut block).unwrap();
    assert!(block.chunks(4).all(|part| part == [7, 0, 0, 0]));
    drop((namespace, controller, judge));
}
