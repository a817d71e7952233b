//! Code that the chores of `cargo xtask` share, with the standard library alone: processes and their failures, counts
//! of tests, tools of this machine. Each subject is a crate in a folder beside this crate's source.

pub mod background;
pub mod process;
pub mod release;
pub mod report;
pub mod tools;
