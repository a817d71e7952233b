//! Reference of one query's search, step by step: [`GraphWalk::next`] returns the nodes to read, [`GraphWalk::take`]
//! receives them.
//!
//! Every sum is computed in the order of the kernel's lanes, so that distances have the same bits.

use super::{CENTROIDS, EXPANDED, MOST_DEGREE, NO_KEY, code, distance_of, id_of, key, term, word};
use std::collections::BTreeSet;

/// Lanes of a warp.
const LANES: usize = 32;

/// Returns the squared distance of two vectors of equal length.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let ((whole_a, rest_a), (whole_b, rest_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in whole_a.iter().zip(whole_b) {
        for lane in 0..LANES {
            let apart = a[lane] - b[lane];
            lanes[lane] += apart * apart;
        }
    }
    for ((sum, a), b) in lanes.iter_mut().zip(rest_a).zip(rest_b) {
        let apart = a - b;
        *sum += apart * apart;
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The quantisation of an index, which a search needs beside the nodes.
#[derive(Clone, Copy, Debug)]
pub struct IndexQuantisation<'i> {
    /// As [`SearchLaunch::centroids`](super::SearchLaunch::centroids).
    pub centroids: &'i [f32],
    /// As [`SearchLaunch::codes`](super::SearchLaunch::codes).
    pub codes: &'i [u8],
    /// Elements of a vector.
    pub elements: usize,
    /// Elements of a subspace.
    pub sub_elements: usize,
    /// Distance of the codes of neighbouring nodes in bytes.
    pub code_bytes: usize,
    /// Number of nodes.
    pub nodes: u32,
    /// Tag of the index.
    pub tag: u32,
}

impl IndexQuantisation<'_> {
    /// Returns the number of subspaces.
    pub fn subspaces(&self) -> usize {
        self.elements.div_ceil(self.sub_elements)
    }

    /// Returns the distance of each centroid of each subspace from `query`.
    pub fn table(&self, query: &[f32]) -> Vec<f32> {
        let centroids = CENTROIDS as usize;
        let mut table = vec![0f32; self.subspaces() * centroids];
        for (subspace, table) in table.chunks_mut(centroids).enumerate() {
            let first = subspace * self.sub_elements;
            let of_query = query[first..].iter().take(self.sub_elements);
            let planes = self.centroids[first * centroids..].chunks(centroids);
            for (x, plane) in of_query.zip(planes) {
                for (sum, centroid) in table.iter_mut().zip(plane) {
                    let apart = x - centroid;
                    *sum += apart * apart;
                }
            }
        }
        table
    }

    /// Returns the approximate distance of node `id`, from the table of a query.
    pub fn score(&self, table: &[f32], id: u32) -> f32 {
        let codes = &self.codes[id as usize * self.code_bytes..][..self.subspaces()];
        let tables = table.chunks_exact(CENTROIDS as usize);
        let each = codes.iter().zip(tables);
        each.fold(0.0, |sum, (code, table)| sum + table[usize::from(*code)])
    }
}

/// The words of a node as they were read; unchecked before [`NodeWords::of`].
///
/// A drive may return an old or damaged block without an error, so id, tag and checksum are compared before
/// any neighbour is followed.
pub struct NodeWords<'n> {
    words: &'n [u32],
    elements: usize,
}

impl<'n> NodeWords<'n> {
    /// Checks the words as node `id` of an index; `None` if they are not that node.
    pub fn of(words: &'n [u32], id: u32, index: &IndexQuantisation<'_>) -> Option<Self> {
        let node = Self {
            words,
            elements: index.elements,
        };
        if words.len() < word::VECTOR + index.elements {
            return None;
        }
        let is_it = words[word::ID] == id
            && words[word::TAG] == index.tag
            && words[word::DEGREE] <= MOST_DEGREE
            && words[word::SUM] == sum_of(words, index.elements);
        let are_nodes = |node: &Self| node.neighbours().iter().all(|id| *id < index.nodes);
        (is_it && are_nodes(&node)).then_some(node)
    }

    /// Returns the ids of its neighbours.
    pub fn neighbours(&self) -> &'n [u32] {
        &self.words[..self.words[word::DEGREE] as usize]
    }

    /// Returns its vector.
    pub fn vector(&self) -> Vec<f32> {
        let words = self.words[word::VECTOR..].iter().take(self.elements);
        words.map(|word| f32::from_bits(*word)).collect()
    }
}

/// Returns the checksum of a node's words.
///
/// # Panics
/// For fewer words than a node with that many elements has.
pub fn sum_of(words: &[u32], elements: usize) -> u32 {
    let (head, vector) = (0..word::SUM, word::VECTOR..word::VECTOR + elements);
    let terms = head.chain(vector).map(|at| term(at as u32, words[at]));
    terms.fold(0, u32::wrapping_add)
}

/// A search in progress.
///
/// The host's search and the tests drive it: they read the requested nodes in any way they like, and get bit
/// for bit the results of the kernel.
#[derive(Debug)]
pub struct GraphWalk<'i> {
    index: IndexQuantisation<'i>,
    query: &'i [f32],
    table: Vec<f32>,
    list: Vec<u64>,
    most: usize,
    results: BTreeSet<u64>,
    wanted: usize,
    /// Number of requested nodes.
    pub reads: u32,
}

impl<'i> GraphWalk<'i> {
    /// Starts at node `entry`, with a list of `list` candidates for `results` results.
    ///
    /// # Errors
    /// [`code::BAD_QUERY`].
    pub fn new(
        index: IndexQuantisation<'i>,
        query: &'i [f32],
        entry: u32,
        (list, results): (u32, u32),
    ) -> Result<Self, i32> {
        if !query.iter().all(|x| x.is_finite()) {
            return Err(code::BAD_QUERY);
        }
        let table = index.table(query);
        let first = key(index.score(&table, entry), entry);
        Ok(Self {
            index,
            query,
            table,
            list: vec![first],
            most: list as usize,
            results: BTreeSet::new(),
            wanted: results as usize,
            reads: 0,
        })
    }

    /// Returns the nodes to read next, at most `beam`; none at the end.
    pub fn next(&mut self, beam: u32) -> Vec<u32> {
        let open = self.list.iter_mut().filter(|key| **key & EXPANDED == 0);
        let chosen = open.take(beam as usize).map(|key| {
            *key |= EXPANDED;
            id_of(*key)
        });
        let chosen: Vec<u32> = chosen.collect();
        self.reads += chosen.len() as u32;
        chosen
    }

    /// Processes node `id`, which was requested, from the words that were read.
    ///
    /// # Errors
    /// [`code::WRONG_NODE`].
    pub fn take(&mut self, id: u32, words: &[u32]) -> Result<(), i32> {
        let node = NodeWords::of(words, id, &self.index).ok_or(code::WRONG_NODE)?;
        let far = distance(&node.vector(), self.query);
        self.results.insert(key(far, id));
        if self.results.len() > self.wanted {
            self.results.pop_last();
        }
        for id in node.neighbours() {
            let new = key(self.index.score(&self.table, *id), *id);
            self.insert(new);
        }
        Ok(())
    }

    /// Inserts a candidate, unless it is in the list already, or farther than every entry of a full list.
    fn insert(&mut self, new: u64) {
        let at = self.list.partition_point(|key| *key < new);
        let is_there = self.list.get(at).is_some_and(|key| key >> 1 == new >> 1);
        if is_there || at >= self.most || new == NO_KEY {
            return;
        }
        self.list.insert(at, new);
        self.list.truncate(self.most);
    }

    /// Iterates over ids and squared distances, nearest first.
    pub fn results(&self) -> impl Iterator<Item = (u32, f32)> {
        let keys = self.results.iter();
        keys.map(|key| (id_of(*key), distance_of(*key)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MOST_ELEMENTS, node_bytes};
    use super::*;

    #[test]
    fn a_distance_is_the_sum_of_squares_at_any_length() {
        for elements in [1usize, 2, 31, 32, 33, 64, 100, 928] {
            let a: Vec<f32> = (0..elements).map(|at| (at % 7) as f32).collect();
            let b: Vec<f32> = (0..elements).map(|at| (at % 5) as f32).collect();
            let expected: f32 = a.iter().zip(&b).map(|(a, b)| (a - b) * (a - b)).sum();
            assert_eq!(distance(&a, &b), expected, "{elements}");
        }
    }

    #[test]
    fn keys_have_the_order_of_distances_and_then_of_ids() {
        let far = [0.0, 1e-30, 0.5, 1.0, 3e30, f32::INFINITY];
        for pair in far.windows(2) {
            assert!(key(pair[0], 900) | EXPANDED < key(pair[1], 3));
        }
        assert!(key(1.0, 3) | EXPANDED < key(1.0, 4));
        let last = key(f32::INFINITY, (1 << 31) - 1) | EXPANDED;
        assert!(last < NO_KEY);
        assert_eq!(
            (id_of(last), distance_of(last)),
            ((1 << 31) - 1, f32::INFINITY)
        );
    }

    #[test]
    fn a_node_takes_whole_blocks() {
        let bytes = [1, 928, 929, 1952, 1953, MOST_ELEMENTS].map(node_bytes);
        assert_eq!(bytes, [4096, 4096, 8192, 8192, 12_288, 65_536]);
    }

    #[test]
    fn each_bit_of_a_node_counts() {
        let mut words = [0u32; 1024];
        words[word::ID] = 3;
        words[word::DEGREE] = 1;
        words[word::TAG] = 77;
        words[0] = 2;
        words[1..64].fill(super::super::NONE);
        words[word::VECTOR..word::VECTOR + 5].fill(1.5f32.to_bits());
        words[word::SUM] = sum_of(&words, 5);
        let index = IndexQuantisation {
            centroids: &[],
            codes: &[],
            elements: 5,
            sub_elements: 1,
            code_bytes: 8,
            nodes: 4,
            tag: 77,
        };
        let node = NodeWords::of(&words, 3, &index).unwrap();
        assert_eq!((node.neighbours(), node.vector()), (&[2][..], vec![1.5; 5]));
        assert!(NodeWords::of(&words, 2, &index).is_none());
        for at in (0..=word::SUM).chain(word::VECTOR..word::VECTOR + 5) {
            for bit in 0..32 {
                words[at] ^= 1 << bit;
                assert!(NodeWords::of(&words, 3, &index).is_none(), "{at} {bit}");
                words[at] ^= 1 << bit;
            }
        }
        let longer = IndexQuantisation {
            elements: 929,
            ..index
        };
        assert!(
            NodeWords::of(&words, 3, &longer).is_none(),
            "a node cut short"
        );
        let few = IndexQuantisation { nodes: 2, ..index };
        assert!(
            NodeWords::of(&words, 3, &few).is_none(),
            "a neighbour that is no node"
        );
    }
}
