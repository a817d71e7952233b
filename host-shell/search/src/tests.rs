//! Searches by the CPU over simulated drives, against comparing all vectors.

use super::header::checksum;
use super::*;
use nvme_compute_kernel::search::word;
use nvme_store::{Store, StoreOptions};
use std::sync::Arc;

mod files;
mod metric;

fn store(device: &str) -> Arc<Store> {
    Arc::new(Store::open(device, &StoreOptions::default()).unwrap())
}

fn source(kind: VectorDistribution, count: u32, elements: u32) -> VectorSource {
    VectorSource {
        kind,
        seed: 5,
        count,
        elements,
    }
}

fn small() -> BuildOptions {
    BuildOptions {
        degree: 32,
        list: 50,
        sub_elements: 4,
        ..BuildOptions::default()
    }
}

/// Returns an index of `vectors` at byte `offset`.
fn built(
    store: &Arc<Store>,
    offset: u64,
    source: VectorSource,
    vectors: &VectorSet,
    options: BuildOptions,
) -> VectorIndex {
    let header = build(store, offset, (source, vectors), options, &mut |_| Ok(())).unwrap();
    let index = VectorIndex::open(store, offset).unwrap();
    assert_eq!(*index.header(), header);
    index
}

#[test]
fn nearest_vectors_of_clusters_are_found() {
    let source = source(VectorDistribution::Clustered, 20_000, 64);
    let store = store("sim:mem?size=128MiB&block=4096");
    let vectors = source.vectors().unwrap();
    let index = built(&store, 0, source, &vectors, small());
    let queries = source.queries(200).unwrap();
    let parameters = SearchParameters::default();
    let options = CpuOptions {
        threads: 2,
        together: 16,
    };
    let answers = index.search(&queries, parameters, options).unwrap();
    answers.check().unwrap();
    let exact = exact::nearest(&vectors, &queries, 10);
    let recall = exact::recall(&exact, &answers.ids, &answers.distances, 10);
    let reads = answers.reads_per_query();
    println!("recall {recall}, {reads} reads");
    assert!(recall >= 0.95, "{recall}");
    assert!(reads <= 80.0, "{reads}");
    // However the queries are shared out.
    let alone = CpuOptions {
        threads: 1,
        together: 1,
    };
    let few = &queries[..20 * 64];
    let again = index.search(few, parameters, alone).unwrap();
    assert_eq!(again.ids, answers.ids[..200]);
    assert_eq!(again.distances, answers.distances[..200]);
    assert_eq!(again.reads, answers.reads[..20]);
}

#[test]
fn every_vector_is_reached_and_no_node_has_too_many_neighbours() {
    for (kind, count, degree, list) in [
        (VectorDistribution::Uniform, 1, 64, 10),
        (VectorDistribution::Uniform, 2, 1, 1),
        (VectorDistribution::Uniform, 700, 8, 20),
        (VectorDistribution::Clustered, 1500, 16, 30),
    ] {
        let vectors = source(kind, count, 12).vectors().unwrap();
        let make = || NeighbourGraph::new(&vectors, (degree, list), 9, &mut |_| Ok(())).unwrap();
        let graph = make();
        assert_eq!(graph, make(), "the same for any order of threads");
        let (mut seen, mut next) = (vec![false; count as usize], vec![graph.entry()]);
        while let Some(id) = next.pop() {
            if std::mem::replace(&mut seen[id as usize], true) {
                continue;
            }
            let neighbours = graph.neighbours(id);
            assert!(neighbours.len() <= degree as usize);
            assert!(!neighbours.contains(&id));
            let mut sorted = neighbours.to_vec();
            sorted.sort_unstable();
            assert!(sorted.is_sorted_by(|a, b| a < b), "twice the same");
            next.extend(neighbours);
        }
        let missed = seen.iter().filter(|seen| !**seen).count();
        assert_eq!(missed, 0, "of {count}");
    }
}

#[test]
fn codes_name_the_nearest_centroids() {
    let vectors = source(VectorDistribution::Uniform, 600, 10)
        .vectors()
        .unwrap();
    let centroids = quantise::train(&vectors, 4, 3);
    let codes = quantise::encode(&vectors, 4, &centroids);
    assert_eq!((centroids.len(), codes.len()), (10 * 256, 600 * 4));
    let quantised = nvme_compute_kernel::search::walk::IndexQuantisation {
        centroids: &centroids,
        codes: &codes,
        elements: 10,
        sub_elements: 4,
        code_bytes: 4,
        nodes: 600,
        tag: 0,
    };
    let query = vectors.get(7);
    let table = quantised.table(query);
    let mut apart = 0.0;
    for id in 0..600 {
        let codes = &codes[id as usize * 4..][..3];
        let mut sum = 0.0f32;
        for (at, x) in query.iter().enumerate() {
            let code = usize::from(codes[at / 4]);
            sum += (x - centroids[at * 256 + code]).powi(2);
        }
        assert!((quantised.score(&table, id) - sum).abs() < 1e-4, "{id}");
        apart += quantised.score(&quantised.table(vectors.get(id)), id);
    }
    // 256 centroids for 600 parts remove most of the variance, 10 / 3.
    assert!(apart / 600.0 < 0.5, "{}", apart / 600.0);
}

/// Cases: one vector, fewer vectors than results, equal ones, elements that fill no subspace, blocks of two sizes, an
/// index that does not begin at the drive's start.
#[test]
fn small_and_odd_indices_give_all_there_is() {
    for (count, elements, sub_elements, offset, block) in [
        (1, 1, 1, 0, 512),
        (1, 928, 8, 4096, 4096),
        // Nodes of two blocks and of sixteen.
        (30, 929, 8, 4096, 512),
        (12, MOST_ELEMENTS, 64, 0, 512),
        (3, 5, 4, 0, 4096),
        (9, 33, 32, 1 << 20, 512),
        (40, 100, 3, 12_288, 512),
    ] {
        let store = store(&format!("sim:mem?size=32MiB&block={block}"));
        let source = source(VectorDistribution::Uniform, count, elements);
        let vectors = source.vectors().unwrap();
        let options = BuildOptions {
            sub_elements,
            ..BuildOptions::default()
        };
        let index = built(&store, offset, source, &vectors, options);
        let queries = source.queries(3).unwrap();
        let answers = index
            .search(&queries, SearchParameters::default(), CpuOptions::default())
            .unwrap();
        answers.check().unwrap();
        let exact = exact::nearest(&vectors, &queries, 10);
        for (query, nearest) in exact.iter().enumerate() {
            let ids = &answers.ids[query * 10..][..10];
            let found: Vec<i64> = nearest.iter().map(|(id, _)| i64::from(*id)).collect();
            assert_eq!(ids[..found.len()], found, "{count} x {elements}");
            assert!(ids[found.len()..].iter().all(|id| *id == -1));
        }
        assert_eq!(
            exact::recall(&exact, &answers.ids, &answers.distances, 10),
            1.0
        );
        let none = index
            .search(&[], SearchParameters::default(), CpuOptions::default())
            .unwrap();
        assert_eq!(none, SearchAnswers::default());
    }
}

#[test]
fn equal_vectors_are_all_found() {
    let store = store("sim:mem?size=16MiB&block=4096");
    let source = source(VectorDistribution::Clustered, 60, 8);
    let mut data = source.vectors().unwrap().all().to_vec();
    for copy in 1..5 {
        let (from, to) = data.split_at_mut(copy * 8);
        to[..8].copy_from_slice(&from[..8]);
    }
    let vectors = VectorSet::new(8, data).unwrap();
    let index = built(&store, 0, source, &vectors, BuildOptions::default());
    let parameters = SearchParameters {
        list: 60,
        results: 5,
        beam: 8,
    };
    let answers = index
        .search(vectors.get(0), parameters, CpuOptions::default())
        .unwrap();
    assert_eq!(answers.ids, [0, 1, 2, 3, 4]);
    assert_eq!(answers.distances, [0.0; 5]);
}

/// There are more equal vectors than a node has neighbours, alone and among others.
#[test]
fn as_many_equal_vectors_are_found_as_are_asked_for() {
    for (count, others) in [(1000usize, 0usize), (300, 300)] {
        let store = store("sim:mem?size=16MiB&block=4096");
        let source = source(VectorDistribution::Clustered, (count + others) as u32, 8);
        let mut data = source.vectors().unwrap().all().to_vec();
        for copy in 1..count {
            data.copy_within(..8, copy * 8);
        }
        let vectors = VectorSet::new(8, data).unwrap();
        let index = built(&store, 0, source, &vectors, BuildOptions::default());
        let parameters = SearchParameters {
            results: 10,
            ..SearchParameters::default()
        };
        let options = CpuOptions::default();
        let answers = index.search(vectors.get(0), parameters, options).unwrap();
        assert_eq!(
            answers.distances,
            [0.0; 10],
            "{count} of {}",
            count + others
        );
        // The other vectors can still be reached.
        for id in (count..count + others).step_by(29) {
            let options = CpuOptions::default();
            let answers = index.search(vectors.get(id as u32), parameters, options);
            assert_eq!(answers.unwrap().distances[0], 0.0, "{id}");
        }
    }
}

#[test]
fn given_vectors_are_known_by_their_sum() {
    let vectors = source(VectorDistribution::Uniform, 50, 8)
        .vectors()
        .unwrap();
    let given = VectorSource::given(&vectors);
    let mut other = vectors.all().to_vec();
    other[399] += 1.0;
    let other = VectorSource::given(&VectorSet::new(8, other).unwrap());
    assert_ne!(given.seed, other.seed);
    let store = store("sim:mem?size=16MiB&block=4096");
    let options = BuildOptions::default();
    let built = build(&store, 0, (given, &vectors), options, &mut |_| Ok(())).unwrap();
    let index = VectorIndex::open(&store, 0).unwrap();
    assert_eq!((index.header(), index.header().source), (&built, given));
    let found = index.search(
        &vectors.all()[80..88],
        SearchParameters::default(),
        CpuOptions::default(),
    );
    assert_eq!(found.unwrap().ids[0], 10);
    let why = given.queries(1).unwrap_err().to_string();
    assert!(why.contains("no generator's"), "{why}");
    assert!(given.vectors().is_err());
}

#[test]
fn numbers_that_cannot_be_are_refused() {
    assert!(VectorSet::new(0, vec![]).is_err());
    assert!(VectorSet::new(3, vec![0.0; 4]).is_err());
    assert!(VectorSet::new(3, vec![]).is_err());
    let (most, more) = (MOST_ELEMENTS, MOST_ELEMENTS as usize + 1);
    assert!(VectorSet::new(most, vec![0.0; most as usize]).is_ok());
    assert!(VectorSet::new(most + 1, vec![0.0; more]).is_err());
    assert!(VectorSet::new(2, vec![0.0, f32::NAN]).is_err());
    let source = source(VectorDistribution::Uniform, 20, 8);
    let vectors = source.vectors().unwrap();
    let small = store("sim:mem?size=64KiB&block=4096");
    let large = store("sim:mem?size=16MiB&block=4096");
    let defaults = BuildOptions::default();
    for (store, offset, source, options) in [
        (&small, 0, source, defaults),
        (&large, 512, source, defaults),
        (&large, u64::MAX - 4095, source, defaults),
        (
            &large,
            0,
            VectorSource {
                count: 21,
                ..source
            },
            defaults,
        ),
        (
            &large,
            0,
            source,
            BuildOptions {
                degree: 65,
                ..defaults
            },
        ),
        (
            &large,
            0,
            source,
            BuildOptions {
                degree: 0,
                ..defaults
            },
        ),
        (
            &large,
            0,
            source,
            BuildOptions {
                list: 0,
                ..defaults
            },
        ),
        (
            &large,
            0,
            source,
            BuildOptions {
                sub_elements: 9,
                ..defaults
            },
        ),
    ] {
        let error = build(store, offset, (source, &vectors), options, &mut |_| Ok(()));
        assert_eq!(
            error.map_err(|error| error.exit_code()),
            Err(2),
            "{options:?}"
        );
    }
    let index = built(&large, 0, source, &vectors, defaults);
    for (list, beam, results) in [
        (0, 1, 1),
        (257, 1, 1),
        (9, 0, 1),
        (9, 33, 1),
        (9, 1, 0),
        (64, 1, 33),
        (9, 1, 10),
    ] {
        let parameters = SearchParameters {
            list,
            beam,
            results,
        };
        let error = index.search(&[0.0; 8], parameters, CpuOptions::default());
        assert_eq!(
            error.map_err(|error| error.exit_code()),
            Err(2),
            "{parameters:?}"
        );
    }
    let odd = index.search(
        &[0.0; 7],
        SearchParameters::default(),
        CpuOptions::default(),
    );
    assert_eq!(odd.map_err(|error| error.exit_code()), Err(2));
    let mut queries = vec![0.5; 24];
    queries[9] = f32::INFINITY;
    let answers = index
        .search(&queries, SearchParameters::default(), CpuOptions::default())
        .unwrap();
    assert_eq!(answers.codes, [0, code::BAD_QUERY, 0]);
    assert_eq!(answers.ids[10..20], [-1; 10]);
    assert_eq!(answers.reads[1], 0);
    assert!(answers.check().unwrap_err().to_string().contains("query 1"));
}

#[test]
fn a_header_is_whole_or_refused() {
    let header = IndexHeader {
        source: source(VectorDistribution::Uniform, 77, 12),
        sub_elements: 5,
        degree: 40,
        entry: 76,
        tag: 0xABCD,
        centroids_sum: 1 << 60,
        codes_sum: 3,
        metric: VectorMetric::Euclidean,
        longest: 0.0,
    };
    let bytes = header.bytes();
    assert_eq!(IndexHeader::parse(&bytes), Ok(header));
    assert_eq!(header.code_bytes(), 4);
    assert_eq!(header.nodes_at(), 4096 + 12_288 + 4096);
    for at in 0..90 {
        for bit in 0..8 {
            let mut bytes = bytes;
            bytes[at] ^= 1 << bit;
            assert!(IndexHeader::parse(&bytes).is_err(), "byte {at}, bit {bit}");
        }
    }
    assert!(IndexHeader::parse(&bytes[1..]).is_err());
    for wrong in [
        IndexHeader {
            entry: 77,
            ..header
        },
        IndexHeader {
            degree: 65,
            ..header
        },
        IndexHeader {
            longest: 1.0,
            ..header
        },
        IndexHeader {
            metric: VectorMetric::InnerProduct,
            ..header
        },
        IndexHeader {
            metric: VectorMetric::InnerProduct,
            longest: f32::NAN,
            ..header
        },
        IndexHeader {
            sub_elements: 13,
            ..header
        },
        IndexHeader {
            sub_elements: 0,
            ..header
        },
        IndexHeader {
            source: VectorSource {
                count: 0,
                ..header.source
            },
            ..header
        },
        IndexHeader {
            source: VectorSource {
                elements: MOST_ELEMENTS + 1,
                ..header.source
            },
            ..header
        },
    ] {
        assert!(IndexHeader::parse(&wrong.bytes()).is_err(), "{wrong:?}");
    }
    assert_ne!(checksum(&[0; 8]), checksum(&[0; 9]));
}

#[test]
fn damage_is_noticed_where_it_is_read() {
    let store = store("sim:mem?size=16MiB&block=4096");
    let source = source(VectorDistribution::Uniform, 300, 16);
    let vectors = source.vectors().unwrap();
    let index = built(&store, 0, source, &vectors, small());
    let header = *index.header();
    let queries = source.queries(40).unwrap();
    let search = |index: &VectorIndex| {
        let answers = index.search(&queries, SearchParameters::default(), CpuOptions::default());
        answers.unwrap()
    };
    let whole = search(&index);
    whole.check().unwrap();
    let flip = |at: u64| {
        let mut byte = [0];
        store.read_at(at, &mut byte).unwrap();
        store.write_at(at, &[byte[0] ^ 1]).unwrap();
    };
    for at in [0, 50, header.centroids_at() + 9, header.codes_at() + 99] {
        flip(at);
        let error = VectorIndex::open(&store, 0).unwrap_err();
        assert_eq!(error.exit_code(), 1, "{at}: {error}");
        flip(at);
    }
    assert!(VectorIndex::open(&store, 4096).is_err());
    assert!(VectorIndex::open(&store, 100).is_err());
    // One node is replaced by another, and one bit of a vector is flipped: only queries that read the node fail.
    let place = |id: i64| header.nodes_at() + id as u64 * header.node_bytes();
    let first = whole.ids[0];
    for damage in [0, 1] {
        let mut node = vec![0; 4096];
        store.read_at(place(first), &mut node).unwrap();
        match damage {
            0 => {
                let mut other = vec![0; 4096];
                store.read_at(place((first + 1) % 300), &mut other).unwrap();
                store.write_at(place(first), &other).unwrap();
            }
            _ => flip(place(first) + 4 * word::VECTOR as u64 + 1),
        }
        let found = search(&index);
        assert_eq!(found.codes[0], code::WRONG_NODE);
        for query in 0..40 {
            let ids = &found.ids[query * 10..][..10];
            match found.codes[query] {
                0 => assert_eq!(ids, &whole.ids[query * 10..][..10]),
                code::WRONG_NODE => assert_eq!(ids, [-1; 10]),
                other => panic!("{other}"),
            }
        }
        assert!(
            found
                .check()
                .unwrap_err()
                .to_string()
                .contains("Wrong Node")
        );
        store.write_at(place(first), &node).unwrap();
    }
    assert_eq!(search(&index), whole);
}

#[test]
fn a_failed_read_fails_its_query_alone() {
    let source = source(VectorDistribution::Uniform, 300, 16);
    let store = store("sim:mem?size=16MiB&block=4096&fault=status:0x281@op=read,nth=100");
    let vectors = source.vectors().unwrap();
    let index = built(&store, 0, source, &vectors, small());
    let queries = source.queries(30).unwrap();
    let options = CpuOptions {
        threads: 1,
        together: 4,
    };
    let search = || index.search(&queries, SearchParameters::default(), options);
    let answers = search().unwrap();
    let (count, query, code) = answers.failed().unwrap();
    assert_eq!((count, code), (1, 0x281));
    assert!(answers.ids[query * 10..][..10].iter().all(|id| *id == -1));
    let error = answers.check().unwrap_err();
    assert!(
        error.to_string().contains("Unrecovered Read Error"),
        "{error}"
    );
    let whole = search().unwrap();
    whole.check().unwrap();
    let others = (0..30).filter(|other| *other != query);
    for other in others {
        let of = |answers: &SearchAnswers| answers.ids[other * 10..][..10].to_vec();
        assert_eq!(of(&answers), of(&whole));
    }
}

#[test]
fn a_build_that_is_ended_leaves_no_index() {
    let store = store("sim:mem?size=16MiB&block=4096");
    let source = source(VectorDistribution::Uniform, 200, 8);
    let vectors = source.vectors().unwrap();
    built(&store, 0, source, &vectors, small());
    for last in [BuildPhase::Graph(200), BuildPhase::Write(200)] {
        let mut stop = |step| match step == last {
            true => Err(nvme_driver::Error::Interrupted),
            false => Ok(()),
        };
        let ended = build(&store, 0, (source, &vectors), small(), &mut stop);
        assert_eq!(ended.map_err(|error| error.exit_code()), Err(130));
        // The old index is intact as long as nothing was written.
        assert_eq!(
            VectorIndex::open(&store, 0).is_ok(),
            last == BuildPhase::Graph(200)
        );
    }
}
