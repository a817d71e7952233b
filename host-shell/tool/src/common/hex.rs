//! Bytes as a hex dump, and bit fields as a number with the names of its bits.

use std::fmt::Write;

/// Formats sixteen bytes a line: offset, bytes, text. Offsets count from `start`.
pub fn dump(bytes: &[u8], start: u64) -> String {
    let end = start + bytes.len() as u64;
    let width = if end > 0x1_0000 { 8 } else { 4 };
    let mut text = " ".repeat(width + 2);
    for column in 0..16 {
        let _ = write!(text, " {column:x} ");
    }
    let mut text = format!("{}\n", text.trim_end());
    for (index, line) in bytes.chunks(16).enumerate() {
        let at = start + index as u64 * 16;
        let hex: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        let readable: String = line
            .iter()
            .map(|byte| match byte {
                b' '..=b'~' => char::from(*byte),
                _ => '.',
            })
            .collect();
        let _ = writeln!(text, "{at:0width$x}: {:<47} \"{readable}\"", hex.join(" "));
    }
    text
}

/// Returns the bytes as one string of digits, for JSON.
pub fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns `value` in hex and, in parentheses, the names of those bits that are set.
pub fn bits(value: u64, names: &[(u64, &str)]) -> String {
    let set: Vec<&str> = names
        .iter()
        .filter(|(bit, _)| value & bit != 0)
        .map(|(_, name)| *name)
        .collect();
    match set.is_empty() {
        true => format!("{value:#x}"),
        false => format!("{value:#x} ({})", set.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_has_sixteen_bytes_a_line_with_their_text() {
        let bytes: Vec<u8> = (0x38..0x4A).collect();
        let text = dump(&bytes, 0x20);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "       0  1  2  3  4  5  6  7  8  9  a  b  c  d  e  f"
        );
        assert_eq!(
            lines[1],
            "0020: 38 39 3a 3b 3c 3d 3e 3f 40 41 42 43 44 45 46 47 \"89:;<=>?@ABCDEFG\""
        );
        assert_eq!(lines[2], format!("0030: 48 49 {} \"HI\"", " ".repeat(41)));
        assert_eq!(lines.len(), 3);
        assert!(dump(&[0; 16], 0x1_0000).contains("\n00010000: 00 "));
    }

    #[test]
    fn bits_are_named_when_set() {
        let names = [(1, "one"), (4, "three")];
        assert_eq!(bits(0, &names), "0x0");
        assert_eq!(bits(0x15, &names), "0x15 (one, three)");
        assert_eq!(bits(2, &names), "0x2");
    }
}
