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
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    F6E2M3,
    F6E3M2,
    F4,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Mxfp4,
    Nvfp4,
    Q1_0,
    Q2_0,
    Q8_1,
    Q8K,
    Iq1S,
    Iq1M,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq4Nl,
    Iq4Xs,
    Tq1_0,
    Tq2_0,
}

/// Properties of an element type.
struct DtypeRow {
    dtype: Dtype,
    safetensors: Option<&'static str>,
    /// The name in numpy and torch, or that of GGUF in small letters.
    name: &'static str,
    /// The number in GGUF.
    gguf: Option<u32>,
    /// The fewest elements that are whole bytes, and those bytes.
    block: (u64, u64),
}

const fn both(
    dtype: Dtype,
    safetensors: &'static str,
    name: &'static str,
    gguf: Option<u32>,
    block: (u64, u64),
) -> DtypeRow {
    DtypeRow {
        dtype,
        safetensors: Some(safetensors),
        name,
        gguf,
        block,
    }
}

const fn blocks(dtype: Dtype, name: &'static str, gguf: u32, block: (u64, u64)) -> DtypeRow {
    DtypeRow {
        dtype,
        safetensors: None,
        name,
        gguf: Some(gguf),
        block,
    }
}

/// Numbers and blocks of GGUF are those of ggml (`enum ggml_type` of ggml.h, structures of ggml-common.h).
const ALL: [DtypeRow; 50] = [
    both(Dtype::Bool, "BOOL", "bool", None, (1, 1)),
    both(Dtype::U8, "U8", "uint8", None, (1, 1)),
    both(Dtype::I8, "I8", "int8", Some(24), (1, 1)),
    both(Dtype::U16, "U16", "uint16", None, (1, 2)),
    both(Dtype::I16, "I16", "int16", Some(25), (1, 2)),
    both(Dtype::U32, "U32", "uint32", None, (1, 4)),
    both(Dtype::I32, "I32", "int32", Some(26), (1, 4)),
    both(Dtype::U64, "U64", "uint64", None, (1, 8)),
    both(Dtype::I64, "I64", "int64", Some(27), (1, 8)),
    both(Dtype::F16, "F16", "float16", Some(1), (1, 2)),
    both(Dtype::Bf16, "BF16", "bfloat16", Some(30), (1, 2)),
    both(Dtype::F32, "F32", "float32", Some(0), (1, 4)),
    both(Dtype::F64, "F64", "float64", Some(28), (1, 8)),
    both(Dtype::C64, "C64", "complex64", None, (1, 8)),
    DtypeRow {
        dtype: Dtype::C128,
        safetensors: None,
        name: "complex128",
        gguf: None,
        block: (1, 16),
    },
    both(Dtype::F8E4M3, "F8_E4M3", "float8_e4m3fn", None, (1, 1)),
    both(Dtype::F8E5M2, "F8_E5M2", "float8_e5m2", None, (1, 1)),
    both(Dtype::F8E8M0, "F8_E8M0", "float8_e8m0fnu", None, (1, 1)),
    both(
        Dtype::F8E4M3Fnuz,
        "F8_E4M3FNUZ",
        "float8_e4m3fnuz",
        None,
        (1, 1),
    ),
    both(
        Dtype::F8E5M2Fnuz,
        "F8_E5M2FNUZ",
        "float8_e5m2fnuz",
        None,
        (1, 1),
    ),
    both(Dtype::F6E2M3, "F6_E2M3", "float6_e2m3fn", None, (4, 3)),
    both(Dtype::F6E3M2, "F6_E3M2", "float6_e3m2fn", None, (4, 3)),
    both(Dtype::F4, "F4", "float4_e2m1fn_x2", None, (2, 1)),
    blocks(Dtype::Q4_0, "q4_0", 2, (32, 18)),
    blocks(Dtype::Q4_1, "q4_1", 3, (32, 20)),
    blocks(Dtype::Q5_0, "q5_0", 6, (32, 22)),
    blocks(Dtype::Q5_1, "q5_1", 7, (32, 24)),
    blocks(Dtype::Q8_0, "q8_0", 8, (32, 34)),
    blocks(Dtype::Q2K, "q2_k", 10, (256, 84)),
    blocks(Dtype::Q3K, "q3_k", 11, (256, 110)),
    blocks(Dtype::Q4K, "q4_k", 12, (256, 144)),
    blocks(Dtype::Q5K, "q5_k", 13, (256, 176)),
    blocks(Dtype::Q6K, "q6_k", 14, (256, 210)),
    blocks(Dtype::Mxfp4, "mxfp4", 39, (32, 17)),
    blocks(Dtype::Nvfp4, "nvfp4", 40, (64, 36)),
    blocks(Dtype::Q1_0, "q1_0", 41, (128, 18)),
    blocks(Dtype::Q2_0, "q2_0", 42, (64, 18)),
    blocks(Dtype::Q8_1, "q8_1", 9, (32, 36)),
    blocks(Dtype::Q8K, "q8_k", 15, (256, 292)),
    blocks(Dtype::Iq1S, "iq1_s", 19, (256, 50)),
    blocks(Dtype::Iq1M, "iq1_m", 29, (256, 56)),
    blocks(Dtype::Iq2Xxs, "iq2_xxs", 16, (256, 66)),
    blocks(Dtype::Iq2Xs, "iq2_xs", 17, (256, 74)),
    blocks(Dtype::Iq2S, "iq2_s", 22, (256, 82)),
    blocks(Dtype::Iq3Xxs, "iq3_xxs", 18, (256, 98)),
    blocks(Dtype::Iq3S, "iq3_s", 21, (256, 110)),
    blocks(Dtype::Iq4Nl, "iq4_nl", 20, (32, 18)),
    blocks(Dtype::Iq4Xs, "iq4_xs", 23, (256, 136)),
    blocks(Dtype::Tq1_0, "tq1_0", 34, (256, 54)),
    blocks(Dtype::Tq2_0, "tq2_0", 35, (256, 66)),
];

/// Numbers of types that llama.cpp once wrote and reads no longer.
const REMOVED: [(u32, &str); 8] = [
    (4, "q4_2"),
    (5, "q4_3"),
    (31, "q4_0_4_4"),
    (32, "q4_0_4_8"),
    (33, "q4_0_8_8"),
    (36, "iq4_nl_4_4"),
    (37, "iq4_nl_4_8"),
    (38, "iq4_nl_8_8"),
];

impl Dtype {
    fn row(self) -> &'static DtypeRow {
        // The table has each type once, in the order of the enum.
        &ALL[self as usize]
    }

    /// Returns the name in numpy, ml_dtypes and torch: `float16`; of GGUF's blocks their name in small letters:
    /// `q8_0`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the fewest elements that are whole bytes, and how many bytes: `(1, 4)` of `float32`, `(32, 34)`
    /// of `q8_0`.
    pub fn block(self) -> (u64, u64) {
        self.row().block
    }

    /// Returns the bytes of `elements` elements; none when they end inside a block or have 2^64 bytes or more.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let (block, bytes) = self.block();
        match elements % block {
            0 => (elements / block).checked_mul(bytes),
            _ => None,
        }
    }

    pub(super) fn of_safetensors(name: &str) -> Option<Self> {
        let found = ALL.iter().find(|one| one.safetensors == Some(name));
        found.map(|one| one.dtype)
    }

    /// # Errors
    /// The type in words, as the end of a sentence that begins with a tensor's name.
    pub(super) fn of_gguf(number: u32) -> Result<Self, String> {
        let found = ALL.iter().find(|one| one.gguf == Some(number));
        found.map(|one| one.dtype).ok_or_else(|| {
            let removed = REMOVED.iter().find(|one| one.0 == number);
            match removed {
                Some((_, name)) => {
                    format!("is of the type {number} ({name}), which llama.cpp no longer reads")
                }
                None => format!("is of the type {number}, which is not known here"),
            }
        })
    }

    /// Finds the type by letter and bytes of an array interface: `('f', 2)`.
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
        let mut all = ALL.iter();
        let found = all.find(|one| one.name == name && one.block == (1, bytes));
        found.map(|one| one.dtype)
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, Dtype, REMOVED};

    #[test]
    fn the_table_has_each_type_at_its_place() {
        for (index, row) in ALL.iter().enumerate() {
            assert_eq!(row.dtype as usize, index);
            assert_eq!(row.dtype.name(), row.name);
            let found = row.safetensors.map(Dtype::of_safetensors);
            assert!(found.is_none_or(|found| found == Some(row.dtype)));
            let found = row.gguf.map(Dtype::of_gguf);
            assert!(found.is_none_or(|found| found == Ok(row.dtype)));
            let is_of_numpy_alone = row.dtype == Dtype::C128;
            assert!(is_of_numpy_alone || row.safetensors.is_some() || row.gguf.is_some());
        }
        let mut numbers: Vec<u32> = ALL.iter().filter_map(|row| row.gguf).collect();
        numbers.extend(REMOVED.map(|one| one.0));
        numbers.sort_unstable();
        assert!(numbers.iter().copied().eq(0..=42), "{numbers:?}");
        for (number, name) in REMOVED {
            let refused = Dtype::of_gguf(number).unwrap_err();
            assert!(refused.contains(name), "{refused}");
        }
        assert!(Dtype::of_gguf(43).unwrap_err().contains("type 43"));
        assert_eq!(Dtype::of_safetensors("q8_0"), None);
    }

    #[test]
    fn elements_that_end_inside_a_byte_or_block_have_no_bytes() {
        assert_eq!(Dtype::F4.bytes(6), Some(3));
        assert_eq!(Dtype::F4.bytes(7), None);
        assert_eq!(Dtype::F6E2M3.bytes(4), Some(3));
        assert_eq!(Dtype::F64.bytes(1 << 61), None);
        assert_eq!(Dtype::Q6K.bytes(512), Some(420));
        assert_eq!(Dtype::Q6K.bytes(511), None);
        assert_eq!(Dtype::Q8_0.bytes(u64::MAX - 31), None);
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
