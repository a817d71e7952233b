//! The udev rule of the nodes, which the machine's owner may edit: an edited one is kept, as dpkg keeps a conffile.

use crate::guest::failed;
use chores::process::Failure;
use std::fs;
use std::path::{Path, PathBuf};

/// Path of a rule, and of a copy of what `install` wrote last, by which an edit is detected.
pub struct Rule {
    place: PathBuf,
    copy: PathBuf,
}

/// The outcome for the rule.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The rule is unchanged, or was written.
    Written,
    /// The rule was edited and is kept; the new one is written beside it, under this name.
    Kept(PathBuf),
    /// A user removed the rule; it is not written again.
    LeftOut,
    /// The rule was edited, and is kept beside its path under this name.
    Saved(PathBuf),
    /// The rule was removed.
    Removed,
}

impl Rule {
    /// Returns the rule `name` of udev in `rules`, with its copy in `copies`.
    pub fn new(name: &str, rules: &Path, copies: &Path) -> Self {
        Self {
            place: rules.join(name),
            copy: copies.join(name),
        }
    }

    /// Writes `new`, unless the rule that is there was edited or taken away.
    pub fn install(&self, new: &[u8]) -> Result<Outcome, Failure> {
        let there = read(&self.place)?;
        let copy = read(&self.copy)?;
        let beside = self.beside("new");
        let outcome = match (&there, &copy) {
            (None, Some(_)) => Outcome::LeftOut,
            (Some(there), copy) if there != new && copy.as_ref() != Some(there) => {
                write(&beside, new)?;
                Outcome::Kept(beside)
            }
            _ => {
                write(&self.place, new)?;
                remove(&beside)?;
                Outcome::Written
            }
        };
        write(&self.copy, new)?;
        Ok(outcome)
    }

    /// Takes the rule away; one that was edited is kept under another name, which udev does not read.
    pub fn remove(&self) -> Result<Outcome, Failure> {
        let there = read(&self.place)?;
        let copy = read(&self.copy)?;
        let saved = self.beside("saved");
        let outcome = match there {
            Some(there) if copy.as_ref() != Some(&there) => {
                write(&saved, &there)?;
                Outcome::Saved(saved)
            }
            _ => Outcome::Removed,
        };
        for path in [&self.place, &self.copy, &self.beside("new")] {
            remove(path)?;
        }
        Ok(outcome)
    }

    fn beside(&self, end: &str) -> PathBuf {
        let mut name = self.place.clone().into_os_string();
        name.push(format!(".{end}"));
        name.into()
    }
}

impl Outcome {
    /// Returns the outcome in words; `None` if there is nothing to say.
    pub fn in_words(&self, rule: &Rule) -> Option<String> {
        let place = rule.place.display();
        match self {
            Self::Written | Self::Removed => None,
            Self::Kept(new) => Some(format!(
                "{place} was edited and stays as it is; the new one is {}",
                new.display()
            )),
            Self::LeftOut => Some(format!(
                "{place} was taken away and is not written again; `cargo xtask kmod remove` and `install` bring it back"
            )),
            Self::Saved(saved) => Some(format!(
                "{place} was edited; it is kept as {}, which udev does not read",
                saved.display()
            )),
        }
    }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, Failure> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path, &error)),
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    fs::write(path, bytes).map_err(|error| failed(path, &error))
}

fn remove(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed(path, &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("nvme-gpu-rule-{name}-{}", std::process::id()));
            fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn rule(&self) -> Rule {
            Rule::new("60.rules", &self.0.join("rules.d"), &self.0.join("lib"))
        }

        fn text(&self, name: &str) -> Option<String> {
            fs::read_to_string(self.0.join("rules.d").join(name)).ok()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_edited_rule_is_kept_and_another_one_is_replaced() {
        let folder = Folder::new("edited");
        let rule = folder.rule();
        assert_eq!(rule.install(b"one").unwrap(), Outcome::Written);
        assert_eq!(rule.install(b"two").unwrap(), Outcome::Written);
        assert_eq!(folder.text("60.rules").as_deref(), Some("two"));
        write(&rule.place, b"mine").unwrap();
        for new in ["two", "three"] {
            let kept = rule.install(new.as_bytes()).unwrap();
            assert!(matches!(kept, Outcome::Kept(_)), "{kept:?}");
            assert!(kept.in_words(&rule).unwrap().contains("stays as it is"));
            assert_eq!(folder.text("60.rules").as_deref(), Some("mine"));
            assert_eq!(folder.text("60.rules.new").as_deref(), Some(new));
        }
        let saved = rule.remove().unwrap();
        assert!(saved.in_words(&rule).unwrap().contains("60.rules.saved"));
        assert_eq!(folder.text("60.rules.saved").as_deref(), Some("mine"));
        assert_eq!(
            (folder.text("60.rules"), folder.text("60.rules.new")),
            (None, None)
        );
    }

    #[test]
    fn a_rule_without_a_copy_counts_as_edited() {
        let folder = Folder::new("unknown");
        let rule = folder.rule();
        write(&rule.place, b"of an older version, or mine").unwrap();
        assert!(matches!(rule.install(b"one").unwrap(), Outcome::Kept(_)));
        let folder = Folder::new("same");
        let rule = folder.rule();
        write(&rule.place, b"one").unwrap();
        assert_eq!(rule.install(b"one").unwrap(), Outcome::Written);
        assert_eq!(rule.remove().unwrap(), Outcome::Removed);
        assert_eq!(folder.text("60.rules"), None);
    }

    #[test]
    fn a_rule_that_was_taken_away_stays_away() {
        let folder = Folder::new("away");
        let rule = folder.rule();
        rule.install(b"one").unwrap();
        fs::remove_file(&rule.place).unwrap();
        assert_eq!(rule.install(b"two").unwrap(), Outcome::LeftOut);
        assert_eq!(folder.text("60.rules"), None);
        assert_eq!(rule.remove().unwrap(), Outcome::Removed);
        assert_eq!(rule.install(b"two").unwrap(), Outcome::Written);
    }
}
