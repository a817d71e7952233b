//! The configuration of a controller: its settings, the faults to inject, and the text form in
//! which a user writes both. Values are checked here; nothing is created but image files.

pub(crate) mod fault;
#[cfg(feature = "std")]
pub(crate) mod options;
pub(crate) mod settings;

#[cfg(feature = "std")]
pub use options::{
    CONDITIONS, ConditionRow, FAULTS, FaultRow, ImageAccess, OPTIONS, OptionRow, check_space,
    escape, help, image_paths, markdown, parse, parse_fault, parse_for,
};
pub use settings::{Config, ConfigError, NamespaceConfig};
