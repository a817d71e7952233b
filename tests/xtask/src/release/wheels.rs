//! The wheels for Python: one for each architecture, for CPython 3.10 and newer.

use super::programs::SETTINGS;
use super::{Architecture, GLIBC, Release, VERSION, files};
use chores::process::{Failure, check, output, root, target_dir};
use chores::report::Counts;

const MANIFEST: &str = "host-shell/bindings/python/Cargo.toml";

/// Builds the wheels; auditwheel confirms the platform that they name, abi3audit their version of Python.
pub fn make(release: &Release) -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    for &architecture in &release.architectures {
        let end = format!("_{}.whl", architecture.rust);
        files::remove_ending(&release.artefacts, &end)?;
        let platform = format!("manylinux_{}_{}", GLIBC.0, GLIBC.1);
        let mut maturin = release.tools.python("maturin");
        maturin.args([
            "build",
            "--release",
            "--quiet",
            "--zig",
            "--compatibility",
            &platform,
        ]);
        maturin.args(["--target", &architecture.target("gnu")]);
        maturin.arg("--manifest-path").arg(root().join(MANIFEST));
        maturin.arg("--out").arg(&release.artefacts);
        maturin.env("CARGO_TARGET_DIR", target_dir());
        check(maturin.envs(SETTINGS))?;
        let wheel = release.artefacts.join(name(architecture));
        let mut audit = release.tools.python("auditwheel");
        let text = output(audit.arg("show").arg(&wheel))?;
        let claim = format!("{platform}_{}", architecture.rust);
        println!("{text}");
        // The sentence is folded at any space.
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if !words.contains(&format!("platform tag: \"{claim}\"")) {
            return Err(Failure::new(format!(
                "auditwheel does not confirm {claim}: {text}"
            )));
        }
        check(
            release
                .tools
                .python("abi3audit")
                .args(["--strict", "--summary"])
                .arg(&wheel),
        )?;
        counts.add(Counts::PASSED);
    }
    Ok(counts)
}

/// Returns the file name of the wheel for `architecture`.
pub fn name(architecture: Architecture) -> String {
    let (major, minor) = GLIBC;
    let platform = format!("manylinux_{major}_{minor}_{}", architecture.rust);
    format!("nvme_gpu-{VERSION}-cp310-abi3-{platform}.whl")
}
