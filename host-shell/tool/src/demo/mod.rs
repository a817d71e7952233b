//! `demo`: real data through the whole driver, from a GPU if there is one, else from CPU threads.

#[cfg(feature = "cuda")]
mod gpu;
mod image;
mod options;
mod run;

pub use options::DemoCommand;
