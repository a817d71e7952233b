//! Files of tensors by path: one file, or the index of a model in several safetensors files. Files that the index
//! does not name are left out, and a file that it names and that is missing is an error.

use super::entry::CatalogFile;
use super::pairs::JsonPairs;
use super::source::{FileSource, HeaderSource};
use super::split::{self, ALIGNMENT, SplitPart};
use super::tensors::TensorList;
use super::{Catalog, CatalogFormat, MetadataValue, TensorEntry};
use nvme_driver::error::{Error, Result};
use nvme_driver::words::{listed, quoted};
use serde::Deserialize;
use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

/// Limit of the index in bytes, as for the header of a single file.
const MOST: u64 = 100_000_000;

/// The content of `model.safetensors.index.json`. A file with another key is refused, because the key's meaning is
/// unknown.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShardIndex {
    #[serde(default)]
    metadata: Option<JsonPairs<serde_json::Value>>,
    /// Names of tensors and the files that they lie in.
    weight_map: JsonPairs<String>,
}

/// Open files, and the catalog of their tensors.
pub(super) struct OpenCatalog {
    pub catalog: Catalog,
    /// Each file and its first byte in the concatenation of the files.
    pub files: Vec<(FileSource, u64)>,
}

impl Catalog {
    /// Reads the catalog of the file at `path`, with tensors at their offsets in the file.
    ///
    /// A path that ends with `.json` names the index of a model in several safetensors files of the same
    /// folder. Its catalog has the tensors that the index names, at their offsets in the concatenation of the
    /// files, where each file begins at a multiple of 4,096: the layout that [`import`](Self::import) writes.
    /// In the same way the first part of a split GGUF represents all parts, which lie in the same folder.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::Usage`] for a file of no known format, one that is truncated or longer than
    /// its header says, for an index whose files are missing or lack a tensor, and for parts that are missing
    /// or do not belong together.
    pub fn of_file(path: &Path) -> Result<Self> {
        open(path).map(|opened| opened.catalog)
    }
}

/// Opens the file, or the files of the index, at `path`.
pub(super) fn open(path: &Path) -> Result<OpenCatalog> {
    if path
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        return open_index(path);
    }
    let file = FileSource::open(path)?;
    let catalog = Catalog::alone(&file)?;
    let part = SplitPart::of(&catalog);
    match part.map_err(|fault| split::wrong(fault).of(&file))? {
        None => Ok(OpenCatalog {
            catalog,
            files: vec![(file, 0)],
        }),
        Some(part) => {
            let (catalog, files) = split::open(path, file, catalog, part)?;
            Ok(OpenCatalog { catalog, files })
        }
    }
}

/// Returns the files of the model that `path` names, and their first bytes when they lie one after another: the files
/// of an index, or of a split GGUF whose first part is named. `None` for any other file, whatever its content.
///
/// # Errors
/// As [`Catalog::of_file`], for an index, for parts, and for a file with the name of a part.
pub fn set_of(path: &Path) -> Result<Option<Vec<(PathBuf, u64)>>> {
    let is_index = path
        .extension()
        .is_some_and(|extension| extension == "json");
    let is_part = || {
        let file = FileSource::open(path)?;
        match Catalog::alone(&file) {
            Ok(found) => Ok(!matches!(SplitPart::of(&found), Ok(None))),
            // It would be taken for a model without its other parts.
            Err(error) if split::is_name_of_part(path) => Err(error),
            // A file that is no GGUF, or a damaged one, is imported as a single file of bytes.
            Err(_) => Ok(false),
        }
    };
    if !is_index && !is_part()? {
        return Ok(None);
    }
    let files = open(path)?.files.into_iter();
    Ok(Some(
        files
            .map(|(file, begin)| (file.path().to_owned(), begin))
            .collect(),
    ))
}

/// Files of an index that have been opened.
struct ShardFiles {
    catalog: Catalog,
    entries: Vec<TensorEntry>,
    files: Vec<(FileSource, u64)>,
}

impl ShardFiles {
    /// Adds the file `name` and those of its tensors that the index assigns to it; they are removed from `of_tensor`.
    fn add(
        &mut self,
        folder: &Path,
        name: &str,
        of_tensor: &mut HashMap<&str, &str>,
        fault: impl Fn(String) -> Error,
    ) -> Result<()> {
        let file = FileSource::open(&folder.join(name))?;
        let shard = Catalog::of(&file)?;
        if shard.format != CatalogFormat::Safetensors {
            return Err(fault(format!("{} is no file of safetensors", quoted(name))));
        }
        let all = &mut self.catalog;
        let offset = all.bytes.next_multiple_of(ALIGNMENT);
        all.bytes = offset + file.len();
        all.files.push(CatalogFile {
            name: name.to_owned(),
            offset,
            bytes: file.len(),
        });
        for mut entry in shard.entries.into_entries() {
            if of_tensor.get(&*entry.name) == Some(&name) {
                of_tensor.remove(&*entry.name);
                entry.offset += offset;
                self.entries.push(entry);
            }
        }
        self.files.push((file, offset));
        Ok(())
    }
}

/// # Errors
/// The missing files, as the end of a sentence.
fn check_present(folder: &Path, names: &BTreeSet<&str>) -> std::result::Result<(), String> {
    let is_missing = |name: &&&str| !folder.join(name).exists();
    let missing: Vec<&str> = names.iter().filter(is_missing).copied().collect();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{} of {} files are missing: {}",
            missing.len(),
            names.len(),
            listed(&missing)
        )),
    }
}

fn open_index(path: &Path) -> Result<OpenCatalog> {
    let fault = |what: String| {
        let remedy = "get the model's files again, all into one folder";
        Error::usage(format!("{}: {what}", path.display()), remedy)
    };
    let index = read_index(path).map_err(|error| match error {
        Ok(what) => fault(what),
        Err(error) => error,
    })?;
    let wanted = index.weight_map.0;
    let names: BTreeSet<&str> = wanted.iter().map(|(_, file)| file.as_str()).collect();
    let folder = path.parent().unwrap_or(Path::new(""));
    if let Some(name) = names.iter().find(|name| !is_plain(name)) {
        let name = quoted(name);
        return Err(fault(format!("{name} is no name of a file beside it")));
    }
    check_present(folder, &names).map_err(fault)?;
    let mut opened = ShardFiles {
        catalog: Catalog {
            format: CatalogFormat::Safetensors,
            bytes: 0,
            begin: 0,
            metadata: metadata(index.metadata.unwrap_or_default()),
            files: Vec::new(),
            entries: TensorList::default(),
        },
        entries: Vec::new(),
        files: Vec::new(),
    };
    let mut of_tensor: HashMap<&str, &str> = HashMap::new();
    of_tensor.extend(wanted.iter().map(|(name, file)| (&**name, &**file)));
    for name in names {
        opened.add(folder, name, &mut of_tensor, fault)?;
    }
    // The first in the index's order.
    let left = wanted
        .iter()
        .find(|(name, _)| of_tensor.contains_key(&**name));
    match left {
        Some((name, file)) => Err(fault(format!(
            "{} is not in {}; {} of {} tensors are missing",
            quoted(name),
            quoted(file),
            of_tensor.len(),
            wanted.len()
        ))),
        None => Ok(OpenCatalog {
            catalog: Catalog {
                entries: opened.entries.into(),
                ..opened.catalog
            },
            files: opened.files,
        }),
    }
}

/// Returns the index; else the fault of its text, or the error of reading it.
fn read_index(path: &Path) -> std::result::Result<ShardIndex, std::result::Result<String, Error>> {
    let file = FileSource::open(path).map_err(Err)?;
    if file.len() > MOST {
        return Err(Ok(format!(
            "an index of {} bytes, above {MOST}",
            file.len()
        )));
    }
    let mut text = vec![0; file.len() as usize];
    file.read_at(0, &mut text).map_err(Err)?;
    serde_json::from_slice(&text).map_err(|error| Ok(format!("no index of safetensors: {error}")))
}

/// True if `name` is a plain file name, without a folder.
fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!(parts.next(), Some(Component::Normal(part)) if part == name) && parts.next().is_none()
}

fn metadata(members: JsonPairs<serde_json::Value>) -> Vec<(String, MetadataValue)> {
    let members = members.0.into_iter();
    members.map(|(key, json)| (key, value(json))).collect()
}

/// Converts a JSON value; null, an object, or a number outside of the types of [`MetadataValue`] becomes its text.
fn value(json: serde_json::Value) -> MetadataValue {
    use serde_json::Value as Json;
    match json {
        Json::Bool(value) => MetadataValue::Bool(value),
        Json::String(text) => MetadataValue::Text(text),
        Json::Array(values) => MetadataValue::Array(values.into_iter().map(value).collect()),
        Json::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
            (Some(number), _, _) => MetadataValue::U64(number),
            (_, Some(number), _) => MetadataValue::I64(number),
            (_, _, Some(number)) => MetadataValue::F64(number),
            _ => MetadataValue::Text(number.to_string()),
        },
        other => MetadataValue::Text(other.to_string()),
    }
}
