use super::*;
use nvme_compute::random_weights;
use nvme_host::StoreOptions;

fn store() -> Arc<Store> {
    Arc::new(Store::open("sim:mem?size=16MiB", &StoreOptions::default()).unwrap())
}

const SHAPE: ExpertShape = ExpertShape {
    width: 64,
    hidden: 96,
    experts: 5,
    choices: 2,
    over_all: false,
    activation: ExpertActivation::SwiGlu,
};

fn layer(offset: u64, stored: StoredFormat) -> Layer {
    [0, 1, 2].map(|matrix| ExpertMatrices {
        offset: offset + matrix * (1 << 20),
        stored,
    })
}

/// Writes a layer to the store and returns its matrices as numbers: gate, up and down, expert after
/// expert.
fn fill(store: &Store, layer: &Layer, seed: u64) -> [Vec<f32>; MATRICES] {
    [0, 1, 2].map(|matrix| {
        let (rows, columns) = shape_of(SHAPE, matrix);
        let ExpertMatrices { offset, stored } = layer[matrix];
        let row_bytes = stored.row_bytes(columns).unwrap() as usize;
        let mut bytes = vec![0; row_bytes * (rows * SHAPE.experts) as usize];
        random_weights::fill(stored, seed + matrix as u64, &mut bytes);
        store.write_at(offset, &bytes).unwrap();
        let mut numbers = vec![0.0; (rows * columns * SHAPE.experts) as usize];
        let each = numbers.chunks_mut(columns as usize);
        for (numbers, row) in each.zip(bytes.chunks(row_bytes)) {
            nvme_compute_kernel::reference::unpack(stored, row, numbers);
        }
        numbers
    })
}

/// Computes the result by `f64`, without any code of the crate except the router.
fn expected(numbers: &[Vec<f32>; MATRICES], logits: &[f32], x: &[f32]) -> Vec<f64> {
    let product = |matrix: usize, expert: usize, x: &[f64]| -> Vec<f64> {
        let (rows, columns) = shape_of(SHAPE, matrix);
        let (rows, columns) = (rows as usize, columns as usize);
        let all = &numbers[matrix][expert * rows * columns..][..rows * columns];
        let row = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        all.chunks(columns).map(row).collect()
    };
    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    order.truncate(SHAPE.choices as usize);
    let shares: Vec<f64> = order
        .iter()
        .map(|one| f64::from(logits[*one]).exp())
        .collect();
    let mut y = vec![0.0; x.len()];
    for (expert, share) in order.iter().zip(&shares) {
        let (gate, up) = (product(0, *expert, &x), product(1, *expert, &x));
        let between: Vec<f64> = gate
            .iter()
            .zip(up)
            .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
            .collect();
        let weight = share / shares.iter().sum::<f64>();
        for (y, down) in y.iter_mut().zip(product(2, *expert, &between)) {
            *y += weight * down;
        }
    }
    y
}

#[test]
fn experts_are_those_of_sums_by_f64() {
    let store = store();
    for (stored, offset, seed) in [
        (StoredFormat::F32, 2, 1),
        (StoredFormat::Q8_0, 6 << 20, 9),
        (StoredFormat::Bf16, 4098, 5),
    ] {
        let layer = layer(offset, stored);
        let numbers = fill(&store, &layer, seed);
        let experts = ExpertLayers::new(&store, SHAPE, vec![layer]).unwrap();
        let x: Vec<f32> = (0..2 * 64).map(|at| (at % 13) as f32 / 6.0 - 1.0).collect();
        let logits = [0.5, -1.0, 2.0, 0.1, 1.5, 3.0, -0.5, 0.25, 2.5, 2.75];
        let found = experts.compute(0, &logits, &x, None).unwrap();
        for (token, found) in found.chunks(64).enumerate() {
            let expected = expected(&numbers, &logits[token * 5..][..5], &x[token * 64..][..64]);
            let size = expected.iter().fold(0.0, |size: f64, y| size.max(y.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (f64::from(*found) - expected).abs() <= 1e-4 * size,
                    "{stored:?}: {found} {expected}"
                );
            }
        }
    }
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    let store = store();
    let usage = |shape: ExpertShape, layers: Vec<Layer>| {
        let error = ExpertLayers::new(&store, shape, layers).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
    };
    let good = layer(0, StoredFormat::F32);
    usage(
        ExpertShape {
            choices: 6,
            ..SHAPE
        },
        vec![good],
    );
    usage(
        ExpertShape {
            choices: 0,
            ..SHAPE
        },
        vec![good],
    );
    usage(
        ExpertShape {
            experts: MOST_EXPERTS + 1,
            ..SHAPE
        },
        vec![good],
    );
    usage(ExpertShape { width: 33, ..SHAPE }, vec![good]);
    usage(SHAPE, Vec::new());
    usage(SHAPE, vec![layer(1, StoredFormat::F32)]);
    usage(SHAPE, vec![layer(store.len() - 4096, StoredFormat::F32)]);
    let experts = ExpertLayers::new(&store, SHAPE, vec![good]).unwrap();
    assert_eq!(experts.bytes(0), 3 * 64 * 96 * 4);
    assert_eq!(experts.bytes(1), 0);
    assert!(experts.compute(1, &[0.0; 5], &[0.0; 64], None).is_err());
    assert!(experts.compute(0, &[0.0; 4], &[0.0; 64], None).is_err());
    assert!(experts.compute(0, &[0.0; 5], &[0.0; 63], None).is_err());
    assert!(experts.compute(0, &[], &[], None).unwrap().is_empty());
}

#[test]
fn a_store_without_a_gpu_has_no_cache() {
    let experts = ExpertLayers::new(&store(), SHAPE, vec![layer(0, StoredFormat::F32)]).unwrap();
    #[cfg(feature = "cuda")]
    {
        let options = CacheOptions {
            bytes: 1 << 20,
            policy: ReplacementPolicy::Lru,
            pinned: Vec::new(),
            tokens: 1,
            limit: std::time::Duration::from_secs(1),
        };
        let error = GpuExperts::new(&experts, &options).err().unwrap();
        assert_eq!(error.exit_code(), 2, "{error}");
    }
    drop(experts);
}
