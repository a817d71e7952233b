//! Checks that no module imports itself through others: the import graph of each listed crate has no cycle.
//!
//! A node is a file. File A imports file B when a path of A (`crate::`, `super::`, `self::`, or one that
//! begins with a child module) names an item of B; a re-export (`pub use`) stands for the file that it
//! names. A parent that only declares and re-exports its children imports none of them. Unit tests,
//! comments and methods that are called on a value do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates that are free of cycles.
const CRATES: [&str; 14] = [
    "host-shell/bindings/c/src",
    "host-shell/cuda/src",
    "host-shell/driver/src",
    "host-shell/bench/src",
    "host-shell/doctor/src",
    "host-shell/files/src",
    "host-shell/kv/src",
    "host-shell/store/src",
    "host-shell/ext4/src",
    "host-shell/bindings/python/src",
    "host-shell/tool/src",
    "nvme-core/src",
    "nvme-gpu-kernel/src",
    "sim/src",
];

/// Path of a module from the crate's root.
type Module = Vec<String>;

#[test]
fn no_module_imports_itself_by_way_of_others() {
    for folder in CRATES {
        let graph = Graph::of(&read(folder));
        let edges: usize = graph.0.values().map(BTreeMap::len).sum();
        assert!(edges > graph.0.len(), "{folder}: {edges} imports found");
        if let Some(cycle) = graph.cycle() {
            panic!(
                "{folder}: modules import each other:\n  {}",
                cycle.join("\n  ")
            );
        }
    }
}

/// Returns the source files under `folder` of the workspace by module, without those of tests.
fn read(folder: &str) -> BTreeMap<Module, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let root = root.join(folder);
    let mut files = BTreeMap::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            let relative = path.strip_prefix(&root).unwrap().with_extension("");
            let mut module: Module = relative
                .iter()
                .map(|part| part.to_str().unwrap().to_string())
                .collect();
            if module
                .iter()
                .any(|part| part == "tests" || part == "testing")
            {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                if ["mod", "lib", "main"].contains(&module.last().unwrap().as_str()) {
                    module.pop();
                }
                files.insert(module, fs::read_to_string(&path).unwrap());
            }
        }
    }
    files
}

/// Names, `::` and single characters, each with its line; no comments, no unit tests, no texts.
fn tokens(text: &str) -> Vec<(String, usize)> {
    let mut tokens: Vec<(String, usize)> = Vec::new();
    let mut in_tests = false;
    let mut before = "";
    for (number, line) in text.lines().enumerate() {
        let attribute = std::mem::replace(&mut before, line);
        let is_of_tests = attribute.starts_with("#[cfg(") && attribute.contains("test");
        in_tests |= is_of_tests && line.starts_with("mod ") && line.ends_with('{');
        if in_tests {
            in_tests = line != "}";
            continue;
        }
        let mut code = line.split("//").next().unwrap_or("").to_string();
        for literal in ["'{'", "'}'", "'\"'"] {
            code = code.replace(literal, "");
        }
        let mut rest = code.as_str();
        while let Some(first) = rest.chars().next() {
            let word = |c: char| c.is_alphanumeric() || c == '_';
            let len = match first {
                '"' => rest[1..].find('"').map_or(rest.len(), |end| end + 2),
                ':' if rest.starts_with("::") => 2,
                first if word(first) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
                first => first.len_utf8(),
            };
            if !first.is_whitespace() && first != '"' {
                tokens.push((rest[..len].to_string(), number + 1));
            }
            rest = &rest[len..];
        }
    }
    tokens
}

/// A path that a file names, and the line.
struct Named {
    path: Module,
    line: usize,
}

/// The names in one file.
#[derive(Default)]
struct File {
    named: Vec<Named>,
    /// Names that this file exports, each with the item that it names.
    exports: BTreeMap<String, Module>,
}

/// Reads the tree of a path from `at` on, with the prefix `before`. Returns each leaf with its local name, and the
/// position behind the tree.
fn tree(
    tokens: &[(String, usize)],
    mut at: usize,
    before: &Module,
    leaves: &mut Vec<(Module, String)>,
) -> usize {
    let token = |at: usize| tokens.get(at).map_or("", |(token, _)| token.as_str());
    let mut path = before.clone();
    loop {
        match token(at) {
            "{" => {
                at += 1;
                while !["}", ""].contains(&token(at)) {
                    at = tree(tokens, at, &path, leaves);
                    if token(at) == "," {
                        at += 1;
                    }
                }
                return at + 1;
            }
            "*" => {
                leaves.push((path, "*".to_string()));
                return at + 1;
            }
            name if name.starts_with(|c: char| c.is_alphabetic() || c == '_') => {
                path.push(name.to_string());
                at += 1;
            }
            // A turbofish, or something that is no path.
            _ => break,
        }
        if token(at) != "::" {
            break;
        }
        at += 1;
    }
    let mut local = path.last().cloned().unwrap_or_default();
    if token(at) == "as" {
        local = token(at + 1).to_string();
        at += 2;
    }
    if path.last().is_some_and(|last| last == "self") {
        path.pop();
        local = path.last().cloned().unwrap_or_default();
    }
    leaves.push((path, local));
    at.max(1)
}

/// `path` as written in `module`, from the root of the crate; none for what is of other crates.
fn absolute(path: &[String], module: &Module, modules: &BTreeSet<Module>) -> Option<Module> {
    let mut from = module.clone();
    let mut rest = path;
    match rest.first()?.as_str() {
        "crate" => {
            from.clear();
            rest = &rest[1..];
        }
        "self" => rest = &rest[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                from.pop();
                rest = &rest[1..];
            }
        }
        child => {
            from.push(child.to_string());
            if !modules.contains(&from) {
                return None;
            }
            rest = &rest[1..];
        }
    }
    from.extend_from_slice(rest);
    Some(from)
}

impl File {
    fn of(text: &str, module: &Module, modules: &BTreeSet<Module>) -> Self {
        let tokens = tokens(text);
        let token = |at: usize| tokens.get(at).map_or("", |(token, _)| token.as_str());
        let mut file = Self::default();
        let mut used: BTreeMap<&str, usize> = BTreeMap::new();
        let mut at = 0;
        // Braces that are open, and how many modules inside the file they nest.
        let mut inline: Vec<usize> = Vec::new();
        let mut depth = 0usize;
        while at < tokens.len() {
            match token(at) {
                "{" => depth += 1,
                "}" => {
                    depth = depth
                        .checked_sub(1)
                        .unwrap_or_else(|| panic!("{module:?}: a brace too many"));
                    inline.pop_if(|opened| *opened == depth);
                }
                "mod" if token(at + 2) == "{" => inline.push(depth),
                "use" if token(at + 1) != "<" => {
                    let exported = at > 0 && (token(at - 1) == "pub" || token(at - 1) == ")");
                    let mut leaves = Vec::new();
                    let end = tree(&tokens, at + 1, &Vec::new(), &mut leaves);
                    for (path, local) in leaves {
                        let path = without_inline(path, inline.len());
                        let Some(path) = absolute(&path, module, modules) else {
                            // The item belongs to another crate, so it is no item of this module.
                            if exported {
                                file.exports.insert(local, Vec::new());
                            }
                            continue;
                        };
                        if exported && local != "*" {
                            file.exports.insert(local, path);
                        } else {
                            let line = tokens[at].1;
                            file.named.push(Named { path, line });
                        }
                    }
                    at = end;
                    continue;
                }
                name => {
                    let begins = at == 0 || token(at - 1) != "::";
                    if begins && token(at + 1) == "::" {
                        let mut leaves = Vec::new();
                        tree(&tokens, at, &Vec::new(), &mut leaves);
                        let written = leaves.into_iter().next().map(|(path, _)| path);
                        let path = written.map(|path| without_inline(path, inline.len()));
                        let path = path.and_then(|path| absolute(&path, module, modules));
                        // `pub(in crate::a)` and `mod a;` name no item.
                        if let Some(path) = path.filter(|_| at == 0 || token(at - 1) != "in") {
                            let line = tokens[at].1;
                            file.named.push(Named { path, line });
                        }
                    }
                    if begins && token(at.wrapping_sub(1)) != "mod" {
                        used.entry(name).or_insert(tokens[at].1);
                    }
                }
            }
            at += 1;
        }
        // A name that a file both exports and uses is an import.
        for (name, path) in &file.exports {
            if let Some(line) = used.get(name.as_str())
                && !path.is_empty()
            {
                let (path, line) = (path.clone(), *line);
                file.named.push(Named { path, line });
            }
        }
        file
    }
}

/// Returns `path` as it would be written outside the `depth` modules inside the file.
fn without_inline(mut path: Module, depth: usize) -> Module {
    for _ in 0..depth {
        if path.first().is_some_and(|part| part == "super") {
            path[0] = "self".to_string();
            if path.get(1).is_some_and(|part| part == "super") {
                path.remove(0);
            }
        }
    }
    path
}

/// The imports of each module, each with the first line that has it.
struct Graph(BTreeMap<Module, BTreeMap<Module, usize>>);

impl Graph {
    fn of(texts: &BTreeMap<Module, String>) -> Self {
        let modules: BTreeSet<Module> = texts.keys().cloned().collect();
        let files: BTreeMap<&Module, File> = texts
            .iter()
            .map(|(module, text)| (module, File::of(text, module, &modules)))
            .collect();
        let mut graph = BTreeMap::new();
        for (module, file) in &files {
            let imports: &mut BTreeMap<Module, usize> = graph.entry((*module).clone()).or_default();
            for Named { path, line } in &file.named {
                if let Some(of) = owner(path, &files, 0).filter(|of| of != *module) {
                    imports.entry(of).or_insert(*line);
                }
            }
        }
        Self(graph)
    }

    /// Returns a cycle, a line for each import in it.
    fn cycle(&self) -> Option<Vec<String>> {
        let mut done = BTreeSet::new();
        for start in self.0.keys() {
            let mut way = Vec::new();
            if let Some(cycle) = self.walk(start, &mut way, &mut done) {
                return Some(cycle);
            }
        }
        None
    }

    fn walk<'a>(
        &'a self,
        at: &'a Module,
        way: &mut Vec<&'a Module>,
        done: &mut BTreeSet<&'a Module>,
    ) -> Option<Vec<String>> {
        if let Some(begin) = way.iter().position(|seen| *seen == at) {
            let cycle = way[begin..].iter().chain([&at]).copied();
            let cycle: Vec<&Module> = cycle.collect();
            let lines = cycle.windows(2).map(|pair| {
                let line = self.0[pair[0]][pair[1]];
                format!("{} line {line} imports {}", shown(pair[0]), shown(pair[1]))
            });
            return Some(lines.collect());
        }
        if !done.insert(at) {
            return None;
        }
        way.push(at);
        let found = self.0[at]
            .keys()
            .find_map(|next| self.walk(next, way, done));
        way.pop();
        found
    }
}

fn shown(module: &Module) -> String {
    match module.is_empty() {
        true => "the root".to_string(),
        false => module.join("::"),
    }
}

/// Returns the module that the item at `path` is written in; none for a module itself and for other crates.
fn owner(path: &Module, files: &BTreeMap<&Module, File>, hops: usize) -> Option<Module> {
    let known = |len: &usize| files.contains_key(&path[..*len].to_vec());
    let len = (0..=path.len()).rev().find(known)?;
    let module = path[..len].to_vec();
    let Some(name) = path.get(len) else {
        // A module is imported by its name, as in `use crate::pci;`: the used items are named elsewhere, so the module
        // itself counts.
        return Some(module);
    };
    assert!(hops < 20, "exports of {} go round", path.join("::"));
    match files[&module].exports.get(name) {
        Some(path) if path.is_empty() => None,
        Some(path) => owner(path, files, hops + 1),
        None => Some(module),
    }
}

mod of_texts {
    use super::*;

    fn cycle(files: &[(&str, &str)]) -> Option<Vec<String>> {
        let texts = files.iter().map(|(module, text)| {
            let parts = module.split("::").filter(|part| !part.is_empty());
            (parts.map(str::to_string).collect(), text.to_string())
        });
        Graph::of(&texts.collect()).cycle()
    }

    #[test]
    fn two_modules_that_use_each_other_are_a_cycle() {
        let found = cycle(&[
            ("", "mod a;\nmod b;\n"),
            ("a", "use crate::b::{self, Thing};\n"),
            ("b", "fn f() {\n    super::a::g();\n}\n"),
        ]);
        let lines = ["a line 1 imports b", "b line 2 imports a"];
        assert_eq!(found.unwrap(), lines);
    }

    #[test]
    fn a_parent_that_declares_and_exports_is_none() {
        let files = [
            ("", "pub mod a;\n"),
            (
                "a",
                "mod b;\nmod c;\npub use b::B;\npub(crate) use c::{C, D as E};\n",
            ),
            ("a::b", "use super::C;\nuse crate::a::E;\npub struct B;\n"),
            ("a::c", "pub struct C;\npub struct D;\n"),
        ];
        assert_eq!(cycle(&files), None);
    }

    #[test]
    fn a_parent_with_items_that_its_child_uses_must_not_use_the_child() {
        let child = ("a::b", "use super::Own;\npub struct B(Own);\n");
        let exports = "mod b;\npub use b::B;\npub struct Own;\n";
        assert_eq!(cycle(&[("", "mod a;\n"), ("a", exports), child]), None);
        let uses = "mod b;\npub use b::B;\npub struct Own;\nfn f(_: B) {}\n";
        assert!(cycle(&[("", "mod a;\n"), ("a", uses), child]).is_some());
        let paths = "mod b;\npub struct Own;\nfn f(_: b::B) {}\n";
        assert!(cycle(&[("", "mod a;\n"), ("a", paths), child]).is_some());
    }

    #[test]
    fn comments_unit_tests_and_other_crates_are_no_imports() {
        let files = [
            ("", "mod a;\nmod b;\npub use other as core;\n"),
            ("a", "use crate::b::B;\nuse crate::core::spec::Lba;\n"),
            (
                "b",
                "/// As crate::a::A.\npub struct B;\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n",
            ),
        ];
        assert_eq!(cycle(&files), None);
    }

    #[test]
    fn a_module_inside_a_file_is_of_that_file() {
        let files = [
            ("", "mod a;\n"),
            ("a", "mod b;\npub struct Own;\n"),
            (
                "a::b",
                "mod inner {\n    use super::Thing;\n}\npub struct Thing;\n",
            ),
        ];
        assert_eq!(cycle(&files), None);
    }
}
