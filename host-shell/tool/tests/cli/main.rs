//! The command line as a user runs it, by subject.
#![cfg(feature = "sim")]

#[macro_use]
#[path = "../common/mod.rs"]
mod common;

mod about;
mod bad_devices;
mod bad_files;
mod bad_values;
mod bench;
mod changed;
mod commands;
mod erase;
mod files;
mod folders;
mod generate;
mod json;
mod log_pages;
mod model_files;
mod own_input;
mod partitions;
mod passthru;
mod pipeline;
mod resets;
mod room;
mod rows;
mod search;
mod streams;
mod texts;
mod top;
mod witness;
