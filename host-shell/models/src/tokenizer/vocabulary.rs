//! The tokens of a GGUF file: texts, kinds and scores.

use super::refused;
use crate::metadata::MetadataKeys;
use nvme_host::Result;
use nvme_host::catalog::MetadataValue;
use std::collections::HashMap;

/// Kinds of tokens, as `tokenizer.ggml.token_type` numbers them from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenKind {
    fn of(number: u64) -> Option<Self> {
        Some(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// Texts and kinds of all tokens, and the numbers of texts.
pub struct TokenVocabulary {
    texts: Vec<String>,
    kinds: Vec<TokenKind>,
    numbers: HashMap<String, u32>,
}

impl TokenVocabulary {
    pub fn of(keys: &MetadataKeys<'_>) -> Result<Self> {
        let texts = keys.array("tokenizer.ggml.tokens", "an array of texts", |value| {
            value.as_text().map(str::to_owned)
        })?;
        let texts = texts.filter(|texts| !texts.is_empty());
        let texts = texts.ok_or_else(|| refused("it has no tokens".to_owned()))?;
        let name = "tokenizer.ggml.token_type";
        let kinds = keys.array(name, "an array of kinds from 1 to 6", |value| {
            value.as_u64().and_then(TokenKind::of)
        })?;
        let kinds = kinds.unwrap_or_else(|| vec![TokenKind::Normal; texts.len()]);
        if kinds.len() != texts.len() {
            return Err(refused(format!(
                "{name} has {} kinds of {} tokens",
                kinds.len(),
                texts.len()
            )));
        }
        Ok(Self {
            numbers: texts.iter().cloned().zip(0..).collect(),
            texts,
            kinds,
        })
    }

    /// Creates a vocabulary of these tokens, for tests.
    #[cfg(test)]
    pub fn made_of(tokens: &[(&str, TokenKind)]) -> Self {
        let texts: Vec<String> = tokens.iter().map(|(text, _)| (*text).to_owned()).collect();
        Self {
            numbers: texts.iter().cloned().zip(0..).collect(),
            texts,
            kinds: tokens.iter().map(|(_, kind)| *kind).collect(),
        }
    }

    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// Returns the token that is written as `text`.
    pub fn token(&self, text: &str) -> Option<u32> {
        self.numbers.get(text).copied()
    }

    /// Returns the control token that is written as `text`.
    pub fn control(&self, text: &str) -> Option<u32> {
        let token = self.token(text)?;
        let (_, kind) = self.text_and_kind(token)?;
        matches!(kind, TokenKind::Control | TokenKind::UserDefined).then_some(token)
    }

    pub fn text_and_kind(&self, token: u32) -> Option<(&str, TokenKind)> {
        let at = usize::try_from(token).ok()?;
        Some((self.texts.get(at)?, *self.kinds.get(at)?))
    }

    /// Returns the texts of all tokens with their numbers and kinds.
    pub fn tokens(&self) -> impl Iterator<Item = (&str, u32, TokenKind)> {
        let texts = self.texts.iter().map(String::as_str);
        let all = texts.zip(0..).zip(&self.kinds);
        all.map(|((text, token), kind)| (text, token, *kind))
    }

    /// Returns texts and their numbers: if two tokens have one text, the last number.
    pub fn numbers(&self) -> impl Iterator<Item = (String, u32)> {
        self.numbers
            .iter()
            .map(|(text, token)| (text.clone(), *token))
    }

    /// Returns the scores of the tokens.
    pub fn scores(&self, keys: &MetadataKeys<'_>) -> Result<Vec<f64>> {
        let name = "tokenizer.ggml.scores";
        let scores = keys.array(name, "an array of numbers", |value: &MetadataValue| {
            value.as_f64().filter(|score| !score.is_nan())
        })?;
        let scores = scores.ok_or_else(|| refused(format!("there is no key {name}")))?;
        match scores.len() == self.len() {
            true => Ok(scores),
            false => Err(refused(format!(
                "{name} has {} scores of {} tokens",
                scores.len(),
                self.len()
            ))),
        }
    }

    /// Returns the token that the key `name` names.
    pub fn token_of_key(&self, keys: &MetadataKeys<'_>, name: &str) -> Result<Option<u32>> {
        let name = format!("tokenizer.ggml.{name}");
        let Some(number) = keys.integer(&name)? else {
            return Ok(None);
        };
        let token = u32::try_from(number).ok();
        match token.filter(|token| self.text_and_kind(*token).is_some()) {
            Some(token) => Ok(Some(token)),
            None => Err(refused(format!(
                "{name} is {number}, and there are {} tokens",
                self.len()
            ))),
        }
    }
}
