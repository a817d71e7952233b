//! Commands of the tool that send admin commands: identify, features, log pages, format, sanitize, passthru. Their
//! output follows nvme-cli where that has the same command.

pub mod error_log;
pub mod feature;
pub mod format;
pub mod get_log;
pub mod identify;
pub mod list_ns;
pub mod passthru;
pub mod sanitize;
pub mod smart_log;
