//! The GPU kernels: rustc's NVPTX back end, then checks on the PTX, then NVIDIA's assembler.
//!
//! The back end is only reachable through unstable switches, so the one command that builds for the
//! GPU runs with `RUSTC_BOOTSTRAP=1` on whichever compiler has (sources of) a core library for it.

use crate::process::{Failure, cargo, check, root, shown};
use crate::tools;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PACKAGE: &str = "nvme-gpu-kernel";
const TARGET: &str = "nvptx64-nvidia-cuda";
/// One file serves every newer GPU: the driver compiles it for the GPU at load time.
const CPU: &str = "sm_80";
/// PTX ISA 8.2 is the first with `.mmio`.
const ISA: &str = "+ptx82";
/// GPUs for which the assembler must take the file without spilling registers.
const ASSEMBLE_FOR: [&str; 3] = ["sm_80", "sm_90", "sm_100"];

/// Builds `target/ptx/nvme_gpu_kernel.sm_80.ptx` and checks it.
pub fn run() -> Result<(), Failure> {
    let compiler = match choose() {
        Some(compiler) => compiler,
        None => {
            tools::apt(&["rustc-web", "rust-web-src"], NO_COMPILER)?;
            choose().ok_or_else(|| Failure::missing(NO_COMPILER))?
        }
    };
    let file = build(&compiler)?;
    let ptx = std::fs::read_to_string(&file)
        .map_err(|error| Failure::new(format!("{}: {error}", file.display())))?;
    let complaints = complaints(&ptx);
    if !complaints.is_empty() {
        return Err(Failure::new(format!(
            "{}:\n{}",
            file.display(),
            complaints.join("\n")
        )));
    }
    let ptxas = tools::ptxas()?;
    for gpu in ASSEMBLE_FOR {
        assemble(&ptxas, gpu, &file)?;
    }
    println!(
        "{}: {} lines, accepted for {}",
        file.display(),
        ptx.lines().count(),
        ASSEMBLE_FOR.join(", ")
    );
    Ok(())
}

const NO_COMPILER: &str = "no compiler here has a core library for nvptx64-nvidia-cuda; one of these gives it: \
     `rustup target add nvptx64-nvidia-cuda`, `rustup component add rust-src`, \
     `apt-get install rustc-web rust-web-src`, or set PTX_RUSTC= to a rustc that has one";

struct Compiler {
    rustc: PathBuf,
    /// The core library is there as source only.
    build_std: bool,
}

/// The first compiler that can build for the GPU: $PTX_RUSTC, the active one, rustup's (nightlies
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
    if prebuilt.is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(has_core))) {
        return Some(Compiler {
            rustc,
            build_std: false,
        });
    }
    let source = rustlib.join("src/rust/library/core/src/lib.rs");
    source.is_file().then_some(Compiler {
        rustc,
        build_std: true,
    })
}

fn build(compiler: &Compiler) -> Result<PathBuf, Failure> {
    let folder = root().join("target/ptx");
    let file = folder.join(format!("nvme_gpu_kernel.{CPU}.ptx"));
    forget_last_build(&folder, &file)?;
    let mut rustc = cargo();
    rustc
        .env("RUSTC", &compiler.rustc)
        .env("RUSTC_BOOTSTRAP", "1");
    rustc
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WRAPPER");
    // Jump threading can duplicate a barrier (rust-lang/rust 137086).
    rustc.env(
        "CARGO_TARGET_NVPTX64_NVIDIA_CUDA_RUSTFLAGS",
        format!("-C target-cpu={CPU} -C target-feature={ISA} -Z mir-enable-passes=-JumpThreading"),
    );
    rustc.args([
        "rustc",
        "--package",
        PACKAGE,
        "--lib",
        "--profile",
        "ptx",
        "--target",
        TARGET,
    ]);
    rustc.arg("--target-dir").arg(folder.join("build"));
    if compiler.build_std {
        rustc.arg("-Zbuild-std=core");
    }
    rustc
        .args(["--crate-type", "staticlib", "--"])
        .arg(format!("--emit=asm={}", file.display()));
    check(&mut rustc)?;
    if file.is_file() {
        Ok(file)
    } else {
        Err(Failure::new(format!("{} was not written", file.display())))
    }
}

/// Cargo does not track the file that `--emit` names: with a stale fingerprint it would say
/// "Finished" and leave an old file, or none.
fn forget_last_build(folder: &Path, file: &Path) -> Result<(), Failure> {
    let io = |error: std::io::Error| Failure::new(format!("{}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(io)?;
    if file.exists() {
        std::fs::remove_file(file).map_err(io)?;
    }
    let fingerprints = folder.join("build").join(TARGET).join("ptx/.fingerprint");
    for entry in std::fs::read_dir(fingerprints)
        .into_iter()
        .flatten()
        .flatten()
    {
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with(&format!("{PACKAGE}-"))
        {
            std::fs::remove_dir_all(entry.path()).map_err(io)?;
        }
    }
    Ok(())
}

/// What the PTX must not contain, line by line.
fn complaints(ptx: &str) -> Vec<String> {
    let mut found = Vec::new();
    if !ptx.contains(".entry") {
        found.push("no kernel: no .entry in the file".to_string());
    }
    for (number, line) in ptx.lines().enumerate() {
        let mut complain =
            |what: &str| found.push(format!("{}: {what}: {}", number + 1, line.trim()));
        if is_unordered_atomic(line) {
            complain("an atomic without an order (rustc drops it from fetch_* and swap)");
        }
        if line.contains("ld.global.nc") {
            complain("a non-coherent load, which misses what the device wrote");
        }
        if line.contains("4core3fmt") {
            complain("core::fmt in device code");
        }
    }
    found
}

/// An `atom` or `red` instruction that names no memory order is relaxed, whatever the source said.
fn is_unordered_atomic(line: &str) -> bool {
    let ordered = [".relaxed.", ".acquire.", ".release.", ".acq_rel."];
    line.split(|c: char| c.is_whitespace() || c == ';' || c == '{')
        .any(|word| {
            (word.starts_with("atom.") || word.starts_with("red."))
                && !ordered.iter().any(|order| word.contains(order))
        })
}

fn assemble(ptxas: &Path, gpu: &str, ptx: &Path) -> Result<(), Failure> {
    let mut command = Command::new(ptxas);
    command
        .arg(format!("-arch={gpu}"))
        .args(["-v", "-O3", "--warn-on-spills"])
        .arg(ptx);
    command
        .arg("-o")
        .arg(ptx.with_extension(format!("{gpu}.cubin")));
    println!("$ {}", shown(&command));
    let report = command.stdin(Stdio::null()).output();
    let report = report.map_err(|error| Failure::new(format!("{}: {error}", ptxas.display())))?;
    let text = String::from_utf8_lossy(&report.stderr).into_owned();
    if !report.status.success() {
        return Err(Failure::new(format!(
            "ptxas -arch={gpu}: {}\n{text}",
            report.status
        )));
    }
    match spills(&text) {
        0 => Ok(()),
        bytes => Err(Failure::new(format!(
            "ptxas -arch={gpu}: {bytes} bytes of spill stores\n{text}"
        ))),
    }
}

/// The spill stores in ptxas -v's report, in bytes.
fn spills(report: &str) -> u64 {
    let before = |part: &str| {
        part.trim()
            .rsplit(' ')
            .next()
            .and_then(|word| word.parse::<u64>().ok())
    };
    let parts = report.lines().flat_map(|line| line.split(','));
    parts
        .filter_map(|part| {
            part.trim()
                .strip_suffix(" bytes spill stores")
                .and_then(before)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::{complaints, spills};

    const CLEAN: &str = ".visible .entry k()\n atom.add.acq_rel.sys.global.u32 %r1, [%rd1], 1;\n\
         @%p1 red.release.sys.global.add.u32 [%rd1], 1;\n ld.relaxed.sys.global.u64 %rd2, [%rd3];\n";

    #[test]
    fn clean_ptx_passes() {
        assert_eq!(complaints(CLEAN), Vec::<String>::new());
    }

    #[test]
    fn each_trap_is_found() {
        for bad in [
            " atom.global.add.u32 %r1, [%rd1], 1;",
            " @%p2 red.global.add.u32 [%rd1], 1;",
            " ld.global.nc.u64 %rd2, [%rd3];",
            " call.uni _ZN4core3fmt9Formatter3padE;",
        ] {
            assert_eq!(complaints(&format!("{CLEAN}{bad}\n")).len(), 1, "{bad}");
        }
        assert_eq!(complaints("// an empty file").len(), 1);
    }

    #[test]
    fn spills_are_added_up() {
        let report = "ptxas info : Function properties for a\n    0 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n\
             ptxas info : Used 18 registers\n    24 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n";
        assert_eq!(spills(report), 20);
        assert_eq!(
            spills("    24 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"),
            0
        );
    }
}
