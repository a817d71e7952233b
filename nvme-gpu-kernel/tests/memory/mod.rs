//! Memory of launches that run on the host.

use nvme_core::sync::{AtomicU32, AtomicU64};

/// Returns `count` words that are 0.
pub fn words(count: usize) -> Vec<AtomicU32> {
    (0..count).map(|_| AtomicU32::new(0)).collect()
}

/// Returns `count` words of 8 bytes that are `value`.
pub fn wide(count: usize, value: u64) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(value)).collect()
}

/// Returns the address of the first element, as launches have it.
pub fn address<T>(of: &[T]) -> u64 {
    of.as_ptr().expose_provenance() as u64
}
