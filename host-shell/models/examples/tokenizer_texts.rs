//! Writes the texts of tests/tokenizer/generate.rs as JSON, for `tokenizer_oracle.py many`.
//!
//!     cargo run -p nvme-models --example tokenizer_texts > texts.json

#[path = "../tests/tokenizer/generate.rs"]
mod generate;

use std::io::Write;

fn main() -> std::io::Result<()> {
    let escaped = |text: String| {
        let units: String = text
            .encode_utf16()
            .map(|unit| format!("\\u{unit:04x}"))
            .collect();
        format!("\"{units}\"")
    };
    let all: Vec<String> = generate::texts().into_iter().map(escaped).collect();
    writeln!(std::io::stdout().lock(), "[{}]", all.join(",\n"))
}
