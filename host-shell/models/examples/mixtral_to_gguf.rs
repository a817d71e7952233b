//! Rewrites a small checkpoint of Mixtral, as `tests/train_mixture.py` trains one, as a GGUF file for `nvme-gpu generate`.
//!
//! ```sh
//! cargo run --release -p nvme-models --example mixtral_to_gguf -- host-shell/models/tests/mixture mixture.gguf
//! nvme-gpu generate mixture.gguf --prompt "The drive reads" --tokens 64
//! ```

use std::fs::File;
use std::io::{BufWriter, Error, ErrorKind, Result};
use std::path::Path;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, file] = words.as_slice() else {
        return Err(Error::new(ErrorKind::InvalidInput, "FOLDER FILE"));
    };
    let mut out = BufWriter::new(File::create(file)?);
    nvme_models::checkpoint::mixtral(Path::new(folder), &mut out).map_err(Error::other)
}
