//! Runs the binary in a separate folder, with the simulator in its process or behind a server.
// Each test file uses only some of these helpers.
#![allow(dead_code)]

mod served;
pub mod stand_in;

use rustix::process::{Pid, Signal, kill_process};
pub use served::Server;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Location of the controller behind `sim:...`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The controller runs in the process of the command.
    Embedded,
    /// The controller runs in a separate process, `nvme-gpu serve`, reached by vfio-user.
    Served,
}

/// Runs each of the named functions in each [`Place`].
#[macro_export]
macro_rules! in_each_place {
    ($($name:ident),* $(,)?) => {
        mod embedded {
            $(#[test] fn $name() { super::$name($crate::common::Place::Embedded) })*
        }
        #[cfg(feature = "vfio-user")]
        mod served {
            $(#[test] fn $name() { super::$name($crate::common::Place::Served) })*
        }
    };
}

/// A folder that is removed at the end of the test.
pub struct Folder {
    scratch: Scratch,
    place: Place,
}

impl Folder {
    pub fn new(place: Place) -> Self {
        let scratch = Scratch::new();
        Self { scratch, place }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.0.join(name)
    }

    /// Returns a file of `len` bytes that no shift or repetition of itself equals.
    pub fn file(&self, name: &str, len: usize, seed: u64) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, data(len, seed)).unwrap();
        path
    }

    /// Returns the names in the folder, sorted, to check that nothing was left behind.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.scratch.0).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Returns the binary in this folder; temporary files go here too.
    pub fn command(&self) -> Command {
        let mut command = binary();
        command
            .current_dir(&self.scratch.0)
            .env("TMPDIR", &self.scratch.0);
        command
    }

    /// Starts the binary. A `sim:` device is served by a server first if the place asks for that; the error is the
    /// output of a server that could not open it.
    pub fn start(&self, arguments: &[&str]) -> Result<Started, Output> {
        let mut arguments: Vec<String> = arguments.iter().map(|&text| text.to_owned()).collect();
        let device = arguments.iter().position(|text| text.starts_with("sim:"));
        if let (Place::Embedded, Some(at)) = (self.place, device) {
            arguments[at] = audited(&arguments[at]);
        }
        let mut served = None;
        if let (Place::Served, Some(at)) = (self.place, device) {
            let behind = Behind::start(self.command(), &arguments[at])?;
            arguments[at] = behind.server.device();
            served = Some(behind);
        }
        let child = self
            .command()
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Ok(Started { child, served })
    }

    pub fn output(&self, arguments: &[&str]) -> Output {
        match self.start(arguments) {
            Ok(started) => started.output(),
            Err(output) => output,
        }
    }

    pub fn run(&self, arguments: &[&str]) -> Ran {
        Ran::new(arguments, self.output(arguments))
    }

    /// Runs and expects success; standard output.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let ran = self.run(arguments);
        assert_eq!(ran.code, 0, "{arguments:?}: {}", ran.stderr);
        ran.stdout
    }

    /// Runs with --json and expects success; the object.
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let mut arguments = arguments.to_vec();
        arguments.push("--json");
        serde_json::from_str(&self.ok(&arguments)).unwrap()
    }

    /// Runs and expects `code` and one line of error with a cause and a remedy, holding `text`.
    pub fn fails(&self, arguments: &[&str], code: i32, text: &str) {
        self.run(arguments).failed(code, text);
    }
}

/// A server whose socket is in another folder, so that the test's folder has no additional name.
pub struct Behind {
    pub server: Server,
    _folder: Scratch,
}

impl Behind {
    pub fn start(command: Command, device: &str) -> Result<Self, Output> {
        let folder = Scratch::new();
        Ok(Self {
            server: Server::start(command, device, &folder.0.join("cntrl"))?,
            _folder: folder,
        })
    }
}

/// A command in progress, and the server behind its device.
pub struct Started {
    pub child: Child,
    served: Option<Behind>,
}

impl Started {
    /// Waits for its end, then stops the server.
    pub fn output(self) -> Output {
        let mut output = self.child.wait_with_output().unwrap();
        output.stderr = judged(&output.stderr).into_bytes();
        if let Some(served) = self.served {
            served.server.stop();
        }
        output
    }
}

/// The result of a run of the tool.
pub struct Ran {
    pub arguments: String,
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn new(arguments: &[&str], output: Output) -> Self {
        Self {
            arguments: format!("{arguments:?}"),
            code: output
                .status
                .code()
                .unwrap_or_else(|| panic!("{arguments:?}: {}", output.status)),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Expects `code` and one line of error with a cause and a remedy, holding `text`.
    pub fn failed(&self, code: i32, text: &str) {
        let Self {
            arguments, stderr, ..
        } = self;
        assert_eq!(self.code, code, "{arguments}: {stderr}");
        assert_eq!(
            stderr.trim_end().lines().count(),
            1,
            "{arguments}: {stderr}"
        );
        assert!(stderr.contains(text), "{arguments}: {stderr}");
        // With --json the line is one object.
        if let Ok(object) = serde_json::from_str::<serde_json::Value>(stderr) {
            let member = |name: &str| object["error"][name].as_str().unwrap_or_default();
            assert!(!member("message").is_empty(), "no cause: {stderr}");
            assert!(!member("remedy").is_empty(), "no remedy: {stderr}");
            return;
        }
        assert!(stderr.starts_with("error: "), "{arguments}: {stderr}");
        assert!(stderr.matches(": ").count() >= 2, "no remedy: {stderr}");
    }
}

/// Returns the simulated device with a protocol auditor in it.
pub fn audited(device: &str) -> String {
    let joint = if device.contains('?') { '&' } else { '?' };
    format!("{device}{joint}audit=on")
}

/// Returns the simulator of `device` in this process, watched; the driver of the test may break no rule.
#[cfg(feature = "sim")]
pub fn embedded(device: &str) -> (std::sync::Arc<dyn nvme_host::Device>, Judge) {
    let device = audited(device);
    let text = device.strip_prefix("sim:").unwrap();
    let (device, controller) = nvme_host::sim::embed(text).unwrap();
    (device, Judge(controller))
}

/// Asks the auditor of a controller at the end.
#[cfg(feature = "sim")]
pub struct Judge(std::sync::Arc<nvme_sim::Controller<nvme_sim::HostMemory>>);

#[cfg(feature = "sim")]
impl Drop for Judge {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.0.audited().0 > 0, "it watched");
            for finding in self.0.findings() {
                assert_ne!(
                    finding.rule.side(),
                    nvme_sim::ProtocolSide::Host,
                    "{finding}"
                );
            }
        }
    }
}

/// Returns a process's standard error without the lines of its auditor about the controller, which breaks rules on
/// purpose in some tests.
pub fn judged(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    assert!(!text.contains("audit: driver: "), "{text}");
    let lines = text.split_inclusive('\n');
    lines
        .filter(|line| !line.starts_with("audit: controller: "))
        .collect()
}

/// `setpriv` of util-linux, if installed: it makes the kernel signal the program when its parent ends.
const SETPRIV: &str = "/usr/bin/setpriv";

/// Returns the binary. Where `setpriv` is there, it is killed when the thread that starts it ends, however that is: a
/// test run that is killed leaves no server behind.
pub fn binary() -> Command {
    let mut words = Vec::new();
    if Path::new(SETPRIV).exists() {
        words.extend([SETPRIV, "--pdeathsig", "KILL", "--"]);
    }
    words.extend(WITH_SIGNALS);
    words.push(env!("CARGO_BIN_EXE_nvme-gpu"));
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
}

/// Command that starts a program with default signal handling: under `nohup`, or in a background job of a shell without
/// job control, some signals are ignored, and programs inherit that.
pub const WITH_SIGNALS: [&str; 2] = ["env", "--default-signal=HUP,INT,TERM"];

/// Interrupts the process as Ctrl-C does.
pub fn interrupt(child: &Child) {
    kill_process(Pid::from_child(child), Signal::INT).unwrap();
}

/// An empty folder for temporary files.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("nvme-gpu-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn data(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    nvme_host::bench::SplitMix::new(seed).fill(&mut bytes);
    bytes
}

pub fn bytes(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}
