//! Bills of materials in CycloneDX: the crates that each artefact is made of, with versions, licences and checksums.

use super::{Release, files};
use chores::process::{Failure, check, root};
use chores::report::Counts;
use std::process::Command;

/// Folders of packages whose artefacts are released, and the names of their bills.
const SUBJECTS: [(&str, &str); 3] = [
    ("host-shell/tool", "nvme-gpu"),
    ("host-shell/bindings/c", "libnvme-gpu"),
    ("host-shell/bindings/python", "nvme-gpu-python"),
];
/// Name that the bills have while they lie in the tree, without its end.
const MADE: &str = "release-materials";

/// Writes the bills; another implementation of the format reads them again.
pub fn make(release: &Release) -> Result<Counts, Failure> {
    let mut counts = Counts::default();
    let program = release.tools.cyclonedx()?;
    let mut write = Command::new(program);
    write.args(["cyclonedx", "--format", "json", "--spec-version", "1.5"]);
    write.args(["--target", "all", "--override-filename", MADE, "--quiet"]);
    write.env("SOURCE_DATE_EPOCH", &release.time);
    let written = check(write.current_dir(root()));
    let mut kept = Ok(());
    for (folder, name) in SUBJECTS {
        let from = root().join(folder).join(format!("{MADE}.json"));
        let to = release.artefacts.join(format!("{name}.cdx.json"));
        kept = kept.and_then(|()| files::copy(&from, &to, 0o644));
    }
    // It writes one beside each manifest of the workspace.
    let mut clean = Command::new("find");
    clean
        .arg(root())
        .args(["-name", &format!("{MADE}.json"), "-delete"]);
    check(&mut clean)?;
    written.and(kept)?;
    for (_, name) in SUBJECTS {
        let file = release.artefacts.join(format!("{name}.cdx.json"));
        let mut validate = release.tools.python("python");
        check(validate.args(["-c", VALIDATE]).arg(file))?;
        counts.add(Counts::PASSED);
    }
    Ok(counts)
}

const VALIDATE: &str = "
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
text = open(sys.argv[1]).read()
wrong = JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)
assert wrong is None, wrong
import json
parts = json.loads(text)['components']
assert len(parts) > 20 and all(part.get('version') for part in parts)
assert any(part['name'] == 'rustix' for part in parts)
print(sys.argv[1], len(parts), 'components')
";
