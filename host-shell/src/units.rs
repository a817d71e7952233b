//! Byte sizes, counts and durations as people type and read them.

use std::time::Duration;

/// Parses a byte size: a whole number with an optional suffix.
///
/// `K M G T` and `KiB MiB GiB TiB` are powers of 1024, `kB MB GB TB` powers of 1000 (case of the
/// first letter does not matter); no suffix, or `B`, is bytes.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = text.split_at(digits);
    let number: u64 = number
        .parse()
        .map_err(|_| format!("'{text}' is not a byte size such as 4096, 4KiB or 2M"))?;
    let factor: u64 = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        other => {
            return Err(format!(
                "unknown size suffix '{other}'; use KiB, MiB, GiB, TiB or kB, MB, GB, TB"
            ));
        }
    };
    number
        .checked_mul(factor)
        .ok_or_else(|| format!("'{text}' does not fit into 64 bits"))
}

/// Parses a number that may be written in hexadecimal with `0x`, as register and feature values are.
pub fn parse_number(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("'{text}' is not a number"))
}

/// Parses a duration: `500ms`, `10s`, `10` (seconds), `2m`, `100us`. Never zero.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let digits = text
        .bytes()
        .take_while(|byte| byte.is_ascii_digit() || *byte == b'.')
        .count();
    let (number, suffix) = text.split_at(digits);
    let number: f64 = number
        .parse()
        .map_err(|_| format!("'{text}' is not a duration such as 10s or 500ms"))?;
    let seconds = match suffix.trim() {
        "" | "s" => number,
        "us" => number / 1e6,
        "ms" => number / 1e3,
        "m" => number * 60.0,
        other => return Err(format!("unknown time unit '{other}'; use us, ms, s or m")),
    };
    let duration =
        Duration::try_from_secs_f64(seconds).map_err(|_| format!("'{text}' is out of range"))?;
    if duration.is_zero() {
        Err("a duration of zero".to_owned())
    } else {
        Ok(duration)
    }
}

/// A byte count for people: `512 B`, `4.0 KiB`, `1.5 GiB`.
pub fn bytes(value: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if value < 1024 {
        return format!("{value} B");
    }
    let mut scaled = value as f64 / 1024.0;
    let mut unit = 0;
    while scaled >= 1024.0 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    format!("{scaled:.1} {}", UNITS[unit])
}

/// A count for people: `950`, `12.3 k`, `4.56 M`.
pub fn count(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.2} M", v / 1e6),
        v if v >= 1e4 => format!("{:.1} k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// Nanoseconds for people: `850 ns`, `12.3 us`, `4.56 ms`, `1.20 s`.
pub fn nanoseconds(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_their_suffix() {
        let cases = [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("4 kib", 4096),
            ("4kB", 4000),
            ("2M", 2 << 20),
            ("2MB", 2_000_000),
            ("1GiB", 1 << 30),
            ("3TiB", 3 << 40),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_bytes(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn nonsense_sizes_are_refused() {
        for text in [
            "",
            "k",
            "-1",
            "4x",
            "1.5G",
            "99999999999999999999",
            "16777216TiB",
        ] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_have_units_and_are_never_zero() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for text in ["0", "0ms", "x", "1h", "-1s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_may_be_hexadecimal() {
        assert_eq!(parse_number("0x10"), Ok(16));
        assert_eq!(parse_number("10"), Ok(10));
        assert!(parse_number("0x").is_err());
    }

    #[test]
    fn people_read_short_numbers() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(4096), "4.0 KiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(nanoseconds(12_345), "12.3 us");
        assert_eq!(count(4_560_000.0), "4.56 M");
    }
}
