//! GGUF files that are built by hand, and broken in known fields.

use super::super::{Catalog, CatalogFormat, Dtype, MetadataValue};
use super::of;
use nvme_driver::error::Error;

/// A GGUF file that a test builds piece by piece.
pub struct File(pub Vec<u8>);

impl File {
    pub fn new(tensors: u64, keys: u64) -> Self {
        let mut file = Self(b"GGUF".to_vec());
        file.u32(3).u64(tensors).u64(keys);
        file
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }

    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn text(&mut self, text: &str) -> &mut Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    pub fn key(&mut self, name: &str, kind: u32) -> &mut Self {
        self.text(name).u32(kind)
    }

    /// Lengths with the fastest first.
    pub fn tensor(&mut self, name: &str, lengths: &[u64], kind: u32, offset: u64) -> &mut Self {
        self.text(name).u32(lengths.len() as u32);
        for length in lengths {
            self.u64(*length);
        }
        self.u32(kind).u64(offset)
    }

    /// Pads to `alignment` and adds `data` bytes.
    pub fn data(&mut self, alignment: usize, data: usize) -> &mut Self {
        self.0.resize(self.0.len().next_multiple_of(alignment), 0);
        self.0.resize(self.0.len() + data, 0xAB);
        self
    }

    fn read(&self) -> nvme_driver::Result<Catalog> {
        of(&self.0)
    }
}

#[test]
fn tensors_have_their_types_shapes_and_places() {
    let listed = [
        (0, Dtype::F32, "float32", 4, 1),
        (1, Dtype::F16, "float16", 2, 1),
        (30, Dtype::Bf16, "bfloat16", 2, 1),
        (2, Dtype::Q4_0, "q4_0", 18, 32),
        (3, Dtype::Q4_1, "q4_1", 20, 32),
        (8, Dtype::Q8_0, "q8_0", 34, 32),
        (12, Dtype::Q4K, "q4_k", 144, 256),
        (14, Dtype::Q6K, "q6_k", 210, 256),
        (39, Dtype::Mxfp4, "mxfp4", 17, 32),
    ];
    let mut file = File::new(listed.len() as u64 + 1, 0);
    let mut offset = 0;
    let mut places = Vec::new();
    for (number, _, name, block, elements) in listed {
        let bytes = 3 * 2 * block;
        file.tensor(name, &[2 * elements, 3], number, offset);
        places.push((offset, bytes));
        offset = (offset + bytes).next_multiple_of(32);
    }
    file.tensor("number", &[], 0, offset);
    let data = file.0.len().next_multiple_of(32) as u64;
    file.data(32, offset as usize + 4);
    let catalog = file.read().unwrap();
    assert_eq!(catalog.format(), CatalogFormat::Gguf);
    assert_eq!(catalog.bytes(), file.0.len() as u64);
    assert!(catalog.metadata().is_empty());
    for ((_, dtype, name, _, elements), (offset, bytes)) in listed.into_iter().zip(places) {
        let entry = catalog.get(name).unwrap();
        assert_eq!((entry.dtype, entry.dtype.name()), (dtype, name));
        assert_eq!(entry.shape, [3, 2 * elements], "the slowest comes first");
        assert_eq!((entry.offset, entry.bytes), (data + offset, bytes));
    }
    let number = catalog.get("number").unwrap();
    assert!(number.shape.is_empty() && number.bytes == 4);
    // The last data may be padded up to the alignment, and no further.
    let padding = file.0.len().next_multiple_of(32) - file.0.len();
    let mut padded = file.0.clone();
    padded.resize(file.0.len() + padding, 0);
    assert_eq!(of(&padded).unwrap().bytes(), padded.len() as u64);
    padded.push(0);
    assert!(matches!(of(&padded), Err(Error::Usage { .. })));
}

/// The sizes are those of the package gguf 0.19.0 (GGML_QUANT_SIZES), except q8_1, whose size is in ggml-common.h.
#[test]
fn types_without_arithmetic_are_listed_by_their_sizes() {
    for (number, name, elements, block) in [
        (9, "q8_1", 32, 36),
        (15, "q8_k", 256, 292),
        (16, "iq2_xxs", 256, 66),
        (17, "iq2_xs", 256, 74),
        (18, "iq3_xxs", 256, 98),
        (19, "iq1_s", 256, 50),
        (20, "iq4_nl", 32, 18),
        (21, "iq3_s", 256, 110),
        (22, "iq2_s", 256, 82),
        (23, "iq4_xs", 256, 136),
        (29, "iq1_m", 256, 56),
        (34, "tq1_0", 256, 54),
        (35, "tq2_0", 256, 66),
        (40, "nvfp4", 64, 36),
        (41, "q1_0", 128, 18),
        (42, "q2_0", 64, 18),
    ] {
        let bytes: u64 = 3 * 2 * block;
        let next = bytes.next_multiple_of(32);
        let mut file = File::new(2, 0);
        file.tensor("odd", &[2 * elements, 3], number, 0);
        file.tensor("plain", &[3], 0, next);
        file.data(32, next as usize + 12);
        let catalog = file.read().unwrap();
        let odd = catalog.get("odd").unwrap();
        assert_eq!((odd.dtype.name(), odd.bytes), (name, bytes));
        assert_eq!(odd.shape, [3, 2 * elements]);
        assert_eq!(catalog.get("plain").unwrap().dtype, Dtype::F32);
    }
}

#[test]
fn values_keep_their_types() {
    let mut file = File::new(0, 15);
    file.key("u8", 0).bytes(&[200]);
    file.key("i8", 1).bytes(&[200]);
    file.key("u16", 2).bytes(&[1, 2]);
    file.key("i16", 3).bytes(&[0xFE, 0xFF]);
    file.key("u32", 4).u32(1 << 31);
    file.key("i32", 5).u32(u32::MAX);
    file.key("f32", 6).u32(1e-5f32.to_bits());
    file.key("bool", 7).bytes(&[1]);
    file.key("text", 8).text("ä\0b");
    file.key("bytes", 8).u64(2).bytes(&[0xFF, 0x41]);
    file.key("texts", 9).u32(8).u64(2).text("a").text("");
    file.key("nested", 9).u32(9).u64(2);
    file.u32(7).u64(1).bytes(&[0]).u32(5).u64(0);
    file.key("u64", 10).u64(u64::MAX);
    file.key("i64", 11).u64(u64::MAX);
    file.key("f64", 12).u64(f64::NAN.to_bits());
    let catalog = file.read().unwrap();
    let value = |name: &str| {
        let mut all = catalog.metadata().iter();
        all.find(|(key, _)| key == name)
            .map(|(_, value)| value)
            .unwrap()
    };
    let texts = MetadataValue::Array(vec![
        MetadataValue::Text("a".into()),
        MetadataValue::Text(String::new()),
    ]);
    for (name, expected) in [
        ("u8", MetadataValue::U8(200)),
        ("i8", MetadataValue::I8(-56)),
        ("u16", MetadataValue::U16(513)),
        ("i16", MetadataValue::I16(-2)),
        ("u32", MetadataValue::U32(1 << 31)),
        ("i32", MetadataValue::I32(-1)),
        ("f32", MetadataValue::F32(1e-5)),
        ("bool", MetadataValue::Bool(true)),
        ("text", MetadataValue::Text("ä\0b".into())),
        ("bytes", MetadataValue::Bytes(vec![0xFF, 0x41])),
        ("texts", texts),
        ("u64", MetadataValue::U64(u64::MAX)),
        ("i64", MetadataValue::I64(-1)),
    ] {
        assert_eq!(*value(name), expected, "{name}");
    }
    let nested = value("nested").as_array().unwrap();
    assert_eq!(
        nested[0].as_array(),
        Some(&[MetadataValue::Bool(false)][..])
    );
    assert_eq!(nested[1].as_array(), Some(&[][..]));
    assert!(value("f64").as_f64().unwrap().is_nan());
    assert_eq!(value("f32").as_f64(), Some(f64::from(1e-5f32)));
    assert_eq!(value("text").as_text(), Some("ä\0b"));
    assert_eq!(
        (value("u8").as_u64(), value("i8").as_u64()),
        (Some(200), None)
    );
    let whole = ["u16", "u32", "u64", "i16", "i32", "i64", "bool"].map(|name| value(name).as_u64());
    let expected = [
        Some(513),
        Some(1 << 31),
        Some(u64::MAX),
        None,
        None,
        None,
        None,
    ];
    assert_eq!(whole, expected);
    assert_eq!((value("u8").as_text(), value("u8").as_f64()), (None, None));
    assert!(value("u8").as_array().is_none());
    let json = serde_json::to_value(&catalog).unwrap();
    let json = json["metadata"].as_array().unwrap();
    assert_eq!(json[0], serde_json::json!(["u8", 200]));
    assert_eq!(json[11], serde_json::json!(["nested", [[false], []]]));
    assert_eq!(json[14], serde_json::json!(["f64", null]));
}

#[test]
fn the_alignment_of_the_file_holds() {
    for (alignment, version) in [(8u32, 3u8), (64, 2), (4096, 3)] {
        let mut file = File::new(2, 1);
        file.0[4] = version;
        file.key("general.alignment", 4).u32(alignment);
        file.tensor("b", &[3], 24, u64::from(alignment));
        file.tensor("a", &[5], 24, 0);
        let data = file.0.len().next_multiple_of(alignment as usize) as u64;
        file.data(alignment as usize, alignment as usize + 3);
        let catalog = file.read().unwrap();
        let found: Vec<(&str, u64)> = catalog
            .entries()
            .iter()
            .map(|one| (one.name.as_str(), one.offset - data))
            .collect();
        assert_eq!(found, [("a", 0), ("b", u64::from(alignment))]);
    }
}

#[test]
fn what_is_wrong_is_named_with_its_byte() {
    fn one(lengths: &[u64], kind: u32, offset: u64) -> File {
        let mut file = File::new(1, 0);
        file.tensor("a", lengths, kind, offset).data(32, 128);
        file
    }
    fn key(kind: u32, bytes: &[u8]) -> File {
        let mut file = File::new(0, 1);
        file.key("k", kind).bytes(bytes);
        file
    }
    fn build(tensors: u64, keys: u64, make: impl FnOnce(&mut File)) -> File {
        let mut file = File::new(tensors, keys);
        make(&mut file);
        file
    }
    let long = |length: u64| length.to_le_bytes().to_vec();
    let array = |kind: u32, length: u64| [&kind.to_le_bytes()[..], &length.to_le_bytes()].concat();
    let deep = array(9, 1).repeat(8);
    let cases = [
        (
            File(b"GGUF\x03\0".to_vec()),
            "at byte 4: 4 bytes of the header, where 2",
        ),
        (build(0, 0, |file| file.0[4] = 1), "at byte 4: version 0x1"),
        (build(0, 0, |file| file.0[4] = 4), "at byte 4: version 0x4"),
        (
            build(0, 0, |file| file.0[4..8].reverse()),
            "at byte 4: big-endian",
        ),
        (File::new(0, 1), "at byte 24: 8 bytes"),
        (File::new(u64::MAX, 0), "at byte 24: 8 bytes"),
        (
            build(0, 1, |file| {
                file.u64(65_536);
            }),
            "at byte 24: the name of a key has 65536",
        ),
        (
            build(0, 1, |file| {
                file.u64(1).bytes(&[0xFF]);
            }),
            "at byte 24: the name of a key",
        ),
        (
            build(0, 2, |file| {
                file.key("k", 0).bytes(&[1]).key("k", 0).bytes(&[1]);
            }),
            "at byte 38: the key \"k\" is there twice",
        ),
        (key(13, &[]), "at byte 37: a value of the unknown type 13"),
        (key(7, &[2]), "at byte 37: 2 as a truth value"),
        (
            key(8, &long(u64::MAX)),
            "at byte 45: 18446744073709551615 bytes",
        ),
        (key(8, &long(5)), "at byte 45: 5 bytes"),
        (
            key(9, &array(13, 1)),
            "at byte 49: a value of the unknown type",
        ),
        (key(9, &array(0, u64::MAX)), "at byte 49: 1 bytes"),
        (key(9, &deep), "arrays deeper than 4 (key \"k\")"),
        (
            build(0, 1, |file| {
                file.key("general.alignment", 4).u32(48);
            }),
            "no power of two",
        ),
        (
            build(0, 1, |file| {
                file.key("general.alignment", 4).u32(0);
            }),
            "no power of two",
        ),
        (
            build(0, 1, |file| {
                file.key("general.alignment", 10).u64(32);
            }),
            "no power of two",
        ),
        (
            build(0, 1, |file| {
                file.key("general.alignment", 4).u32(1 << 31);
            }),
            "no power of two",
        ),
        (one(&[1; 5], 0, 0), "at byte 24: \"a\" has 5 lengths"),
        (one(&[8], 4, 0), "at byte 24: \"a\" is of the type 4"),
        (
            one(&[33], 8, 0),
            "at byte 24: \"a\" has rows of 33 elements",
        ),
        (
            one(&[1, 256], 12, 0),
            "at byte 24: \"a\" has rows of 1 elements",
        ),
        (one(&[], 8, 0), "at byte 24: \"a\" has rows of 1 elements"),
        (
            one(&[1 << 32, 1 << 32], 24, 0),
            "at byte 24: \"a\" of the shape",
        ),
        (one(&[1 << 62], 0, 0), "at byte 24: \"a\" of the shape"),
        (one(&[4], 0, 8), "at byte 24: the data of \"a\" begin at 8"),
        (
            one(&[4], 0, u64::MAX - 31),
            "at byte 24: the data of \"a\" end past 2^64",
        ),
        (
            one(&[33], 0, 0),
            "at byte 24: the data of \"a\" end at byte 196 of 192",
        ),
        (
            one(&[4], 0, 128),
            "at byte 24: the data of \"a\" end at byte 208 of 192",
        ),
        (
            build(2, 0, |file| {
                file.tensor("a", &[4], 0, 0)
                    .tensor("a", &[4], 0, 32)
                    .data(32, 64);
            }),
            "at byte 57: the tensor \"a\" is there twice",
        ),
        (
            build(2, 0, |file| {
                file.tensor("a", &[9], 0, 0)
                    .tensor("b", &[4], 0, 32)
                    .data(32, 64);
            }),
            "\"b\" begins at byte 128 of the file, inside of \"a\", which ends at 132",
        ),
        (
            build(2, 0, |file| {
                file.tensor("a", &[4], 0, 0)
                    .tensor("b", &[4], 0, 0)
                    .data(32, 64);
            }),
            "inside of \"a\"",
        ),
        (
            build(1, 0, |file| {
                file.tensor("a", &[4], 0, 0).data(32, 64);
            }),
            "describes 80 bytes, and it has 128",
        ),
    ];
    for (file, what) in cases {
        match file.read() {
            Err(Error::Usage { cause, .. }) => assert!(cause.contains(what), "{cause}, not {what}"),
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn bytes_of_no_tensor_and_types_that_are_not_known_are_refused() {
    let of_tensors = |tensors: &[(&str, u64, u32, u64)]| {
        let mut file = File::new(tensors.len() as u64, 0);
        for (name, length, kind, offset) in tensors {
            file.tensor(name, &[*length], *kind, *offset);
        }
        file.data(32, 96);
        file
    };
    for (tensors, what) in [
        (
            &[("b", 3, 24, 64), ("a", 5, 24, 0)][..],
            "the data of \"b\" begin at byte 160, not at 128, where those before them end",
        ),
        (
            &[("a", 16, 0, 32)],
            "the data of \"a\" begin at byte 96, not at 64",
        ),
        (
            &[("a", 8, 38, 0)],
            "is of the type 38 (iq4_nl_8_8), which llama.cpp no longer reads",
        ),
        (
            &[("a", 8, 1000, 0)],
            "at byte 24: \"a\" is of the type 1000, which is not known here",
        ),
    ] {
        match of_tensors(tensors).read() {
            Err(Error::Usage { cause, .. }) => assert!(cause.contains(what), "{cause}, not {what}"),
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn every_length_of_a_cut_file_is_refused() {
    let mut file = File::new(1, 2);
    file.key("general.alignment", 4).u32(32);
    file.key("list", 9).u32(8).u64(2).text("one").text("two");
    file.tensor("a", &[32, 2], 8, 0).data(32, 68);
    assert!(file.read().is_ok());
    for length in 0..file.0.len() {
        assert!(
            matches!(of(&file.0[..length]), Err(Error::Usage { .. })),
            "{length}"
        );
    }
}

#[test]
fn a_long_header_is_read_in_pieces_and_a_longer_one_refused() {
    let mut file = File::new(0, 2);
    let words = 40_000u64;
    file.key("words", 9).u32(8).u64(words);
    for word in 0..words {
        file.text(&format!("word {word}"));
    }
    let long = "x".repeat(300_000);
    file.key("long", 8).text(&long);
    let catalog = file.read().unwrap();
    let found = catalog.metadata()[0].1.as_array().unwrap();
    assert_eq!(found.len() as u64, words);
    assert_eq!(found[39_999].as_text(), Some("word 39999"));
    assert_eq!(catalog.metadata()[1].1.as_text(), Some(long.as_str()));

    /// Zeros behind a header.
    struct Endless(Vec<u8>);
    impl super::super::HeaderSource for Endless {
        fn len(&self) -> u64 {
            1 << 40
        }
        fn read_at(&self, offset: u64, data: &mut [u8]) -> nvme_driver::Result<()> {
            for (at, byte) in data.iter_mut().enumerate() {
                *byte = self.0.get(offset as usize + at).copied().unwrap_or(0);
            }
            Ok(())
        }
        fn is_exact(&self) -> bool {
            false
        }
        fn name(&self) -> String {
            "endless".to_owned()
        }
    }
    for (kind, length, what) in [
        (8, 1 << 39, "goes on past 100000000 bytes"),
        (9, 1 << 40, "more than 4194304 values"),
    ] {
        let mut file = File::new(0, 1);
        file.key("k", kind);
        if kind == 9 {
            file.u32(0);
        }
        file.u64(length);
        match Catalog::of(&Endless(file.0)) {
            Err(Error::Usage { cause, .. }) => assert!(cause.contains(what), "{cause}"),
            other => panic!("{other:?}"),
        }
    }
}
