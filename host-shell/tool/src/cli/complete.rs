//! `completions` and `man`: the command line described for shells and for readers.

mod markdown;

use crate::common::output;
use clap::{Args, ValueEnum};
use clap_complete::Shell;
use nvme_host::{Error, Result};
use std::path::PathBuf;

/// Print a shell's completions for nvme-gpu
///
/// For example: `nvme-gpu completions bash > ~/.local/share/bash-completion/completions/nvme-gpu`
#[derive(Args)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Kind,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Bash,
    Zsh,
    Fish,
}

impl Completions {
    pub fn run(self, mut root: clap::Command) -> Result<()> {
        let shell = match self.shell {
            Kind::Bash => Shell::Bash,
            Kind::Zsh => Shell::Zsh,
            Kind::Fish => Shell::Fish,
        };
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut root, "nvme-gpu", &mut script);
        output::bytes(&script)
    }
}

/// Print the manual page, or write one for each command into a folder
#[derive(Args)]
pub struct Man {
    /// Folder for nvme-gpu.1, nvme-gpu-read.1, ...; it must exist. Without it the first is printed
    dir: Option<PathBuf>,
    /// Print the reference of every command in Markdown instead
    #[arg(long, conflicts_with = "dir")]
    markdown: bool,
}

impl Man {
    pub fn run(self, root: clap::Command) -> Result<()> {
        if self.markdown {
            return output::print(&markdown::reference(root));
        }
        match self.dir {
            Some(dir) => {
                clap_mangen::generate_to(root, &dir).map_err(Error::file("write pages into", dir))
            }
            None => {
                let mut page = Vec::new();
                clap_mangen::Man::new(root)
                    .render(&mut page)
                    .map_err(Error::file("write", "the manual page"))?;
                output::bytes(&page)
            }
        }
    }
}
