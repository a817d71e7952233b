//! SentencePiece's byte-pair encoding with byte fallback, as Llama 2 and Mixtral have it.

use super::byte_level::{Numbers, built, internal};
use super::refused;
use super::vocabulary::{TokenKind, Vocabulary};
use crate::metadata::MetadataKeys;
use nvme_host::Result;
use tokenizers::Model;
use tokenizers::models::bpe::BPE;

/// Stands for a space.
const SPACE: char = '\u{2581}';

/// Bytes of tokens that are looked at for pairs: those of a vocabulary of 256,000 words take a hundredth of it.
const MOST_WORK: usize = 1 << 29;

/// Writes texts as tokens.
pub struct Encoder {
    merges: BPE,
    /// Whether a text gets a space before it.
    adds_space: bool,
}

impl Encoder {
    pub fn of(keys: &MetadataKeys<'_>, vocabulary: &Vocabulary) -> Result<Self> {
        let flag = |name: &str| keys.flag(&format!("tokenizer.ggml.{name}"));
        // Both are for other kinds than this one; llama.cpp reads neither of them for it, nor merges, which scores say.
        let _ = keys.get("tokenizer.ggml.merges");
        if flag("remove_extra_whitespaces")? == Some(true) {
            let cause = "tokenizer.ggml.remove_extra_whitespaces is true";
            return Err(refused(cause.to_owned()));
        }
        if let Some(pre) = keys.text("tokenizer.ggml.pre")?
            && pre != "default"
        {
            return Err(refused(format!("tokenizer.ggml.pre is {pre}")));
        }
        for byte in 0..=u8::MAX {
            let name = format!("<0x{byte:02X}>");
            if vocabulary.token(&name).is_none() {
                return Err(refused(format!("it has no token {name}")));
            }
        }
        let pairs = pairs(vocabulary, &vocabulary.scores(keys)?)?;
        let builder =
            BPE::builder().vocab_and_merges(vocabulary.numbers().collect::<Numbers>(), pairs);
        Ok(Self {
            merges: built(builder.byte_fallback(true))?,
            adds_space: flag("add_space_prefix")?.unwrap_or(true),
        })
    }

    /// Appends the tokens of `text`, which `begins` a text or follows a special token.
    pub fn encode(
        &self,
        text: &str,
        begins: bool,
        tokens: &mut Vec<u32>,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        check()?;
        let space = (begins && self.adds_space).then_some(SPACE);
        let others = text.chars().map(|one| if one == ' ' { SPACE } else { one });
        let text: String = space.into_iter().chain(others).collect();
        let found = self.merges.tokenize(&text).map_err(internal)?;
        tokens.extend(found.into_iter().map(|token| token.id));
        Ok(())
    }
}

/// The merges that scores stand for: of two neighbours whose joined text is a token, those of the highest score are
/// joined first.
fn pairs(vocabulary: &Vocabulary, scores: &[f64]) -> Result<Vec<(String, String)>> {
    let mut joined: Vec<(&str, f64)> = Vec::new();
    for ((text, token, kind), score) in vocabulary.tokens().zip(scores) {
        // Of two tokens with one text the last is the one that is found.
        if vocabulary.token(text) != Some(token) || text.chars().nth(1).is_none() {
            continue;
        }
        let mut characters = text
            .char_indices()
            .map(|(at, one)| &text[at..at + one.len_utf8()]);
        let missing = characters.find(|one| vocabulary.token(one).is_none());
        if let (TokenKind::Normal, Some(missing)) = (kind, missing) {
            return Err(refused(format!(
                "the token '{text}' has the character '{missing}', for which there is no token"
            )));
        }
        joined.push((text, *score));
    }
    joined.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let mut pairs = Vec::new();
    let mut work = 0;
    for (text, _) in joined {
        for (at, _) in text.char_indices().skip(1) {
            work += text.len();
            if work > MOST_WORK {
                let cause = "its tokens can be joined in too many ways: they are longer than those of texts";
                return Err(refused(cause.to_owned()));
            }
            let (first, second) = text.split_at(at);
            if vocabulary.token(first).is_some() && vocabulary.token(second).is_some() {
                pairs.push((first.to_owned(), second.to_owned()));
            }
        }
    }
    Ok(pairs)
}

/// Appends the bytes of a token.
pub fn decode(text: &str, kind: TokenKind, bytes: &mut Vec<u8>) {
    let byte = text
        .strip_prefix("<0x")
        .and_then(|text| text.strip_suffix('>'));
    let byte = byte.and_then(|digits| u8::from_str_radix(digits, 16).ok());
    match byte.filter(|_| kind == TokenKind::Byte) {
        Some(byte) => bytes.push(byte),
        None => bytes.extend(text.replace(SPACE, " ").as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token of another kind may be written as bytes are, and stands for its text.
    #[test]
    fn bytes_come_from_tokens_of_bytes_alone() {
        let decoded = |text, kind| {
            let mut bytes = Vec::new();
            decode(text, kind, &mut bytes);
            bytes
        };
        assert_eq!(decoded("<0xE9>", TokenKind::Byte), [0xE9]);
        for kind in [TokenKind::Normal, TokenKind::UserDefined] {
            assert_eq!(decoded("<0xE9>", kind), b"<0xE9>");
        }
        assert_eq!(decoded("\u{2581}a", TokenKind::Normal), b" a");
    }
}
