//! Examples of README, as the trials of what is installed run them.

use super::files;
use chores::process::{Failure, root};

/// Command of README's first block, and the same of an installed tool.
const FIRST: (&str, &str) = ("cargo run --release -- ", "nvme-gpu ");

/// Returns the first command of README's first block, for a tool that is installed.
pub fn first_command() -> Result<String, Failure> {
    let line = block("sh")?.lines().next().unwrap_or_default().to_owned();
    let command = line.split('#').next().unwrap_or_default().trim();
    command
        .strip_prefix(FIRST.0)
        .map(|rest| FIRST.1.to_owned() + rest)
        .ok_or_else(|| Failure::new(format!("README's first command is {command:?}")))
}

/// Returns README's first block of `language`.
pub fn block(language: &str) -> Result<String, Failure> {
    let text = files::read(&root().join("README.md"))?;
    first_block(&text, language)
        .map(str::to_owned)
        .ok_or_else(|| Failure::new(format!("README has no block of {language}")))
}

fn first_block<'a>(text: &'a str, language: &str) -> Option<&'a str> {
    let start = format!("```{language}\n");
    let at = text.find(&start)? + start.len();
    text[at..].split("```").next()
}

#[cfg(test)]
mod tests {
    use super::{block, first_block, first_command};

    #[test]
    fn the_examples_are_found() {
        assert_eq!(first_command().unwrap(), "nvme-gpu demo");
        assert!(block("python").unwrap().starts_with("import nvme_gpu\n"));
        assert!(block("c").unwrap().contains("nvme_gpu_pread"));
    }

    #[test]
    fn a_block_ends_at_its_fence() {
        let text = "```c\nint i;\n```\n```cpp\nint j;\n```\n";
        assert_eq!(first_block(text, "c"), Some("int i;\n"));
        assert_eq!(first_block(text, "cpp"), Some("int j;\n"));
        assert_eq!(first_block(text, "sh"), None);
    }
}
