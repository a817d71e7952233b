//! `generate`: text by a model whose weights stream from a drive.

use crate::common::images::CommandFiles;
use crate::common::npy::ArrayRows;
use crate::common::{
    CommandTimeout, NamespaceId, check_stop, images, npy, number, output, say, visible,
};
use crate::files::volume;
use clap::Args;
use nvme_host::catalog;
use nvme_host::files::FileLocation;
use nvme_host::units::{self, parse_bytes};
use nvme_host::{Catalog, Error, Manifest, Result, Store, StoreOptions};
use nvme_models::Tokenizer;
use nvme_models::llama::{Llama, ModelOptions};
use serde_json::json;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Generate text with a GGUF model (llama, qwen3, qwen3moe, gpt-oss), whose weights stream from a drive
#[derive(Args)]
pub struct GenerateCommand {
    /// File of this machine, DEVICE:/path, or with --offset a device
    #[arg(value_name = "MODEL", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    model: String,
    /// MODEL is a device that has the file from this byte on, as `import` writes it
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    offset: Option<u64>,
    /// The size of the file at --offset, where its header alone does not say it
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, requires = "offset")]
    bytes: Option<u64>,
    /// Text that the model continues
    #[arg(
        long,
        short = 'p',
        value_name = "TEXT",
        required_unless_present = "chat"
    )]
    prompt: Option<String>,
    /// Question that the model answers, in the turns of ChatML, or of Harmony (gpt-oss)
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt")]
    chat: Option<String>,
    /// Tokens, at most: the model may end before
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = number::<u32>(1..=1_000_000))]
    tokens: u32,
    /// Memory for weights; the other layers stream
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = parse_bytes)]
    budget: u64,
    /// Compute on GPU N (0 without a number), which submits the reads
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "0", value_parser = number::<u32>(0..=1023))]
    gpu: Option<u32>,
    #[command(flatten)]
    namespace: NamespaceId,
    #[command(flatten)]
    timeout: CommandTimeout,
    /// Verify what is loaded by a file of `nvme-gpu manifest`
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,
    /// Write the logits of each token as .npy: float32, tokens times vocabulary; an error keeps those before it
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// Print one JSON object at the end
    #[arg(long)]
    json: bool,
}

/// Durations of the parts.
struct GenerateTimes {
    open: Duration,
    prompt: Duration,
    tokens: Duration,
}

impl GenerateCommand {
    pub fn run(self, files: &CommandFiles) -> Result<()> {
        let begin = Instant::now();
        let to = self.logits.as_deref();
        let to = to.map(|path| npy::create(path, files)).transpose()?;
        let mut logits = to.map(ArrayRows::new);
        let (tokenizer, mut model, prompt) = self.open()?;
        let opened = Instant::now();
        say::step(|| format!("{} computes; {}", model.machine(), model.path().mover));
        let next = model.feed_until(&prompt, &mut check_stop)?;
        let answered = Instant::now();
        let (mut made, mut text) = (vec![next], DecodedText::default());
        let ended = self.go_on(&tokenizer, &mut model, (&mut made, &mut text, &mut logits));
        let times = GenerateTimes {
            open: opened - begin,
            prompt: answered - opened,
            tokens: answered.elapsed(),
        };
        // After an error, too, the logits that there are stay: they may be the work of hours.
        let rows = logits.as_ref().map_or(0, ArrayRows::rows);
        let kept = match logits {
            Some(logits) if rows > 0 => logits.commit(),
            _ => Ok(()),
        };
        if ended.is_err() && kept.is_ok() && rows > 0 {
            say::warn(|| format!("the logits of the first {rows} tokens are kept"));
        }
        ended.and(kept)?;
        text.end(self.json)?;
        self.report(&model, &prompt, &made, &text, &times)
    }

    /// Makes tokens after the first one until the model or the limit ends the text.
    fn go_on(
        &self,
        tokenizer: &Tokenizer,
        model: &mut Llama,
        (made, text, logits): (&mut Vec<u32>, &mut DecodedText, &mut Option<ArrayRows>),
    ) -> Result<()> {
        while let Some(last) = made.last().copied() {
            if let Some(logits) = logits {
                logits.push(&model.logits()?)?;
            }
            if tokenizer.is_end(last) {
                break;
            }
            text.add(&tokenizer.decode(&[last]), self.json)?;
            if made.len() as u64 == u64::from(self.tokens) {
                break;
            }
            made.push(model.feed_until(&[last], &mut check_stop)?);
        }
        Ok(())
    }

    /// Opens the tokenizer and the model, and returns them with the tokens of the prompt.
    fn open(&self) -> Result<(Tokenizer, Llama, Vec<u32>)> {
        let at_once = |offset: u64, bytes: u64| {
            let all = offset..offset + bytes;
            Ok(vec![all])
        };
        if let Some(offset) = self.offset {
            let store = self.store(&self.model)?;
            let manifest = self.manifest()?;
            check_begin(manifest.as_ref(), &store, offset)?;
            let catalog = match self.bytes {
                None => Catalog::of_store(&store, offset)?,
                Some(bytes) => Catalog::of_range(&store, offset, bytes)?,
            };
            return self.load(&store, (&catalog, manifest.as_ref()), &at_once);
        }
        if FileLocation::is_one(&self.model) {
            let location = FileLocation::parse(&self.model)?;
            let store = self.store(&location.device)?;
            let volume = volume(&store, &location)?;
            let file = volume.file(&location.path)?;
            let places = |offset, bytes| file.pieces(offset, bytes);
            let manifest = self.manifest()?;
            if let Some(manifest) = &manifest {
                manifest.check_begin(&file)?;
            }
            return self.load(&store, (&file.catalog()?, manifest.as_ref()), &places);
        }
        let path = Path::new(&self.model);
        let about = std::fs::metadata(path).map_err(Error::file("open", path))?;
        if !about.is_file() {
            let cause = format!("{} is not a regular file", self.model);
            let remedy = "name a GGUF file, DEVICE:/path, or a device with --offset";
            return Err(Error::usage(cause, remedy));
        }
        if catalog::set_of(Path::new(&self.model))?.is_some() {
            return Err(Error::usage(
                format!("{} names a model in several files", self.model),
                "write them to a drive with `import`, and give that with --offset",
            ));
        }
        let store = self.store(&format!("file:{}", self.model))?;
        let manifest = self.manifest()?;
        check_begin(manifest.as_ref(), &store, 0)?;
        let catalog = Catalog::of_store(&store, 0)?;
        self.load(&store, (&catalog, manifest.as_ref()), &at_once)
    }

    fn manifest(&self) -> Result<Option<Manifest>> {
        self.manifest.as_deref().map(Manifest::open).transpose()
    }

    fn store(&self, device: &str) -> Result<Arc<Store>> {
        images::must_exist(device)?;
        Ok(Arc::new(Store::open(device, &self.options())?))
    }

    fn load(
        &self,
        store: &Arc<Store>,
        (catalog, manifest): (&Catalog, Option<&Manifest>),
        places: &dyn Fn(u64, u64) -> Result<Vec<Range<u64>>>,
    ) -> Result<(Tokenizer, Llama, Vec<u32>)> {
        let tokenizer = Tokenizer::of(catalog)?;
        let prompt = match (&self.chat, &self.prompt) {
            (Some(question), _) => chat(&tokenizer, question)?,
            (None, Some(prompt)) => prompt.clone(),
            (None, None) => String::new(),
        };
        let prompt = tokenizer.encode_until(&prompt, &mut check_stop)?;
        if prompt.is_empty() {
            return Err(Error::usage("the prompt is empty", "write some text"));
        }
        let positions = (prompt.len() as u64 + u64::from(self.tokens)).min(u32::MAX.into());
        let options = ModelOptions {
            budget: self.budget,
            positions: positions as u32,
            manifest,
        };
        let model = Llama::open(store, catalog, places, options)?;
        let rows = model.config().vocabulary;
        if tokenizer.len() as u64 != u64::from(rows) {
            return Err(Error::usage(
                format!(
                    "the file has {} tokens, and token_embd.weight {rows} rows",
                    tokenizer.len()
                ),
                "use a file whose tokenizer is that of its model",
            ));
        }
        Ok((tokenizer, model, prompt))
    }

    fn options(&self) -> StoreOptions {
        StoreOptions {
            read_only: true,
            nsid: self.namespace.namespace_id,
            timeout: self.timeout.limit(),
            #[cfg(feature = "cuda")]
            gpu: self.gpu.map(|index| nvme_host::store::GpuOptions {
                index,
                ..nvme_host::store::GpuOptions::default()
            }),
            ..StoreOptions::default()
        }
    }

    fn report(
        &self,
        model: &Llama,
        prompt: &[u32],
        made: &[u32],
        text: &DecodedText,
        times: &GenerateTimes,
    ) -> Result<()> {
        let (path, stats) = (model.path(), model.stats());
        // The first token comes with the prompt.
        let steps = made.len() - 1;
        let rate = (steps > 0).then(|| steps as f64 / times.tokens.as_secs_f64());
        let read = stats.bytes as f64 / (times.prompt + times.tokens).as_secs_f64() / 1e9;
        if self.json {
            return output::json(&json!({
                "text": text.whole,
                "prompt_tokens": prompt,
                "tokens": made,
                "tokens_per_second": rate,
                "open_ms": times.open.as_secs_f64() * 1e3,
                "prompt_ms": times.prompt.as_secs_f64() * 1e3,
                "layers": { "path": path, "stats": stats },
                "experts": model.expert_counts()?.map(|counts| serde_json::json!({
                    "hits": counts.hits,
                    "misses": counts.misses,
                    "evictions": counts.evictions,
                })),
                "weights_bytes": path.memory_bytes(),
                "gigabytes_per_second": read,
                "machine": model.machine(),
            }));
        }
        say::show(&format!(
            "{} tokens{}; weights in {} of memory, {} read ({read:.2} GB/s)\n{}; {}\n",
            made.len(),
            rate.map_or(String::new(), |rate| format!(", {rate:.1} a second")),
            units::bytes(path.memory_bytes()),
            units::bytes(stats.bytes),
            model.machine(),
            path.mover,
        ));
        Ok(())
    }
}

fn check_begin(manifest: Option<&Manifest>, store: &Store, offset: u64) -> Result<()> {
    match manifest {
        Some(manifest) => manifest.check_begin_in(store, offset),
        None => Ok(()),
    }
}

fn chat(tokenizer: &Tokenizer, question: &str) -> Result<String> {
    if let Some(turns) = turns(question, |text| tokenizer.control(text).is_some()) {
        return Ok(turns);
    }
    let is_there = |text: &str| tokenizer.token(text).is_some();
    Err(match turns(question, is_there) {
        // They would be encoded as the letters of their names.
        Some(_) => Error::usage(
            "the file has tokens for turns of ChatML or Harmony, and they are not of the kind control",
            "use --prompt, or convert the model again: tokenizer.ggml.token_type has to be 3 for them",
        ),
        None => Error::usage(
            "the model has no tokens for turns of ChatML or Harmony",
            "use --prompt",
        ),
    })
}

/// Returns the question as a turn that a model with these tokens answers.
///
/// Harmony's system message is the one that its own renderer writes where nothing is said (OpenAI, Harmony response
/// format, "System message format").
fn turns(question: &str, has: impl Fn(&str) -> bool) -> Option<String> {
    if has("<|im_start|>") && has("<|im_end|>") {
        return Some(format!(
            "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ));
    }
    let harmony = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>"];
    harmony.into_iter().all(has).then(|| {
        format!(
            "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n\
             Knowledge cutoff: 2024-06\n\nReasoning: medium\n\n\
             # Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>\
             <|start|>user<|message|>{question}<|end|><|start|>assistant"
        )
    })
}

/// Text that is decoded in pieces, which may end inside a character.
#[derive(Default)]
struct DecodedText {
    whole: String,
    rest: Vec<u8>,
}

impl DecodedText {
    fn add(&mut self, bytes: &[u8], is_silent: bool) -> Result<()> {
        self.rest.extend(bytes);
        let rest = self.rest.split_off(whole_characters(&self.rest));
        let text = String::from_utf8_lossy(&self.rest).into_owned();
        self.rest = rest;
        self.whole.push_str(&text);
        match is_silent {
            true => Ok(()),
            false => output::bytes(visible::lines(&text).as_bytes()),
        }
    }

    fn end(&mut self, is_silent: bool) -> Result<()> {
        let rest = String::from_utf8_lossy(&std::mem::take(&mut self.rest)).into_owned();
        self.whole.push_str(&rest);
        match is_silent {
            true => Ok(()),
            false => output::bytes(format!("{rest}\n").as_bytes()),
        }
    }
}

/// Returns the number of bytes before a character that ends behind `bytes`. Bytes that are no character are before it.
fn whole_characters(bytes: &[u8]) -> usize {
    let mut end = 0;
    while let Err(error) = std::str::from_utf8(&bytes[end..]) {
        end += error.valid_up_to();
        match error.error_len() {
            Some(wrong) => end += wrong,
            None => return end,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::{DecodedText, turns};

    /// A byte that is no character took the beginning of the next one with it.
    #[test]
    fn a_character_in_pieces_is_whole_behind_bytes_that_are_none() {
        let whole = |pieces: &[&[u8]]| {
            let mut text = DecodedText::default();
            for piece in pieces {
                text.add(piece, true).unwrap();
            }
            text.end(true).unwrap();
            text.whole
        };
        let euro = "\u{20AC}".as_bytes();
        assert_eq!(whole(&[b"a\xFF\xE2", &euro[1..]]), "a\u{FFFD}\u{20AC}");
        assert_eq!(
            whole(&[b"\xE2\x82", b"\xE2\x82", b"\xACb"]),
            "\u{FFFD}\u{20AC}b"
        );
        assert_eq!(
            whole(&[b"\xFF\xFE", euro, b"\xE2\x82"]),
            "\u{FFFD}\u{FFFD}\u{20AC}\u{FFFD}"
        );
    }

    #[test]
    fn a_question_is_a_turn_of_the_format_that_the_model_has_tokens_for() {
        let with = |tokens: &'static [&str]| turns("Why?", |text| tokens.contains(&text));
        assert_eq!(
            with(&["<|im_start|>", "<|im_end|>"]).unwrap(),
            "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
        );
        let harmony = with(&["<|start|>", "<|message|>", "<|channel|>", "<|end|>"]).unwrap();
        assert!(harmony.starts_with("<|start|>system<|message|>You are ChatGPT"));
        assert!(
            harmony.ends_with("<|start|>user<|message|>Why?<|end|><|start|>assistant"),
            "{harmony}"
        );
        assert_eq!(with(&["<|start|>", "<|end|>"]), None);
    }
}
