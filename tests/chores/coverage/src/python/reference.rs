//! The reference of the Python package, made from its docstrings by pdoc.

use super::{Tools, packages_of};
use chores::process::{Failure, NETWORK, check, check_retried, output, target_dir};
use std::path::Path;
use std::process::Command;

/// The program that makes it.
const PDOC: &str = "pdoc==16.0.0";

/// Prints the public modules below a folder that can be imported; says which cannot, and why.
const MODULES: &str = "
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for path in sorted(root.glob('nvme_gpu/**/*.py')):
    parts = path.relative_to(root).with_suffix('').parts
    parts = parts[:-1] if parts[-1] == '__init__' else parts
    if any(part.startswith('_') for part in parts):
        continue
    name = '.'.join(parts)
    try:
        importlib.import_module(name)
        print(name)
    except ImportError as error:
        print(f'left out: {name}: {error}', file=sys.stderr)
";

/// Writes the reference to `to`, of the sources and of the extension module in `built`.
///
/// # Errors
/// Missing tools, and a package that cannot be imported. Modules for engines that are not installed are left out.
pub fn reference(built: &Path, to: &Path) -> Result<(), Failure> {
    let folder = target_dir().join("tools/python-reference");
    let tools = Tools(folder.join("tools"));
    if !tools.0.join("bin/pdoc").is_file() {
        let mut create = Command::new("/usr/bin/python3");
        // With the packages of the system, torch among them, whose modules the reference has.
        create.args(["-m", "venv", "--clear", "--system-site-packages"]);
        check(create.arg(&tools.0))?;
        let mut install = tools.run("python");
        install.args(["-m", "pip", "install", "--quiet"]);
        install.args(["--disable-pip-version-check", PDOC]);
        check_retried(&mut install, &NETWORK)?;
    }
    let package = packages_of(built, &folder)?;
    let mut find = tools.run("python");
    find.args(["-c", MODULES]).arg(&package);
    let modules = output(find.env("PYTHONPATH", &package))?;
    if !modules.lines().any(|module| module == "nvme_gpu") {
        return Err(Failure::new("nvme_gpu cannot be imported"));
    }
    // Without this pdoc adds every module below a package, also those that cannot be imported.
    let all: Vec<&str> = modules.lines().collect();
    let no_others = format!("!(?!(?:{})$)", all.join("|"));
    let mut pdoc = tools.run("pdoc");
    pdoc.args(["--docformat", "restructuredtext", "--no-show-source"]);
    pdoc.arg("--output-directory")
        .arg(to)
        .args(&all)
        .arg(no_others);
    check(pdoc.env("PYTHONPATH", package))
}
