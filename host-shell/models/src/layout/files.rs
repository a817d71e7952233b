//! The files of a model on a store, and the experts in them.

use super::bank::{BankTensor, ExpertBank};
use super::checked::{self, ExpertLayout};
use super::names::{NamedTensor, layer_of, parsed};
use nvme_host::catalog::{HeaderSource, set_of};
use nvme_host::files::{DriveFile, PlacedFile};
use nvme_host::words::listed;
use nvme_host::{Catalog, Error, Result, Store, StoreOptions};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A file of tensors whose bytes a store reads.
pub trait PlacedTensors: Send + Sync {
    /// Returns the bytes of the file.
    fn source(&self) -> &dyn HeaderSource;

    /// Returns where the `bytes` bytes from byte `offset` of the file on lie in the store.
    ///
    /// # Errors
    /// [`Error::Usage`] for bytes in a hole or past the end.
    fn pieces(&self, offset: u64, bytes: u64) -> Result<Vec<Range<u64>>>;
}

impl PlacedTensors for DriveFile {
    fn source(&self) -> &dyn HeaderSource {
        self
    }

    fn pieces(&self, offset: u64, bytes: u64) -> Result<Vec<Range<u64>>> {
        Self::pieces(self, offset, bytes)
    }
}

impl PlacedTensors for PlacedFile {
    fn source(&self) -> &dyn HeaderSource {
        self
    }

    fn pieces(&self, offset: u64, bytes: u64) -> Result<Vec<Range<u64>>> {
        Self::pieces(self, offset, bytes)
    }
}

/// A file that lies in a store as one range.
pub struct StoreRegion {
    store: Arc<Store>,
    name: String,
    offset: u64,
    bytes: u64,
    is_exact: bool,
}

impl StoreRegion {
    /// Describes the file of `bytes` bytes from byte `offset` of `store` on, which messages call `name`. Without `bytes`
    /// its header tells where it ends.
    ///
    /// # Errors
    /// [`Error::Usage`] for a range past the store.
    pub fn new(store: &Arc<Store>, name: &str, offset: u64, bytes: Option<u64>) -> Result<Self> {
        let left = store.len().checked_sub(offset);
        let have = left.filter(|left| bytes.is_none_or(|bytes| bytes <= *left));
        let have = have.ok_or_else(|| {
            Error::usage(
                format!(
                    "{name} at byte {offset} ends past the store, which has {} bytes",
                    store.len()
                ),
                "use a range of the store",
            )
        })?;
        Ok(Self {
            store: Arc::clone(store),
            name: name.to_owned(),
            offset,
            bytes: bytes.unwrap_or(have),
            is_exact: bytes.is_some(),
        })
    }
}

impl HeaderSource for StoreRegion {
    fn len(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        let read = self.store.read_at(self.offset + offset, data);
        read.map_err(|error| error.with_context(&self.name))
    }

    fn is_exact(&self) -> bool {
        self.is_exact
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

impl PlacedTensors for StoreRegion {
    fn source(&self) -> &dyn HeaderSource {
        self
    }

    fn pieces(&self, offset: u64, bytes: u64) -> Result<Vec<Range<u64>>> {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes);
        match end {
            Some(_) if bytes == 0 => Ok(Vec::new()),
            Some(end) => Ok(std::iter::once(self.offset + offset..self.offset + end).collect()),
            None => Err(Error::usage(
                format!("{} has no {bytes} bytes from byte {offset} on", self.name),
                "use bytes of the file",
            )),
        }
    }
}

/// The files of a model, and the experts in them.
pub struct ExpertFiles {
    store: Arc<Store>,
    files: Vec<Arc<dyn PlacedTensors>>,
    banks: BTreeMap<String, ExpertBank>,
}

impl ExpertFiles {
    /// Opens the files that `path` names: an index of safetensors, the first part of a split GGUF, which stand for all
    /// their files, or one file.
    ///
    /// # Errors
    /// As [`Catalog::of_file`], and [`of`](Self::of).
    pub fn open(path: &Path) -> Result<Self> {
        let set = set_of(path)?;
        let paths = match set {
            Some(set) => set.into_iter().map(|(path, _)| path).collect(),
            None => vec![path.to_owned()],
        };
        let open = |path: &std::path::PathBuf| {
            let device = format!("file:{}", path.display());
            Store::open(&device, &StoreOptions::default())
        };
        let stores = paths.iter().map(open).collect::<Result<Vec<_>>>()?;
        let store = Arc::new(Store::join(stores)?);
        let members = store.member_offsets().into_iter().zip(&paths);
        let files = members.map(|((offset, bytes), path)| {
            let name = path.display().to_string();
            let region = StoreRegion::new(&store, &name, offset, Some(bytes))?;
            Ok(Arc::new(region) as Arc<dyn PlacedTensors>)
        });
        let files = files.collect::<Result<_>>()?;
        Self::of(&store, files)
    }

    /// Finds the experts of a model whose files lie one after another in `store` from byte `offset` on, as
    /// [`Catalog::import`] writes a single file or a split GGUF; `bytes` is their length, if it is known.
    ///
    /// # Errors
    /// As [`Catalog::of_store`], [`Catalog::of_range`] and [`of`](Self::of).
    pub fn in_store(store: &Arc<Store>, offset: u64, bytes: Option<u64>) -> Result<Self> {
        let catalog = match bytes {
            Some(bytes) => Catalog::of_range(store, offset, bytes)?,
            None => Catalog::of_store(store, offset)?,
        };
        let whole = StoreRegion::new(store, "the store", 0, Some(store.len()))?;
        Ok(Self::found(store, vec![Arc::new(whole)], vec![catalog]))
    }

    /// Finds the experts of a model in `files`, which `store` reads. The parts of a split GGUF are named in their
    /// order, all of them; other files in any order.
    ///
    /// # Errors
    /// As [`Catalog::of_files`].
    pub fn of(store: &Arc<Store>, files: Vec<Arc<dyn PlacedTensors>>) -> Result<Self> {
        let sources: Vec<&dyn HeaderSource> = files.iter().map(|file| file.source()).collect();
        let catalogs = Catalog::of_files(&sources)?;
        Ok(Self::found(store, files, catalogs))
    }

    fn found(
        store: &Arc<Store>,
        files: Vec<Arc<dyn PlacedTensors>>,
        catalogs: Vec<Catalog>,
    ) -> Self {
        let mut banks = BTreeMap::<String, ExpertBank>::new();
        let mut routers = Vec::new();
        for (file, catalog) in catalogs.iter().enumerate() {
            for entry in catalog.entries() {
                match parsed(&entry.name) {
                    Some(NamedTensor::Expert {
                        bank,
                        expert,
                        meaning,
                    }) => {
                        let tensor = BankTensor {
                            file,
                            entry: entry.clone(),
                            expert,
                            meaning,
                        };
                        match banks.get_mut(bank) {
                            Some(found) => found.tensors.push(tensor),
                            None => {
                                let found = ExpertBank {
                                    tensors: vec![tensor],
                                    router: None,
                                };
                                banks.insert(bank.to_owned(), found);
                            }
                        }
                    }
                    Some(NamedTensor::Router(parent)) => routers.push((parent, entry)),
                    None => {}
                }
            }
        }
        for (parent, entry) in routers {
            let with_experts = format!("{parent}.experts");
            let name = match banks.contains_key(parent) {
                true => parent,
                false => &with_experts,
            };
            if let Some(bank) = banks.get_mut(name) {
                bank.router = Some((entry.name.clone(), entry.shape.first().copied()));
            }
        }
        Self {
            store: Arc::clone(store),
            files,
            banks,
        }
    }

    /// Returns the store that reads the files.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Returns the numbers of the layers that have experts, in their order.
    pub fn layers(&self) -> Vec<u32> {
        let mut layers: Vec<u32> = self
            .banks
            .keys()
            .filter_map(|name| layer_of(name))
            .collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// Returns the names under which experts lie in the files: those of layers, and those of draft blocks.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.banks.keys().map(String::as_str)
    }

    /// Returns the experts of layer `layer`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a layer without experts, or with those of two models; as [`named`](Self::named).
    pub fn layer(&self, layer: u32) -> Result<ExpertLayout> {
        let names = self.names().filter(|name| layer_of(name) == Some(layer));
        match names.collect::<Vec<_>>()[..] {
            [name] => self.named(name),
            [] => Err(self.unknown(&format!("layer {layer}"))),
            ref several => Err(Error::usage(
                format!(
                    "layer {layer} has experts under several names: {}",
                    listed(several)
                ),
                "name the experts instead of the layer",
            )),
        }
    }

    /// Returns the experts under the name `name`, as [`names`](Self::names) has it.
    ///
    /// # Errors
    /// [`Error::Usage`] for a name without experts; for experts, or tensors of them, that are missing, twice there, or of
    /// another shape than the others; for tensors whose meaning is not known.
    pub fn named(&self, name: &str) -> Result<ExpertLayout> {
        match self.banks.get(name) {
            Some(bank) => checked::layout(&self.store, name, bank, &self.files),
            None => Err(self.unknown(&format!("'{name}'"))),
        }
    }

    fn unknown(&self, what: &str) -> Error {
        let names = match self.banks.is_empty() {
            true => "name files of a model with experts".to_owned(),
            false => format!("there are: {}", listed(self.names())),
        };
        Error::usage(format!("{what} has no experts in these files"), names)
    }
}

impl fmt::Debug for ExpertFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let banks = self.banks.len();
        f.debug_struct("ExpertFiles")
            .field("banks", &banks)
            .finish_non_exhaustive()
    }
}
