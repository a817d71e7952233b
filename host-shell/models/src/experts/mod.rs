//! Layers of experts on a store: a router chooses a few of them for each token, and only those are read.

#[cfg(feature = "cuda")]
mod gpu;
mod router;
mod rule;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub use gpu::{CacheOptions, ExpertStep, GpuExperts, check};
pub use nvme_compute_kernel::experts::reference::{ExpertBalance, balance, probabilities};
pub use nvme_compute_kernel::experts::{ChosenExpert, ExpertActivation, ReplacementPolicy};
pub use router::route;
#[cfg(feature = "cuda")]
pub use router::{RouteParameters, Router};
pub use rule::{RouterRule, RouterScore};

use nvme_compute::matrix::product;
use nvme_compute_kernel::experts::{ExpertLocations, MATRICES, MOST_EXPERTS, reference};
use nvme_formats::{StoredFormat, UNIT};
use nvme_host::{Error, Result, Store};
use std::sync::Arc;

/// Parameters that all layers share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertShape {
    /// Number of elements of a token's vector: columns of gate and up, rows of down.
    pub width: u32,
    /// Rows of gate and up, columns of down.
    pub hidden: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of a token.
    pub choices: u32,
    /// Weights are the softmax over all experts; else over those that were chosen.
    pub over_all: bool,
    /// Function of gate and up.
    pub activation: ExpertActivation,
}

/// Biases of a layer: for each matrix a vector for each expert, one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertBiases<'a> {
    /// `hidden` elements for each expert.
    pub gate: &'a [f32],
    /// `hidden` elements for each expert.
    pub up: &'a [f32],
    /// `width` elements for each expert.
    pub down: &'a [f32],
}

/// Location of the matrices of one kind in a layer: those of all experts in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertMatrices {
    /// The first byte in the store, an even number.
    pub offset: u64,
    /// Format of the elements.
    pub stored: StoredFormat,
}

/// Gate, up and down of a layer.
pub type Layer = [ExpertMatrices; MATRICES];

/// Counters of a cache since its creation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertCounts {
    /// Choices whose expert was in the cache.
    pub hits: u64,
    /// Choices whose expert was read from the store.
    pub misses: u64,
    /// Number of experts that were replaced by another one.
    pub evictions: u64,
    /// Selections of each expert of each layer.
    pub chosen: Vec<Vec<u64>>,
}

/// Layers of experts on a store: `down * activation(gate * x, up * x)` for each of a token's experts, added up by the
/// weights of its router.
#[derive(Clone, Debug)]
pub struct ExpertLayers {
    pub(crate) store: Arc<Store>,
    pub(crate) shape: ExpertShape,
    pub(crate) layers: Vec<Layer>,
    pub(crate) places: Vec<ExpertLocations>,
}

impl ExpertLayers {
    /// Describes the experts of `layers` on `store`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a shape that cannot be, and for matrices that end past the store.
    pub fn new(store: &Arc<Store>, shape: ExpertShape, layers: Vec<Layer>) -> Result<Self> {
        let ExpertShape {
            experts, choices, ..
        } = shape;
        if choices == 0 || choices > experts || experts > MOST_EXPERTS || layers.is_empty() {
            return Err(Error::usage(
                format!(
                    "{} layers of {experts} experts with {choices} chosen for a token is a shape without an expert, or with too many",
                    layers.len()
                ),
                format!(
                    "use a layer at least, {MOST_EXPERTS} experts at most, and 1 of them or more a token"
                ),
            ));
        }
        let places = layers.iter().map(|layer| places(store, shape, layer));
        Ok(Self {
            store: Arc::clone(store),
            shape,
            places: places.collect::<Result<_>>()?,
            layers,
        })
    }

    /// Returns the parameters that all layers share.
    pub fn shape(&self) -> ExpertShape {
        self.shape
    }

    /// Returns the number of layers.
    pub fn layers(&self) -> u32 {
        self.layers.len() as u32
    }

    /// Returns the number of bytes of an expert of layer `layer`, or 0.
    pub fn bytes(&self, layer: u32) -> u64 {
        let places = self.places.get(layer as usize);
        places.map_or(0, |places| places.bytes.iter().sum())
    }

    /// Returns the number of bytes of a slot of memory for an expert of any layer.
    pub fn slot_bytes(&self) -> u64 {
        let each = self.places.iter().map(ExpertLocations::slot_bytes);
        each.max().unwrap_or(0).max(16)
    }

    /// Computes the experts' results for tokens `x`, whose router says `logits`, by threads of the CPU: each
    /// token's are added up.
    ///
    /// # Errors
    /// [`Error::Usage`] for a layer that is not there, and vectors of other lengths; the errors of [`Store::read_at`].
    pub fn compute(
        &self,
        layer: u32,
        logits: &[f32],
        x: &[f32],
        biases: Option<ExpertBiases<'_>>,
    ) -> Result<Vec<f32>> {
        let shape = self.shape;
        let (width, experts) = (shape.width as usize, shape.experts as usize);
        let tokens = x.len() / width;
        if layer >= self.layers() || logits.len() != tokens * experts || x.len() != tokens * width {
            return Err(Error::usage(
                format!(
                    "layer {layer} does not exist, or {} logits and {} elements of vectors are not those of whole tokens",
                    logits.len(),
                    x.len()
                ),
                format!(
                    "use a layer below {}, and {experts} logits and {width} elements a token",
                    self.layers()
                ),
            ));
        }
        let mut y = vec![0.0; x.len()];
        let each = y.chunks_mut(width).zip(x.chunks(width));
        for ((y, x), logits) in each.zip(logits.chunks(experts)) {
            for chosen in reference::route(logits, shape.choices as usize, shape.over_all) {
                let product = |matrix, x: &[f32]| self.product(layer, matrix, chosen.expert, x);
                let (mut gate, mut up) = (product(0, x)?, product(1, x)?);
                if let Some(biases) = biases {
                    add_row(&mut gate, biases.gate, chosen.expert)?;
                    add_row(&mut up, biases.up, chosen.expert)?;
                }
                shape.activation.apply(&mut gate, &up);
                let mut down = product(2, &gate)?;
                if let Some(biases) = biases {
                    add_row(&mut down, biases.down, chosen.expert)?;
                }
                for (y, down) in y.iter_mut().zip(down) {
                    *y += chosen.weight * down;
                }
            }
        }
        Ok(y)
    }

    /// Computes the product of a matrix of an expert and `x`.
    fn product(&self, layer: u32, matrix: usize, expert: u32, x: &[f32]) -> Result<Vec<f32>> {
        let (placed, places) = (
            self.layers[layer as usize][matrix],
            self.places[layer as usize],
        );
        let mut bytes = vec![0; places.bytes[matrix] as usize];
        self.store
            .read_at(places.byte(matrix, expert), &mut bytes)?;
        let (rows, _) = shape_of(self.shape, matrix);
        let mut y = vec![0.0; rows as usize];
        product(placed.stored, &bytes, x, &mut y);
        Ok(y)
    }
}

/// Adds row `expert` of a bias to `y`.
fn add_row(y: &mut [f32], bias: &[f32], expert: u32) -> Result<()> {
    let Some(row) = bias.chunks_exact(y.len()).nth(expert as usize) else {
        return Err(Error::usage(
            format!(
                "a bias of {} numbers has no row for expert {expert}",
                bias.len()
            ),
            format!("use {} numbers for each expert", y.len()),
        ));
    };
    y.iter_mut().zip(row).for_each(|(y, bias)| *y += bias);
    Ok(())
}

/// Returns the rows and columns of a matrix.
pub(crate) fn shape_of(shape: ExpertShape, matrix: usize) -> (u32, u32) {
    match matrix {
        2 => (shape.width, shape.hidden),
        _ => (shape.hidden, shape.width),
    }
}

fn places(store: &Arc<Store>, shape: ExpertShape, layer: &Layer) -> Result<ExpertLocations> {
    let mut places = ExpertLocations::default();
    for (matrix, placed) in layer.iter().enumerate() {
        let (rows, columns) = shape_of(shape, matrix);
        let row_bytes = placed.stored.row_bytes(columns);
        let bytes = row_bytes.and_then(|bytes| bytes.checked_mul(rows.into()));
        let (elements, _) = placed.stored.block();
        let bytes = bytes.filter(|bytes| *bytes > 0 && placed.offset.is_multiple_of(2));
        let Some(bytes) = bytes else {
            return Err(Error::usage(
                format!(
                    "a matrix of {rows} x {columns} {} at byte {} does not consist of whole blocks of the format at an even offset",
                    placed.stored.name(),
                    placed.offset
                ),
                format!(
                    "use multiples of {} for width and hidden, and even offsets",
                    elements.max(UNIT)
                ),
            ));
        };
        // Checks the end.
        store.table(placed.offset, shape.experts.into(), bytes)?;
        (places.first[matrix], places.bytes[matrix]) = (placed.offset, bytes);
    }
    Ok(places)
}
