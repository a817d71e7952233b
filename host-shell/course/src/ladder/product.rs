//! Description of a product: its operands and the kernel for it, with the checks that this kernel can compute
//! it.

use super::MatrixElement;
use nvme_compute_kernel::matmul::{self, MatmulTile};
use nvme_host::{Error, Result};

/// Largest number of blocks of a launch.
const MOST_TILES: u64 = i32::MAX as u64;

/// A step of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulStep {
    /// A thread for each element of the result.
    Naive,
    /// Tiles in shared memory.
    Tiled,
    /// Loads and stores of 16 bytes.
    Vectorized,
    /// 8 x 8 elements for each thread, in registers.
    Coarsened,
    /// Tensor cores by `mma.sync`.
    Mma,
    /// Tensor cores of compute capability 9.0 by `wgmma`, fed by TMA.
    Wgmma,
}

impl MatmulStep {
    /// All kernels, from the simplest to the fastest.
    pub const ALL: [Self; 6] = [
        Self::Naive,
        Self::Tiled,
        Self::Vectorized,
        Self::Coarsened,
        Self::Mma,
        Self::Wgmma,
    ];

    /// Returns the name as people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::Tiled => "tiled",
            Self::Vectorized => "vectorized",
            Self::Coarsened => "coarsened",
            Self::Mma => "mma",
            Self::Wgmma => "wgmma",
        }
    }

    /// Returns the rung that is called `name`.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rung| rung.name() == name)
    }

    /// Returns the kernel.
    pub fn symbol(self) -> &'static str {
        match self {
            Self::Naive => "nvme_matmul_naive",
            Self::Tiled => "nvme_matmul_tiled",
            Self::Vectorized => "nvme_matmul_vectorized",
            Self::Coarsened => "nvme_matmul_coarsened",
            Self::Mma => "nvme_matmul_mma",
            Self::Wgmma => "nvme_matmul_wgmma",
        }
    }

    /// True if the step multiplies halves (f16 or bf16) on tensor cores, rather than f32.
    pub fn has_tensor_cores(self) -> bool {
        matches!(self, Self::Mma | Self::Wgmma)
    }

    pub(super) fn tile(self) -> &'static MatmulTile {
        match self {
            Self::Naive => &matmul::NAIVE,
            Self::Tiled => &matmul::TILED,
            Self::Vectorized => &matmul::VECTORIZED,
            Self::Coarsened => &matmul::COARSENED,
            Self::Mma => &matmul::MMA,
            Self::Wgmma => &matmul::WGMMA,
        }
    }
}

/// A matrix on a GPU, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixOperand {
    /// Address of the matrix, a multiple of an element's bytes.
    pub address: u64,
    /// Distance of two rows in elements: at least the number of columns.
    pub stride: u64,
}

/// `C = A B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulOperands {
    /// `m` rows of `k` elements.
    pub a: MatrixOperand,
    /// `k` rows of `n` elements.
    pub b: MatrixOperand,
    /// The result: `m` rows of `n` elements.
    pub c: MatrixOperand,
    /// Number of rows of the result. Any of `m`, `n` and `k` may be 0: a sum without terms is 0.
    pub m: u32,
    /// Columns of the result.
    pub n: u32,
    /// Terms of each sum.
    pub k: u32,
    /// Element type of `a` and `b`. Sums are f32.
    pub factors: MatrixElement,
    /// Element type of `c`: f32, or the type of `a` and `b`, to which sums are rounded.
    pub result: MatrixElement,
}

impl MatmulOperands {
    /// Checks that `rung` can compute this product.
    ///
    /// # Errors
    /// [`Error::Usage`] for elements that the rung does not multiply, for rows that overlap, for addresses that
    /// are no multiple of an element, for matrices that end past the address space, and for more than 2^31
    /// tiles.
    pub fn check(&self, rung: MatmulStep) -> Result<()> {
        let is_half = self.factors != MatrixElement::F32;
        let fits = self.result == self.factors || self.result == MatrixElement::F32;
        if is_half != rung.has_tensor_cores() || !fits {
            return Err(Error::usage(
                format!(
                    "the step {} does not multiply {} to {}",
                    rung.name(),
                    self.factors.name(),
                    self.result.name()
                ),
                "use f32 with naive, tiled, vectorized and coarsened; f16 or bf16 with mma and wgmma, and f32 or the same \
                 for the result",
            ));
        }
        check_operand("a", &self.a, (self.m, self.k), self.factors)?;
        check_operand("b", &self.b, (self.k, self.n), self.factors)?;
        check_operand("c", &self.c, (self.m, self.n), self.result)?;
        let tiles = rung.tile().count(self.m, self.n);
        if tiles > MOST_TILES {
            return Err(Error::usage(
                format!(
                    "a product of {} x {} elements has {tiles} tiles, more than a launch takes",
                    self.m, self.n
                ),
                "multiply parts of the matrices",
            ));
        }
        Ok(())
    }

    /// Returns the argument of the kernels.
    #[cfg(feature = "cuda")]
    pub(super) fn argument(&self) -> matmul::MatmulParameters {
        matmul::MatmulParameters {
            a: self.a.address,
            b: self.b.address,
            c: self.c.address,
            a_stride: self.a.stride,
            b_stride: self.b.stride,
            c_stride: self.c.stride,
            m: self.m,
            n: self.n,
            k: self.k,
            is_bf16: (self.factors == MatrixElement::Bf16).into(),
            is_wide: (self.result == MatrixElement::F32).into(),
            reserved: 0,
        }
    }
}

fn check_operand(
    name: &str,
    operand: &MatrixOperand,
    (rows, columns): (u32, u32),
    element: MatrixElement,
) -> Result<()> {
    let MatrixOperand { address, stride } = *operand;
    let wrong = |what: String, remedy: &str| {
        let cause = format!("matrix {name} cannot be used: {what}");
        Err(Error::usage(cause, remedy))
    };
    if !address.is_multiple_of(element.bytes()) {
        return wrong(
            format!(
                "its address {address:#x} is not a multiple of {} bytes, an element",
                element.bytes()
            ),
            "use such a multiple",
        );
    }
    if rows > 1 && stride < columns.into() {
        return wrong(
            format!("its stride of {stride} elements is less than a row of {columns}"),
            "use at least as many elements",
        );
    }
    let elements = u128::from(rows.saturating_sub(1)) * u128::from(stride) + u128::from(columns);
    let end = u128::from(address) + elements * u128::from(element.bytes());
    if end > 1 << 63 {
        return wrong(
            format!(
                "its {rows} rows of stride {stride} from address {address:#x} on do not fit into 63 bits"
            ),
            "use rows that fit into memory",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(element: MatrixElement) -> MatmulOperands {
        let operand = |stride| MatrixOperand {
            address: 256,
            stride,
        };
        MatmulOperands {
            a: operand(5),
            b: operand(4),
            c: operand(4),
            m: 3,
            n: 4,
            k: 5,
            factors: element,
            result: element,
        }
    }

    #[test]
    fn rungs_have_names() {
        for rung in MatmulStep::ALL {
            assert_eq!(MatmulStep::of_name(rung.name()), Some(rung));
            assert!(rung.symbol().ends_with(rung.name()));
        }
        assert_eq!(MatmulStep::of_name("cublas"), None);
    }

    #[test]
    fn what_a_rung_cannot_compute_is_refused() {
        let refused = |rung, change: fn(&mut MatmulOperands)| {
            let halves = matches!(rung, MatmulStep::Mma | MatmulStep::Wgmma);
            let mut product = product(if halves {
                MatrixElement::Bf16
            } else {
                MatrixElement::F32
            });
            product.check(rung).unwrap();
            change(&mut product);
            match product.check(rung) {
                Err(error @ Error::Usage { .. }) => error.to_string(),
                other => panic!("{other:?}"),
            }
        };
        for rung in MatmulStep::ALL {
            assert!(
                refused(rung, |p| p.a.stride = 4)
                    .contains("its stride of 4 elements is less than a row of 5")
            );
            assert!(refused(rung, |p| p.b.stride = 0).contains("matrix b"));
            assert!(refused(rung, |p| p.c.address = 257).contains("matrix c"));
            assert!(refused(rung, |p| p.a.stride = u64::MAX).contains("from address 0x100 on"));
            assert!(
                refused(rung, |p| {
                    (p.m, p.n, p.k) = (1 << 24, 1 << 24, 0);
                    (p.b.stride, p.c.stride) = (1 << 24, 1 << 24);
                })
                .contains("tiles")
            );
            assert!(refused(rung, |p| p.result = MatrixElement::F16).contains("does not multiply"));
        }
        assert!(product(MatrixElement::F32).check(MatmulStep::Mma).is_err());
        assert!(
            product(MatrixElement::F16)
                .check(MatmulStep::Naive)
                .is_err()
        );
        let wide = MatmulOperands {
            result: MatrixElement::F32,
            ..product(MatrixElement::F16)
        };
        wide.check(MatmulStep::Wgmma).unwrap();
    }

    #[test]
    fn one_row_may_have_any_stride() {
        let mut product = product(MatrixElement::F32);
        (product.m, product.a.stride, product.c.stride) = (1, 0, 0);
        product.check(MatmulStep::Tiled).unwrap();
    }
}
