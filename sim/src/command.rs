//! What each command does, and the data that it moves.

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
