//! `fuzz_replay TARGET FOLDER...`: runs a fuzz target over the inputs in folders, without the fuzzer.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let found = args.split_first().and_then(|(name, folders)| {
        let mut all = nvme_tests::fuzz::TARGETS.iter();
        Some((all.find(|(other, _)| other == name)?.1, folders))
    });
    let Some((target, folders)) = found else {
        eprintln!("usage: fuzz_replay TARGET FOLDER...");
        return ExitCode::from(2);
    };
    let mut count = 0;
    for folder in folders {
        match replay(target, Path::new(folder)) {
            Ok(files) => count += files,
            Err(error) => {
                eprintln!("{folder}: {error}: name a folder of inputs");
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{count} inputs");
    ExitCode::SUCCESS
}

fn replay(target: nvme_tests::fuzz::Target, folder: &Path) -> std::io::Result<usize> {
    let mut count = 0;
    for entry in std::fs::read_dir(folder)? {
        target(&std::fs::read(entry?.path())?);
        count += 1;
    }
    Ok(count)
}
