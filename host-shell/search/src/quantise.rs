//! Product quantisation: each few elements of a vector become the number of the nearest of 256 centroids.

use super::source::VectorSet;
use nvme_compute_kernel::search::CENTROIDS;
use nvme_units::{SplitMix, mix};
use rayon::prelude::*;

/// Largest number of vectors from which the centroids are made.
const SAMPLE: usize = 16_384;
/// Rounds of k-means.
const ROUNDS: usize = 10;
const COUNT: usize = CENTROIDS as usize;

/// Distances of one subspace.
type Distances = [f32; COUNT];

/// Trains the centroids. The result has, for each element of a vector, that element of all
/// centroids of its subspace.
pub fn train(vectors: &VectorSet, sub_elements: usize, seed: u64) -> Vec<f32> {
    let mut centroids = vec![0f32; vectors.elements() * COUNT];
    let of_subspaces = centroids.par_chunks_mut(sub_elements * COUNT).enumerate();
    of_subspaces.for_each(|(subspace, planes)| {
        let sample = sample(vectors, subspace * sub_elements, planes.len() / COUNT);
        means(&sample, planes, mix(seed ^ mix(subspace as u64)));
    });
    centroids
}

/// Returns the elements from `first` on of vectors that are spread evenly.
fn sample(vectors: &VectorSet, first: usize, elements: usize) -> Vec<Vec<f32>> {
    let count = vectors.count() as usize;
    let taken = count.min(SAMPLE);
    let ids = (0..taken).map(|at| (at * count / taken) as u32);
    ids.map(|id| vectors.get(id)[first..first + elements].to_vec())
        .collect()
}

/// Runs k-means; a centroid that is nearest to no vector keeps its position.
fn means(sample: &[Vec<f32>], planes: &mut [f32], seed: u64) {
    let mut random = SplitMix::new(seed);
    for centroid in 0..COUNT {
        let chosen = &sample[(random.next_word() % sample.len() as u64) as usize];
        for (plane, x) in planes.chunks_exact_mut(COUNT).zip(chosen) {
            plane[centroid] = *x;
        }
    }
    for _ in 0..ROUNDS {
        let mut sums = vec![0f64; planes.len()];
        let mut counts = [0u32; COUNT];
        for part in sample {
            let nearest = nearest(part, planes);
            counts[nearest] += 1;
            for (sums, x) in sums.chunks_exact_mut(COUNT).zip(part) {
                sums[nearest] += f64::from(*x);
            }
        }
        for (plane, sums) in planes.chunks_exact_mut(COUNT).zip(sums.chunks_exact(COUNT)) {
            let each = plane.iter_mut().zip(sums).zip(&counts);
            for ((centroid, sum), count) in each.filter(|(_, count)| **count > 0) {
                *centroid = (sum / f64::from(*count)) as f32;
            }
        }
    }
}

/// Finds the number of the nearest centroid, the first of equal ones.
fn nearest(part: &[f32], planes: &[f32]) -> usize {
    let mut distances: Distances = [0.0; COUNT];
    for (x, plane) in part.iter().zip(planes.as_chunks::<COUNT>().0) {
        for at in 0..COUNT {
            let apart = x - plane[at];
            distances[at] += apart * apart;
        }
    }
    let mut best = 0;
    for at in 1..COUNT {
        if distances[at] < distances[best] {
            best = at;
        }
    }
    best
}

/// Encodes each vector: a byte for each subspace, padded to a multiple of 4 bytes.
pub fn encode(vectors: &VectorSet, sub_elements: usize, centroids: &[f32]) -> Vec<u8> {
    let code_bytes = code_bytes(vectors.elements(), sub_elements);
    let mut codes = vec![0; vectors.count() as usize * code_bytes];
    let each = codes.par_chunks_exact_mut(code_bytes).enumerate();
    each.for_each(|(id, codes)| {
        let parts = vectors.get(id as u32).chunks(sub_elements);
        let planes = centroids.chunks(sub_elements * COUNT);
        for ((code, part), planes) in codes.iter_mut().zip(parts).zip(planes) {
            *code = nearest(part, planes) as u8;
        }
    });
    codes
}

/// Returns the number of bytes of the codes of a vector.
pub fn code_bytes(elements: usize, sub_elements: usize) -> usize {
    elements.div_ceil(sub_elements).next_multiple_of(4)
}
