//! Runs the binary over a stand-in for the CUDA driver library.

use super::{Folder, audited, judged};
use std::path::PathBuf;
use std::process::{Command, Output};

/// Returns a stand-in, built beside the tests.
pub fn built(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let folder = tests.parent().unwrap();
    let places = [folder.join(name), folder.join("..").join(name)];
    let found = places.into_iter().find(|path| path.exists());
    found.expect("cargo builds the stand-ins as dependencies of this test")
}

/// Runs the binary with the stand-in as the driver; `fault` selects the stand-in's misbehaviour.
pub fn run(folder: &Folder, fault: &str, arguments: &[&str]) -> Output {
    let mut output = command(folder, fault, arguments).output().unwrap();
    output.stderr = judged(&output.stderr).into_bytes();
    output
}

pub fn command(folder: &Folder, fault: &str, arguments: &[&str]) -> Command {
    let library = folder.path("libcuda.so.1");
    if !library.exists() {
        for name in ["libcuda.so.1", "libcuda.so"] {
            std::os::unix::fs::symlink(built("libnvme_fake_cuda.so"), folder.path(name)).unwrap();
        }
    }
    let mut command = folder.command();
    command.env("LD_LIBRARY_PATH", library.parent().unwrap());
    command.env("FAKE_CUDA", fault);
    command.args(arguments.iter().map(|text| match text.starts_with("sim:") {
        true => audited(text),
        false => (*text).to_owned(),
    }));
    command
}

/// Runs a command that must succeed; returns its standard output.
pub fn ok(folder: &Folder, arguments: &[&str]) -> String {
    let output = run(folder, "", arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the one line of a run that fails with `code`.
pub fn fails(folder: &Folder, fault: &str, code: i32, arguments: &[&str]) -> String {
    let output = run(folder, fault, arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    if arguments.contains(&"--json") {
        let object: serde_json::Value = serde_json::from_str(&error).unwrap();
        assert_eq!(object["error"]["exit_code"], code, "{error}");
    } else {
        assert!(error.starts_with("error: "), "{error}");
    }
    error
}
