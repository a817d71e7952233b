//! The targets as programs for machines without Rust: an archive of binaries, corpora and
//! dictionaries, and a script that unpacks and runs it.

use super::{dictionary, failed};
use chores::process::{Failure, check, output, root};
use std::path::Path;
use std::process::Command;

/// The newest C library that the binaries may want.
const GLIBC: (u32, u32) = (2, 35);
/// Libraries that a machine without a compiler may lack; the archive contains them.
const LIBRARIES: [&str; 2] = ["libstdc++.so.6", "libgcc_s.so.1"];
/// Folders in the archive.
const PARTS: [&str; 4] = ["bin", "corpus", "dictionaries", "lib"];
const SCRIPT: &str = include_str!("run.sh");

/// Writes `folder`: fuzz.tar.gz and run.sh.
pub fn make(built: &Path, targets: &[String], folder: &Path) -> Result<(), Failure> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).map_err(failed(folder))?;
    }
    for part in PARTS {
        let part = folder.join(part);
        std::fs::create_dir_all(&part).map_err(failed(&part))?;
    }
    for target in targets {
        let binary = folder.join("bin").join(target);
        check(
            Command::new("strip")
                .arg("-o")
                .args([&binary, &built.join(target)]),
        )?;
        let wants = newest_glibc(&binary)?;
        if wants > GLIBC {
            return Err(Failure::new(format!(
                "{target} wants glibc {}.{}, above {}.{}",
                wants.0, wants.1, GLIBC.0, GLIBC.1
            )));
        }
        let corpus = folder.join("corpus").join(target);
        std::fs::create_dir_all(&corpus).map_err(failed(&corpus))?;
        let found = root().join("target/fuzz-corpus").join(target);
        if found.is_dir() {
            // Merging keeps the smallest set of inputs that reaches everything that all inputs
            // reach.
            check(
                Command::new(built.join(target))
                    .args(["-merge=1", "-verbosity=0", "-max_len=4096"])
                    .args([&corpus, &found]),
            )?;
        }
        copy_all(&root().join("fuzz/corpus").join(target), &corpus)?;
        let words = dictionary(target);
        if words.is_file() {
            let to = folder.join("dictionaries").join(format!("{target}.dict"));
            std::fs::copy(&words, &to).map_err(failed(&words))?;
        }
    }
    let first = folder.join("bin").join(&targets[0]);
    let linked = output(Command::new("ldd").arg(&first))?;
    for name in LIBRARIES {
        let line = linked.lines().find(|line| line.trim().starts_with(name));
        if let Some(path) = line.and_then(|line| line.split_whitespace().nth(2)) {
            let to = folder.join("lib").join(name);
            std::fs::copy(path, &to).map_err(failed(Path::new(path)))?;
        }
    }
    check(
        Command::new("tar")
            .args(["czf", "fuzz.tar.gz"])
            .args(PARTS)
            .current_dir(folder),
    )?;
    for part in PARTS {
        let part = folder.join(part);
        std::fs::remove_dir_all(&part).map_err(failed(&part))?;
    }
    let script = folder.join("run.sh");
    std::fs::write(&script, SCRIPT).map_err(failed(&script))?;
    check(Command::new("chmod").arg("+x").arg(&script))?;
    check(Command::new("du").arg("-sh").arg(folder))?;
    println!(
        "run it elsewhere with: OUT=DIR {} SECONDS PROCESSES",
        script.display()
    );
    Ok(())
}

fn copy_all(from: &Path, to: &Path) -> Result<(), Failure> {
    for entry in std::fs::read_dir(from).map_err(failed(from))?.flatten() {
        let path = entry.path();
        std::fs::copy(&path, to.join(entry.file_name())).map_err(failed(&path))?;
    }
    Ok(())
}

/// Returns the newest symbol version of the C library in a binary's dynamic symbols.
fn newest_glibc(binary: &Path) -> Result<(u32, u32), Failure> {
    let symbols = output(Command::new("objdump").arg("-T").arg(binary))?;
    Ok(newest(&symbols))
}

fn newest(symbols: &str) -> (u32, u32) {
    let versions = symbols.split("GLIBC_").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.');
        let mut numbers = rest[..end.unwrap_or(rest.len())].split('.');
        let mut number = || numbers.next()?.parse().ok();
        Some((number()?, number()?))
    });
    versions.max().unwrap_or((0, 0))
}

#[cfg(test)]
mod tests {
    use super::newest;

    #[test]
    fn the_newest_version_counts_not_the_last() {
        let symbols = "0 DF *UND* 0 (GLIBC_2.4) a\n0 DF *UND* 0 (GLIBC_2.34) b\n0 (GLIBC_2.3.2) c";
        assert_eq!(newest(symbols), (2, 34));
        assert_eq!(newest("nothing"), (0, 0));
    }
}
