//! Text of devices, files and users, made harmless for a terminal.

/// True if a terminal acts on `c`, or reorders the text around it, instead of showing it.
fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Formats one line: every character that a terminal acts on, a line feed too, becomes an escape
/// such as `\u{1b}`.
pub fn line(text: &str) -> String {
    escaped(text, |c| {
        acts(c).then(|| format!("\\u{{{:x}}}", u32::from(c)))
    })
}

/// Does the same as [`line()`], but for text of several lines.
pub fn lines(text: &str) -> String {
    let ends = |c| c == '\n';
    escaped(text, |c| {
        (acts(c) && !ends(c)).then(|| format!("\\u{{{:x}}}", u32::from(c)))
    })
}

/// Returns the text of a JSON document, in which such characters can only be in strings.
pub fn json(text: &str) -> String {
    // All of these characters lie in the basic multilingual plane.
    escaped(text, |c| {
        (acts(c) && c != '\n').then(|| format!("\\u{:04x}", u32::from(c)))
    })
}

fn escaped(text: &str, escape: impl Fn(char) -> Option<String>) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match escape(c) {
            Some(escape) => safe.push_str(&escape),
            None => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_acts_on_is_written_out() {
        let text = "a\x1b[31m\u{9b}2J\u{7f}\u{202e}b\nü";
        let safe = "a\\u{1b}[31m\\u{9b}2J\\u{7f}\\u{202e}b";
        assert_eq!(line(text), format!("{safe}\\u{{a}}ü"));
        assert_eq!(lines(text), format!("{safe}\nü"));
    }

    #[test]
    fn json_stays_the_same_document() {
        let value = serde_json::json!({ "sn": "a\x1b[31m\u{9b}2J\u{7f}\u{202e}b\nü" });
        for text in [value.to_string(), format!("{value:#}")] {
            let safe = json(&text);
            assert!(!safe.chars().any(|c| acts(c) && c != '\n'), "{safe}");
            assert_eq!(
                serde_json::from_str::<serde_json::Value>(&safe).unwrap(),
                value
            );
        }
    }
}
