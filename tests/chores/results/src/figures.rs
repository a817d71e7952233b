//! Measured figures: `docs/results/NAME.tsv`, a row for each, under one line of `COLUMNS`.
//!
//! `cargo xtask results NAME...` prints the tables of these files, one for each date, commit, machine and command.

use chores::process::{Failure, root};
use std::path::{Path, PathBuf};

/// The columns of a file of figures. A dash stands for what was not recorded.
const COLUMNS: [&str; 7] = [
    "date", "commit", "machine", "command", "case", "figure", "unit",
];

/// One figure: its fields in the order of `COLUMNS`.
type Figure = [String; COLUMNS.len()];

/// Prints the tables of the named files.
pub fn command(names: &[&str]) -> Result<(), Failure> {
    for name in names {
        if *name == "runs" {
            print!("{}", crate::results::last_runs()?);
            continue;
        }
        let path = file(name);
        let text = std::fs::read_to_string(&path).map_err(|error| {
            Failure::new(format!(
                "{}: {error}; there are figures of {}",
                path.display(),
                known().join(", ")
            ))
        })?;
        print!("{}", tables(name, &parse(&path, &text)?));
    }
    Ok(())
}

fn file(name: &str) -> PathBuf {
    root().join(format!("docs/results/{name}.tsv"))
}

/// Returns the names of all files of figures; `runs.tsv` has other columns.
fn known() -> Vec<String> {
    let entries = std::fs::read_dir(root().join("docs/results"));
    let mut names: Vec<String> = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "tsv"))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_string()))
        .filter(|name| name != "runs")
        .collect();
    names.sort();
    names
}

/// Reads a file of figures and checks that no column of a line is empty.
fn parse(path: &Path, text: &str) -> Result<Vec<Figure>, Failure> {
    let fault =
        |line: usize, what: String| Failure::new(format!("{}: line {line} {what}", path.display()));
    let mut lines = text.lines().enumerate();
    if lines.next().map(|(_, head)| head) != Some(COLUMNS.join("\t").as_str()) {
        return Err(fault(1, format!("is not \"{}\"", COLUMNS.join(" "))));
    }
    lines
        .map(|(index, line)| {
            let fields: Vec<String> = line.split('\t').map(str::to_string).collect();
            let count = fields.len();
            let figure = Figure::try_from(fields).map_err(|_| {
                let wanted = COLUMNS.len();
                fault(index + 1, format!("has {count} columns, not {wanted}"))
            })?;
            match figure.iter().position(|field| field.trim().is_empty()) {
                Some(column) => Err(fault(index + 1, format!("has no {}", COLUMNS[column]))),
                None => Ok(figure),
            }
        })
        .collect()
}

/// Makes a Markdown table of each run of figures that share date, commit, machine and command.
fn tables(name: &str, figures: &[Figure]) -> String {
    let mut text = format!("# {name}\n");
    for group in figures.chunk_by(|one, next| one[..4] == next[..4]) {
        let [date, commit, machine, command, ..] = &group[0];
        let commit = match commit.as_str() {
            "-" => "not recorded",
            recorded => recorded,
        };
        text += &format!("\n{date}, commit {commit}, {machine}\n\n    {command}\n\n");
        text += "| case | figure | unit |\n| --- | --- | --- |\n";
        for [.., case, figure, unit] in group {
            text += &format!("| {} | {figure} | {unit} |\n", case.replace('|', "\\|"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_committed_file_has_its_columns_and_no_empty_field() {
        let names = known();
        assert!(names.len() >= 8, "only {names:?}");
        let mut figures = 0;
        for name in names {
            let path = file(&name);
            let text = std::fs::read_to_string(&path).unwrap();
            let found = parse(&path, &text).unwrap();
            for [date, _, machine, ..] in &found {
                assert!(
                    date != "-" && machine != "-",
                    "{name}: a figure without both"
                );
            }
            figures += found.len();
        }
        assert!(figures >= 1500, "only {figures} figures are left");
    }

    #[test]
    fn a_file_with_another_head_a_missing_column_or_an_empty_field_is_refused() {
        let head = COLUMNS.join("\t");
        let path = Path::new("x.tsv");
        assert!(parse(path, &format!("{head}\nd\tc\tm\tx\tcase\t1\tus\n")).is_ok());
        for bad in [
            "date\tcommit\n".to_string(),
            format!("{head}\nd\tc\tm\tx\tcase\t1\n"),
            format!("{head}\nd\tc\tm\tx\tcase\t\tus\n"),
        ] {
            assert!(parse(path, &bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn figures_of_one_run_share_a_table() {
        let row = |command: &str, case: &str| {
            ["d", "-", "m", command, case, "1", "us"].map(str::to_string)
        };
        let text = tables("x", &[row("a", "one"), row("a", "two"), row("b", "three")]);
        assert_eq!(text.matches("| case | figure | unit |").count(), 2);
        assert!(text.contains("    a\n") && text.contains("| two | 1 | us |"));
        assert!(text.contains("d, commit not recorded, m"));
    }
}
