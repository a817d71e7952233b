//! Prints the class of each token of a tokenizer.json, one line for each token. Tokens whose texts differ only in
//! accents, case or kind of white space have one class: `cargo run --example classes -- tokenizer.json`

use std::error::Error;
use std::io::Write as _;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("name a tokenizer.json")?;
    let classes = nvme_lookup::engram::classes_of(&std::fs::read(path)?)?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for class in classes {
        writeln!(out, "{class}")?;
    }
    Ok(out.flush()?)
}
