//! Split GGUF.

use super::super::Catalog;
use super::gguf::File;
use nvme_driver::error::Error;
use std::path::PathBuf;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = format!("nvme-gpu-split-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn part(&self, number: u32) -> PathBuf {
        self.0.join(format!("m-{number:05}-of-00003.gguf"))
    }

    fn write(&self, number: u32, file: &[u8]) {
        std::fs::write(self.part(number), file).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The keys of one part.
struct Part {
    number: u16,
    count: u16,
    all: u32,
    names: &'static [&'static str],
    architecture: Option<&'static str>,
}

impl Part {
    fn file(&self) -> Vec<u8> {
        let keys = 3 + u64::from(self.architecture.is_some());
        let mut file = File::new(self.names.len() as u64, keys);
        if let Some(text) = self.architecture {
            file.key("general.architecture", 8).text(text);
        }
        file.key("split.no", 2).bytes(&self.number.to_le_bytes());
        file.key("split.count", 2).bytes(&self.count.to_le_bytes());
        file.key("split.tensors.count", 5).u32(self.all);
        for (index, name) in self.names.iter().enumerate() {
            file.tensor(name, &[5], 24, index as u64 * 32);
        }
        let bytes = self.names.len().saturating_sub(1) * 32 + 5;
        file.data(32, if self.names.is_empty() { 0 } else { bytes });
        file.0
    }
}

/// Returns part `number`, from 0 on, of three with the tensors a; b and c; d.
fn part(number: u16) -> Part {
    let names: [&[&str]; 3] = [&["a"], &["b", "c"], &["d"]];
    Part {
        number,
        count: 3,
        all: 4,
        names: names[usize::from(number)],
        architecture: (number == 0).then_some("llama"),
    }
}

fn whole(name: &str) -> Folder {
    let folder = Folder::new(name);
    for number in 0..3 {
        folder.write(u32::from(number) + 1, &part(number).file());
    }
    folder
}

fn refused(path: &std::path::Path, what: &str) {
    match Catalog::of_file(path) {
        Err(Error::Usage { cause, remedy }) => {
            assert!(cause.contains(what), "{cause}, not {what}");
            assert!(
                !remedy.contains("check that the file is complete"),
                "{cause}: {remedy}"
            );
        }
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn all_parts_are_one_catalog_by_the_first() {
    let folder = whole("all");
    let catalog = Catalog::of_file(&folder.part(1)).unwrap();
    let files: Vec<(&str, u64)> = catalog
        .files()
        .iter()
        .map(|one| (&*one.name, one.offset))
        .collect();
    let expected = [
        ("m-00001-of-00003.gguf", 0),
        ("m-00002-of-00003.gguf", 4096),
        ("m-00003-of-00003.gguf", 8192),
    ];
    assert_eq!(files, expected);
    for (name, number) in [("a", 1), ("b", 2), ("c", 2), ("d", 3)] {
        let entry = catalog.get(name).unwrap();
        let alone = std::fs::read(folder.part(number)).unwrap();
        let within = (entry.offset - u64::from(number - 1) * 4096) as usize;
        assert_eq!(alone[within..within + 5], [0xAB; 5], "{name}");
    }
    assert_eq!(catalog.metadata().len(), 4, "the keys of the first part");
    // The first part may have no tensors.
    let mut first = part(0);
    (first.names, first.all) = (&[], 3);
    folder.write(1, &first.file());
    for number in 1..3 {
        let mut other = part(number);
        other.all = 3;
        folder.write(u32::from(number) + 1, &other.file());
    }
    assert_eq!(
        Catalog::of_file(&folder.part(1)).unwrap().entries().len(),
        3
    );
    // One of one is a file like any other.
    let mut only = part(0);
    (only.count, only.all) = (1, 1);
    let file = only.file();
    assert!(Catalog::of(&file.as_slice()).unwrap().files().is_empty());
    only.all = 2;
    let file = only.file();
    let error = Catalog::of(&file.as_slice()).unwrap_err().to_string();
    assert!(
        error.contains("split.tensors.count is 2, and it has 1"),
        "{error}"
    );
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let folder = whole("wrong");
    refused(&folder.part(2), "it is part 2 of 3 of a split GGUF");
    let alone = part(0).file();
    let error = Catalog::of(&alone.as_slice()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("it is part 1 of 3 of a split GGUF"),
        "{error}"
    );
    let other = folder.0.join("model.gguf");
    std::fs::write(&other, &alone).unwrap();
    refused(&other, "by its keys, and not by its name");
    let change = |number: u16, with: &dyn Fn(&mut Part), what: &str| {
        let mut changed = part(number);
        with(&mut changed);
        folder.write(u32::from(number) + 1, &changed.file());
        refused(&folder.part(1), what);
        folder.write(u32::from(number) + 1, &part(number).file());
    };
    // Parts that were named in another order.
    folder.write(1, &part(1).file());
    refused(&folder.part(1), "it is part 2 of 3 by its keys");
    folder.write(1, &part(0).file());
    change(1, &|one| one.number = 2, "it is part 3 of 3");
    change(2, &|one| one.count = 4, "it is part 3 of 4");
    change(1, &|one| one.all = 5, "with 5 tensors in all");
    change(
        1,
        &|one| one.names = &["b", "a"],
        "its tensor \"a\" is in a part before it",
    );
    change(
        1,
        &|one| one.names = &["b"],
        "have 3 tensors, and split.tensors.count is 4",
    );
    change(
        1,
        &|one| one.architecture = Some("gpt2"),
        "its key general.architecture",
    );
    change(
        0,
        &|one| one.number = 3,
        "split.no is 3 and split.count is 3",
    );
    // A part that has another part behind it.
    let glued = [part(1).file(), part(2).file()].concat();
    folder.write(2, &glued);
    refused_longer(&folder.part(1));
    let mut plain = File::new(1, 0);
    plain.tensor("b", &[5], 24, 0).data(32, 5);
    folder.write(2, &plain.0);
    refused(
        &folder.part(1),
        "m-00002-of-00003.gguf: it is no part of a split GGUF",
    );
    std::fs::remove_file(folder.part(2)).unwrap();
    refused(
        &folder.part(1),
        "1 of 3 parts are missing: m-00002-of-00003.gguf",
    );
    let mut half = File::new(0, 1);
    half.key("split.no", 2).bytes(&[0, 0]);
    let error = Catalog::of(&half.0.as_slice()).unwrap_err().to_string();
    assert!(error.contains("and no split.count"), "{error}");
    let mut more = File::new(0, 4);
    more.key("split.no", 2)
        .bytes(&[0, 0])
        .key("split.count", 2)
        .bytes(&[1, 0]);
    more.key("split.tensors.count", 5)
        .u32(0)
        .key("split.rows", 5)
        .u32(0);
    let error = Catalog::of(&more.0.as_slice()).unwrap_err().to_string();
    assert!(error.contains("the key split.rows"), "{error}");
}

fn refused_longer(path: &std::path::Path) {
    let error = Catalog::of_file(path).unwrap_err().to_string();
    assert!(error.contains("its header describes"), "{error}");
}

#[cfg(feature = "sim")]
#[test]
fn imported_parts_are_found_again_by_the_first() {
    use nvme_store::Store;
    use nvme_store::StoreOptions;
    use std::ops::ControlFlow;

    let folder = whole("import");
    let open = |device: &str| Store::open(device, &StoreOptions::default()).unwrap();
    let store = open("sim:mem?size=1MiB");
    let go_on = &mut |_, _| ControlFlow::Continue(());
    let catalog = Catalog::import(&store, &folder.part(1), 700, true, go_on).unwrap();
    let again = Catalog::of_store(&store, 700).unwrap();
    assert_eq!(again.entries(), catalog.entries());
    assert_eq!((again.begin(), again.metadata()), (700, catalog.metadata()));
    assert!(Catalog::of_range(&store, 700, catalog.bytes()).is_ok());
    for bytes in [catalog.bytes() - 6, catalog.bytes() + 100, 4096] {
        let refused = Catalog::of_range(&store, 700, bytes);
        assert!(matches!(refused, Err(Error::Usage { .. })), "{bytes}");
    }
    let alone = Catalog::of_store(&store, 700 + 4096)
        .unwrap_err()
        .to_string();
    assert!(alone.contains("it is part 2 of 3"), "{alone}");
    store.write_at(700 + 8192, &[0; 99]).unwrap();
    let broken = Catalog::of_store(&store, 700).unwrap_err().to_string();
    assert!(
        broken.contains("part 3 of 3 is not at byte 8192 after the first"),
        "{broken}"
    );
    // A file of the first part alone.
    let first = open(&format!("file:{}", folder.part(1).display()));
    let alone = Catalog::of_store(&first, 0).unwrap_err().to_string();
    assert!(alone.contains("part 2 of 3 is not at byte 4096"), "{alone}");
}
