//! Formats of few bits: packed elements, and scales beside them.

use super::*;

fn layout_of(name: &str, of_matrix: impl Fn(&str, u64, u64) -> Vec<Described>) -> ExpertLayout {
    let folder = TestFolder::new(name);
    let path = folder.path("model.safetensors");
    let mut all = Vec::new();
    for expert in 0..4 {
        for (matrix, rows, columns) in matrices(512, 256) {
            let bank = "model.layers.0.mlp.experts";
            all.extend(of_matrix(
                &format!("{bank}.{expert}.{matrix}"),
                rows,
                columns,
            ));
        }
    }
    safetensors(&path, &all);
    ExpertFiles::open(&path).unwrap().layer(0).unwrap()
}

fn formats(layout: &ExpertLayout) -> ExpertFormat {
    let found = layout.matrices(3).unwrap();
    assert!(found.iter().all(|one| one.format == found[0].format));
    found[0].format.clone()
}

#[test]
fn scalars_of_nvfp4_are_read_apart() {
    let model_opt = layout_of("modelopt", |name, rows, columns| {
        vec![
            tensor(format!("{name}.input_scale"), "F32", &[]),
            tensor(format!("{name}.weight_scale_2"), "F32", &[]),
            tensor(format!("{name}.weight"), "U8", &[rows, columns / 2]),
            tensor(
                format!("{name}.weight_scale"),
                "F8_E4M3",
                &[rows, columns / 16],
            ),
        ]
    });
    assert_eq!(formats(&model_opt), ExpertFormat::Nvfp4 { divides: false });
    let expert = model_opt.expert(2).unwrap();
    let elements = 512 * 256;
    // Scalars of up and down lie between, in this file.
    let [read] = expert.reads() else {
        panic!("{expert:?}");
    };
    assert_eq!(read.bytes, 3 * elements / 2 + 3 * elements / 16 + 2 * 8);
    assert_eq!(expert.streamed_bytes(), read.at + read.bytes);
    let scalars = expert.parts().iter().filter(|part| part.is_scalar);
    assert!(
        scalars
            .clone()
            .all(|part| part.at >= expert.streamed_bytes())
    );
    assert_eq!(scalars.count(), 6);
    let compressed = layout_of("compressed", |name, rows, columns| {
        vec![
            tensor(format!("{name}.input_global_scale"), "F32", &[1]),
            tensor(format!("{name}.weight_global_scale"), "F32", &[1]),
            tensor(format!("{name}.weight_packed"), "U8", &[rows, columns / 2]),
            tensor(
                format!("{name}.weight_scale"),
                "F8_E4M3",
                &[rows, columns / 16],
            ),
        ]
    });
    assert_eq!(formats(&compressed), ExpertFormat::Nvfp4 { divides: true });
}

#[test]
fn mxfp4_and_int4_of_kimi() {
    let k3 = layout_of("k3", |name, rows, columns| {
        vec![
            tensor(format!("{name}.weight_packed"), "U8", &[rows, columns / 2]),
            tensor(format!("{name}.weight_scale"), "U8", &[rows, columns / 32]),
        ]
    });
    assert_eq!(formats(&k3), ExpertFormat::Mxfp4);
    let k2 = layout_of("k2", |name, rows, columns| {
        vec![
            tensor(format!("{name}.weight_packed"), "I32", &[rows, columns / 8]),
            tensor(
                format!("{name}.weight_scale"),
                "BF16",
                &[rows, columns / 32],
            ),
            tensor(format!("{name}.weight_shape"), "I64", &[2]),
        ]
    });
    assert_eq!(formats(&k2), ExpertFormat::Int4 { group: 32 });
    assert_eq!((k2.width(), k2.hidden()), (512, 256));
}

#[test]
fn blocks_of_fp8_are_told_by_the_shape_of_their_scales() {
    for (name, dtype, block) in [
        ("v3", "F32", (128, 128)),
        ("qwen", "BF16", (128, 128)),
        ("v4", "F8_E8M0", (32, 32)),
        ("engram", "F8_E8M0", (1, 32)),
    ] {
        let layout = layout_of(name, |name, rows, columns| {
            let end = if dtype == "F8_E8M0" {
                "scale"
            } else {
                "weight_scale_inv"
            };
            let shape = [rows / block.0, columns / block.1];
            vec![
                tensor(format!("{name}.weight"), "F8_E4M3", &[rows, columns]),
                tensor(format!("{name}.{end}"), dtype, &shape),
            ]
        });
        let (rows, columns) = block;
        assert_eq!(formats(&layout), ExpertFormat::Fp8 { rows, columns });
    }
}

/// They are listed with their bytes, and nothing computes with them.
#[test]
fn words_of_gptq_are_listed_by_size() {
    let layout = layout_of("gptq", |name, rows, columns| {
        vec![
            tensor(format!("{name}.g_idx"), "I32", &[columns]),
            tensor(format!("{name}.qweight"), "I32", &[columns / 8, rows]),
            tensor(format!("{name}.qzeros"), "I32", &[columns / 128, rows / 8]),
            tensor(format!("{name}.scales"), "F16", &[columns / 128, rows]),
        ]
    });
    let format = formats(&layout).to_string();
    assert!(
        format.contains("unknown") && format.contains("zero_point"),
        "{format}"
    );
    let elements = 512 * 256;
    let expert = layout.expert(0).unwrap();
    let bytes = |role| {
        let parts = expert.parts().iter().filter(|part| part.role == role);
        parts.map(|part| part.bytes).sum::<u64>()
    };
    assert_eq!(bytes(TensorRole::PackedWeight), 3 * elements / 2);
    assert_eq!(bytes(TensorRole::Scale), 3 * elements / 128 * 2);
}
