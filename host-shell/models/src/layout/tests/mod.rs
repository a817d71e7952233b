//! Published files at their true sizes: headers as those models have them, and sparse data.

mod formats;
mod random;
mod refused;

use super::*;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder that is removed at the end.
struct TestFolder(PathBuf);

impl TestFolder {
    fn new(name: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = format!("nvme-gpu-layout-{name}-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Name, type and shape of a tensor.
type Described = (String, &'static str, Vec<u64>);

fn size_of_type(dtype: &str) -> u64 {
    match dtype {
        "F32" | "I32" => 4,
        "BF16" | "F16" => 2,
        "I64" => 8,
        _ => 1,
    }
}

/// Writes a file of safetensors with these tensors in their order, and data that are a hole.
fn safetensors(path: &Path, tensors: &[Described]) {
    let mut at = 0;
    let described = tensors.iter().map(|(name, dtype, shape)| {
        let begin = at;
        at += shape.iter().product::<u64>() * size_of_type(dtype);
        format!(
            "{name:?}:{{\"dtype\":{dtype:?},\"shape\":{shape:?},\"data_offsets\":[{begin},{at}]}}"
        )
    });
    let header = format!("{{{}}}", described.collect::<Vec<_>>().join(","));
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + at).unwrap();
}

/// Writes an index and its files, and returns the path of the index.
fn index(folder: &TestFolder, shards: &[Vec<Described>]) -> PathBuf {
    let mut map = Vec::new();
    for (number, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        safetensors(&folder.path(&name), tensors);
        map.extend(
            tensors
                .iter()
                .map(|tensor| format!("{:?}:{name:?}", tensor.0)),
        );
    }
    let path = folder.path("model.safetensors.index.json");
    fs::write(&path, format!("{{\"weight_map\":{{{}}}}}", map.join(","))).unwrap();
    path
}

/// A tensor of a GGUF: name, shape with the fastest length first, type.
type DescribedGguf = (String, Vec<u64>, u32);

/// Writes a GGUF of version 3 with these texts and numbers, and data that are a hole.
fn gguf(path: &Path, numbers: &[(&str, u32, u64)], tensors: &[DescribedGguf]) {
    let text = |out: &mut Vec<u8>, text: &str| {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    };
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((numbers.len() as u64).to_le_bytes());
    for (key, kind, value) in numbers {
        text(&mut out, key);
        out.extend(kind.to_le_bytes());
        let bytes = if *kind == 2 { 2 } else { 4 };
        out.extend(&value.to_le_bytes()[..bytes]);
    }
    let mut at = 0u64;
    for (name, shape, kind) in tensors {
        text(&mut out, name);
        out.extend((shape.len() as u32).to_le_bytes());
        shape
            .iter()
            .for_each(|length| out.extend(length.to_le_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(at.to_le_bytes());
        let (block, bytes) = match kind {
            0 => (1, 4),
            2 => (32, 18),
            12 => (256, 144),
            16 => (256, 66),
            18 => (256, 98),
            30 => (1, 2),
            39 => (32, 17),
            other => panic!("type {other}"),
        };
        at += (shape.iter().product::<u64>() / block * bytes).next_multiple_of(32);
    }
    let data = (out.len() as u64).next_multiple_of(32);
    let mut file = File::create(path).unwrap();
    file.write_all(&out).unwrap();
    file.set_len(data + at).unwrap();
}

fn tensor(name: String, dtype: &'static str, shape: &[u64]) -> Described {
    (name, dtype, shape.to_vec())
}

/// The tensors of an expert of DeepSeek-V4.
fn of_deepseek_v4(bank: &str, expert: u64, width: u64, hidden: u64) -> Vec<Described> {
    let mut all = Vec::new();
    for (matrix, rows, columns) in [
        ("w1", hidden, width),
        ("w2", width, hidden),
        ("w3", hidden, width),
    ] {
        let name = |end: &str| format!("{bank}.{expert}.{matrix}.{end}");
        all.push(tensor(name("scale"), "F8_E8M0", &[rows, columns / 32]));
        all.push(tensor(name("weight"), "I8", &[rows, columns / 2]));
    }
    all
}

/// 40 layers of 384 experts, 92,160 tensors and a draft block.
fn deepseek_v4(folder: &TestFolder) -> PathBuf {
    let mut shards: Vec<Vec<Described>> = (0..40)
        .map(|layer| {
            let bank = format!("layers.{layer}.ffn.experts");
            let mut all = vec![
                tensor(
                    format!("layers.{layer}.ffn.gate.weight"),
                    "BF16",
                    &[384, 5120],
                ),
                tensor(format!("layers.{layer}.ffn.gate.bias"), "F32", &[384]),
            ];
            let experts = (0..384).flat_map(|expert| of_deepseek_v4(&bank, expert, 5120, 2304));
            all.extend(experts);
            all
        })
        .collect();
    let draft = (0..128).flat_map(|expert| of_deepseek_v4("mtp.0.ffn.experts", expert, 5120, 2304));
    shards.push(draft.collect());
    index(folder, &shards)
}

#[test]
fn six_tensors_of_deepseek_v4_are_one_read() {
    let folder = TestFolder::new("v4");
    let files = ExpertFiles::open(&deepseek_v4(&folder)).unwrap();
    assert_eq!(files.layers(), (0..40).collect::<Vec<_>>());
    let layout = files.layer(7).unwrap();
    assert_eq!(
        (layout.width(), layout.hidden(), layout.layer()),
        (5120, 2304, Some(7))
    );
    assert_eq!(layout.experts().len(), 384);
    let mut all = 0;
    for (before, after) in layout.experts().iter().zip(&layout.experts()[1..]) {
        let ([one], [next]) = (before.reads(), after.reads()) else {
            panic!("{before:?}");
        };
        assert_eq!((one.bytes, before.part_bytes()), (18_800_640, 18_800_640));
        assert_eq!(one.offset + one.bytes, next.offset);
        all += one.bytes;
    }
    assert_eq!((all + 18_800_640) * 40, 288_777_830_400);
    for matrix in layout.matrices(383).unwrap() {
        assert_eq!(matrix.format, ExpertFormat::Mxfp4);
    }
    let expert = layout.expert(383).unwrap();
    let scale = expert.part(ExpertMatrix::Down, TensorRole::Scale).unwrap();
    assert_eq!(scale.tensor, "layers.7.ffn.experts.383.w2.scale");
    assert_eq!((&scale.shape[..], scale.bytes), (&[5120, 72][..], 368_640));
    assert!(
        layout
            .expert(384)
            .unwrap_err()
            .to_string()
            .contains("expert 384")
    );
    // A draft block is found by its name alone.
    assert_eq!(
        files.named("mtp.0.ffn.experts").unwrap().experts().len(),
        128
    );
    assert!(files.layer(40).is_err());
}

/// The tensors of a layer of gpt-oss-120b.
fn of_gpt_oss(layer: u64) -> Vec<Described> {
    let bank = format!("model.layers.{layer}.mlp.experts");
    let name = |end: &str| format!("{bank}.{end}");
    vec![
        tensor(
            format!("model.layers.{layer}.mlp.router.weight"),
            "BF16",
            &[128, 2880],
        ),
        tensor(name("down_proj_bias"), "BF16", &[128, 2880]),
        tensor(name("gate_up_proj_bias"), "BF16", &[128, 5760]),
        tensor(name("down_proj_blocks"), "U8", &[128, 2880, 90, 16]),
        tensor(name("down_proj_scales"), "U8", &[128, 2880, 90]),
        tensor(name("gate_up_proj_blocks"), "U8", &[128, 5760, 90, 16]),
        tensor(name("gate_up_proj_scales"), "U8", &[128, 5760, 90]),
    ]
}

#[test]
fn an_expert_of_gpt_oss_is_six_slabs() {
    let folder = TestFolder::new("gpt-oss");
    let shards: Vec<Vec<Described>> = (0..36).map(of_gpt_oss).collect();
    let files = ExpertFiles::open(&index(&folder, &shards)).unwrap();
    let layout = files.layer(35).unwrap();
    assert_eq!((layout.width(), layout.hidden()), (2880, 2880));
    assert_eq!(layout.experts().len(), 128);
    let [both, down] = layout.matrices(100).unwrap() else {
        panic!("{layout:?}");
    };
    assert_eq!(
        (&both.format, &down.format),
        (&ExpertFormat::Mxfp4, &ExpertFormat::Mxfp4)
    );
    assert!(both.is_interleaved && !down.is_interleaved && !both.is_transposed);
    let expert = layout.expert(127).unwrap();
    assert_eq!(expert.part_bytes(), 13_219_200 + 17_280);
    assert_eq!((expert.reads().len(), expert.parts().len()), (6, 6));
    for read in expert.reads() {
        assert_eq!(read.at % 16, read.offset % 16);
    }
    let strides = layout.experts().windows(2).map(|pair| {
        let reads = pair[0].reads().iter().zip(pair[1].reads());
        reads
            .map(|(one, next)| next.offset - one.offset)
            .collect::<Vec<_>>()
    });
    let strides: Vec<_> = strides.collect();
    assert!(strides.iter().all(|one| *one == strides[0]));
}

/// Matrices of an expert under the names of Qwen3, DeepSeek-V3 and GLM: name, rows, columns.
fn matrices(width: u64, hidden: u64) -> [(&'static str, u64, u64); 3] {
    [
        ("down_proj", width, hidden),
        ("gate_proj", hidden, width),
        ("up_proj", hidden, width),
    ]
}

#[test]
fn fp8_of_glm_and_bf16_of_qwen3_have_their_published_sizes() {
    let folder = TestFolder::new("apart");
    let mut all = vec![tensor(
        "model.layers.3.mlp.gate.weight".to_owned(),
        "BF16",
        &[160, 5120],
    )];
    for expert in 0..160 {
        for (matrix, rows, columns) in matrices(5120, 1536) {
            let name = format!("model.layers.3.mlp.experts.{expert}.{matrix}.weight");
            all.push(tensor(name.clone(), "F8_E4M3", &[rows, columns]));
            let shape = [rows / 128, columns / 128];
            all.push(tensor(format!("{name}_scale_inv"), "F32", &shape));
        }
    }
    for expert in 0..128 {
        for (matrix, rows, columns) in matrices(2048, 768) {
            let name = format!("model.layers.0.mlp.experts.{expert}.{matrix}.weight");
            all.push(tensor(name, "BF16", &[rows, columns]));
        }
    }
    let path = folder.path("model.safetensors");
    safetensors(&path, &all);
    let files = ExpertFiles::open(&path).unwrap();
    assert_eq!(files.layers(), [0, 3]);
    let (glm, qwen) = (files.layer(3).unwrap(), files.layer(0).unwrap());
    let weights = 3 * 5120 * 1536;
    assert_eq!(
        glm.expert(159).unwrap().part_bytes(),
        weights + weights / 128 / 128 * 4
    );
    assert_eq!(
        (glm.width(), glm.hidden(), glm.experts().len()),
        (5120, 1536, 160)
    );
    let blocks = ExpertFormat::Fp8 {
        rows: 128,
        columns: 128,
    };
    assert!(
        glm.matrices(0)
            .unwrap()
            .iter()
            .all(|one| one.format == blocks)
    );
    assert_eq!(qwen.expert(127).unwrap().part_bytes(), 9_437_184);
    assert_eq!(qwen.expert(5).unwrap().reads().len(), 1);
}

/// Merged tensors of plain numbers: in both orders of their lengths.
#[test]
fn merged_tensors_are_told_from_their_transposes() {
    let folder = TestFolder::new("merged");
    let path = folder.path("model.safetensors");
    let of = |layer: u64, both: [u64; 3], down: [u64; 3]| {
        let bank = format!("model.language_model.layers.{layer}.mlp.experts");
        [
            tensor(format!("{bank}.gate_up_proj"), "BF16", &both),
            tensor(format!("{bank}.down_proj"), "BF16", &down),
        ]
    };
    let mut all = of(0, [256, 1024, 2048], [256, 2048, 512]).to_vec();
    all.extend(of(1, [16, 5120, 16_384], [16, 8192, 5120]));
    // As wide as twice the hidden size.
    all.extend(of(2, [4, 64, 64], [4, 64, 32]));
    safetensors(&path, &all);
    let files = ExpertFiles::open(&path).unwrap();
    for (layer, sizes, is_transposed) in [
        (0, (2048, 512), false),
        (1, (5120, 8192), true),
        (2, (64, 32), false),
    ] {
        let layout = files.layer(layer).unwrap();
        assert_eq!((layout.width(), layout.hidden()), sizes);
        for matrix in layout.matrices(0).unwrap() {
            assert_eq!(
                (matrix.is_transposed, matrix.is_interleaved),
                (is_transposed, false)
            );
        }
    }
    assert_eq!(
        files.layer(0).unwrap().expert(255).unwrap().part_bytes(),
        6_291_456
    );
}

/// gpt-oss as transformers saves it: rows of the file are columns, a bias is for each column of the file.
#[test]
fn biases_go_with_the_rows_of_a_transposed_matrix() {
    let folder = TestFolder::new("saved-gpt-oss");
    let path = folder.path("model.safetensors");
    let saved = |both_bias: u64, down_bias: u64| {
        let name = |end: &str| format!("model.layers.0.mlp.experts.{end}");
        safetensors(
            &path,
            &[
                tensor(name("gate_up_proj"), "BF16", &[4, 64, 192]),
                tensor(name("gate_up_proj_bias"), "BF16", &[4, both_bias]),
                tensor(name("down_proj"), "BF16", &[4, 96, 64]),
                tensor(name("down_proj_bias"), "BF16", &[4, down_bias]),
            ],
        );
        ExpertFiles::open(&path).unwrap().layer(0)
    };
    let layout = saved(192, 64).unwrap();
    assert_eq!((layout.width(), layout.hidden()), (64, 96));
    let [both, down] = layout.matrices(0).unwrap() else {
        panic!("{layout:?}");
    };
    assert!(both.is_transposed && both.is_interleaved);
    assert!(down.is_transposed && !down.is_interleaved);
    for (both, down, tensor) in [(64, 64, "gate_up_proj_bias"), (192, 96, "down_proj_bias")] {
        let error = saved(both, down).unwrap_err().to_string();
        assert!(error.contains(tensor), "{error}");
    }
}

/// Mixtral-8x7B: merged, and a tensor for each expert as files had them at first; types of a dynamic file.
#[test]
fn both_layouts_of_gguf_and_mixed_types() {
    let folder = TestFolder::new("gguf");
    let path = folder.path("model.gguf");
    let (width, hidden) = (4096, 14_336);
    let mut all = Vec::new();
    for (layer, kinds) in [(0, [2, 2, 2]), (1, [16, 16, 12])] {
        all.push((
            format!("blk.{layer}.ffn_gate_inp.weight"),
            vec![width, 8],
            0,
        ));
        for ((matrix, shape), kind) in [
            ("gate", [width, hidden, 8]),
            ("up", [width, hidden, 8]),
            ("down", [hidden, width, 8]),
        ]
        .into_iter()
        .zip(kinds)
        {
            all.push((
                format!("blk.{layer}.ffn_{matrix}_exps.weight"),
                shape.to_vec(),
                kind,
            ));
        }
    }
    for expert in 0..8 {
        for (matrix, shape) in [
            ("gate", [width, hidden]),
            ("up", [width, hidden]),
            ("down", [hidden, width]),
        ] {
            // Types may differ between experts.
            let kind = if expert == 7 { 18 } else { 2 };
            all.push((
                format!("blk.2.ffn_{matrix}.{expert}.weight"),
                shape.to_vec(),
                kind,
            ));
        }
    }
    gguf(&path, &[], &all);
    let files = ExpertFiles::open(&path).unwrap();
    assert_eq!(files.layers(), [0, 1, 2]);
    let of_q4_0 = 3 * width * hidden / 32 * 18;
    for layer in [0, 2] {
        let layout = files.layer(layer).unwrap();
        assert_eq!(
            (layout.width(), layout.hidden(), layout.experts().len()),
            (4096, 14_336, 8)
        );
        assert_eq!(layout.expert(6).unwrap().part_bytes(), of_q4_0);
    }
    let mixed = files.layer(1).unwrap();
    let elements = width * hidden;
    let bytes = elements / 256 * (66 + 66 + 144);
    assert_eq!(mixed.expert(3).unwrap().part_bytes(), bytes);
    let formats: Vec<String> = mixed
        .matrices(3)
        .unwrap()
        .iter()
        .map(|one| one.format.to_string())
        .collect();
    assert_eq!(formats, ["iq2_xxs", "iq2_xxs", "q4_k"]);
    let last = files.layer(2).unwrap();
    assert_eq!(
        last.expert(7).unwrap().part_bytes(),
        3 * elements / 256 * 98
    );
    assert_eq!(last.matrices(7).unwrap()[0].format.to_string(), "iq3_xxs");
    assert_eq!(last.matrices(6).unwrap()[0].format.to_string(), "q4_0");
}
