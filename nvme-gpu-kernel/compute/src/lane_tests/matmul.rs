//! Products of matrices by lanes, every kernel over shapes with edges, against sums of `f64`.

use super::{address_mut, dice, launch_of};
use crate::matmul::entries::{self, LaneTensorMap};
use crate::matmul::{
    COARSENED, MMA, MatmulParameters, MatmulTile, NAIVE, TILED, TiledMatmul, VECTORIZED, WGMMA,
    WGMMA_DEPTH,
};
use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};

/// Rows, columns and terms.
const SHAPES: [[u32; 3]; 5] = [
    [1, 1, 1],
    [2, 7, 5],
    [33, 65, 31],
    [130, 140, 72],
    [17, 260, 0],
];

/// A matrix of elements of 2 or 4 bytes, whose first element is at a multiple of 16 bytes or an element behind it.
struct PaddedMatrix {
    words: Vec<u32>,
    first: usize,
    stride: usize,
    is_half: bool,
}

impl PaddedMatrix {
    fn new(rows: u32, columns: u32, is_half: bool, is_aligned: bool) -> Self {
        let stride = match is_aligned {
            true => columns.next_multiple_of(8) + 8,
            false => columns + 3,
        } as usize;
        let words = vec![u32::MAX; stride * rows as usize + 32];
        let elements = if is_half { 2 } else { 1 };
        let first = words.as_ptr().align_offset(16) * elements + usize::from(!is_aligned);
        Self {
            words,
            first,
            stride,
            is_half,
        }
    }

    fn address(&mut self) -> u64 {
        let bytes = if self.is_half { 2 } else { 4 };
        address_mut(&mut self.words) + self.first as u64 * bytes
    }

    fn bits(&self, index: usize) -> u32 {
        match self.is_half {
            true => self.words[index / 2] >> (index % 2 * 16) & 0xFFFF,
            false => self.words[index],
        }
    }

    fn put(&mut self, row: usize, column: usize, bits: u32) {
        let index = self.first + row * self.stride + column;
        match self.is_half {
            true => {
                let shift = index % 2 * 16;
                let word = &mut self.words[index / 2];
                *word = *word & !(0xFFFF << shift) | bits << shift;
            }
            false => self.words[index] = bits,
        }
    }

    fn at(&self, row: usize, column: usize) -> u32 {
        self.bits(self.first + row * self.stride + column)
    }

    /// Asserts that nothing but `rows` x `columns` elements was written.
    #[track_caller]
    fn assert_rest(&self, rows: u32, columns: u32, what: &str) {
        let elements = self.words.len() * if self.is_half { 2 } else { 1 };
        let poison = if self.is_half { 0xFFFF } else { u32::MAX };
        for index in 0..elements {
            let place = index.checked_sub(self.first);
            let place = place.map(|place| (place / self.stride, place % self.stride));
            let is_result = |(row, column)| row < rows as usize && column < columns as usize;
            if !place.is_some_and(is_result) {
                assert_eq!(self.bits(index), poison, "{what}: element {index} beside");
            }
        }
    }
}

/// Number formats of the factors: bits of a number, and the number of bits.
#[derive(Clone, Copy)]
struct NumberFormat {
    is_half: bool,
    is_bf16: bool,
    narrow: fn(f32) -> u32,
    widen: fn(u32) -> f32,
}

const F32: NumberFormat = NumberFormat {
    is_half: false,
    is_bf16: false,
    narrow: f32::to_bits,
    widen: f32::from_bits,
};
const BF16: NumberFormat = NumberFormat {
    is_half: true,
    is_bf16: true,
    narrow: |number| bf16_of_f32(number).into(),
    widen: |bits| f32_of_bf16(bits as u16),
};
const F16: NumberFormat = NumberFormat {
    is_half: true,
    is_bf16: false,
    narrow: |number| f16_of_f32(number).into(),
    widen: |bits| f32_of_f16(bits as u16),
};

/// A product, and the launch that computes it.
struct Product {
    a: PaddedMatrix,
    b: PaddedMatrix,
    c: PaddedMatrix,
    shape: [u32; 3],
    format: NumberFormat,
    result: NumberFormat,
}

impl Product {
    fn new(shape: [u32; 3], format: NumberFormat, is_wide: bool, aligned: [bool; 3]) -> Self {
        let [m, n, k] = shape;
        let mut throw = dice(u64::from(m * n + k));
        let mut factor = |rows, columns, is_aligned| {
            let mut all = PaddedMatrix::new(rows, columns, format.is_half, is_aligned);
            for row in 0..rows as usize {
                for column in 0..columns as usize {
                    let number = throw(2001) as f32 / 1000.0 - 1.0;
                    all.put(row, column, (format.narrow)(number));
                }
            }
            all
        };
        let (a, b) = (factor(m, k, aligned[0]), factor(k, n, aligned[1]));
        let result = if is_wide { F32 } else { format };
        let c = PaddedMatrix::new(m, n, result.is_half, aligned[2]);
        Self {
            a,
            b,
            c,
            shape,
            format,
            result,
        }
    }

    fn job(&mut self) -> MatmulParameters {
        let [m, n, k] = self.shape;
        MatmulParameters {
            a: self.a.address(),
            b: self.b.address(),
            c: self.c.address(),
            a_stride: self.a.stride as u64,
            b_stride: self.b.stride as u64,
            c_stride: self.c.stride as u64,
            m,
            n,
            k,
            is_bf16: self.format.is_bf16.into(),
            is_wide: (!self.result.is_half).into(),
            reserved: 0,
        }
    }

    /// Multiplies, and checks every element.
    #[track_caller]
    fn run(mut self, what: &str, tile: MatmulTile, kernel: unsafe fn(MatmulParameters)) {
        let job = self.job();
        let blocks = tile.count(job.m, job.n) as u32;
        launch_of((blocks, tile.threads, tile.shared_bytes), kernel, job);
        self.check(what);
    }

    /// Does the same by [`WGMMA`]'s kernel in `blocks` blocks.
    #[track_caller]
    fn run_by_groups(mut self, blocks: u32) {
        let job = self.job();
        let map = |address, sizes: [u32; 2], stride: u64, boxes| {
            let map = LaneTensorMap {
                address,
                sizes: sizes.map(u64::from),
                row_bytes: stride * 2,
                boxes,
            };
            map.words()
        };
        let tiled = TiledMatmul {
            a_map: map(
                job.a,
                [job.k, job.m],
                job.a_stride,
                [WGMMA_DEPTH, WGMMA.rows],
            ),
            b_map: map(job.b, [job.n, job.k], job.b_stride, [64, WGMMA_DEPTH]),
            job,
            tiles: WGMMA.count(job.m, job.n) as u32,
            reserved: 0,
        };
        let shape = (blocks, WGMMA.threads, WGMMA.shared_bytes);
        launch_of(shape, entries::nvme_matmul_wgmma, tiled);
        self.check("wgmma");
    }

    #[track_caller]
    fn check(&self, what: &str) {
        let [m, n, k] = self.shape;
        let what = format!("{what} of {:?}", self.shape);
        let rounding = match (self.result.is_half, self.result.is_bf16) {
            (false, _) => 0.0,
            (_, true) => 1.0 / 256.0,
            (_, false) => 1.0 / 2048.0,
        };
        for row in 0..m as usize {
            for column in 0..n as usize {
                let term = |i: usize| {
                    let (a, b) = (self.a.at(row, i), self.b.at(i, column));
                    f64::from((self.format.widen)(a)) * f64::from((self.format.widen)(b))
                };
                let expected: f64 = (0..k as usize).map(term).sum();
                let sizes: f64 = (0..k as usize).map(|i| term(i).abs()).sum();
                let found = (self.result.widen)(self.c.at(row, column));
                let allowed = 1e-6 * sizes + rounding * expected.abs();
                let apart = (f64::from(found) - expected).abs();
                assert!(
                    apart <= allowed,
                    "{what}: {row}, {column} is {found}, not {expected}"
                );
            }
        }
        self.c.assert_rest(m, n, &what);
    }
}

type Kernel = unsafe fn(MatmulParameters);

#[test]
fn products_of_numbers_are_sums_of_their_terms() {
    let kernels: [(&str, MatmulTile, Kernel); 4] = [
        ("naive", NAIVE, entries::nvme_matmul_naive),
        ("tiled", TILED, entries::nvme_matmul_tiled),
        ("vectorized", VECTORIZED, entries::nvme_matmul_vectorized),
        ("coarsened", COARSENED, entries::nvme_matmul_coarsened),
    ];
    for (name, tile, kernel) in kernels {
        for shape in SHAPES {
            for is_aligned in [true, false] {
                Product::new(shape, F32, true, [is_aligned; 3]).run(name, tile, kernel);
            }
        }
    }
}

#[test]
fn products_of_halves_are_sums_of_their_terms() {
    for shape in SHAPES {
        for (format, is_wide, aligned) in [
            (BF16, false, [true; 3]),
            (BF16, true, [true, true, false]),
            (F16, false, [false; 3]),
            (F16, true, [true; 3]),
        ] {
            let product = Product::new(shape, format, is_wide, aligned);
            product.run("mma", MMA, entries::nvme_matmul_mma);
        }
    }
}

/// With more stages than the block has at once, and several tiles for a block.
#[test]
fn products_by_warpgroups_are_sums_of_their_terms() {
    for (shape, blocks) in [
        ([1, 1, 1], 1),
        ([33, 65, 31], 1),
        ([130, 248, 72], 2),
        ([200, 300, 600], 3),
    ] {
        for (format, is_wide, is_aligned) in [
            (BF16, false, true),
            (BF16, true, false),
            (F16, false, false),
            (F16, true, true),
        ] {
            Product::new(shape, format, is_wide, [true, true, is_aligned]).run_by_groups(blocks);
        }
    }
}
