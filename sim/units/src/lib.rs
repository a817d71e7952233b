//! Sizes, times and numbers as people type and read them: one grammar for the tool's options and for
//! those of a simulated device.
//!
//! Here belongs text that a user types for more than one program. What a device's name means is with the device.
//!
//! - A number is decimal digits, or `0x` and hexadecimal digits. No sign, no fraction, no exponent.
//! - A size is `0x` and a hexadecimal number of bytes, or decimal digits and a unit in any case:
//!   none or `B` for bytes; `K M G T`, the same as `KiB MiB GiB TiB`, for powers of 1024; `kB MB GB
//!   TB` for powers of 1000.
//! - A time is a decimal number, with a fraction if need be, and a unit: `ns`, `us`, `ms`, `s` or `m`
//!   (minutes). Only 0 needs none.
//!
//! Each error is one clause with the cause and the remedy, which the caller puts behind an option's
//! name.
//!
//! Also [`SplitMix`], a generator of seeded random numbers.
#![no_std]
#![forbid(unsafe_code)]
#![deny(missing_docs)]

extern crate alloc;

mod random;

use alloc::format;
use alloc::string::String;
use core::ops::RangeInclusive;
use core::time::Duration;
pub use random::{SplitMix, mix};

/// Parses a number of at most 64 bits, decimal or hexadecimal with `0x`.
///
/// # Errors
/// The cause, as a clause about `text`.
pub fn parse_number(text: &str) -> Result<u64, String> {
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => (hex, 16),
        None => (text, 10),
    };
    // The parser of the standard library would also accept a sign.
    if digits.is_empty() || !digits.chars().all(|digit| digit.is_digit(radix)) {
        return Err(format!(
            "'{text}' is not a whole number such as 4096 or 0x1000"
        ));
    }
    u64::from_str_radix(digits, radix).map_err(|_| format!("'{text}' does not fit into 64 bits"))
}

/// Parses a number that lies in `range`.
///
/// # Errors
/// The cause, as a clause about `text`.
pub fn parse_in<T: TryFrom<u64>>(text: &str, range: &RangeInclusive<u64>) -> Result<T, String> {
    let number = parse_number(text)?;
    let (first, last) = (range.start(), range.end());
    let fits = range.contains(&number).then(|| T::try_from(number).ok());
    fits.flatten()
        .ok_or_else(|| format!("{text} is not in the range {first} to {last}"))
}

/// Parses a number of bytes.
///
/// # Errors
/// The cause, as a clause about `text`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    if text.starts_with("0x") || text.starts_with("0X") {
        return parse_number(text);
    }
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(format!("'{text}' is not a size such as 4096, 4KiB or 2M"));
    }
    let too_large = || format!("'{text}' does not fit into 64 bits");
    let number: u64 = number.parse().map_err(|_| too_large())?;
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
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
                "'{text}' has the unknown unit '{other}'; use KiB, MiB, GiB, TiB or kB, MB, GB, TB"
            ));
        }
    };
    number.checked_mul(factor).ok_or_else(too_large)
}

/// Parses a time in nanoseconds.
///
/// # Errors
/// The cause, as a clause about `text`.
pub fn parse_nanoseconds(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let is_part = |byte: &u8| byte.is_ascii_digit() || *byte == b'.';
    let (number, unit) = text.split_at(text.bytes().take_while(is_part).count());
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || number.ends_with('.') {
        return Err(format!("'{text}' is not a time such as 10s or 500ms"));
    }
    let scale: u64 = match unit.trim() {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "" if number.bytes().all(|byte| byte == b'0') => 1,
        "" => {
            return Err(format!(
                "'{text}' has no unit; write {text}s, {text}ms or {text}us"
            ));
        }
        other => {
            return Err(format!(
                "'{text}' has the unknown unit '{other}'; use ns, us, ms, s or m"
            ));
        }
    };
    let too_large = || format!("'{text}' is too long a time");
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let whole = whole.checked_mul(scale).ok_or_else(too_large)?;
    // Digits below a nanosecond are cut off.
    let (mut part, mut place) = (0, scale);
    for digit in fraction.bytes().map(|byte| u64::from(byte - b'0')) {
        part += digit * place / 10;
        place /= 10;
    }
    whole.checked_add(part).ok_or_else(too_large)
}

/// Parses a time that is not zero.
///
/// # Errors
/// The cause, as a clause about `text`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    match parse_nanoseconds(text)? {
        0 => Err(format!("'{text}' is zero; use a longer time")),
        nanoseconds => Ok(Duration::from_nanos(nanoseconds)),
    }
}

/// Formats a byte count for people: `512 B`, `4.0 KiB`, `1.5 GiB`.
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

/// Formats a count for people: `950`, `12.3 k`, `4.56 M`.
pub fn count(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.2} M", v / 1e6),
        v if v >= 1e4 => format!("{:.1} k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// Formats nanoseconds for people: `850 ns`, `12.3 us`, `4.56 ms`, `1.20 s`.
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
    fn sizes_follow_their_unit_in_any_case() {
        let cases = [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4K", 4096),
            ("4KiB", 4096),
            ("4kib", 4096),
            ("4 kib", 4096),
            ("4kB", 4000),
            ("2M", 2 << 20),
            ("2MB", 2_000_000),
            ("1GiB", 1 << 30),
            ("3TiB", 3 << 40),
            ("0x1000", 4096),
            ("0X1b", 27),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_bytes(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn nonsense_sizes_are_refused() {
        let cases = [
            "",
            "k",
            "-1",
            "+4096",
            "4x",
            "1.5G",
            "1e3",
            "0x",
            "0x1000KiB",
            "0x-1",
            "1_000",
            "99999999999999999999",
            "16777216TiB",
            "١",
        ];
        for text in cases {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_have_units_and_durations_are_never_zero() {
        let cases = [
            ("7ns", 7),
            ("3us", 3_000),
            ("500ms", 500_000_000),
            ("1.5s", 1_500_000_000),
            ("0.25us", 250),
            ("2m", 120_000_000_000),
            ("0.5m", 30_000_000_000),
            ("1.25m", 75_000_000_000),
            ("0", 0),
            ("0s", 0),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_nanoseconds(text), Ok(expected), "{text}");
        }
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        for text in [
            "0",
            "0ms",
            "x",
            "1h",
            "-1s",
            "+1s",
            "",
            "5",
            "1.5",
            ".5s",
            "1.s",
            "1.2.3s",
            "1e3s",
            "99999999999s",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_may_be_hexadecimal_and_have_no_sign() {
        assert_eq!(parse_number("0x10"), Ok(16));
        assert_eq!(parse_number("10"), Ok(10));
        for text in [
            "",
            "0x",
            "0x+1",
            "+1",
            "-1",
            "1.0",
            " 1",
            "1_0",
            "١",
            "18446744073709551616",
        ] {
            assert!(parse_number(text).is_err(), "{text}");
        }
        assert_eq!(parse_in::<u8>("7", &(1..=9)), Ok(7));
        for (text, range) in [("0", 1..=9), ("10", 1..=9), ("256", 0..=1000)] {
            assert!(parse_in::<u8>(text, &range).is_err(), "{text}");
        }
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
