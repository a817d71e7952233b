//! The content of a store: files of tensors, file systems, and layers of models that are read ahead of their use.
//!
//! Here belongs what gives bytes of a store a name: the name of a tensor, a file or a layer. Reading the bytes is the
//! task of `nvme-store`, computing with them the task of `nvme-compute` and the crates above.
//!
//! - [`Catalog`]: names, types, shapes and offsets of the tensors of a file, and the import of the file into a store.
//! - [`files`]: partitions, ext4, and the extents of a file's data.
//! - [`Manifest`]: the hashes of a file, by which layers are verified in the memory into which they were loaded.
//! - [`LayerLoader`](loader::LayerLoader): layers of a model, read while others are used.
#![deny(missing_docs)]

pub mod catalog;
pub mod files;
pub mod loader;
pub mod manifest;
mod names;

pub use catalog::Catalog;
pub use manifest::Manifest;
