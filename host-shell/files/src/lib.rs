//! What lies on a store: files of tensors, file systems, and layers of models that are read ahead of their use.
//!
//! Here belongs what gives bytes of a store a name: a tensor's, a file's, a layer's. How they are read is the store's
//! matter (`nvme-store`), what is computed from them that of `nvme-compute` and above.
//!
//! - [`Catalog`]: names, types, shapes and places of the tensors of a file, and its way onto a store.
//! - [`files`]: partitions, ext4, and where a file's data lie.
//! - [`Manifest`]: the hashes of a file, by which layers are verified where they were loaded.
//! - [`LayerLoader`](loader::LayerLoader): layers of a model, read while others are used.
#![deny(missing_docs)]

pub mod catalog;
pub mod files;
pub mod loader;
pub mod manifest;
mod names;

pub use catalog::Catalog;
pub use manifest::Manifest;
