//! Text to tokens and back: byte-pair encoding, by the vocabulary and the merges of a GGUF file.

use fancy_regex::Regex;
use nvme_host::catalog::Value;
use nvme_host::{Catalog, Error, Result};
use std::collections::HashMap;

/// Words, numbers, signs and spaces: what GPT-2 never merges across.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// One digit at a time.
const DIGITS: &str = r"\p{N}";
/// The type of tokens that are written in a text as they are.
const CONTROL: u64 = 3;

/// The tokens of a model.
pub struct Tokenizer {
    tokens: Vec<String>,
    numbers: HashMap<String, u32>,
    /// Rank of the merge of two neighbours.
    merges: HashMap<(String, String), usize>,
    controls: Vec<u32>,
    splits: Vec<Regex>,
    end: Option<u32>,
}

impl Tokenizer {
    /// Reads it from the keys of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Usage`] for a tokenizer of another kind, and for lists that do not go together.
    pub fn of(catalog: &Catalog) -> Result<Self> {
        let get = |name: &str| {
            let found = catalog.metadata().iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value)
        };
        let text = |name: &str| get(name).and_then(Value::as_text);
        let model = text("tokenizer.ggml.model").unwrap_or("none");
        if model != "gpt2" {
            return Err(other(format!("its kind is {model}")));
        }
        let splits = match text("tokenizer.ggml.pre").unwrap_or("default") {
            "gpt-2" | "default" => vec![WORDS],
            "smollm" => vec![DIGITS, WORDS],
            pre => return Err(other(format!("its splits are those of {pre}"))),
        };
        let splits = splits.into_iter().map(Regex::new);
        let splits = splits.collect::<std::result::Result<_, _>>();
        let splits = splits.map_err(|error| Error::internal(error.to_string()))?;
        let texts = |name: &str| -> Result<Vec<String>> {
            let values = get(name).and_then(Value::as_array).unwrap_or_default();
            let texts = values
                .iter()
                .map(|value| value.as_text().map(str::to_owned));
            let texts: Option<Vec<String>> = texts.collect();
            let texts = texts.filter(|texts| !texts.is_empty());
            texts.ok_or_else(|| other(format!("{name} is no list of texts")))
        };
        let tokens = texts("tokenizer.ggml.tokens")?;
        let numbers = tokens.iter().cloned().zip(0..).collect();
        let pairs = texts("tokenizer.ggml.merges")?.into_iter().enumerate();
        let pairs = pairs.map(|(rank, pair)| {
            let (first, second) = pair.split_once(' ')?;
            Some(((first.to_owned(), second.to_owned()), rank))
        });
        let merges: Option<_> = pairs.collect();
        let merges = merges.ok_or_else(|| other("a merge is not of two texts".to_owned()))?;
        let types = get("tokenizer.ggml.token_type").and_then(Value::as_array);
        let types = types.unwrap_or_default().iter().zip(0..);
        let controls = types.filter(|(kind, _)| kind.as_u64() == Some(CONTROL));
        let controls = controls.map(|(_, token)| token);
        let controls = controls.filter(|token| (*token as usize) < tokens.len());
        let end = get("tokenizer.ggml.eos_token_id").and_then(Value::as_u64);
        Ok(Self {
            numbers,
            merges,
            controls: controls.collect(),
            splits,
            end: end.and_then(|end| u32::try_from(end).ok()),
            tokens,
        })
    }

    /// How many tokens there are.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The token that ends an answer.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The token that is written as `text`.
    pub fn token(&self, text: &str) -> Option<u32> {
        self.numbers.get(text).copied()
    }

    /// The tokens of `text`. Control tokens are taken where they are written as they are.
    ///
    /// # Errors
    /// [`Error::Usage`] for a text that the vocabulary cannot write.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while let Some((at, control)) = self.first_control(rest) {
            self.encode_plain(&rest[..at], &mut tokens)?;
            tokens.push(control);
            rest = &rest[at + self.tokens[control as usize].len()..];
        }
        self.encode_plain(rest, &mut tokens)?;
        Ok(tokens)
    }

    /// The first place of a control token in `text`, the longest there.
    fn first_control(&self, text: &str) -> Option<(usize, u32)> {
        let found = self.controls.iter().filter_map(|token| {
            let name = &self.tokens[*token as usize];
            let at = text.find(name.as_str()).filter(|_| !name.is_empty())?;
            Some((at, std::cmp::Reverse(name.len()), *token))
        });
        found.min().map(|(at, _, token)| (at, token))
    }

    fn encode_plain(&self, text: &str, tokens: &mut Vec<u32>) -> Result<()> {
        let mut parts = vec![text];
        for split in &self.splits {
            let mut next = Vec::new();
            for part in parts {
                pieces(split, part, &mut next)?;
            }
            parts = next;
        }
        for part in parts {
            self.merge(part, tokens)?;
        }
        Ok(())
    }

    /// Merges neighbours, the pair of the lowest rank first.
    fn merge(&self, part: &str, tokens: &mut Vec<u32>) -> Result<()> {
        let mut symbols: Vec<String> = part.bytes().map(|byte| sign(byte).to_string()).collect();
        loop {
            let ranks = symbols.windows(2).enumerate().filter_map(|(at, pair)| {
                let rank = self.merges.get(&(pair[0].clone(), pair[1].clone()))?;
                Some((*rank, at))
            });
            let Some((_, at)) = ranks.min() else { break };
            let second = symbols.remove(at + 1);
            symbols[at].push_str(&second);
        }
        for symbol in &symbols {
            let token = self.numbers.get(symbol.as_str());
            tokens.push(*token.ok_or_else(|| other(format!("it has no token for {symbol:?}")))?);
        }
        Ok(())
    }

    /// The bytes of `tokens`: a character may end in the token behind the last. Control tokens are left out.
    pub fn decode(&self, tokens: &[u32]) -> Vec<u8> {
        let shown = tokens.iter().filter(|token| !self.controls.contains(token));
        let texts = shown.filter_map(|token| self.tokens.get(*token as usize));
        texts
            .flat_map(|text| text.chars().flat_map(bytes_of))
            .collect()
    }
}

fn other(cause: String) -> Error {
    Error::usage(
        format!("not a tokenizer that is known here: {cause}"),
        "use a model with a tokenizer of the kind gpt2, as SmolLM2",
    )
}

/// What `split` finds in `text`, and what is between.
fn pieces<'t>(split: &Regex, text: &'t str, pieces: &mut Vec<&'t str>) -> Result<()> {
    let mut end = 0;
    for found in split.find_iter(text) {
        let found = found.map_err(|error| other(error.to_string()))?;
        if found.start() > end {
            pieces.push(&text[end..found.start()]);
        }
        pieces.push(found.as_str());
        end = found.end();
    }
    if end < text.len() {
        pieces.push(&text[end..]);
    }
    Ok(())
}

/// Bytes that GPT-2 writes as themselves.
fn is_itself(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character with which GPT-2 writes a byte: itself, or one of those from U+0100 on, in the order of the bytes.
pub(crate) fn sign(byte: u8) -> char {
    match is_itself(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|byte| !is_itself(*byte)).count();
            char::from_u32(0x100 + before as u32).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    }
}

/// The byte of a character of [`sign`]; the bytes of any other in UTF-8.
fn bytes_of(sign: char) -> Vec<u8> {
    let found = (0..=u8::MAX).find(|byte| self::sign(*byte) == sign);
    match found {
        Some(byte) => vec![byte],
        None => sign.to_string().into_bytes(),
    }
}
