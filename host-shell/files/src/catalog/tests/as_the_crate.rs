//! A file that the crate `safetensors` loads is read, and one that it refuses is refused: over headers that are broken
//! at random.

use super::super::Catalog;
use ::safetensors::SafeTensors;

/// A generator of numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ mixed >> 31) % limit as u64) as usize
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }
}

/// Parts of headers: whole tensors, and the elements of JSON and of the format.
const WORDS: [&str; 30] = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\"",
    " ",
    "null",
    "0",
    "4",
    "16",
    "-1",
    "1e2",
    "\\u0000",
    "true",
    "\"a\"",
    "\"dtype\"",
    "\"shape\"",
    "\"data_offsets\"",
    "\"F32\"",
    "\"F4\"",
    "\"F6_E2M3\"",
    "\"C128\"",
    "\"F8_E4M3FNUZ\"",
    "\"__metadata__\"",
    "[0,16]",
    "{\"k\":\"v\"}",
    "\"z\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
    "18446744073709551615",
];

const HEADERS: [&str; 4] = [
    r#"{"__metadata__":{"by":"us"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#,
    r#"{"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},"b":{"dtype":"I8","shape":[0],"data_offsets":[16,16]}}"#,
    r#"{"__metadata__":null,"a":{"data_offsets":[4,16],"dtype":"F4","shape":[3,8]},"b":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}"#,
    r#"{"a":{"dtype":"F6_E3M2","shape":[4,4],"data_offsets":[0,12]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[12,16]}} "#,
];

/// Returns a header with up to three changes: of a byte, or of a word for another.
fn broken(random: &mut Random) -> Vec<u8> {
    let mut text = random.one(&HEADERS).as_bytes().to_vec();
    for _ in 0..random.below(4) {
        let at = random.below(text.len() + 1);
        let word = random.one(&WORDS).bytes();
        match random.below(4) {
            0 => drop(text.splice(at..at, word)),
            1 => {
                let end = (at + 1 + random.below(9)).min(text.len());
                text.splice(at.min(end)..end, word);
            }
            2 if at < text.len() => text[at] = random.below(256) as u8,
            _ => text.truncate(text.len().max(1) - 1),
        }
    }
    text
}

fn compare(file: &[u8], counts: &mut [u32; 2]) {
    let ours = Catalog::of(&file);
    let theirs = SafeTensors::read_metadata(file);
    let shown = String::from_utf8_lossy(file);
    match (&ours, &theirs) {
        (Ok(ours), Ok((_, theirs))) => {
            let names: Vec<&str> = ours.entries().iter().map(|one| &*one.name).collect();
            let mut expected = theirs.offset_keys();
            assert_eq!(names.len(), expected.len(), "{shown}");
            expected.retain(|name| !names.contains(&name.as_str()));
            assert!(expected.is_empty(), "{expected:?} in {shown}");
            for entry in ours.entries() {
                let theirs = theirs.info(&entry.name).unwrap();
                let begin = entry.offset - (file.len() - 16) as u64;
                let offsets = (begin as usize, (begin + entry.bytes) as usize);
                assert_eq!(theirs.data_offsets, offsets, "{shown}");
                assert!(
                    theirs
                        .shape
                        .iter()
                        .map(|one| *one as u64)
                        .eq(entry.shape.iter().copied())
                );
            }
            counts[0] += 1;
        }
        (Err(ours), Err(_)) => {
            assert_eq!(
                (ours.code(), ours.remedy().is_empty()),
                ("usage", false),
                "{shown}"
            );
            counts[1] += 1;
        }
        // If a name is there twice, the crate takes the last one.
        (Err(ours), Ok(_)) if ours.to_string().contains("is there twice") => {}
        _ => panic!("{ours:?}, and the crate {theirs:?}: {shown}"),
    }
}

#[test]
fn headers_are_judged_as_by_the_crate() {
    let mut random = Random(0x5AFE_7E45);
    let mut counts = [0; 2];
    for _ in 0..6_000 {
        let header = broken(&mut random);
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.extend([7; 16]);
        compare(&file, &mut counts);
        // The same in a file that is shorter or longer.
        match random.below(3) {
            0 => file.push(0),
            1 => drop(file.pop()),
            _ => continue,
        }
        assert_eq!(
            Catalog::of(&file.as_slice()).is_ok(),
            SafeTensors::read_metadata(&file).is_ok()
        );
    }
    assert!(counts.iter().all(|count| *count > 500), "{counts:?}");
}
