//! CRC-32C and CRC-16 as ext4 uses them: without an inversion at the end.

const CRC32C: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut value = index as u32;
        let mut bit = 0;
        while bit < 8 {
            value = match value & 1 {
                1 => value >> 1 ^ 0x82F6_3B78,
                _ => value >> 1,
            };
            bit += 1;
        }
        table[index] = value;
        index += 1;
    }
    table
}

/// Computes the CRC-32C (Castagnoli) of `bytes`, continuing from `crc`, which is `!0` at first.
pub fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(crc, |crc, byte| {
        CRC32C[(crc as u8 ^ byte) as usize] ^ crc >> 8
    })
}

/// Computes the CRC-16 (0x8005, reflected) of `bytes`, continuing from `crc`, which is `!0` at
/// first.
pub fn crc16(crc: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(crc, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte), |crc, _| match crc & 1 {
            1 => crc >> 1 ^ 0xA001,
            _ => crc >> 1,
        })
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn check_values_of_both_are_right() {
        assert_eq!(!super::crc32c(!0, b"123456789"), 0xE306_9283);
        assert_eq!(super::crc16(!0, b"123456789"), 0x4B37);
        assert_eq!(super::crc16(0, b"123456789"), 0xBB3D);
    }
}
