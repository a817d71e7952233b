//! The tokens of a request that its next n-grams begin with.

/// The newest tokens of a sequence: as many as the longest n-gram has before its last one. A copy is a few words, so
/// that a request whose drafts were refused continues from a copy made before them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramHistory {
    /// The newest one last.
    tokens: Vec<i64>,
}

impl NgramHistory {
    pub(crate) fn new(length: usize, padding: i64) -> Self {
        Self {
            tokens: vec![padding; length],
        }
    }

    /// Adds `tokens`, which were accepted: the prompt's chunk, the sampled token, or the accepted drafts.
    pub fn commit(&mut self, tokens: &[i64]) {
        let length = self.tokens.len();
        let newest = &tokens[tokens.len().saturating_sub(length)..];
        self.tokens.rotate_left(newest.len());
        self.tokens[length - newest.len()..].copy_from_slice(newest);
    }

    /// Returns the tokens, the newest one last.
    pub fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// Returns the token `steps` before the next one, from 1 on.
    pub(crate) fn back(&self, steps: usize) -> i64 {
        self.tokens[self.tokens.len() - steps]
    }
}
