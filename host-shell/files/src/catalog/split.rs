//! GGUF models in several files, as `llama-gguf-split` makes them: each is a complete GGUF, and its keys state its
//! number. Numbers, counts and shared keys of all parts are compared, so that parts of two models are never joined.

use super::entry::CatalogFile;
use super::source::{FileSource, HeaderFault, HeaderSource, StoreSource};
use super::tensors::TensorList;
use super::{Catalog, MetadataValue, TensorEntry};
use nvme_driver::error::{Error, Result};
use nvme_driver::words::{listed, quoted, shortened};
use nvme_store::Store;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// The parts after the first begin at multiples of this number of bytes.
pub const ALIGNMENT: u64 = 4096;
/// The most parts: their numbers have 16 bits in the files and five digits in their names.
const MOST: u64 = 65_535;
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
/// Keys that each part has for itself.
const OWN: [&str; 4] = [NUMBER, COUNT, TENSORS, "general.alignment"];
const GET_AGAIN: &str = "get all parts of the model again, into one folder and under their names";

impl Catalog {
    /// Returns the tensors of a file that lies in `store` from byte `offset` on, at their places in the store.
    ///
    /// In a store that is a regular file (`file:PATH`) the file ends where the store does. On a drive only the header
    /// tells the file's length; [`of_range`](Self::of_range) compares it with a given size. The parts of a split GGUF
    /// are found one after another, as [`import`](Self::import) writes them.
    ///
    /// # Errors
    /// The errors of the store, and as [`of`](Self::of).
    pub fn of_store(store: &Store, offset: u64) -> Result<Self> {
        in_store(&StoreSource::from(store, offset)?).map(|found| found.at(offset))
    }

    /// Returns the tensors of a file, the `bytes` bytes of `store` from byte `offset` on, at their places in
    /// the store.
    ///
    /// # Errors
    /// As [`of_store`](Self::of_store), also for a file that is shorter or longer.
    pub fn of_range(store: &Store, offset: u64, bytes: u64) -> Result<Self> {
        let source = StoreSource::whole(store, offset, bytes)?;
        in_store(&source).map(|found| found.at(offset))
    }

    /// Returns the tensors of a file whose bytes are `source`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a file of no known format, for one that is not complete, or is longer than its header says
    /// if the source [ends with the file](HeaderSource::is_exact); for a part of a split GGUF; the errors of the source
    /// for bytes that were not read.
    pub fn of(source: &dyn HeaderSource) -> Result<Self> {
        let found = Self::alone(source)?;
        let part = SplitPart::of(&found);
        match part.map_err(|fault| wrong(fault).of(source))? {
            None => Ok(found),
            Some(part) => Err(part.refused_alone().of(source)),
        }
    }
}

/// Position of a file among the parts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitPart {
    /// Number of the part, from 0 on.
    pub(super) number: u64,
    pub(super) count: u64,
    /// Tensors of all parts.
    tensors: u64,
}

impl SplitPart {
    /// Reads the position from the keys of `file`; `None` for a model in one file.
    ///
    /// # Errors
    /// The fault of impossible keys, as the end of a sentence that begins with the file's name.
    pub fn of(file: &Catalog) -> std::result::Result<Option<Self>, String> {
        let keys = file.metadata().iter();
        let keys: Vec<_> = keys.filter(|(key, _)| key.starts_with("split.")).collect();
        if keys.is_empty() || file.format() != super::CatalogFormat::Gguf {
            return Ok(None);
        }
        let get = |name: &str| {
            let value = keys.iter().find(|(key, _)| key == name);
            let value =
                value.ok_or_else(|| format!("it has keys of a split GGUF, and no {name}"))?;
            value.1.as_u64().ok_or_else(|| {
                let shown = serde_json::to_string(&value.1).unwrap_or_default();
                format!("{name} is {}, not a number from 0 on", shortened(&shown))
            })
        };
        let part = Self {
            number: get(NUMBER)?,
            count: get(COUNT)?,
            tensors: get(TENSORS)?,
        };
        if let Some((key, _)) = keys.iter().find(|(key, _)| !OWN.contains(&key.as_str())) {
            return Err(format!(
                "the key {} of a split GGUF is not known here",
                shortened(key)
            ));
        }
        if part.number >= part.count || part.count > MOST {
            return Err(format!(
                "{NUMBER} is {} and {COUNT} is {}, where numbers begin with 0 and {MOST} parts are the most",
                part.number, part.count
            ));
        }
        let have = file.entries().len() as u64;
        match part.count {
            1 if part.tensors != have => Err(format!(
                "{TENSORS} is {}, and it has {have} tensors",
                part.tensors
            )),
            1 => Ok(None),
            _ => Ok(Some(part)),
        }
    }

    /// Returns the reason why this part cannot be read without the others.
    pub fn refused_alone(self) -> HeaderFault {
        HeaderFault::unknown(
            format!(
                "it is part {} of {} of a split GGUF",
                self.number + 1,
                self.count
            ),
            "name the first part where a model is imported or listed from a folder; else join the parts \
             (`llama-gguf-split --merge FIRST OUT`)",
        )
    }
}

/// Returns the keys or parts that do not go together.
pub fn wrong(what: String) -> HeaderFault {
    HeaderFault::unknown(what, GET_AGAIN)
}

/// Parts that have been found, one after another.
pub(super) struct JoinedParts {
    all: Catalog,
    entries: Vec<TensorEntry>,
    /// Keys of the first part, which the others repeat.
    keys: HashMap<String, MetadataValue>,
    part: SplitPart,
    /// Number of parts found so far.
    found: u64,
    names: HashSet<String>,
}

impl JoinedParts {
    pub(super) fn new(first: Catalog, part: SplitPart, name: String, bytes: u64) -> Self {
        let mut all = first;
        let entries = std::mem::take(&mut all.entries).into_entries();
        let names = entries.iter().map(|one| one.name.clone()).collect();
        let keys = all.metadata.iter().cloned().collect();
        all.bytes = bytes;
        all.files.push(CatalogFile {
            name,
            offset: 0,
            bytes,
        });
        Self {
            all,
            entries,
            keys,
            part,
            found: 1,
            names,
        }
    }

    /// Returns the offset of the next part; `None` once all were found.
    pub(super) fn next(&self) -> Option<u64> {
        let offset = self.all.bytes.checked_next_multiple_of(ALIGNMENT);
        offset.filter(|_| self.found < self.part.count)
    }

    /// Adds the next part, which begins at `offset`.
    ///
    /// # Errors
    /// The fault of the part, as the end of a sentence that begins with its name.
    pub(super) fn add(
        &mut self,
        next: Catalog,
        offset: u64,
        name: String,
        bytes: u64,
    ) -> std::result::Result<(), String> {
        let part = SplitPart::of(&next)?.ok_or("it is no part of a split GGUF")?;
        let expected = SplitPart {
            number: self.found,
            ..self.part
        };
        if part != expected {
            return Err(format!(
                "it is part {} of {} with {} tensors in all, where part {} of {} with {} has to be",
                part.number + 1,
                part.count,
                part.tensors,
                expected.number + 1,
                expected.count,
                expected.tensors
            ));
        }
        for (key, value) in next.metadata() {
            let is_own = OWN.contains(&key.as_str());
            if !is_own && self.keys.get(key) != Some(value) {
                let key = shortened(key);
                return Err(format!("its key {key} is not that of the first part"));
            }
        }
        for mut entry in next.entries.into_entries() {
            if !self.names.insert(entry.name.clone()) {
                return Err(format!(
                    "its tensor {} is in a part before it, too",
                    quoted(&entry.name)
                ));
            }
            entry.offset += offset;
            self.entries.push(entry);
        }
        self.all.bytes = offset + bytes;
        self.all.files.push(CatalogFile {
            name,
            offset,
            bytes,
        });
        self.found += 1;
        Ok(())
    }

    /// # Errors
    /// An error if the number of tensors is another one than the parts say.
    pub(super) fn finish(self) -> std::result::Result<Catalog, String> {
        let have = self.entries.len() as u64;
        match have == self.part.tensors {
            true => Ok(Catalog {
                entries: TensorList::from(self.entries),
                ..self.all
            }),
            false => Err(format!(
                "its {} parts have {have} tensors, and {TENSORS} is {}",
                self.found, self.part.tensors
            )),
        }
    }
}

/// Returns the file in `source`, or the parts of a split GGUF that lie there one after another.
///
/// # Errors
/// As [`Catalog::of`].
pub fn in_store(source: &StoreSource<'_>) -> Result<Catalog> {
    // The first part ends before the others do.
    let first = Catalog::alone(&source.at_most())?;
    let part = match SplitPart::of(&first).map_err(|fault| wrong(fault).of(source))? {
        None => return ended(first, source),
        Some(part) if part.number == 0 => part,
        Some(part) => return Err(part.refused_alone().of(source)),
    };
    let bytes = first.bytes();
    let mut joined = JoinedParts::new(first, part, name_in_store(0), bytes);
    while let Some(offset) = joined.next() {
        let name = name_in_store(joined.found);
        let fault = |what: String| {
            Error::usage(
                format!(
                    "{}: part {} of {} is not at byte {offset} after the first: {what}",
                    source.label(),
                    joined.found + 1,
                    part.count
                ),
                "import the model by its first part",
            )
        };
        let next = source
            .after(offset)
            .ok_or_else(|| fault("the store ends".to_owned()))?;
        let next = match Catalog::alone(&next.at_most()) {
            Ok(next) => next,
            Err(Error::Usage { cause, .. }) => return Err(fault(cause)),
            Err(error) => return Err(error),
        };
        let bytes = next.bytes();
        let added = joined.add(next, offset, name, bytes);
        added.map_err(|what| Error::usage(format!("{}: {what}", source.label()), GET_AGAIN))?;
    }
    let found = joined.finish();
    let found =
        found.map_err(|what| Error::usage(format!("{}: {what}", source.label()), GET_AGAIN))?;
    ended(found, source)
}

/// # Errors
/// [`Error::Usage`] for a source that is longer than the file, although both should end together.
fn ended(found: Catalog, source: &StoreSource<'_>) -> Result<Catalog> {
    match source.is_exact() && found.bytes() < source.len() {
        false => Ok(found),
        true => Err(HeaderFault::Longer {
            described: found.bytes(),
            bytes: source.len(),
        }
        .of(source)),
    }
}

fn name_in_store(number: u64) -> String {
    format!("part {}", number + 1)
}

/// Names of files of a split GGUF: the part before their numbers, and their count.
struct SplitNames<'a> {
    stem: &'a str,
    number: u64,
    count: u64,
}

impl<'a> SplitNames<'a> {
    /// Splits a name such as `STEM-00001-of-00003.gguf`.
    fn of(name: &'a str) -> Option<Self> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let five = |text: &str| {
            let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse().ok()).flatten()
        };
        Some(Self {
            stem,
            number: five(number)?,
            count: five(count)?,
        })
    }

    /// Returns the name of the part `number`, from 0 on.
    fn name(&self, number: u64) -> String {
        format!("{}-{:05}-of-{:05}.gguf", self.stem, number + 1, self.count)
    }
}

/// True if the file at `path` has the name of a part of a split GGUF.
pub fn is_name_of_part(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    SplitNames::of(&name).is_some_and(|names| names.count > 1)
}

/// Opens the parts of the split GGUF whose first part is `file`, the open file at `path`; returns each with its first
/// byte.
///
/// # Errors
/// [`Error::Usage`] for another part than the first, for parts that are missing, and for parts that do not belong
/// together.
pub fn open(
    path: &Path,
    file: FileSource,
    first: Catalog,
    part: SplitPart,
) -> Result<(Catalog, Vec<(FileSource, u64)>)> {
    let fault =
        |what: String, remedy: String| Error::usage(format!("{}: {what}", path.display()), remedy);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let names = SplitNames::of(&name).filter(|names| names.count == part.count);
    let Some(names) = names else {
        let (count, number) = (part.count, part.number + 1);
        return Err(fault(
            format!(
                "it is part {number} of {count} of a split GGUF by its keys, and not by its name"
            ),
            format!(
                "give the files the names that llama.cpp looks for: NAME-{number:05}-of-{count:05}.gguf"
            ),
        ));
    };
    if names.number != part.number + 1 {
        return Err(fault(
            format!(
                "it is part {} of {} by its keys",
                part.number + 1,
                part.count
            ),
            GET_AGAIN.to_owned(),
        ));
    }
    if part.number != 0 {
        let first = names.name(0);
        return Err(fault(
            format!(
                "it is part {} of {} of a split GGUF",
                part.number + 1,
                part.count
            ),
            format!("name the first part, {first}, by which all are found"),
        ));
    }
    let folder = path.parent().unwrap_or(Path::new(""));
    let others: Vec<PathBuf> = (1..part.count)
        .map(|one| folder.join(names.name(one)))
        .collect();
    let missing = others.iter().filter(|one| !one.exists());
    let missing: Vec<String> = missing.map(|one| shown(one)).collect();
    if !missing.is_empty() {
        return Err(fault(
            format!(
                "{} of {} parts are missing: {}",
                missing.len(),
                part.count,
                listed(&missing)
            ),
            GET_AGAIN.to_owned(),
        ));
    }
    let bytes = file.len();
    let mut joined = JoinedParts::new(first, part, name.clone().into_owned(), bytes);
    let mut files = vec![(file, 0)];
    for other in &others {
        let Some(offset) = joined.next() else {
            return Err(Error::internal("parts that end past 2^64"));
        };
        let file = FileSource::open(other)?;
        let added = joined.add(Catalog::alone(&file)?, offset, shown(other), file.len());
        added.map_err(|what| Error::usage(format!("{}: {what}", other.display()), GET_AGAIN))?;
        files.push((file, offset));
    }
    let all = joined.finish();
    Ok((
        all.map_err(|what| fault(what, GET_AGAIN.to_owned()))?,
        files,
    ))
}

fn shown(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}
