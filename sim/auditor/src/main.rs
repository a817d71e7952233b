//! `nvme-auditor`: checks a log. Exit code 0 without a finding, 1 with findings, 2 for a log that cannot be read or
//! holds no command.

use nvme_auditor::{Finding, journal::DriverJournal, qemu::QemuTrace};
use std::process::ExitCode;

const USAGE: &str = "\
usage: nvme-auditor qemu FILE NSID...   the log of QEMU's controller with these namespaces
       nvme-auditor gpu FILE            what nvme-gpu --trace FILE.txt wrote
       nvme-auditor events              the events of such a log, for QEMU's -trace events=FILE
";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (findings, commands) = match words.as_slice() {
        ["events"] => {
            println!("{}", nvme_auditor::qemu::EVENTS.join("\n"));
            return ExitCode::SUCCESS;
        }
        ["qemu", file, nsids @ ..] => {
            let Ok(nsids) = nsids
                .iter()
                .map(|word| word.parse())
                .collect::<Result<Vec<u32>, _>>()
            else {
                eprint!("{USAGE}");
                return ExitCode::from(2);
            };
            let mut trace = QemuTrace::new(&nsids);
            if let Err(code) = lines(file, |line| trace.line(line)) {
                return code;
            }
            let auditor = trace.end();
            (auditor.findings().to_vec(), auditor.seen().0)
        }
        ["gpu", file] => {
            let mut journal = DriverJournal::default();
            if let Err(code) = lines(file, |line| journal.line(line)) {
                return code;
            }
            (journal.findings().to_vec(), journal.commands())
        }
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    verdict(&findings, commands)
}

fn verdict(findings: &[Finding], commands: u64) -> ExitCode {
    for finding in findings {
        println!("audit: {finding}");
    }
    println!("{commands} commands, {} findings", findings.len());
    match (findings.is_empty(), commands) {
        (false, _) => ExitCode::from(1),
        (true, 0) => {
            eprintln!(
                "error: the log holds no command: was it written with the events of nvme-auditor events?"
            );
            ExitCode::from(2)
        }
        (true, _) => ExitCode::SUCCESS,
    }
}

/// Passes each line of a file to `each`. Prints the error if the file cannot be read.
fn lines(file: &str, each: impl FnMut(&str)) -> Result<(), ExitCode> {
    match std::fs::read(file) {
        Ok(bytes) => {
            String::from_utf8_lossy(&bytes).lines().for_each(each);
            Ok(())
        }
        Err(error) => {
            eprintln!("error: {file}: {error}: give the path of a log");
            Err(ExitCode::from(2))
        }
    }
}
