//! Runs tests over the stand-in of CUDA, each in a process of its own, which finds it as the driver's library.

use nvme_fake_cuda as _;
use std::path::Path;
use std::process::Command;

/// Set for the processes that run a case.
const OVER_THE_STAND_IN: &str = "OVER_THE_STAND_IN";

/// Whether this process runs a case; the test of the same name starts it.
pub fn is_over_the_stand_in() -> bool {
    std::env::var_os(OVER_THE_STAND_IN).is_some()
}

/// Runs the test `case` in another process, which finds the stand-in.
pub fn in_process(case: &str) {
    let tests = std::env::current_exe().unwrap();
    let folder = tests.parent().unwrap();
    let places = ["libnvme_fake_cuda.so", "../libnvme_fake_cuda.so"];
    let mut built = places.iter().map(|name| folder.join(name));
    let built = built.find(|path| path.exists()).expect("cargo builds it");
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(case);
    std::fs::create_dir_all(&place).unwrap();
    let link = place.join("libcuda.so.1");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(&built, link).unwrap();
    let output = Command::new(&tests)
        .args(["--exact", case, "--nocapture"])
        .env("LD_LIBRARY_PATH", place)
        .env(OVER_THE_STAND_IN, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "{text}");
}
