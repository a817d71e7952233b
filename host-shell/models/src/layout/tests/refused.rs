//! Files that lack something, or have what does not go together: refused by name, before a byte of an expert is read.

use super::*;
use nvme_host::{Error, Store, StoreOptions};
use std::sync::Arc;

/// The tensors of four experts of two matrices of DeepSeek-V3.
fn small() -> Vec<Described> {
    let mut all = vec![tensor(
        "model.layers.0.mlp.gate.weight".to_owned(),
        "BF16",
        &[4, 256],
    )];
    for expert in 0..4 {
        for (matrix, rows, columns) in matrices(256, 128) {
            let name = format!("model.layers.0.mlp.experts.{expert}.{matrix}.weight");
            all.push(tensor(name.clone(), "F8_E4M3", &[rows, columns]));
            let shape = [rows / 128, columns / 128];
            all.push(tensor(format!("{name}_scale_inv"), "F32", &shape));
        }
    }
    all
}

fn refused(name: &str, files: &[Vec<Described>]) -> String {
    let folder = TestFolder::new(name);
    let paths: Vec<PathBuf> = (0..files.len())
        .map(|one| folder.path(&format!("{one}.safetensors")))
        .collect();
    for (path, tensors) in paths.iter().zip(files) {
        safetensors(path, tensors);
    }
    match opened(&paths).and_then(|files| files.layer(0)) {
        Ok(layout) => panic!("{name}: {layout:?}"),
        Err(error @ Error::Usage { .. }) => error.to_string(),
        Err(other) => panic!("{name}: {other}"),
    }
}

/// Opens files in the order of their names here.
fn opened(paths: &[PathBuf]) -> nvme_host::Result<ExpertFiles> {
    let stores = paths.iter().map(|path| {
        Store::open(
            &format!("file:{}", path.display()),
            &StoreOptions::default(),
        )
    });
    let store = Arc::new(Store::join(stores.collect::<nvme_host::Result<_>>()?)?);
    let files = store
        .member_offsets()
        .into_iter()
        .zip(paths)
        .map(|((offset, bytes), path)| {
            let name = path.file_name().unwrap().to_string_lossy();
            let region = StoreRegion::new(&store, &name, offset, Some(bytes))?;
            Ok(Arc::new(region) as Arc<dyn PlacedTensors>)
        });
    ExpertFiles::of(&store, files.collect::<nvme_host::Result<_>>()?)
}

/// Changes the first tensor whose name ends with `end`.
fn changed(end: &str, change: impl Fn(&mut Described)) -> Vec<Described> {
    let mut all = small();
    change(all.iter_mut().find(|one| one.0.ends_with(end)).unwrap());
    all
}

fn without(middle: &str) -> Vec<Described> {
    small()
        .into_iter()
        .filter(|one| !one.0.contains(middle))
        .collect()
}

#[test]
fn a_missing_expert_or_part_is_named() {
    for (name, tensors, cause) in [
        (
            "expert",
            without("experts.2."),
            "1 of 4 experts are missing: 2",
        ),
        (
            "last",
            without("experts.3."),
            "there are 3 experts, and model.layers.0.mlp.gate.weight has 4 rows",
        ),
        (
            "part",
            without("2.up_proj.weight_scale_inv"),
            "expert 2 has no scale of up",
        ),
        (
            "matrix",
            without("down_proj"),
            "gate, up, not gate, up and down",
        ),
        ("all", without("experts"), "layer 0 has no experts"),
        (
            "weight",
            without("1.gate_proj.weight"),
            "expert 1 has no weight of gate",
        ),
    ] {
        let error = refused(name, &[tensors]);
        assert!(error.contains(cause), "{error}");
    }
}

#[test]
fn a_wrong_shape_or_name_is_named() {
    let shape = |shape: &[u64]| {
        let shape = shape.to_vec();
        move |one: &mut Described| one.2 = shape.clone()
    };
    for (name, tensors, cause) in [
        (
            "scale",
            changed("3.up_proj.weight_scale_inv", shape(&[2, 1])),
            "experts.3.up_proj.weight_scale_inv has the shape [2, 1]",
        ),
        (
            "rows",
            changed("3.up_proj.weight", shape(&[256, 128])),
            "up_proj.weight_scale_inv has the shape [1, 2]",
        ),
        (
            "flat",
            changed("3.up_proj.weight", shape(&[128 * 256])),
            "not rows and columns",
        ),
        (
            "empty",
            changed("3.up_proj.weight", shape(&[0, 256])),
            "experts.3.up_proj.weight has no bytes",
        ),
        (
            "router",
            changed("gate.weight", shape(&[5, 256])),
            "4 experts, and model.layers.0.mlp.gate.weight has 5 rows",
        ),
        (
            "name",
            changed("3.up_proj.weight", |one| {
                one.0 = one.0.replace("up_proj", "side_proj")
            }),
            "the meaning of the tensor model.layers.0.mlp.experts.3.side_proj.weight is not known",
        ),
        (
            "merged",
            changed("3.up_proj.weight", |one| {
                one.0 = one.0.replace("3.up_proj", "up_proj")
            }),
            "there are tensors of single experts, and model.layers.0.mlp.experts.up_proj.weight of all",
        ),
        (
            "same",
            changed("3.up_proj.weight", |one| {
                one.0 = one
                    .0
                    .replace("up_proj", "gate_proj")
                    .replace(".weight", ".weight_packed")
            }),
            "expert 0 has no packed_weight of gate",
        ),
    ] {
        let error = refused(name, &[tensors]);
        assert!(error.contains(cause), "{error}");
    }
    // An expert of other lengths, each of its tensors right.
    let mut larger = without("experts.3.");
    for (matrix, rows, columns) in matrices(256, 256) {
        let name = format!("model.layers.0.mlp.experts.3.{matrix}.weight");
        larger.push(tensor(name.clone(), "F8_E4M3", &[rows, columns]));
        larger.push(tensor(
            format!("{name}_scale_inv"),
            "F32",
            &[rows / 128, columns / 128],
        ));
    }
    let error = refused("larger", &[larger]);
    assert!(
        error.contains("expert 3 is of 256 x 256, and expert 0 of 256 x 128"),
        "{error}"
    );
}

#[test]
fn a_name_in_two_files_and_two_models_are_named() {
    let twice = vec![small(), vec![small()[3].clone()]];
    let error = refused("twice", &twice);
    assert!(error.contains("is there twice"), "{error}");
    let other = small()
        .into_iter()
        .map(|(name, dtype, shape)| (name.replace("model.", "text."), dtype, shape));
    let error = refused("models", &[small(), other.collect()]);
    assert!(
        error.contains("several names: model.layers.0.mlp.experts, text.layers.0.mlp.experts"),
        "{error}"
    );
    let slabs = |name: &str, dtype, shape: &[u64]| {
        tensor(format!("model.layers.0.mlp.experts.{name}"), dtype, shape)
    };
    let both = slabs("gate_up_proj", "BF16", &[4, 64, 64]);
    for (down, cause) in [
        (
            slabs("down_proj", "BF16", &[5, 64, 32]),
            "down_proj has 5 experts, and model.layers.0.mlp.experts.gate_up_proj 4",
        ),
        (
            slabs("down_proj", "BF16", &[4, 64, 33]),
            "gate_up is of 64 x 64, and down of 64 x 33",
        ),
        (
            slabs("down_proj", "BF16", &[]),
            "whose first length is not 1 to 4096 experts",
        ),
        (
            slabs("down_proj", "BF16", &[4097, 1]),
            "whose first length is not 1 to 4096 experts",
        ),
        (
            slabs("up_proj", "BF16", &[4, 64, 64]),
            "are up, gate_up, not gate",
        ),
    ] {
        let error = refused("slabs", &[vec![both.clone(), down]]);
        assert!(error.contains(cause), "{error}");
    }
    let bias = slabs("gate_up_proj_bias", "BF16", &[4, 64]);
    let down = slabs("down_proj", "BF16", &[4, 64, 32]);
    let error = refused("bias", &[vec![both, down, bias]]);
    assert!(
        error.contains("gate_up has a bias, and down has none"),
        "{error}"
    );
}

/// A model of three layers in three parts.
fn parts(folder: &TestFolder) -> Vec<PathBuf> {
    let path = |number: u64| folder.path(&format!("model-{:05}-of-00003.gguf", number + 1));
    for part in 0..3 {
        let tensors = [
            ("gate", [64, 32, 4]),
            ("up", [64, 32, 4]),
            ("down", [32, 64, 4]),
        ];
        let tensors = tensors.map(|(matrix, shape)| {
            (
                format!("blk.{part}.ffn_{matrix}_exps.weight"),
                shape.to_vec(),
                39,
            )
        });
        let keys = [
            ("split.no", 2, part),
            ("split.count", 2, 3),
            ("split.tensors.count", 5, 9),
        ];
        gguf(&path(part), &keys, &tensors);
    }
    (0..3).map(path).collect()
}

#[test]
fn parts_of_a_split_gguf_are_whole_and_in_their_order() {
    let folder = TestFolder::new("split");
    let paths = parts(&folder);
    let by_first = ExpertFiles::open(&paths[0]).unwrap();
    let all = opened(&paths).unwrap();
    for files in [&by_first, &all] {
        assert_eq!(files.layers(), [0, 1, 2]);
        let layout = files.layer(2).unwrap();
        assert_eq!(
            layout.expert(3).unwrap().part_bytes(),
            3 * 64 * 32 / 32 * 17
        );
    }
    let of = |order: &[usize]| {
        let chosen: Vec<PathBuf> = order.iter().map(|one| paths[*one].clone()).collect();
        opened(&chosen).unwrap_err().to_string()
    };
    for (order, cause) in [
        (
            &[0][..],
            "2 of 3 parts of the split GGUF are not named: part 2, part 3",
        ),
        (
            &[0, 1],
            "1 of 3 parts of the split GGUF are not named: part 3",
        ),
        (&[1], "it is part 2 of 3 of a split GGUF, and named first"),
        (
            &[1, 0, 2],
            "it is part 2 of 3 of a split GGUF, and named first",
        ),
        (
            &[0, 2, 1],
            "it is part 3 of 3 with 9 tensors in all, where part 2 of 3",
        ),
        (&[0, 1, 2, 2], "are one file"),
    ] {
        let error = of(order);
        assert!(error.contains(cause), "{order:?}: {error}");
    }
    let other = folder.path("other.gguf");
    gguf(
        &other,
        &[],
        &[("output.weight".to_owned(), vec![32, 32], 0)],
    );
    let behind = opened(&[other, paths[0].clone()]).unwrap_err().to_string();
    assert!(
        behind.contains("named behind a file that is no part"),
        "{behind}"
    );
    // Two parts in one file are no file.
    let glued = folder.path("glued.gguf");
    let both = [fs::read(&paths[0]).unwrap(), fs::read(&paths[1]).unwrap()].concat();
    fs::write(&glued, both).unwrap();
    let error = ExpertFiles::open(&glued).unwrap_err().to_string();
    assert!(error.contains("its header describes"), "{error}");
    fs::remove_file(&paths[2]).unwrap();
    let error = ExpertFiles::open(&paths[0]).unwrap_err().to_string();
    assert!(error.contains("model-00003-of-00003.gguf"), "{error}");
}
