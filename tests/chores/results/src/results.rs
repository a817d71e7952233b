//! Results of runs that people started: `docs/results/runs.tsv` has a line for each recorded run,
//! `docs/results/README.md` shows the runs of the last day, and `cargo xtask results runs` prints the last one of each
//! subject.
//!
//! `cargo xtask record SUBJECT -- COMMAND...` runs a command and adds its line; the outcome is the last line that the
//! command printed. The program needs no other file, so it can be copied to a machine without Rust: `xtask record --to
//! FILE --version COMMIT SUBJECT -- COMMAND...`.

use chores::process::{Failure, output, root};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const USAGE: &str = "usage: cargo xtask record [--to FILE] [--version COMMIT] [--machine TEXT] SUBJECT -- COMMAND...
       cargo xtask results [NAME...]";

const COLUMNS: [&str; 8] = [
    "subject", "date", "version", "machine", "command", "seconds", "exit", "outcome",
];

/// The head of the rendered page.
const HEAD: &str = "\
# Results

Recorded runs of the last day. `cargo xtask results runs` prints the last run of each subject. `cargo xtask record
SUBJECT -- COMMAND` adds a run with its machine and command to `runs.tsv`, `cargo xtask results` writes this page. The
other `.tsv` files have the figures behind the pages, a row each, and keep what a page no longer shows: `cargo xtask
results NAME` prints one.
";

/// One recorded run: its fields in the order of [`COLUMNS`].
type Run = [String; COLUMNS.len()];

/// The arguments of `cargo xtask record`.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    to: Option<PathBuf>,
    version: Option<String>,
    machine: Option<String>,
    subject: String,
    command: Vec<String>,
}

impl Request {
    fn read(words: &[&str]) -> Option<Self> {
        let split = words.iter().position(|word| *word == "--")?;
        let command: Vec<String> = words[split + 1..]
            .iter()
            .map(|word| word.to_string())
            .collect();
        let mut request = Self {
            to: None,
            version: None,
            machine: None,
            subject: String::new(),
            command,
        };
        let mut words = words[..split].iter();
        while let Some(word) = words.next() {
            match *word {
                "--to" => request.to = Some(PathBuf::from(words.next()?)),
                "--version" => request.version = Some(words.next()?.to_string()),
                "--machine" => request.machine = Some(words.next()?.to_string()),
                subject if request.subject.is_empty() && !subject.starts_with('-') => {
                    request.subject = subject.to_string();
                }
                _ => return None,
            }
        }
        (!request.subject.is_empty() && !request.command.is_empty()).then_some(request)
    }
}

/// Runs `cargo xtask record` with its arguments: the command's output is passed through, and its exit status becomes
/// this program's.
pub fn record(words: &[&str]) -> Result<(), Failure> {
    let request = Request::read(words).ok_or_else(|| Failure::new(USAGE))?;
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", request.command[0]));
    let began = Instant::now();
    let mut child = Command::new(&request.command[0])
        .args(&request.command[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut last = String::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.map_err(failed)?;
            println!("{line}");
            if !line.trim().is_empty() {
                last = line;
            }
        }
    }
    let status = child.wait().map_err(failed)?;
    let seconds = began.elapsed().as_secs_f64();
    let version = match request.version {
        Some(version) => version,
        None => {
            output(Command::new("git").args(["describe", "--always", "--dirty", "--exclude=*"]))?
        }
    };
    let date = output(Command::new("date").args(["-u", "+%F"]))?;
    let run: Run = [
        request.subject,
        date,
        version,
        request.machine.unwrap_or_else(machine),
        request.command.join(" "),
        format!("{seconds:.1}"),
        status
            .code()
            .map_or("signal".to_string(), |code| code.to_string()),
        last,
    ]
    .map(|field| field.replace(['\t', '\n'], " ").trim().to_string());
    append(&request.to.unwrap_or_else(runs_file), &run)?;
    match status.success() {
        true => Ok(()),
        false => Err(Failure::new(format!("recorded: {status}"))),
    }
}

fn runs_file() -> PathBuf {
    root().join("docs/results/runs.tsv")
}

fn page_file() -> PathBuf {
    root().join("docs/results/README.md")
}

/// Adds a line to `file`; a new file gets the line of column names first.
fn append(file: &Path, run: &Run) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("{}: {error}", file.display()));
    let mut text = String::new();
    if !file.exists() {
        text = COLUMNS.join("\t") + "\n";
    }
    text += &(run.join("\t") + "\n");
    let mut open = std::fs::OpenOptions::new();
    let mut open = open.create(true).append(true).open(file).map_err(failed)?;
    open.write_all(text.as_bytes()).map_err(failed)
}

/// Returns the processor, the number of cores, and the first GPU if there is one.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("unknown processor", |model| {
        model.trim_start_matches([' ', '\t', ':'])
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut gpu = Command::new("nvidia-smi");
    gpu.args(["--query-gpu=name,driver_version", "--format=csv,noheader"]);
    let gpu = gpu.stderr(Stdio::null()).output().ok();
    let gpu = gpu.filter(|gpu| gpu.status.success()).and_then(|gpu| {
        let text = String::from_utf8_lossy(&gpu.stdout).into_owned();
        text.lines().next().map(|line| format!(", {}", line.trim()))
    });
    format!("{model}, {cores} cores{}", gpu.unwrap_or_default())
}

/// Runs `cargo xtask results`: writes the page.
pub fn write_page() -> Result<(), Failure> {
    let file = page_file();
    let page = page(&read_runs()?);
    std::fs::write(&file, page)
        .map_err(|error| Failure::new(format!("{}: {error}", file.display())))
}

fn read_runs() -> Result<Vec<Run>, Failure> {
    let file = runs_file();
    let text = std::fs::read_to_string(&file);
    let text = text.map_err(|error| Failure::new(format!("{}: {error}", file.display())))?;
    text.lines()
        .skip(1)
        .enumerate()
        .map(|(index, line)| {
            let fields: Vec<String> = line.split('\t').map(str::to_string).collect();
            Run::try_from(fields).map_err(|fields| {
                Failure::new(format!(
                    "{}: line {} has {} columns, not {}",
                    file.display(),
                    index + 2,
                    fields.len(),
                    COLUMNS.len()
                ))
            })
        })
        .collect()
}

/// Returns the last run of each subject, for `cargo xtask results runs`.
pub fn last_runs() -> Result<String, Failure> {
    Ok(format!("# Runs\n{}", table(&read_runs()?)))
}

/// Returns the page: the runs of the last day.
fn page(runs: &[Run]) -> String {
    let last = runs.iter().map(|run| &run[1]).max();
    let of_day = |run: &&Run| Some(&run[1]) == last;
    let runs: Vec<Run> = runs.iter().filter(of_day).cloned().collect();
    HEAD.to_string() + &table(&runs)
}

/// Makes a table of the last run of each subject, in the order of the first runs.
fn table(runs: &[Run]) -> String {
    let mut subjects: Vec<&str> = Vec::new();
    for run in runs {
        if !subjects.contains(&run[0].as_str()) {
            subjects.push(&run[0]);
        }
    }
    let mut page = String::from("\n| subject | last run | outcome |\n| --- | --- | --- |\n");
    for subject in subjects {
        let Some(run) = runs.iter().rev().find(|run| run[0] == subject) else {
            continue;
        };
        let [_, date, version, _, _, seconds, exit, outcome] =
            run.clone().map(|field| field.replace('|', "\\|"));
        let exit = match exit.as_str() {
            "0" => String::new(),
            exit => format!(", exit status {exit}"),
        };
        page += &format!("| {subject} | {date}, {version}, {seconds} s{exit} | {outcome} |\n");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(subject: &str, outcome: &str) -> Run {
        [
            subject,
            "2026-11-22",
            "abc",
            "vm",
            "x --y",
            "1.0",
            "0",
            outcome,
        ]
        .map(str::to_string)
    }

    #[test]
    fn a_table_shows_the_last_run_of_each_subject() {
        let runs = [run("b", "old"), run("a", "only"), run("b", "new")];
        let table = table(&runs);
        assert!(table.find("\n| b |").unwrap() < table.find("\n| a |").unwrap());
        assert!(table.contains("| new |\n") && table.contains("only"));
        assert!(!table.contains("old"));
    }

    #[test]
    fn the_page_shows_the_last_day() {
        let mut earlier = run("a", "earlier");
        earlier[1] = "2026-11-21".to_string();
        let page = page(&[run("b", "new"), earlier]);
        assert!(page.starts_with(HEAD) && page.contains("new"));
        assert!(!page.contains("earlier"));
    }

    #[test]
    fn the_committed_page_is_the_one_of_the_committed_runs() {
        let committed = std::fs::read_to_string(page_file()).unwrap();
        assert_eq!(
            committed,
            page(&read_runs().unwrap()),
            "run `cargo xtask results`"
        );
    }

    #[test]
    fn a_request_is_read() {
        let words = [
            "--to",
            "f",
            "--version",
            "v",
            "simulate",
            "--",
            "prog",
            "--seeds",
            "1",
        ];
        let request = Request::read(&words).unwrap();
        assert_eq!(request.to, Some(PathBuf::from("f")));
        assert_eq!(request.version.as_deref(), Some("v"));
        assert_eq!(
            (request.subject.as_str(), request.command.len()),
            ("simulate", 3)
        );
        for bad in [
            &["a", "b", "--", "c"][..],
            &["a", "--"],
            &["--", "c"],
            &["a"],
        ] {
            assert_eq!(Request::read(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_new_file_gets_its_columns() {
        let file = std::env::temp_dir().join(format!("nvme-results-{}.tsv", std::process::id()));
        let first = run("a", "one");
        append(&file, &first).unwrap();
        append(&file, &run("a", "two")).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0], COLUMNS.join("\t"));
        assert_eq!(lines[1], first.join("\t"));
    }
}
