//! Vectors in `.npy`, safetensors and DiskANN files.

use super::*;
use std::path::{Path, PathBuf};

/// A folder that is removed at the end of its test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvme-vectors-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, parts: &[&[u8]]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, parts.concat()).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn counts(count: u32, elements: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&count.to_le_bytes());
    bytes[4..].copy_from_slice(&elements.to_le_bytes());
    bytes
}

fn npy(descr: &str, shape: &str) -> Vec<u8> {
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut head = b"\x93NUMPY\x01\x00".to_vec();
    head.extend((text.len() as u16).to_le_bytes());
    head.extend(text.as_bytes());
    head
}

/// Each type with the bytes of 1, -2 and 3, or of 1, 2 and 3, twice.
const VALUES: [(ElementType, &str, &[u8], [f32; 3]); 5] = [
    (
        ElementType::F32,
        "fbin",
        &[0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0, 0, 0, 0x40, 0x40],
        [1.0, -2.0, 3.0],
    ),
    (
        ElementType::F16,
        "f16bin",
        &[0, 0x3C, 0, 0xC0, 0, 0x42],
        [1.0, -2.0, 3.0],
    ),
    (
        ElementType::Bf16,
        "bf16bin",
        &[0x80, 0x3F, 0, 0xC0, 0x40, 0x40],
        [1.0, -2.0, 3.0],
    ),
    (ElementType::I8, "i8bin", &[1, 0xFE, 3], [1.0, -2.0, 3.0]),
    (ElementType::U8, "u8bin", &[1, 0xFE, 3], [1.0, 254.0, 3.0]),
];

#[test]
fn each_type_is_read_in_each_format() {
    let folder = Folder::new("types");
    for (element, ending, bytes, values) in VALUES {
        let expected = [values, values].concat();
        let raw = Some(RawVectors {
            element,
            elements: 3,
        });
        let bin = folder.file(&format!("a.{ending}"), &[&counts(2, 3), bytes, bytes]);
        let plain = folder.file("a.raw", &[bytes, bytes]);
        for (path, raw) in [(bin, None), (plain, raw)] {
            let file = VectorFile::open(&path, raw).unwrap();
            assert_eq!(
                (file.count(), file.elements(), file.element()),
                (2, 3, element)
            );
            assert_eq!(
                file.vectors().unwrap().all(),
                expected,
                "{}",
                path.display()
            );
            assert_eq!(file.numbers(1).unwrap(), values);
            assert_eq!(file.numbers(2).unwrap(), expected);
            let error = file.numbers(9).unwrap_err().to_string();
            assert!(error.contains("it has 2 vectors, not 9"), "{error}");
        }
    }
    for (descr, of) in [("<f4", 0), ("<f2", 1), ("|i1", 3), ("|u1", 4)] {
        let (element, _, bytes, values) = VALUES[of];
        let path = folder.file("a.npy", &[&npy(descr, "(2, 3)"), bytes, bytes]);
        let file = VectorFile::open(&path, None).unwrap();
        assert_eq!(file.element(), element);
        assert_eq!(file.vectors().unwrap().all(), [values, values].concat());
    }
    let head = br#"{"x":{"dtype":"BF16","shape":[1,3],"data_offsets":[0,6]}}"#;
    let length = (head.len() as u64).to_le_bytes();
    let path = folder.file("a.safetensors", &[&length, head, VALUES[2].2]);
    let file = VectorFile::open(&path, None).unwrap();
    assert_eq!(file.vectors().unwrap().all(), VALUES[2].3);
}

fn refusal(path: &Path, raw: Option<RawVectors>) -> String {
    let found = VectorFile::open(path, raw).and_then(|file| file.vectors().map(drop));
    let error = found.unwrap_err();
    assert!(matches!(error.exit_code(), 1 | 2), "{error}");
    let error = error.to_string();
    assert!(
        error.contains(path.file_name().unwrap().to_str().unwrap()),
        "{error}"
    );
    error
}

#[test]
fn bytes_that_do_not_add_up_are_refused_by_name() {
    let folder = Folder::new("refused");
    let ones = [0u8; 24];
    let nan = [0.5f32, f32::NAN].map(f32::to_le_bytes).concat();
    let infinite = [0.5f32, 1.0, f32::NEG_INFINITY, 1.0]
        .map(f32::to_le_bytes)
        .concat();
    let raw = |element, elements| Some(RawVectors { element, elements });
    let (f32s, bytes) = (ElementType::F32, ElementType::U8);
    for (name, parts, raw, why) in [
        (
            "short.fbin",
            &[&counts(3, 2)[..], &ones[..23]][..],
            None,
            "it says 3 vectors of 2 elements of f32, and has 31",
        ),
        (
            "long.u8bin",
            &[&counts(3, 7), &ones],
            None,
            "and has 32 bytes",
        ),
        (
            "cut.i8bin",
            &[&ones[..7]],
            None,
            "no room for its two counts",
        ),
        (
            "none.u8bin",
            &[&counts(0, 4)],
            None,
            "it holds 0 vectors of 4 elements, and an index takes 1 to ",
        ),
        (
            "flat.u8bin",
            &[&counts(4, 0)],
            None,
            "it holds 4 vectors of 0",
        ),
        (
            "huge.fbin",
            &[&counts(u32::MAX, u32::MAX), &ones],
            None,
            "and has 32 bytes",
        ),
        (
            "wide.u8bin",
            &[&counts(1, 16_289), &[1; 16_289]],
            None,
            "1 vectors of 16289",
        ),
        (
            "nan.raw",
            &[&nan],
            raw(f32s, 2),
            "element 1 of its vector 0 is not finite",
        ),
        (
            "inf.fbin",
            &[&counts(2, 2), &infinite],
            None,
            "element 0 of its vector 1 is not finite",
        ),
        (
            "half.f16bin",
            &[&counts(1, 1), &[0, 0x7E]],
            None,
            "not finite",
        ),
        (
            "odd.raw",
            &[&ones],
            raw(f32s, 5),
            "its 24 bytes are no whole vectors of 5",
        ),
        ("no.raw", &[&ones], raw(f32s, 0), "no whole vectors of 0"),
        ("empty.raw", &[], raw(f32s, 4), "it holds 0 vectors"),
        (
            "mistaken.bin",
            &[&counts(3, 8), &ones],
            raw(bytes, 8),
            "begins with two counts",
        ),
        (
            "typed.fbin",
            &[&counts(1, 6), &ones],
            raw(f32s, 6),
            "says itself what it holds",
        ),
        ("unknown.bin", &[&ones], None, "does not say what it holds"),
        (
            "flat.npy",
            &[&npy("<f4", "(6,)"), &ones],
            None,
            "has 1 lengths, not the two of (vectors, elements)",
        ),
        (
            "wide.npy",
            &[&npy("<f8", "(1, 3)"), &ones],
            None,
            "its elements are float64, which no index takes",
        ),
        (
            "long.npy",
            &[&npy("<f4", "(1, 5)"), &ones],
            None,
            "describes 90 bytes, and it has 94",
        ),
        ("short.npy", &[&npy("<f4", "(1, 7)"), &ones], None, "bytes"),
        ("text.npy", &[b"what is no array at all"], None, "format"),
    ] {
        let error = refusal(&folder.file(name, parts), raw);
        assert!(error.contains(why), "{name}: {error}");
    }
    let pipe = folder.0.join("pipe.fbin");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    let error = refusal(&pipe, None);
    assert!(error.contains("not a regular file"), "{error}");
}
