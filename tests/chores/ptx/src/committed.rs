//! Compares the PTX in the repository with the PTX that the sources give.

use super::build::Image;
use super::compiler::Compiler;

/// The difference between the committed file and a fresh build.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Byte for byte the same.
    Same,
    /// The same compiler produced other PTX, so the committed file is out of date.
    Stale,
    /// Another compiler made the file, so nothing can be said; it should be refreshed some time.
    OtherCompiler,
}

/// Returns the content of the committed file: a line that says how it was made, then the PTX.
pub fn with_header(image: &Image, compiler: &Compiler, ptx: &str) -> String {
    let mut text = format!(
        "// {}.ptx: written by `cargo xtask ptx --refresh`, not by hand.\n// {}\n",
        image.name,
        image.command()
    );
    for line in compiler.version.lines() {
        text += &format!("// rustc -Vv: {line}\n");
    }
    text + ptx
}

/// Compares a committed file with the one that the sources give here.
pub fn compare(committed: &str, fresh: &str) -> Verdict {
    if committed == fresh {
        Verdict::Same
    } else if versions(committed) == versions(fresh) {
        Verdict::Stale
    } else {
        Verdict::OtherCompiler
    }
}

fn versions(text: &str) -> Vec<&str> {
    let lines = text.lines().take_while(|line| line.starts_with("//"));
    lines
        .filter(|line| line.starts_with("// rustc -Vv: "))
        .collect()
}

/// Returns the folders of this machine that the file names.
pub fn machine_paths(text: &str) -> Vec<String> {
    let roots = ["/home/", "/root/", "/tmp/", "/work", "/usr/", "/rustc/"];
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| roots.iter().any(|root| line.contains(root)))
        .map(|(number, line)| format!("{}: a path of the machine: {}", number + 1, line.trim()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_compiler_makes_a_file_stale() {
        let fresh = "// x\n// rustc -Vv: rustc 1.96.0\n.version 8.2\n";
        assert_eq!(compare(fresh, fresh), Verdict::Same);
        assert_eq!(compare(&fresh.replace("8.2", "8.3"), fresh), Verdict::Stale);
        assert_eq!(
            compare(&fresh.replace("1.96", "1.97"), fresh),
            Verdict::OtherCompiler
        );
        assert_eq!(compare("", fresh), Verdict::OtherCompiler);
    }

    #[test]
    fn a_path_of_the_machine_is_found() {
        assert_eq!(machine_paths(".b8 x[3]; // /home/me/lib.rs\n").len(), 1);
        assert!(machine_paths("// rustc -Vv: host: x86_64-unknown-linux-gnu\n").is_empty());
    }
}
