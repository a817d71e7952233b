//! Models in several files.

use super::super::{Catalog, CatalogFormat, MetadataValue};
use super::{npy, safetensors};
use nvme_driver::error::Error;
use std::path::PathBuf;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = format!("nvme-gpu-shards-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const A: &str = r#"{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"old":{"dtype":"U8","shape":[2],"data_offsets":[6,8]}}"#;
const B: &str = r#"{"b":{"dtype":"I16","shape":[2,2],"data_offsets":[0,8]}}"#;
const INDEX: &str = r#"{"metadata":{"total_size":14,"ratio":0.5,"below":-1,"done":true,"by":"me","list":[1],"none":null},
    "weight_map":{"b":"m-2.safetensors","a":"m-1.safetensors"}}"#;

fn model(name: &str) -> (Folder, PathBuf) {
    let folder = Folder::new(name);
    folder.write("m-1.safetensors", &safetensors(A, 8));
    folder.write("m-2.safetensors", &safetensors(B, 8));
    let index = folder.write("model.safetensors.index.json", INDEX.as_bytes());
    (folder, index)
}

#[test]
fn tensors_of_all_files_stand_in_one_catalog() {
    let (_folder, index) = model("all");
    let catalog = Catalog::of_file(&index).unwrap();
    assert_eq!(catalog.format(), CatalogFormat::Safetensors);
    let [first, second] = catalog.files() else {
        panic!("{catalog:?}");
    };
    assert_eq!((&*first.name, first.offset), ("m-1.safetensors", 0));
    assert_eq!((&*second.name, second.offset), ("m-2.safetensors", 4096));
    assert_eq!(catalog.bytes(), 4096 + second.bytes);
    let found: Vec<(&str, u64)> = catalog
        .entries()
        .iter()
        .map(|one| (one.name.as_str(), one.offset))
        .collect();
    assert_eq!(
        found,
        [("a", 8 + A.len() as u64), ("b", 4096 + 8 + B.len() as u64)],
        "what the index does not name is left out"
    );
    let values: Vec<&MetadataValue> = catalog.metadata().iter().map(|one| &one.1).collect();
    let expected = [
        MetadataValue::U64(14),
        MetadataValue::F64(0.5),
        MetadataValue::I64(-1),
        MetadataValue::Bool(true),
        MetadataValue::Text("me".into()),
        MetadataValue::Array(vec![MetadataValue::U64(1)]),
        MetadataValue::Text("null".into()),
    ];
    assert_eq!(values, expected.iter().collect::<Vec<_>>());
}

#[test]
fn what_is_missing_is_named() {
    let (folder, index) = model("missing");
    let refused = |what: &str| match Catalog::of_file(&index) {
        Err(Error::Usage { cause, .. }) => assert!(cause.contains(what), "{cause}, not {what}"),
        other => panic!("{what}: {other:?}"),
    };
    for (from, to, what) in [
        (
            r#"m-1.safetensors"#,
            "../m-1.safetensors",
            "is no name of a file",
        ),
        (
            r#"m-1.safetensors"#,
            "/m-1.safetensors",
            "is no name of a file",
        ),
        (
            r#"m-1.safetensors"#,
            "m-1.safetensors/",
            "is no name of a file",
        ),
        (r#"m-1.safetensors"#, "..", "is no name of a file"),
        (r#"m-1.safetensors"#, "", "is no name of a file"),
        (
            r#""a":"#,
            r#""c":"#,
            "\"c\" is not in \"m-1.safetensors\"; 1 of 2 tensors are missing",
        ),
        (r#""a":"#, r#""b":"#, "there twice"),
        ("weight_map", "weights", "no index of safetensors"),
        ("{", "[", "no index of safetensors"),
        (
            r#""weight_map""#,
            r#""weights":{},"weight_map""#,
            "unknown field `weights`",
        ),
        ("total_size", "by", "\"by\" is there twice"),
    ] {
        folder.write(
            "model.safetensors.index.json",
            INDEX.replacen(from, to, 1).as_bytes(),
        );
        refused(what);
    }
    folder.write("model.safetensors.index.json", INDEX.as_bytes());
    folder.write("m-2.safetensors", &safetensors(B, 7));
    refused("m-2.safetensors: its header describes");
    let array = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}";
    folder.write("m-2.safetensors", &npy(1, array, 4));
    refused("no file of safetensors");
    std::fs::remove_file(folder.0.join("m-2.safetensors")).unwrap();
    refused("1 of 2 files are missing: m-2.safetensors");
    std::fs::remove_file(folder.0.join("m-1.safetensors")).unwrap();
    refused("2 of 2 files are missing: m-1.safetensors, m-2.safetensors");
    std::fs::remove_file(&index).unwrap();
    assert!(matches!(Catalog::of_file(&index), Err(Error::File { .. })));
    let file = std::fs::File::create(&index).unwrap();
    file.set_len(200_000_000).unwrap();
    refused("an index of 200000000 bytes");
}

#[cfg(feature = "sim")]
#[test]
fn all_files_are_imported_and_compared() {
    use nvme_store::Store;
    use nvme_store::StoreOptions;
    use std::ops::ControlFlow;

    let (folder, index) = model("import");
    let store = Store::open("sim:mem?size=1MiB", &StoreOptions::default()).unwrap();
    let mut last = (0, 0);
    let catalog = Catalog::import(&store, &index, 512, true, &mut |done, total| {
        last = (done, total);
        ControlFlow::Continue(())
    })
    .unwrap();
    let bytes: u64 = catalog.files().iter().map(|one| one.bytes).sum();
    assert_eq!(last, (2 * bytes, 2 * bytes));
    for file in catalog.files() {
        let expected = std::fs::read(folder.0.join(&file.name)).unwrap();
        let mut found = vec![0; expected.len()];
        store.read_at(file.offset, &mut found).unwrap();
        assert_eq!(found, expected);
        let alone = Catalog::of_store(&store, file.offset).unwrap();
        let same = alone
            .entries()
            .iter()
            .filter(|one| catalog.get(&one.name) == Some(one));
        assert_eq!(same.count(), 1);
    }
    let refused = Catalog::import(&store, &index, store.len() - 4096, true, &mut |_, _| {
        ControlFlow::Continue(())
    });
    assert!(matches!(refused, Err(Error::Usage { .. })));
}
