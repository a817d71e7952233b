use super::*;
use proptest::prelude::*;
use std::ops::ControlFlow;

fn data(bytes: usize) -> Vec<u8> {
    (0..bytes as u64)
        .map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 31) as u8)
        .collect()
}

/// Returns a safetensors file of tensors of these bytes, one behind the other.
fn file(tensors: &[(&str, usize)]) -> Vec<u8> {
    let mut at = 0;
    let header = tensors.iter().map(|(name, bytes)| {
        let begin = at;
        at += bytes;
        format!(r#""{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{begin},{at}]}}"#)
    });
    let header = format!("{{{}}}", header.collect::<Vec<_>>().join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data(at));
    file
}

fn of(file: &[u8]) -> Manifest {
    let catalog = Catalog::of(&file).unwrap();
    let go_on = &mut |_, _| ControlFlow::Continue(());
    Manifest::of(&file, file.len() as u64, catalog.entries(), go_on).unwrap()
}

#[test]
fn a_manifest_has_the_hash_of_each_chunk_of_each_tensor() {
    let file = file(&[("a", 70_000), ("none", 0), ("b", 5), ("c", 131_072)]);
    let manifest = of(&file);
    let header = (file.len() - 70_000 - 5 - 131_072) as u64;
    let parts: Vec<_> = manifest
        .parts()
        .iter()
        .map(|part| (&*part.name, part.bytes))
        .collect();
    assert_eq!(
        parts,
        [("", header), ("a", 70_000), ("b", 5), ("c", 131_072)]
    );
    assert_eq!(manifest.bytes(), file.len() as u64);
    assert_eq!(manifest.xxh3(), xxh3_64(&file));
    let (mut at, mut lengths) = (0, Vec::new());
    for chunk in manifest.chunks() {
        assert_eq!(chunk.offset, at);
        let bytes = &file[at as usize..][..chunk.bytes as usize];
        assert_eq!(chunk.xxh3, xxh3_64(bytes));
        at += u64::from(chunk.bytes);
        lengths.push(chunk.bytes);
    }
    assert_eq!(at, file.len() as u64);
    assert_eq!(lengths[1..], [65_536, 4_464, 5, 65_536, 65_536]);
}

#[test]
fn what_is_written_is_what_is_read() {
    let manifest = of(&file(&[("a", 70_000), ("\u{1F980}", 3)]));
    let text = manifest.to_json();
    assert_eq!(Manifest::parse(text.as_bytes()).unwrap(), manifest);
    let path = std::env::temp_dir().join(format!("nvme-gpu-manifest-{}", std::process::id()));
    std::fs::write(&path, &text).unwrap();
    assert_eq!(Manifest::open(&path).unwrap(), manifest);
    std::fs::write(&path, &text[1..]).unwrap();
    let error = Manifest::open(&path).unwrap_err().to_string();
    assert!(
        error.contains(path.to_str().unwrap()) && error.contains("line 2 column"),
        "{error}"
    );
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(Manifest::open(&path), Err(Error::File { .. })));
}

#[test]
fn files_and_stores_have_the_same_manifest() {
    let file = file(&[("a", 70_000)]);
    let path = std::env::temp_dir().join(format!("nvme-gpu-hashed-{}", std::process::id()));
    std::fs::write(&path, &file).unwrap();
    let mut seen = Vec::new();
    let mut go_on = |done, all| {
        seen.push((done, all));
        ControlFlow::Continue(())
    };
    let expected = of(&file);
    assert_eq!(Manifest::of_file(&path, &mut go_on).unwrap(), expected);
    assert_eq!(seen.last(), Some(&(file.len() as u64, file.len() as u64)));
    let mut stop = |_, _| ControlFlow::Break(());
    let stopped = Manifest::of_file(&path, &mut stop);
    assert!(matches!(stopped, Err(Error::Interrupted)));
    let store = Store::open(path.to_str().unwrap(), &nvme_store::StoreOptions::default()).unwrap();
    let mut go_on = |_, _| ControlFlow::Continue(());
    assert_eq!(Manifest::of_store(&store, 0, &mut go_on).unwrap(), expected);
    let past = Manifest::of_store(&store, 1 << 40, &mut go_on);
    assert!(matches!(past, Err(Error::Usage { .. })));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn ranges_are_whole_chunks_or_refused() {
    let file = file(&[("a", 70_000), ("b", 5), ("c", 131_072)]);
    let manifest = of(&file);
    let a = manifest.parts()[1].offset;
    let lengths = |range| -> Vec<u32> {
        let chunks = manifest.chunks_of(range).unwrap();
        chunks.iter().map(|chunk| chunk.bytes).collect()
    };
    assert_eq!(lengths(a..a + 70_005), [65_536, 4_464, 5]);
    assert_eq!(lengths(a + 65_536..a + 70_000), [4_464]);
    assert!(lengths(a..a).is_empty());
    assert_eq!(manifest.cover(a + 1..a + 2), a..a + 65_536);
    assert_eq!(manifest.cover(a + 65_535..a + 65_537), a..a + 70_000);
    assert_eq!(manifest.cover(a + 7..a + 7), a + 7..a + 7);
    for (range, what) in [
        (a + 1..a + 65_536, "a part of the chunks"),
        (a..a + 65_535, "a part of the chunks"),
        (a..manifest.bytes() + 1, "by its manifest"),
        (u64::MAX - 5..u64::MAX, "by its manifest"),
    ] {
        let error = manifest.chunks_of(range).unwrap_err();
        assert!(
            matches!(&error, Error::Usage { .. }) && error.to_string().contains(what),
            "{error}"
        );
    }
}

#[test]
fn other_bytes_are_named_by_their_place_and_both_hashes() {
    let mut file = file(&[("a", 200_000)]);
    let manifest = of(&file);
    let a = manifest.parts()[1].offset;
    let range = a as usize..a as usize + 200_000;
    manifest.verify(a, &file[range.clone()]).unwrap();
    file[a as usize + 140_000] ^= 4;
    let error = manifest.verify(a, &file[range.clone()]).unwrap_err();
    let chunk = manifest.chunks_of(a + 131_072..a + 196_608).unwrap()[0];
    let found = xxh3_64(&file[chunk.offset as usize..][..65_536]);
    let expected = format!(
        "65536 bytes from byte {} of the file on have the XXH3 {found:016x}, and {:016x} in the manifest",
        a + 131_072,
        chunk.xxh3
    );
    assert!(
        matches!(&error, Error::Mismatch { what } if *what == expected),
        "{error}"
    );
}

/// The first and last byte of each chunk, the short last ones of tensors among them.
#[test]
fn damage_is_found_in_each_chunk_of_each_tensor() {
    let file = file(&[("a", 70_000), ("b", 5), ("c", 131_072), ("d", 65_537)]);
    let manifest = of(&file);
    for part in manifest.parts() {
        let range = part.offset as usize..(part.offset + part.bytes) as usize;
        manifest.verify(part.offset, &file[range.clone()]).unwrap();
        let chunks = manifest.chunks_of(part.offset..part.offset + part.bytes);
        for chunk in chunks.unwrap() {
            for at in [chunk.offset, chunk.offset + u64::from(chunk.bytes) - 1] {
                let mut damaged = file.clone();
                damaged[at as usize] ^= 1;
                let error = manifest
                    .verify(part.offset, &damaged[range.clone()])
                    .unwrap_err();
                let place = format!("{} bytes from byte {} of", chunk.bytes, chunk.offset);
                assert!(
                    matches!(&error, Error::Mismatch { what } if what.starts_with(&place)),
                    "{}, byte {at}: {error}",
                    part.name
                );
            }
        }
    }
    // The header is a part, which `check_begin` compares to its last byte.
    let header = &manifest.parts()[0];
    for at in [0, header.bytes - 1] {
        let mut damaged = file.clone();
        damaged[at as usize] ^= 1;
        let error = manifest.check_begin(&damaged.as_slice()).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[test]
fn another_file_is_refused_by_its_length_or_its_header() {
    let mine = file(&[("a", 70_000)]);
    let manifest = of(&mine);
    manifest.check_begin(&mine.as_slice()).unwrap();
    let shorter = manifest.check_begin(&&mine[..1000]).unwrap_err();
    assert!(matches!(&shorter, Error::Usage { .. }), "{shorter}");
    let longer = [&mine[..], &[0]].concat();
    assert!(manifest.check_begin(&longer.as_slice()).is_err());
    let other = file(&[("b", 70_000)]);
    assert_eq!(other.len(), mine.len());
    let error = manifest.check_begin(&other.as_slice()).unwrap_err();
    assert!(matches!(&error, Error::Mismatch { .. }), "{error}");
    assert!(
        error.to_string().contains("not the manifest's file"),
        "{error}"
    );
}

/// A header of several chunks: the last one names the last tensors alone.
#[test]
fn each_chunk_of_a_long_header_is_compared() {
    let names: Vec<String> = (0..4000).map(|index| format!("tensor{index:06}")).collect();
    let tensors: Vec<(&str, usize)> = names.iter().map(|name| (&**name, 1)).collect();
    let mine = file(&tensors);
    let manifest = of(&mine);
    let header = manifest.parts()[0].bytes;
    assert!(header > 3 * u64::from(CHUNK_BYTES), "{header}");
    manifest.check_begin(&mine.as_slice()).unwrap();
    for at in (0..header as usize).step_by(CHUNK_BYTES as usize) {
        let mut other = mine.clone();
        other[at + 100] ^= 1;
        let error = manifest.check_begin(&other.as_slice()).unwrap_err();
        assert!(matches!(&error, Error::Mismatch { .. }), "{at}: {error}");
    }
}

#[test]
fn tensors_that_overlap_or_lie_past_the_end_are_refused() {
    let file = file(&[("a", 10), ("b", 10)]);
    let catalog = Catalog::of(&file.as_slice()).unwrap();
    let mut go_on = |_, _| ControlFlow::Continue(());
    let mut entries = catalog.entries().to_vec();
    let mut refused = |entries: &[TensorEntry], bytes: u64, what: &str| {
        let error = Manifest::of(&file.as_slice(), bytes, entries, &mut go_on).unwrap_err();
        assert!(
            matches!(&error, Error::Usage { .. }) && error.to_string().contains(what),
            "{error}"
        );
    };
    refused(&entries, file.len() as u64 - 1, "'b'");
    refused(&[], 0, "the file has 0 bytes");
    entries[1].offset -= 1;
    refused(&entries, file.len() as u64, "'b'");
}

#[test]
fn what_is_no_manifest_is_refused_with_its_place() {
    let right = of(&file(&[("a", 70_000), ("b", 5)])).to_json();
    let first = right.find("\"xxh3\": \"").unwrap() + 9;
    let hash = &right[first..first + 16];
    for (from, to, what) in [
        ("\"version\": 1", "\"version\": 2", "version 2"),
        ("nvme-gpu manifest", "manifest", "\"manifest\""),
        ("\"chunk_bytes\": 65536", "\"chunk_bytes\": 65535", "65535"),
        ("\"chunk_bytes\": 65536", "\"chunk_bytes\": 512", "512"),
        (
            "\"chunk_bytes\": 65536",
            "\"chunk_bytes\": 131072",
            "part 1 (\"a\"): 2 hashes of 1",
        ),
        ("\"bytes\": 5", "\"bytes\": 0", "part 2 (\"b\")"),
        ("\"bytes\": 5", "\"bytes\": 6", "parts of"),
        ("\"bytes\": 70000", "\"bytes\": 70001", "part 2 (\"b\")"),
        (
            "\"bytes\": 70000",
            "\"bytes\": 18446744073709551615",
            "part 1 (\"a\")",
        ),
        ("\"name\": \"a\"", "\"name\": 7", "line "),
        (
            "\"name\": \"a\"",
            "\"name\": \"a\", \"x\": 1",
            "unknown field",
        ),
        (hash, "0123456789abcdeg", "xxh3 of the file"),
        (hash, "0123456789abcde", "xxh3 of the file"),
    ] {
        let text = right.replacen(from, to, 1);
        assert_ne!(text, right, "{from}");
        let error = Manifest::parse(text.as_bytes()).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(&error, Error::Usage { .. }) && text.contains(what),
            "{from}: {text}"
        );
    }
    let last = right.rfind("\"xxh3\": \"").unwrap() + 9;
    let mut wrong = right.clone().into_bytes();
    wrong[last + 3] = b'x';
    let error = Manifest::parse(&wrong).unwrap_err().to_string();
    assert!(error.contains("part 2 (\"b\"): hash 0"), "{error}");
    assert!(Manifest::parse(b"").is_err() && Manifest::parse(&[0xFF; 9]).is_err());
}

proptest! {
    /// A changed byte of the text gives an error, or a manifest that is written as it was read.
    #[test]
    fn any_changed_byte_is_data(at in 0usize..1 << 16, byte in any::<u8>()) {
        let mut text = of(&file(&[("a", 70_000), ("b", 5)])).to_json().into_bytes();
        let at = at % text.len();
        text[at] = byte;
        if let Ok(read) = Manifest::parse(&text) {
            prop_assert_eq!(Manifest::parse(read.to_json().as_bytes()).unwrap(), read);
        }
    }
}
