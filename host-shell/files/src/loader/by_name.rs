//! Division of tensors into layers, by their names.
//!
//! The names come from a file, which may have as many as fit into its header: each is examined once, and looked up
//! by bisection or by its hash, so that a hostile header costs no quadratic time.

use super::plan::{LayerPlan, ModelLayers};
use crate::catalog::TensorEntry;
use nvme_driver::error::{Error, Result};
use nvme_driver::words::shortened;
use std::collections::{BTreeMap, HashMap};

impl ModelLayers {
    /// Makes a layer for each prefix, of the tensors whose names begin with it. A tensor belongs to the longest
    /// prefix that matches.
    ///
    /// # Errors
    /// [`Error::Usage`] for no prefixes, for one that no tensor has, and for a duplicate.
    pub fn by_prefix(
        tensors: &(impl AsRef<[TensorEntry]> + ?Sized),
        prefixes: &[impl AsRef<str>],
    ) -> Result<Self> {
        let prefixes: Vec<&str> = prefixes.iter().map(AsRef::as_ref).collect();
        let found = of_longest(tensors.as_ref(), &prefixes);
        let mut layers = Vec::with_capacity(prefixes.len());
        for (prefix, entries) in prefixes.into_iter().zip(found) {
            if entries.is_empty() {
                return Err(Error::usage(
                    format!("no tensor is left for a layer '{}'", shortened(prefix)),
                    "give each layer a prefix of its own that names of tensors begin with",
                ));
            }
            layers.push(LayerPlan::of_entries(prefix.to_owned(), entries)?);
        }
        Self::of(layers)
    }

    /// Makes a layer for each number in the tensors' names, as in `model.layers.7.` and `blk.7.`: the part up
    /// to the first number between dots. Tensors without one are in no layer.
    ///
    /// # Errors
    /// [`Error::Usage`] for tensors without such names.
    pub fn numbered(tensors: &(impl AsRef<[TensorEntry]> + ?Sized)) -> Result<Self> {
        // The stems in the order of their data, each with its numbers in that order.
        let mut stems: HashMap<&str, usize> = HashMap::new();
        let mut found: BTreeMap<(usize, u64, &str), Vec<&TensorEntry>> = BTreeMap::new();
        for entry in tensors.as_ref() {
            let Some((stem, number, prefix)) = numbered_prefix(&entry.name) else {
                continue;
            };
            let next = stems.len();
            let stem = *stems.entry(stem).or_insert(next);
            found.entry((stem, number, prefix)).or_default().push(entry);
        }
        let layers = found
            .into_iter()
            .map(|((_, _, prefix), entries)| LayerPlan::of_entries(prefix.to_owned(), entries));
        Self::of(layers.collect::<Result<_>>()?)
    }

    /// Makes a layer of each list of tensors' names.
    ///
    /// # Errors
    /// [`Error::Usage`] for no lists, and for a tensor that is not there.
    pub fn of_names<L, T>(
        tensors: &(impl AsRef<[TensorEntry]> + ?Sized),
        layers: impl IntoIterator<Item = (L, Vec<T>)>,
    ) -> Result<Self>
    where
        L: Into<String>,
        T: AsRef<str>,
    {
        let mut known: HashMap<&str, &TensorEntry> = HashMap::new();
        for entry in tensors.as_ref() {
            known.entry(&entry.name).or_insert(entry);
        }
        let layers = layers.into_iter().map(|(name, names)| {
            let entries = names.iter().map(|tensor| {
                let tensor = tensor.as_ref();
                known.get(tensor).copied().ok_or_else(|| {
                    let cause = format!("there is no tensor '{}'", shortened(tensor));
                    Error::usage(cause, "use names of the catalog's tensors")
                })
            });
            LayerPlan::of_entries(name.into(), entries.collect::<Result<_>>()?)
        });
        Self::of(layers.collect::<Result<_>>()?)
    }
}

/// Returns for each prefix the tensors whose longest matching prefix it is; of equal prefixes the first has
/// them.
fn of_longest<'a>(tensors: &'a [TensorEntry], prefixes: &[&str]) -> Vec<Vec<&'a TensorEntry>> {
    let mut found = vec![Vec::new(); prefixes.len()];
    let mut tensors: Vec<&TensorEntry> = tensors.iter().collect();
    tensors.sort_by_key(|entry| entry.name.as_str());
    let mut places: Vec<usize> = (0..prefixes.len()).collect();
    places.sort_by_key(|place| prefixes[*place]);
    // In the order of names a prefix comes before all names that begin with it: the names with which the current name
    // begins are on a stack, the longest on top.
    let mut stack: Vec<usize> = Vec::new();
    let mut places = places.into_iter().peekable();
    let close = |stack: &mut Vec<usize>, name: &str| {
        while stack
            .pop_if(|top| !name.starts_with(prefixes[*top]))
            .is_some()
        {}
    };
    for entry in tensors {
        while let Some(place) = places.next_if(|place| prefixes[*place] <= entry.name.as_str()) {
            close(&mut stack, prefixes[place]);
            if stack
                .last()
                .is_none_or(|top| prefixes[*top] != prefixes[place])
            {
                stack.push(place);
            }
        }
        close(&mut stack, &entry.name);
        if let Some(top) = stack.last() {
            found[*top].push(entry);
        }
    }
    found
}

/// Splits `model.layers.7.mlp.weight` into `model.layers.`, 7, and `model.layers.7.`.
fn numbered_prefix(name: &str) -> Option<(&str, u64, &str)> {
    let mut begin = 0;
    while let Some(dot) = name[begin..].find('.') {
        let end = begin + dot;
        let is_number = end > begin && name[begin..end].bytes().all(|one| one.is_ascii_digit());
        if is_number && let Ok(number) = name[begin..end].parse() {
            return Some((&name[..begin], number, &name[..=end]));
        }
        begin = end + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Dtype;

    fn entry(name: String, offset: u64) -> TensorEntry {
        TensorEntry {
            name,
            dtype: Dtype::U8,
            shape: vec![8],
            offset,
            bytes: 8,
        }
    }

    /// Returns as many tensors as a header of a few megabytes has, each with another stem.
    fn many() -> Vec<TensorEntry> {
        let names = (0..200_000u64).map(|one| (format!("stem{one}.{}.w", one % 7), one * 8));
        names.map(|(name, offset)| entry(name, offset)).collect()
    }

    #[test]
    fn many_stems_make_many_layers() {
        let all = many();
        let layers = ModelLayers::numbered(&all).unwrap();
        assert_eq!(layers.len(), all.len());
        for (place, layer) in layers.iter().enumerate() {
            assert_eq!(layers.position(layer.name()), Some(place));
            assert_eq!(layer.tensor("w").unwrap().name, all[place].name);
        }
    }

    #[test]
    fn many_names_and_prefixes_are_found_each_by_itself() {
        let all = many();
        let names: Vec<&str> = all.iter().rev().map(|one| one.name.as_str()).collect();
        let layers = ModelLayers::of_names(&all, [("all", names.clone())]).unwrap();
        let layer = layers.get(0).unwrap();
        assert_eq!(layer.tensors().len(), all.len());
        assert!(names.iter().all(|name| layer.tensor(name).is_some()));
        let layers = ModelLayers::by_prefix(&all, &names).unwrap();
        assert_eq!(layers.len(), all.len());
    }

    #[test]
    fn nested_prefixes_have_what_no_longer_one_has() {
        let names = ["", "a", "ab", "abc", "abd", "ac", "b", "ba", "c"];
        let all: Vec<TensorEntry> = names
            .iter()
            .zip(0..)
            .map(|(name, at)| entry((*name).to_owned(), at * 8))
            .collect();
        let prefixes = ["ab", "", "a", "b", "abd", "ab", "ad"];
        let found = of_longest(&all, &prefixes);
        let found: Vec<Vec<&str>> = found
            .iter()
            .map(|of| of.iter().map(|one| one.name.as_str()).collect())
            .collect();
        assert_eq!(
            found,
            [
                vec!["ab", "abc"],
                vec!["", "c"],
                vec!["a", "ac"],
                vec!["b", "ba"],
                vec!["abd"],
                vec![],
                vec![]
            ]
        );
    }
}
