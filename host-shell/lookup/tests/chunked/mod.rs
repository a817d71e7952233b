//! Row ids of a sequence that is hashed in chunks.

use nvme_lookup::NgramHash;

/// Returns the row ids of all tokens, each chunk hashed behind those before it.
pub fn rows_of(hash: &NgramHash, chunks: &[&[i64]]) -> Vec<i64> {
    let mut history = hash.begin();
    let mut all = Vec::new();
    for tokens in chunks {
        let mut rows = vec![-1; tokens.len() * hash.heads().len()];
        hash.row_ids(&history, tokens, &mut rows).unwrap();
        history.commit(tokens);
        all.extend(rows);
    }
    all
}
