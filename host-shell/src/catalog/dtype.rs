//! Element types of tensors in files.

use serde::{Serialize, Serializer};

/// The type of an element. Bytes are in little-endian order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    Bf16,
    F32,
    F64,
    C64,
    C128,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    F6E2M3,
    F6E3M2,
    F4,
}

/// (type, name in safetensors, name in numpy and torch, bits).
const ALL: [(Dtype, &str, &str, u64); 21] = [
    (Dtype::Bool, "BOOL", "bool", 8),
    (Dtype::U8, "U8", "uint8", 8),
    (Dtype::I8, "I8", "int8", 8),
    (Dtype::U16, "U16", "uint16", 16),
    (Dtype::I16, "I16", "int16", 16),
    (Dtype::U32, "U32", "uint32", 32),
    (Dtype::I32, "I32", "int32", 32),
    (Dtype::U64, "U64", "uint64", 64),
    (Dtype::I64, "I64", "int64", 64),
    (Dtype::F16, "F16", "float16", 16),
    (Dtype::Bf16, "BF16", "bfloat16", 16),
    (Dtype::F32, "F32", "float32", 32),
    (Dtype::F64, "F64", "float64", 64),
    (Dtype::C64, "C64", "complex64", 64),
    (Dtype::C128, "C128", "complex128", 128),
    (Dtype::F8E4M3, "F8_E4M3", "float8_e4m3fn", 8),
    (Dtype::F8E5M2, "F8_E5M2", "float8_e5m2", 8),
    (Dtype::F8E8M0, "F8_E8M0", "float8_e8m0fnu", 8),
    (Dtype::F6E2M3, "F6_E2M3", "float6_e2m3fn", 6),
    (Dtype::F6E3M2, "F6_E3M2", "float6_e3m2fn", 6),
    (Dtype::F4, "F4", "float4_e2m1fn_x2", 4),
];

impl Dtype {
    fn row(self) -> &'static (Self, &'static str, &'static str, u64) {
        // The table has each type once, in the order of the enum.
        &ALL[self as usize]
    }

    /// The name in numpy, ml_dtypes and torch: `float16`.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Bits of an element.
    pub fn bits(self) -> u64 {
        self.row().3
    }

    /// Bytes of `elements` elements; none when they end inside a byte or are more than 2^64.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    pub(super) fn of_safetensors(name: &str) -> Option<Self> {
        ALL.iter().find(|one| one.1 == name).map(|one| one.0)
    }

    /// By letter and bytes of an array interface: `('f', 2)`.
    pub(super) fn of_kind(kind: char, bytes: u64) -> Option<Self> {
        let word = match kind {
            'b' => "bool",
            'i' => "int",
            'u' => "uint",
            'f' => "float",
            'c' => "complex",
            _ => return None,
        };
        let name = match kind {
            'b' => word.to_owned(),
            _ => format!("{word}{}", bytes.checked_mul(8)?),
        };
        let found = ALL.iter().find(|one| one.2 == name && one.3 / 8 == bytes);
        found.map(|one| one.0)
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, Dtype};

    #[test]
    fn the_table_has_each_type_at_its_place() {
        for (index, (dtype, safetensors, _, bits)) in ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, index);
            assert_eq!(Dtype::of_safetensors(safetensors), Some(dtype));
            assert_eq!(dtype.bits(), bits);
        }
    }

    #[test]
    fn elements_that_end_inside_a_byte_have_no_bytes() {
        assert_eq!(Dtype::F4.bytes(6), Some(3));
        assert_eq!(Dtype::F4.bytes(7), None);
        assert_eq!(Dtype::F6E2M3.bytes(4), Some(3));
        assert_eq!(Dtype::F64.bytes(1 << 61), None);
    }

    #[test]
    fn letters_of_array_interfaces_are_known() {
        assert_eq!(Dtype::of_kind('f', 2), Some(Dtype::F16));
        assert_eq!(Dtype::of_kind('b', 1), Some(Dtype::Bool));
        assert_eq!(Dtype::of_kind('c', 16), Some(Dtype::C128));
        assert_eq!(Dtype::of_kind('f', 16), None);
        assert_eq!(Dtype::of_kind('b', 2), None);
        assert_eq!(Dtype::of_kind('u', u64::MAX), None);
    }
}
