//! The code of the fuzz targets: each makes a scenario from bytes and asserts an invariant.
//!
//! The same functions run over the seed corpora and over random bytes in the ordinary tests.

mod audited;
mod bad_controller;
mod catalog;
mod collective;
mod cqe_stream;
mod entries;
mod ext4;
mod gpt;
mod guest_memory;
mod hostile_controller;
mod hostile_driver;
mod kv_messages;
mod kv_pages;
mod manifest;
mod pages;
mod prp_round_trip;
mod registers;
mod rows;
mod search_index;
mod sgl_round_trip;
mod shared_queue;
mod trace_decoder;
mod vfio_answers;
mod vfio_user_message;

pub use catalog::{catalog, gguf};
pub use collective::collective;
pub use cqe_stream::cqe_stream;
pub use ext4::ext4;
pub use gpt::gpt;
pub use guest_memory::guest_memory;
pub use hostile_controller::hostile_controller;
pub use hostile_driver::hostile_driver;
pub use kv_messages::kv_messages;
pub use kv_pages::kv_pages;
pub use manifest::manifest;
pub use pages::{device_string, identify_log_pages};
pub use prp_round_trip::prp_round_trip;
pub use registers::registers;
pub use rows::rows;
pub use search_index::search_index;
pub use sgl_round_trip::sgl_round_trip;
pub use shared_queue::shared_queue;
pub use trace_decoder::trace_decoder;
pub use vfio_answers::vfio_answers;
pub use vfio_user_message::vfio_user_message;

/// Function of a target, which gets the fuzzer's bytes.
pub type Target = fn(&[u8]);

/// Every target, by its name in fuzz/Cargo.toml.
pub const TARGETS: [(&str, Target); 23] = [
    ("prp_round_trip", prp_round_trip),
    ("cqe_stream", cqe_stream),
    ("hostile_driver", hostile_driver),
    ("identify_log_pages", identify_log_pages),
    ("device_string", device_string),
    ("vfio_user_message", vfio_user_message),
    ("guest_memory", guest_memory),
    ("vfio_answers", vfio_answers),
    ("hostile_controller", hostile_controller),
    ("shared_queue", shared_queue),
    ("collective", collective),
    ("sgl_round_trip", sgl_round_trip),
    ("registers", registers),
    ("trace_decoder", trace_decoder),
    ("catalog", catalog),
    ("gguf", gguf),
    ("rows", rows),
    ("search_index", search_index),
    ("ext4", ext4),
    ("gpt", gpt),
    ("manifest", manifest),
    ("kv_pages", kv_pages),
    ("kv_messages", kv_messages),
];

/// Returns whether the auditor watches this input: one in eight, for targets where it would take too much of the
/// fuzzer's time.
fn is_audited(bytes: &[u8]) -> bool {
    let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    sum.is_multiple_of(8)
}

/// Takes numbers out of the fuzzer's bytes; zeros when they are used up.
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// Makes an input of all `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Returns whether the bytes are used up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes up to `len` bytes.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.take(N);
        std::array::from_fn(|index| taken.get(index).copied().unwrap_or(0))
    }

    /// Returns the next byte.
    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Returns the next two bytes.
    pub fn half(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Returns the next four bytes.
    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Returns the next eight bytes.
    pub fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}
