//! The image of a kernel (bzImage): Documentation/arch/x86/boot.rst of Linux has its header.

/// Offset of the field `setup_sects`: the number of sectors of 512 bytes between the first one and the rest of the
/// image.
const SETUP_SECTORS: usize = 0x1F1;
/// The fields `payload_offset` and `payload_length`.
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24C;
/// The first bytes of a frame of zstd.
const ZSTD: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];

/// Returns the kernel that is packed in `image`, if it is packed by zstd.
pub fn packed_kernel(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    let sectors = match *image.get(SETUP_SECTORS)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = 512 * (sectors + 1) + word(PAYLOAD_OFFSET)?;
    // The last four bytes of the payload are the length of the unpacked kernel.
    let end = start + word(PAYLOAD_LENGTH)?.checked_sub(4)?;
    let payload = image.get(start..end)?;
    payload.starts_with(&ZSTD).then_some(payload)
}

#[cfg(test)]
mod tests {
    use super::{PAYLOAD_LENGTH, PAYLOAD_OFFSET, SETUP_SECTORS, ZSTD, packed_kernel};

    #[test]
    fn the_payload_is_found_by_the_header() {
        let mut image = vec![0; 4096];
        image[SETUP_SECTORS] = 3;
        image[PAYLOAD_OFFSET..][..4].copy_from_slice(&64u32.to_le_bytes());
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&100u32.to_le_bytes());
        assert_eq!(packed_kernel(&image), None);
        image[4 * 512 + 64..][..4].copy_from_slice(&ZSTD);
        let found = packed_kernel(&image).unwrap();
        assert_eq!(found.len(), 96);
        assert!(found.starts_with(&ZSTD));
        // A header may name more than there is.
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(packed_kernel(&image), None);
        assert_eq!(packed_kernel(&[]), None);
    }
}
