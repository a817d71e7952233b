//! SentencePiece's byte-pair encoding with byte fallback, as Llama 2 and Mixtral have it.
//!
//! Neighbours whose joined text is a token are merged, the pair with the highest score first; among equal scores the
//! leftmost pair, as in llama.cpp. The crate `tokenizers` has a rank for each pair of texts and none for positions, so
//! that it cannot express "the leftmost of these".

use super::refused;
use super::vocabulary::{TokenKind, TokenVocabulary};
use crate::metadata::MetadataKeys;
use nvme_host::Result;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Stands for a space.
const SPACE: char = '\u{2581}';
/// Number of merges between two checks whether the caller still wants the result.
const BATCH: usize = 4096;

/// Writes texts as tokens.
pub struct PieceEncoder {
    /// Score of each token.
    scores: Vec<f32>,
    /// The tokens of bytes that no other token has.
    bytes: Vec<u32>,
    /// Bytes of the longest token.
    longest: usize,
    /// True if a space is put before a text.
    adds_space: bool,
}

impl PieceEncoder {
    pub fn of(keys: &MetadataKeys<'_>, vocabulary: &TokenVocabulary) -> Result<Self> {
        let flag = |name: &str| keys.flag(&format!("tokenizer.ggml.{name}"));
        // Read and ignored, as in llama.cpp: the order of merges follows from the scores of this kind of tokenizer.
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
        let bytes = (0..=u8::MAX).map(|byte| {
            let name = format!("<0x{byte:02X}>");
            let token = vocabulary.token(&name);
            token.ok_or_else(|| refused(format!("it has no token {name}")))
        });
        let scores = vocabulary.scores(keys)?;
        Ok(Self {
            scores: scores.into_iter().map(|score| score as f32).collect(),
            bytes: bytes.collect::<Result<_>>()?,
            longest: vocabulary
                .tokens()
                .map(|(text, ..)| text.len())
                .max()
                .unwrap_or(0),
            adds_space: flag("add_space_prefix")?.unwrap_or(true),
        })
    }

    /// Appends the tokens of `text`, which `begins` a text or follows a special token.
    pub fn encode(
        &self,
        vocabulary: &TokenVocabulary,
        text: &str,
        begins: bool,
        tokens: &mut Vec<u32>,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let space = (begins && self.adds_space).then_some(SPACE);
        let others = text.chars().map(|one| if one == ' ' { SPACE } else { one });
        let text: String = space.into_iter().chain(others).collect();
        let mut merging = SymbolMerge::of(self, vocabulary, &text);
        loop {
            check()?;
            if !merging.merge(BATCH) {
                break;
            }
        }
        for symbol in merging.symbols.iter().filter(|symbol| symbol.bytes > 0) {
            let text = &text[symbol.begin..symbol.begin + symbol.bytes];
            match vocabulary.token(text) {
                Some(token) => tokens.push(token),
                None => tokens.extend(text.bytes().map(|byte| self.bytes[usize::from(byte)])),
            }
        }
        Ok(())
    }
}

/// A piece of the text: a character, or a merged pair. One without bytes was merged into another one.
#[derive(Clone, Copy)]
struct TextSymbol {
    begin: usize,
    bytes: usize,
    /// Indexes of the symbol's neighbours.
    before: Option<usize>,
    after: Option<usize>,
}

/// Two neighbours whose joined text is a token.
struct SymbolPair {
    score: f32,
    left: usize,
    right: usize,
    /// Length of both parts together: if it differs from that of the present parts, one of them has been merged
    /// meanwhile.
    bytes: usize,
}

impl Ord for SymbolPair {
    /// Orders merges: the greatest is merged first. No score is a NaN.
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = self.score.partial_cmp(&other.score);
        by_score
            .unwrap_or(Ordering::Equal)
            .then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for SymbolPair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for SymbolPair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for SymbolPair {}

/// A text while its pieces are merged.
struct SymbolMerge<'t> {
    encoder: &'t PieceEncoder,
    vocabulary: &'t TokenVocabulary,
    text: &'t str,
    symbols: Vec<TextSymbol>,
    pairs: BinaryHeap<SymbolPair>,
}

impl<'t> SymbolMerge<'t> {
    fn of(encoder: &'t PieceEncoder, vocabulary: &'t TokenVocabulary, text: &'t str) -> Self {
        let characters = text.char_indices().enumerate();
        let mut symbols: Vec<TextSymbol> = characters
            .map(|(at, (begin, character))| TextSymbol {
                begin,
                bytes: character.len_utf8(),
                before: at.checked_sub(1),
                after: Some(at + 1),
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.after = None;
        }
        let mut merging = Self {
            encoder,
            vocabulary,
            text,
            symbols,
            pairs: BinaryHeap::new(),
        };
        for right in 1..merging.symbols.len() {
            merging.look_at(Some(right - 1), Some(right));
        }
        merging
    }

    /// Adds the pair, if there is a token for it.
    fn look_at(&mut self, left: Option<usize>, right: Option<usize>) {
        let (Some(left), Some(right)) = (left, right) else {
            return;
        };
        let begin = self.symbols[left].begin;
        let bytes = self.symbols[left].bytes + self.symbols[right].bytes;
        if bytes > self.encoder.longest {
            return;
        }
        if let Some(token) = self.vocabulary.token(&self.text[begin..begin + bytes]) {
            self.pairs.push(SymbolPair {
                score: self.encoder.scores[token as usize],
                left,
                right,
                bytes,
            });
        }
    }

    /// Merges at most `most` pairs; returns true if more may be left.
    fn merge(&mut self, most: usize) -> bool {
        for _ in 0..most {
            let Some(pair) = self.pairs.pop() else {
                return false;
            };
            let (left, right) = (self.symbols[pair.left], self.symbols[pair.right]);
            let is_there = left.bytes > 0 && right.bytes > 0;
            if !is_there || left.bytes + right.bytes != pair.bytes {
                continue;
            }
            self.symbols[pair.left].bytes = pair.bytes;
            self.symbols[pair.left].after = right.after;
            self.symbols[pair.right].bytes = 0;
            if let Some(after) = right.after {
                self.symbols[after].before = Some(pair.left);
            }
            self.look_at(left.before, Some(pair.left));
            self.look_at(Some(pair.left), right.after);
        }
        true
    }
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

    /// A token of another kind whose text looks like a byte stands for its text.
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
