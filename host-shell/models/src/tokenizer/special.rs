//! Special tokens that are spelled out in a text.

use super::vocabulary::{TokenKind, TokenVocabulary};
use nvme_host::Result;

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextFragment<'t> {
    Plain(&'t str),
    Special(u32),
}

/// The tokens that are looked for in a text before anything else, in llama.cpp's order: the longest first, over the
/// whole text, which is not the order of their places.
pub struct SpecialTokens(Vec<u32>);

impl SpecialTokens {
    pub fn of(vocabulary: &TokenVocabulary) -> Self {
        use TokenKind::{Control, Unknown, UserDefined};
        let special = vocabulary.tokens().filter(|(text, _, kind)| {
            !text.is_empty() && matches!(kind, Control | UserDefined | Unknown)
        });
        let mut special: Vec<(&str, u32)> = special.map(|(text, token, _)| (text, token)).collect();
        special.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        Self(special.into_iter().map(|(_, token)| token).collect())
    }

    /// Splits `text` at special tokens. No plain fragment is empty.
    pub fn split<'t>(
        &self,
        text: &'t str,
        vocabulary: &TokenVocabulary,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<TextFragment<'t>>> {
        let mut fragments = vec![TextFragment::Plain(text)];
        for token in &self.0 {
            let Some((name, _)) = vocabulary.text_and_kind(*token) else {
                continue;
            };
            check()?;
            if !text.contains(name) {
                continue;
            }
            let mut next = Vec::with_capacity(fragments.len() + 2);
            for fragment in fragments {
                match fragment {
                    TextFragment::Plain(text) => cut(text, name, *token, &mut next),
                    TextFragment::Special(_) => next.push(fragment),
                }
            }
            fragments = next;
        }
        fragments.retain(|fragment| *fragment != TextFragment::Plain(""));
        Ok(fragments)
    }
}

/// Cuts each occurrence of `name` out of `text`.
fn cut<'t>(text: &'t str, name: &str, token: u32, fragments: &mut Vec<TextFragment<'t>>) {
    for (at, plain) in text.split(name).enumerate() {
        if at > 0 {
            fragments.push(TextFragment::Special(token));
        }
        fragments.push(TextFragment::Plain(plain));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_special_token_is_cut_out_first_wherever_it_stands_in_the_vocabulary() {
        use TokenKind::{Control, Normal, UserDefined};
        let tokens = [("<a>", Control), ("<a><b>", UserDefined), ("a", Normal)];
        for turn in 0..tokens.len() {
            let mut tokens = tokens;
            tokens.rotate_left(turn);
            let vocabulary = TokenVocabulary::made_of(&tokens);
            let special = SpecialTokens::of(&vocabulary);
            let found = special.split("<a><b>a<a>", &vocabulary, &mut || Ok(()));
            let of = |text| TextFragment::Special(vocabulary.token(text).unwrap());
            let expected = [of("<a><b>"), TextFragment::Plain("a"), of("<a>")];
            assert_eq!(found.unwrap(), expected, "{turn}");
        }
    }
}
