//! Generated vectors: the same for the same seed on any machine.

use super::header::MOST_NODES;
use nvme_compute_kernel::search::MOST_ELEMENTS;
use nvme_driver::{Error, Result};
use nvme_units::{SplitMix, mix};
use rayon::prelude::*;

/// Clusters of clustered vectors.
const CLUSTERS: u64 = 256;
/// Directions in which a cluster extends.
const DIRECTIONS: usize = 12;
/// Extent of a cluster in these directions, relative to its distance from others.
const EXTENT: f32 = 0.5;
/// Extent of a cluster in the other directions.
const NOISE: f32 = 0.05;
/// Number of the first query: no vector has this number or a higher one.
const FIRST_QUERY: u64 = 1 << 40;

/// Distribution of generated vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorDistribution {
    /// Points around 256 centres; each cluster extends in 12 random directions, so that near vectors are much
    /// nearer than others, like those of learned embeddings.
    Clustered,
    /// Independent elements: the hard case, in which all vectors are about equally far.
    Uniform,
    /// A caller's own vectors, which no generator can make again.
    Given,
}

impl VectorDistribution {
    /// All distributions, in the order of their numbers in a header.
    pub const ALL: [Self; 3] = [Self::Clustered, Self::Uniform, Self::Given];

    /// Returns the name that the command line uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clustered => "clustered",
            Self::Uniform => "uniform",
            Self::Given => "given",
        }
    }
}

/// Source of vectors: a generator, unless the caller passes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorSource {
    /// Distribution.
    pub kind: VectorDistribution,
    /// Seed: another number gives other vectors. For a caller's vectors, a checksum of them.
    pub seed: u64,
    /// Number of vectors.
    pub count: u32,
    /// Elements of each.
    pub elements: u32,
}

/// Vectors in memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VectorSet {
    elements: usize,
    data: Vec<f32>,
}

impl VectorSet {
    /// Takes `data` as vectors of `elements` elements.
    ///
    /// # Errors
    /// [`Error::Usage`] for no elements or too many, for a vector that is not whole, for none or too many, and for
    /// elements that are not finite.
    pub fn new(elements: u32, data: Vec<f32>) -> Result<Self> {
        let count = data.len() as u64 / u64::from(elements.max(1));
        let is_whole = data.len() as u64 == count * u64::from(elements);
        if !(1..=MOST_ELEMENTS).contains(&elements)
            || !(1..=MOST_NODES).contains(&count)
            || !is_whole
        {
            return Err(Error::usage(
                format!(
                    "{} numbers are not a possible count of whole vectors of {elements}",
                    data.len()
                ),
                format!("use 1 to {MOST_NODES} whole vectors of 1 to {MOST_ELEMENTS} elements"),
            ));
        }
        if let Some(at) = data.par_iter().position_first(|x| !x.is_finite()) {
            return Err(Error::usage(
                format!("vector {} is not finite", at / elements as usize),
                "use finite numbers",
            ));
        }
        Ok(Self {
            elements: elements as usize,
            data,
        })
    }

    /// Returns the number of vectors.
    pub fn count(&self) -> u32 {
        (self.data.len() / self.elements.max(1)) as u32
    }

    /// Returns the number of elements of a vector.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Returns vector `id`.
    ///
    /// # Panics
    /// When there is no such vector.
    pub fn get(&self, id: u32) -> &[f32] {
        &self.data[id as usize * self.elements..][..self.elements]
    }

    /// Returns all vectors, concatenated.
    pub fn all(&self) -> &[f32] {
        &self.data
    }
}

impl VectorSource {
    /// Describes a caller's vectors.
    pub fn given(vectors: &VectorSet) -> Self {
        let bits = vectors.data.iter().map(|x| u64::from(x.to_bits()));
        Self {
            kind: VectorDistribution::Given,
            seed: bits.fold(0, |sum, bits| mix(sum ^ bits)),
            count: vectors.count(),
            elements: vectors.elements as u32,
        }
    }

    /// Returns all vectors.
    ///
    /// # Errors
    /// The errors of [`VectorSet::new`]; [`Error::Usage`] for a caller's vectors; [`Error::Environment`] without
    /// memory.
    pub fn vectors(&self) -> Result<VectorSet> {
        VectorSet::new(self.elements, self.numbers(0, self.count as usize)?)
    }

    /// Returns `count` vectors of the same distribution, concatenated, that are different from all
    /// [vectors](Self::vectors).
    ///
    /// # Errors
    /// As [`vectors`](Self::vectors).
    pub fn queries(&self, count: usize) -> Result<Vec<f32>> {
        self.numbers(FIRST_QUERY, count)
    }

    fn numbers(&self, first: u64, count: usize) -> Result<Vec<f32>> {
        let elements = self.elements.max(1) as usize;
        let shapes = match self.kind {
            VectorDistribution::Clustered => self.clusters(),
            VectorDistribution::Uniform => Vec::new(),
            VectorDistribution::Given => {
                return Err(Error::usage(
                    "the vectors of this index are no generator's",
                    "take queries of a file (nvme-gpu search query --input), or search it by the library or Python",
                ));
            }
        };
        let mut numbers = Vec::new();
        let none = |_| Error::environment("no memory for the vectors", "use fewer");
        numbers.try_reserve_exact(count * elements).map_err(none)?;
        numbers.resize(count * elements, 0.0);
        let each = numbers.par_chunks_mut(elements).enumerate();
        each.for_each(|(at, vector)| {
            let mut random = SplitMix::new(mix(self.seed).wrapping_add(mix(first + at as u64)));
            match self.kind {
                VectorDistribution::Clustered => self.clustered(&shapes, &mut random, vector),
                _ => vector.fill_with(|| even(&mut random)),
            }
        });
        Ok(numbers)
    }

    /// Returns for each cluster its centre, then its directions.
    fn clusters(&self) -> Vec<Vec<f32>> {
        let cluster = |number| {
            let mut random = SplitMix::new(mix(self.seed ^ mix(number)));
            let elements = self.elements as usize;
            let numbers = (0..elements * (1 + DIRECTIONS)).map(|_| even(&mut random));
            numbers.collect()
        };
        (0..CLUSTERS).map(cluster).collect()
    }

    fn clustered(&self, shapes: &[Vec<f32>], random: &mut SplitMix, vector: &mut [f32]) {
        let shape = &shapes[(random.next_word() % CLUSTERS) as usize];
        let (centre, directions) = shape.split_at(vector.len());
        vector.copy_from_slice(centre);
        for direction in directions.chunks_exact(vector.len()) {
            let far = EXTENT * bell(random);
            for (x, along) in vector.iter_mut().zip(direction) {
                *x += far * along;
            }
        }
        for x in vector {
            *x += NOISE * bell(random);
        }
    }
}

/// Draws a number that is uniform from -1 to 1.
fn even(random: &mut SplitMix) -> f32 {
    (random.next_word() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
}

/// Draws a number that is nearly normally distributed, with variance 1: the sum of three uniform
/// ones.
fn bell(random: &mut SplitMix) -> f32 {
    even(random) + even(random) + even(random)
}
