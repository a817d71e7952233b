//! `generate`: a small model of random weights, from files, devices and file systems.

use super::common::{Folder, Place};
use nvme_models::llama::ModelConfig;
use nvme_models::synthetic::{StoredFormat, SyntheticModel};

/// Returns a model of 300 tokens, as GGUF.
pub fn model() -> Vec<u8> {
    let model = SyntheticModel {
        config: ModelConfig {
            layers: 2,
            width: 64,
            hidden: 128,
            heads: 2,
            kv_heads: 1,
            head_elements: 32,
            vocabulary: 300,
            context: 64,
            epsilon: 1e-5,
            rope_base: 10_000.0,
            ..ModelConfig::default()
        },
        stored: StoredFormat::Q8_0,
        stored_head: StoredFormat::Q8_0,
        seed: 3,
    };
    let mut bytes = Vec::new();
    model.write(&mut bytes, &mut |_| ()).unwrap();
    bytes
}

#[test]
fn the_same_text_comes_from_everywhere() {
    let folder = Folder::new(Place::Embedded);
    std::fs::create_dir(folder.path("models")).unwrap();
    std::fs::write(folder.path("models/model.gguf"), model()).unwrap();
    folder.ok(&["pack", "models", "ext4.img"]);
    let import = ["import", "models/model.gguf", "--offset", "8191"];
    folder.ok(&[&import[..], &["-d", "sim:raw.img?size=4MiB"]].concat());
    let words = ["-p", "Hello", "--tokens", "5"];
    let generate = |model: &[&str]| folder.json(&[&["generate"][..], model, &words].concat());
    let file = generate(&["models/model.gguf"]);
    assert_eq!(file["tokens"].as_array().unwrap().len(), 5);
    assert_eq!(file["prompt_tokens"].as_array().unwrap().len(), 5);
    for (model, budget) in [
        (&["./ext4.img:/model.gguf"][..], "1GiB"),
        (&["sim:raw.img", "--offset", "8191"], "85kB"),
    ] {
        let found = generate(&[model, &["--budget", budget]].concat());
        assert_eq!(found["tokens"], file["tokens"]);
        assert_eq!(found["text"], file["text"]);
    }
    // Without --json: the text on standard output, and the measurements on standard error.
    let more = ["--logits", "numbers.npy", "--tokens", "2", "-p", "Hello"];
    let shown = folder.run(&[&["generate", "models/model.gguf"][..], &more].concat());
    assert!(shown.stderr.contains("2 tokens"), "{}", shown.stderr);
    let numbers = std::fs::read(folder.path("numbers.npy")).unwrap();
    assert_eq!(numbers.len(), 128 + 2 * 300 * 4);
    let catalog = folder.json(&["catalog", "numbers.npy"]);
    assert_eq!(catalog["tensors"][0]["shape"], serde_json::json!([2, 300]));
}

#[test]
fn what_cannot_be_generated_says_why() {
    let folder = Folder::new(Place::Embedded);
    std::fs::write(folder.path("model.gguf"), model()).unwrap();
    std::fs::write(folder.path("cut.gguf"), &model()[..40_000]).unwrap();
    for (words, text) in [
        ("generate . -p a", ". is not a regular file"),
        ("generate cut.gguf -p a", "end at byte"),
        ("generate model.gguf", "--prompt"),
        (
            "generate model.gguf --chat a",
            "no tokens for turns of ChatML",
        ),
        (
            "generate model.gguf -p a --tokens 64",
            "65 positions do not fit the model, which has 64",
        ),
        (
            "generate model.gguf -p a --tokens 2 --budget 1kB",
            "a budget of 1000 bytes",
        ),
        ("generate model.gguf -p a --tokens 0", "0"),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        folder.fails(&words, 2, text);
    }
    folder.fails(
        &["generate", "model.gguf", "-p", ""],
        2,
        "the prompt is empty",
    );
    folder.fails(&["generate", "nothing.gguf", "-p", "a"], 4, "nothing.gguf");
    let fault = "sim:drive.img?fault=status:0x281@op=read,nth=30";
    folder.ok(&["import", "model.gguf", "-d", "sim:drive.img?size=4MiB"]);
    let header = "sim:drive.img?fault=status:0x281@op=read,nth=1";
    let words = ["generate", header, "--offset", "0", "-p", "a"];
    folder.fails(&words, 1, "what lies at byte 0 of the store: Read of LBA 0");
    let words = [
        "--offset", "0", "-p", "a", "--tokens", "9", "--budget", "85kB",
    ];
    folder.fails(
        &[&["generate", fault][..], &words].concat(),
        1,
        "Unrecovered Read Error",
    );
}

/// The logits of all tokens were lost with the step that failed.
#[test]
fn logits_of_tokens_before_a_failed_step_are_kept() {
    let folder = Folder::new(Place::Embedded);
    std::fs::write(folder.path("model.gguf"), model()).unwrap();
    folder.ok(&["import", "model.gguf", "-d", "sim:drive.img?size=4MiB"]);
    let generate = |device: &str, to: &str| {
        let words = "--offset 0 -p a --tokens 9 --budget 85kB --logits";
        let words: Vec<&str> = words.split(' ').collect();
        folder.run(&[&["generate", device], &words[..], &[to]].concat())
    };
    assert_eq!(generate("sim:drive.img", "all.npy").code, 0);
    let ran = generate(
        "sim:drive.img?fault=status:0x281@op=read,nth=30",
        "some.npy",
    );
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let [all, some] = ["all.npy", "some.npy"].map(|name| {
        let shape = &folder.json(&["catalog", name])["tensors"][0]["shape"];
        assert_eq!(shape[1], 300);
        let bytes = std::fs::read(folder.path(name)).unwrap();
        (shape[0].as_u64().unwrap() as usize, bytes[128..].to_vec())
    });
    let says = format!("the logits of the first {} tokens are kept", some.0);
    assert!(ran.stderr.contains(&says), "{}", ran.stderr);
    assert!((1..9).contains(&some.0) && all.0 == 9);
    assert_eq!(some.1, all.1[..some.0 * 300 * 4]);
    // A pipe gets them at the end, since its head says how many there are.
    let line = "mkfifo pipe; cat pipe >piped & \
                $B generate model.gguf -p a --tokens 9 --logits pipe >text 2>&1 && wait";
    let (code, said) = super::rows::shell(&folder, line);
    assert_eq!(code, Some(0), "{said}");
    let [piped, all] = ["piped", "all.npy"].map(|name| std::fs::read(folder.path(name)).unwrap());
    assert_eq!((piped.len(), &piped[..128]), (all.len(), &all[..128]));
    // A file stays as it is if there are no logits.
    std::fs::write(folder.path("old.npy"), "old").unwrap();
    let ran = generate("sim:drive.img?fault=status:0x281@op=read,nth=2", "old.npy");
    assert_ne!(ran.code, 0);
    assert_eq!(std::fs::read(folder.path("old.npy")).unwrap(), b"old");
}

/// Tokens that are no control tokens are letters in a prompt, which is another prompt.
#[test]
fn a_question_needs_turns_of_control_tokens() {
    let folder = Folder::new(Place::Embedded);
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut file = model();
    let mut replace = |from: &str, to: &str| {
        let from = text(from);
        let at = file.windows(from.len()).position(|bytes| bytes == from);
        let at = at.unwrap();
        file.splice(at..at + from.len(), text(to));
    };
    replace("<256>", "<|im_start|>");
    replace("<257>", "<|im_end|>");
    // The header is as long as before.
    for token in 258..264 {
        replace(&format!("<{token}>"), &token.to_string());
    }
    assert_eq!(file.len(), model().len());
    std::fs::write(folder.path("model.gguf"), file).unwrap();
    let generate = ["generate", "model.gguf"];
    folder.ok(&[&generate[..], &["-p", "Why?", "--tokens", "1"]].concat());
    let chat = [&generate[..], &["--chat", "Why?"]].concat();
    folder.fails(&chat, 2, "they are not of the kind control");
}

/// The text is the same, wherever the model lies; a bit that is another one is an error of its layer.
#[test]
fn a_manifest_verifies_what_is_loaded() {
    let folder = Folder::new(Place::Embedded);
    std::fs::create_dir(folder.path("models")).unwrap();
    std::fs::write(folder.path("models/model.gguf"), model()).unwrap();
    folder.ok(&["pack", "models", "ext4.img"]);
    let import = ["import", "models/model.gguf", "--offset", "8191"];
    folder.ok(&[&import[..], &["-d", "sim:raw.img?size=4MiB"]].concat());
    let words = ["-p", "Hello", "--tokens", "5", "--budget", "1MiB"];
    let more = [&words[..], &["--manifest", "hashes"]].concat();
    let expected = folder.json(&[&["generate", "models/model.gguf"], &words[..]].concat());
    assert_eq!(
        expected["layers"]["path"]["verified_by"],
        serde_json::Value::Null
    );
    for place in [
        &["models/model.gguf"][..],
        &["./ext4.img:/model.gguf"],
        &["sim:raw.img", "--offset", "8191"],
    ] {
        folder.ok(&[&["manifest"], place, &["--out", "hashes"]].concat());
        let found = folder.json(&[&["generate"], place, &more[..]].concat());
        assert_eq!(found["tokens"], expected["tokens"], "{place:?}");
        let layers = &found["layers"];
        assert_eq!(layers["path"]["verified_by"], "host");
        assert!(layers["stats"]["verified"].as_u64() > Some(0));
    }
    // With little memory the last matrix is read in pieces, which are extended to whole chunks.
    let few = [
        "-p",
        "Hello",
        "--tokens",
        "5",
        "--budget",
        "200kB",
        "--manifest",
        "hashes",
    ];
    let found = folder.json(&[&["generate", "models/model.gguf"], &few[..]].concat());
    assert_eq!(found["tokens"], expected["tokens"]);
    let bytes = model();
    for (at, text) in [
        (bytes.len() - 100, "of the file on have the XXH3"),
        (20, "is not the manifest's file"),
    ] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 2;
        std::fs::write(folder.path("damaged.gguf"), damaged).unwrap();
        folder.fails(
            &[&["generate", "damaged.gguf"], &more[..]].concat(),
            3,
            text,
        );
    }
    std::fs::write(folder.path("longer.gguf"), [&bytes[..], &[0; 64]].concat()).unwrap();
    let longer = [&["generate", "longer.gguf"], &more[..]].concat();
    assert!(!folder.run(&longer).stderr.is_empty());
    std::fs::write(folder.path("hashes"), "{}").unwrap();
    let no_manifest = [&["generate", "models/model.gguf"], &more[..]].concat();
    folder.fails(
        &no_manifest,
        2,
        "hashes: this is not a manifest: missing field",
    );
    folder.fails(
        &["manifest", "hashes", "-o", "again"],
        2,
        "of no known format",
    );
    assert!(!folder.path("again").exists());
}
