//! Parsers of numbers, sizes and times for clap.

use nvme_host::Error;
use nvme_host::units::{parse_bytes, parse_duration, parse_in};
use std::ops::RangeInclusive;
use std::time::Duration;

/// Parses, for clap, a whole number in `range`, decimal or hexadecimal with 0x.
pub fn number<T>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> std::result::Result<T, String> + Clone + Send + Sync + 'static
where
    T: TryFrom<u64> + Clone + Send + Sync + 'static,
{
    move |text| parse_in(text, &range)
}

/// Parses, for clap, a number of bytes that is not 0.
pub fn some_bytes(text: &str) -> std::result::Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err(format!(
            "'{text}' is zero; use a multiple of the block size"
        )),
        bytes => Ok(bytes),
    }
}

/// Parses, for clap, a duration such as `10s`.
pub fn duration(text: &str) -> std::result::Result<Duration, String> {
    parse_duration(text)
}

/// Returns the error for a --size that is longer than the namespace.
pub fn beyond(size: u64, bytes: u64) -> Error {
    Error::usage(
        format!("--size {size} is more than the namespace, which has {bytes} bytes"),
        format!("use at most {bytes}"),
    )
}
