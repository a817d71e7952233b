//! `cargo xtask python --asan`: the tests of Python with the extension module and the stand-in of CUDA under
//! AddressSanitizer.
//!
//! This is not a stage: the build takes minutes, and no other stage can use it. The interpreter is Debian's: it loads
//! the sanitizer's runtime first and allocates each object with malloc, so that the sanitizer knows what it frees.

use super::{Tools, pytest, python_over};
use chores::process::{Failure, cargo, check, output, target_dir};
use chores::report::Counts;
use std::path::Path;
use std::process::Command;

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

pub fn run(tools: &Tools) -> Result<Counts, Failure> {
    let folder = target_dir().join("asan");
    let mut build = cargo();
    build.args(["build", "--package", "nvme-gpu-python"]);
    build.args([
        "--package",
        "nvme-fake-cuda",
        "--package",
        "nvme-fake-cufile",
    ]);
    build.args(["--target", TRIPLE]);
    build
        .arg("--target-dir")
        .arg(&folder)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address");
    check(&mut build)?;

    let built = folder.join(TRIPLE).join("debug");
    // If the library of C++ is loaded, the runtime sees exceptions of torch.
    let runtimes = [runtime("libasan.so")?, runtime("libstdc++.so")?];
    let mut python = python_over(tools, &folder, &built)?;
    python
        .env("LD_PRELOAD", runtimes.join(" "))
        .env("PYTHONMALLOC", "malloc")
        .env("NVME_GPU_ASAN", "1")
        // Objects that Python keeps until its end are not leaks. Impossible sizes are errors that Python reports.
        .env("ASAN_OPTIONS", "detect_leaks=0:allocator_may_return_null=1");
    pytest(&mut python)
}

/// Returns the path of the sanitizer's shared runtime of the C compiler.
fn runtime(name: &str) -> Result<String, Failure> {
    let mut ask = Command::new("gcc");
    let found = output(ask.arg(format!("-print-file-name={name}")))?;
    let found = found.trim().to_owned();
    match Path::new(&found).is_absolute() {
        true => Ok(found),
        false => Err(Failure::missing(format!("gcc has no {name}"))),
    }
}
