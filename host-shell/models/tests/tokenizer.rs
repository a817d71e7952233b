//! Tokens of texts, compared with llama.cpp's: tests/tokenizer_oracle.py writes the files.

#[path = "tokenizer/generate.rs"]
mod generate;

use nvme_host::{Catalog, Store, StoreOptions};
use nvme_models::Tokenizer;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizer")
}

fn tokenizer(name: &str) -> Tokenizer {
    let options = StoreOptions {
        read_only: true,
        ..StoreOptions::default()
    };
    let path = folder().join(name);
    let store = Store::open(&format!("file:{}", path.display()), &options).unwrap();
    Tokenizer::of(&Catalog::of_store(&store, 0).unwrap()).unwrap()
}

fn json<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let text = std::fs::read_to_string(folder().join(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

const KINDS: [&str; 2] = ["spm", "llama-bpe"];

#[test]
fn texts_have_the_tokens_of_llama_cpp() {
    let texts: Vec<String> = json("texts.json");
    assert_eq!(texts.len(), 400);
    for kind in KINDS {
        let tokenizer = tokenizer(&format!("{kind}.gguf"));
        let expected: Vec<Vec<u32>> = json(&format!("{kind}.json"));
        for (text, expected) in texts.iter().zip(&expected) {
            let found = tokenizer.encode(text).unwrap();
            assert_eq!(found, *expected, "{kind}: {text:?}");
        }
    }
}

/// Returns what `sum_of` of tests/tokenizer_oracle.py does.
fn sum_of(lists: impl IntoIterator<Item = Vec<u32>>) -> String {
    let numbers = lists.into_iter().flat_map(|one| {
        let length = one.len() as u32;
        std::iter::once(length).chain(one)
    });
    let sum = numbers.fold(0xCBF2_9CE4_8422_2325, |sum: u64, number| {
        (sum ^ u64::from(number)).wrapping_mul(0x100_0000_01B3)
    });
    format!("{sum:016x}")
}

/// The tokens in blocks.json are llama.cpp's, by the wheel `xllamacpp` 2026.10.11549, as tests/tokenizer_oracle.py
/// says: `pip install xllamacpp`, then `python tokenizer_oracle.py many tests/tokenizer`, on the texts that the example
/// `tokenizer_texts` writes.
#[test]
fn ten_thousand_texts_have_the_tokens_of_llama_cpp() {
    let mut blocks: std::collections::BTreeMap<String, serde_json::Value> = json("blocks.json");
    assert_eq!(blocks["by"], "llama.cpp of xllamacpp 2026.10.11549");
    let mut sums = |name: &str| -> Vec<String> {
        serde_json::from_value(blocks.remove(name).unwrap()).unwrap()
    };
    let texts = generate::texts();
    assert_eq!(texts.len(), 10_000);
    let bytes = texts
        .iter()
        .map(|text| text.bytes().map(u32::from).collect());
    assert_eq!(
        sums("texts"),
        [sum_of(bytes)],
        "other texts: write blocks.json again"
    );
    for kind in KINDS {
        let tokenizer = tokenizer(&format!("{kind}.gguf"));
        let expected = sums(kind);
        assert_eq!(expected.len(), 100);
        for (at, (block, expected)) in texts.chunks(100).zip(&expected).enumerate() {
            let tokens = block.iter().map(|text| tokenizer.encode(text).unwrap());
            let says = "tokens of the texts from this one on, of its hundred, are not llama.cpp's";
            assert_eq!(sum_of(tokens), *expected, "{kind}, {}: {says}", at * 100);
        }
    }
}

#[test]
fn tokens_are_the_text_again() {
    let texts: Vec<String> = json("texts.json");
    for (kind, space) in KINDS.into_iter().zip([" ", ""]) {
        let tokenizer = tokenizer(&format!("{kind}.gguf"));
        for text in texts
            .iter()
            .filter(|text| !text.contains(['<', '\u{2581}']))
        {
            let tokens = tokenizer.encode(text).unwrap();
            let found = tokenizer.decode(&tokens);
            assert_eq!(String::from_utf8(found).unwrap(), format!("{space}{text}"));
        }
    }
}

/// A merge that examined all neighbours each time would take time with the square of a word's length: a minute for the
/// first of these texts.
#[test]
fn a_long_text_without_a_space_takes_no_square_of_its_length() {
    for kind in KINDS {
        let tokenizer = tokenizer(&format!("{kind}.gguf"));
        for text in [
            "\u{4e2d}\u{6587}",
            "ab",
            " ",
            "\u{300}",
            "'",
            "<|im_start|>",
            "1",
        ] {
            let text = text.repeat(20_000);
            let tokens = tokenizer.encode(&text).unwrap();
            assert!(!tokens.is_empty());
        }
    }
}

/// gpt-oss answers after a message of its analysis, at whose end is `<|end|>`.
#[test]
fn a_message_of_gpt_oss_does_not_end_its_turn() {
    let oss = of_controls(&["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]);
    let ends: Vec<u32> = (0..5).filter(|token| oss.is_end(*token)).collect();
    assert_eq!(ends, [2, 3, 4]);
    let other = of_controls(&["<|end|>", "<|endoftext|>"]);
    assert!(other.is_end(1) && other.is_end(2));
}

#[test]
fn an_interrupt_ends_the_work_on_a_text() {
    let tokenizer = tokenizer("llama-bpe.gguf");
    let mut calls = 0;
    let stop = &mut || {
        calls += 1;
        match calls {
            100 => Err(nvme_host::Error::usage("stopped", "go on")),
            _ => Ok(()),
        }
    };
    let error = tokenizer.encode_until(&"word ".repeat(10_000), stop);
    assert_eq!(error.unwrap_err().to_string(), "stopped");
    assert_eq!(calls, 100);
}

/// Returns the bytes of a text in a GGUF file.
fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// The keys of a GGUF file without tensors.
#[derive(Default)]
struct Keys {
    count: u64,
    bytes: Vec<u8>,
}

impl Keys {
    /// Adds a value of the type `kind` with the bytes `value`.
    fn add(&mut self, name: &str, kind: u32, value: &[u8]) {
        self.count += 1;
        self.bytes.extend(text(name));
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
    }

    fn add_array(&mut self, name: &str, kind: u32, values: &[Vec<u8>]) {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(values.concat());
        self.add(name, 9, &bytes);
    }

    fn file(&self) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(0u64.to_le_bytes());
        file.extend(self.count.to_le_bytes());
        file.extend(&self.bytes);
        file
    }
}

/// Returns a tokenizer of the kind SentencePiece with a token for each byte, and `tokens` with their scores behind
/// those.
fn of_scores(tokens: &[(&str, f32)]) -> Tokenizer {
    let bytes = (0..=u8::MAX).map(|byte| (format!("<0x{byte:02X}>"), 0.0, 6i32));
    let tokens = tokens
        .iter()
        .map(|(text, score)| ((*text).to_owned(), *score, 1));
    let all: Vec<(String, f32, i32)> = bytes.chain(tokens).collect();
    let mut keys = Keys::default();
    keys.add("tokenizer.ggml.model", 8, &text("llama"));
    let texts: Vec<Vec<u8>> = all.iter().map(|(name, ..)| text(name)).collect();
    keys.add_array("tokenizer.ggml.tokens", 8, &texts);
    let scores: Vec<Vec<u8>> = all.iter().map(|one| one.1.to_le_bytes().to_vec()).collect();
    keys.add_array("tokenizer.ggml.scores", 6, &scores);
    let kinds: Vec<Vec<u8>> = all.iter().map(|one| one.2.to_le_bytes().to_vec()).collect();
    keys.add_array("tokenizer.ggml.token_type", 5, &kinds);
    keys.add("tokenizer.ggml.add_bos_token", 7, &[0]);
    keys.add("tokenizer.ggml.add_space_prefix", 7, &[0]);
    Tokenizer::of(&Catalog::of(&keys.file().as_slice()).unwrap()).unwrap()
}

/// Returns a byte-pair tokenizer over all texts of up to 8 letters `a` and `b`, with these merges in their order.
fn of_merges(merges: &[(String, String)]) -> nvme_host::Result<Tokenizer> {
    let mut keys = Keys::default();
    keys.add("tokenizer.ggml.model", 8, &text("gpt2"));
    keys.add("tokenizer.ggml.pre", 8, &text("gpt-2"));
    let tokens: Vec<Vec<u8>> = letters().iter().map(|one| text(one)).collect();
    keys.add_array("tokenizer.ggml.tokens", 8, &tokens);
    let lines = merges
        .iter()
        .map(|(first, second)| text(&format!("{first} {second}")));
    keys.add_array("tokenizer.ggml.merges", 8, &lines.collect::<Vec<_>>());
    Tokenizer::of(&Catalog::of(&keys.file().as_slice()).unwrap())
}

/// Returns a byte-pair tokenizer of the letter `a` and of control tokens with these texts.
fn of_controls(controls: &[&str]) -> Tokenizer {
    let mut keys = Keys::default();
    keys.add("tokenizer.ggml.model", 8, &text("gpt2"));
    keys.add("tokenizer.ggml.pre", 8, &text("gpt-2"));
    let texts: Vec<&str> = std::iter::once("a")
        .chain(controls.iter().copied())
        .collect();
    let tokens: Vec<Vec<u8>> = texts.iter().map(|one| text(one)).collect();
    keys.add_array("tokenizer.ggml.tokens", 8, &tokens);
    let kinds = (0..texts.len()).map(|at| if at == 0 { 1i32 } else { 3 });
    let kinds: Vec<Vec<u8>> = kinds.map(|kind| kind.to_le_bytes().to_vec()).collect();
    keys.add_array("tokenizer.ggml.token_type", 5, &kinds);
    keys.add_array("tokenizer.ggml.merges", 8, &[]);
    Tokenizer::of(&Catalog::of(&keys.file().as_slice()).unwrap()).unwrap()
}

fn letters() -> Vec<String> {
    let of_length = |length: u32| {
        (0..1u32 << length).map(move |bits| {
            let letter = |at| if bits >> at & 1 == 0 { 'a' } else { 'b' };
            (0..length).map(letter).collect()
        })
    };
    (1..=8).flat_map(of_length).collect()
}

/// Returns the parts of `word`: the pair that comes first in `merges` is merged first, of equal ones the leftmost.
fn merged(word: &str, merges: &[(String, String)]) -> Vec<String> {
    let mut parts: Vec<String> = word.chars().map(String::from).collect();
    loop {
        let rank = |at: usize| {
            let is_it = |pair: &(String, String)| pair.0 == parts[at] && pair.1 == parts[at + 1];
            merges.iter().position(is_it)
        };
        let places = 0..parts.len().saturating_sub(1);
        let Some((_, at)) = places.filter_map(|at| Some((rank(at)?, at))).min() else {
            return parts;
        };
        let second = parts.remove(at + 1);
        parts[at].push_str(&second);
    }
}

/// Returns the tokens that the crate `tokenizers` makes of `word`, with each pair passed once. It takes the last of
/// equal pairs, llama.cpp the first.
fn by_the_crate(word: &str, merges: &[(String, String)]) -> Vec<u32> {
    use tokenizers::Model;
    let mut once: Vec<(String, String)> = Vec::new();
    for pair in merges {
        if !once.contains(pair) {
            once.push(pair.clone());
        }
    }
    let model = tokenizers::models::bpe::BPE::builder()
        .vocab_and_merges(
            letters()
                .into_iter()
                .zip(0..)
                .collect::<tokenizers::models::bpe::Vocab>(),
            once,
        )
        .build()
        .unwrap();
    let tokens = model.tokenize(word).unwrap();
    tokens.iter().map(|token| token.id).collect()
}

#[test]
fn of_equal_merges_the_first_counts() {
    let pair = |text: &str| {
        let (first, second) = text.split_once(' ').unwrap();
        (first.to_owned(), second.to_owned())
    };
    let merges: Vec<_> = ["b a", "a b", "b a"].map(pair).into();
    assert_eq!(merged("aba", &merges), ["a", "ba"]);
    let tokenizer = of_merges(&merges).unwrap();
    let expected = ["a", "ba"].map(|one| tokenizer.token(one).unwrap());
    assert_eq!(tokenizer.encode("aba").unwrap(), expected);
}

#[test]
fn a_control_token_is_one_that_a_text_can_spell() {
    let tokenizer = of_controls(&["<turn>"]);
    assert_eq!(tokenizer.control("<turn>"), tokenizer.token("<turn>"));
    assert_eq!(tokenizer.encode("a<turn>").unwrap(), [0, 1]);
    assert_eq!(tokenizer.token("a"), Some(0));
    assert_eq!(tokenizer.control("a"), None);
    assert_eq!(tokenizer.control("<end>"), None);
}

proptest::proptest! {
    /// Tables with equal pairs, pairs that are never reached, and several pairs that make one text.
    #[test]
    fn any_table_of_merges_gives_the_tokens_of_the_crate(
        merges in proptest::collection::vec(("[ab]{1,3}", "[ab]{1,3}"), 1..24),
        word in "[ab]{1,40}",
    ) {
        let tokenizer = of_merges(&merges).unwrap();
        let found = tokenizer.encode(&word).unwrap();
        let parts = merged(&word, &merges);
        let expected: Vec<u32> = parts.iter().map(|one| tokenizer.token(one).unwrap()).collect();
        proptest::prop_assert_eq!(&found, &expected, "{:?}", parts);
        proptest::prop_assert_eq!(found, by_the_crate(&word, &merges));
    }
}

/// llama.cpp takes the pair with the highest score, and of equal scores the one that begins first; 0 and -0 are equal.
#[test]
fn of_equal_scores_the_leftmost_pair_is_merged() {
    for scores in [[-1.0, -1.0], [0.0, -0.0]] {
        let tokenizer = of_scores(&[
            ("a", -9.0),
            ("b", -9.0),
            ("c", -9.0),
            ("bc", scores[0]),
            ("ab", scores[1]),
            ("aa", -2.0),
            ("caa", -3.0),
        ]);
        for (text, expected) in [
            ("abc", &["ab", "c"][..]),
            ("babc", &["b", "ab", "c"]),
            ("bcabc", &["bc", "ab", "c"]),
            ("aaa", &["aa", "a"]),
            ("caaab", &["caa", "ab"]),
            ("bcd", &["bc", "<0x64>"]),
            ("\u{e9}", &["<0xC3>", "<0xA9>"]),
        ] {
            let expected: Vec<u32> = expected
                .iter()
                .map(|one| tokenizer.token(one).unwrap())
                .collect();
            assert_eq!(
                tokenizer.encode(text).unwrap(),
                expected,
                "{text} {scores:?}"
            );
        }
    }
}
