//! Admin commands: identify, features, log pages, format, sanitize, passthru.

pub mod error_log;
pub mod feature;
pub mod format;
pub mod get_log;
pub mod identify;
pub mod list_ns;
pub mod passthru;
pub mod sanitize;
pub mod smart_log;
