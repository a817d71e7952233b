//! `cargo xtask site`: the documents as a book with search, the reference of the Rust libraries, that of the Python
//! package and the header of C, as one folder of files. CI does not run it; it has no time for it.

mod links;
mod pages;

use crate::packages;
use crate::release::files;
use chores::process::{Failure, cargo, check, output, root, target_dir};
use chores::tools;
use chores_coverage::python;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The header of C, from the root.
const HEADER: &str = "host-shell/bindings/c/include/nvme_gpu.h";

/// `cargo xtask site`
pub fn command(words: &[&str]) -> Result<(), Failure> {
    if !words.is_empty() {
        return Err(Failure::new("usage: cargo xtask site"));
    }
    let book = mdbook()?;
    let (work, site) = (target_dir().join("site-pages"), target_dir().join("site"));
    files::empty_folder(&work)?;
    files::empty_folder(&site)?;
    let libraries = described_libraries()?;
    pages::stage(&root(), &work.join("docs"), &libraries)?;
    files::copy(&root().join("book.toml"), &work.join("book.toml"), 0o644)?;
    check(
        Command::new(book)
            .arg("build")
            .arg("--dest-dir")
            .arg(&site)
            .arg(&work),
    )?;
    rust_reference(&site.join("api"))?;
    python_reference(&site.join("python"))?;
    files::copy(&root().join(HEADER), &site.join("c/nvme_gpu.h.txt"), 0o644)?;
    // The pages of the references are as their programs make them.
    let is_of_book = |page: &Path| !page.starts_with("api") && !page.starts_with("python");
    let (pages, broken) = links::broken(&site, is_of_book)?;
    if !broken.is_empty() {
        return Err(Failure::new(format!(
            "links that lead nowhere:\n{}",
            broken.join("\n")
        )));
    }
    println!("{pages} pages: {}", site.join("index.html").display());
    Ok(())
}

/// Returns the path of mdBook.
///
/// # Errors
/// The command that installs it, where it is missing.
fn mdbook() -> Result<PathBuf, Failure> {
    tools::on_path("mdbook").ok_or_else(|| {
        Failure::missing("mdBook makes the book; run: cargo install --locked mdbook")
    })
}

/// Returns the names of the published libraries with their descriptions.
fn described_libraries() -> Result<Vec<(&'static str, String)>, Failure> {
    let mut metadata = cargo();
    metadata.args(["tree", "--workspace", "--depth", "0", "--prefix", "none"]);
    metadata.args(["--format", "{p}"]);
    let listed = output(&mut metadata)?;
    let described = |name: &'static str| {
        let start = format!("{name} v");
        let line = listed.lines().find(|line| line.starts_with(&start));
        let folder = line.and_then(|line| line.split(['(', ')']).nth(1));
        let folder = folder.ok_or_else(|| Failure::new(format!("cargo tree has no {name}")))?;
        let text = files::read(&Path::new(folder).join("Cargo.toml"))?;
        let description = text.lines().find_map(|line| {
            let value = line.strip_prefix("description = \"")?;
            value.strip_suffix('"')
        });
        let description = description
            .ok_or_else(|| Failure::new(format!("the manifest of {name} has no description")))?;
        Ok((name, description.to_owned()))
    };
    packages::LIBRARIES.into_iter().map(described).collect()
}

/// Makes the documentation of the libraries, with its search, in `to`.
fn rust_reference(to: &Path) -> Result<(), Failure> {
    // A folder that has the documentation of other packages would show them in the search.
    check(cargo().args(["clean", "--quiet", "--doc"]))?;
    let mut doc = cargo();
    doc.args(["doc", "--no-deps", "--lib"]);
    for package in packages::LIBRARIES {
        doc.args(["--package", package]);
    }
    check(&mut doc)?;
    files::copy_folder(&target_dir().join("doc"), to)
}

fn python_reference(to: &Path) -> Result<(), Failure> {
    check(cargo().args(["build", "--package", "nvme-gpu-python"]))?;
    python::reference(&target_dir().join("debug"), to)
}
