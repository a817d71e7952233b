//! `docs/spec-coverage.md` names exactly the tests that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

#[test]
fn table_names_every_test_and_no_other() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tests = BTreeSet::new();
    for file in fs::read_dir(here.join("tests/spec/vectors")).unwrap() {
        let path = file.unwrap().path();
        let module = path.file_stem().unwrap().to_str().unwrap().to_string();
        if module == "coverage" {
            continue;
        }
        let source = fs::read_to_string(&path).unwrap();
        for after in source.split("#[test]\nfn ").skip(1) {
            let (name, _) = after.split_once('(').unwrap();
            tests.insert(format!("{module}::{name}"));
        }
    }
    assert!(tests.len() > 50, "found only {tests:?}");

    let page = fs::read_to_string(here.join("../docs/spec-coverage.md")).unwrap();
    // An entry of a list: clause and items, a colon, the tests.
    let entries = page.split("\n- ").skip(1).map(|entry| {
        let entry = entry.split("\n\n").next().unwrap_or_default();
        entry.split_whitespace().collect::<Vec<_>>().join(" ")
    });
    let named: BTreeSet<String> = entries
        .filter_map(|entry| entry.rsplit_once(": ").map(|(_, tests)| tests.to_string()))
        .flat_map(|tests| {
            let names = tests.split('`').filter(|text| text.contains("::"));
            names.map(String::from).collect::<Vec<_>>()
        })
        .collect();
    let missing: Vec<_> = tests.difference(&named).collect();
    let stale: Vec<_> = named.difference(&tests).collect();
    assert!(
        missing.is_empty(),
        "not in docs/spec-coverage.md: {missing:?}"
    );
    assert!(
        stale.is_empty(),
        "named in docs/spec-coverage.md but gone: {stale:?}"
    );
}
