//! The commands: the checks and the effect of each one, and the transfer of its data. A command
//! receives the controller's state and a view of the driver's memory, and returns a status; queues
//! and completions are in `engine`.

pub(crate) mod admin;
mod command_effects;
#[cfg(test)]
mod compliance;
mod create;
pub(crate) mod data;
pub(crate) mod external_change;
mod features;
mod format;
pub(crate) mod identify;
mod logs;
pub(crate) mod nvm;
mod prp;
pub(crate) mod reply;
pub(crate) mod sanitize;
mod sgl;
