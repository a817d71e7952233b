//! Tokens of texts, beside those that llama.cpp makes of them: tests/tokenizer_oracle.py writes the files.

use nvme_compute::Tokenizer;
use nvme_host::{Catalog, Store, StoreOptions};
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

/// Merging by a look at all neighbours for each merge takes the square of a word's length: a minute for the first of
/// these texts.
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
