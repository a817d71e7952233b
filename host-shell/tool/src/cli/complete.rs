//! `completions` and `man`: the command line described for shells and for readers.

mod markdown;

use crate::common::output;
use clap::{Args, ValueEnum};
use clap_complete::Shell;
use nvme_host::{Error, Result};
use std::fs;
use std::path::PathBuf;

/// Print a shell's completions for nvme-gpu
///
/// For example: `nvme-gpu completions bash > ~/.local/share/bash-completion/completions/nvme-gpu`
#[derive(Args)]
pub struct CompletionsCommand {
    /// The shell
    #[arg(value_enum)]
    shell: ShellKind,
}

#[derive(Clone, Copy, ValueEnum)]
enum ShellKind {
    Bash,
    Zsh,
    Fish,
}

impl CompletionsCommand {
    pub fn run(self, mut root: clap::Command) -> Result<()> {
        let shell = match self.shell {
            ShellKind::Bash => Shell::Bash,
            ShellKind::Zsh => Shell::Zsh,
            ShellKind::Fish => Shell::Fish,
        };
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut root, "nvme-gpu", &mut script);
        // The hyphen of the program's name is spelled in two forms, so that nothing completes after a subcommand (clap
        // issue 6421).
        let script = String::from_utf8_lossy(&script).replace("nvme__subcmd__gpu", "nvme__gpu");
        output::bytes(script.as_bytes())
    }
}

/// Print the manual page, or write one for each command into a folder
#[derive(Args)]
pub struct ManCommand {
    /// Folder for nvme-gpu.1, nvme-gpu-read.1, ...; it must exist. Without it the first is printed
    dir: Option<PathBuf>,
    /// Print the reference of every command in Markdown instead
    #[arg(long, conflicts_with = "dir")]
    markdown: bool,
}

impl ManCommand {
    pub fn run(self, root: clap::Command) -> Result<()> {
        if self.markdown {
            return output::print(&markdown::reference(root));
        }
        match self.dir {
            Some(dir) => {
                let page = dir.join(format!("{}.1", root.get_name()));
                clap_mangen::generate_to(root, &dir)
                    .map_err(Error::file("write pages into", dir))?;
                let text = fs::read_to_string(&page).map_err(Error::file("read", &page))?;
                fs::write(&page, with_lists(&text)).map_err(Error::file("write", &page))
            }
            None => {
                let mut page = Vec::new();
                clap_mangen::Man::new(root)
                    .render(&mut page)
                    .map_err(Error::file("write", "the manual page"))?;
                output::bytes(with_lists(&String::from_utf8_lossy(&page)).as_bytes())
            }
        }
    }
}

/// Returns the page with the lists of its section EXTRA as they were typed: troff would fill their lines into
/// paragraphs.
fn with_lists(page: &str) -> String {
    let Some((head, rest)) = page.split_once(".SH EXTRA\n") else {
        return page.to_owned();
    };
    let (lists, tail) = match rest.find("\n.SH ") {
        Some(end) => rest.split_at(end + 1),
        None => (rest, ""),
    };
    format!("{head}.SH DEVICES AND EXIT CODES\n.nf\n{lists}.fi\n{tail}")
}
