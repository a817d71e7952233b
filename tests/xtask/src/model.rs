//! The stage `model`: a real language model whose layers stream from a simulated drive.
//!
//! The expected tokens are those of llama.cpp with the same weights widened to float32, greedy:
//! host-shell/models/tests/oracle.py.

use chores::process::{Failure, cargo, check, output, shown, target_dir};
use chores::report::Counts;
use chores::tools;
use std::path::Path;
use std::process::Command;

/// The question, and the first tokens of the answer.
const QUESTION: &str = "Why does a GPU need fast storage?";
const ANSWER: [u32; 24] = [
    49, 29593, 365, 17327, 747, 18784, 4730, 25, 314, 2724, 288, 5605, 6207, 5109, 282, 940, 28,
    1285, 3341, 284, 8389, 28, 418, 904,
];
/// A text, and all that follows it, with the token that ends it.
const TEXT: &str = "The capital of France is";
const END: [u32; 30] = [
    7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33,
    34, 42, 33, 34, 42, 37, 35, 30, 2,
];
/// A sixth of the model.
const BUDGET: &str = "16MiB";

pub fn stage() -> Result<Counts, Failure> {
    tools::for_ext4()?;
    let model = tools::smollm()?;
    check(cargo().args(["build", "--quiet", "--release", "--package", "nvme-gpu"]))?;
    let folder = target_dir().join("model");
    let _ = std::fs::remove_dir_all(&folder);
    let files = folder.join("files");
    let made = std::fs::create_dir_all(&files)
        .and_then(|()| std::fs::hard_link(&model, files.join("model.gguf")));
    made.map_err(|error| Failure::new(format!("{}: {error}", folder.display())))?;
    let image = folder.join("drive.img");
    check(tool().arg("--quiet").arg("pack").arg(&files).arg(&image))?;
    let mut counts = Counts::default();
    // The model is read from an ext4 file system on a drive, most of it by streaming; and from the
    // file, all of it into memory.
    let on_drive = format!("sim:{}:/model.gguf", image.display());
    let prompt = ["--prompt", TEXT, "--tokens", "64", "--budget", BUDGET];
    counts.add(expect(&on_drive, &prompt, &END)?);
    let limit = ANSWER.len().to_string();
    let chat = ["--chat", QUESTION, "--tokens", &limit, "--budget", "1GiB"];
    counts.add(expect(&model.display().to_string(), &chat, &ANSWER)?);
    counts.add(dies(&image, &prompt)?);
    let _ = std::fs::remove_dir_all(&folder);
    Ok(counts)
}

fn tool() -> Command {
    Command::new(target_dir().join("release/nvme-gpu"))
}

/// Checks the tokens that the tool makes.
fn expect(model: &str, words: &[&str], tokens: &[u32]) -> Result<Counts, Failure> {
    let mut generate = tool();
    generate.args(["generate", model, "--json"]).args(words);
    println!("$ {}", shown(&generate));
    let json = output(&mut generate)?;
    println!("{}", json.trim());
    let compact: String = json.chars().filter(|c| !c.is_whitespace()).collect();
    let numbers: Vec<String> = tokens.iter().map(u32::to_string).collect();
    match compact.contains(&format!("\"tokens\":[{}]", numbers.join(","))) {
        true => Ok(Counts::PASSED),
        false => Err(Failure::new(format!("the tokens are not {tokens:?}"))),
    }
}

/// If the drive stops on the way, the error names the layer, and no text is printed in its place.
fn dies(image: &Path, words: &[&str]) -> Result<Counts, Failure> {
    let mut generate = tool();
    let device = format!(
        "sim:{}?fault=status:0x281@op=read,nth=3000:/model.gguf",
        image.display()
    );
    generate.args(["generate", &device, "--json"]).args(words);
    println!("$ {}", shown(&generate));
    let ended = generate
        .output()
        .map_err(|error| Failure::new(error.to_string()))?;
    let errors = String::from_utf8_lossy(&ended.stderr);
    println!("{}", errors.trim());
    let is_typed = errors.contains("Unrecovered Read Error") && errors.contains("layer");
    match ended.status.code() == Some(1) && ended.stdout.is_empty() && is_typed {
        true => Ok(Counts::PASSED),
        false => Err(Failure::new(format!("{}: {errors}", ended.status))),
    }
}
