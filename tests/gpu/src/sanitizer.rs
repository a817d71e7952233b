//! compute-sanitizer over short runs of this program, if the tool is on the machine.

use crate::report::{End, Report};
use std::path::{Path, PathBuf};
use std::process::Command;

const TOOLS: [&str; 3] = ["memcheck", "initcheck", "synccheck"];
/// Tests that the tools run: each mode once, with and without faults.
const SHORT: [&str; 4] = [
    "tier1/no-fault",
    "tier1/dropped",
    "tier1/wrong-cid",
    "tier0/no-fault",
];
/// Kernels are this much slower under the tools.
const PATIENCE: &str = "8";
const COMMANDS: &str = "2000";
/// The tools' exit status when they found something.
const FOUND: i32 = 86;

/// Runs each tool over the short runs.
pub fn all(report: &mut Report) {
    if report.options().patience > 1 {
        return; // This is such a run.
    }
    for tool in TOOLS {
        report.case(&format!("sanitizer/{tool}"), |options| {
            let Some(program) = find() else {
                return End::Skipped("compute-sanitizer is not on this machine".to_owned());
            };
            run(&program, tool, options.gpu)
        });
    }
}

fn find() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"];
    std::env::split_paths(&path)
        .chain(usual.map(PathBuf::from))
        .map(|folder| folder.join("compute-sanitizer"))
        .find(|file| file.is_file())
}

fn run(program: &Path, tool: &str, gpu: u32) -> End {
    let this = match std::env::current_exe() {
        Ok(this) => this,
        Err(error) => return End::Failed(format!("cannot find this program: {error}")),
    };
    let output = Command::new(program)
        .args(["--tool", tool, "--error-exitcode", &FOUND.to_string()])
        .arg(this)
        .args(["--commands", COMMANDS, "--patience", PATIENCE])
        .args(["--gpu", &gpu.to_string()])
        .args(SHORT)
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => return End::Failed(format!("{}: {error}", program.display())),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let summary = text
        .lines()
        .rev()
        .find(|line| line.contains("ERROR SUMMARY"));
    let counts = text.lines().rev().find(|line| line.contains(" passed, "));
    match (output.status.code(), summary, counts) {
        (Some(0), Some(summary), Some(counts)) => {
            End::Passed(format!("{}; {counts}", summary.trim_matches(['=', ' '])))
        }
        (code, ..) => {
            let lines: Vec<&str> = text.lines().filter(|l| !l.is_empty()).take(12).collect();
            End::Failed(format!("exit {code:?}: {}", lines.join(" / ")))
        }
    }
}
