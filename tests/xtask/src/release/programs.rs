//! The tool and the C libraries for both architectures: with glibc for everything, static with musl for the tool alone.

use super::roots::emulate;
use super::{Architecture, GLIBC, Release, VERSION, files, linked, tar};
use chores::process::{Failure, check, root, target_dir};
use chores::report::Counts;
use std::path::{Path, PathBuf};
use std::process::Command;

const TOOL: &str = "nvme-gpu";
/// Libraries that cargo builds for C.
pub const LIBRARIES: [&str; 2] = ["libnvme_gpu_capi.so", "libnvme_gpu_compat.so"];

/// Builds all of them, and checks what each is linked with.
pub fn make(release: &Release) -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    for &architecture in &release.architectures {
        let (major, minor) = GLIBC;
        let mut build = build(release);
        let target = architecture.target("gnu");
        build.args(["--target", &format!("{target}.{major}.{minor}")]);
        for package in [TOOL, "nvme-gpu-capi", "nvme-gpu-compat"] {
            build.args(["--package", package]);
        }
        check(&mut build)?;
        for file in [TOOL].iter().chain(&LIBRARIES) {
            linked::check_floor(&built(architecture, "gnu").join(file))?;
            counts.add(Counts::PASSED);
        }
        // A static program cannot load CUDA's library.
        let mut alone = self::build(release);
        alone.args(["--target", &architecture.target("musl"), "--package", TOOL]);
        alone.args(["--no-default-features", "--features"]);
        check(alone.arg("sim,vfio-user,vfio"))?;
        linked::check_static(&built(architecture, "musl").join(TOOL))?;
        counts.add(Counts::PASSED);
    }
    Ok(counts)
}

fn build(release: &Release) -> Command {
    let mut build = release.tools.python("cargo-zigbuild");
    build.args(["zigbuild", "--release", "--locked", "--quiet"]);
    build.env("CARGO_TARGET_DIR", target_dir());
    for (name, value) in SETTINGS {
        build.env(name, value);
    }
    build
}

/// Settings of cargo for everything that is released: programs without symbols.
pub const SETTINGS: [(&str, &str); 2] = [
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_STRIP", "symbols"),
];

/// Returns the folder in which cargo builds for `architecture` with the C library `library`.
pub fn built(architecture: Architecture, library: &str) -> PathBuf {
    target_dir()
        .join(architecture.target(library))
        .join("release")
}

/// Writes manual pages and completions below `prefix`, as `tool` prints them: each C library has other options.
pub fn describe(
    (architecture, library): (Architecture, &str),
    prefix: &Path,
    zsh: &str,
    fish: &str,
) -> Result<(), Failure> {
    let tool = built(architecture, library).join(TOOL);
    let run = || {
        let mut run = Command::new(&tool);
        // Where qemu-user finds the loader of another architecture.
        run.env("QEMU_LD_PREFIX", format!("/usr/{}", architecture.triplet()));
        run
    };
    if !architecture.is_host() {
        emulate()?;
    }
    let manual = prefix.join("share/man/man1");
    files::make_folder(&manual)?;
    check(run().arg("man").arg(&manual))?;
    let shells = [
        ("bash", "share/bash-completion/completions/nvme-gpu"),
        ("zsh", zsh),
        ("fish", fish),
    ];
    for (shell, path) in shells {
        let script = chores::process::output(run().args(["completions", shell]))?;
        files::write(&prefix.join(path), &script)?;
    }
    Ok(())
}

/// Packs the tool with its manual pages, completions, licences and README: one archive for each architecture and C
/// library.
pub fn pack(release: &Release) -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    for &architecture in &release.architectures {
        for library in ["gnu", "musl"] {
            let name = archive(architecture, library);
            let folder = release.work.join(&name);
            files::empty_folder(&folder)?;
            let tool = built(architecture, library).join(TOOL);
            files::copy(&tool, &folder.join("bin").join(TOOL), 0o755)?;
            describe(
                (architecture, library),
                &folder,
                "share/zsh/site-functions/_nvme-gpu",
                "share/fish/vendor_completions.d/nvme-gpu.fish",
            )?;
            for text in ["LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
                files::copy(&root().join(text), &folder.join(text), 0o644)?;
            }
            let file = release.artefacts.join(format!("{name}.tar.gz"));
            tar(release, &release.work, &name, &file)?;
            counts.add(Counts::PASSED);
        }
    }
    Ok(counts)
}

/// Returns the name of an archive of the tool, without its end.
pub fn archive(architecture: Architecture, library: &str) -> String {
    format!("{TOOL}-{VERSION}-{}-linux-{library}", architecture.rust)
}
