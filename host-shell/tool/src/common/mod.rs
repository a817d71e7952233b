//! Parts that commands share: option groups, files that are replaced only when complete, output as text or JSON,
//! and the end by Ctrl-C.

pub mod access;
mod args;
#[cfg(test)]
pub mod figure;
pub mod file;
pub mod hex;
pub mod images;
pub mod input;
pub mod npy;
pub mod output;
pub mod progress;
pub mod say;
mod stop;
mod values;
pub mod visible;

pub use access::{AccessArgs, WriteArgs};
pub use args::{CommandTimeout, DeviceArgs, NamespaceArgs, NamespaceId, OutputForm};
pub use stop::{check_stop, stop_flag};
pub use values::{beyond, duration, number, some_bytes};

/// The version of the tool, and the commit that it was built from.
pub const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("NVME_GPU_SOURCE"),
    ")"
);
