//! The steps by threads of the CPU, over slices. They call the reference of the crate of kernels, with which
//! `gpu-test` compares each kernel, and share its rows among threads.

use nvme_compute_kernel::reference;
pub use nvme_compute_kernel::reference::angles;
use nvme_formats::StoredFormat;
use nvme_host::{Error, Result};
use rayon::prelude::*;

/// Number of rows of a product that a thread takes at a time.
const ROWS: usize = 64;
/// Numbers that a thread takes at a time.
const NUMBERS: usize = 1 << 14;

/// Heads of some tokens; the first token has the position `position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenHeads {
    /// Position of the first token.
    pub position: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_elements: u32,
}

impl TokenHeads {
    fn queries(&self) -> usize {
        self.heads as usize * self.head_elements as usize
    }

    fn keys(&self) -> usize {
        self.kv_heads as usize * self.head_elements as usize
    }

    fn positions(&self) -> usize {
        self.position as usize + self.tokens as usize
    }
}

/// Computes the products of each row of `weights` and each of the vectors `x`: row after row, for each the
/// products of all vectors.
pub fn products(
    stored: StoredFormat,
    weights: &[u8],
    row_bytes: usize,
    x: &[f32],
    tokens: usize,
) -> Vec<f32> {
    if tokens == 0 || row_bytes == 0 {
        return Vec::new();
    }
    let columns = x.len() / tokens;
    let mut products = vec![0.0; weights.len() / row_bytes * tokens];
    let parts = products.par_chunks_mut(ROWS * tokens);
    parts
        .zip(weights.par_chunks(ROWS * row_bytes))
        .for_each(|(products, weights)| {
            let products = products.chunks_mut(tokens);
            for (products, row) in products.zip(weights.chunks(row_bytes)) {
                for (product, x) in products.iter_mut().zip(x.chunks(columns)) {
                    *product = reference::dot(stored, row, x);
                }
            }
        });
    products
}

/// Computes `y[t] = W x[t]`, or with `adds` `y[t] += W x[t]`, for vectors `x` of `columns`
/// elements.
///
/// # Errors
/// [`Error::Usage`] for columns that are no whole blocks, and lengths that do not fit.
pub fn gemv(
    stored: StoredFormat,
    weights: &[u8],
    x: &[f32],
    columns: u32,
    y: &mut [f32],
    adds: bool,
) -> Result<()> {
    let row_bytes = row_bytes(stored, columns)?;
    let (tokens, rows) = (x.len() / columns as usize, weights.len() / row_bytes);
    check("x", x.len(), tokens * columns as usize)?;
    check("weights", weights.len(), rows * row_bytes)?;
    check("y", y.len(), tokens * rows)?;
    let products = products(stored, weights, row_bytes, x, tokens);
    for (row, products) in products.chunks(tokens.max(1)).enumerate() {
        for (token, product) in products.iter().enumerate() {
            let y = &mut y[token * rows + row];
            *y = if adds { *y } else { 0.0 } + product;
        }
    }
    Ok(())
}

/// Converts `rows`, which are contiguous and have `columns` elements each.
///
/// # Errors
/// As [`gemv`].
pub fn unpack(stored: StoredFormat, rows: &[u8], columns: u32, y: &mut [f32]) -> Result<()> {
    let row_bytes = row_bytes(stored, columns)?;
    let count = rows.len() / row_bytes;
    check("rows", rows.len(), count * row_bytes)?;
    check("y", y.len(), count * columns as usize)?;
    let parts = y.par_chunks_mut(columns as usize);
    parts
        .zip(rows.par_chunks(row_bytes))
        .for_each(|(y, row)| reference::unpack(stored, row, y));
    Ok(())
}

/// Divides each vector of `x` by the square root of the mean of its squares plus `epsilon`, and multiplies it by
/// `weight`.
///
/// # Errors
/// [`Error::Usage`] for lengths that do not fit.
pub fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) -> Result<()> {
    let elements = weight.len();
    let tokens = x.len().checked_div(elements).unwrap_or(0);
    check("x", x.len(), tokens * elements)?;
    check("y", y.len(), x.len())?;
    let parts = y.par_chunks_mut(elements.max(1));
    parts
        .zip(x.par_chunks(elements.max(1)))
        .for_each(|(y, x)| reference::rms_norm(x, weight, epsilon, y));
    Ok(())
}

/// Rotates queries and keys by their positions, and stores keys and values in the cache. Pairs are neighbouring elements,
/// or with `halves` an element of a head's first half and one of its second.
///
/// # Errors
/// [`Error::Usage`] for heads of an odd number of elements, and lengths that do not fit.
pub fn rope(
    shape: TokenHeads,
    (angles, halves): (&[f32], bool),
    queries: &mut [f32],
    (keys, values): (&[f32], &[f32]),
    (key_cache, value_cache): (&mut [f32], &mut [f32]),
) -> Result<()> {
    let (elements, cached) = (shape.head_elements as usize, shape.keys());
    let tokens = shape.tokens as usize;
    if elements == 0 || !elements.is_multiple_of(2) {
        return Err(Error::usage(
            format!("heads have {elements} elements, which is not an even number"),
            "use an even number: two make a pair that is turned",
        ));
    }
    check("queries", queries.len(), tokens * shape.queries())?;
    check("keys", keys.len(), tokens * cached)?;
    check("values", values.len(), tokens * cached)?;
    let places = shape.positions();
    check_least("angles", angles.len(), places * elements)?;
    check_least("the cache of keys", key_cache.len(), places * cached)?;
    check_least("the cache of values", value_cache.len(), places * cached)?;
    for token in 0..tokens {
        let at = shape.position as usize + token;
        let angles = &angles[at * elements..][..elements];
        let turn = |head: &mut [f32]| match halves {
            true => reference::turn_halves(head, angles),
            false => reference::turn(head, angles),
        };
        let query = &mut queries[token * shape.queries()..][..shape.queries()];
        query.chunks_mut(elements).for_each(turn);
        let key = &mut key_cache[at * cached..][..cached];
        key.copy_from_slice(&keys[token * cached..][..cached]);
        key.chunks_mut(elements).for_each(turn);
        value_cache[at * cached..][..cached].copy_from_slice(&values[token * cached..][..cached]);
    }
    Ok(())
}

/// The rule by which a query attends to keys.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionRule<'a> {
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Number of positions that a query sees, its own and those before it; 0 for all.
    pub window: u32,
    /// For each head of queries a product with a key that has no value.
    pub sinks: Option<&'a [f32]>,
}

/// Computes the attention of each query over the keys up to its position.
///
/// # Errors
/// [`Error::Usage`] for heads that are no multiple, and lengths that do not fit.
pub fn attention(
    shape: TokenHeads,
    queries: &[f32],
    (key_cache, value_cache): (&[f32], &[f32]),
    rule: AttentionRule<'_>,
    y: &mut [f32],
) -> Result<()> {
    let (heads, kv_heads) = (shape.heads as usize, shape.kv_heads as usize);
    let (elements, cached) = (shape.head_elements as usize, shape.keys());
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || elements == 0 {
        return Err(Error::usage(
            format!(
                "{heads} query heads of {elements} elements are not a multiple of {kv_heads} key heads"
            ),
            "use a multiple of the heads of keys, and an element at least",
        ));
    }
    check(
        "queries",
        queries.len(),
        shape.tokens as usize * shape.queries(),
    )?;
    check("y", y.len(), queries.len())?;
    let places = shape.positions() * cached;
    check_least("the cache of keys", key_cache.len(), places)?;
    check_least("the cache of values", value_cache.len(), places)?;
    check("sinks", rule.sinks.map_or(heads, <[f32]>::len), heads)?;
    let each = y.par_chunks_mut(elements).zip(queries.par_chunks(elements));
    each.enumerate().for_each(|(index, (y, query))| {
        let (token, head) = (index / heads, index % heads);
        let seen = shape.position as usize + token + 1;
        let oldest = match rule.window {
            0 => 0,
            window => seen.saturating_sub(window as usize),
        };
        let first = oldest * cached + head * kv_heads / heads * elements;
        let seen = seen * cached;
        let caches = (&key_cache[first..seen], &value_cache[first..seen]);
        let sink = rule.sinks.map(|sinks| sinks[head]);
        reference::attend(query, caches, cached, rule.scale, sink, y);
    });
    Ok(())
}

/// Computes `x / (1 + exp(-x)) * factor` into `x`.
///
/// # Errors
/// [`Error::Usage`] for vectors of different lengths.
pub fn silu_mul(x: &mut [f32], factor: &[f32]) -> Result<()> {
    check("the factor", factor.len(), x.len())?;
    let parts = x.par_chunks_mut(NUMBERS).zip(factor.par_chunks(NUMBERS));
    parts.for_each(|(x, factor)| reference::silu_mul(x, factor));
    Ok(())
}

/// Returns the index of the largest number, of equal ones the first; NaN is below every number.
///
/// # Errors
/// [`Error::Usage`] for no number.
pub fn argmax(x: &[f32]) -> Result<u32> {
    if x.is_empty() || u32::try_from(x.len()).is_err() {
        return Err(Error::usage(
            format!("the largest of {} numbers is not defined", x.len()),
            "use 1 to 4294967295",
        ));
    }
    Ok(reference::argmax(x))
}

/// # Errors
/// [`Error::Usage`] for columns that are no whole blocks.
fn row_bytes(stored: StoredFormat, columns: u32) -> Result<usize> {
    let bytes = stored.row_bytes(columns).filter(|bytes| *bytes > 0);
    bytes.map(|bytes| bytes as usize).ok_or_else(|| {
        Error::usage(
            format!(
                "{columns} columns are not whole blocks of {}",
                stored.name()
            ),
            "use whole blocks of the format: a multiple of 32 at least",
        )
    })
}

/// # Errors
/// [`Error::Usage`] unless `found` is `wanted`.
fn check(what: &str, found: usize, wanted: usize) -> Result<()> {
    match found == wanted {
        true => Ok(()),
        false => Err(Error::usage(
            format!("{what} must have {wanted} elements and has {found}"),
            format!("use {wanted}"),
        )),
    }
}

/// # Errors
/// [`Error::Usage`] for fewer than `wanted`.
fn check_least(what: &str, found: usize, wanted: usize) -> Result<()> {
    match found >= wanted {
        true => Ok(()),
        false => Err(Error::usage(
            format!("{what} must have {wanted} elements or more and has {found}"),
            format!("use {wanted} or more"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dice(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let throw = || {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        std::iter::repeat_with(throw).take(count).collect()
    }

    #[test]
    fn products_of_several_vectors_are_those_of_each() {
        let (rows, columns, tokens) = (131, 64, 3);
        let numbers = dice(rows * columns, 1);
        let weights: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let x = dice(columns * tokens, 2);
        let mut y = vec![1.0; rows * tokens];
        gemv(
            StoredFormat::F32,
            &weights,
            &x,
            columns as u32,
            &mut y,
            true,
        )
        .unwrap();
        for token in 0..tokens {
            for row in 0..rows {
                let pairs = numbers[row * columns..][..columns]
                    .iter()
                    .zip(&x[token * columns..][..columns]);
                let product: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let found = f64::from(y[token * rows + row]) - 1.0;
                assert!((found - product).abs() < 1e-4, "{token} {row}");
            }
        }
        gemv(StoredFormat::F32, &[], &x, columns as u32, &mut [], false).unwrap();
        gemv(
            StoredFormat::F32,
            &weights,
            &[],
            columns as u32,
            &mut [],
            false,
        )
        .unwrap();
        assert!(gemv(StoredFormat::F32, &weights, &x, 32, &mut y, false).is_err());
        assert!(gemv(StoredFormat::F32, &weights, &x, 33, &mut y, false).is_err());
        assert!(gemv(StoredFormat::F32, &weights[4..], &x, 64, &mut y, false).is_err());
        assert!(gemv(StoredFormat::Q4K, &weights, &x, 0, &mut y, false).is_err());
    }

    #[test]
    fn a_step_of_attention_is_that_of_its_tokens() {
        let shape = TokenHeads {
            position: 2,
            tokens: 3,
            heads: 4,
            kv_heads: 2,
            head_elements: 6,
        };
        let angles = reference::angles(5, 6, 100.0);
        let (keys, values) = (dice(3 * 12, 1), dice(3 * 12, 2));
        let mut caches = (dice(5 * 12, 3), dice(5 * 12, 4));
        let before = caches.0.clone();
        let (mut queries, given) = (dice(3 * 24, 5), dice(3 * 24, 5));
        rope(
            shape,
            (&angles, false),
            &mut queries,
            (&keys, &values),
            (&mut caches.0, &mut caches.1),
        )
        .unwrap();
        assert_eq!(caches.0[..24], before[..24]);
        assert_eq!(caches.1[24..], values[..]);
        let mut head = given[24 * 2 + 6..][..6].to_vec();
        reference::turn(&mut head, &angles[4 * 6..][..6]);
        assert_eq!(queries[24 * 2 + 6..][..6], head[..]);
        let mut y = vec![0.0; queries.len()];
        let rule = AttentionRule {
            scale: 0.5,
            ..AttentionRule::default()
        };
        let both = (&caches.0[..], &caches.1[..]);
        attention(shape, &queries, both, rule, &mut y).unwrap();
        // Head 3 of token 1 sees positions 0 to 3 of head 1 of the keys.
        let mut expected = [0.0; 6];
        let (query, seen) = (&queries[24 + 18..][..6], 6..4 * 12);
        let (keys, values) = (&caches.0[seen.clone()], &caches.1[seen]);
        reference::attend(query, (keys, values), 12, 0.5, None, &mut expected);
        assert_eq!(y[24 + 18..][..6], expected);
        let wrong = |change: fn(&mut TokenHeads)| {
            let mut shape = shape;
            change(&mut shape);
            let caches = (&caches.0[..], &caches.1[..]);
            attention(shape, &queries, caches, rule, &mut y.clone()).is_err()
        };
        let few = AttentionRule {
            sinks: Some(&[0.0; 3]),
            ..rule
        };
        assert!(attention(shape, &queries, both, few, &mut y.clone()).is_err());
        assert!(wrong(|shape| shape.kv_heads = 3) && wrong(|shape| shape.kv_heads = 0));
        assert!(wrong(|shape| shape.position = 3) && wrong(|shape| shape.tokens = 2));
        assert!(!wrong(|shape| shape.position = 0));
    }

    #[test]
    fn wrong_lengths_are_errors() {
        let mut y = [0.0; 6];
        assert!(rms_norm(&[1.0; 6], &[1.0; 4], 0.0, &mut y).is_err());
        assert!(rms_norm(&[1.0; 6], &[1.0; 3], 0.0, &mut y[..3]).is_err());
        rms_norm(&[1.0; 6], &[1.0; 3], 0.0, &mut y).unwrap();
        assert_eq!(y, [1.0; 6]);
        rms_norm(&[], &[], 0.0, &mut []).unwrap();
        assert!(rms_norm(&[1.0], &[], 0.0, &mut [0.0]).is_err());
        assert!(silu_mul(&mut y, &[1.0; 5]).is_err());
        assert!(argmax(&[]).is_err());
        assert_eq!(argmax(&[1.0, 3.0, 3.0]).unwrap(), 1);
        let mut numbers = [0.0; 64];
        unpack(StoredFormat::F16, &[0; 128], 32, &mut numbers).unwrap();
        assert!(unpack(StoredFormat::F16, &[0; 126], 32, &mut numbers).is_err());
        assert!(unpack(StoredFormat::Q8_0, &[0; 34], 16, &mut numbers).is_err());
    }
}
