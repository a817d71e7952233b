//! Indexes that compare by the angle, and by the inner product.

use super::*;

#[test]
fn an_index_of_angles_finds_what_points_the_same_way() {
    let source = source(VectorDistribution::Clustered, 3_000, 24);
    let store = store("sim:mem?size=32MiB&block=4096");
    // Vectors of many lengths, among them some whose squares exceed an f32.
    let vectors = source.vectors().unwrap();
    let scaled = vectors
        .all()
        .chunks(24)
        .enumerate()
        .flat_map(|(at, vector)| {
            let scale = [1.0, 1e-3, 700.0, 1e-30, 1e30][at % 5];
            vector.iter().map(move |x| x * scale)
        });
    let scaled = VectorSet::new(24, scaled.collect()).unwrap();
    let options = BuildOptions {
        metric: VectorMetric::Cosine,
        ..small()
    };
    let index = built(&store, 0, VectorSource::given(&scaled), &scaled, options);
    let queries: Vec<f32> = source
        .queries(50)
        .unwrap()
        .iter()
        .map(|x| x * 3.0)
        .collect();
    let parameters = SearchParameters::default();
    let answers = index
        .search(&queries, parameters, CpuOptions::default())
        .unwrap();
    answers.check().unwrap();
    // The cosine of each pair, by its definition.
    let cosine = |a: &[f32], b: &[f32]| {
        let product = |a: &[f32], b: &[f32]| -> f64 {
            a.iter()
                .zip(b)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum()
        };
        product(a, b) / (product(a, a) * product(b, b)).sqrt()
    };
    let mut right = 0;
    let each = answers.ids.chunks(10).zip(answers.distances.chunks(10));
    for (query, (ids, distances)) in queries.chunks(24).zip(each) {
        let mut all: Vec<f64> = (0..3_000).map(|id| cosine(query, scaled.get(id))).collect();
        for (id, far) in ids.iter().zip(distances) {
            let expected = 2.0 - 2.0 * all[*id as usize];
            assert!(
                (f64::from(*far) - expected).abs() < 1e-4,
                "{far} {expected}"
            );
        }
        all.sort_by(|a, b| b.total_cmp(a));
        let found = ids.iter().map(|id| cosine(query, scaled.get(*id as u32)));
        right += found.filter(|found| *found >= all[9] - 1e-6).count();
    }
    assert!(right >= 475, "{right} of 500");
    let zero = index
        .search(&[0.0; 24], parameters, CpuOptions::default())
        .unwrap();
    assert_eq!(zero.codes, [code::BAD_QUERY]);
    let none = VectorSet::new(2, vec![1.0, 1.0, 0.0, -0.0]).unwrap();
    let refused = VectorMetric::Cosine
        .of_vectors(&none, 0.0)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("vector 1 has no direction"), "{refused}");
    let mut head = index.header().bytes();
    head[64] = 3;
    let sum = checksum(&head[..72]);
    head[72..80].copy_from_slice(&sum.to_le_bytes());
    let refused = IndexHeader::parse(&head).unwrap_err();
    assert!(refused.contains("a metric of the number 3"), "{refused}");
}

#[test]
fn an_index_of_inner_products_finds_the_greatest() {
    let source = source(VectorDistribution::Clustered, 3_000, 24);
    let store = store("sim:mem?size=32MiB&block=4096");
    let vectors = source.vectors().unwrap();
    // Long vectors have great products though they are far away.
    let each = vectors.all().chunks(24).enumerate();
    let scaled = each.flat_map(|(at, vector)| {
        let scale = 0.5 + (at % 40) as f32 / 40.0;
        vector.iter().map(move |x| x * scale)
    });
    let scaled = VectorSet::new(24, scaled.collect()).unwrap();
    let options = BuildOptions {
        metric: VectorMetric::InnerProduct,
        ..small()
    };
    let index = built(&store, 0, VectorSource::given(&scaled), &scaled, options);
    let header = *index.header();
    assert_eq!((header.elements(), header.source.elements), (25, 24));
    let queries: Vec<f32> = source
        .queries(50)
        .unwrap()
        .iter()
        .map(|x| x * 9.0)
        .collect();
    let parameters = SearchParameters {
        list: 128,
        ..SearchParameters::default()
    };
    let search = |queries: &[f32]| {
        let answers = index.search(queries, parameters, CpuOptions::default());
        answers.unwrap()
    };
    let answers = search(&queries);
    answers.check().unwrap();
    let product = |a: &[f32], b: &[f32]| -> f64 {
        let each = a.iter().zip(b);
        each.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let mut right = 0;
    let each = answers.ids.chunks(10).zip(answers.distances.chunks(10));
    for (query, (ids, distances)) in queries.chunks(24).zip(each) {
        let length = product(query, query).sqrt() * f64::from(header.longest);
        let mut all: Vec<f64> = (0..3_000)
            .map(|id| product(query, scaled.get(id)))
            .collect();
        for (id, far) in ids.iter().zip(distances) {
            let expected = 2.0 - 2.0 * all[*id as usize] / length;
            assert!(
                (f64::from(*far) - expected).abs() < 1e-4,
                "{far} {expected}"
            );
        }
        all.sort_by(|a, b| b.total_cmp(a));
        let found = ids.iter().map(|id| product(query, scaled.get(*id as u32)));
        right += found.filter(|found| *found >= all[9] - 1e-3).count();
    }
    assert!(right >= 475, "{right} of 500");
    // For a query of zeros all vectors are equally near.
    assert_eq!(search(&[0.0; 24]).codes, [0]);
    assert_eq!(search(&[f32::INFINITY; 24]).codes, [code::BAD_QUERY]);
    let stored = index.vectors().unwrap();
    let lengths = stored.all().chunks(25).map(|one| product(one, one));
    assert!(
        lengths
            .into_iter()
            .all(|length| (length - 1.0).abs() < 1e-5)
    );
}

#[test]
fn lengths_that_no_inner_product_has_are_refused() {
    let metric = VectorMetric::InnerProduct;
    let long = VectorSet::new(2, vec![3e38, 3e38]).unwrap();
    let refused = metric.longest(&long).unwrap_err().to_string();
    assert!(refused.contains("above the greatest f32"), "{refused}");
    let zeros = VectorSet::new(2, vec![0.0; 6]).unwrap();
    let longest = metric.longest(&zeros).unwrap();
    let stored = metric.of_vectors(&zeros, longest).unwrap();
    assert_eq!(stored.get(2), [0.0, 0.0, 1.0]);
    let wide = VectorSet::new(MOST_ELEMENTS, vec![1.0; MOST_ELEMENTS as usize]).unwrap();
    let longest = metric.longest(&wide).unwrap();
    assert!(metric.of_vectors(&wide, longest).is_err());
}

/// Vectors have several lengths: the longest are not near each other, but have the greatest inner products. A search
/// that keeps as many candidates as there are vectors finds the nearest of all.
#[test]
fn the_greatest_inner_products_are_found_among_vectors_of_several_lengths() {
    let store = store("sim:mem?size=32MiB&block=4096");
    for elements in [8, 48, 928] {
        let source = source(VectorDistribution::Uniform, 200, elements);
        let mut numbers = source.vectors().unwrap().all().to_vec();
        for (at, vector) in numbers.chunks_mut(elements as usize).enumerate() {
            let factor = 0.25 + (at % 7) as f32 / 4.0;
            vector.iter_mut().for_each(|x| *x *= factor);
        }
        let vectors = VectorSet::new(elements, numbers).unwrap();
        let options = BuildOptions {
            degree: 24,
            list: 40,
            metric: VectorMetric::InnerProduct,
            ..small()
        };
        let index = built(&store, 0, VectorSource::given(&vectors), &vectors, options);
        let queries = source.queries(12).unwrap();
        let parameters = SearchParameters {
            list: 256,
            ..SearchParameters::default()
        };
        let answers = index
            .search(&queries, parameters, CpuOptions::default())
            .unwrap();
        answers.check().unwrap();
        let results = parameters.results as usize;
        for (number, query) in queries.chunks(elements as usize).enumerate() {
            let product = |id: u32| -> f64 {
                let pairs = vectors.get(id).iter().zip(query);
                pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let mut all: Vec<f64> = (0..200).map(product).collect();
            all.sort_by(|a, b| b.total_cmp(a));
            let least = all[results - 1] - 1e-4 * all[0].abs();
            let found = &answers.ids[number * results..][..results];
            let missed = found.iter().filter(|id| product(**id as u32) < least);
            assert_eq!(missed.count(), 0, "query {number} of {elements} elements");
        }
    }
}
