//! Links of the site's pages: each leads to a file, and to an element of it where it names one.

use super::pages::normal;
use crate::release::files;
use chores::process::Failure;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Returns the number of pages for which `checks` is true, and their links that lead nowhere. A page is named by its path
/// from `site`.
pub fn broken(
    site: &Path,
    checks: impl Fn(&Path) -> bool,
) -> Result<(usize, Vec<String>), Failure> {
    let mut pages = Vec::new();
    add_pages(site, Path::new(""), &mut pages)?;
    pages.retain(|page| checks(page));
    let mut names = HashMap::new();
    let mut found = Vec::new();
    for page in &pages {
        let text = files::read(&site.join(page))?;
        for target in values(&text, &["href", "src"]) {
            if let Some(cause) = fault(site, page, target, &mut names)? {
                found.push(format!("{}: {target}: {cause}", page.display()));
            }
        }
    }
    Ok((pages.len(), found))
}

fn add_pages(site: &Path, folder: &Path, pages: &mut Vec<PathBuf>) -> Result<(), Failure> {
    for name in files::names(&site.join(folder))? {
        let path = folder.join(&name);
        if site.join(&path).is_dir() {
            add_pages(site, &path, pages)?;
        } else if name.ends_with(".html") {
            pages.push(path);
        }
    }
    Ok(())
}

/// Returns why a target leads nowhere.
fn fault(
    site: &Path,
    page: &Path,
    target: &str,
    names: &mut HashMap<PathBuf, HashSet<String>>,
) -> Result<Option<String>, Failure> {
    let elsewhere = ["http:", "https:", "mailto:", "data:", "javascript:", "//"];
    if target.is_empty() || elsewhere.iter().any(|start| target.starts_with(start)) {
        return Ok(None);
    }
    let (file, name) = target.split_once('#').unwrap_or((target, ""));
    let file = file.split('?').next().unwrap_or_default();
    let folder = page.parent().unwrap_or(Path::new(""));
    let path = match file.strip_prefix('/') {
        _ if file.is_empty() => page.to_path_buf(),
        Some(from_root) => normal(Path::new(from_root)),
        None => normal(&folder.join(file)),
    };
    let path = match site.join(&path).is_dir() {
        true => path.join("index.html"),
        false => path,
    };
    if !site.join(&path).is_file() {
        return Ok(Some(format!("there is no {}", path.display())));
    }
    if name.is_empty() || path.extension().is_none_or(|end| end != "html") {
        return Ok(None);
    }
    if !names.contains_key(&path) {
        let text = files::read(&site.join(&path))?;
        let all = values(&text, &["id", "name"]);
        names.insert(path.clone(), all.map(str::to_owned).collect());
    }
    let is_there = names[&path].contains(name) || names[&path].contains(&decoded(name));
    Ok((!is_there).then(|| format!("{} has no element {name}", path.display())))
}

/// Returns the values of the attributes of a page that have one of the names. Text of scripts has none.
fn values<'t>(text: &'t str, names: &[&str]) -> impl Iterator<Item = &'t str> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        if let Some(script) = rest.strip_prefix("script") {
            let end = script.find("</script").unwrap_or(script.len());
            let head = script.find('>').unwrap_or(end).min(end);
            add_values(&script[..head], names, &mut found);
            rest = &script[end..];
            continue;
        }
        let end = rest.find('>').unwrap_or(rest.len());
        add_values(&rest[..end], names, &mut found);
        rest = &rest[end..];
    }
    found.into_iter()
}

/// Adds the values of the attributes of one element.
fn add_values<'t>(element: &'t str, names: &[&str], found: &mut Vec<&'t str>) {
    for name in names {
        let start = format!(" {name}=\"");
        let after = element.split(start.as_str()).skip(1);
        found.extend(after.filter_map(|value| value.split('"').next()));
    }
}

/// Replaces the escapes of a URL.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let value = digits.and_then(|two| u8::from_str_radix(two, 16).ok());
        match (first, value) {
            (b'%', Some(value)) => {
                bytes.push(value);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lead_nowhere_are_named_and_others_are_not() {
        let site = std::env::temp_dir().join(format!("site-links-{}", std::process::id()));
        let page = "<a href=\"b/\">x</a> <a class=\"c\" href=\"b/index.html#h%C3%B6\">x</a>\
                    <img src=\"gone.svg\"><a href=\"#nowhere\">x</a><a href=\"https://example.org/y\">x</a>\
                    <a href=\"missing.html\">x</a> <a href=\"b/index.html?q=1#other\">x</a>\
                    <script src=\"gone.js\">text = '<a href=\"not-a-link\">';</script>";
        files::write(&site.join("a.html"), page).unwrap();
        files::write(
            &site.join("b/index.html"),
            "<h2 id=\"hö\"><a href=\"/a.html\">",
        )
        .unwrap();
        files::write(&site.join("api/c.html"), "<a href=\"missing\">").unwrap();
        let (pages, mut found) = broken(&site, |page| !page.starts_with("api")).unwrap();
        found.sort();
        std::fs::remove_dir_all(&site).unwrap();
        assert_eq!(pages, 2);
        assert_eq!(
            found,
            [
                "a.html: #nowhere: a.html has no element nowhere",
                "a.html: b/index.html?q=1#other: b/index.html has no element other",
                "a.html: gone.js: there is no gone.js",
                "a.html: gone.svg: there is no gone.svg",
                "a.html: missing.html: there is no missing.html",
            ]
        );
    }
}
