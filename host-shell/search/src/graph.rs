//! The graph of nearest neighbours: Vamana, built by inserting batches of vectors; each batch is searched for in the
//! graph before it.
//!
//! A batch is as large as all batches before it together, up to a fiftieth of all vectors. Threads divide its vectors,
//! and the graph is the same for any number of threads.

use super::metric::VectorMetric;
use super::source::VectorSet;
use nvme_compute_kernel::search::walk::distance;
use nvme_compute_kernel::search::{EXPANDED, NONE, distance_of, id_of, key};
use nvme_driver::Result;
use nvme_units::{SplitMix, mix};
use rayon::prelude::*;

/// Pruning factor of Vamana: a neighbour is dropped if it is closer, by this factor, to another neighbour than
/// to the node.
const ALPHA: f32 = 1.2;
/// A batch is at most this fraction, 1 / `BATCHES`, of all vectors.
const BATCHES: usize = 50;
/// Smallest number of vectors of a batch, once the index has that many.
const LEAST_BATCH: usize = 64;
/// Number of entries of the set of ids that a search has visited.
const SEEN: usize = 1 << 13;

/// Neighbours of each vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeighbourGraph {
    entry: u32,
    degree: usize,
    /// Room for the neighbours of each vector: a third more than the degree, so that few vectors that get a further
    /// neighbour have to be pruned.
    places: usize,
    /// `places` ids for each vector, with [`NONE`] behind the last neighbour.
    ids: Vec<u32>,
}

impl NeighbourGraph {
    /// Builds the graph of `vectors`, with up to `degree` neighbours each, by searches with `list` candidates.
    /// `progress` receives the number of inserted vectors, and may end the build.
    ///
    /// # Errors
    /// The errors of `progress`.
    pub fn new(
        vectors: &VectorSet,
        (degree, list): (u32, u32),
        seed: u64,
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Self> {
        let count = vectors.count() as usize;
        let degree = degree as usize;
        let places = degree + degree / 3;
        let mut graph = Self {
            entry: medoid(vectors),
            degree,
            places,
            ids: vec![NONE; count * places],
        };
        let order = order(vectors.count(), graph.entry, seed);
        let most = (count / BATCHES).max(LEAST_BATCH);
        let mut done = 1;
        while done < count {
            let batch = &order[done..count.min(done + done.min(most))];
            graph.insert(vectors, batch, list as usize);
            done += batch.len();
            progress(done as u64)?;
        }
        graph.prune_all(vectors);
        graph.connect(vectors, list as usize);
        Ok(graph)
    }

    /// Adds neighbours to each node, up to `degree`: the nearest of the query that has the direction of the node's
    /// vector. Vectors that [`VectorMetric::InnerProduct`](super::VectorMetric::InnerProduct) lengthened lie far from
    /// all queries. Vectors near a query need not be near each other then, so that edges to the nearest vectors do not
    /// lead from one of them to the next.
    ///
    /// # Errors
    /// The errors of `progress`, which receives the number of finished nodes.
    pub fn aim(
        &mut self,
        vectors: &VectorSet,
        (degree, list): (u32, u32),
        progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let mut wider = Self {
            entry: self.entry,
            degree: degree as usize,
            places: degree as usize,
            ids: vec![NONE; vectors.count() as usize * degree as usize],
        };
        for id in 0..vectors.count() {
            wider.set(id, self.neighbours(id));
        }
        *self = wider;
        let ids: Vec<u32> = (0..vectors.count()).collect();
        let mut done = 0;
        for batch in ids.chunks((ids.len() / BATCHES).max(LEAST_BATCH)) {
            let aimed = batch.par_iter().map_init(
                || SearchScratch::new(list as usize),
                |scratch, id| {
                    scratch.search(self, vectors, &aim_of(vectors.get(*id)));
                    let mut all = self.neighbours(*id).to_vec();
                    let found = scratch.list.iter().map(|key| id_of(*key));
                    let new: Vec<u32> = found
                        .filter(|other| other != id && !all.contains(other))
                        .take(self.degree - all.len())
                        .collect();
                    all.extend(new);
                    all
                },
            );
            let aimed: Vec<Vec<u32>> = aimed.collect();
            for (id, neighbours) in batch.iter().zip(&aimed) {
                self.set(*id, neighbours);
            }
            done += batch.len() as u64;
            progress(done)?;
        }
        Ok(())
    }

    /// Returns the entry point of searches: the vector nearest to the mean.
    pub fn entry(&self) -> u32 {
        self.entry
    }

    /// Returns the neighbours of vector `id`.
    ///
    /// # Panics
    /// When there is no such vector.
    pub fn neighbours(&self, id: u32) -> &[u32] {
        let all = &self.ids[id as usize * self.places..][..self.places];
        let count = all.iter().position(|id| *id == NONE);
        &all[..count.unwrap_or(self.places)]
    }

    fn set(&mut self, id: u32, neighbours: &[u32]) {
        set(
            &mut self.ids[id as usize * self.places..][..self.places],
            neighbours,
        );
    }

    /// Prunes the nodes with more neighbours than the degree down to it.
    fn prune_all(&mut self, vectors: &VectorSet) {
        let (degree, places) = (self.degree, self.places);
        let each = self.ids.par_chunks_exact_mut(places).enumerate();
        each.filter(|(_, ids)| degree < places && ids[degree] != NONE)
            .for_each(|(node, ids)| {
                let all = ids.iter().filter(|id| **id != NONE);
                let neighbours = pruned(vectors, node as u32, all, degree);
                set(ids, &neighbours);
            });
    }

    /// Adds, for each node that no path from the entry reaches, an edge from a near node that has a path. A node
    /// without free room replaces its farthest neighbour that has another path, so that no node is lost.
    fn connect(&mut self, vectors: &VectorSet, list: usize) {
        let mut from = vec![NONE; vectors.count() as usize];
        self.reach(self.entry, self.entry, &mut from);
        let mut scratch = SearchScratch::new(list);
        for id in 0..vectors.count() {
            if from[id as usize] != NONE {
                continue;
            }
            scratch.search(self, vectors, vectors.get(id));
            let near = scratch.list.iter().map(|key| id_of(*key));
            // The n nodes with a path need only n - 1 edges for their paths, so that one of them has room for another
            // edge.
            let all = (0..vectors.count()).filter(|other| from[*other as usize] != NONE);
            let spare = near
                .chain(all)
                .find_map(|node| Some((node, self.spare_place(node, &from)?)));
            if let Some((node, place)) = spare {
                self.ids[node as usize * self.places + place] = id;
                self.reach(node, id, &mut from);
            }
        }
    }

    /// Returns the index of an entry of `node` that is free, or that has a neighbour to which another node leads.
    fn spare_place(&self, node: u32, from: &[u32]) -> Option<usize> {
        let neighbours = self.neighbours(node);
        match neighbours.len() < self.degree {
            true => Some(neighbours.len()),
            false => neighbours
                .iter()
                .rposition(|other| from[*other as usize] != node),
        }
    }

    /// Records in `from`, for node `id` and all nodes that it leads to, the node from which each was found first.
    fn reach(&self, parent: u32, id: u32, from: &mut [u32]) {
        let mut next = vec![(parent, id)];
        while let Some((parent, id)) = next.pop() {
            if from[id as usize] == NONE {
                from[id as usize] = parent;
                next.extend(self.neighbours(id).iter().map(|other| (id, *other)));
            }
        }
    }

    /// Adds vectors, and edges to them.
    fn insert(&mut self, vectors: &VectorSet, batch: &[u32], list: usize) {
        let out: Vec<Vec<u32>> = batch
            .par_iter()
            .map_init(
                || SearchScratch::new(list),
                |scratch, id| {
                    scratch.search(self, vectors, vectors.get(*id));
                    scratch.expanded.retain(|key| id_of(*key) != *id);
                    prune(vectors, &mut scratch.expanded, self.degree)
                },
            )
            .collect();
        let mut back = Vec::new();
        for (id, neighbours) in batch.iter().zip(&out) {
            self.set(*id, neighbours);
            back.extend(neighbours.iter().map(|to| (*to, *id)));
        }
        back.par_sort_unstable();
        let groups: Vec<&[(u32, u32)]> = back.chunk_by(|a, b| a.0 == b.0).collect();
        let more: Vec<(u32, Vec<u32>)> = groups
            .par_iter()
            .map(|group| (group[0].0, self.with(vectors, group)))
            .collect();
        for (id, neighbours) in &more {
            self.set(*id, neighbours);
        }
    }

    /// Returns the neighbours of a node together with its new ones.
    fn with(&self, vectors: &VectorSet, group: &[(u32, u32)]) -> Vec<u32> {
        let node = group[0].0;
        let mut all = self.neighbours(node).to_vec();
        let new = group.iter().map(|(_, from)| *from);
        all.extend(new.filter(|from| !self.neighbours(node).contains(from)));
        if all.len() <= self.places {
            return all;
        }
        pruned(vectors, node, all.iter(), self.degree)
    }
}

/// Sets the neighbours of a node and fills its other entries.
fn set(places: &mut [u32], neighbours: &[u32]) {
    places.fill(NONE);
    places[..neighbours.len()].copy_from_slice(neighbours);
}

/// Returns the ids of `all` that stay neighbours of `node`.
fn pruned<'i>(
    vectors: &VectorSet,
    node: u32,
    all: impl Iterator<Item = &'i u32>,
    degree: usize,
) -> Vec<u32> {
    let place = vectors.get(node);
    let keys = all.map(|id| key(distance(place, vectors.get(*id)), *id));
    prune(vectors, &mut keys.collect(), degree)
}

/// Returns the vector nearest to the mean of all, the first of equal ones.
fn medoid(vectors: &VectorSet) -> u32 {
    let mut mean = vec![0f64; vectors.elements()];
    for vector in vectors.all().chunks_exact(vectors.elements()) {
        for (sum, x) in mean.iter_mut().zip(vector) {
            *sum += f64::from(*x);
        }
    }
    let count = f64::from(vectors.count());
    let mean: Vec<f32> = mean.iter().map(|sum| (sum / count) as f32).collect();
    let ids = (0..vectors.count()).into_par_iter();
    let keys = ids.map(|id| key(distance(&mean, vectors.get(id)), id));
    keys.min().map_or(0, id_of)
}

/// Returns the query with the direction of a vector, whose last element makes the vector's length 1.
fn aim_of(vector: &[f32]) -> Vec<f32> {
    let elements = vector.len() - 1;
    let mut aim = VectorMetric::InnerProduct.of_queries(&vector[..elements], elements);
    std::mem::take(aim.to_mut())
}

/// Returns all ids, the entry first, the others in random order.
fn order(count: u32, entry: u32, seed: u64) -> Vec<u32> {
    let mut random = SplitMix::new(mix(seed));
    let mut order: Vec<u32> = (0..count).collect();
    order.swap(0, entry as usize);
    for at in (2..order.len()).rev() {
        order.swap(at, 1 + (random.next_word() % at as u64) as usize);
    }
    order
}

/// Returns the `candidates` that become neighbours, nearest first: none of them is much nearer to another one than to
/// the node.
fn prune(vectors: &VectorSet, candidates: &mut Vec<u64>, degree: usize) -> Vec<u32> {
    for key in &mut *candidates {
        *key &= !EXPANDED;
    }
    candidates.sort_unstable();
    candidates.dedup();
    let mut chosen: Vec<u32> = Vec::with_capacity(degree);
    for key in &*candidates {
        let (id, far) = (id_of(*key), distance_of(*key));
        let place = vectors.get(id);
        let is_behind = |other: &u32| ALPHA * distance(place, vectors.get(*other)) <= far;
        if !chosen.iter().any(is_behind) {
            chosen.push(id);
        }
        if chosen.len() == degree {
            return chosen;
        }
    }
    // Equal vectors all come behind the first of them: unless some room is reserved, none of them leads to the others.
    let mut equal = Vec::new();
    for key in candidates {
        let (id, place) = (id_of(*key), vectors.get(id_of(*key)));
        let is_equal = |other: &u32| distance(place, vectors.get(*other)) == 0.0;
        if chosen.len() + equal.len() == degree {
            break;
        }
        if !chosen.contains(&id) && chosen.iter().any(is_equal) {
            equal.push(id);
        }
    }
    chosen.append(&mut equal);
    chosen
}

/// Reusable memory of a thread's searches.
struct SearchScratch {
    most: usize,
    list: Vec<u64>,
    /// Nodes whose neighbours were visited.
    expanded: Vec<u64>,
    /// A lossy, direct-mapped set of visited ids: an id may overwrite another one, which is then visited twice.
    seen: Vec<u32>,
}

impl SearchScratch {
    fn new(most: usize) -> Self {
        Self {
            most,
            list: Vec::with_capacity(most + 1),
            expanded: Vec::new(),
            seen: vec![NONE; SEEN],
        }
    }

    fn search(&mut self, graph: &NeighbourGraph, vectors: &VectorSet, place: &[f32]) {
        self.list.clear();
        self.expanded.clear();
        self.seen.fill(NONE);
        self.list
            .push(key(distance(place, vectors.get(graph.entry)), graph.entry));
        let mut first = 0;
        while let Some(at) = self.list[first..]
            .iter()
            .position(|key| key & EXPANDED == 0)
        {
            let at = first + at;
            self.list[at] |= EXPANDED;
            self.expanded.push(self.list[at]);
            first = at;
            for other in graph.neighbours(id_of(self.list[at])) {
                let seen = &mut self.seen[other.wrapping_mul(0x9E37_79B1) as usize >> 19];
                if *seen == *other {
                    continue;
                }
                *seen = *other;
                let new = key(distance(place, vectors.get(*other)), *other);
                first = first.min(self.insert(new));
            }
        }
    }

    /// Inserts a candidate and returns its position, or the length of the list if it was not inserted.
    fn insert(&mut self, new: u64) -> usize {
        let at = self.list.partition_point(|key| *key < new);
        let is_there = self.list.get(at).is_some_and(|key| key >> 1 == new >> 1);
        if is_there || at >= self.most {
            return self.list.len();
        }
        self.list.insert(at, new);
        self.list.truncate(self.most);
        at
    }
}
