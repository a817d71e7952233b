//! Nodes of several blocks, and the inner product: searches that keep as many candidates as there are vectors, checked
//! against a comparison with all of them that this file computes.

use super::{Drive, Job, source};
use crate::bench::Bench;
use crate::gather::text;
use crate::limits::limit;
use crate::report::Outcome;
use nvme_search::{
    BuildOptions, CpuOptions, SearchParameters, VectorDistribution, VectorMetric, VectorSet,
    VectorSource,
};

const COUNT: u32 = 200;
const QUERIES: usize = 12;
const PARAMETERS: SearchParameters = SearchParameters {
    list: 256,
    beam: 8,
    results: 10,
};

/// Searches indexes of vectors of each number of elements, with the number of 4 KiB blocks that a node takes. A graph of inner
/// products may have no path to a vector that is nearest for few queries, so there one result in ten may be missing.
pub fn all(bench: &Bench, metric: VectorMetric, sizes: &[(u32, u64)]) -> Outcome<String> {
    let due = sizes.len() * QUERIES * PARAMETERS.results as usize;
    let mut missed = 0;
    for (elements, blocks) in sizes {
        missed += one(bench, metric, *elements, *blocks)
            .map_err(|why| format!("{elements} elements: {why}"))?;
    }
    let most = match metric {
        VectorMetric::InnerProduct => due / 10,
        _ => 0,
    };
    match missed <= most {
        true => Ok(format!("{missed} of {due} nearest vectors are missing")),
        false => Err(format!("{missed} of {due} nearest vectors are missing")),
    }
}

/// Returns how many of the nearest vectors no result stands for.
fn one(bench: &Bench, metric: VectorMetric, elements: u32, blocks: u64) -> Outcome<usize> {
    let of = source(VectorDistribution::Uniform, COUNT, elements);
    // Vectors of several lengths: the longest are not the nearest, but have great inner products.
    let mut numbers = of.vectors().map_err(text)?.all().to_vec();
    for (at, vector) in numbers.chunks_mut(elements as usize).enumerate() {
        let factor = 0.25 + (at % 7) as f32 / 4.0;
        vector.iter_mut().for_each(|x| *x *= factor);
    }
    let vectors = VectorSet::new(elements, numbers).map_err(text)?;
    let queries = of.queries(QUERIES).map_err(text)?;
    let how = BuildOptions {
        degree: 24,
        list: 40,
        sub_elements: 16,
        metric,
    };
    let device = crate::gather::simulated(32, 4096, "");
    let source = VectorSource::given(&vectors);
    let drive = Drive::of(bench, &device, limit(), (source, &vectors), how)?;
    let node_bytes = drive.index.header().node_bytes();
    if node_bytes != blocks * 4096 {
        return Err(format!("a node has {node_bytes} bytes"));
    }
    let cpu = CpuOptions {
        threads: 2,
        together: 8,
    };
    let expected = drive
        .index
        .search(&queries, PARAMETERS, cpu)
        .map_err(text)?;
    let asked = metric.of_queries(&queries, elements as usize);
    let job = Job::expecting(bench, &asked, PARAMETERS, expected)?;
    let (failures, _) = job.run(&drive)?;
    if failures.rows != 0 {
        return Err(format!("{failures:?}"));
    }
    // The GPU's results are those of the CPU, bit by bit.
    let results = PARAMETERS.results as usize;
    let mut missed = 0;
    for (number, query) in queries.chunks(elements as usize).enumerate() {
        let at = number * results..(number + 1) * results;
        let found = job.expected.ids[at.clone()].iter();
        let found: Vec<(i64, f32)> = found
            .copied()
            .zip(job.expected.distances[at].iter().copied())
            .collect();
        missed += compare(&found, &distances(metric, &vectors, query))
            .map_err(|why| format!("query {number}: {why}"))?;
    }
    Ok(missed)
}

/// Returns the distance of each vector from `query`, as the metric defines it.
fn distances(metric: VectorMetric, vectors: &VectorSet, query: &[f32]) -> Vec<f64> {
    let product = |a: &[f32], b: &[f32]| -> f64 {
        let each = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        each.sum()
    };
    let each = || (0..vectors.count()).map(|id| vectors.get(id));
    let longest = each()
        .map(|one| product(one, one).sqrt())
        .fold(0.0, f64::max);
    let length = product(query, query).sqrt();
    let distance = |one: &[f32]| match metric {
        VectorMetric::InnerProduct => 2.0 - 2.0 * product(one, query) / (length * longest),
        _ => product(one, one) + product(query, query) - 2.0 * product(one, query),
    };
    each().map(distance).collect()
}

/// Compares results with the distances of all vectors: each result is another vector, has its own distance, and is no nearer
/// than the one before. Returns how many of the nearest vectors are missing.
fn compare(found: &[(i64, f32)], all: &[f64]) -> Outcome<usize> {
    let mut sorted = all.to_vec();
    sorted.sort_by(f64::total_cmp);
    let near = |own: f64| 1e-4 * (1.0 + own.abs());
    let last = sorted[found.len() - 1];
    let mut seen = std::collections::BTreeSet::new();
    let (mut before, mut missed) = (f32::MIN, 0);
    for (id, far) in found {
        let place = usize::try_from(*id).ok().filter(|id| seen.insert(*id));
        let Some(own) = place.and_then(|id| all.get(id)) else {
            return Err(format!("result {id} is no vector, or comes again"));
        };
        if (own - f64::from(*far)).abs() > near(*own) || *far < before {
            return Err(format!(
                "vector {id} at {own} has the distance {far}, after {before}"
            ));
        }
        missed += usize::from(own - last > near(*own));
        before = *far;
    }
    Ok(missed)
}
