//! `bench --recover` against controllers that lose commands, die, leave and come back: the run continues, reports the
//! outages, and the data is right.
#![cfg(feature = "sim")]

mod common;

use common::{Folder, Place};
use serde_json::Value;

in_each_place!(
    lost_commands_are_sent_again,
    a_controller_that_dies_is_reset,
    a_device_that_leaves_is_opened_again,
    errors_of_the_medium_are_no_outages,
);

/// Runs a verified workload of 2,048 commands over `device` that continues after recoveries; returns its report.
fn bench(folder: &Folder, device: &str, more: &[&str]) -> Value {
    let fixed = "bench --rw randrw --verify --io-size 8MiB --timeout-ms 300 --recover";
    let fixed: Vec<&str> = fixed.split(' ').collect();
    let report = folder.json(&[&fixed[..], &["-d", device], more].concat());
    let job = &report["jobs"][0];
    let ended = |way: &str| job[way]["total_ios"].as_u64().unwrap();
    assert_eq!(ended("read") + ended("write"), 2048, "{report}");
    assert!(report["verified_bytes"].as_u64().unwrap() > 0, "{report}");
    let recovery = &report["recovery"];
    assert_eq!(
        count(recovery, "lost"),
        count(recovery, "retried"),
        "{report}"
    );
    recovery.clone()
}

fn count(recovery: &Value, name: &str) -> u64 {
    recovery[name].as_u64().unwrap()
}

fn lost_commands_are_sent_again(place: Place) {
    let folder = Folder::new(place);
    for queues in ["1", "3"] {
        let device = "sim:mem?size=16MiB&queues=4&fault=drop@op=read,every=400";
        let recovery = bench(&folder, device, &["--queues", queues]);
        assert!(count(&recovery, "lost") >= 2, "{recovery}");
        assert!(count(&recovery, "recoveries") >= 1, "{recovery}");
        assert_eq!(count(&recovery, "reopened"), 0, "{recovery}");
        let causes = recovery["causes"].to_string();
        assert!(causes.contains("no answer within 300 ms"), "{recovery}");
    }
    // Completions that are no answer to anything that was asked cost a reset.
    let device = "sim:mem?size=16MiB&queues=4&fault=wrongcid:0x777@nth=500";
    let recovery = bench(&folder, device, &["--queues", "2"]);
    assert_eq!(count(&recovery, "resets"), 1, "{recovery}");
    // Without faults the report has no outages.
    let recovery = bench(&folder, "sim:mem?size=16MiB", &[]);
    let all = ["recoveries", "resets", "reopened", "lost"];
    assert!(all.iter().all(|name| count(&recovery, name) == 0));
}

fn a_controller_that_dies_is_reset(place: Place) {
    let folder = Folder::new(place);
    let device = "sim:mem?size=16MiB&queues=4&fault=cfs@nth=700";
    let recovery = bench(&folder, device, &["--queues", "2"]);
    assert_eq!(count(&recovery, "resets"), 1, "{recovery}");
    assert!(count(&recovery, "lost") > 0, "{recovery}");
    let causes = recovery["causes"].to_string();
    assert!(causes.contains("CSTS.CFS"), "{recovery}");
}

fn a_device_that_leaves_is_opened_again(place: Place) {
    let folder = Folder::new(place);
    // In this process each opening is a new simulator, which leaves again after the same number of commands.
    let device = "sim:disk.img?size=16MiB&queues=4&fault=allones@nth=900";
    let recovery = bench(&folder, device, &["--queues", "2"]);
    assert!(count(&recovery, "reopened") >= 1, "{recovery}");
    assert!(count(&recovery, "lost") > 0, "{recovery}");
    // Without --recover the run ends with an error.
    let device = "sim:disk.img?queues=4&fault=allones@nth=900";
    let fixed = ["bench", "--io-size", "8MiB", "-d", device];
    folder.fails(&fixed, 5, "gone");
}

fn errors_of_the_medium_are_no_outages(place: Place) {
    let folder = Folder::new(place);
    let device = "sim:mem?size=16MiB&fault=status:0x281@op=read,nth=100";
    let arguments = ["bench", "-d", device, "--io-size", "8MiB", "--recover"];
    folder.fails(&arguments, 1, "Unrecovered Read Error");
}

#[cfg(feature = "vfio-user")]
mod two_processes {
    use super::*;
    use common::{Ran, Scratch, Server, binary, bytes};
    use std::path::Path;
    use std::process::{Child, Stdio};
    use std::time::{Duration, Instant};

    fn serve(device: &str, folder: &Path) -> Server {
        let socket = folder.join("cntrl");
        let _ = std::fs::remove_file(&socket);
        Server::start(binary(), device, &socket).unwrap()
    }

    /// Starts a run of 2,048 writes, 1,000 a second.
    fn start(server: &Server, recover: &[&str]) -> Child {
        let fixed = "bench --rw write --verify --io-size 8MiB --rate-iops 1000 --json --device";
        binary()
            .args(fixed.split(' '))
            .arg(server.device())
            .args(recover)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Waits until byte `at` of the image was written.
    fn wait_for_byte(image: &Path, at: usize) {
        let begin = Instant::now();
        while bytes(image)[at..at + 64].iter().all(|byte| *byte == 0) {
            assert!(begin.elapsed() < Duration::from_secs(60), "no write came");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn ended(child: Child) -> Ran {
        Ran::new(&["bench"], child.wait_with_output().unwrap())
    }

    #[test]
    fn a_server_that_is_killed_and_started_again_costs_nothing_but_time() {
        let folder = Scratch::new();
        let image = folder.0.join("disk.img");
        let device = format!("sim:{}?size=8MiB", image.display());
        let mut server = serve(&device, &folder.0);
        let child = start(&server, &["--recover", "60s"]);
        for part in [1 << 20, 4 << 20] {
            wait_for_byte(&image, part);
            server.kill();
            server = serve(&device, &folder.0);
        }
        let ran = ended(child);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let report: Value = serde_json::from_str(&ran.stdout).unwrap();
        assert_eq!(report["recovery"]["reopened"], 2, "{report}");
        assert_eq!(report["jobs"][0]["write"]["total_ios"], 2048, "{report}");
        // All data were read back and compared.
        assert_eq!(report["verified_bytes"], 8 << 20, "{report}");
        server.stop();
    }

    #[test]
    fn what_a_server_forgot_is_found() {
        let folder = Scratch::new();
        let image = folder.0.join("disk.img");
        let device = format!("sim:{}?size=8MiB", image.display());
        let mut server = serve(&device, &folder.0);
        let child = start(&server, &["--recover", "60s"]);
        wait_for_byte(&image, 1 << 20);
        server.kill();
        let server = serve("sim:mem?size=8MiB", &folder.0);
        let ran = ended(child);
        ran.failed(3, "does not hold what was written");
        server.stop();
    }

    #[test]
    fn a_server_that_stays_away_is_given_up() {
        let folder = Scratch::new();
        let image = folder.0.join("disk.img");
        let device = format!("sim:{}?size=8MiB", image.display());
        for (recover, text) in [
            (
                &["--recover", "300ms"][..],
                "it did not come back within 0.3 s",
            ),
            (&[], "closed the connection"),
        ] {
            let mut server = serve(&device, &folder.0);
            let child = start(&server, recover);
            wait_for_byte(&image, 1 << 20);
            server.kill();
            ended(child).failed(5, text);
            std::fs::remove_file(&image).unwrap();
        }
    }
}
