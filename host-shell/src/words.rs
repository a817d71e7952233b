//! The words of each interface for what errors advise.

/// The remedy with the options of the tool, in which the library names what a user can set, as another interface calls
/// them. `words` has pairs of an option and its name there; of two that begin alike the longer one stands first.
///
/// ```
/// let python = [("--timeout-ms", "timeout_ms="), ("--gpu", "gpu=")];
/// let remedy = nvme_host::words::of_interface("raise --timeout-ms, or leave --gpu out", &python);
/// assert_eq!(remedy, "raise timeout_ms=, or leave gpu= out");
/// ```
pub fn of_interface(remedy: &str, words: &[(&str, &str)]) -> String {
    let replaced = |text: String, (option, word): &(&str, &str)| text.replace(option, word);
    words.iter().fold(remedy.to_owned(), replaced)
}
