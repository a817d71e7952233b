//! Writes a small GGUF model of random weights, to try `nvme-gpu generate` without one: its text means nothing.
//!
//! ```sh
//! cargo run --release -p nvme-models --example small_model -- FILE [EXPERTS CHOICES]
//! ```
//!
//! With EXPERTS each layer has this number of experts, and a token chooses CHOICES of them.

use nvme_models::llama::ExpertMixture;
use nvme_models::synthetic::SyntheticModel;
use std::io::{BufWriter, Error, ErrorKind, Result};

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse().ok());
    let (path, experts) = match (words.first(), words.len()) {
        (Some(path), 1) => (path, None),
        (Some(path), 3) => (path, number(1).zip(number(2))),
        _ => {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "FILE [EXPERTS CHOICES]",
            ));
        }
    };
    let model =
        SyntheticModel::small(experts.map(|(count, choices)| ExpertMixture { count, choices }));
    let mut out = BufWriter::new(std::fs::File::create(path)?);
    model.write(&mut out, &mut |_| ())
}
