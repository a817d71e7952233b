//! Vectors in files: `.npy`, safetensors, the `.fbin` kind of DiskANN and big-ann-benchmarks, and raw elements.

use super::element::ElementType;
use super::source::VectorSet;
use nvme_compute_kernel::search::{MOST_ELEMENTS, MOST_NODES};
use nvme_driver::{Error, Result};
use nvme_files::Catalog;
use nvme_files::files::open_regular;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes that are read at a time: whole elements of any type.
const PIECE: u64 = 8 << 20;
/// Bytes before the vectors of a `.fbin`: how many, and how many elements each, as `u32`.
const COUNTS: u64 = 8;
/// File name extensions that name an element's type, for files with two counts before the vectors.
const BINS: [(&str, ElementType); 5] = [
    ("fbin", ElementType::F32),
    ("f16bin", ElementType::F16),
    ("bf16bin", ElementType::Bf16),
    ("i8bin", ElementType::I8),
    ("u8bin", ElementType::U8),
];

/// Content of a file without a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawVectors {
    /// The type of its elements.
    pub element: ElementType,
    /// Elements of a vector.
    pub elements: u32,
}

/// A file of vectors, whose length equals the length that its header describes.
#[derive(Debug)]
pub struct VectorFile {
    path: PathBuf,
    file: File,
    element: ElementType,
    count: u32,
    elements: u32,
    first: u64,
}

impl VectorFile {
    /// Opens a file of vectors: one that names the type of its elements (`.npy` or safetensors with one array of two
    /// dimensions, `.fbin`, `.f16bin`, `.bf16bin`, `.i8bin`, `.u8bin`), or only elements, of the type and number in
    /// `raw`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file of another kind, for a length that does not match the header, and for a type or
    /// number of elements that no index has; [`Error::Device`] for a damaged header; [`Error::File`].
    pub fn open(path: &Path, raw: Option<RawVectors>) -> Result<Self> {
        let (file, about) = open_regular(path)?;
        let bytes = about.len();
        let ending = path.extension().and_then(|ending| ending.to_str());
        let ending = ending.unwrap_or("").to_ascii_lowercase();
        let of_bin = BINS.iter().find(|(name, _)| *name == ending);
        let says_its_type = of_bin.is_some() || ["npy", "safetensors"].contains(&&*ending);
        let mut found = Self {
            path: path.to_owned(),
            file,
            element: ElementType::F32,
            count: 0,
            elements: 0,
            first: 0,
        };
        match (raw, of_bin) {
            (Some(_), _) if says_its_type => Err(found.refused(
                "it says itself what it holds",
                "leave out the type and the number of elements, or rename a file of elements alone",
            )),
            (Some(raw), _) => found.set_raw(raw, bytes),
            (None, Some((_, element))) => found.set_bin(*element, bytes),
            (None, None) if says_its_type => found.set_array(),
            (None, None) => Err(found.refused(
                "its name does not say what it holds",
                "use .npy, .safetensors, .fbin, .f16bin, .bf16bin, .i8bin or .u8bin, or say the type and the number of \
                 elements of raw ones",
            )),
        }?;
        let is_one = |number: u32, most: u64| (1..=most).contains(&number.into());
        if !is_one(found.count, MOST_NODES) || !is_one(found.elements, MOST_ELEMENTS.into()) {
            let cause = format!(
                "it holds {} vectors of {} elements, and an index takes 1 to {MOST_NODES} of 1 to {MOST_ELEMENTS}",
                found.count, found.elements
            );
            return Err(found.refused(&cause, "write a file within these limits"));
        }
        Ok(found)
    }

    /// Returns the number of vectors.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Elements of each.
    pub fn elements(&self) -> u32 {
        self.elements
    }

    /// Returns the type of an element in the file.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Reads all vectors.
    ///
    /// # Errors
    /// As [`numbers`](Self::numbers).
    pub fn vectors(&self) -> Result<VectorSet> {
        VectorSet::new(self.elements, self.numbers(self.count)?)
    }

    /// Reads the elements of the first `count` vectors.
    ///
    /// # Errors
    /// [`Error::Usage`] for more vectors than the file has, and for an element that is not finite, with the number of
    /// its vector; [`Error::Environment`] without memory; [`Error::File`].
    pub fn numbers(&self, count: u32) -> Result<Vec<f32>> {
        if count > self.count {
            let cause = format!("it has {} vectors, not {count}", self.count);
            return Err(self.refused(&cause, &format!("ask for {} at most", self.count)));
        }
        let elements = u64::from(count) * u64::from(self.elements);
        let mut numbers = Vec::new();
        let none = |_| Error::environment("no memory for the vectors", "use fewer");
        let most = usize::try_from(elements).unwrap_or(usize::MAX);
        numbers.try_reserve_exact(most).map_err(none)?;
        let end = self.first + elements * self.element.bytes() as u64;
        let (mut at, mut piece) = (self.first, vec![0; PIECE.min(end - self.first) as usize]);
        while at < end {
            let length = (end - at).min(PIECE) as usize;
            let read = self.file.read_exact_at(&mut piece[..length], at);
            read.map_err(Error::file("read", &self.path))?;
            self.element.widen(&piece[..length], &mut numbers);
            at += length as u64;
        }
        if let Some(at) = numbers.iter().position(|x| !x.is_finite()) {
            let (vector, element) = (at / self.elements as usize, at % self.elements as usize);
            let cause = format!("element {element} of its vector {vector} is not finite");
            return Err(self.refused(&cause, "use finite numbers"));
        }
        Ok(numbers)
    }

    fn refused(&self, cause: &str, remedy: &str) -> Error {
        Error::usage(format!("{}: {cause}", self.path.display()), remedy)
    }

    /// Elements alone.
    fn set_raw(&mut self, raw: RawVectors, bytes: u64) -> Result<()> {
        let vector = u64::from(raw.elements) * raw.element.bytes() as u64;
        if vector == 0 || !bytes.is_multiple_of(vector) {
            let cause = format!(
                "its {bytes} bytes are no whole vectors of {} elements of {}",
                raw.elements,
                raw.element.name()
            );
            return Err(self.refused(&cause, "correct the type or the number of elements"));
        }
        if bytes >= COUNTS && self.is_bin(raw.element, bytes)? {
            return Err(self.refused(
                "it begins with two counts that make up its length, as .fbin files do",
                "rename it to .fbin, .f16bin, .bf16bin, .i8bin or .u8bin, and leave out the type",
            ));
        }
        self.element = raw.element;
        self.elements = raw.elements;
        self.count = self.count_of(bytes / vector)?;
        Ok(())
    }

    fn count_of(&self, count: u64) -> Result<u32> {
        let cause = format!("it holds {count} vectors, and an index takes {MOST_NODES} at most");
        u32::try_from(count).map_err(|_| self.refused(&cause, "write a file of fewer vectors"))
    }

    /// Reads the numbers of vectors and of elements from the header.
    fn counts(&self) -> Result<(u32, u32)> {
        let mut counts = [0; COUNTS as usize];
        let read = self.file.read_exact_at(&mut counts, 0);
        read.map_err(Error::file("read", &self.path))?;
        let [a, b, c, d, e, f, g, h] = counts;
        Ok((
            u32::from_le_bytes([a, b, c, d]),
            u32::from_le_bytes([e, f, g, h]),
        ))
    }

    fn is_bin(&self, element: ElementType, bytes: u64) -> Result<bool> {
        let (count, elements) = self.counts()?;
        Ok(bytes_of_bin(count, elements, element) == Some(bytes))
    }

    /// Sets the layout of a file that has two counts, then the vectors.
    fn set_bin(&mut self, element: ElementType, bytes: u64) -> Result<()> {
        if bytes < COUNTS {
            let cause = format!("its {bytes} bytes have no room for its two counts");
            return Err(self.refused(&cause, "check that the file is complete"));
        }
        let (count, elements) = self.counts()?;
        if bytes_of_bin(count, elements, element) != Some(bytes) {
            let cause = format!(
                "it says {count} vectors of {elements} elements of {}, and has {bytes} bytes",
                element.name()
            );
            return Err(self.refused(&cause, "check that the file is complete"));
        }
        (self.element, self.count, self.elements, self.first) = (element, count, elements, COUNTS);
        Ok(())
    }

    /// Takes the only array of a `.npy` or safetensors file.
    fn set_array(&mut self) -> Result<()> {
        let catalog = Catalog::of_file(&self.path)?;
        let ([array], true) = (catalog.entries(), catalog.files().is_empty()) else {
            let cause = match catalog.entries().len() {
                1 => "its tensor lies in another file, and vectors are read from one".to_owned(),
                tensors => {
                    format!("it has {tensors} tensors, and vectors are read from a file with one")
                }
            };
            return Err(self.refused(&cause, "save the vectors alone in a file"));
        };
        let [count, elements] = array.shape[..] else {
            let lengths = array.shape.len();
            let cause =
                format!("its array has {lengths} lengths, not the two of (vectors, elements)");
            return Err(self.refused(&cause, "save an array of that shape"));
        };
        let Some(element) = ElementType::of_name(array.dtype.name()) else {
            let cause = format!(
                "its elements are {}, which no index takes",
                array.dtype.name()
            );
            let remedy = "save a copy of float32, float16, bfloat16, int8 or uint8";
            return Err(self.refused(&cause, remedy));
        };
        self.element = element;
        self.count = self.count_of(count)?;
        // A number that exceeds 32 bits is refused later, with others that a node does not hold.
        self.elements = u32::try_from(elements).unwrap_or(u32::MAX);
        self.first = array.offset;
        Ok(())
    }
}

fn bytes_of_bin(count: u32, elements: u32, element: ElementType) -> Option<u64> {
    let all = u64::from(count).checked_mul(elements.into())?;
    all.checked_mul(element.bytes() as u64)?.checked_add(COUNTS)
}
