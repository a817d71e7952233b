//! Element types of matrices, on the CPU.

use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};

/// Element type of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixElement {
    /// 32-bit floating point.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl MatrixElement {
    /// Returns the size of an element in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns the name as people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Reads the element that `bytes` begin with.
    ///
    /// # Panics
    /// When there are fewer bytes than an element has.
    pub fn read(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Self::F32, [a, b, c, d, ..]) => f32::from_le_bytes([*a, *b, *c, *d]),
            (Self::F16, [a, b, ..]) => f32_of_f16(u16::from_le_bytes([*a, *b])),
            (Self::Bf16, [a, b, ..]) => f32_of_bf16(u16::from_le_bytes([*a, *b])),
            _ => panic!("{} bytes of {self:?}", bytes.len()),
        }
    }

    /// Appends the element that is nearest to `value`.
    pub fn write(self, value: f32, to: &mut Vec<u8>) {
        match self {
            Self::F32 => to.extend(value.to_le_bytes()),
            Self::F16 => to.extend(f16_of_f32(value).to_le_bytes()),
            Self::Bf16 => to.extend(bf16_of_f32(value).to_le_bytes()),
        }
    }
}
