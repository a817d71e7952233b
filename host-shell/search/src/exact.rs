//! The nearest vectors by exhaustive comparison: the ground truth for the recall of a search.

use super::source::VectorSet;
use nvme_compute_kernel::search::walk::distance;
use nvme_compute_kernel::search::{distance_of, id_of, key};
use rayon::prelude::*;

/// Number of queries that a thread compares at a time.
const QUERIES: usize = 16;
/// Number of vectors that a thread compares with all these queries while they are in its cache.
const VECTORS: usize = 512;

/// Finds the `results` nearest vectors of each of `queries`, nearest first, among equal ones the lower id first; all
/// vectors if there are fewer.
pub fn nearest(vectors: &VectorSet, queries: &[f32], results: usize) -> Vec<Vec<(u32, f32)>> {
    let elements = vectors.elements();
    let groups = queries.par_chunks(QUERIES * elements);
    let group = |group: &[f32]| {
        let mut all = vec![Vec::new(); group.len() / elements];
        let blocks = vectors.all().chunks(VECTORS * elements);
        for (block, first) in blocks.zip((0u32..).step_by(VECTORS)) {
            for (query, found) in group.chunks_exact(elements).zip(&mut all) {
                let ids = (first..).zip(block.chunks_exact(elements));
                for (id, vector) in ids {
                    insert(found, key(distance(vector, query), id), results);
                }
            }
        }
        all
    };
    let keys = groups.flat_map_iter(group);
    let pairs = |keys: Vec<u64>| {
        keys.iter()
            .map(|key| (id_of(*key), distance_of(*key)))
            .collect()
    };
    keys.map(pairs).collect()
}

fn insert(found: &mut Vec<u64>, new: u64, most: usize) {
    if found.len() == most && found.last().is_none_or(|last| *last < new) {
        return;
    }
    let at = found.partition_point(|key| *key < new);
    found.insert(at, new);
    found.truncate(most);
}

/// Returns the recall: the found fraction of the nearest vectors. Each query of `exact` has the requested number of
/// `ids`. An id counts if it is no farther than the last of the nearest.
pub fn recall(exact: &[Vec<(u32, f32)>], ids: &[i64], distances: &[f32], results: usize) -> f64 {
    let (mut found, mut due) = (0, 0);
    let each = ids.chunks(results).zip(distances.chunks(results));
    for (nearest, (ids, distances)) in exact.iter().zip(each) {
        let Some((_, last)) = nearest.last() else {
            continue;
        };
        let is_right = |(id, far): &(&i64, &f32)| **id >= 0 && *far <= last;
        let right = ids.iter().zip(distances).filter(is_right).count();
        found += right.min(nearest.len());
        due += nearest.len();
    }
    match due {
        0 => 1.0,
        due => found as f64 / due as f64,
    }
}
