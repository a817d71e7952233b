//! Checks the device library as users of CUDA C++ link it: it compiles and links, and every symbol
//! is found.

use chores::process::{Failure, check, root};
use chores::tools;
use std::path::Path;
use std::process::Command;

/// Builds nvme-gpu-kernel/examples/cuda-histogram for `gpu` into `folder`.
pub fn example(folder: &Path, gpu: &str) -> Result<(), Failure> {
    let nvcc = tools::nvcc()?;
    let script = root().join("nvme-gpu-kernel/examples/cuda-histogram/build.sh");
    let mut build = Command::new("sh");
    build.arg(script).arg(gpu);
    check(build.env("NVCC", nvcc).env("OUT", folder))
}
