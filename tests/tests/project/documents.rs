//! Checks the documents: the book has every page, links lead to existing targets, lines are short.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// Columns of a line that is no row of a table and no target of a link.
const COLUMNS: usize = 120;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

/// Written by `cargo xtask record` and `cargo xtask results`; empty before the first recorded run.
const RESULTS: &str = "docs/results";

/// Returns the paths of all pages from the root: pages of docs, and pages in the root.
fn pages() -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                let relative = path.strip_prefix(root()).unwrap();
                found.push(relative.to_str().unwrap().to_string());
            }
        }
    }
    for name in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"] {
        found.push(name.to_string());
    }
    found.sort();
    found
}

fn read(page: &str) -> String {
    fs::read_to_string(root().join(page)).unwrap()
}

/// Returns the lines outside fenced blocks, with inline code taken out.
fn prose(text: &str) -> Vec<(usize, String)> {
    let mut inside = false;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.starts_with("```") {
            inside = !inside;
        } else if !inside && !line.starts_with("    ") {
            let kept: Vec<&str> = line.split('`').step_by(2).collect();
            found.push((index + 1, kept.join("``")));
        }
    }
    found
}

/// Returns the targets of `[text](target)`, `![text](target)` and `[name]: target`.
fn targets(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    if let Some((name, target)) = line.split_once("]: ")
        && name.starts_with('[')
    {
        found.push(target.trim().to_string());
    }
    for part in line.split("](").skip(1) {
        found.extend(part.split(')').next().map(str::to_string));
    }
    found
}

/// Returns the anchor that a heading gets.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        ' ' => Some('-'),
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

fn anchors(text: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.starts_with("```") {
            inside = !inside;
        } else if !inside && line.starts_with('#') {
            found.push(anchor(line.trim_start_matches('#')));
        }
    }
    found
}

/// Returns `path` without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                parts.pop();
            }
            Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts
}

/// Returns what is wrong with a link of `page` to `target`; `None` if nothing is.
fn broken(page: &str, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, fragment) = target.split_once('#').unwrap_or((target, ""));
    let place = match file {
        "" => PathBuf::from(page),
        file => normal(&Path::new(page).parent().unwrap().join(file)),
    };
    if place.starts_with(RESULTS) && !root().join(RESULTS).exists() {
        return None;
    }
    if !root().join(&place).exists() {
        return Some(format!("there is no {}", place.display()));
    }
    let text = fs::read_to_string(root().join(&place)).unwrap_or_default();
    if !fragment.is_empty() && !anchors(&text).iter().any(|known| known == fragment) {
        return Some(format!("{} has no heading #{fragment}", place.display()));
    }
    None
}

#[test]
fn relative_links_lead_somewhere() {
    let mut offenders = Vec::new();
    let mut links = 0;
    for page in pages() {
        for (number, line) in prose(&read(&page)) {
            for target in targets(&line) {
                links += 1;
                if let Some(why) = broken(&page, &target) {
                    offenders.push(format!("{page}:{number}: {target}: {why}"));
                }
            }
        }
    }
    assert!(offenders.is_empty(), "\n{}", offenders.join("\n"));
    assert!(links > 50, "only {links} links were found");
}

#[test]
fn a_broken_link_would_be_found() {
    assert!(broken("README.md", "docs/missing.md").is_some());
    assert!(broken("docs/guide/store.md", "../vfio.md#no-such-heading").is_some());
    assert!(broken("docs/guide/store.md", "../vfio.md#bind-and-unbind").is_none());
    assert!(broken("README.md", "https://example.org/x").is_none());
    let line = "a [b](c.md) and ![d](e.svg), see [f](g.md#h)";
    assert_eq!(targets(line), ["c.md", "e.svg", "g.md#h"]);
    assert_eq!(
        targets("[bam]: https://example.org"),
        ["https://example.org"]
    );
    assert_eq!(
        anchor(" Bring-up on a real host"),
        "bring-up-on-a-real-host"
    );
    assert!(targets(&prose("`a[0](b)` text")[0].1).is_empty());
}

#[test]
fn the_book_has_every_page_once() {
    let summary = read("docs/SUMMARY.md");
    let there_or_later = |page: &String| {
        root().join(RESULTS).exists() || !Path::new("docs").join(page).starts_with(RESULTS)
    };
    let mut listed: Vec<String> = summary.lines().flat_map(targets).collect();
    listed.retain(there_or_later);
    listed.sort();
    let mut there: Vec<String> = pages()
        .iter()
        .filter_map(|page| page.strip_prefix("docs/"))
        .filter(|page| *page != "SUMMARY.md")
        .map(str::to_string)
        .collect();
    there.sort();
    assert_eq!(listed, there);
}

/// Returns true for lines that cannot be wrapped: rows of tables, links, commands of recorded runs.
fn may_be_long(line: &str) -> bool {
    line.starts_with('|')
        || line.starts_with("$ ")
        || (line.starts_with('[') && line.contains("]: "))
}

#[test]
fn lines_are_short() {
    let mut offenders = Vec::new();
    for page in pages() {
        let long: Vec<usize> = read(&page)
            .lines()
            .enumerate()
            .filter(|(_, line)| line.chars().count() > COLUMNS && !may_be_long(line))
            .map(|(index, _)| index + 1)
            .collect();
        if !long.is_empty() {
            offenders.push(format!("{page}: longer than {COLUMNS}: {long:?}"));
        }
    }
    assert!(offenders.is_empty(), "\n{}", offenders.join("\n"));
}

/// The figures are drawn by a script, which is run where there is a Python; the names are compared in any case.
#[test]
fn figures_are_what_their_script_draws() {
    let folder = root().join("docs/figures");
    let script = fs::read_to_string(folder.join("draw.py")).unwrap();
    let mut figures = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "svg") {
            figures += 1;
            let name = path.file_stem().unwrap().to_str().unwrap();
            assert!(
                script.contains(&format!("    \"{name}\": ")),
                "draw.py does not draw {name}"
            );
        }
    }
    assert!(figures >= 6, "only {figures} figures were found");
    let mut check = std::process::Command::new("python3");
    match check.arg(folder.join("draw.py")).arg("--check").output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
        }
        Err(error) => println!("not compared with the script's output: python3: {error}"),
    }
}

/// Most lines of a decision, about one page.
const DECISION_LINES: usize = 60;

/// The parts of a decision, in their order.
const DECISION_PARTS: [&str; 5] = [
    "\nStatus: ",
    "\n## Situation\n",
    "\n## Decision\n",
    "\n## Alternatives rejected\n",
    "\n## Consequences\n",
];

/// Returns what a decision lacks of the template: its number, its parts in order, its length.
fn decision_faults(number: u32, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    if !text.starts_with(&format!("# {number}. ")) {
        faults.push(format!("does not begin with \"# {number}. \""));
    }
    let mut from = 0;
    for part in DECISION_PARTS {
        match text[from..].find(part) {
            Some(at) => from += at,
            None => faults.push(format!("lacks {:?} in its place", part.trim())),
        }
    }
    let lines = text.lines().count();
    if lines > DECISION_LINES {
        faults.push(format!("has {lines} lines, more than {DECISION_LINES}"));
    }
    faults
}

/// Names the numbers up to the last page's that neither a line of `index` nor a "Number N was not used." accounts for.
fn numbers_missing(pages: &[u32], index: &str) -> Vec<u32> {
    let last = pages.iter().copied().max().unwrap_or(0);
    let in_index = |number: u32| {
        let row = format!("- [{number}. ");
        let unused = format!("Number {number} was not used.");
        index.lines().any(|line| line.starts_with(&row)) || index.contains(&unused)
    };
    (1..=last).filter(|number| !in_index(*number)).collect()
}

#[test]
fn no_page_is_empty() {
    let empty: Vec<String> = pages()
        .into_iter()
        .filter(|page| read(page).trim().is_empty())
        .collect();
    assert!(empty.is_empty(), "empty pages: {}", empty.join(", "));
}

#[test]
fn decisions_follow_their_template_and_the_index_has_every_number() {
    let mut offenders = Vec::new();
    let mut numbers = Vec::new();
    for page in pages() {
        let name = page.strip_prefix("docs/adr/").unwrap_or("README.md");
        if name == "README.md" {
            continue;
        }
        let number: u32 = name[..4]
            .parse()
            .expect("a decision's file begins with its number");
        numbers.push(number);
        for fault in decision_faults(number, &read(&page)) {
            offenders.push(format!("{page} {fault}"));
        }
    }
    let unused = read("docs/adr/README.md").replace('\n', " ");
    let index = read("docs/SUMMARY.md") + &unused;
    for number in numbers_missing(&numbers, &index) {
        offenders.push(format!("docs/SUMMARY.md has no line for decision {number}"));
    }
    assert!(offenders.is_empty(), "\n{}", offenders.join("\n"));
    assert!(
        numbers.len() >= 26,
        "only {} decisions were found",
        numbers.len()
    );
}

#[test]
fn a_decision_without_its_parts_would_be_found() {
    assert_eq!(decision_faults(3, "").len(), 6);
    let whole = "# 3. T\n\nStatus: accepted.\n\n## Situation\n\n## Decision\n\n## Alternatives rejected\n\n## Consequences\n";
    assert!(decision_faults(3, whole).is_empty());
    assert_eq!(decision_faults(4, whole).len(), 1);
    assert_eq!(
        decision_faults(3, &(whole.to_string() + &"\n".repeat(60))).len(),
        1
    );
    let swapped = whole
        .replace("## Situation", "## X")
        .replace("## Decision", "## Situation");
    assert_eq!(decision_faults(3, &swapped).len(), 1);
    assert_eq!(
        numbers_missing(&[1, 3], "- [1. a](1.md)\n- [3. b](3.md)\n"),
        [2]
    );
    assert!(
        numbers_missing(
            &[1, 3],
            "- [1. a](1.md)\n- [3. b](3.md)\nNumber 2 was not used."
        )
        .is_empty()
    );
}
