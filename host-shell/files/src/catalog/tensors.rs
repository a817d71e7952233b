//! Tensors of a file, found by name without a search through all of them.

use super::entry::TensorEntry;
use crate::names::NameIndex;
use serde::{Serialize, Serializer};

/// Tensors in the order of their data, with an index of their names.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct TensorList {
    entries: Vec<TensorEntry>,
    by_name: NameIndex,
}

impl From<Vec<TensorEntry>> for TensorList {
    fn from(entries: Vec<TensorEntry>) -> Self {
        Self {
            by_name: NameIndex::of(entries.iter().map(|entry| entry.name.as_str())),
            entries,
        }
    }
}

impl TensorList {
    pub fn all(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// Returns the tensors without the index, so that others can be added.
    pub fn into_entries(self) -> Vec<TensorEntry> {
        self.entries
    }

    /// Returns the tensor with this name.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        let place = self.by_name.find(|place| self.name(place), name)?;
        self.entries.get(place)
    }

    /// Returns the tensors whose names begin with `prefix`, in the order of their names.
    pub fn with_prefix(&self, prefix: &str) -> impl Iterator<Item = &TensorEntry> {
        let places = self.by_name.with_prefix(|place| self.name(place), prefix);
        places.iter().map(|place| &self.entries[*place])
    }

    /// Moves all data by `offset` bytes.
    pub fn shift(&mut self, offset: u64) {
        for entry in &mut self.entries {
            entry.offset += offset;
        }
    }

    fn name(&self, place: usize) -> &str {
        &self.entries[place].name
    }
}

/// The tensors alone, as a list.
impl Serialize for TensorList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.entries.serialize(serializer)
    }
}
