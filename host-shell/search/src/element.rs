//! Types of the elements of a caller's vectors. Nodes hold `f32`, which is exact for each of them.

use nvme_formats::{f32_of_bf16, f32_of_f16};

/// The type of an element, little-endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ElementType {
    /// IEEE 754 binary32.
    #[default]
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
    /// Signed bytes.
    I8,
    /// Bytes without a sign.
    U8,
}

impl ElementType {
    /// All element types.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::I8, Self::U8];

    /// Returns the name that the command line uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
            Self::U8 => "u8",
        }
    }

    /// Returns the name that numpy and torch use.
    pub const fn dtype(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::I8 => "int8",
            Self::U8 => "uint8",
        }
    }

    /// Returns the type of this name, of the command line's or of numpy's.
    pub fn of_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|one| one.name() == name || one.dtype() == name)
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I8 | Self::U8 => 1,
        }
    }

    /// Appends the elements in `bytes` to `to`, as `f32`; bytes at the end that are no element are left out.
    pub fn widen(self, bytes: &[u8], to: &mut Vec<f32>) {
        let halves = || {
            let words = bytes.as_chunks::<2>().0.iter();
            words.map(|word| u16::from_le_bytes(*word))
        };
        match self {
            Self::F32 => {
                let words = bytes.as_chunks::<4>().0.iter();
                to.extend(words.map(|word| f32::from_le_bytes(*word)));
            }
            Self::F16 => to.extend(halves().map(f32_of_f16)),
            Self::Bf16 => to.extend(halves().map(f32_of_bf16)),
            Self::I8 => to.extend(bytes.iter().map(|byte| f32::from(byte.cast_signed()))),
            Self::U8 => to.extend(bytes.iter().map(|byte| f32::from(*byte))),
        }
    }
}
