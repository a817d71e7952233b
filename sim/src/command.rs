//! The commands: what each one checks and does, and the transfer of its data. A command gets the
//! controller's state and a view of the driver's memory, and returns a status; queues and
//! completions are in `engine`.

pub(crate) mod admin;
mod create;
pub(crate) mod data;
mod features;
#[cfg(test)]
mod foreign;
mod format;
pub(crate) mod identify;
mod logs;
pub(crate) mod nvm;
pub(crate) mod outside;
mod prp;
pub(crate) mod refusal;
pub(crate) mod sanitize;
mod sgl;
mod supported;
