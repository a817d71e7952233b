mod as_the_crate;
mod gguf;
mod shards;
mod split;

use super::{Catalog, CatalogFormat, Dtype, MetadataValue};
use nvme_driver::error::Error;
use std::path::{Path, PathBuf};

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..data).map(|at| at as u8));
    file
}

fn npy(version: u8, header: &str, data: usize) -> Vec<u8> {
    let mut file = b"\x93NUMPY".to_vec();
    file.extend([version, 0]);
    match version {
        1 => file.extend((header.len() as u16).to_le_bytes()),
        _ => file.extend((header.len() as u32).to_le_bytes()),
    }
    file.extend(header.as_bytes());
    file.extend((0..data).map(|at| at as u8));
    file
}

fn of(bytes: &[u8]) -> nvme_driver::Result<Catalog> {
    Catalog::of(&bytes)
}

/// A file that goes with the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let folder = std::env::temp_dir().join(format!("nvme-gpu-catalog-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const TWO: &str = r#"{"__metadata__":{"format":"pt"},
    "b":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]},
    "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
    "empty":{"dtype":"I8","shape":[0,9],"data_offsets":[24,24]}} "#;

#[test]
fn tensors_of_safetensors_stand_in_the_order_of_their_data() {
    let catalog = of(&safetensors(TWO, 30)).unwrap();
    let data = 8 + TWO.len() as u64;
    assert_eq!(catalog.format(), CatalogFormat::Safetensors);
    assert_eq!(catalog.bytes(), data + 30);
    assert_eq!(
        catalog.metadata(),
        [("format".to_owned(), MetadataValue::Text("pt".to_owned()))]
    );
    let names: Vec<&str> = catalog
        .entries()
        .iter()
        .map(|one| one.name.as_str())
        .collect();
    assert_eq!(names, ["a", "empty", "b"]);
    let b = catalog.get("b").unwrap();
    assert_eq!((b.dtype, b.offset, b.bytes), (Dtype::Bf16, data + 24, 6));
    assert!(catalog.get("c").is_none());
}

#[test]
fn arrays_of_each_version_of_npy_are_read() {
    let headers = [
        "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 5), }        \n",
        "{\"shape\":(2L,5L),\"fortran_order\":False,\"descr\":\"<f2\"}",
        "{'descr':'<f2','shape':(2,5,),'fortran_order':False}",
    ];
    for version in [1, 2, 3] {
        for header in headers {
            let catalog = of(&npy(version, header, 20)).unwrap();
            assert_eq!(catalog.format(), CatalogFormat::Npy);
            let array = catalog.get("array").unwrap();
            assert_eq!((array.dtype, &array.shape[..]), (Dtype::F16, &[2, 5][..]));
            assert_eq!(array.offset + 20, catalog.bytes());
        }
    }
    for (descr, shape, bytes, dtype) in [
        ("|u1", "(7,)", 7, Dtype::U8),
        ("|b1", "()", 1, Dtype::Bool),
        (">i1", "(2, 2)", 4, Dtype::I8),
        ("<c16", "(1,)", 16, Dtype::C128),
        ("<i8", "(0, 4)", 0, Dtype::I64),
    ] {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}");
        let catalog = of(&npy(1, &header, bytes)).unwrap();
        assert_eq!(catalog.entries()[0].dtype, dtype, "{header}");
    }
    // One column is the same in both orders.
    let column = "{'descr': '<f4', 'fortran_order': True, 'shape': (3, 1)}";
    assert_eq!(of(&npy(1, column, 12)).unwrap().entries()[0].shape, [3, 1]);
}

#[test]
fn what_the_crate_loads_is_read() {
    let a = r#""a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}"#;
    for header in [
        format!(r#"{{"__metadata__":null,{a}}}"#),
        format!(" \n\t\r{{{a}}}   "),
        r#"{"a":["F32",[4],[0,16]]}"#.to_owned(),
        format!("{{{}}}", a.replace("[0,16]", r#"[0,16],"note":[1]"#)),
    ] {
        let catalog = of(&safetensors(&header, 16)).unwrap();
        assert_eq!(catalog.get("a").unwrap().shape, [4], "{header}");
        assert!(catalog.metadata().is_empty());
    }
    for (name, dtype, elements, bytes) in [
        ("F4", Dtype::F4, 6, 3),
        ("F6_E2M3", Dtype::F6E2M3, 4, 3),
        ("F6_E3M2", Dtype::F6E3M2, 4, 3),
        ("F8_E8M0", Dtype::F8E8M0, 3, 3),
        ("F8_E4M3FNUZ", Dtype::F8E4M3Fnuz, 3, 3),
        ("F8_E5M2FNUZ", Dtype::F8E5M2Fnuz, 3, 3),
    ] {
        let a = format!(
            r#"{{"a":{{"dtype":"{name}","shape":[{elements}],"data_offsets":[0,{bytes}]}}}}"#
        );
        let catalog = of(&safetensors(&a, bytes)).unwrap();
        assert_eq!(catalog.get("a").unwrap().dtype, dtype, "{name}");
    }
}

#[test]
fn an_index_in_place_of_a_file_is_told_from_a_header() {
    for text in [
        "{\"weight_map\": {}}",
        "{\n  \"metadata\": {}}",
        "{\"aaaa\":{}}",
    ] {
        match of(text.as_bytes()) {
            Err(Error::Usage { cause, remedy }) => {
                assert!(cause.contains("a text of JSON"), "{cause}");
                assert!(remedy.contains("index"), "{remedy}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn what_is_no_complete_file_says_what_is_wrong() {
    let tensor = |text: &str| format!("{{\"a\":{{{text}}}}}");
    let plain = "\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]";
    let of_json = [
        ("{", "its header"),
        ("{}x", "its header"),
        ("{\"a\":5}", "\"a\": invalid type"),
        (
            "{\"__metadata__\":{\"by\":5}}",
            "\"__metadata__\" has a number under the key \"by\"",
        ),
        ("{\"__metadata__\":[]}", "\"__metadata__\" is a list"),
        ("{\"a\":{\"k\":\"v\"}}", "\"a\" has no \"dtype\""),
        (
            &format!("{{\"__metadata__\":{{{plain}}}}}"),
            "\"__metadata__\" has a list under the key \"shape\"",
        ),
        (
            "{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}",
            "\"a\" is there twice",
        ),
        (
            "{\"__metadata__\":null,\"__metadata__\":null}",
            "__metadata__",
        ),
        (&format!("{{\"a\":{{{plain}}},\"a\":{{{plain}}}}}"), "twice"),
        (
            &tensor("\"dtype\":\"U8\",\"shape\":[4]"),
            "\"a\" has no \"data_offsets\"",
        ),
        (
            &tensor("\"dtype\":\"Q3\",\"shape\":[4],\"data_offsets\":[0,4]"),
            "\"a\" is of the type \"Q3\", which safetensors does not have",
        ),
        (
            &tensor("\"dtype\":null,\"shape\":[4],\"data_offsets\":[0,4]"),
            "\"a\" is of the type null",
        ),
        (
            &tensor("\"dtype\":\"U8\",\"shape\":[-4],\"data_offsets\":[0,4]"),
            "\"a\" has a wrong \"shape\"",
        ),
        (
            &tensor("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,8]"),
            "\"a\" has wrong \"data_offsets\"",
        ),
        (
            &tensor("\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[0,4]"),
            "has 4 bytes",
        ),
        (
            &tensor("\"dtype\":\"F4\",\"shape\":[5],\"data_offsets\":[0,3]"),
            "has 3 bytes",
        ),
        (
            &tensor("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,0]"),
            "before it begins",
        ),
        (
            &tensor("\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[1,5]"),
            "begins at byte",
        ),
        (
            &tensor(
                "\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[18446744073709551615,18446744073709551615]",
            ),
            "begins at",
        ),
        (
            &tensor("\"dtype\":\"F64\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]"),
            "has 4 bytes",
        ),
        (
            &format!(
                "{{\"a\":{{{plain}}},\"b\":{{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}}}"
            ),
            "begins at byte",
        ),
        (&tensor(&plain.replace("4", "9")), "describes"),
        (&tensor(&plain.replace("4", "3")), "describes"),
    ];
    let mut cases: Vec<(Vec<u8>, &str)> = of_json
        .into_iter()
        .map(|(header, what)| (safetensors(header, 4), what))
        .collect();
    let plain = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}";
    for (from, to, what) in [
        ("<f4", ">f4", "little-endian"),
        ("<f4", "=f4", "little-endian"),
        ("<f4", "<f3", "elements of the type"),
        ("<f4", "|O", "elements of the type"),
        ("<f4", "", "elements of the type"),
        ("'<f4'", "[('a', '<f4')]", "no '\"'"),
        ("'<f4'", "'<f4", "no '}'"),
        (
            "'<f4', 'fortran_order': False, 'shape': (1,)}",
            "'<f4",
            "without an end",
        ),
        ("'<f4'", "'\\x3cf4'", "without an end"),
        ("False", "false", "True or False"),
        ("(1,)", "(1", "no ')'"),
        ("(1,)", "(-1,)", "no length"),
        ("(1,)", "(99999999999999999999,)", "no length"),
        ("(1,)", "(4294967296, 4294967296)", "2^64"),
        ("(1,)", "1", "no '('"),
        ("False", "True, 'fortran_order': True", "twice"),
        ("False, 'shape': (1,)", "True, 'shape': (2, 2)", "Fortran"),
        ("'shape': (1,)", "'length': (1,)", "the key"),
        (", 'shape': (1,)", "", "lacks"),
        ("}", "} + 5", "goes on"),
        ("}", "", "no '}'"),
        ("{", "", "no '{'"),
        ("(1,)", "(2,)", "describes"),
        ("(1,)", "(0,)", "describes"),
    ] {
        assert!(plain.contains(from));
        cases.push((npy(1, &plain.replacen(from, to, 1), 4), what));
    }
    cases.push((npy(4, plain, 4), "version 4.0"));
    cases.push((npy(2, &" ".repeat(70_000), 4), "above"));
    cases.push((
        b"\x93NUMPY\x01\x00\xff\xff{".to_vec(),
        "inside of its header",
    ));
    cases.push((
        b"\x93NUMPY\x01\x00\x03\x00\xff\xff\xff".to_vec(),
        "its header",
    ));
    cases.push((b"\x93NUMPY".to_vec(), "inside of its header"));
    cases.push((Vec::new(), "no known format"));
    cases.push((vec![0; 100], "no known format"));
    cases.push((b"GGML and more of it".to_vec(), "no known format"));
    let mut long = safetensors("{}", 0);
    long[..8].copy_from_slice(&200_000_000u64.to_le_bytes());
    cases.push((long.clone(), "above"));
    long[..8].copy_from_slice(&50_000_000u64.to_le_bytes());
    cases.push((long, "inside of its header"));
    for (bytes, what) in cases {
        let shown = String::from_utf8_lossy(&bytes).into_owned();
        match of(&bytes) {
            Err(Error::Usage { cause, .. }) => {
                assert!(cause.contains(what), "{shown}: {cause}, not {what}");
            }
            other => panic!("{shown}: {other:?}"),
        }
    }
}

#[test]
fn files_that_are_none_are_refused() {
    assert!(matches!(
        Catalog::of_file(Path::new("/does/not/exist")),
        Err(Error::File { .. })
    ));
    assert!(matches!(
        Catalog::of_file(Path::new("/tmp")),
        Err(Error::Usage { .. })
    ));
}

#[cfg(feature = "sim")]
mod onto_a_store {
    use super::{TWO, Temporary, npy, safetensors};
    use crate::Catalog;
    use crate::Manifest;
    use nvme_driver::error::Error;
    use nvme_store::Store;
    use nvme_store::StoreOptions;
    use std::ops::ControlFlow;

    /// Opens a store whose commands do not time out, however busy the machine is.
    fn open(device: &str) -> Store {
        let options = StoreOptions {
            timeout: std::time::Duration::from_secs(120),
            ..StoreOptions::default()
        };
        Store::open(device, &options).unwrap()
    }

    fn go_on(_: u64, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    #[test]
    fn an_import_is_found_again_on_the_store() {
        let store = open("sim:mem?size=16MiB");
        let file = Temporary::new("two.safetensors", &safetensors(TWO, 30));
        let catalog = Catalog::import(&store, file.path(), 4001, true, &mut go_on).unwrap();
        assert_eq!(Catalog::of_store(&store, 4001).unwrap(), catalog);
        let a = catalog.get("a").unwrap();
        let mut row = [0; 12];
        let table = a.table(&store).unwrap();
        table
            .gather((&[1i64]).into(), &mut row, None)
            .unwrap()
            .check()
            .unwrap();
        assert_eq!(row, std::array::from_fn(|at| 12 + at as u8));
        let empty = catalog.get("empty").unwrap();
        assert!(matches!(empty.table(&store), Err(Error::Usage { .. })));
        assert!(matches!(
            Catalog::of_store(&store, store.len() + 1),
            Err(Error::Usage { .. })
        ));
    }

    /// One answer for a file, a store that is the file, and a range of a drive whose size is known.
    #[test]
    fn a_header_that_does_not_cover_its_file_is_refused_wherever_the_file_ends() {
        let array = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 5), }";
        let mut gguf = super::gguf::File::new(1, 0);
        gguf.tensor("a", &[5], 24, 0).data(32, 5);
        let drive = open("sim:mem?size=1MiB");
        for (name, whole) in [
            ("longer.safetensors", safetensors(TWO, 30)),
            ("longer.npy", npy(1, array, 20)),
            ("longer.gguf", gguf.0),
        ] {
            let glued = [&whole[..], &whole[..]].concat();
            let padded = whole.len().next_multiple_of(32);
            for (bytes, is_right) in [
                (&whole[..], true),
                (
                    &[&whole[..], &vec![0; padded + 1 - whole.len()]].concat(),
                    false,
                ),
                (&glued, false),
                (&whole[..whole.len() - 1], false),
            ] {
                let file = Temporary::new(name, bytes);
                let store = open(&format!("file:{}", file.path().display()));
                let length = bytes.len() as u64;
                drive.write_at(4097, bytes).unwrap();
                let mut found = vec![
                    Catalog::of_file(file.path()),
                    Catalog::of(&bytes),
                    Catalog::of_store(&store, 0),
                    Catalog::of_range(&store, 0, length),
                    Catalog::of_range(&drive, 4097, length),
                    Catalog::import(&open("sim:mem?size=1MiB"), file.path(), 0, true, &mut go_on),
                ];
                let manifests = [
                    Manifest::of_file(file.path(), &mut go_on),
                    Manifest::of_store(&store, 0, &mut go_on),
                    Manifest::of_range(&drive, 4097, length, &mut go_on),
                ];
                found.extend(manifests.map(|one| one.map(|_| Catalog::of(&&whole[..]).unwrap())));
                for (index, found) in found.into_iter().enumerate() {
                    match found {
                        Ok(_) if is_right => {}
                        Err(Error::Usage { .. }) if !is_right => {}
                        other => panic!("{name} of {length} bytes, {index}: {other:?}"),
                    }
                }
            }
            // On a drive only the header tells the file's length; a larger regular file is refused with the place of
            // its end.
            drive.write_at(4097, &glued).unwrap();
            assert!(Catalog::of_store(&drive, 4097).is_ok());
            let file = Temporary::new(name, &[&[7; 99], &whole[..], &[7; 99]].concat());
            let store = open(&format!("file:{}", file.path().display()));
            let refused = Catalog::of_store(&store, 99).unwrap_err();
            assert!(refused.remedy().contains("size of the file"), "{refused}");
            assert!(Catalog::of_range(&store, 99, whole.len() as u64).is_ok());
            let past = Catalog::of_range(&store, 99, store.len() - 98);
            assert!(matches!(past, Err(Error::Usage { .. })));
        }
    }

    #[test]
    fn progress_counts_each_byte_twice_and_may_end_it() {
        let store = open("sim:mem?size=64MiB");
        let rows = 20 << 18;
        let header = format!("{{'descr': '<i4', 'fortran_order': False, 'shape': ({rows},)}}");
        let file = Temporary::new("long.npy", &npy(1, &header, rows * 4));
        let bytes = std::fs::metadata(file.path()).unwrap().len();
        let mut seen = Vec::new();
        let catalog = Catalog::import(&store, file.path(), 0, true, &mut |done, total| {
            seen.push((done, total));
            ControlFlow::Continue(())
        });
        assert_eq!(catalog.unwrap().entries()[0].name, "long");
        assert_eq!(seen.len(), 6);
        assert!(seen.is_sorted() && seen.iter().all(|one| one.1 == 2 * bytes));
        assert_eq!(seen[5].0, 2 * bytes);
        let ended = Catalog::import(&store, file.path(), 0, false, &mut |done, total| {
            assert_eq!(total, bytes);
            match done < bytes {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        });
        assert!(matches!(ended, Err(Error::Interrupted)));
    }

    #[test]
    fn a_difference_is_found_where_it_is() {
        let store = open("sim:mem?size=16MiB");
        let file = Temporary::new("changed.safetensors", &safetensors(TWO, 30));
        let path = file.path().to_owned();
        let bytes = std::fs::metadata(&path).unwrap().len();
        let failed = Catalog::import(&store, &path, 0, true, &mut |done, _| {
            if done == bytes {
                let mut changed = safetensors(TWO, 30);
                *changed.last_mut().unwrap() ^= 1;
                std::fs::write(&path, changed).unwrap();
            }
            ControlFlow::Continue(())
        });
        let last = format!("byte {} of", bytes - 1);
        assert!(matches!(&failed, Err(Error::Mismatch { what }) if what.contains(&last)));
        // A file that became shorter cannot be compared.
        let failed = Catalog::import(&store, &path, 0, true, &mut |_, _| {
            std::fs::write(&path, b"short").unwrap();
            ControlFlow::Continue(())
        });
        assert!(matches!(failed, Err(Error::File { .. })));
    }

    #[test]
    fn what_does_not_fit_or_is_refused_changes_nothing() {
        let store = open("sim:mem?size=1MiB");
        let file = Temporary::new("fit.safetensors", &safetensors(TWO, 30));
        for offset in [store.len() - 10, store.len(), u64::MAX] {
            let refused = Catalog::import(&store, file.path(), offset, true, &mut go_on);
            assert!(matches!(refused, Err(Error::Usage { .. })));
        }
        let bad = Temporary::new("bad.safetensors", &safetensors("{\"a\":1}", 30));
        let refused = Catalog::import(&store, bad.path(), 0, true, &mut go_on);
        assert!(matches!(refused, Err(Error::Usage { .. })));
        assert_eq!(store.stats().bytes, 0);
    }

    #[test]
    fn the_file_of_a_store_is_named_by_its_path() {
        let mut bytes = safetensors(TWO, 30);
        bytes.push(0);
        let file = Temporary::new("named.safetensors", &bytes);
        let path = file.path().display().to_string();
        let store = open(&format!("file:{path}"));
        let failed = Catalog::of_store(&store, 0).unwrap_err();
        assert!(
            failed
                .to_string()
                .starts_with(&format!("{path}: its header describes ")),
            "{failed}"
        );
        assert!(failed.remedy().starts_with("get the file again"));
        let failed = Catalog::of_store(&store, 1).unwrap_err().to_string();
        let within = format!("what lies at byte 1 of {path}: ");
        assert!(failed.starts_with(&within), "{failed}");
    }

    #[test]
    fn a_header_that_cannot_be_read_is_an_error_of_the_device() {
        let array = "{'descr': '<f2', 'fortran_order': False, 'shape': (2, 5), }";
        let long = format!("{{\"__metadata__\":{{\"a\":\"{}\"}}}}", "x".repeat(9000));
        for (mut bytes, reads) in [
            (safetensors(&long, 0), 3),
            (npy(1, array, 20), 4),
            (b"GGUF\x03\0\0\0".repeat(2), 2),
        ] {
            // Whole blocks are written without a read.
            bytes.resize(bytes.len().next_multiple_of(512), 0);
            for nth in 1..=reads {
                let fault = format!("status:0x281@op=read,nth={nth}");
                let store = open(&format!("sim:mem?size=16MiB&block=512&fault={fault}"));
                store.write_at(4096, &bytes).unwrap();
                let failed = Catalog::of_store(&store, 4096).unwrap_err();
                let text = failed.to_string();
                assert_eq!(
                    (failed.code(), failed.exit_code()),
                    ("command", 1),
                    "{nth}: {text}"
                );
                assert!(
                    text.starts_with("what lies at byte 4096 of the store: "),
                    "{text}"
                );
                assert!(text.contains("Unrecovered Read Error"), "{text}");
                assert!(
                    !failed.remedy().contains("safetensors"),
                    "{}",
                    failed.remedy()
                );
            }
        }
    }

    #[test]
    fn an_error_of_the_device_ends_an_import() {
        for fault in ["status:0x80@op=write", "status:0x281@op=read"] {
            let store = open(&format!("sim:mem?size=16MiB&fault={fault}"));
            let file = Temporary::new("fault.safetensors", &safetensors(TWO, 30));
            let failed = Catalog::import(&store, file.path(), 512, true, &mut go_on);
            assert!(matches!(failed, Err(Error::Command { .. })), "{fault}");
        }
    }
}
