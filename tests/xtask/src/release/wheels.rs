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
        // Its linker is another than that of the programs, so that in one folder each would build everything again.
        maturin.env("CARGO_TARGET_DIR", target_dir().join("release-wheels"));
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
        let mut audit = release.tools.python("abi3audit");
        // It ends with 1 for symbols of later versions, which are judged here.
        let found = audit.arg("--report").arg(&wheel).output();
        let found = found.map_err(|error| Failure::new(format!("abi3audit: {error}")))?;
        check_symbols(&String::from_utf8_lossy(&found.stdout))?;
        counts.add(Counts::PASSED);
    }
    Ok(counts)
}

/// Functions of CPython that abi3 has from 3.11 on. CPython 3.10 exports them, with the same `Py_buffer`, which the trials
/// in each version confirm.
const EARLY: [&str; 2] = ["PyBuffer_Release", "PyObject_GetBuffer"];

/// Checks abi3audit's report of a wheel: no symbol outside of abi3, and of later versions only [`EARLY`].
fn check_symbols(report: &str) -> Result<(), Failure> {
    let wrong = |what: &str| Failure::new(format!("abi3audit: {what}: {report}"));
    if !report.contains("\"is_abi3\": true") || !report.contains("\"non_abi3_symbols\": []") {
        return Err(wrong("symbols outside of abi3"));
    }
    let later = report.split_once("\"future_abi3_objects\": {");
    let later = later.and_then(|(_, rest)| rest.split_once('}'));
    let (later, _) = later.ok_or_else(|| wrong("another report than was expected"))?;
    // Names and versions in turns, in quotes.
    let mut names = later.split('"').skip(1).step_by(4);
    match names.find(|name| !EARLY.contains(name)) {
        None => Ok(()),
        Some(name) => Err(wrong(name)),
    }
}

/// Returns the file name of the wheel for `architecture`.
pub fn name(architecture: Architecture) -> String {
    let (major, minor) = GLIBC;
    let platform = format!("manylinux_{major}_{minor}_{}", architecture.rust);
    format!("nvme_gpu-{VERSION}-cp310-abi3-{platform}.whl")
}

#[cfg(test)]
mod tests {
    use super::check_symbols;

    #[test]
    fn symbols_of_later_versions_are_named() {
        let report = |others: &str, later: &str| {
            format!(
                "{{\"is_abi3\": true, \"non_abi3_symbols\": [{others}], \"future_abi3_objects\": {{{later}}}}}"
            )
        };
        let early = r#""PyObject_GetBuffer": "3.11", "PyBuffer_Release": "3.11""#;
        assert!(check_symbols(&report("", early)).is_ok());
        assert!(check_symbols(&report("", "")).is_ok());
        assert!(check_symbols(&report("\"_PyThing\"", early)).is_err());
        let later = format!(r#"{early}, "PyType_GetName": "3.11""#);
        assert!(check_symbols(&report("", &later)).is_err());
        assert!(check_symbols("{}").is_err());
    }
}
