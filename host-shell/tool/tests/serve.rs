//! `nvme-gpu serve` as its user sees it: its output, its end, and its refusals.
#![cfg(feature = "sim")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);

/// A folder of this test alone, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("nvme-serve-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn serve(folder: &Folder, args: &[&str]) -> Command {
    // Signals may be ignored in the environment of the tests: nohup and a shell's & do that.
    let mut command = Command::new("env");
    command
        .args([
            "--default-signal=HUP,INT,TERM",
            env!("CARGO_BIN_EXE_nvme-gpu"),
        ])
        .current_dir(&folder.0)
        .arg("serve")
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Returns a connection on which a message has begun, as from a client; a silent connection would be another server
/// that tests whether the socket is in use.
fn client(path: &Path) -> UnixStream {
    let mut client = UnixStream::connect(path).unwrap();
    client.write_all(&[0xFF; 64]).unwrap();
    client
}

fn hang_up(child: &Child) {
    let pid = child.id().to_string();
    let kill = Command::new("kill").args(["-HUP", &pid]).status();
    assert!(kill.unwrap().success());
}

/// Waits for the end; a server that does not end is killed.
fn end(mut child: Child) -> Output {
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("the server does not end");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn one_line_when_ready_and_one_at_the_end() {
    let folder = Folder::new();
    let args = [
        "--device",
        "sim:mem?size=1MiB&threads=2",
        "--socket",
        "cntrl",
        "--once",
        "--json",
    ];
    let mut child = serve(&folder, &args).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(
        (&ready["event"], &ready["threads"]),
        (&"ready".into(), &2.into())
    );
    assert_eq!(ready["socket"], "cntrl");
    // The socket accepts at once: a program that has read the line can connect.
    drop(client(&folder.0.join("cntrl")));
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    let said: serde_json::Value = serde_json::from_str(&rest).unwrap();
    assert_eq!(
        (&said["event"], &said["clients"]),
        (&"end".into(), &1.into())
    );
    assert_eq!(end(child).status.code(), Some(0));
    assert!(!folder.0.join("cntrl").exists());
}

#[test]
fn a_client_that_is_put_out_is_told_of() {
    let folder = Folder::new();
    let args = ["-d", "sim:null", "-s", "cntrl", "--once"];
    let child = serve(&folder, &args).spawn().unwrap();
    let begin = Instant::now();
    let mut client = loop {
        if let Ok(client) = UnixStream::connect(folder.0.join("cntrl")) {
            break client;
        }
        assert!(begin.elapsed() < PATIENCE, "the server does not listen");
    };
    client.write_all(&[0xFF; 64]).unwrap();
    let output = end(child);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said, "a client was put out: a message of impossible size\n");
    assert_eq!(output.status.code(), Some(0));
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        told.starts_with("serving sim:null at cntrl, threads: 1; Ctrl-C ends\n"),
        "{told}"
    );
    assert!(told.contains("clients       : 1\n"), "{told}");
}

#[test]
fn the_socket_of_a_dead_server_is_replaced_and_that_of_a_living_one_is_not() {
    let folder = Folder::new();
    let path = folder.0.join("cntrl");
    drop(UnixListener::bind(&path).unwrap());
    assert!(UnixStream::connect(&path).is_err(), "no process listens");
    let args = ["-d", "sim:null", "-s", "cntrl", "--once", "--json"];
    let mut first = serve(&folder, &args).spawn().unwrap();
    let mut out = BufReader::new(first.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert!(line.contains("ready"), "{line}");
    // Neither while it waits for a client, nor while it serves one and another waits.
    let silent = UnixStream::connect(&path).unwrap();
    let waiting: Vec<_> = (0..17).map(|_| UnixStream::connect(&path)).collect();
    let second = end(serve(&folder, &args).spawn().unwrap());
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{said}");
    assert!(said.contains("another server listens"), "{said}");
    drop((silent, waiting));
    assert!(
        first.try_wait().unwrap().is_none(),
        "no client has come yet"
    );
    drop(client(&path));
    assert_eq!(end(first).status.code(), Some(0));
    assert!(!path.exists());
}

#[test]
fn of_servers_that_start_at_once_on_a_dead_socket_one_serves() {
    let folder = Folder::new();
    drop(UnixListener::bind(folder.0.join("cntrl")).unwrap());
    let args = ["-d", "sim:null", "-s", "cntrl", "--once"];
    let mut all: Vec<_> = (0..4)
        .map(|_| serve(&folder, &args).spawn().unwrap())
        .collect();
    let begin = Instant::now();
    let running = |all: &mut Vec<Child>| {
        let running = all.iter_mut().map(|one| one.try_wait().unwrap().is_none());
        running.filter(|runs| *runs).count()
    };
    while running(&mut all) > 1 {
        assert!(begin.elapsed() < PATIENCE, "several serve");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(running(&mut all), 1);
    drop(client(&folder.0.join("cntrl")));
    let codes: Vec<_> = all.into_iter().map(|one| end(one).status.code()).collect();
    assert_eq!(
        codes.iter().filter(|code| **code == Some(0)).count(),
        1,
        "{codes:?}"
    );
}

#[test]
fn a_hangup_ends_a_server_as_sigterm_does() {
    let folder = Folder::new();
    let mut child = serve(&folder, &["-d", "sim:null", "-s", "cntrl", "--json"])
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    hang_up(&child);
    let output = end(child);
    assert_eq!(output.status.code(), Some(0));
    assert!(!folder.0.join("cntrl").exists());
}

#[test]
fn a_hangup_that_was_ignored_at_the_start_stays_ignored() {
    let folder = Folder::new();
    let mut child = Command::new("sh")
        .args([
            "-c",
            "trap '' HUP; exec \"$B\" serve -d sim:null -s cntrl --once --json",
        ])
        .env("B", env!("CARGO_BIN_EXE_nvme-gpu"))
        .current_dir(&folder.0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    hang_up(&child);
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "it goes on");
    drop(client(&folder.0.join("cntrl")));
    assert_eq!(end(child).status.code(), Some(0));
}

#[test]
fn what_cannot_be_served_is_refused_before_there_is_a_socket() {
    let folder = Folder::new();
    std::fs::write(folder.0.join("file"), "mine").unwrap();
    let _live = UnixListener::bind(folder.0.join("live")).unwrap();
    let cases = [
        ("vfio-user:x", "cntrl", 2, "cannot be served: write sim:"),
        ("sim:mem?threads=0", "cntrl", 2, "option threads"),
        ("sim:mem?threads=2 --threads 2", "cntrl", 2, "given twice"),
        ("sim:mem?size=7", "cntrl", 2, "size"),
        ("sim:missing.img", "cntrl", 4, "missing.img"),
        ("sim:null", "none/cntrl", 2, "make the folder first"),
        ("sim:null", "file", 2, "not a socket"),
        ("sim:null", "live", 2, "another server listens"),
    ];
    for (device, socket, code, text) in cases {
        let mut words = vec!["-s", socket, "-d"];
        words.extend(device.split(' '));
        let child = serve(&folder, &words).spawn().unwrap();
        let output = end(child);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{device} {socket}: {said}"
        );
        assert!(said.contains(text) && said.lines().count() == 1, "{said}");
        assert!(output.stdout.is_empty());
        assert!(!folder.0.join("cntrl").exists());
    }
    assert_eq!(std::fs::read(folder.0.join("file")).unwrap(), b"mine");
}
