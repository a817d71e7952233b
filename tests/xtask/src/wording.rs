//! Measures how the source reads: phrases that only this project uses, docs that open with a question word, names of
//! types in one word, names that stand twice, usage errors without a verb. `cargo xtask check` fails above the rates in tests/wording.txt, which only
//! fall: a change that lowers one commits the lower number.

use chores::process::{Failure, output, root};
use std::collections::BTreeMap;
use std::process::Command;

/// Words and phrases that a reader of other projects does not know. docs/style.md says what to write instead.
const PHRASES: [&str; 34] = [
    "so many",
    "of others",
    "came to",
    "comes to",
    "come to",
    "go on",
    "goes on",
    "let go",
    "lets go",
    "of which",
    "who reads",
    "who waits",
    "who writes",
    "who takes",
    "who holds",
    "who uses",
    "who asks",
    "who may",
    "handed out",
    "given back",
    "gives back",
    "give back",
    "of its own",
    "of their own",
    "says of",
    "said to",
    "told",
    "anew",
    "no more",
    "not the one",
    "that are there",
    "that is there",
    "what follows",
    "by itself",
];
const QUESTIONS: [&str; 8] = [
    "What", "Which", "How", "Who", "Where", "Whether", "Why", "When",
];
/// Verbs of causes. A cause of a usage error is a sentence with subject, rule and value, and has one of them.
const VERBS: &str = "is are was were has have had must cannot could would may do does need needs lie lies end ends \
    begin begins start starts fit fits want wants exceed exceeds name names take takes give gives hold holds move \
    moves read reads write writes keep keeps share overlap exclude grants inhibits mix";
/// The file of the committed rates: a name and a number on each line.
const RATES: &str = "tests/wording.txt";

/// Counts of a source tree.
#[derive(Default)]
struct Wording {
    comment_lines: usize,
    phrases: usize,
    docs: usize,
    questions: usize,
    types: BTreeMap<String, usize>,
    verbless_errors: usize,
}

impl Wording {
    /// Adds the text of a file, without the tests at its end.
    fn add(&mut self, text: &str) {
        let text = text
            .find("\n#[cfg(test)]\nmod ")
            .map_or(text, |at| &text[..at]);
        self.verbless_errors += causes(text).filter(|cause| is_verbless(cause)).count();
        let mut after_doc = false;
        for line in text.lines() {
            let line = line.trim_start();
            if let Some(comment) = line.strip_prefix("//") {
                self.comment_lines += 1;
                let comment = comment.trim_start_matches(['/', '!']).trim();
                self.phrases += phrases(comment);
                let is_doc = line.starts_with("/// ");
                if is_doc && !after_doc {
                    self.docs += 1;
                    let first = comment.split(|c: char| !c.is_alphanumeric()).next();
                    self.questions += usize::from(first.is_some_and(|w| QUESTIONS.contains(&w)));
                }
                after_doc = line.starts_with("///");
                continue;
            }
            after_doc = false;
            if let Some(name) = type_of(line) {
                *self.types.entry(name.to_string()).or_default() += 1;
            }
        }
    }

    /// Returns the rates by name: phrases in 10,000 lines of comments, the others in 1,000 docs or types; usage errors
    /// without a verb are counted.
    fn rates(&self) -> [(&'static str, usize); 5] {
        let of = |part: usize, all: usize, unit: usize| (part * unit).div_ceil(all.max(1));
        let all = self.types.values().sum();
        let chosen = |wanted: &dyn Fn(&str, usize) -> bool| {
            let found = self
                .types
                .iter()
                .filter(|(name, count)| wanted(name, **count));
            found.map(|(_, count)| count).sum()
        };
        let one_word = chosen(&|name, _| name.chars().filter(|c| c.is_uppercase()).count() == 1);
        let repeated = chosen(&|_, count| count > 1);
        [
            ("phrases", of(self.phrases, self.comment_lines, 10_000)),
            ("questions", of(self.questions, self.docs, 1000)),
            ("one-word-types", of(one_word, all, 1000)),
            ("repeated-types", of(repeated, all, 1000)),
            ("verbless-usage-errors", self.verbless_errors),
        ]
    }
}

/// Returns the causes of usage errors that stand in `text` as literals.
fn causes(text: &str) -> impl Iterator<Item = &str> {
    text.split("usage(").skip(1).filter_map(|call| {
        let call = call.trim_start();
        let call = call.strip_prefix("format!(").map_or(call, str::trim_start);
        let literal = call.strip_prefix('"')?;
        literal.split_once('"').map(|(cause, _)| cause)
    })
}

/// Returns whether `cause` has words besides its placeholders and no verb. A cause with placeholders alone passes on a
/// sentence.
fn is_verbless(cause: &str) -> bool {
    let own = cause
        .split('{')
        .map(|part| part.split_once('}').map_or(part, |(_, after)| after));
    let mut words = own
        .flat_map(|part| part.split(|c: char| !c.is_alphanumeric()))
        .filter(|word| word.starts_with(char::is_alphabetic))
        .peekable();
    words.peek().is_some() && !words.any(|word| VERBS.split_whitespace().any(|verb| verb == word))
}

/// Returns how often a phrase of [`PHRASES`] stands in `comment`, as whole words.
fn phrases(comment: &str) -> usize {
    let words: Vec<String> = comment
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let text = format!(" {} ", words.join(" "));
    let found = PHRASES.iter();
    found
        .map(|phrase| text.matches(&format!(" {phrase} ")).count())
        .sum()
}

/// Returns the name of the type that `line` declares.
fn type_of(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub") {
        Some(rest) => rest.strip_prefix('(').map_or(rest, |rest| {
            rest.split_once(')').map_or(rest, |(_, rest)| rest)
        }),
        None => line,
    };
    let (kind, rest) = line.trim_start().split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "union"].contains(&kind);
    let name = rest
        .split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()?;
    (is_type && name.starts_with(char::is_uppercase)).then_some(name)
}

/// Returns whether a file counts: tests, fuzz targets, benches and examples do not.
fn counts(path: &str) -> bool {
    let is_test = |part: &str| {
        ["test", "tests", "fuzz", "benches", "examples"].contains(&part.trim_end_matches(".rs"))
            || part.starts_with("tests_")
            || part.starts_with("testing")
    };
    path.ends_with(".rs") && !path.split('/').any(is_test)
}

/// Compares the tree's rates with the committed ones.
pub fn check() -> Result<(), Failure> {
    let listed = output(
        Command::new("git")
            .args(["ls-files", "*.rs"])
            .current_dir(root()),
    )?;
    let mut wording = Wording::default();
    for path in listed.lines().filter(|path| counts(path)) {
        let failed = |error| Failure::new(format!("{path}: {error}"));
        wording.add(&std::fs::read_to_string(root().join(path)).map_err(failed)?);
    }
    let failed = |error| Failure::new(format!("{RATES}: {error}"));
    let committed = std::fs::read_to_string(root().join(RATES)).map_err(failed)?;
    judge(&wording.rates(), &committed)
}

fn judge(rates: &[(&str, usize)], committed: &str) -> Result<(), Failure> {
    let mut faults = Vec::new();
    for (name, found) in rates {
        let line = committed.lines().find_map(|line| line.strip_prefix(name));
        let most = line.and_then(|rest| rest.trim().parse::<usize>().ok());
        println!("wording: {name} {found}, at most {}", most.unwrap_or(0));
        match most {
            None => faults.push(format!("{RATES} has no number for {name}")),
            Some(most) if *found > most => faults.push(format!(
                "{name} rose from {most} to {found}: docs/style.md says what to write instead"
            )),
            Some(_) => {}
        }
    }
    match faults.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(faults.join("; "))),
    }
}

#[cfg(test)]
mod tests {
    use super::{Wording, causes, counts, is_verbless, judge, phrases, type_of};

    #[test]
    fn phrases_are_whole_words() {
        assert_eq!(phrases("So many of them are handed out, anew."), 3);
        assert_eq!(phrases("Untold somany"), 0);
    }

    #[test]
    fn types_are_declared_and_not_used() {
        assert_eq!(
            type_of("pub(crate) struct RowTable<'t> {"),
            Some("RowTable")
        );
        assert_eq!(type_of("enum Way {"), Some("Way"));
        assert_eq!(type_of("let x = Way::new();"), None);
        assert_eq!(type_of("struct_of(Way)"), None);
    }

    #[test]
    fn a_tree_has_rates() {
        let mut wording = Wording::default();
        wording.add("//! Rows.\n/// Whether it goes on.\n/// How.\nstruct Way;\n/// Returns it.\npub struct RowTable;\n");
        wording.add("struct Way;\n\n#[cfg(test)]\nmod tests {\n    struct Ignored;\n}\n");
        let expected = [
            ("phrases", 2500),
            ("questions", 500),
            ("one-word-types", 667),
            ("repeated-types", 667),
            ("verbless-usage-errors", 0),
        ];
        assert_eq!(wording.rates(), expected);
    }

    #[test]
    fn a_cause_without_a_verb_is_found() {
        let text = "Error::usage(\"stripe: {why}\", x); usage(\n format!(\n \"{a} is not {b}\", 1), y); usage(cause, z)";
        let found: Vec<&str> = causes(text).collect();
        assert_eq!(found, ["stripe: {why}", "{a} is not {b}"]);
        assert!(is_verbless(found[0]));
        assert!(!is_verbless(found[1]));
        assert!(!is_verbless("{}: {what}"));
    }

    #[test]
    fn tests_do_not_count() {
        assert!(counts("sim/src/bus/queue.rs"));
        assert!(!counts("sim/src/bus/tests.rs"));
        assert!(!counts("tests/xtask/src/main.rs"));
        assert!(!counts("host-shell/examples/read_blocks.rs"));
    }

    #[test]
    fn a_rate_that_rises_is_named() {
        assert!(judge(&[("phrases", 3)], "phrases 3\n").is_ok());
        let rose = judge(&[("phrases", 4)], "phrases 3\n").unwrap_err();
        assert!(rose.to_string().contains("phrases rose from 3 to 4"));
        assert!(judge(&[("phrases", 4)], "").is_err());
    }
}
