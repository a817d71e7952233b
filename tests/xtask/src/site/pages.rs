//! Pages of the site: the documents and the pages of the root, with links that lead to their places in the site.

use crate::release::files;
use chores::process::Failure;
use std::path::{Component, Path, PathBuf};

/// Pages of the root that become pages of the book.
const ROOT_PAGES: [&str; 3] = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"];
/// The list of pages, from the root.
const SUMMARY: &str = "docs/SUMMARY.md";
/// The page that leads to the references of the libraries.
const REFERENCE: &str = "reference.md";
/// The heading of the front page before which the references are named.
const BEFORE: &str = "## The same in each language\n";
/// Folder of the site for files of the repository that pages name.
const SOURCE: &str = "source";

/// Writes the pages to `to`: the book's source. `libraries` are names and descriptions.
///
/// # Errors
/// A link to a file that is missing, by its page.
pub fn stage(root: &Path, to: &Path, libraries: &[(&str, String)]) -> Result<(), Failure> {
    files::copy_folder(&root.join("docs"), to)?;
    for folder in ["adr", "results", "results/witness"] {
        files::remove_ending(&to.join(folder), "README.md")?;
    }
    let mut pages: Vec<PathBuf> = ROOT_PAGES.map(PathBuf::from).to_vec();
    add_pages(root, Path::new("docs"), &mut pages)?;
    for page in &pages {
        let text = files::read(&root.join(page))?;
        let mut named = Vec::new();
        let mut text = rewritten(&text, |target| {
            let (place, source) = place_of(root, page, target)?;
            named.extend(source);
            Ok(place)
        })?;
        if page == Path::new(SUMMARY) {
            text = summary(&text);
        } else if page == Path::new("README.md") {
            text = front_page(&text)?;
        }
        files::write(&to.join(staged(page)), &text)?;
        for source in named {
            let copy = to.join(SOURCE).join(with_end(&source));
            files::copy(&root.join(&source), &copy, 0o644)?;
        }
    }
    files::write(&to.join(REFERENCE), &reference(libraries))
}

fn add_pages(root: &Path, folder: &Path, pages: &mut Vec<PathBuf>) -> Result<(), Failure> {
    for name in files::names(&root.join(folder))? {
        let path = folder.join(&name);
        if root.join(&path).is_dir() {
            add_pages(root, &path, pages)?;
        } else if name.ends_with(".md") {
            pages.push(path);
        }
    }
    Ok(())
}

/// Returns the place of a page, or of another file of docs, in the book's source. mdBook makes index.html of a README.md,
/// and leaves the links to it as they are.
fn staged(page: &Path) -> PathBuf {
    let place = page.strip_prefix("docs").unwrap_or(page);
    match place.file_name().is_some_and(|name| name == "README.md") {
        true => place.with_file_name("index.md"),
        false => place.to_path_buf(),
    }
}

/// Returns the list of pages with those that the site adds.
fn summary(text: &str) -> String {
    let first = format!("# Summary\n\n[nvme-gpu](index.md)\n[Reference]({REFERENCE})\n\n");
    let last = "\n# Project\n\n- [Contributing](CONTRIBUTING.md)\n- [Changes](CHANGELOG.md)\n";
    first + text.trim_start_matches("# Summary\n").trim_start() + last
}

/// Returns the front page, which leads to the references.
///
/// # Errors
/// If the heading is missing before which they are named.
fn front_page(text: &str) -> Result<String, Failure> {
    let links = "**Reference**: [Rust libraries, Python package, C header](reference.md). \
                 The magnifier above, or the key `s`, searches all pages.\n\n";
    match text.contains(BEFORE) {
        true => Ok(text.replacen(BEFORE, &format!("{links}{BEFORE}"), 1)),
        false => Err(Failure::new(format!("README.md has no {BEFORE}"))),
    }
}

/// Returns the page of the references.
fn reference(libraries: &[(&str, String)]) -> String {
    let mut text = "# Reference of the libraries\n\n\
                    - [Python package](python/nvme_gpu.html), made from its docstrings\n\
                    - [Header of C](c/nvme_gpu.h.txt)\n\
                    - Rust: the libraries below, each with a search of all\n\n\
                    | library | subject |\n| --- | --- |\n"
        .to_owned();
    for (name, description) in libraries {
        let folder = name.replace('-', "_");
        text += &format!("| [`{name}`](api/{folder}/index.html) | {description} |\n");
    }
    text
}

/// Returns the target of a link of `page` in the book, and the file of the repository that it needs there.
///
/// # Errors
/// A target that is missing.
fn place_of(root: &Path, page: &Path, target: &str) -> Result<(String, Option<PathBuf>), Failure> {
    let (file, fragment) = match target.find('#') {
        Some(at) => target.split_at(at),
        None => (target, ""),
    };
    if file.is_empty() || target.contains("://") || target.starts_with("mailto:") {
        return Ok((target.to_owned(), None));
    }
    let path = normal(&page.parent().unwrap_or(Path::new("")).join(file));
    if !root.join(&path).is_file() {
        let cause = format!("{}: there is no {}", page.display(), path.display());
        return Err(Failure::new(cause));
    }
    let from = staged(page);
    let from = from.parent().unwrap_or(Path::new(""));
    let is_page = path.starts_with("docs") || ROOT_PAGES.iter().any(|name| path == Path::new(name));
    let (place, source) = match is_page {
        // mdBook makes this page of the list.
        true if path == Path::new(SUMMARY) => (PathBuf::from("toc.html"), None),
        true => (staged(&path), None),
        false => (Path::new(SOURCE).join(with_end(&path)), Some(path)),
    };
    let place = relative(from, &place).display().to_string();
    Ok((place + fragment, source))
}

/// Returns the name of a copied file, which browsers show. mdBook takes a link with `.md` anywhere for one to a page.
fn with_end(path: &Path) -> PathBuf {
    let name = path.display().to_string();
    PathBuf::from(name.trim_end_matches(".md").to_owned() + ".txt")
}

/// Returns `path` without `.` and `..`.
pub fn normal(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                parts.pop();
            }
            Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts
}

/// Returns the way from the folder `from` to `to`, both from one folder.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let same = from.components().zip(to.components());
    let same = same.take_while(|(a, b)| a == b).count();
    let up = from.components().skip(same).map(|_| Component::ParentDir);
    up.chain(to.components().skip(same)).collect()
}

/// Returns a page with each target of a link outside of code replaced by what `place` makes of it.
fn rewritten(
    text: &str,
    mut place: impl FnMut(&str) -> Result<String, Failure>,
) -> Result<String, Failure> {
    let (mut is_code, mut all) = (false, String::new());
    for line in text.split_inclusive('\n') {
        is_code ^= line.starts_with("```");
        if is_code || line.starts_with("```") || line.starts_with("    ") {
            all += line;
            continue;
        }
        // Parts with an odd number are code.
        for (number, part) in line.split('`').enumerate() {
            if number > 0 {
                all.push('`');
            }
            if number % 2 == 1 {
                all += part;
                continue;
            }
            let mut links = part.split("](");
            all += links.next().unwrap_or_default();
            for link in links {
                let Some((target, rest)) = link.split_once(')') else {
                    all += &format!("]({link}");
                    continue;
                };
                all += &format!("]({}){rest}", place(target)?);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use chores::process::root;
    use std::fs;

    #[test]
    fn links_lead_to_the_places_of_the_site() {
        let place = |page: &str, target: &str| {
            let (place, source) = place_of(&root(), Path::new(page), target).unwrap();
            (place, source.map(|path| path.display().to_string()))
        };
        let of_book = |text: &str| (text.to_owned(), None);
        assert_eq!(place("README.md", "docs/vfio.md#x"), of_book("vfio.md#x"));
        assert_eq!(
            place("docs/guide/c.md", "../vfio.md"),
            of_book("../vfio.md")
        );
        assert_eq!(
            place("docs/guide/c.md", "../../README.md"),
            of_book("../index.md")
        );
        assert_eq!(place("README.md", "docs/SUMMARY.md"), of_book("toc.html"));
        assert_eq!(place("README.md", "#licence"), of_book("#licence"));
        assert_eq!(
            place("docs/ptx.md", "../LICENSE-MIT"),
            (
                "source/LICENSE-MIT.txt".to_owned(),
                Some("LICENSE-MIT".to_owned())
            )
        );
        let missing = place_of(&root(), Path::new("docs/ptx.md"), "nothing.md").unwrap_err();
        assert_eq!(
            missing.to_string(),
            "docs/ptx.md: there is no docs/nothing.md"
        );
    }

    #[test]
    fn code_keeps_its_text_and_each_link_of_a_line_is_replaced() {
        let text = "[a](b) `[c](d)` ![e](f)\n```\n[g](h)\n```\n[i](j) and [k](l";
        let new = rewritten(text, |target| Ok(format!("<{target}>"))).unwrap();
        assert_eq!(
            new,
            "[a](<b>) `[c](d)` ![e](<f>)\n```\n[g](h)\n```\n[i](<j>) and [k](l"
        );
    }

    /// The book itself is made by hand; this much of it costs no time.
    #[test]
    fn the_pages_of_the_site_can_be_made() {
        let folder = std::env::temp_dir().join(format!("site-pages-{}", std::process::id()));
        let libraries = [("nvme-core", "the core".to_owned())];
        stage(&root(), &folder, &libraries).unwrap();
        let list = fs::read_to_string(folder.join("SUMMARY.md")).unwrap();
        for target in list.split("](").skip(1) {
            let target = target.split(')').next().unwrap();
            assert!(folder.join(target).is_file(), "{target}");
        }
        let front = fs::read_to_string(folder.join("index.md")).unwrap();
        assert!(front.contains("](reference.md)") && front.contains("](figures/overview.svg)"));
        let reference = fs::read_to_string(folder.join(REFERENCE)).unwrap();
        assert!(reference.contains("[`nvme-core`](api/nvme_core/index.html) | the core"));
        let read_blocks = "source/host-shell/examples/read_blocks.rs.txt";
        assert!(folder.join(read_blocks).is_file());
        assert!(
            folder
                .join("source/nvme-gpu-kernel/ptx/tables.txt")
                .is_file()
        );
        assert!(folder.join("adr/index.md").is_file() && !folder.join("adr/README.md").exists());
        fs::remove_dir_all(&folder).unwrap();
    }
}
