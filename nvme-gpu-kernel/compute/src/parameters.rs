//! Parameters of the steps between the matrices of a token: conversion, norm, rotation, attention, activation, choice.

/// Parameters of the conversion of stored rows to `f32`: `y[t]` gets the numbers of row `t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct UnpackParameters {
    /// Address of `tokens` rows, `row_stride` bytes apart, an even number.
    pub rows: u64,
    /// Address of `tokens` vectors of `columns` elements.
    pub y: u64,
    /// Distance of rows in bytes.
    pub row_stride: u64,
    /// Elements of a row, a multiple of [`UNIT`](nvme_formats::UNIT).
    pub columns: u32,
    /// Number of rows.
    pub tokens: u32,
    /// Number of the [`StoredFormat`](nvme_formats::StoredFormat) of the rows.
    pub stored: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Parameters of `y = x / sqrt(mean(x^2) + epsilon) * weight` for each vector. A vector whose squares add up to more than
/// `f32` holds gives NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct RmsNorm {
    /// Address of `tokens` vectors of `elements` elements.
    pub x: u64,
    /// Address of `elements` factors.
    pub weight: u64,
    /// Address of the results, in the layout of `x`; may be `x`.
    pub y: u64,
    /// Elements of a vector.
    pub elements: u32,
    /// Number of vectors.
    pub tokens: u32,
    /// Number that is added to the mean.
    pub epsilon: f32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Parameters of the rotary position embedding (RoPE): rotates queries and keys by their positions, and writes keys and
/// values into the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RopeParameters {
    /// Address of `tokens` times `heads` vectors of `head_elements`, rotated in place.
    pub queries: u64,
    /// Address of `tokens` times `kv_heads` vectors of `head_elements`.
    pub keys: u64,
    /// Address of the values, in the layout of `keys`.
    pub values: u64,
    /// Address of cosine and sine of each pair of each position: `head_elements` numbers a position.
    pub angles: u64,
    /// Address of the keys by position, `kv_heads` vectors of `head_elements` each.
    pub key_cache: u64,
    /// Address of the values, in the layout of `key_cache`.
    pub value_cache: u64,
    /// Position of the first token.
    pub position: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a head, even.
    pub head_elements: u32,
    /// 0 if neighbouring elements are a pair, as in files of Llama; 1 if element `i` and element
    /// `head_elements / 2 + i` are, as in Qwen3 and gpt-oss.
    pub halves: u32,
}

/// Parameters of causal attention: each query over the keys of its position and of earlier ones, and over a sink that has
/// no value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct AttentionParameters {
    /// Address of the queries, as [`RopeParameters::queries`].
    pub queries: u64,
    /// Address of the keys, as [`RopeParameters::key_cache`].
    pub key_cache: u64,
    /// Address of the values, as [`RopeParameters::key_cache`].
    pub value_cache: u64,
    /// Address of the results, in the layout of the queries.
    pub y: u64,
    /// Address of a number for each head of queries, which joins the softmax as the product of a key whose value is 0; 0
    /// for none.
    pub sinks: u64,
    /// Position of the first token.
    pub position: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values: `heads` is a multiple.
    pub kv_heads: u32,
    /// Elements of a head, at most [`MOST_HEAD_ELEMENTS`](crate::MOST_HEAD_ELEMENTS).
    pub head_elements: u32,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Number of positions that a query sees, its own and those before it; 0 for all.
    pub window: u32,
    /// Reserved, 0.
    pub reserved: u32,
}

/// Parameters of `y[t] += bias` for each vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AddBias {
    /// Address of `elements` numbers.
    pub bias: u64,
    /// Address of `tokens` vectors of `elements` elements.
    pub y: u64,
    /// Elements of a vector.
    pub elements: u32,
    /// Number of vectors.
    pub tokens: u32,
}

/// Parameters of `y = x / (1 + exp(-x)) * factor`, element by element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SiluMul {
    /// Address of `elements` numbers.
    pub x: u64,
    /// Address of `elements` numbers.
    pub factor: u64,
    /// Address of `elements` numbers; may be `x`.
    pub y: u64,
    /// Number of elements.
    pub elements: u64,
}

/// Parameters of the search for the index of the largest number, the first of equal ones: `nvme_argmax` finds
/// it, `nvme_take_token` stores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ArgmaxParameters {
    /// Address of `elements` numbers.
    pub x: u64,
    /// Address of 8 bytes: 0 before and after both kernels.
    pub best: u64,
    /// Address of an `i64` for the index.
    pub index: u64,
    /// Number of elements.
    pub elements: u64,
}
