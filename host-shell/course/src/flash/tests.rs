//! Attention by threads of the CPU against sums of `f64`, over shapes with edges.

use super::AttentionShape;
use nvme_compute_kernel::flash::reference::PartialResult;

/// Numbers without a pattern, between -1 and 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

fn heads(
    [sequences, heads, kv_heads]: [u32; 3],
    [query_tokens, key_tokens, head_elements]: [u32; 3],
    causal: bool,
) -> AttentionShape {
    AttentionShape {
        sequences,
        heads,
        kv_heads,
        query_tokens,
        key_tokens,
        head_elements,
        causal,
        scale: 0.3,
    }
}

/// Compares the attention of each query over its keys with a second, simpler implementation.
fn compare(shape: AttentionShape, counts: Option<&[u32]>) {
    let (of_queries, of_keys) = shape.elements();
    let queries = numbers(of_queries, 1);
    let (keys, values) = (numbers(of_keys, 2), numbers(of_keys, 3));
    let found = shape.attend(&queries, &keys, &values, counts).unwrap();
    let each = shape.head_elements as usize;
    for (row, (query, y)) in queries.chunks(each).zip(found.chunks(each)).enumerate() {
        let token = row as i64 % i64::from(shape.query_tokens);
        let head = row / shape.query_tokens as usize % shape.heads as usize;
        let sequence = row / shape.query_tokens as usize / shape.heads as usize;
        let there = counts.map_or(shape.key_tokens, |counts| counts[sequence]);
        let seen = match shape.causal {
            true => (i64::from(there) - i64::from(shape.query_tokens) + token + 1).max(0),
            false => there.into(),
        };
        let kv_head = head / (shape.heads / shape.kv_heads) as usize;
        let first = (sequence * shape.kv_heads as usize + kv_head) * shape.key_tokens as usize;
        let all = first * each..(first + seen as usize) * each;
        let part = PartialResult::of(query, &keys[all.clone()], &values[all], shape.scale);
        for (found, wanted) in y.iter().zip(part.result()) {
            let apart = (f64::from(*found) - wanted).abs();
            assert!(apart < 1e-5, "{shape:?}, row {row}: {found}, not {wanted}");
        }
    }
}

#[test]
fn every_shape_has_the_sums_of_f64() {
    for causal in [false, true] {
        for (groups, sizes) in [
            ([1, 1, 1], [1, 1, 8]),
            ([1, 2, 1], [1, 0, 16]),
            ([2, 4, 2], [5, 5, 8]),
            ([1, 6, 2], [16, 64, 24]),
            ([1, 3, 3], [17, 65, 40]),
            ([2, 8, 1], [33, 130, 128]),
            ([1, 2, 2], [40, 9, 72]),
            ([3, 2, 1], [0, 7, 64]),
            ([0, 2, 1], [3, 7, 64]),
        ] {
            compare(heads(groups, sizes, causal), None);
        }
    }
}

#[test]
fn only_the_keys_that_count_are_attended_to() {
    for causal in [false, true] {
        compare(heads([4, 4, 2], [3, 70, 16], causal), Some(&[0, 2, 65, 70]));
    }
}

#[test]
fn a_count_above_the_keys_is_refused_with_both_numbers() {
    let shape = heads([3, 2, 1], [1, 7, 8], false);
    let (of_queries, of_keys) = shape.elements();
    let (queries, keys) = (vec![0.0; of_queries], vec![0.0; of_keys]);
    let attend = |counts: &[u32]| shape.attend(&queries, &keys, &keys, Some(counts));
    assert!(attend(&[0, 7, 7]).is_ok());
    for count in [8, u32::MAX] {
        let error = attend(&[0, 7, count]).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        let says = format!("the count of sequence 2 is {count}, more than its 7 keys");
        assert!(error.to_string().contains(&says), "{error}");
    }
}

#[test]
fn other_shapes_are_refused() {
    let usage = |shape: AttentionShape, lengths: [usize; 3]| {
        let [q, k, v] = lengths.map(|length| vec![0.0; length]);
        let error = shape.attend(&q, &k, &v, None).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{error}");
        error.to_string()
    };
    assert!(usage(heads([1, 3, 2], [1, 1, 8], false), [24, 16, 16]).contains("query heads, 3,"));
    assert!(usage(heads([1, 1, 0], [1, 1, 8], false), [8, 0, 0]).contains("multiple of 0"));
    assert!(usage(heads([1, 1, 1], [1, 1, 12], false), [12; 3]).contains("12 is no possible"));
    assert!(usage(heads([1, 1, 1], [1, 1, 136], false), [136; 3]).contains("136 is no possible"));
    assert!(usage(heads([1, 1, 1], [1, 1, 8], false), [8, 8, 7]).contains("8, 8 and 7 numbers"));
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let shape = AttentionShape {
            scale,
            ..heads([1, 1, 1], [1, 1, 8], false)
        };
        assert!(usage(shape, [8; 3]).contains("not a positive number"));
    }
}
