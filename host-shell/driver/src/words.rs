//! Words of each interface for the remedies of errors, and texts whose length is limited whatever their
//! content.

use std::fmt::Display;

/// Limit of the members of a list that a message names.
const MOST_NAMED: usize = 5;
/// Limit of the characters of a name that a message repeats.
const MOST_LETTERS: usize = 120;
/// The longest message in bytes, and how much of a longer one's begin and end stays.
const MOST_BYTES: usize = 2_000;
const BEGIN: usize = 1_500;
const END: usize = 400;

/// Returns the remedy with the tool's options replaced by the names that another interface has for them. `words` has
/// pairs of an option and its name there; if two options begin alike, the longer one comes first.
///
/// ```
/// let python = [("--timeout-ms", "timeout_ms="), ("--gpu", "gpu=")];
/// let remedy = nvme_driver::words::of_interface("raise --timeout-ms, or leave --gpu out", &python);
/// assert_eq!(remedy, "raise timeout_ms=, or leave gpu= out");
/// ```
pub fn of_interface(remedy: &str, words: &[(&str, &str)]) -> String {
    let replaced = |text: String, (option, word): &(&str, &str)| text.replace(option, word);
    words.iter().fold(remedy.to_owned(), replaced)
}

/// Returns the first few of `all` with commas between, and how many more there are: a list that a file or a device
/// gives may have millions.
///
/// ```
/// use nvme_driver::words::listed;
///
/// assert_eq!(listed(["a", "b"]), "a, b");
/// assert_eq!(listed(1..=7), "1, 2, 3, 4, 5 and 2 more");
/// ```
pub fn listed(all: impl IntoIterator<Item = impl Display>) -> String {
    let mut all = all.into_iter();
    let named = all.by_ref().take(MOST_NAMED);
    let named: Vec<String> = named.map(|one| shortened(&one.to_string())).collect();
    match all.count() {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

/// Returns a name as messages repeat it: a long one as its beginning and its length.
///
/// ```
/// use nvme_driver::words::shortened;
///
/// assert_eq!(shortened("model.embed.weight"), "model.embed.weight");
/// assert!(shortened(&"x".repeat(1 << 20)).ends_with("x... (1048576 bytes)"));
/// ```
pub fn shortened(name: &str) -> String {
    match name.char_indices().nth(MOST_LETTERS) {
        None => name.to_owned(),
        Some((end, _)) => format!("{}... ({} bytes)", &name[..end], name.len()),
    }
}

/// Returns [`shortened`] between quotation marks, with escapes for unprintable characters.
pub fn quoted(name: &str) -> String {
    format!("{:?}", shortened(name))
}

/// Returns a message that fits on a screen: of a long one its beginning and end.
pub(crate) fn bounded(message: String) -> String {
    if message.len() <= MOST_BYTES {
        return message;
    }
    let (begin, end) = (
        message.floor_char_boundary(BEGIN),
        message.ceil_char_boundary(message.len() - END),
    );
    let left_out = end - begin;
    format!(
        "{} ... ({left_out} bytes left out) ... {}",
        &message[..begin],
        &message[end..]
    )
}
