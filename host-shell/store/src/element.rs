//! Elements of rows that can be added: sums in 32 bits, rounded once at the end.

use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};

/// The type of the elements of a row, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RowElement {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16. Summed as `F32`, then rounded to the nearest, ties to even.
    F16,
    /// The upper half of binary32. Summed as `F32`, then rounded to the nearest, ties to even.
    Bf16,
    /// 32 bits with a sign; sums wrap.
    I32,
}

impl RowElement {
    /// Returns the size of an element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Adds each of `rows` to `sum`, all of the same length, in order.
    pub(crate) fn add(self, sum: &mut [u8], rows: &[&[u8]]) {
        let size = self.bytes();
        for (index, to) in sum.chunks_exact_mut(size).enumerate() {
            let terms = rows.iter().map(|row| &row[index * size..][..size]);
            match self {
                Self::I32 => {
                    let add =
                        |sum: i32, term: &[u8]| sum.wrapping_add(i32::from_le_bytes(four(term)));
                    let total = terms.fold(i32::from_le_bytes(four(to)), add);
                    to.copy_from_slice(&total.to_le_bytes());
                }
                _ => {
                    let total = terms.fold(self.widen(to), |sum, term| sum + self.widen(term));
                    self.narrow(total, to);
                }
            }
        }
    }

    fn widen(self, bytes: &[u8]) -> f32 {
        match self {
            Self::F16 => f32_of_f16(two(bytes)),
            Self::Bf16 => f32_of_bf16(two(bytes)),
            Self::F32 | Self::I32 => f32::from_le_bytes(four(bytes)),
        }
    }

    fn narrow(self, value: f32, to: &mut [u8]) {
        match self {
            Self::F16 => to.copy_from_slice(&f16_of_f32(value).to_le_bytes()),
            Self::Bf16 => to.copy_from_slice(&bf16_of_f32(value).to_le_bytes()),
            Self::F32 | Self::I32 => to.copy_from_slice(&value.to_le_bytes()),
        }
    }
}

fn four(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}

fn two(bytes: &[u8]) -> u16 {
    u16::from_le_bytes([bytes[0], bytes[1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_summed_in_order() {
        let mut sum = [1i32, i32::MAX].map(i32::to_le_bytes).concat();
        let term = [2i32, 1].map(i32::to_le_bytes).concat();
        RowElement::I32.add(&mut sum, &[&term, &term]);
        assert_eq!(sum, [5i32, i32::MIN + 1].map(i32::to_le_bytes).concat());
        let mut sum = 1f32.to_le_bytes().to_vec();
        RowElement::F32.add(&mut sum, &[&0.5f32.to_le_bytes(), &0.25f32.to_le_bytes()]);
        assert_eq!(sum, 1.75f32.to_le_bytes());
        // 2048 + 1 + 1 is 2050: rounded once, not after each term.
        let mut sum = 0x6800u16.to_le_bytes().to_vec();
        let one = 0x3C00u16.to_le_bytes();
        RowElement::F16.add(&mut sum, &[&one, &one]);
        assert_eq!(sum, 0x6801u16.to_le_bytes());
        let mut sum = 0x4380u16.to_le_bytes().to_vec();
        let one = 0x3F80u16.to_le_bytes();
        RowElement::Bf16.add(&mut sum, &[&one, &one]);
        assert_eq!(sum, 0x4381u16.to_le_bytes());
    }
}
