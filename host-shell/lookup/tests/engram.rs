//! Row ids of Engram's tables, compared with FreeToken 0.2.1's `EngramHash`.

mod chunked;

use chunked::rows_of;
use nvme_lookup::engram;
use nvme_lookup::{IMAGE_TOKEN, LookupError};

/// The configuration of DeepSeek-V4.1-Flash.
const CONFIG: &str = r#"{"engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256,
    "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092, "hidden_size": 5120}"#;
const TOKENS: usize = 129_280;
/// A line is a token, its class and 24 rows of each of the two tables.
const ROWS: &str = include_str!("engram.tsv");

struct Golden {
    tokens: Vec<i64>,
    classes: Vec<u32>,
    rows: [Vec<i64>; 2],
}

fn golden() -> Golden {
    let mut golden = Golden {
        tokens: Vec::new(),
        classes: vec![0; TOKENS],
        rows: [Vec::new(), Vec::new()],
    };
    // A token that the lines do not name has the last class.
    golden.classes[100] = 99_091;
    for line in ROWS.lines() {
        let numbers: Vec<i64> = line
            .split('\t')
            .map(|number| number.parse().unwrap())
            .collect();
        assert!(numbers.len() == 50 && numbers[0] != 100);
        golden.tokens.push(numbers[0]);
        golden.classes[numbers[0] as usize] = numbers[1] as u32;
        golden.rows[0].extend(&numbers[2..26]);
        golden.rows[1].extend(&numbers[26..]);
    }
    golden
}

#[test]
fn rows_are_those_of_another_program() {
    let golden = golden();
    let tables = engram::tables(CONFIG, golden.classes.clone()).unwrap();
    assert_eq!((tables.layers(), tables.columns()), (&[1, 14][..], 256));
    for (layer, rows) in [1, 14].into_iter().zip(&golden.rows) {
        let hash = tables.of_layer(layer).unwrap();
        assert_eq!(&rows_of(hash, &[&golden.tokens]), rows, "layer {layer}");
        // Chunks of a prompt, then decode, with the history between them.
        let (first, rest) = golden.tokens.split_at(37);
        let mut chunks = vec![first];
        chunks.extend(rest.chunks(1));
        assert_eq!(&rows_of(hash, &chunks), rows, "layer {layer} in chunks");
        let (first, rest) = golden.tokens.split_at(1);
        assert_eq!(
            &rows_of(hash, &[first, &[], rest]),
            rows,
            "layer {layer} after one token"
        );
    }
    let hash = tables.of_layer(14).unwrap();
    assert_eq!(hash.heads()[0].rows, 16_000_477);
    assert_eq!(hash.multipliers()[0], 67_716_810_739_261);
}

#[test]
fn drafts_that_were_refused_leave_no_trace() {
    let golden = golden();
    let tables = engram::tables(CONFIG, golden.classes.clone()).unwrap();
    let hash = tables.of_layer(1).unwrap();
    let (prompt, rest) = golden.tokens.split_at(20);
    let mut history = hash.begin();
    history.commit(prompt);
    let drafts = [rest[0], rest[1], 0, 1];
    let mut rows = [0; 4 * 24];
    hash.row_ids(&history, &drafts, &mut rows).unwrap();
    assert_eq!(rows[..48], golden.rows[0][20 * 24..22 * 24]);
    // Two of the drafts are accepted; the next token is hashed behind those two.
    history.commit(&drafts[..2]);
    let mut rows = [0; 24];
    hash.row_ids(&history, &rest[2..3], &mut rows).unwrap();
    assert_eq!(rows, golden.rows[0][22 * 24..23 * 24]);
}

#[test]
fn hashes_stop_at_images() {
    let golden = golden();
    let tables = engram::tables(CONFIG, golden.classes.clone()).unwrap();
    let hash = tables.of_layer(1).unwrap();
    let text = &golden.tokens[..6];
    let mut tokens = vec![9, 8, IMAGE_TOKEN, IMAGE_TOKEN];
    tokens.extend(text);
    // Behind an image, in the same chunk or in the next one, the hashes are those of a text that begins there.
    for cut in [0, 3, 4, 5] {
        let rows = rows_of(hash, &[&tokens[..cut], &tokens[cut..]]);
        assert_eq!(rows[4 * 24..], golden.rows[0][..6 * 24], "{cut}");
    }
    // The image itself is hashed as padding behind padding.
    let rows = rows_of(hash, &[&tokens]);
    assert_eq!(rows[2 * 24..3 * 24], rows_of(hash, &[&[2]]));
}

#[test]
fn what_cannot_be_is_refused_with_its_place() {
    let golden = golden();
    let tables = engram::tables(CONFIG, golden.classes.clone()).unwrap();
    let hash = tables.of_layer(1).unwrap();
    let mut rows = [7; 48];
    for token in [TOKENS as i64, -2, i64::MAX, i64::MIN] {
        let error = hash
            .row_ids(&hash.begin(), &[1, token], &mut rows)
            .unwrap_err();
        let told = LookupError::TokenOutOfRange {
            token,
            position: 1,
            tokens: TOKENS as u64,
        };
        assert_eq!(error, told);
    }
    let error = hash.row_ids(&hash.begin(), &[1], &mut rows).unwrap_err();
    assert!(matches!(error, LookupError::OtherLength { .. }), "{error}");
    assert_eq!(rows, [7; 48]);
    assert_eq!(
        tables.of_layer(2).unwrap_err().to_string(),
        "layer 2 has no lookup table; layers with one: [1, 14]"
    );
    let changed = [
        (
            "384016682",
            "384016683",
            "layer 14 has 384016683 rows by the configuration and 384016682 by its hashes",
        ),
        (
            "99092",
            "99093",
            "become 99092 classes, the configuration says 99093",
        ),
        ("\"engram_n_heads\": 8, ", "", "no key engram_n_heads"),
        (
            "\"engram_n_heads\": 8",
            "\"engram_n_heads\": -8",
            "engram_n_heads of the configuration is -8",
        ),
        (
            "\"engram_n_heads\": 8",
            "\"engram_n_heads\": 1e9",
            "engram_n_heads of the configuration is 1000000000.0",
        ),
        ("[1, 14]", "[1, 1]", "engram_layer_ids"),
        ("[1, 14]", "[1]", "engram_layer_ids"),
        (
            "16000000",
            "\"many\"",
            "engram_vocab_size of the configuration is \"many\"",
        ),
        (
            "_token_id\": 2",
            "_token_id\": 129280",
            "one of the tokenizer's 129280 tokens",
        ),
        ("{", "[", "no JSON object"),
    ];
    for (from, to, told) in changed {
        let config = CONFIG.replacen(from, to, 1);
        let error = engram::tables(&config, golden.classes.clone()).unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
    }
}
