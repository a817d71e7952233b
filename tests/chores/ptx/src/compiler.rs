//! Which compiler builds for the GPU.

use chores::process::{Failure, output};
use chores::tools;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The GPU's target.
pub const TARGET: &str = "nvptx64-nvidia-cuda";

const NONE: &str = "no compiler here has a core library for nvptx64-nvidia-cuda; one of these gives it: \
     `rustup target add nvptx64-nvidia-cuda`, `rustup component add rust-src`, \
     `apt-get install rustc-web rust-web-src`, or set PTX_RUSTC= to a rustc that has one";

/// A compiler that can build for the GPU.
pub struct Compiler {
    /// The compiler itself, not rustup's proxy for it.
    pub rustc: PathBuf,
    /// The core library is there as source only.
    pub build_std: bool,
    /// Output of `rustc -Vv`.
    pub version: String,
}

/// Returns the compiler to use, installed as root when there is none.
pub fn compiler() -> Result<Compiler, Failure> {
    if let Some(compiler) = choose() {
        return Ok(compiler);
    }
    tools::apt(&["rustc-web", "rust-web-src"], NONE)?;
    choose().ok_or_else(|| Failure::missing(NONE))
}

/// Returns the first compiler that can build for the GPU: $PTX_RUSTC, the active one, rustup's (nightlies
/// first), the distribution's.
fn choose() -> Option<Compiler> {
    let mut candidates: Vec<PathBuf> = Vec::new();
    candidates.extend(std::env::var_os("PTX_RUSTC").map(PathBuf::from));
    candidates.extend(tools::sysroot(Path::new("rustc")).map(|root| root.join("bin/rustc")));
    candidates.extend(rustup_compilers());
    candidates.push(PathBuf::from("/usr/bin/rustc"));
    candidates.into_iter().find_map(usable)
}

fn rustup_compilers() -> Vec<PathBuf> {
    let home = std::env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".rustup")));
    let entries = home.and_then(|home| std::fs::read_dir(home.join("toolchains")).ok());
    let mut toolchains: Vec<PathBuf> = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    toolchains.sort_by_key(|path| {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        (!name.starts_with("nightly"), name)
    });
    toolchains
        .into_iter()
        .map(|path| path.join("bin/rustc"))
        .collect()
}

fn usable(rustc: PathBuf) -> Option<Compiler> {
    if !rustc.is_file() {
        return None;
    }
    let rustlib = tools::sysroot(&rustc)?.join("lib/rustlib");
    let prebuilt = std::fs::read_dir(rustlib.join(TARGET).join("lib"));
    let has_core =
        |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("libcore-");
    let prebuilt = prebuilt.is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(has_core)));
    let source = rustlib.join("src/rust/library/core/src/lib.rs");
    if !prebuilt && !source.is_file() {
        return None;
    }
    let version = output(Command::new(&rustc).arg("-Vv")).ok()?;
    Some(Compiler {
        rustc,
        build_std: !prebuilt,
        version: version.trim().to_string(),
    })
}
