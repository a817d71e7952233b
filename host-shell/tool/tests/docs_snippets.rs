//! Shell blocks of the documents that are marked `sh run`: each ends with exit code 0 on the simulator.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit of one block; none needs more than two seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(120);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .unwrap()
        .to_path_buf()
}

/// Returns README.md, CONTRIBUTING.md and every page under docs.
fn documents() -> Vec<PathBuf> {
    let mut found = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Returns the blocks of a document that are to be run, with the line on which each begins.
fn blocks(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if line.trim_end() == "```sh run" {
            let body: Vec<&str> = lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|line| *line != "```")
                .collect();
            found.push((number + 1, body.join("\n")));
        }
    }
    found
}

/// Runs a block in `folder`, where `nvme-gpu` is the program that was built.
fn run(block: &str, folder: &Path) -> Output {
    let programs = Path::new(env!("CARGO_BIN_EXE_nvme-gpu")).parent().unwrap();
    let mut path = programs.as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let mut child = Command::new("sh")
        .args(["-eu", "-c", block])
        .current_dir(folder)
        .env("PATH", path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(folder.join(".stderr")).unwrap())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > LIMIT {
            child.kill().unwrap();
            break child.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    Output {
        status,
        stdout: Vec::new(),
        stderr: fs::read(folder.join(".stderr")).unwrap(),
    }
}

/// An empty folder with a unique name, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("nvme-docs-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn every_block_that_is_marked_runs() {
    let mut count = 0;
    let mut failures = Vec::new();
    for (index, document) in documents().iter().enumerate() {
        let text = fs::read_to_string(document).unwrap();
        let folder = Folder::new(&index.to_string());
        for (line, block) in blocks(&text) {
            count += 1;
            let output = run(&block, &folder.0);
            if !output.status.success() {
                failures.push(format!(
                    "{}:{line}: {}: {}",
                    document.display(),
                    output.status,
                    String::from_utf8_lossy(&output.stderr)
                ));
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    assert!(count >= 5, "only {count} blocks are marked");
}

#[test]
fn a_block_that_fails_is_found() {
    let text = "a\n```sh\nfalse\n```\n```sh run\nnvme-gpu --version\nfalse\ntrue\n```\n";
    let found = blocks(text);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].0, 5);
    let folder = Folder::new("fails");
    assert!(!run(&found[0].1, &folder.0).status.success());
    assert!(run("nvme-gpu --version", &folder.0).status.success());
}
