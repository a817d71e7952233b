//! Byte sizes, counts and times as people type and read them: the one grammar of the tool and of the
//! simulator's options.

pub use nvme_units::{
    bytes, count, nanoseconds, parse_bytes, parse_duration, parse_in, parse_nanoseconds,
    parse_number,
};
