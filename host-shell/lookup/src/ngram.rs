//! The hashes of one table: from the last few tokens of a sequence to rows.

use crate::{LookupError, NgramHistory};
use std::sync::Arc;

/// Number that stands for a token of an image, for models whose n-grams stop at images.
pub const IMAGE_TOKEN: i64 = -1;

/// One hash: its n-gram's length, and the rows that it selects from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashHead {
    /// Number of tokens of the n-grams, 2 and more.
    pub length: usize,
    /// Number of rows of this hash, a prime.
    pub rows: u64,
    /// First row of this hash in the table.
    pub first_row: u64,
}

/// Limit that n-grams do not reach across, besides the beginning of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NgramBoundary {
    /// Images: an [`IMAGE_TOKEN`], and all tokens before it, count as padding.
    Image,
    /// The padding token itself, which ends a text: all tokens before it count as padding.
    Padding,
}

/// The hashes of one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramHash {
    tokens: u64,
    /// The class of each token, if tokens of one class are hashed alike.
    classes: Option<Arc<[u32]>>,
    multipliers: Vec<u64>,
    heads: Vec<HashHead>,
    padding: i64,
    boundary: NgramBoundary,
}

impl NgramHash {
    /// Makes the hashes of a model of `tokens` tokens from its multipliers, one for each position in the longest
    /// n-gram, and the number of rows of each head, in the order of n-grams' lengths.
    pub(crate) fn new(
        tokens: u64,
        multipliers: Vec<u64>,
        rows: impl IntoIterator<Item = (usize, u64)>,
        (padding, boundary): (i64, NgramBoundary),
    ) -> Self {
        let mut first_row = 0;
        let head = |(length, rows)| {
            let head = HashHead {
                length,
                rows,
                first_row,
            };
            first_row += rows;
            head
        };
        Self {
            tokens,
            classes: None,
            multipliers,
            heads: rows.into_iter().map(head).collect(),
            padding,
            boundary,
        }
    }

    /// Makes the hashes take the class of each token instead of the token.
    pub(crate) fn with_classes(self, classes: Arc<[u32]>) -> Self {
        Self {
            tokens: classes.len() as u64,
            classes: Some(classes),
            ..self
        }
    }

    /// Returns the number of tokens that the hashes know.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the class of each token, if tokens of one class are hashed alike.
    pub fn classes(&self) -> Option<&[u32]> {
        self.classes.as_deref()
    }

    /// Returns the multipliers, the one of the newest token first.
    pub fn multipliers(&self) -> &[u64] {
        &self.multipliers
    }

    /// Returns the hashes, in the order of the row ids of a token.
    pub fn heads(&self) -> &[HashHead] {
        &self.heads
    }

    /// Returns the number of rows that the hashes select from.
    pub fn rows(&self) -> u64 {
        self.heads.iter().map(|head| head.rows).sum()
    }

    /// Returns the token that replaces positions beyond the boundary of an n-gram.
    pub fn padding(&self) -> i64 {
        self.padding
    }

    /// Returns the boundary across which n-grams do not reach.
    pub fn boundary(&self) -> NgramBoundary {
        self.boundary
    }

    /// Returns the history of a sequence that begins.
    pub fn begin(&self) -> NgramHistory {
        NgramHistory::new(self.multipliers.len() - 1, self.padding)
    }

    /// Writes the row ids of each of `tokens`, which follow `history`: `heads().len()` of each, token by token. The
    /// history is not changed: see [`NgramHistory::commit`].
    ///
    /// # Errors
    /// [`LookupError::TokenOutOfRange`] for a token that the model does not have, and [`LookupError::OtherLength`]
    /// for an output of another length; nothing is written then.
    pub fn row_ids(
        &self,
        history: &NgramHistory,
        tokens: &[i64],
        out: &mut [i64],
    ) -> Result<(), LookupError> {
        self.check(tokens)?;
        if Some(out.len()) != tokens.len().checked_mul(self.heads.len()) {
            return Err(LookupError::OtherLength {
                given: out.len(),
                tokens: tokens.len(),
                heads: self.heads.len(),
            });
        }
        for (position, out) in out.chunks_exact_mut(self.heads.len()).enumerate() {
            self.row_ids_at(history, tokens, position, out);
        }
        Ok(())
    }

    /// Checks that the model has all of `tokens`.
    ///
    /// # Errors
    /// [`LookupError::TokenOutOfRange`] for the first token that the model does not have.
    pub fn check(&self, tokens: &[i64]) -> Result<(), LookupError> {
        let is_known = |token: i64| match u64::try_from(token) {
            Ok(token) => token < self.tokens,
            Err(_) => token == IMAGE_TOKEN && self.boundary == NgramBoundary::Image,
        };
        match tokens.iter().position(|token| !is_known(*token)) {
            None => Ok(()),
            Some(position) => Err(LookupError::TokenOutOfRange {
                token: tokens[position],
                position,
                tokens: self.tokens,
            }),
        }
    }

    fn row_ids_at(&self, history: &NgramHistory, tokens: &[i64], position: usize, out: &mut [i64]) {
        let (mut hash, mut length, mut is_hidden) = (0, 0, false);
        for (head, out) in self.heads.iter().zip(out) {
            while length < head.length {
                let token = match position.checked_sub(length) {
                    Some(at) => tokens[at],
                    None => history.back(length - position),
                };
                is_hidden |= token == IMAGE_TOKEN;
                let seen = if is_hidden { self.padding } else { token };
                hash ^= self.class(seen) * self.multipliers[length];
                // The end of a text hides the older tokens from the tokens behind it, but not from itself.
                is_hidden |=
                    length > 0 && self.boundary == NgramBoundary::Padding && token == self.padding;
                length += 1;
            }
            *out = (head.first_row + hash % head.rows) as i64;
        }
    }

    /// Returns the number that is hashed for a token of the model. The product with a multiplier is below 2^63.
    fn class(&self, token: i64) -> u64 {
        match &self.classes {
            Some(classes) => classes[token as usize].into(),
            None => token as u64,
        }
    }
}
