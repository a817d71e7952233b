//! Text to tokens and back, by the vocabulary of a GGUF file, as llama.cpp does it.
//!
//! The merges of the kind `gpt2` are made by Hugging Face's crate `tokenizers`. The steps before them are here: special
//! tokens are cut out of the text first, then it is split into words (byte-pair encoding, `gpt2`) or its spaces are
//! replaced (SentencePiece, `llama`).

mod byte_level;
mod sentence_piece;
mod special;
mod vocabulary;
mod words;

pub(crate) use byte_level::sign;

use crate::metadata::MetadataKeys;
use nvme_host::{Catalog, Error, Result};
use special::{SpecialTokens, TextFragment};
use vocabulary::{TokenKind, TokenVocabulary};

/// Keys of a tokenizer that are not needed to write a text as tokens and back.
const HARMLESS: [&str; 13] = [
    "chat_template",
    "chat_template.",
    "chat_templates",
    // Another form of the same vocabulary.
    "huggingface.",
    "ggml.padding_token_id",
    "ggml.unknown_token_id",
    "ggml.seperator_token_id",
    "ggml.separator_token_id",
    "ggml.mask_token_id",
    "ggml.cls_token_id",
    "ggml.fim_pre_token_id",
    "ggml.fim_suf_token_id",
    "ggml.fim_mid_token_id",
];
/// Tokens with which models end a turn, besides those that keys name.
const ENDS: [&str; 5] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
];

/// Tokens that end a turn of gpt-oss, whose messages are in the format Harmony.
const HARMONY_ENDS: [&str; 2] = ["<|return|>", "<|call|>"];

/// The tokens of a model.
pub struct Tokenizer {
    vocabulary: TokenVocabulary,
    special: SpecialTokens,
    encoder: TextEncoder,
    /// Comes before a text.
    first: Option<u32>,
    /// Comes after a text.
    last: Option<u32>,
    ends: Vec<u32>,
}

/// Encoder of the text between special tokens.
enum TextEncoder {
    ByteLevel(Box<byte_level::ByteEncoder>),
    SentencePiece(sentence_piece::PieceEncoder),
}

/// Returns the tokens that end a turn, as far as a vocabulary has them.
fn ends_of(vocabulary: &TokenVocabulary) -> Vec<Option<u32>> {
    let harmony = HARMONY_ENDS.map(|text| vocabulary.control(text));
    // In Harmony `<|end|>` ends a message, also the analysis before the answer: ending there would lose the answer.
    let is_harmony = harmony.iter().all(Option::is_some);
    let others = ENDS
        .iter()
        .filter(|text| !(is_harmony && **text == "<|end|>"));
    let others = others.map(|text| vocabulary.control(text));
    harmony.into_iter().chain(others).collect()
}

impl Tokenizer {
    /// Reads it from the keys of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Usage`] for a tokenizer of another kind, for lists that do not fit together, and for an unknown key.
    pub fn of(catalog: &Catalog) -> Result<Self> {
        let keys = MetadataKeys::of(catalog, refused);
        let vocabulary = TokenVocabulary::of(&keys)?;
        let model = keys.text("tokenizer.ggml.model")?.unwrap_or("missing");
        let (encoder, begins) = match model {
            "gpt2" => {
                let encoder = byte_level::ByteEncoder::of(&keys, &vocabulary)?;
                let begins = encoder.begins_by_default();
                (TextEncoder::ByteLevel(Box::new(encoder)), begins)
            }
            "llama" => {
                let encoder = sentence_piece::PieceEncoder::of(&keys, &vocabulary)?;
                (TextEncoder::SentencePiece(encoder), true)
            }
            other => return Err(refused(format!("tokenizer.ggml.model is {other}"))),
        };
        let token = |name: &str| vocabulary.token_of_key(&keys, name);
        let (bos, eos) = (token("bos_token_id")?, token("eos_token_id")?);
        let flag = |name: &str| keys.flag(&format!("tokenizer.ggml.{name}"));
        let first = flag("add_bos_token")?.unwrap_or(begins);
        let last = flag("add_eos_token")?.unwrap_or(false);
        if flag("add_sep_token")? == Some(true) {
            return Err(refused("tokenizer.ggml.add_sep_token is true".to_owned()));
        }
        let mut ends = vec![eos, token("eot_token_id")?, token("eom_token_id")?];
        ends.extend(ends_of(&vocabulary));
        let ends: Vec<u32> = ends.into_iter().flatten().collect();
        keys.check_all_read("tokenizer.", &HARMLESS)?;
        Ok(Self {
            special: SpecialTokens::of(&vocabulary),
            first: needed(bos, first, "bos")?,
            last: needed(eos, last, "eos")?,
            vocabulary,
            encoder,
            ends,
        })
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.vocabulary.len()
    }

    /// True if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True if `token` ends an answer.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    /// Returns the token that is written as `text`.
    pub fn token(&self, text: &str) -> Option<u32> {
        self.vocabulary.token(text)
    }

    /// Returns the control or user-defined token that is written as `text`: one that [`encode`](Self::encode) takes
    /// from a text as a whole. `None` also for a token of another kind, whose text is encoded like any other.
    pub fn control(&self, text: &str) -> Option<u32> {
        self.vocabulary.control(text)
    }

    /// Returns the tokens of `text`, with those that the model wants at its begin and end. A special token that is
    /// spelled out in the text becomes that token.
    ///
    /// Takes time in proportion to the text, but for a factor of the logarithm of its longest word.
    ///
    /// # Errors
    /// [`Error::Usage`] for a text that the vocabulary cannot write.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_until(text, &mut || Ok(()))
    }

    /// Encodes as [`encode`](Self::encode) does; calls `check` between words and ends with its
    /// error.
    ///
    /// # Errors
    /// The errors of [`Self::encode`] and of `check`.
    pub fn encode_until(
        &self,
        text: &str,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<u32>> {
        let mut tokens: Vec<u32> = self.first.into_iter().collect();
        // SentencePiece puts a space before a text, and llama.cpp also before the text after a special token.
        let mut begins = true;
        for fragment in self.special.split(text, &self.vocabulary, check)? {
            match fragment {
                TextFragment::Special(token) => tokens.push(token),
                TextFragment::Plain(text) => match &self.encoder {
                    TextEncoder::ByteLevel(encoder) => encoder.encode(text, &mut tokens, check)?,
                    TextEncoder::SentencePiece(encoder) => {
                        encoder.encode(&self.vocabulary, text, begins, &mut tokens, check)?;
                    }
                },
            }
            begins = matches!(fragment, TextFragment::Special(_));
        }
        tokens.extend(self.last);
        Ok(tokens)
    }

    /// Returns the bytes of `tokens`; the last character may be incomplete until the next token. Control tokens are
    /// left out.
    pub fn decode(&self, tokens: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for token in tokens {
            let Some((text, kind)) = self.vocabulary.text_and_kind(*token) else {
                continue;
            };
            match (kind, &self.encoder) {
                (TokenKind::Control | TokenKind::Unknown | TokenKind::Unused, _) => {}
                (TokenKind::UserDefined, _) => bytes.extend(text.as_bytes()),
                (_, TextEncoder::ByteLevel(_)) => bytes.extend(byte_level::bytes_of(text)),
                (kind, TextEncoder::SentencePiece(_)) => {
                    sentence_piece::decode(text, kind, &mut bytes)
                }
            }
        }
        bytes
    }
}

/// Returns a token that the model wants around each text.
fn needed(token: Option<u32>, is_wanted: bool, name: &str) -> Result<Option<u32>> {
    match (token, is_wanted) {
        (None, true) => Err(refused(format!(
            "a text has a token {name}, and there is no key tokenizer.ggml.{name}_token_id"
        ))),
        (token, true) => Ok(token),
        (_, false) => Ok(None),
    }
}

fn refused(cause: String) -> Error {
    Error::usage(
        format!("not a tokenizer that is known here: {cause}"),
        "use a GGUF file with a tokenizer of the kind llama (SentencePiece), or of the kind gpt2 with the words of \
         gpt-2, smollm, llama-bpe, qwen2, gpt-4o or default",
    )
}
