//! Little-endian numbers out of structures; zeros past their end.

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let part = bytes.get(at..).and_then(|from| from.first_chunk::<N>());
    part.copied().unwrap_or([0; N])
}

pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

/// Joins the two halves of a number.
pub fn wide(bytes: &[u8], low: usize, high: usize) -> u64 {
    u64::from(u32_at(bytes, high)) << 32 | u64::from(u32_at(bytes, low))
}
