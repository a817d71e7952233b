//! Includes the CUDA C++ example that nvcc built, if `cargo xtask gpu-test --bundle` had it built.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-env-changed=NVME_GPU_IMAGES");
    println!("cargo:rerun-if-changed=build.rs");
    let built = env::var_os("NVME_GPU_IMAGES").map(PathBuf::from);
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    for arch in ["sm_80", "sm_90", "sm_100"] {
        let name = format!("histogram.{arch}.cubin");
        // Empty: not built.
        let image = built.as_ref().map_or_else(Vec::new, |folder| {
            let file = folder.join(&name);
            println!("cargo:rerun-if-changed={}", file.display());
            fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
        });
        fs::write(out.join(&name), image).expect("cargo made the folder");
    }
}
