//! .npy: one array of numpy. A magic number, the length of the header, and the header as a dictionary of Python.

use super::dtype::Dtype;
use super::entry::{ParsedHeader, TensorEntry};
use super::source::{HeaderFault, HeaderSource, read_head};

const MAGIC: &[u8] = b"\x93NUMPY";
/// Limit of the header in bytes. numpy itself refuses to evaluate more than 10,000 bytes without being asked
/// to.
const MOST: u64 = 1 << 16;

/// True if `head`, the start of a file, is in this format.
pub fn is_likely(head: &[u8]) -> bool {
    head.starts_with(MAGIC)
}

/// Parses the array of the file under the name `name`.
pub fn parse(source: &dyn HeaderSource, name: &str) -> Result<ParsedHeader, HeaderFault> {
    let head = read_head(source, 0, 8)?;
    let (major, minor) = (head[6], head[7]);
    let (prefix, length) = match major {
        1 => {
            let bytes = read_head(source, 8, 2)?;
            (10, u64::from(u16::from_le_bytes([bytes[0], bytes[1]])))
        }
        2 | 3 => {
            let bytes = read_head(source, 8, 4)?;
            let length = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            (12, u64::from(length))
        }
        _ => return Err(format!("version {major}.{minor} of .npy").into()),
    };
    if length > MOST {
        return Err(format!("a header of {length} bytes, above {MOST}").into());
    }
    let text = read_head(source, prefix, length)?;
    let text = std::str::from_utf8(&text).map_err(|error| format!("its header: {error}"))?;
    let header = NpyReader(text).header()?;
    if header.is_fortran && header.shape.iter().filter(|length| **length > 1).count() > 1 {
        return Err("an array in the order of Fortran: save a copy in the order of C".into());
    }
    let dtype = dtype(&header.descr)?;
    let elements = header
        .shape
        .iter()
        .try_fold(1u64, |all, one| all.checked_mul(*one));
    let bytes = elements.and_then(|elements| dtype.bytes(elements));
    let bytes = bytes.ok_or("more than 2^64 bytes")?;
    let offset = prefix + length;
    let entry = TensorEntry::new(name.to_owned(), dtype, header.shape, offset, bytes)?;
    let end = offset.checked_add(bytes).ok_or("more than 2^64 bytes")?;
    Ok(ParsedHeader {
        bytes: end,
        padded: end,
        entries: vec![entry],
        metadata: Vec::new(),
    })
}

/// Returns the type of a `descr` such as `<f4`.
fn dtype(descr: &str) -> Result<Dtype, String> {
    let mut letters = descr.chars();
    let (order, kind) = (letters.next(), letters.next());
    let size: Option<u64> = letters.as_str().parse().ok();
    let known = kind
        .zip(size)
        .and_then(|(kind, size)| Dtype::of_kind(kind, size));
    let known = known.ok_or_else(|| format!("elements of the type {descr:?}"))?;
    match order {
        Some('<' | '|') => Ok(known),
        _ if known.block() == (1, 1) => Ok(known),
        _ => Err(format!(
            "elements {descr:?} are not little-endian: save a copy that is"
        )),
    }
}

struct NpyHeader {
    descr: String,
    is_fortran: bool,
    shape: Vec<u64>,
}

/// Reads a dictionary of Python with the three keys that numpy writes.
struct NpyReader<'a>(&'a str);

impl NpyReader<'_> {
    fn header(mut self) -> Result<NpyHeader, String> {
        let (mut descr, mut is_fortran, mut shape) = (None, None, None);
        self.expect('{')?;
        while !self.take('}') {
            let key = self.text()?;
            self.expect(':')?;
            let is_new = match key.as_str() {
                "descr" => descr.replace(self.text()?).is_none(),
                "fortran_order" => is_fortran.replace(self.truth()?).is_none(),
                "shape" => shape.replace(self.tuple()?).is_none(),
                _ => return Err(format!("its header has the key {key:?}")),
            };
            if !is_new {
                return Err(format!("its header has the key {key:?} twice"));
            }
            if !self.take(',') {
                self.expect('}')?;
                break;
            }
        }
        if !self.0.trim().is_empty() {
            return Err("its header goes on after its end".to_owned());
        }
        match (descr, is_fortran, shape) {
            (Some(descr), Some(is_fortran), Some(shape)) => Ok(NpyHeader {
                descr,
                is_fortran,
                shape,
            }),
            _ => Err("its header lacks descr, fortran_order or shape".to_owned()),
        }
    }

    fn take(&mut self, letter: char) -> bool {
        self.0 = self.0.trim_start();
        let rest = self.0.strip_prefix(letter);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, letter: char) -> Result<(), String> {
        match self.take(letter) {
            true => Ok(()),
            false => Err(format!("its header has no {letter:?} at {:?}", self.here())),
        }
    }

    /// Returns the next few letters.
    fn here(&self) -> String {
        self.0.chars().take(20).collect()
    }

    fn text(&mut self) -> Result<String, String> {
        let quote = if self.take('\'') { '\'' } else { '"' };
        if quote == '"' {
            self.expect('"')?;
        }
        let end = self.0.find([quote, '\\', '\n']);
        let end = end.filter(|end| self.0[*end..].starts_with(quote));
        let Some(end) = end else {
            return Err(format!(
                "its header has a text without an end at {:?}",
                self.here()
            ));
        };
        let text = self.0[..end].to_owned();
        self.0 = &self.0[end + 1..];
        Ok(text)
    }

    fn truth(&mut self) -> Result<bool, String> {
        self.0 = self.0.trim_start();
        for (word, value) in [("True", true), ("False", false)] {
            if let Some(rest) = self.0.strip_prefix(word) {
                self.0 = rest;
                return Ok(value);
            }
        }
        Err(format!(
            "its header has no True or False at {:?}",
            self.here()
        ))
    }

    fn tuple(&mut self) -> Result<Vec<u64>, String> {
        let mut found = Vec::new();
        self.expect('(')?;
        while !self.take(')') {
            self.0 = self.0.trim_start();
            let end = self.0.find(|letter: char| !letter.is_ascii_digit());
            let (digits, rest) = self.0.split_at(end.unwrap_or(self.0.len()));
            let number = digits.parse();
            found.push(
                number.map_err(|_| format!("its header has no length at {:?}", self.here()))?,
            );
            // Python 2 wrote an L after some.
            self.0 = rest.strip_prefix('L').unwrap_or(rest);
            if !self.take(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(found)
    }
}
