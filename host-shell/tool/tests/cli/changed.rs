//! Commands on a device that another host changes while they run.

use crate::common::{Folder, Place, bytes};

/// Checks that the command fails with exit code 2, and that its last line says `says`.
fn fails(folder: &Folder, arguments: &[&str], says: &str) {
    let ran = folder.run(arguments);
    assert_eq!(ran.code, 2, "{arguments:?}: {}", ran.stderr);
    let last = ran.stderr.lines().last().unwrap_or_default();
    assert!(
        last.contains(says) && last.contains("open it again"),
        "{}",
        ran.stderr
    );
}

in_each_place!(
    bench_ends_when_another_host_formats,
    commands_end_when_another_host_changes_the_namespace,
);

/// One command runs at a time: after the change nothing was written, so all blocks are as the format left them.
fn bench_ends_when_another_host_formats(place: Place) {
    let folder = Folder::new(place);
    for more in [&[][..], &["--recover"], &["--verify"]] {
        folder.file("disk.img", 4 << 20, 3);
        let device = "sim:disk.img?block=4096&fault=format:512@op=write,nth=10";
        let bench = [
            "bench",
            "-d",
            device,
            "--rw",
            "write",
            "--io-size",
            "4MiB",
            "--depth",
            "1",
        ];
        let says = "namespace 1 was formatted (4096 -> 512 bytes a block)";
        fails(&folder, &[&bench[..], more].concat(), says);
        let after = bytes(&folder.path("disk.img"));
        assert!(after.iter().all(|byte| *byte == 0), "{more:?}");
    }
}

fn commands_end_when_another_host_changes_the_namespace(place: Place) {
    let folder = Folder::new(place);
    // A single write command, and the flush behind it.
    folder.file("in", 64 << 10, 3);
    for (change, says) in [
        ("format:512", "was formatted (4096 -> 512 bytes a block)"),
        ("shrink:64KiB", "has become smaller (2048 -> 16 blocks)"),
        (
            "firmware:1",
            "the controller's largest transfer (MDTS) fell",
        ),
    ] {
        let device = format!("sim:mem?size=8MiB&block=4096&fault={change}@op=write,nth=1");
        fails(&folder, &["write", "-d", &device, "-i", "in"], says);
    }
}
