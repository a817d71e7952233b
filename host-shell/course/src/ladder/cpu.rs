//! Matrix products by the CPU: the reference for the kernels.
//!
//! Matrices are row-major, without gaps.

use rayon::prelude::*;

/// Rows of the result that a thread takes at a time.
const ROWS: usize = 64;
/// Terms of a block.
const DEPTH: usize = 128;
/// Number of columns of a block: with [`DEPTH`] rows of `b` it takes 256 KiB, which a core's cache holds.
const COLUMNS: usize = 512;
/// Rows and columns of the result that stay in registers.
const TILE: (usize, usize) = (4, 16);

/// Rows of `a`, columns of `b`, and terms of each sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// Rows of the result.
    pub m: usize,
    /// Columns of it.
    pub n: usize,
    /// Terms.
    pub k: usize,
}

impl MatmulShape {
    /// Returns the number of floating-point operations of a product.
    pub fn operations(self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }

    fn check(self, a: &[f32], b: &[f32], c: &[f32]) {
        let of = |rows: usize, columns: usize| rows.checked_mul(columns);
        assert_eq!(Some(a.len()), of(self.m, self.k), "elements of a");
        assert_eq!(Some(b.len()), of(self.k, self.n), "elements of b");
        assert_eq!(Some(c.len()), of(self.m, self.n), "elements of c");
    }
}

/// Computes one sum after another, by one thread.
///
/// # Panics
/// Panics if the number of elements of a slice differs from `shape`.
pub fn matmul_cpu(a: &[f32], b: &[f32], c: &mut [f32], shape: MatmulShape) {
    shape.check(a, b, c);
    let MatmulShape { n, k, .. } = shape;
    for (row, c) in c.chunks_mut(n.max(1)).enumerate() {
        for (column, c) in c.iter_mut().enumerate() {
            let terms = a[row * k..][..k]
                .iter()
                .zip(b.iter().skip(column).step_by(n));
            *c = terms.map(|(a, b)| a * b).sum();
        }
    }
}

/// Computes the same in blocks that fit into caches, on all threads of rayon's pool.
///
/// # Panics
/// As [`matmul_cpu`].
pub fn matmul_cpu_blocked(a: &[f32], b: &[f32], c: &mut [f32], shape: MatmulShape) {
    shape.check(a, b, c);
    let MatmulShape { n, k, .. } = shape;
    if n == 0 {
        return;
    }
    c.par_chunks_mut(ROWS * n)
        .enumerate()
        .for_each(|(part, c)| {
            c.fill(0.0);
            let mut packed = vec![0.0; DEPTH * TILE.1];
            let a = &a[part * ROWS * k..];
            for first in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - first);
                for from in (0..n).step_by(COLUMNS) {
                    for column in (from..n.min(from + COLUMNS)).step_by(TILE.1) {
                        let width = TILE.1.min(n - column);
                        pack(
                            &b[first * n + column..],
                            n,
                            width,
                            &mut packed[..depth * TILE.1],
                        );
                        strip(
                            &a[first..],
                            &packed[..depth * TILE.1],
                            c,
                            (n, k),
                            (column, width),
                        );
                    }
                }
            }
        });
}

/// Puts a strip of `width` columns of `b` together, row after row, with zeros up to the width of a tile.
fn pack(b: &[f32], stride: usize, width: usize, packed: &mut [f32]) {
    for (row, to) in packed
        .as_chunks_mut::<{ TILE.1 }>()
        .0
        .iter_mut()
        .enumerate()
    {
        to.fill(0.0);
        to[..width].copy_from_slice(&b[row * stride..][..width]);
    }
}

/// Adds the products of all rows of `c` with a strip of `b` to a strip of `c`.
fn strip(
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    (n, k): (usize, usize),
    (column, width): (usize, usize),
) {
    let b = b.as_chunks::<{ TILE.1 }>().0;
    let rows = c.len() / n;
    for row in (0..rows).step_by(TILE.0) {
        let mut sums = [[0.0; TILE.1]; TILE.0];
        let height = TILE.0.min(rows - row);
        // Rows past the end repeat the last one.
        let of_a: [&[f32]; TILE.0] =
            std::array::from_fn(|i| &a[(row + i.min(height - 1)) * k..][..b.len()]);
        for (term, b) in b.iter().enumerate() {
            for (sums, a) in sums.iter_mut().zip(of_a) {
                for (sum, b) in sums.iter_mut().zip(b) {
                    *sum += a[term] * b;
                }
            }
        }
        for (i, sums) in sums.iter().enumerate().take(height) {
            let c = &mut c[(row + i) * n + column..][..width];
            for (c, sum) in c.iter_mut().zip(sums) {
                *c += sum;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let hash = |at: u32| (at ^ seed).wrapping_mul(2_654_435_761) >> 8;
        (0..count as u32)
            .map(|at| hash(at) as f32 / (1 << 23) as f32 - 1.0)
            .collect()
    }

    /// Compares both with sums of f64; errors are relative to the sums of the products' absolute values.
    fn compare(shape: MatmulShape, seed: u32) {
        let MatmulShape { m, n, k } = shape;
        let (a, b) = (numbers(m * k, seed), numbers(k * n, !seed));
        let poisoned = || vec![f32::NAN; m * n];
        let (mut plain, mut blocked) = (poisoned(), poisoned());
        matmul_cpu(&a, &b, &mut plain, shape);
        matmul_cpu_blocked(&a, &b, &mut blocked, shape);
        for at in 0..m * n {
            let (row, column) = (at / n, at % n);
            let term = |i: usize| f64::from(a[row * k + i]) * f64::from(b[i * n + column]);
            let expected: f64 = (0..k).map(term).sum();
            let size: f64 = (0..k).map(|i| term(i).abs()).sum();
            for found in [plain[at], blocked[at]] {
                let error = (f64::from(found) - expected).abs();
                assert!(
                    error <= 1e-5 * size,
                    "{shape:?} {row} {column}: {found}, not {expected}"
                );
            }
        }
    }

    #[test]
    fn sums_without_terms_are_zero() {
        for (m, n, k) in [(0, 5, 3), (5, 0, 3), (3, 5, 0), (0, 0, 0), (1, 1, 1)] {
            compare(MatmulShape { m, n, k }, 7);
        }
    }

    #[test]
    fn blocks_have_borders() {
        compare(
            MatmulShape {
                m: ROWS + 3,
                n: COLUMNS + 17,
                k: DEPTH + 1,
            },
            1,
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn products_are_those_of_f64(m in 0usize..70, n in 0usize..70, k in 0usize..300, seed: u32) {
            compare(MatmulShape { m, n, k }, seed);
        }
    }

    #[test]
    #[should_panic(expected = "elements of b")]
    fn another_length_is_refused() {
        matmul_cpu(&[1.0], &[], &mut [0.0], MatmulShape { m: 1, n: 1, k: 1 });
    }
}
