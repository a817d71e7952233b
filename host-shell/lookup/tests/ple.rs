//! Row ids of Qwen's tables, compared with transformers 5.24.0.

mod chunked;

use chunked::rows_of;
use nvme_lookup::LookupError;
use nvme_lookup::ple;

/// The configuration of Qwen3.8-Flash-Next, with a second table, which that model does not have.
const CONFIG: &str = r#"{"model_type": "qwen4_exp", "text_config": {"ple_layer_ids": [2, 5], "vocab_size": 248320,
    "hidden_size": 2560, "eos_token_id": [248046, 1], "ngram_vocab_size_base": 20000000, "seed": 1234}}"#;
/// A line is a token and 16 rows of each of the two tables.
const ROWS: &str = include_str!("ple.tsv");

#[test]
fn rows_are_those_of_transformers() {
    let tables = ple::tables(CONFIG).unwrap();
    assert_eq!((tables.layers(), tables.columns()), (&[1, 4][..], 160));
    assert_eq!(tables.padded_rows(1).unwrap(), 320_001_536);
    let lines: Vec<Vec<i64>> = ROWS
        .lines()
        .map(|line| {
            line.split('\t')
                .map(|number| number.parse().unwrap())
                .collect()
        })
        .collect();
    let tokens: Vec<i64> = lines.iter().map(|line| line[0]).collect();
    for (number, layer) in [1, 4].into_iter().enumerate() {
        let hash = tables.of_layer(layer).unwrap();
        let place = 1 + number * 16;
        let wanted: Vec<i64> = lines
            .iter()
            .flat_map(|line| line[place..place + 16].to_vec())
            .collect();
        assert_eq!(rows_of(hash, &[&tokens]), wanted, "layer {layer}");
        // Cuts around ends of texts, at 5, 12 and 13.
        for cut in [1, 2, 5, 6, 7, 12, 13, 14, 15] {
            let (first, rest) = tokens.split_at(cut);
            assert_eq!(
                rows_of(hash, &[first, rest]),
                wanted,
                "layer {layer}, cut at {cut}"
            );
        }
        let each: Vec<&[i64]> = tokens.chunks(1).collect();
        assert_eq!(
            rows_of(hash, &each),
            wanted,
            "layer {layer}, token by token"
        );
    }
    let hash = tables.of_layer(1).unwrap();
    assert_eq!(
        hash.multipliers(),
        [23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071]
    );
}

#[test]
fn what_cannot_be_is_refused_with_its_key() {
    let tables = ple::tables(CONFIG).unwrap();
    let hash = tables.of_layer(1).unwrap();
    // In this model images have token ids, so that -1 is refused.
    let error = hash
        .row_ids(&hash.begin(), &[-1], &mut [0; 16])
        .unwrap_err();
    assert!(
        matches!(error, LookupError::TokenOutOfRange { position: 0, .. }),
        "{error}"
    );
    let changed = [
        ("[2, 5]", "[0]", "ple_layer_ids of the configuration is [0]"),
        ("[2, 5]", "[]", "ple_layer_ids"),
        ("248320", "248046", "eos_token_id"),
        ("2560", "2561", "a multiple of the 16 heads"),
        ("\"vocab_size\"", "\"vocabulary\"", "no key vocab_size"),
        ("20000000", "18446744073709551615", "ngram_vocab_size_base"),
        (
            "\"seed\"",
            "\"heads_per_ngram\"",
            "heads_per_ngram of the configuration is 1234",
        ),
        ("{\"ple", "[{\"ple", "no JSON object"),
    ];
    for (from, to, told) in changed {
        let error = ple::tables(&CONFIG.replacen(from, to, 1)).unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
    }
}
