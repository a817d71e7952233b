//! Sizes of the memory that the arguments of launches refer to: input of
//! [`Gpu::judge_list`](nvme_host::cuda::Gpu::judge_list).

/// Multiplies all numbers; saturates at `u64::MAX`.
pub fn product(factors: &[u32]) -> u64 {
    let factors = factors.iter().map(|factor| u64::from(*factor));
    factors.fold(1, u64::saturating_mul)
}

/// Returns the number of elements from the first of `count` rows of `row` elements to the end of the last; rows
/// begin `stride` elements apart.
pub fn spread(count: u32, stride: u64, row: u64) -> u64 {
    match count {
        0 => 0,
        _ => stride
            .saturating_mul(u64::from(count - 1))
            .saturating_add(row),
    }
}

/// Returns `count`, or 0 if `address` is 0, because that argument is left out.
pub fn optional(address: u64, count: u64) -> u64 {
    if address == 0 { 0 } else { count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_end_with_the_last_row() {
        assert_eq!((product(&[]), product(&[3, 4, 5])), (1, 60));
        assert_eq!(product(&[u32::MAX; 5]), u64::MAX);
        assert_eq!(
            (spread(0, 8, 5), spread(1, 8, 5), spread(3, 8, 5)),
            (0, 5, 21)
        );
        assert_eq!(spread(3, u64::MAX, 5), u64::MAX);
        assert_eq!((optional(0, 7), optional(16, 7)), (0, 7));
    }
}
