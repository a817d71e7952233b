//! Headers of any names, types and shapes: either an error of use, or experts whose bytes lie in the file.

use super::*;
use nvme_host::Error;
use proptest::prelude::*;

/// Writes of names that come from published files, or nearly.
fn name() -> impl Strategy<Value = String> {
    let bank = prop::sample::select(vec!["model.layers.0.mlp", "layers.0.ffn", "mtp.0.ffn"]);
    let expert = prop::sample::select(vec!["0.", "1.", "", "01.", "4095.", "9."]);
    let matrix = prop::sample::select(vec![
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
        "w1",
        "w2",
        "x",
    ]);
    let role = prop::sample::select(vec![
        ".weight",
        "",
        ".scale",
        "_blocks",
        "_scales",
        ".weight_packed",
        ".weight_scale",
        ".weight_scale_2",
        ".weight_global_scale",
        ".weight_shape",
        "_bias",
        ".y",
    ]);
    prop_oneof![
        8 => (bank.clone(), expert, matrix, role)
            .prop_map(|(bank, expert, matrix, role)| format!("{bank}.experts.{expert}{matrix}{role}")),
        1 => bank.prop_map(|bank| format!("{bank}.gate.weight")),
    ]
}

fn described() -> impl Strategy<Value = Described> {
    let dtype = prop::sample::select(vec![
        "F32", "BF16", "U8", "I8", "F8_E4M3", "F8_E8M0", "I32", "I64",
    ]);
    let length = prop::sample::select(vec![0u64, 1, 2, 4, 8, 16, 32, 64, 128]);
    (name(), dtype, prop::collection::vec(length, 0..5))
}

/// A layer that is right but for a few changes.
fn nearly_right() -> impl Strategy<Value = Vec<Described>> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), described(), 0..4u8), 0..3);
    changes.prop_map(|changes| {
        let experts =
            (0..3).flat_map(|expert| of_deepseek_v4("layers.0.ffn.experts", expert, 64, 32));
        let mut all: Vec<Described> = experts.collect();
        for (at, other, kind) in changes {
            let at = at.index(all.len());
            match kind {
                0 => all[at].0 = other.0,
                1 => all[at].1 = other.1,
                2 => all[at].2 = other.2,
                _ => all.push(other),
            }
        }
        all
    })
}

fn judge(mut tensors: Vec<Described>) {
    let folder = TestFolder::new("random");
    let path = folder.path("model.safetensors");
    tensors.sort();
    tensors.dedup_by(|one, other| one.0 == other.0);
    safetensors(&path, &tensors);
    let bytes = fs::metadata(&path).unwrap().len();
    let files = ExpertFiles::open(&path).unwrap();
    let names: Vec<String> = files.names().map(str::to_owned).collect();
    for name in names {
        let layout = match files.named(&name) {
            Ok(layout) => layout,
            Err(Error::Usage { .. }) => continue,
            Err(other) => panic!("{other}"),
        };
        for (number, expert) in (0..).zip(layout.experts()) {
            let mut memory = vec![0; expert.memory_bytes() as usize];
            expert.read(layout.store(), &mut memory).unwrap();
            for part in expert.parts() {
                assert!(part.bytes > 0 && part.at + part.bytes <= expert.memory_bytes());
            }
            for read in expert.reads().iter().chain(expert.scalar_reads()) {
                assert!(read.offset + read.bytes <= bytes, "{read:?}");
            }
            for matrix in layout.matrices(number).unwrap() {
                let mut out = vec![0.0; (matrix.rows * matrix.columns) as usize];
                let done = layout.unpack(number, matrix.matrix, &memory, &mut out);
                assert!(
                    matches!(done, Ok(()) | Err(Error::Usage { .. })),
                    "{done:?}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_names_and_shapes_are_judged(tensors in prop::collection::vec(described(), 0..12)) {
        judge(tensors);
    }

    #[test]
    fn a_layer_that_is_nearly_right_is_judged(tensors in nearly_right()) {
        judge(tensors);
    }
}
