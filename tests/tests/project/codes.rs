//! Codes of errors: every interface knows those of every kind.

use std::collections::BTreeSet;
use std::path::Path;

/// Sources with a function `code`, which returns the code of each kind of error.
const ERRORS: [&str; 2] = [
    "host-shell/driver/src/error.rs",
    "host-shell/kv/src/error.rs",
];
/// The source in which C finds the number for a code.
const OF_C: &str = "host-shell/bindings/c/src/status.rs";
/// C has this number for all codes that it does not know.
const UNKNOWN: &str = "internal";

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::fs::read_to_string(root.join(path)).unwrap()
}

/// Returns the texts in quotes between the first line that begins with `begin` and the end of its function.
fn quoted<'t>(text: &'t str, begin: &str) -> BTreeSet<&'t str> {
    let mut lines = text.lines().skip_while(|line| !line.contains(begin));
    let indent = lines
        .next()
        .map_or(0, |line| line.len() - line.trim_start().len());
    let end = format!("{}}}", " ".repeat(indent));
    let body = lines.take_while(|line| **line != end);
    body.flat_map(|line| line.split('"').skip(1).step_by(2))
        .collect()
}

#[test]
fn c_has_a_number_for_each_code() {
    let of_c = read(OF_C);
    let known = quoted(&of_c, "pub fn status_of(");
    assert!(known.len() > 10, "{known:?}");
    for path in ERRORS {
        let text = read(path);
        let codes = quoted(&text, "pub fn code(");
        assert!(codes.len() > 4, "{path}: {codes:?}");
        let missing: Vec<_> = codes
            .difference(&known)
            .filter(|code| **code != UNKNOWN)
            .collect();
        assert!(
            missing.is_empty(),
            "{OF_C} has no number for {missing:?} of {path}"
        );
    }
}

#[test]
fn a_code_without_a_number_would_be_found() {
    let text = "    pub fn code(&self) -> &str {\n        match self {\n            A => \"a\",\n            B => \"b\",\n        }\n    }\n    \"c\"";
    assert_eq!(quoted(text, "pub fn code("), BTreeSet::from(["a", "b"]));
}
