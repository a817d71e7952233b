//! Two processes: our driver and `nvme-gpu serve`. Either of them may leave at any moment.
#![cfg(all(feature = "sim", feature = "vfio-user"))]

mod common;

use common::{Folder, Place, Ran, Scratch, Server, binary, bytes, data};
use nvme_host::core::spec::register::offset;
use nvme_host::core::spec::{Lba, Nsid, nvm};
use nvme_host::{Controller, ControllerConfig, DriverQueue, Error};
use std::process::Stdio;
use std::time::Duration;

const BLOCK: usize = 4096;
/// Deadline of commands that must not expire in these tests.
const LONG: Duration = Duration::from_secs(600);

fn serve(device: &str, folder: &Scratch) -> Server {
    let socket = folder.0.join("cntrl");
    // A server that was killed left its socket, which the next one does not remove by itself.
    let _ = std::fs::remove_file(&socket);
    Server::start(binary(), device, &socket).unwrap()
}

fn connect(server: &Server) -> Controller {
    let config = ControllerConfig {
        timeout: LONG,
        ..ControllerConfig::default()
    };
    Controller::start(nvme_host::open(&server.device()).unwrap(), &config).unwrap()
}

/// Fills the queue with reads that the controller drops.
fn send_reads(controller: &Controller, queue: &mut DriverQueue) {
    for lba in 0..8 {
        let buffer = controller.alloc(BLOCK).unwrap();
        queue
            .submit(nvm::read(Nsid(1), Lba(lba), 1), Some(buffer))
            .unwrap();
    }
    queue.ring();
}

/// Checks all answers of a device that is gone.
fn expect_gone(controller: Controller, queue: &mut DriverQueue, text: &str) {
    let cause = |result: Result<(), Error>| match result {
        Err(Error::Gone { cause }) => assert!(cause.contains(text), "{cause}"),
        other => panic!("{other:?}"),
    };
    cause(queue.wait().map(drop));
    cause(queue.wait().map(drop));
    let device = controller.device();
    assert_eq!(device.registers().read32(offset::CSTS), u32::MAX);
    assert_eq!(device.registers().read64(offset::CAP), u64::MAX);
    assert!(device.gone().is_some());
    queue.ring();
    cause(controller.namespaces().map(drop));
    cause(controller.create_queue_pair(8).map(drop));
    cause(device.reset());
    cause(controller.shut_down());
}

#[test]
fn a_server_killed_under_commands_is_gone_and_comes_back() {
    let folder = Scratch::new();
    for _ in 0..3 {
        let mut server = serve("sim:mem?fault=drop@op=read", &folder);
        let controller = connect(&server);
        let mut queue = controller.create_queue_pair(16).unwrap();
        send_reads(&controller, &mut queue);
        server.kill();
        expect_gone(controller, &mut queue, "closed the connection");
    }
    let server = serve("sim:mem?size=1MiB", &folder);
    let controller = connect(&server);
    let mut namespace = controller.namespace(Nsid(1)).unwrap();
    let written = data(64 * BLOCK, 3);
    namespace.write(Lba(0), &written).unwrap();
    let mut read = vec![0; written.len()];
    namespace.read(Lba(0), &mut read).unwrap();
    assert!(read == written);
    drop(namespace);
    controller.shut_down().unwrap();
    server.stop();
}

#[test]
fn a_server_that_hangs_is_gone_after_the_deadline() {
    let folder = Scratch::new();
    let server = serve("sim:mem?fault=drop@op=read", &folder);
    let controller = connect(&server);
    let mut queue = controller.create_queue_pair(16).unwrap();
    send_reads(&controller, &mut queue);
    server.signal("-STOP");
    expect_gone(controller, &mut queue, "did not answer");
}

#[test]
fn a_server_that_stops_orderly_under_commands_is_gone() {
    let folder = Scratch::new();
    let server = serve("sim:mem?fault=drop@op=read", &folder);
    let controller = connect(&server);
    let mut queue = controller.create_queue_pair(16).unwrap();
    send_reads(&controller, &mut queue);
    server.stop();
    expect_gone(controller, &mut queue, "closed the connection");
}

#[test]
fn a_bench_reports_the_loss_and_the_next_one_runs() {
    let sockets = Scratch::new();
    let folder = Folder::new(Place::Embedded);
    let mut server = serve("sim:null", &sockets);
    let device = server.device();
    let arguments = ["bench", "-d", &device, "--runtime", "600s"];
    let started = folder.start(&arguments).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    server.kill();
    let ran = Ran::new(&arguments, started.output());
    ran.failed(5, "closed the connection");
    // The socket file still exists, but no process listens at it.
    folder.fails(&["read", "-d", &device], 4, "start the server");
    let server = serve("sim:null", &sockets);
    let report = folder.json(&["bench", "-d", &device, "--io-size", "4MiB"]);
    assert_eq!(report["jobs"][0]["read"]["total_ios"], 1024);
    server.stop();
}

#[test]
fn a_server_killed_at_any_time_is_a_typed_error() {
    let sockets = Scratch::new();
    let folder = Folder::new(Place::Embedded);
    for round in 0..30 {
        let mut server = serve("sim:mem?size=1MiB", &sockets);
        let device = server.device();
        let arguments = ["read", "-d", &device];
        let started = folder.start(&arguments).unwrap();
        std::thread::sleep(Duration::from_micros(round * 300));
        server.kill();
        let ran = Ran::new(&arguments, started.output());
        match ran.code {
            0 => assert_eq!(ran.stderr, ""),
            4 => ran.failed(4, "connect"),
            _ => ran.failed(5, "closed the connection"),
        }
    }
}

#[test]
fn clients_come_one_after_another_and_may_die() {
    let sockets = Scratch::new();
    let folder = Folder::new(Place::Embedded);
    let image = folder.file("disk.img", 256 * BLOCK, 1);
    let server = serve(&format!("sim:{}", image.display()), &sockets);
    let device = server.device();
    for round in 0..20 {
        let mut client = folder
            .command()
            .args([
                "bench",
                "-d",
                &device,
                "--runtime",
                "600s",
                "--size",
                "512KiB",
            ])
            .args(["--rw", "randwrite", "--queues", "2"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(round * 2));
        client.kill().unwrap();
        client.wait().unwrap();
        // The next client finds a controller that has been reset, and its own data.
        let input = bytes(&folder.file("in", 100 * BLOCK, round + 2));
        // The flush of the write waits for the machine's disk, on which others may write gigabytes.
        for command in ["write", "compare"] {
            let words = [command, "-d", &device, "--lba", "130", "--in", "in"];
            folder.ok(&[&words[..], &["--timeout-ms", "120000"]].concat());
        }
        let written = &bytes(&image)[130 * BLOCK..230 * BLOCK];
        assert!(written == input, "round {round}");
    }
    server.stop();
}

#[test]
fn a_second_client_is_told_to_wait() {
    let sockets = Scratch::new();
    let folder = Folder::new(Place::Embedded);
    let server = serve("sim:mem", &sockets);
    let controller = connect(&server);
    folder.fails(&["read", "-d", &server.device()], 5, "did not answer");
    assert_eq!(controller.namespaces().unwrap(), [Nsid(1)]);
    controller.shut_down().unwrap();
    folder.ok(&["list-ns", "-d", &server.device()]);
    server.stop();
}
