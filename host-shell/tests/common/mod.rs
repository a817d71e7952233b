//! Runs the binary in a folder of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder that is removed at the end of the test.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("nvme-gpu-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A file of `len` bytes that no shift or repetition of itself equals.
    pub fn file(&self, name: &str, len: usize, seed: u64) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, data(len, seed)).unwrap();
        path
    }

    /// Names in the folder, sorted: to see that nothing was left behind.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// A command in this folder; temporary files go here too.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvme-gpu"));
        command
            .args(arguments)
            .current_dir(&self.0)
            .env("TMPDIR", &self.0);
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Ran {
        Ran::new(arguments, self.command(arguments).output().unwrap())
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
        let ran = self.run(arguments);
        assert_eq!(ran.code, code, "{arguments:?}: {}", ran.stderr);
        assert_eq!(
            ran.stderr.trim_end().lines().count(),
            1,
            "{arguments:?}: {}",
            ran.stderr
        );
        assert!(
            ran.stderr.starts_with("error: "),
            "{arguments:?}: {}",
            ran.stderr
        );
        assert!(ran.stderr.contains(text), "{arguments:?}: {}", ran.stderr);
        assert!(
            ran.stderr.matches(": ").count() >= 2,
            "no remedy: {}",
            ran.stderr
        );
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What a run left.
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn new(arguments: &[&str], output: Output) -> Self {
        Self {
            code: output
                .status
                .code()
                .unwrap_or_else(|| panic!("{arguments:?}: {}", output.status)),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
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
