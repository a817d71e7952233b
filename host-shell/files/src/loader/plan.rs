//! Layout of layers: the bytes of a store that belong to a layer, the reads that fetch them, and the offsets of the
//! tensors in the layer's memory.

use super::chunk::LayerChunk;
use crate::catalog::{Dtype, TensorEntry};
use crate::names::NameIndex;
use nvme_driver::error::{Error, Result};
use nvme_driver::words::shortened;
use std::ops::Range;
use std::sync::Arc;

/// Tensors that begin at a multiple of this from each other are read by one read.
const ALIGNMENT: u64 = 64;
/// Limit in bytes of a gap between two tensors that is read along with them, to save a read.
const MOST_GAP: u64 = 16 << 10;

/// The layers of a model in their order: names, tensors, and the ranges of bytes that are read for each. Tensors come
/// from a [`Catalog`](crate::Catalog), or a list of [`TensorEntry`].
///
/// ```
/// use nvme_files::loader::ModelLayers;
///
/// # fn main() -> nvme_driver::Result<()> {
/// let layers = ModelLayers::of_ranges([("first", 4096..8192), ("second", 10_000..10_100)])?;
/// assert_eq!((layers.len(), layers.get(1).unwrap().bytes()), (2, 100));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModelLayers {
    pub(super) layers: Vec<LayerPlan>,
    by_name: NameIndex,
}

/// A layer: its tensors, and the reads that fetch them.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPlan {
    name: String,
    pieces: Vec<LayerPiece>,
    tensors: Vec<LayerTensor>,
    by_name: NameIndex,
    bytes: u64,
    pub(super) chunks: Arc<[LayerChunk]>,
}

/// A range of the store, and its offset in the layer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPiece {
    /// First byte in the store.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// First byte in the layer's memory.
    pub at: u64,
}

/// A tensor of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTensor {
    /// Name of the tensor in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Lengths, the slowest first.
    pub shape: Vec<u64>,
    /// First byte in the layer's memory: a multiple of 64.
    pub at: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl LayerPlan {
    /// Returns the layer's name: the beginning of its tensors' names.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the reads of the layer, in the order of its memory.
    pub fn pieces(&self) -> &[LayerPiece] {
        &self.pieces
    }

    /// Returns its tensors, in the order of their data.
    pub fn tensors(&self) -> &[LayerTensor] {
        &self.tensors
    }

    /// Returns the tensor with this name, whole or without the layer's name before it.
    pub fn tensor(&self, name: &str) -> Option<&LayerTensor> {
        let name_of = |place: usize| self.tensors[place].name.as_str();
        let find = |name: &str| self.by_name.find(name_of, name);
        let place = find(name).or_else(|| find(&format!("{}{name}", self.name)))?;
        self.tensors.get(place)
    }

    /// Returns the number of bytes of memory that the layer takes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of bytes that are read for it.
    pub fn read_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    fn without_tensors(name: String) -> Self {
        Self {
            name,
            pieces: Vec::new(),
            tensors: Vec::new(),
            by_name: NameIndex::default(),
            bytes: 0,
            chunks: Arc::default(),
        }
    }

    pub(super) fn of_entries(name: String, mut entries: Vec<&TensorEntry>) -> Result<Self> {
        entries.sort_by_key(|entry| (entry.offset, entry.bytes));
        let mut plan = Self::without_tensors(name);
        for entry in entries {
            let at = plan.room_for(entry.offset, entry.bytes)?;
            plan.tensors.push(LayerTensor {
                name: entry.name.clone(),
                dtype: entry.dtype,
                shape: entry.shape.clone(),
                at,
                bytes: entry.bytes,
            });
        }
        plan.by_name = NameIndex::of(plan.tensors.iter().map(|tensor| tensor.name.as_str()));
        Ok(plan)
    }

    /// Appends a range of the store, which begins after all before it, and returns its position in the layer's
    /// memory: extends the last read when the gap is at most [`MOST_GAP`], else starts another one.
    fn room_for(&mut self, offset: u64, bytes: u64) -> Result<u64> {
        let end = offset.checked_add(bytes);
        let end = end.ok_or_else(|| too_long(&self.name))?;
        if let Some(last) = self.pieces.last_mut() {
            let past = last.offset + last.bytes;
            let is_close = offset >= past && offset - past <= MOST_GAP;
            if is_close && (offset - last.offset).is_multiple_of(ALIGNMENT) {
                last.bytes = end - last.offset;
                self.bytes = last.at + last.bytes;
                return Ok(last.at + (offset - last.offset));
            }
        }
        let at = self.bytes.checked_next_multiple_of(ALIGNMENT);
        let at = at.filter(|at| at.checked_add(bytes).is_some());
        let at = at.ok_or_else(|| too_long(&self.name))?;
        if bytes > 0 {
            self.pieces.push(LayerPiece { offset, bytes, at });
            self.bytes = at + bytes;
        }
        Ok(at)
    }
}

impl ModelLayers {
    /// Makes a layer of each range of bytes, without tensors.
    ///
    /// # Errors
    /// [`Error::Usage`] for no ranges, and for a range that ends before it begins.
    pub fn of_ranges<N: Into<String>>(
        ranges: impl IntoIterator<Item = (N, Range<u64>)>,
    ) -> Result<Self> {
        Self::of_parts(ranges.into_iter().map(|(name, range)| (name, [range])))
    }

    /// Makes a layer of each list of byte ranges, which are concatenated in the layer's memory: a file in
    /// several pieces ([`DriveFile::pieces`](crate::files::DriveFile::pieces)).
    ///
    /// # Errors
    /// As [`of_ranges`](Self::of_ranges); for layers of 2^64 bytes and more.
    pub fn of_parts<N: Into<String>, P: IntoIterator<Item = Range<u64>>>(
        layers: impl IntoIterator<Item = (N, P)>,
    ) -> Result<Self> {
        let layers = layers.into_iter().map(|(name, parts)| {
            let mut plan = LayerPlan::without_tensors(name.into());
            for part in parts {
                let bytes = part.end.checked_sub(part.start).ok_or_else(|| {
                    let cause =
                        format!("layer {}: bytes {} to {}", plan.name, part.start, part.end);
                    Error::usage(cause, "give ranges that end behind their begin")
                })?;
                let at = plan.bytes;
                let end = at.checked_add(bytes);
                plan.bytes = end.ok_or_else(|| too_long(&plan.name))?;
                if bytes > 0 {
                    let offset = part.start;
                    plan.pieces.push(LayerPiece { offset, bytes, at });
                }
            }
            Ok(plan)
        });
        Self::of(layers.collect::<Result<_>>()?)
    }

    /// Translates layers of a file to their offsets in the store: `places` returns the ranges that hold a number of
    /// bytes from an offset of the file on, in their order, as [`DriveFile::pieces`](crate::files::DriveFile::pieces)
    /// does.
    ///
    /// # Errors
    /// The errors of `places`, with the name of the layer; [`Error::Internal`] for ranges of another total length.
    pub fn placed(mut self, places: impl Fn(u64, u64) -> Result<Vec<Range<u64>>>) -> Result<Self> {
        for layer in &mut self.layers {
            let mut pieces = Vec::with_capacity(layer.pieces.len());
            for piece in &layer.pieces {
                let found = places(piece.offset, piece.bytes);
                let found =
                    found.map_err(|error| error.with_context(&format!("layer {}", layer.name)))?;
                let mut at = piece.at;
                for range in found {
                    let bytes = range.end.saturating_sub(range.start);
                    let offset = range.start;
                    pieces.push(LayerPiece { offset, bytes, at });
                    at = at.saturating_add(bytes);
                }
                if at != piece.at + piece.bytes {
                    let cause = format!("places of {} bytes for {}", at - piece.at, piece.bytes);
                    return Err(Error::internal(cause));
                }
            }
            layer.pieces = pieces;
        }
        Ok(self)
    }

    pub(super) fn of(layers: Vec<LayerPlan>) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::usage(
                "there are no layers",
                "give prefixes of tensors' names, such as 'model.layers.0.', or ranges of bytes",
            ));
        }
        Ok(Self {
            by_name: NameIndex::of(layers.iter().map(LayerPlan::name)),
            layers,
        })
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// True if there are no layers: never.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Returns layer `index`.
    pub fn get(&self, index: usize) -> Option<&LayerPlan> {
        self.layers.get(index)
    }

    pub(super) fn all(&self) -> &[LayerPlan] {
        &self.layers
    }

    /// Returns all of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &LayerPlan> {
        self.layers.iter()
    }

    /// Returns the number of the layer with this name.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.by_name.find(|place| self.layers[place].name(), name)
    }
}

fn too_long(name: &str) -> Error {
    Error::usage(
        format!("layer {} is longer than memory can be", shortened(name)),
        "check the ranges of the layer",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Catalog;

    /// Returns a catalog of tensors of bytes: name, first byte of the data, and bytes; the data begin at `base`.
    fn catalog(tensors: &[(&str, u64, u64)]) -> Catalog {
        let header = tensors.iter().map(|(name, at, bytes)| {
            format!(
                r#""{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{at},{}]}}"#,
                at + bytes
            )
        });
        let mut header = format!("{{{}}}", header.collect::<Vec<_>>().join(","));
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        let data = tensors.iter().map(|(_, at, bytes)| at + bytes).max();
        file.resize(file.len() + data.unwrap() as usize, 0);
        Catalog::of(&file.as_slice()).unwrap()
    }

    #[test]
    fn numbers_in_names_make_layers_in_their_order() {
        let catalog = catalog(&[
            ("embed", 0, 8),
            ("enc.layers.10.w", 8, 8),
            ("enc.layers.2.w", 16, 8),
            ("enc.layers.2.b", 24, 8),
            ("dec.0.w", 32, 8),
            ("v1.5x.norm", 40, 8),
        ]);
        let layers = ModelLayers::numbered(&catalog).unwrap();
        let names: Vec<_> = layers.iter().map(LayerPlan::name).collect();
        assert_eq!(names, ["enc.layers.2.", "enc.layers.10.", "dec.0."]);
        let second = layers.get(0).unwrap();
        assert_eq!(second.tensors().len(), 2);
        assert_eq!(
            second.tensor("w").unwrap(),
            second.tensor("enc.layers.2.w").unwrap()
        );
        assert_eq!(layers.position("dec.0."), Some(2));
        assert!(second.tensor("x").is_none() && layers.get(3).is_none());
    }

    #[test]
    fn tensors_that_lie_close_are_one_read_and_each_is_aligned() {
        let catalog = catalog(&[
            ("a.x", 0, 64),
            ("a.y", 64, 100),
            // 164 is no multiple of 64 behind the first: another read.
            ("a.z", 164, 28),
            ("b.x", 192, 20_000),
            ("a.far", 20_192, 64),
        ]);
        let base = catalog.get("a.x").unwrap().offset;
        let layers = ModelLayers::by_prefix(&catalog, &["a.", "b."]).unwrap();
        let a = layers.get(0).unwrap();
        let pieces: Vec<_> = a
            .pieces()
            .iter()
            .map(|piece| (piece.offset - base, piece.bytes, piece.at))
            .collect();
        assert_eq!(pieces, [(0, 164, 0), (164, 28, 192), (20_192, 64, 256)]);
        let places: Vec<_> = a.tensors().iter().map(|tensor| tensor.at).collect();
        assert_eq!(places, [0, 64, 192, 256]);
        assert_eq!((a.bytes(), a.read_bytes()), (320, 256));
    }

    #[test]
    fn placed_layers_are_read_in_the_pieces_of_their_file() {
        let layers =
            ModelLayers::of_parts([("a", vec![10..30, 50..55]), ("none", vec![])]).unwrap();
        let placed = layers.clone().placed(|offset, bytes| {
            let half = offset + bytes / 2;
            Ok(vec![
                1000 + offset..1000 + half,
                5000 + half..5000 + offset + bytes,
            ])
        });
        let pieces = placed.unwrap().get(0).unwrap().pieces().to_vec();
        let pieces: Vec<_> = pieces
            .iter()
            .map(|one| (one.offset, one.bytes, one.at))
            .collect();
        assert_eq!(
            pieces,
            [(1010, 10, 0), (5020, 10, 10), (1050, 2, 20), (5052, 3, 22)]
        );
        for wrong in [0..3, 7..7, 0..u64::MAX] {
            let refused = layers.clone().placed(|_, _| Ok(vec![wrong.clone()]));
            assert!(matches!(refused, Err(Error::Internal { .. })));
        }
        let refused = layers.placed(|_, _| Err(Error::usage("x", "y")));
        assert_eq!(refused.unwrap_err().to_string(), "layer a: x");
    }

    #[test]
    fn gaps_are_read_when_they_are_small() {
        let catalog = catalog(&[("a.x", 0, 64), ("b.x", 64, 64), ("a.y", 128, 64)]);
        let layers = ModelLayers::by_prefix(&catalog, &["a."]).unwrap();
        let a = layers.get(0).unwrap();
        assert_eq!((a.pieces().len(), a.read_bytes()), (1, 192));
        assert_eq!(a.tensor("y").unwrap().at, 128);
    }

    #[test]
    fn the_longest_prefix_has_a_tensor() {
        let catalog = catalog(&[("out.w", 0, 8), ("out_norm.w", 8, 8)]);
        let layers = ModelLayers::by_prefix(&catalog, &["out", "out_norm"]).unwrap();
        let first = layers.iter().map(|layer| layer.tensors()[0].name.as_str());
        assert_eq!(first.collect::<Vec<_>>(), ["out.w", "out_norm.w"]);
        let layers =
            ModelLayers::of_names(&catalog, [("both", vec!["out.w", "out_norm.w"])]).unwrap();
        assert_eq!(layers.get(0).unwrap().tensors().len(), 2);
    }

    #[test]
    fn what_names_no_layer_is_refused() {
        let catalog = catalog(&[("a.w", 0, 8)]);
        let none: [&str; 0] = [];
        for (refused, what) in [
            (ModelLayers::by_prefix(&catalog, &none), "no layers"),
            (ModelLayers::by_prefix(&catalog, &["b"]), "'b'"),
            (ModelLayers::by_prefix(&catalog, &["a", "a"]), "'a'"),
            (ModelLayers::numbered(&catalog), "no layers"),
            (ModelLayers::of_names(&catalog, [("x", vec!["b"])]), "'b'"),
            (
                ModelLayers::of_ranges([("x", Range { start: 2, end: 1 })]),
                "2 to 1",
            ),
        ] {
            let error = refused.unwrap_err();
            assert!(matches!(&error, Error::Usage { .. }), "{error}");
            assert!(error.to_string().contains(what), "{error}");
        }
        let empty = ModelLayers::of_ranges([("x", 5..5)]).unwrap();
        assert!(empty.get(0).unwrap().pieces().is_empty() && !empty.is_empty());
    }
}
