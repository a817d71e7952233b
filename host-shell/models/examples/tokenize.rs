//! Writes texts as the tokens of a GGUF file: `tokenize MODEL.gguf`, a JSON array of texts in, one of tokens out.

use nvme_host::{Catalog, Store, StoreOptions};
use nvme_models::Tokenizer;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("tokenize MODEL.gguf")?;
    let options = StoreOptions {
        read_only: true,
        ..StoreOptions::default()
    };
    let store = Store::open(&format!("file:{model}"), &options)?;
    let tokenizer = Tokenizer::of(&Catalog::of_store(&store, 0)?)?;
    let texts: Vec<String> = serde_json::from_reader(std::io::stdin())?;
    let tokens = texts.iter().map(|text| tokenizer.encode(text));
    let tokens = tokens.collect::<nvme_host::Result<Vec<_>>>()?;
    serde_json::to_writer(std::io::stdout(), &tokens)?;
    Ok(())
}
