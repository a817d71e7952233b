//! Refusals of the command line: each row is an exit code, a command line and a part of its error.
//!
//! Every row is run as it is and with --json. Each time there is exactly one line on standard error with a cause and a
//! remedy, or one JSON object with the same content, nothing on standard output, no file more or less, and no block
//! changed.

use crate::common::{Folder, Place, bytes};
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::Duration;

pub const BLOCK: usize = 4096;
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Returns a folder with an image of 16 blocks, and inputs of every kind.
pub fn folder() -> Folder {
    let folder = Folder::new(Place::Embedded);
    folder.file("disk.img", 16 * BLOCK, 1);
    folder.file("in", 2 * BLOCK, 2);
    folder.file("long", 17 * BLOCK, 3);
    folder.file("odd", BLOCK + 1, 4);
    folder.file("empty", 0, 5);
    std::fs::create_dir(folder.path("folder")).unwrap();
    symlink("disk.img", folder.path("link")).unwrap();
    symlink("loop", folder.path("loop")).unwrap();
    symlink("nowhere", folder.path("dangling")).unwrap();
    std::fs::hard_link(folder.path("disk.img"), folder.path("hard")).unwrap();
    folder
}

/// Returns the words of a row: `''` is an empty one, and `{LF}` a line feed.
pub fn words(line: &str) -> Vec<String> {
    let word = |word: &str| word.replace("''", "").replace("{LF}", "\n");
    line.split(' ').map(word).collect()
}

/// Runs every row of `table`: `exit code | command line | part of the error`.
pub fn check(table: &str) {
    let folder = folder();
    let (names, image) = (folder.names(), bytes(&folder.path("disk.img")));
    let mut wrong = Vec::new();
    let rows: Vec<&str> = table
        .lines()
        .map(str::trim_start)
        .filter(|row| !row.is_empty())
        .collect();
    assert!(!rows.is_empty());
    for row in &rows {
        let [code, line, text] = row.splitn(3, " | ").collect::<Vec<_>>()[..] else {
            panic!("not a row: {row}");
        };
        let code = code.parse().unwrap();
        for as_json in [false, true] {
            let mut command = folder.command();
            command.args(words(line)).stdin(Stdio::null());
            if as_json && !line.contains("--json") {
                command.arg("--json");
            }
            let output = command.output().unwrap();
            let (out, said) = (text_of(&output.stdout), text_of(&output.stderr));
            let fault = fault(output.status.code(), code, &out, &said, text, as_json);
            if let Some(fault) = fault {
                wrong.push(format!("{line}, json {as_json}: {fault}: {said}"));
            }
        }
        assert_eq!(folder.names(), names, "{line}");
        assert!(bytes(&folder.path("disk.img")) == image, "{line}");
    }
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        rows.len(),
        wrong.join("\n")
    );
}

pub fn text_of(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines = text.split_inclusive('\n');
    // Lines of a program that counts its executed lines, but may not write the counts, are ignored.
    lines
        .filter(|line| !line.starts_with("LLVM Profile Error: "))
        .collect()
}

/// Returns the fault of a failed command's output, if there is one.
pub fn fault(
    came: Option<i32>,
    code: i32,
    out: &str,
    said: &str,
    text: &str,
    as_json: bool,
) -> Option<String> {
    if came != Some(code) {
        return Some(format!("exit code {came:?}, not {code}"));
    }
    if !out.is_empty() {
        return Some(format!("standard output: {out}"));
    }
    let Some(line) = said.strip_suffix('\n').filter(|line| !line.contains('\n')) else {
        return Some("not one line".to_owned());
    };
    if line.contains("panicked") || line.chars().any(char::is_control) {
        return Some("a panic, or a control character".to_owned());
    }
    let (cause, remedy) = if as_json {
        let object: serde_json::Value = match serde_json::from_str(line) {
            Ok(object) => object,
            Err(error) => return Some(error.to_string()),
        };
        let error = &object["error"];
        if object["schema_version"] != 1 || error["exit_code"] != code {
            return Some("no version, or another code".to_owned());
        }
        let member = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (member("message"), member("remedy"))
    } else {
        let Some(rest) = line.strip_prefix("error: ") else {
            return Some("does not begin with error:".to_owned());
        };
        let Some((cause, remedy)) = rest.rsplit_once(": ") else {
            return Some("no remedy".to_owned());
        };
        (cause.to_owned(), remedy.to_owned())
    };
    if remedy.len() < 4 || cause.len() < 4 {
        return Some("no cause, or no remedy".to_owned());
    }
    let found = if as_json {
        format!("{cause}: {remedy}")
    } else {
        line.to_owned()
    };
    // Characters that JSON escapes are escaped differently in the line.
    (!found.contains(text) && !text.contains("\\u{")).then(|| format!("without '{text}'"))
}

/// Runs a line of shell in the folder, with the binary as $B.
pub fn shell(folder: &Folder, line: &str) -> (Option<i32>, String) {
    let output = Command::new("sh")
        .args(["-c", line])
        .env("B", env!("CARGO_BIN_EXE_nvme-gpu"))
        .env("TMPDIR", folder.path(""))
        .current_dir(folder.path(""))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .output()
        .unwrap();
    (output.status.code(), text_of(&output.stderr))
}

/// Rows of shell lines: exit code and a part of the one line of error, none for no line.
pub fn check_shell(rows: &[(&str, i32, &str)]) {
    let folder = folder();
    let (names, image) = (folder.names(), bytes(&folder.path("disk.img")));
    for (line, code, text) in rows {
        let (came, said) = shell(&folder, line);
        assert_eq!(came, Some(*code), "{line}: {said}");
        match text.is_empty() {
            true => assert_eq!(said, "", "{line}"),
            false => {
                let fault = fault(came, *code, "", &said, text, false);
                assert_eq!(fault, None, "{line}: {said}");
            }
        }
        assert_eq!(folder.names(), names, "{line}");
        assert!(bytes(&folder.path("disk.img")) == image, "{line}");
    }
}
