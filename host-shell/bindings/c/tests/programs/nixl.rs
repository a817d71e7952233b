//! The back end for NIXL of host-shell/bindings/nixl, built with a stand-in for NIXL's headers and called as NIXL calls it.

use super::{SANITIZERS, compile, folder, here, run, said};
use std::process::Command;

/// Builds the back end and the program that calls it with more `flags`, and runs the program.
fn call_the_back_end(name: &str, flags: &[&str]) {
    let folder = folder(name);
    let root = here("../nixl");
    let output = Command::new(root.join("build.sh"))
        .arg(&folder.0)
        .env("NIXL", root.join("tests/stand_in"))
        .env("CXXFLAGS", format!("-Werror {}", flags.join(" ")))
        .env(
            "NVME_GPU_FLAGS",
            format!(
                "-I{} -L{} -lnvme_gpu",
                here("include").display(),
                folder.0.display()
            ),
        )
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let headers = format!("-I{}", root.join("tests/stand_in/src/api/cpp").display());
    let programs = format!("-I{}", here("tests/c").display());
    let words = [
        flags,
        &[
            "-std=c++20",
            headers.as_str(),
            programs.as_str(),
            "-Wno-unused-parameter",
        ],
    ];
    let source = root.join("tests/as_nixl.cpp");
    let program = compile(&folder, source.to_str().unwrap(), &words.concat());
    let library = folder.path("libplugin_NVME_GPU.so");
    let files = folder.0.to_str().unwrap();
    run(&folder, &[], &program, &[library.to_str().unwrap(), files]);
}

/// Without optimisation, as the compiler would take longer than the program.
#[test]
fn nixl_moves_bytes_by_the_back_end_and_sanitizers_find_nothing() {
    call_the_back_end("nixl", &[&SANITIZERS[..], &["-O0", "-g1"]].concat());
}
