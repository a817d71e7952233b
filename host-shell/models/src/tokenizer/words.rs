//! Division of a text into words; pairs are never merged across their borders.

use super::refused;
use fancy_regex::Regex;
use nvme_host::{Error, Result};

/// Words, numbers, signs and spaces of GPT-2.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// One digit at a time.
const DIGITS: &str = r"\p{N}";
/// Splits of Llama 3: numbers of three digits at most, and line feeds separately.
const LLAMA3: &str = concat!(
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Splits of llama.cpp for a file that names none: signs, then GPT-2's words, then numbers of three digits.
const DEFAULT: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];

/// Rules of splitting a text into words, by the name that a GGUF file gives.
pub struct WordSplits {
    splits: Vec<Regex>,
    /// True for Llama 3's rules: a word that is a token is taken whole, and texts begin with a token.
    pub is_llama3: bool,
}

impl WordSplits {
    pub fn named(name: Option<&str>) -> Result<Self> {
        let (patterns, is_llama3): (&[&str], bool) = match name {
            None | Some("default") => (&DEFAULT, false),
            Some("gpt-2") => (&[GPT2], false),
            Some("smollm") => (&[DIGITS, GPT2], false),
            Some("llama-bpe" | "llama3" | "llama-v3") => (&[LLAMA3], true),
            Some(name) => {
                return Err(refused(format!("tokenizer.ggml.pre is {name}")));
            }
        };
        let splits = patterns.iter().map(|pattern| Regex::new(pattern));
        let splits = splits.collect::<std::result::Result<_, _>>();
        Ok(Self {
            splits: splits.map_err(|error| Error::internal(error.to_string()))?,
            is_llama3,
        })
    }

    /// Calls `word` with each word of `text`, which together are the text.
    pub fn each<'t>(
        &self,
        text: &'t str,
        mut word: impl FnMut(&'t str) -> Result<()>,
    ) -> Result<()> {
        let mut parts = vec![text];
        for split in &self.splits {
            let mut next = Vec::new();
            for part in parts {
                words(split, part, &mut next)?;
            }
            parts = next;
        }
        parts.into_iter().try_for_each(&mut word)
    }
}

/// Splits `text` into the matches of `split` and the texts between them.
fn words<'t>(split: &Regex, text: &'t str, words: &mut Vec<&'t str>) -> Result<()> {
    let mut end = 0;
    for found in split.find_iter(text) {
        let found = found.map_err(|error| {
            let cause = format!("the words at byte {end} of the text cannot be split: {error}");
            Error::usage(
                cause,
                "use a shorter text, or one with fewer spaces in a row",
            )
        })?;
        if found.start() > end {
            words.push(&text[end..found.start()]);
        }
        words.push(found.as_str());
        end = found.end();
    }
    if end < text.len() {
        words.push(&text[end..]);
    }
    Ok(())
}
