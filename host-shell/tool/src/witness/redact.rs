//! Removes content that must not be in a witness file: who made it and where, and the identity of the drive.

use super::record::WitnessRecord;
use nvme_host::Result;
use nvme_host::sysfs::SysfsHost;
use serde_json::Value;

/// Replacement of a removed word.
const REMOVED: &str = "REMOVED";
/// Replacement of a path.
const PATH: &str = "PATH";
/// Shorter ones would be found in other words.
const SHORTEST: usize = 3;

/// Words that must not be in a file.
#[derive(Clone, Debug, Default)]
pub struct RedactedWords {
    /// Serial numbers and the like: removed wherever they occur.
    anywhere: Vec<String>,
    /// Names of people and machines: removed where they are whole words.
    words: Vec<String>,
}

impl RedactedWords {
    /// Returns the names of this machine and of its user.
    pub fn of_machine(host: &SysfsHost, variables: impl Fn(&str) -> Option<String>) -> Self {
        let mut secrets = Self::default();
        for file in ["hostname", "domainname"] {
            secrets.word(host.text(format!("proc/sys/kernel/{file}")));
        }
        for name in ["USER", "LOGNAME", "SUDO_USER", "HOSTNAME"] {
            secrets.word(variables(name));
        }
        let home = variables("HOME").unwrap_or_default();
        secrets.word(home.rsplit('/').next().map(str::to_owned));
        for function in host.controllers() {
            secrets.add(function.serial.as_deref());
        }
        secrets
    }

    fn word(&mut self, word: Option<String>) {
        let Some(word) = word else { return };
        // A host name with its domain stands alone, too.
        let short = word.split('.').next().unwrap_or_default().to_owned();
        for word in [word, short] {
            let word = word.trim().to_lowercase();
            // These are common words of the field, which name nobody.
            let is_common = matches!(
                word.as_str(),
                "root" | "none" | "(none)" | "localhost" | "nvme" | "user"
            );
            if word.len() >= SHORTEST && !is_common && !self.words.contains(&word) {
                self.words.push(word);
            }
        }
    }

    /// Adds a serial number or another name of one drive.
    pub fn add(&mut self, secret: Option<&str>) {
        let secret = secret.unwrap_or_default().trim().to_lowercase();
        if secret.len() >= SHORTEST && !self.anywhere.contains(&secret) {
            self.anywhere.push(secret);
        }
    }

    /// Returns `text` without secrets, paths and qualified names.
    pub fn clean(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for secret in &self.anywhere {
            text = replaced(&text, secret, |_, _| true);
        }
        for word in &self.words {
            let is_end = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric());
            text = replaced(&text, word, |before, after| is_end(before) && is_end(after));
        }
        without_paths(&text)
    }
}

/// Replaces each `secret`, in lower case, in `text` where `fits` accepts the characters before and after it.
fn replaced(text: &str, secret: &str, fits: impl Fn(Option<char>, Option<char>) -> bool) -> String {
    // Only ASCII is lowered, so that offsets stay the same.
    let lower = text.to_ascii_lowercase();
    let (mut clean, mut at) = (String::new(), 0);
    while let Some(found) = lower[at..].find(secret) {
        let (start, end) = (at + found, at + found + secret.len());
        let before = text[..start].chars().next_back();
        let after = text[end..].chars().next();
        clean.push_str(&text[at..start]);
        clean.push_str(match fits(before, after) {
            true => REMOVED,
            false => &text[start..end],
        });
        at = end;
    }
    clean.push_str(&text[at..]);
    clean
}

/// True if a path may begin after `c`.
fn begins_path(c: Option<char>) -> bool {
    c.is_none_or(|c| c.is_whitespace() || "'\"(=:,`[".contains(c))
}

/// True if `word` is the qualified name of one drive or one host.
pub fn is_qualified_name(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    let is_hex = |text: &str| text.len() >= 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    ["nqn.", "eui.", "naa.", "t10.", "wwn-", "uuid.", "gpu-"]
        .iter()
        .any(|start| word.starts_with(start))
        || word.strip_prefix("0x").is_some_and(is_hex)
}

/// Returns `text` with PATH in place of every path, and without qualified names.
fn without_paths(text: &str) -> String {
    let mut clean = String::new();
    let mut rest = text;
    let mut before = None;
    while let Some(first) = rest.chars().next() {
        let is_path = begins_path(before)
            && (rest.starts_with("./") || rest.starts_with("../") || rest.starts_with("~/") || {
                let mut next = rest.chars();
                next.next() == Some('/') && next.next().is_some_and(|c| !c.is_whitespace())
            });
        let is_name = !is_path && begins_path(before) && is_qualified_name(word_of(rest));
        if is_path || is_name {
            clean.push_str(if is_path { PATH } else { REMOVED });
            // A qualified name has colons.
            let end = |c: char| c.is_whitespace() || "'\"),".contains(c);
            let word = match is_name {
                true => &rest[..rest.find(end).unwrap_or(rest.len())],
                false => word_of(rest),
            };
            before = word.chars().next_back();
            rest = &rest[word.len()..];
            continue;
        }
        clean.push(first);
        before = Some(first);
        rest = &rest[first.len_utf8()..];
    }
    clean
}

/// Returns the first word of `text`, which a quotation mark or a sign of the sentence ends.
fn word_of(text: &str) -> &str {
    let end = text.find(|c: char| c.is_whitespace() || "'\"),;:`]?".contains(c));
    &text[..end.unwrap_or(text.len())]
}

/// Returns the record with every text clean.
pub fn clean(record: &WitnessRecord, secrets: &RedactedWords) -> Result<Value> {
    let value = serde_json::to_value(record);
    let mut value = value.map_err(|error| nvme_host::Error::internal(error.to_string()))?;
    clean_value(&mut value, secrets);
    Ok(value)
}

fn clean_value(value: &mut Value, secrets: &RedactedWords) {
    match value {
        Value::String(text) => *text = secrets.clean(text),
        Value::Array(all) => all.iter_mut().for_each(|one| clean_value(one, secrets)),
        Value::Object(members) => members
            .iter_mut()
            .for_each(|(_, one)| clean_value(one, secrets)),
        _ => {}
    }
}

/// Returns the part of `text` that must not be published, if there is one.
pub fn found_in(text: &str) -> Option<String> {
    let clean = without_paths(text);
    (clean != text).then(|| format!("'{text}' has a path or a qualified name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets() -> RedactedWords {
        let mut secrets = RedactedWords::default();
        secrets.add(Some("S4EWNX0R123456Z   "));
        secrets.word(Some("wintermute.example.org".to_owned()));
        secrets.word(Some("case".to_owned()));
        secrets.word(Some("root".to_owned()));
        secrets
    }

    #[test]
    fn serials_names_and_paths_are_taken_out() {
        for (text, clean) in [
            ("serial s4ewnx0r123456z!", "serial REMOVED!"),
            ("xS4EWNX0R123456Zx", "xREMOVEDx"),
            ("on Wintermute as CASE", "on REMOVED as REMOVED"),
            (
                "in this case-insensitive staircase",
                "in this REMOVED-insensitive staircase",
            ),
            (
                "by the root complex, 64/66 GB/s",
                "by the root complex, 64/66 GB/s",
            ),
            (
                "cannot open '/home/case/x.img': no",
                "cannot open 'PATH': no",
            ),
            ("sim:/data/x.img?size=1GiB", "sim:PATH?size=1GiB"),
            ("-o ./out.json ~/x ../y /", "-o PATH PATH PATH /"),
            (
                "nqn.2019-10.com.x:uuid:1-2 and eui.00",
                "REMOVED and REMOVED",
            ),
            ("6.12.9 (x86_64)", "6.12.9 (x86_64)"),
        ] {
            assert_eq!(secrets().clean(text), clean);
        }
    }

    #[test]
    fn what_is_clean_stays_so_and_what_is_not_is_found() {
        let text = secrets().clean("'/a/b' on wintermute.example.org, nqn.x");
        assert_eq!(text, "'PATH' on REMOVED, REMOVED");
        assert_eq!(secrets().clean(&text), text);
        assert_eq!(found_in(&text), None);
        assert!(found_in("see /etc/passwd").is_some());
        assert!(found_in("eui.0025385b").is_some());
    }
}
