//! Layers of experts on a store: a router chooses a few of them for each token, and only those are read.

#[cfg(feature = "cuda")]
mod gpu;
mod published;
mod router;
mod rule;
#[cfg(feature = "cuda")]
mod staged;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub use gpu::{CacheOptions, ExpertStep, GivenChoices, GpuExperts, check};
pub use nvme_compute_kernel::experts::reference::{ExpertBalance, balance, probabilities};
pub use nvme_compute_kernel::experts::{ChosenExpert, ExpertActivation, ReplacementPolicy};
pub use router::route;
#[cfg(feature = "cuda")]
pub use router::{RouteParameters, Router};
pub use rule::{RouterRule, RouterScore};

use crate::layout::ExpertLayout;
use nvme_compute::matrix::product;
use nvme_compute_kernel::experts::{ExpertLocations, MATRICES, MOST_EXPERTS, reference};
use nvme_formats::{StoredFormat, UNIT};
use nvme_host::{Error, Result, Store};
use published::{ORDER, PublishedLayer};
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
    /// The layers as published files have them; none for those that lie as the kernels multiply them.
    pub(crate) published: Arc<[PublishedLayer]>,
}

/// Facts about layers that the files of experts do not have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertUse {
    /// Experts of a token.
    pub choices: u32,
    /// Weights are the softmax over all experts; else over those that were chosen.
    pub over_all: bool,
    /// Function of gate and up.
    pub activation: ExpertActivation,
}

impl ExpertLayers {
    /// Describes the experts of `layers` on `store`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a shape that cannot be, and for matrices that end past the store.
    pub fn new(store: &Arc<Store>, shape: ExpertShape, layers: Vec<Layer>) -> Result<Self> {
        let experts = shape.experts;
        check_shape(shape, layers.len())?;
        let places = layers.iter().map(|layer| {
            let places = places(shape, layer)?;
            for (first, bytes) in places.first.into_iter().zip(places.bytes) {
                // Checks the end.
                store.table(first, experts.into(), bytes)?;
            }
            Ok(places)
        });
        Ok(Self {
            store: Arc::clone(store),
            shape,
            places: places.collect::<Result<_>>()?,
            layers,
            published: Arc::new([]),
        })
    }

    /// Describes the experts of published files, one layout for each layer, all of one store. Biases, and scales of whole
    /// matrices, are read now.
    ///
    /// # Errors
    /// [`Error::Usage`] for layers of other sizes than the first one, a format with which nothing computes, and what
    /// [`new`](Self::new) refuses; the errors of [`Store::read_at`].
    pub fn of_layouts(layouts: Vec<ExpertLayout>, of: ExpertUse) -> Result<Self> {
        let Some(first) = layouts.first() else {
            return Err(Error::usage("no layer is given", "give one or more"));
        };
        let store = Arc::clone(first.store());
        let sizes = |one: &ExpertLayout| (one.width(), one.hidden(), one.experts().len());
        let (wanted, name) = (sizes(first), first.name().to_owned());
        if let Some(other) = layouts.iter().find(|one| sizes(one) != wanted) {
            let ((a, b, c), (x, y, z)) = (sizes(other), wanted);
            return Err(Error::usage(
                format!(
                    "{} has {c} experts of {a} x {b}, and {name} has {z} of {x} x {y}",
                    other.name()
                ),
                "give layers of one size, or a cache for each",
            ));
        }
        if layouts.iter().any(|one| !Arc::ptr_eq(one.store(), &store)) {
            return Err(Error::usage(
                "the layers lie on several stores",
                "open their files together",
            ));
        }
        let short = |what: &str, size: u64| {
            u32::try_from(size)
                .ok()
                .filter(|size| *size > 0)
                .ok_or_else(|| {
                    Error::usage(
                        format!("{name}: {what} has {size} elements"),
                        "use files that say how many, below 2^32",
                    )
                })
        };
        let shape = ExpertShape {
            width: short("a token's vector", wanted.0)?,
            hidden: short("the vector between both products", wanted.1)?,
            experts: wanted.2 as u32,
            choices: of.choices,
            over_all: of.over_all,
            activation: of.activation,
        };
        let published = layouts.into_iter().map(PublishedLayer::new);
        let published = published.collect::<Result<Vec<_>>>()?;
        let layers: Vec<Layer> = published.iter().map(PublishedLayer::matrices).collect();
        check_shape(shape, layers.len())?;
        // Locations in slots: those on the drive are lists of ranges.
        let places = layers.iter().map(|layer| places(shape, layer));
        Ok(Self {
            store,
            shape,
            places: places.collect::<Result<_>>()?,
            layers,
            published: published.into(),
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
        let each = logits.chunks(experts);
        let chosen =
            each.flat_map(|one| reference::route(one, shape.choices as usize, shape.over_all));
        self.compute_chosen(layer, &chosen.collect::<Vec<_>>(), x, biases)
    }

    /// Computes the experts' results for tokens `x` as [`compute`](Self::compute) does, with the experts of each token and
    /// their weights as a model's router chose them.
    ///
    /// # Errors
    /// As [`compute`](Self::compute); [`Error::Usage`] for an expert that is not there, and for biases of files that have
    /// their own.
    pub fn compute_chosen(
        &self,
        layer: u32,
        chosen: &[ChosenExpert],
        x: &[f32],
        biases: Option<ExpertBiases<'_>>,
    ) -> Result<Vec<f32>> {
        let shape = self.shape;
        let (width, choices) = (shape.width as usize, shape.choices as usize);
        if layer >= self.layers()
            || !x.len().is_multiple_of(width)
            || chosen.len() != x.len() / width * choices
        {
            return Err(Error::usage(
                format!(
                    "layer {layer} does not exist, or {} choices and {} elements of vectors are not those of whole tokens",
                    chosen.len(),
                    x.len()
                ),
                format!(
                    "use a layer below {}, and {choices} choices and {width} elements a token",
                    self.layers()
                ),
            ));
        }
        if let Some(one) = chosen.iter().find(|one| one.expert >= shape.experts) {
            return Err(Error::usage(
                format!("layer {layer} has no expert {}", one.expert),
                format!("use numbers below {}", shape.experts),
            ));
        }
        let published = self.published.get(layer as usize);
        let biases = self.biases(published, biases)?;
        let mut y = vec![0.0; x.len()];
        let each = y.chunks_mut(width).zip(x.chunks(width));
        for ((y, x), chosen) in each.zip(chosen.chunks(choices)) {
            for chosen in chosen {
                let memory = match published {
                    Some(published) => published.read(chosen.expert)?,
                    None => Vec::new(),
                };
                let product = |matrix, x: &[f32]| match published {
                    Some(one) => unpacked(one, matrix, chosen.expert, &memory, x),
                    None => self.product(layer, matrix, chosen.expert, x),
                };
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

    /// Returns the biases of the files, or the given ones.
    fn biases<'a>(
        &self,
        published: Option<&'a PublishedLayer>,
        given: Option<ExpertBiases<'a>>,
    ) -> Result<Option<ExpertBiases<'a>>> {
        let Some(published) = published else {
            return Ok(given);
        };
        let [gate, up, down] = &published.biases;
        match (gate.is_empty(), given) {
            (true, given) => Ok(given),
            (false, None) => Ok(Some(ExpertBiases { gate, up, down })),
            (false, Some(_)) => Err(biases_twice()),
        }
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

/// Computes the product of a matrix of an expert, whose bytes are `memory`, and `x`.
fn unpacked(
    published: &PublishedLayer,
    matrix: usize,
    expert: u32,
    memory: &[u8],
    x: &[f32],
) -> Result<Vec<f32>> {
    let layout = published.layout();
    let (rows, columns) = layout.unpacked_shape(expert, ORDER[matrix])?;
    let mut numbers = vec![0.0f32; (rows * columns) as usize];
    layout.unpack(expert, ORDER[matrix], memory, &mut numbers)?;
    let bytes: Vec<u8> = numbers.iter().flat_map(|one| one.to_le_bytes()).collect();
    let mut y = vec![0.0; rows as usize];
    product(StoredFormat::F32, &bytes, x, &mut y);
    Ok(y)
}

pub(crate) fn biases_twice() -> Error {
    Error::usage(
        "biases are given, and the files of the experts have their own",
        "leave them out: those of the files are added",
    )
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

fn check_shape(shape: ExpertShape, layers: usize) -> Result<()> {
    let ExpertShape {
        experts, choices, ..
    } = shape;
    if choices == 0 || choices > experts || experts > MOST_EXPERTS || layers == 0 {
        return Err(Error::usage(
            format!(
                "{layers} layers of {experts} experts with {choices} chosen for a token is a shape without an expert, or with too many"
            ),
            format!(
                "use a layer at least, {MOST_EXPERTS} experts at most, and 1 of them or more a token"
            ),
        ));
    }
    Ok(())
}

fn places(shape: ExpertShape, layer: &Layer) -> Result<ExpertLocations> {
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
        (places.first[matrix], places.bytes[matrix]) = (placed.offset, bytes);
    }
    Ok(places)
}
