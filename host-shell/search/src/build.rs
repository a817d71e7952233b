//! Makes an index of vectors and writes it to a store.

use super::graph::NeighbourGraph;
use super::header::{HEADER_BYTES, IndexHeader, checksum};
use super::metric::VectorMetric;
use super::quantise;
use super::source::{VectorSet, VectorSource};
use nvme_compute_kernel::search::walk::sum_of;
use nvme_compute_kernel::search::{MOST_DEGREE, NODE_BLOCK, NONE, node_bytes, word};
use nvme_driver::{Error, Result};
use nvme_store::Store;
use nvme_units::mix;
use rayon::prelude::*;

/// Number of nodes that a thread writes at a time.
const NODES: usize = 256;
/// Number of writes that are in progress together.
const TOGETHER: usize = 16;
/// Largest number of candidates of a search while the graph is made.
const MOST_BUILD_LIST: u32 = 1000;

/// Options of building an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildOptions {
    /// Largest number of neighbours of a node, 1 to [`MOST_DEGREE`].
    pub degree: u32,
    /// Number of candidates of each search while the graph is made, 1 to 1000.
    pub list: u32,
    /// Number of elements that one byte of a code represents.
    pub sub_elements: u32,
    /// Metric by which vectors are compared.
    pub metric: VectorMetric,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            degree: MOST_DEGREE,
            list: 100,
            sub_elements: 4,
            metric: VectorMetric::Euclidean,
        }
    }
}

/// Phase of building an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildPhase {
    /// Number of vectors that are in the graph.
    Graph(u64),
    /// Number of nodes that are written.
    Write(u64),
}

/// Makes an index of `vectors`, which `source` describes, and writes it to `store` from byte `offset` on, which
/// is a multiple of 4096. The index is valid and durable only once this has returned. `progress` may end the build.
///
/// # Errors
/// [`Error::Usage`] for options out of their range, for vectors that differ from `source`, and for an index that does
/// not fit; the errors of writes and of `progress`.
pub fn build(
    store: &Store,
    offset: u64,
    (source, vectors): (VectorSource, &VectorSet),
    options: BuildOptions,
    progress: &mut dyn FnMut(BuildPhase) -> Result<()>,
) -> Result<IndexHeader> {
    let mut header = header(source, vectors, options)?;
    check_place(store, offset, &header)?;
    let vectors = options.metric.of_vectors(vectors, header.longest)?;
    let vectors = &*vectors;
    let sub_elements = options.sub_elements as usize;
    let centroids = quantise::train(vectors, sub_elements, source.seed);
    let codes = quantise::encode(vectors, sub_elements, &centroids);
    let bytes: Vec<u8> = centroids.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut inserted = |count| progress(BuildPhase::Graph(count));
    let graph = match options.metric {
        VectorMetric::Euclidean | VectorMetric::Cosine => {
            let shape = (options.degree, options.list);
            NeighbourGraph::new(vectors, shape, source.seed, &mut inserted)?
        }
        VectorMetric::InnerProduct => {
            let near = (options.degree.div_ceil(2), options.list);
            let mut graph = NeighbourGraph::new(vectors, near, source.seed, &mut inserted)?;
            graph.aim(vectors, (options.degree, options.list), &mut inserted)?;
            graph
        }
    };
    header = IndexHeader {
        entry: graph.entry(),
        centroids_sum: checksum(&bytes),
        codes_sum: checksum(&codes),
        ..header
    };
    // This invalidates an index that was here before: its nodes are about to be overwritten.
    store.write_at(offset, &[0; HEADER_BYTES])?;
    store.flush()?;
    store.write_at(offset + header.centroids_at(), &bytes)?;
    store.write_at(offset + header.codes_at(), &codes)?;
    write_nodes(store, offset, &header, (vectors, &graph), progress)?;
    store.flush()?;
    store.write_at(offset, &header.bytes())?;
    store.flush()?;
    Ok(header)
}

fn header(source: VectorSource, vectors: &VectorSet, options: BuildOptions) -> Result<IndexHeader> {
    if (source.count, source.elements as usize) != (vectors.count(), vectors.elements()) {
        return Err(Error::usage(
            format!("{} vectors are not those of {source:?}", vectors.count()),
            "name their source",
        ));
    }
    let shape = u64::from(source.count) << 32 | u64::from(options.degree << 16 | options.list);
    let header = IndexHeader {
        source,
        sub_elements: options.sub_elements,
        degree: options.degree,
        entry: 0,
        tag: mix(mix(source.seed) ^ shape) as u32,
        centroids_sum: 0,
        codes_sum: 0,
        metric: options.metric,
        longest: options.metric.longest(vectors)?,
    };
    let cause = match options.list {
        1..=MOST_BUILD_LIST => header.check().err(),
        list => Some(format!(
            "{list} candidates: there may be 1 to {MOST_BUILD_LIST}"
        )),
    };
    match cause {
        None => Ok(header),
        Some(cause) => Err(Error::usage(cause, "correct the options of the index")),
    }
}

/// # Errors
/// [`Error::Usage`] unless the index fits.
fn check_place(store: &Store, offset: u64, header: &IndexHeader) -> Result<()> {
    let bytes = header.bytes_of_index();
    let end = offset.checked_add(bytes);
    if offset.is_multiple_of(NODE_BLOCK) && end.is_some_and(|end| end <= store.len()) {
        return Ok(());
    }
    Err(Error::usage(
        format!(
            "an index of {bytes} bytes at byte {offset} does not fit into {} bytes, or does not begin with a node",
            store.len()
        ),
        format!("use fewer vectors, or a larger device, and a multiple of {NODE_BLOCK}"),
    ))
}

fn write_nodes(
    store: &Store,
    offset: u64,
    header: &IndexHeader,
    (vectors, graph): (&VectorSet, &NeighbourGraph),
    progress: &mut dyn FnMut(BuildPhase) -> Result<()>,
) -> Result<()> {
    let ids: Vec<u32> = (0..vectors.count()).collect();
    let first = offset + header.nodes_at();
    let mut written = 0;
    for ids in ids.chunks(NODES * TOGETHER) {
        ids.par_chunks(NODES).try_for_each(|ids| {
            let nodes = ids.iter().map(|id| node(header.tag, *id, vectors, graph));
            let bytes: Vec<u8> = nodes.flatten().flat_map(u32::to_le_bytes).collect();
            store.write_at(first + u64::from(ids[0]) * header.node_bytes(), &bytes)
        })?;
        written += ids.len() as u64;
        progress(BuildPhase::Write(written))?;
    }
    Ok(())
}

/// Returns the words of a node.
fn node(tag: u32, id: u32, vectors: &VectorSet, graph: &NeighbourGraph) -> Vec<u32> {
    let mut words = vec![0; node_bytes(vectors.elements() as u32) as usize / 4];
    let neighbours = graph.neighbours(id);
    words[..MOST_DEGREE as usize].fill(NONE);
    words[..neighbours.len()].copy_from_slice(neighbours);
    words[word::ID] = id;
    words[word::DEGREE] = neighbours.len() as u32;
    words[word::TAG] = tag;
    for (word, x) in words[word::VECTOR..].iter_mut().zip(vectors.get(id)) {
        *word = x.to_bits();
    }
    words[word::SUM] = sum_of(&words, vectors.elements());
    words
}
